"""Markdown tables, the figures in their cells, and text of others in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import LONGEST, printable

# What has a meaning in Markdown or HTML wherever it stands.
_SPECIAL = re.compile(r"[&<>|`\\\[\]*~]")
# Underscores at the edge of a word emphasise; those within, as in draft_length, do not.
_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
# Addresses become links without any markup: the scheme, www. and the sign of an e-mail address.
_ADDRESS = re.compile(r":(?=//)|(?<=\bwww)\.|@", re.IGNORECASE)
# Headings, lists and rules, at the beginning of a line.
_BLOCK = re.compile(r"^(?:#(?=#*(?:\s|$))|[-+=](?=[-+=]*(?:\s|$)))")


def literal(text: str, most: int = LONGEST) -> str:
    """Text of others, such as a label or a name from a stranger's file, so that Markdown and HTML show its characters.

    It adds no image, link, tag, code, cell or line. What has a meaning becomes a character reference (``&#124;``),
    because the editor of ComfyUI shows the text on a node as HTML or, with Nodes 2.0, as Markdown. Usual names stay as
    they are. Control characters become spaces; a text over ``most`` characters is shortened.
    """
    text = printable(text, most)

    for pattern in (_SPECIAL, _UNDERSCORE, _ADDRESS, _BLOCK):
        text = pattern.sub(_reference, text)

    return text


def _reference(found: re.Match[str]) -> str:
    """The character reference of a character."""
    return f"&#{ord(found[0])};"


def markdown(rows: Sequence[Sequence[str]], empty: bool = True, markup: bool = False) -> str:
    """Rows of cells, the head first, as a Markdown table.

    Args:
        empty: whether columns without any content are kept.
        markup: whether cells hold Markdown of our own; otherwise they are shown as they are, see :func:`literal`.
    """
    table = [list(row) for row in rows] if empty else _without_empty(rows)
    if not markup:
        table = [[literal(cell) for cell in row] for row in table]

    lines = ["| " + " | ".join(cells) + " |" for cells in _aligned(table)]

    # The rule between the head and the rows.
    lines.insert(1, "|" + "|".join("-" * (len(cell) + 2) for cell in _aligned(table)[0]) + "|")

    return "\n".join(lines)


def plain(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells, the head first, as lines of text with aligned columns; empty columns are omitted."""
    return ["  ".join(cells).rstrip() for cells in _aligned(_without_empty(rows))]


def _without_empty(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows without the columns that have nothing below the head."""
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return [[row[i] for i in kept] for row in rows]


def _aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows, each cell padded with spaces to the width of its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]


def figure(value: float | None, form: str, unit: str = "", scale: float = 1) -> str:
    """A number, multiplied by ``scale``, as text with its unit; "" for None."""
    return "" if value is None else f"{value * scale:{form}}{unit}"


def percent(share: float | None, decimals: int = 0) -> str:
    """A share of 0 to 1 in percent; "" for None. Only all is 100 %, and only nothing is 0 %."""
    if share is None:
        return ""

    text = f"{100 * share:.{decimals}f} %"
    least = 10.0**-decimals
    if share < 1 and text == f"{100:.{decimals}f} %":
        return f"{100 - least:.{decimals}f} %"
    if share > 0 and text == f"{0:.{decimals}f} %":
        return f"{least:.{decimals}f} %"

    return text
