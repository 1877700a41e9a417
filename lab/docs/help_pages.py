"""Write *Inputs* and *Outputs* of the nodes' help pages, and docs/settings.md.

Every input is worded once: its tooltip, and the longer text beside it. A setting has both in its field
(``samplers/settings.py``), other inputs and outputs in their node, or in ``nodes/schema.py`` if many nodes have them.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ...runs.registry import first_names
from ...samplers.settings import Knob, default_or_full_size, knobs, shown
from ...samplers.tokens.tar import TarPromptSettings
from .blocks import with_block
from .translate import SYMBOL, node_classes

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "web" / "docs"
SETTINGS = ROOT / "docs" / "settings.md"
COLUMNS = 140
HERE = re.compile(r" The help page explains [^.]+\.")  # what a tooltip says of this page
# A text of this many words or more stands on one page only.
LONG = 18
# Sockets have a kind of their own, as opposed to widgets.
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


# ------------------------------------------------------------------------------------------------ help pages


def page(node: Any, text: str) -> str:
    """The help page of a node with its inputs and outputs written again."""
    about = node.define_schema()
    text = with_block(text, "inputs", inputs(node, about))
    return with_block(text, "outputs", outputs(node, about))


def inputs(node: Any, about: Any) -> str:
    """The inputs of a node: sockets, widgets, advanced widgets, optional sockets."""
    names = [part.id for part in about.inputs]
    groups: dict[str, list[str]] = {"": [], "Advanced:": [], "Optional:": []}
    for name, part in one_of_each(about.inputs):
        is_socket = part.kind not in WIDGETS
        group = "Optional:" if is_socket and part.optional else "Advanced:" if part.about.get("advanced") else ""
        groups[group].append(item(name, part, more_of(node, part, about.display_name), names))

    blocks: list[str] = []
    for title, items in groups.items():
        if items:
            blocks.append("\n".join([title, *items] if title else items))
    return "\n\n".join(blocks)


def outputs(node: Any, about: Any) -> str:
    """The outputs of a node."""
    names = [part.id for part in about.inputs]
    return "\n".join(item(part.id, part, more_of_output(node, part), names) for part in about.outputs)


def more_of(node: Any, part: Any, title: str = "") -> str:
    """The longer text of an input: that of many nodes, that of the setting or socket, and what its node adds.

    A long text stands on the first page that has it; other pages name that page. ``title``: of the node, "" for all
    of the text.
    """
    parts = []
    other_pages: dict[str, None] = {}
    for text in longer_texts(node, part):
        home = homes()[part.id, text] if title else ""
        if home != title and len(text.split()) >= LONG:
            other_pages[home] = None
        else:
            parts.append(text)

    if other_pages:
        page = "page" if len(other_pages) == 1 else "pages"
        parts.append(f"See also the help {page} of {' and '.join(other_pages)}.")

    return " ".join(dict.fromkeys(parts))


def longer_texts(node: Any, part: Any) -> list[str]:
    """The pieces of the longer text of an input."""
    texts = (of_many().get(part.id, ""), getattr(part, "more", ""), getattr(node, "more", {}).get(part.id, ""))
    return [text for text in texts if text]


@cache
def homes() -> dict[tuple[str, str], str]:
    """Name of an input and piece of its longer text to the title of the first node that has it."""
    found: dict[tuple[str, str], str] = {}
    # A sampler's page before that of a prompt.
    abouts = [(node, node.define_schema()) for node in node_classes()]
    for node, about in sorted(abouts, key=lambda one: one[1].category != "FastAR/sample"):
        for part in about.inputs:
            for text in longer_texts(node, part):
                found.setdefault((part.id, text), about.display_name)
    return found


def of_many() -> dict[str, str]:
    """The longer texts of inputs that many nodes have."""
    schema = import_module("...nodes.schema", __package__)  # which imports ComfyUI, or the stand-in for it
    return dict(schema.MORE_OF_MANY)


def more_of_output(node: Any, part: Any) -> str:
    """The longer text of a node's output."""
    return str(getattr(node, "more_of_outputs", {}).get(part.id, ""))


