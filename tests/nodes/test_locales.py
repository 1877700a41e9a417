"""Translations of node names, descriptions and tooltips: none is missing and none is of an earlier English text.

``tests/nodes/locales/<language>.json`` maps every English text to its translation; ``python tests/nodes/test_locales.py`` writes
``locales/<language>/nodeDefs.json`` and the help pages ``web/docs/<node>/<language>.md``, which ComfyUI reads, from the schemas and these
tables. Names of widgets stay English: they are the names in the papers, on the command line and in the help pages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    import conftest  # noqa: F401  the package under its name
    import fake_comfy

    fake_comfy.install()

from fastar_nodes.nodes import previous, schema
from fastar_nodes.samplers.registry import SAMPLERS
from fastar_nodes.samplers.settings import knobs
from fastar_nodes.samplers.tokens.settings import TarPromptSettings
from test_golden_schemas import MODULES

ROOT = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).with_name("locales")
LANGUAGES = ("zh", "ja")  # English is in the schemas
# Symbols in front of tooltips; they are the papers' and stay.
_KINDS = [*(e.settings for e in SAMPLERS.values()), TarPromptSettings]
SYMBOLS = sorted(
    {about.symbol for kind in _KINDS for _, about in knobs(kind).values() if about.symbol}, key=len, reverse=True
)
# What is added to tooltips of widgets with the value auto.
AUTOMATIC = (f" -1 is auto: {schema._SOURCES}", f" auto: {schema._SOURCES}")
# Of help pages: inputs, outputs, and where the rest is.
HEADINGS = {
    "zh": ("输入", "输出", "更多说明、提示和论文见英文页面 web/docs/{}.md（将界面语言切换为英语即可查看）。"),
    "ja": (
        "入力",
        "出力",
        "詳しい説明、ヒント、論文は英語のページ web/docs/{}.md にあります（表示言語を英語にすると開きます）。",
    ),
}
NUMBERED = re.compile(r"(?<=image_)\d|(?<=batch )\d(?=;)")


def load(language: str) -> dict[str, str]:
    """The table of a language."""
    return json.loads((TABLES / f"{language}.json").read_text(encoding="utf-8"))


def parts(text: str) -> tuple[str, str, str, str]:
    """A text as symbol, text with {n} for the number of a numbered input, that number, and what is added for auto."""
    suffix = next((s for s in AUTOMATIC if text.endswith(s)), "")
    text = text.removesuffix(suffix)
    symbol = next((f"{s}: " for s in SYMBOLS if text.startswith(f"{s}: ")), "")
    text = text.removeprefix(symbol)
    number = NUMBERED.search(text)
    return symbol, NUMBERED.sub("{n}", text), number[0] if number else "", suffix


def translate(text: str, table: dict[str, str]) -> str:
    """A text in another language.

    Raises:
        KeyError: it is not in the table.
    """
    if not text:
        return text
    symbol, plain, number, suffix = parts(text)
    return symbol + table[plain].replace("{n}", number) + (table[suffix.strip()] if suffix else "")


def texts() -> dict[str, dict[str, Any]]:
    """Node id to its English texts in the form that ComfyUI reads. Deprecated nodes are left out."""
    out: dict[str, dict[str, Any]] = {}
    for node in (node for module in MODULES if module is not previous for node in module.NODES):
        about = node.define_schema()
        out[about.node_id] = {
            "display_name": about.display_name,
            "description": about.description,
            "inputs": {i.id: {"tooltip": i.about["tooltip"]} for i in about.inputs if i.about.get("tooltip")},
            "outputs": {
                str(k): {"tooltip": o.about["tooltip"]} for k, o in enumerate(about.outputs) if o.about.get("tooltip")
            },
        }
    return out


def translated(value: Any, table: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: translated(inner, table) for name, inner in value.items()}
    return translate(value, table)


def used() -> set[str]:
    """All English texts that a table has to have."""
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        else:
            _, plain, _, suffix = parts(value)
            found.update(filter(None, (plain, suffix.strip())))

    walk(texts())
    return found


def help_page(node: str, about: dict[str, Any], language: str) -> str:
    """The translated help page of a node: title, description, picture, what inputs and outputs do."""
    inputs, outputs, more = HEADINGS[language]
    english = (ROOT / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    picture = re.search(r"!\[[^\]]*\](\(images/[^)]+\))", english)
    lines = [f"# {about['display_name']}", about["description"]]
    lines += [f"![{about['display_name']}]{picture[1]}"] if picture else []
    for heading, part in ((inputs, "inputs"), (outputs, "outputs")):
        named = about[part].items() if part == "inputs" else zip(_outputs(node), about[part].values(), strict=True)
        lines += [f"## {heading}", "\n".join(f"- **{name}**: {text['tooltip']}" for name, text in named)]
    return "\n\n".join([*lines, more.format(node)]) + "\n"


def _outputs(node: str) -> list[str]:
    """Names of a node's outputs that have a tooltip."""
    about = next(n.define_schema() for m in MODULES for n in m.NODES if n.define_schema().node_id == node)
    return [o.id for o in about.outputs if o.about.get("tooltip")]


