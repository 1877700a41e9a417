"""Writes locales/<language>/nodeDefs.json, which ComfyUI reads, from the schemas and the tables in tools/translations.

A table maps an English text to its translation. Names, descriptions and tooltips that it lacks, because they are new or were changed, stay
English. Names of widgets are English everywhere: they are the names in the papers and on the command line.

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
    """Translates texts with one table; ``symbols`` stand in front of tooltips and stay, ``suffixes`` are sentences
    added to them; ``missing``: texts that the table lacks."""

    def __init__(self, table: dict[str, str], symbols: set[str], suffixes: tuple[str, ...]):
        self.table, self.missing = table, set[str]()
        self._symbols, self._suffixes = sorted(symbols, key=len, reverse=True), suffixes

    def text(self, english: str) -> str | None:
        """The translation; None if there is none."""
        suffix = next((s for s in self._suffixes if english.endswith(s)), "")
        plain = english.removesuffix(suffix)
        symbol = next((f"{s}: " for s in self._symbols if plain.startswith(f"{s}: ")), "")
        plain = plain.removeprefix(symbol)
        number = NUMBERED.search(plain)
        plain = NUMBERED.sub("{n}", plain)
        needed = [plain, *([suffix.strip()] if suffix else [])]
        if lacking := [text for text in needed if text not in self.table]:
            self.missing.update(lacking)
            return None
        return symbol + "".join(self.table[text] for text in needed).replace("{n}", number[0] if number else "")

    def all(self, value: dict[str, Any]) -> dict[str, Any]:
        """The texts of a dictionary that have a translation."""
        out = {k: self.all(v) if isinstance(v, dict) else self.text(v) for k, v in value.items()}
        return {k: v for k, v in out.items() if v}


def generated(language: str) -> tuple[str, set[str]]:
    """The text of a language's nodeDefs.json, and the texts that have no translation."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "nodes")]
    import_module("fake_comfy").install()
    classes = import_module("test_schemas").CLASSES.values()
    from ..nodes import conditioning, schema
    from ..samplers.mar.settings import CacheSettings
    from ..samplers.registry import SAMPLERS
    from ..samplers.settings import knobs
    from ..samplers.tokens.settings import TarPromptSettings

    kinds = {entry.settings for entry in SAMPLERS.values()}
    kinds |= {CacheSettings, TarPromptSettings, conditioning.ImageToCodesSettings}
    symbols = {about.symbol for kind in kinds for _, about in knobs(kind).values()} - {""}
    suffixes = (f" -1 is auto: {schema._SOURCES}", f" auto: {schema._SOURCES}")
    table = json.loads((TABLES / f"{language}.json").read_text(encoding="utf-8"))
    translator = Translator(table, symbols, suffixes)
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