def one_of_each(parts: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The inputs with their names; of image_1 to image_8 the first one, as "image_1 to image_8"."""
    last: dict[str, int] = {}
    for part in parts:
        stem, _, number = part.id.rpartition("_")
        if stem and number.isdigit():
            last[stem] = int(number)

    for part in parts:
        stem, _, number = part.id.rpartition("_")
        if stem not in last or not number.isdigit():
            yield part.id, part
        elif number == "1":
            yield f"{part.id} to {stem}_{last[stem]}", part


def item(name: str, part: Any, more: str, inputs: Iterable[str]) -> str:
    """An entry of the list: name, symbol, tooltip and longer text, in lines of at most ``COLUMNS`` characters."""
    tooltip = part.about["tooltip"]
    symbol = SYMBOL.search(tooltip)
    tooltip = HERE.sub("", SYMBOL.sub("", tooltip))

    marked = emphasised(tooltip, [*(name for name in inputs if "_" in name), *words_of(part)])
    own = f" (*{symbol[1]}*)" if symbol else ""
    text = f"- **{name}**{own}: {marked}"
    if more:
        # A list, or a paragraph that continues the tooltip.
        text += more if more.startswith("\n") else f" {more}"
    return "\n".join(wrapped(line) for line in text.split("\n"))


def words_of(part: Any) -> list[str]:
    """The options of a menu that a text may mention: words, but not names of files or classes."""
    options = part.about.get("options") or ()
    return [option for option in options if re.fullmatch(r"[a-z][\w -]+", str(option))] if len(options) < 20 else []


def emphasised(text: str, words: Iterable[str]) -> str:
    """The text with these words in italics."""
    longest_first = sorted({word for word in words if word}, key=len, reverse=True)
    if not longest_first:
        return text
    return re.sub(rf"(?<![\w.-])({'|'.join(map(re.escape, longest_first))})(?![\w-])", r"*\1*", text)


def wrapped(line: str) -> str:
    """A line of Markdown in several; those after the first are indented as its text."""
    text = line.lstrip(" -")
    start = line[: len(line) - len(text)]
    indent = " " * len(start)
    lines: list[str] = []
    current = start.rstrip(" ")
    for word in text.split(" "):
        joined = f"{current} {word}" if current else f"{start}{word}"
        if len(joined) > COLUMNS and current.strip(" -"):
            lines.append(current)
            joined = f"{indent}{word}"
        current = joined
    return "\n".join([*lines, current])


# ------------------------------------------------------------------------------------------------ the table of settings


@dataclass(frozen=True)
class Row:
    """A setting of some samplers."""

    name: str
    default: str
    range: str
    text: str


def settings_page() -> str:
    """The text of docs/settings.md."""
    samplers: dict[Row, list[str]] = {}
    kinds = {entry.title: entry.settings for name, entry in first_names().items() if "+" not in name}
    for title, kind in {**kinds, "Tar Prompt": TarPromptSettings}.items():
        for name, (default, about) in knobs(kind).items():
            marked = emphasised(about.help, [*(other for other in knobs(kind) if "_" in other), *about.choices])
            row = Row(name, default_in_words(name, default, about), range_in_words(default, about), marked)
            samplers.setdefault(row, []).append(title)

    lines = [
        "# Settings",
        "",
        "This table lists all settings of all samplers. They have the same names on the nodes, on the command line "
        "(`--set name=value`) and in Python. The help pages of the nodes say more. A default such as "
        "*the model's, 4* means: each model has its own default, and 4 is usual for full-size models. The default "
        "*diffusion_steps* means the value of the setting *diffusion_steps*.",
        "`python -m fastar_nodes.lab help-pages` writes this table.",
        "",
        "| setting | samplers | default | range | what it does |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in sorted(samplers, key=lambda row: row.name):
        lines.append(f"| *{row.name}* | {', '.join(samplers[row])} | {row.default} | {row.range} | {row.text} |")
    return "\n".join(lines) + "\n"


def default_in_words(name: str, default: Any, about: Knob) -> str:
    """The default of a setting; of a model's own value that of a full-size model."""
    if name == "diffusion_steps_end":
        return "*diffusion_steps*"  # they do not fall

    value = default_or_full_size(default, about)
    words = {True: "on", False: "off"}[value] if isinstance(value, bool) else shown(value)
    return f"the model's, {words}" if default is None else words


def range_in_words(default: Any, about: Knob) -> str:
    """What a setting may be."""
    if about.choices:
        return ", ".join(about.choices)
    if isinstance(default_or_full_size(default, about), bool):
        return "on, off"
    return f"{about.low:g} to {about.high:g}"


# ------------------------------------------------------------------------------------------------ command


def written() -> dict[Path, str]:
    """Every file that the command writes, with its text."""
    texts = {SETTINGS: settings_page()}
    for node in node_classes():
        path = PAGES / f"{node.define_schema().node_id}.md"
        texts[path] = page(node, path.read_text(encoding="utf-8-sig"))
    return texts


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Write the files."""
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
    return 0
