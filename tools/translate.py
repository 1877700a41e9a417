"""Writes locales/<language>/nodeDefs.json, which ComfyUI reads, from the schemas and the tables in tools/translations.

A table maps an English text to its translation. Names, descriptions and tooltips
that it lacks, because they are new or were changed, stay English. Names of widgets
are English everywhere: they are the names in the papers and on the command line.

Run ``python -m fastar_nodes.tools.translate`` after a change of texts; it prints what is missing.
"""

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLES, LANGUAGES = ROOT / "tools" / "translations", ("zh", "ja")
NUMBERED = re.compile(r"(?<=image_)\d|(?<=batch )\d(?=;)")


def texts(nodes: list[Any]) -> dict[str, dict[str, Any]]:
    """Node id to its English texts in the form that ComfyUI reads."""
    out: dict[str, dict[str, Any]] = {}
    for about in (node.define_schema() for node in nodes):
        inputs = {i.id: {"tooltip": i.about["tooltip"]} for i in about.inputs}
        outputs = {str(k): {"tooltip": o.about["tooltip"]} for k, o in enumerate(about.outputs)}
        out[about.node_id] = {"display_name": about.display_name, "description": about.description}
        out[about.node_id] |= {"inputs": inputs, "outputs": outputs}

    return out


class Translator:
    """Translates texts with one table; ``symbols`` stand in front
    of tooltips and stay; ``missing``: texts that the table lacks.
    """

    def __init__(self, table: dict[str, str], symbols: set[str]):
        self.table, self.missing = table, set[str]()
        self._symbols = sorted(symbols, key=len, reverse=True)

    def text(self, english: str) -> str | None:
        """The translation; None if there is none."""
        symbol = next((f"{s}: " for s in self._symbols if english.startswith(f"{s}: ")), "")
        plain = english.removeprefix(symbol)
        number = NUMBERED.search(plain)
        plain = NUMBERED.sub("{n}", plain)
        if plain not in self.table:
            self.missing.add(plain)
            return None

        return symbol + self.table[plain].replace("{n}", number[0] if number else "")

    def all(self, value: dict[str, Any]) -> dict[str, Any]:
        """The texts of a dictionary that have a translation."""
        out = {k: self.all(v) if isinstance(v, dict) else self.text(v) for k, v in value.items()}
        return {k: v for k, v in out.items() if v}


def generated(language: str) -> tuple[str, set[str]]:
    """The text of a language's nodeDefs.json, and the texts that have no translation."""
    sys.path[:0] = [str(ROOT / "tests" / "lib"), str(ROOT / "tests" / "nodes")]
    import_module("fake_comfy").install()
    classes = import_module("test_schemas").CLASSES.values()
    from ..nodes import conditioning
    from ..samplers.mar.settings import CacheSettings
    from ..samplers.registry import SAMPLERS
    from ..samplers.settings import knobs
    from ..samplers.tokens.settings import TarPromptSettings

    kinds = {entry.settings for entry in SAMPLERS.values()}
    kinds |= {CacheSettings, TarPromptSettings, conditioning.ImageToCodesSettings}
    symbols = {about.symbol for kind in kinds for _, about in knobs(kind).values()} - {""}
    table = json.loads((TABLES / f"{language}.json").read_text(encoding="utf-8"))
    translator = Translator(table, symbols)
    nodes = translator.all(texts(list(classes))).items()

    # One line a node, without spaces: the archive's size is limited.
    lines = [f'"{n}":{json.dumps(about, ensure_ascii=False, separators=(",", ":"))}' for n, about in nodes]

    return "{\n" + ",\n".join(lines) + "\n}\n", translator.missing


def main() -> None:
    """Write the files."""
    for language in LANGUAGES:
        text, missing = generated(language)
        (ROOT / "locales" / language / "nodeDefs.json").write_text(text, encoding="utf-8")
        print(f"{language}: {len(missing)} texts stay English", *sorted(missing), sep="\n  ")


if __name__ == "__main__":
    main()
