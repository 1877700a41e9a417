"""Print the GPU memory that one image needs with every model of the catalogue, and the cards that it fits.

Everything is computed from shapes: the weights of the network that draws, in 16 bits or with quantised blocks, and the
working memory of one image with guidance.
"""

from __future__ import annotations

import argparse

from ...model_loaders.catalogue import hub
from ...reports.table import markdown
from ...runs.memory.fitting import CARDS, DRAWING, DTYPES, Need, dtypes_for, need


def drawing_entries() -> list[hub.Entry]:
    """The downloads of the catalogue with a network that draws."""
    return [entry for kind in DRAWING for entry in hub.entries(kind) if entry.repo]


def row(entry: hub.Entry) -> list[str]:
    """An entry's row of the table: all memory in every dtype, and the smallest card for each."""
    cells = [entry.id]
    for dtype in DTYPES:
        if dtype not in dtypes_for(entry):
            cells += ["", ""]
            continue
        needed = need(entry, dtype)
        cells += [f"{needed.total / 1e9:.2f}", smallest_card(needed)]

    return cells


def smallest_card(needed: Need) -> str:
    """The smallest of the cards that a generation fits, in GB."""
    for card in CARDS:
        if needed.fits(card.memory):
            return f"{card.memory:g}"

    return "none"


def table() -> str:
    """The table as Markdown."""
    head = ["model", *(cell for dtype in DTYPES for cell in (f"{dtype}, GB", "card, GB"))]
    return markdown([head, *(row(entry) for entry in drawing_entries())], markup=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    print(table())
    return 0
