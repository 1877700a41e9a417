"""Markdown tables and the figures in their cells."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(rows: Sequence[Sequence[str]], empty: bool = True) -> str:
    """Rows of cells, the head first, as a Markdown table; ``empty``: whether columns without any content are kept."""
    kept = [i for i in range(len(rows[0])) if empty or any(row[i] for row in rows[1:])]
    lines = [[row[i] for i in kept] for row in rows]
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, width, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *text[1:]])


def figure(value: float | None, form: str, unit: str = "", scale: float = 1) -> str:
    """A number, multiplied by ``scale``, as text with its unit; "" for None."""
    return "" if value is None else f"{value * scale:{form}}{unit}"