def help_pages() -> dict[Path, str]:
    """Files of all translated help pages, and their text."""
    return {
        ROOT / "web" / "docs" / node / f"{language}.md": help_page(node, about, language)
        for language in HEADINGS
        for node, about in translated(texts(), load(language)).items()
    }


def _path(language: str) -> Path:
    return ROOT / "locales" / language / "nodeDefs.json"


def _json(value: dict[str, Any]) -> str:
    """One line a node, without spaces: the archive's size is limited."""
    nodes = (f'"{n}":{json.dumps(about, ensure_ascii=False, separators=(",", ":"))}' for n, about in value.items())
    return "{\n" + ",\n".join(nodes) + "\n}\n"


@pytest.mark.parametrize("language", LANGUAGES)
def test_none_is_missing_and_none_is_stale(language):
    table = load(language)
    assert used() - set(table) == set(), f"tests/nodes/locales/{language}.json lacks these texts"
    assert set(table) - used() == set(), f"tests/nodes/locales/{language}.json has texts that no node has"


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_files_are_written_from_the_tables(language):
    written = _path(language).read_text(encoding="utf-8")
    assert written == _json(translated(texts(), load(language))), "run python tests/nodes/test_locales.py"


def test_no_help_page_is_missing_and_none_is_stale():
    pages = help_pages()
    assert set((ROOT / "web" / "docs").glob("*/*.md")) == set(pages), "run python tests/nodes/test_locales.py"
    stale = [page.name for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
    assert not stale, "run python tests/nodes/test_locales.py"
    for page, text in pages.items():  # ComfyUI falls back to <node>.md
        assert page.stem in LANGUAGES and text.startswith("# ") and "## " in text
        assert all((ROOT / "web" / "docs" / name).is_file() for name in re.findall(r"\((images/[^)]+)\)", text))


@pytest.mark.parametrize(("language", "letters"), [("zh", r"[\u4e00-\u9fff]"), ("ja", r"[\u3040-\u30ff\u4e00-\u9fff]")])
def test_translations_are_in_their_language_and_keep_names_and_numbers(language, letters):
    for english, other in load(language).items():
        assert re.search(letters, other), f"{other!r} is not in {language}"
        # Names of settings and file names, which are typed as they are.
        for name in re.findall(r"\b[a-z]+_[a-z_]+\b|models/\w+|\.safetensors|config\.json|\{n\}", english):
            assert name in other, f"{other!r} lost {name}"


if __name__ == "__main__":
    for language in LANGUAGES:
        _path(language).parent.mkdir(parents=True, exist_ok=True)
        _path(language).write_text(_json(translated(texts(), load(language))), encoding="utf-8")
    for page, text in help_pages().items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")
