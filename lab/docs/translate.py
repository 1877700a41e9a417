"""Writes locales/<language>/nodeDefs.json and main.json, which ComfyUI reads, from the schemas and the tables in
lab/docs/translations.

A table has these parts:

- ``texts``: display names, descriptions and tooltips, English to translated.
- ``names``: labels of inputs and outputs by their name. Saved graphs, prompts and messages keep the name.
- ``categories``: the groups of the node menu.
- ``messages``: what the scripts in web/js say; web/js/words.js reads them.
- ``symbol``: how a tooltip mentions a paper's symbol.

The editor translates neither the titles of a pack's templates, nor the notes and titles in a graph.

A text that a table lacks stays English. Run the command after a change of texts: it prints what a table lacks, and
what nothing shows any more.
"""

import argparse
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "lab" / "docs" / "translations"
LANGUAGES = ("zh", "ja")
PACK = "fastar-nodes"  # the folder of the pack, by which the editor groups its templates

# The number in the name of an input such as image_2.
NUMBERED = re.compile(r"(?<=^image_)\d|(?<=^report_)\d")
SYMBOL = re.compile(r" \(([^()]+) in the paper\)$")


def texts(nodes: list[Any]) -> dict[str, dict[str, Any]]:
    """Node id to its English texts in the form that ComfyUI reads."""
    out: dict[str, dict[str, Any]] = {}
    for node in nodes:
        about = node.define_schema()
        inputs = {part.id: {"name": part.id, "tooltip": part.about["tooltip"]} for part in about.inputs}

        outputs: dict[str, Any] = {}
        for k, part in enumerate(about.outputs):
            outputs[str(k)] = {"name": part.about["display_name"], "tooltip": part.about["tooltip"]}

        out[about.node_id] = {
            "display_name": about.display_name,
            "description": about.description,
            "inputs": inputs,
            "outputs": outputs,
        }
    return out


class Translator:
    """Translates texts with one table."""

    def __init__(self, table: dict[str, Any]):
        self._table = table

    def text(self, english: str, part: str = "texts") -> str | None:
        """The translation in a part of the table; None if there is none."""
        symbol = SYMBOL.search(english)
        plain = SYMBOL.sub("", english)

        number = NUMBERED.search(plain)
        plain = NUMBERED.sub("{n}", plain)
        if plain not in self._table[part]:
            return None

        translated = self._table[part][plain]
        if number:
            translated = translated.replace("{n}", number[0])
        if symbol:
            translated += self._table["symbol"].replace("{symbol}", symbol[1])
        return translated

    def all(self, value: dict[str, Any]) -> dict[str, Any]:
        """The texts of a dictionary that have a translation. What is under ``name`` is a label."""
        out: dict[str, Any] = {}
        for key, entry in value.items():
            if isinstance(entry, dict):
                out[key] = self.all(entry)
            else:
                out[key] = self.text(entry, "names" if key == "name" else "texts")
        return {key: entry for key, entry in out.items() if entry}


def table_of(language: str) -> dict[str, Any]:
    """The table of a language."""
    return json.loads((TABLES / f"{language}.json").read_text(encoding="utf-8-sig"))


def node_classes() -> list[Any]:
    """All nodes of the pack, on a stand-in for ComfyUI."""
    sys.path[:0] = [str(ROOT / "tests" / "lib"), str(ROOT / "tests" / "nodes")]
    import_module("fake_comfy").install()
    return list(import_module("test_schemas").CLASSES.values())


def node_texts(language: str) -> str:
    """The text of a language's nodeDefs.json."""
    translator = Translator(table_of(language))
    nodes = translator.all(texts(node_classes()))

    # One line a node, without spaces: the archive's size is limited.
    lines: list[str] = []
    for node, about in nodes.items():
        lines.append(f'"{node}":{json.dumps(about, ensure_ascii=False, separators=(",", ":"))}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def other_texts(language: str) -> str:
    """The text of a language's main.json."""
    table = table_of(language)
    about = {
        "nodeCategories": table["categories"],
        "templateWorkflows": {"category": {PACK: "FastAR"}},
        "fastar": table["messages"],
    }
    return json.dumps(about, ensure_ascii=False, indent=1) + "\n"


def shown() -> dict[str, set[str]]:
    """All English texts that a table may translate, by its parts."""
    texts: set[str] = set()
    names: set[str] = set()
    categories: set[str] = set()
    for node in node_classes():
        about = node.define_schema()
        texts |= {about.display_name, about.description}
        categories |= set(about.category.split("/")[1:])
        for part in [*about.inputs, *about.outputs]:
            texts.add(NUMBERED.sub("{n}", SYMBOL.sub("", part.about["tooltip"])))
        names |= {NUMBERED.sub("{n}", part.id) for part in about.inputs}
        names |= {part.about["display_name"] for part in about.outputs}

    return {"texts": texts, "names": names, "categories": categories, "messages": messages()}


def messages() -> set[str]:
    """What the scripts of the editor say."""
    said: set[str] = set()
    for script in (ROOT / "web" / "js").glob("*.js"):
        text = script.read_text(encoding="utf-8-sig")
        said |= set(re.findall(r'\bsay\("([^"]+)"', text))
        for name in re.findall(r"\bsay\(([A-Z]+)\)", text):
            said |= set(re.findall(rf'const {name} = "([^"]+)"', text))
    return said


def differences(language: str) -> tuple[list[str], list[str]]:
    """What a language's table lacks, which stays English, and what it has that nothing shows any more."""
    table = table_of(language)
    missing: list[str] = []
    unused: list[str] = []
    for part, english in shown().items():
        missing += sorted(english - table[part].keys())
        unused += sorted(table[part].keys() - english)
    return missing, unused


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Write the files."""
    for language in LANGUAGES:
        folder = ROOT / "locales" / language
        (folder / "nodeDefs.json").write_text(node_texts(language), encoding="utf-8")
        (folder / "main.json").write_text(other_texts(language), encoding="utf-8")

        missing, unused = differences(language)
        print(f"{language}: {len(missing)} texts stay English", *missing, sep="\n  ")
        print(f"{language}: {len(unused)} texts are not shown any more", *unused, sep="\n  ")

    return 0
