"""Print the GPU memory that one image needs with every model of the catalogue, and the cards that it fits.

Everything is computed from shapes: the weights of the network that draws, in 16 bits or with blocks of 8 bits, and the
working memory of one image with guidance.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ...model_loaders.catalogue import hub
from ...networks.eight_bits import INT8
from ...networks.mar import MARModel
from ...networks.ops import quantize
from ...reports.table import markdown
from ...runs.loading import published_blocks
from ...runs.memory import blocks as block_memory
from ...runs.memory import mar as mar_memory
from ...runs.memory import tokens as token_memory
from ...runs.memory import total
from ...samplers.blocks.settings import BlockSettings
from ...samplers.conditioning import Condition, PromptCondition
from ...samplers.mar.settings import MARSettings
from ...samplers.tokens.cache_slots import table_of
from ...samplers.tokens.par import PARSettings
from ...samplers.tokens.settings import LlamaGenSettings
from .outlines import SEMANTIC_SIDE, outlined

# Memory of the cards, GiB, of which the driver, PyTorch and a desktop take about one.
CARDS = (8, 12, 16, 24)
TAKEN = 1.0
GIB = 1 << 30
# Families of networks that draw an image, or write the codes of one.
DRAWING = ("mar", "llamagen", "dtok", "tar", "hybrid", "janus", "bitdance")
# A guidance scale at which the null branch is evaluated too; the memory is the same for all of these.
GUIDED = 2.0
# Rows of a prompt: those of the longest text that LlamaGen was trained with.
PROMPT_ROWS = 120


@dataclass(frozen=True)
class Need:
    """Bytes of a generation of one image."""

    weights: int
    working: int

    @property
    def total(self) -> int:
        """All bytes at once."""
        return self.weights + self.working

    def fits(self, card: int) -> bool:
        """Whether it fits a card of so many GiB."""
        return self.total + TAKEN * GIB <= card * GIB


def need(entry: hub.Entry, eight: bool) -> Need:
    """What a generation of one image of an entry needs.

    Args:
        entry: of a family in :data:`DRAWING`.
        eight: whether the blocks have 8 bits; all weights have 16 otherwise.
    """
    if entry.family == "hybrid":
        return _hybrid(entry, eight)
    if entry.family == "bitdance":
        return _bitdance(entry, eight)

    model: Any = outlined(entry).model
    net = model.net
    if eight:
        quantize(net, INT8)

    weights = sum(parameter.nbytes for parameter in net.parameters())
    if isinstance(model, MARModel):
        bytes_by_stage = mar_memory.estimate(model, Condition((1,), ("",), ""), MARSettings())
        return Need(weights, total(bytes_by_stage) - weights)

    scale = 1.0 if entry.family == "tar" else GUIDED  # Tar's language model has no guidance
    settings = PARSettings(cfg=scale) if net.config.special else LlamaGenSettings(cfg=scale)
    prefix = _prefix(entry)
    cells = net.config.regions
    slots = prefix + table_of(settings.schedule(model), one_by_one=True).slots
    rows = max(prefix, token_memory.FED * cells)
    working = token_memory.decoding_bytes(model, 1, settings, slots=slots, cells=cells, rows=rows)
    return Need(weights, int(working))


def _hybrid(entry: hub.Entry, eight: bool) -> Need:
    """Of a Harmon or UniPic."""
    model: Any = outlined(entry).model
    if eight:
        quantize(model.hybrid, INT8)

    weights = sum(model.weights().values())
    bytes_by_stage = mar_memory.estimate(model, PromptCondition(("word " * PROMPT_ROWS,)), MARSettings())
    return Need(weights, total(bytes_by_stage) - weights)


def _bitdance(entry: hub.Entry, eight: bool) -> Need:
    """Of a BitDance, at the size that it draws if nothing else is asked."""
    model: Any = outlined(entry).model
    if eight:
        quantize(model.net, INT8)

    condition: Condition | PromptCondition = Condition((1,), ("",), "")
    if model.condition == PromptCondition.kind:
        condition = PromptCondition(("word " * PROMPT_ROWS,))

    settings = BlockSettings(**published_blocks(model))
    bytes_by_stage = block_memory.estimate(model, condition, settings)
    weights = sum(parameter.nbytes for parameter in model.net.parameters())
    return Need(weights, total(bytes_by_stage) - weights)


def _prefix(entry: hub.Entry) -> int:
    """Rows of the condition of a token model."""
    if entry.family == "dtok":
        return SEMANTIC_SIDE**2

    return PROMPT_ROWS if entry.family in ("tar", "janus") or entry.network.endswith("-T2I") else 1


def drawing_entries() -> list[hub.Entry]:
    """The downloads of the catalogue with a network that draws."""
    return [entry for family in DRAWING for entry in hub.entries(family) if entry.repo]


def row(entry: hub.Entry) -> list[str]:
    """An entry's row of the table: all memory in both precisions, and the smallest card for each."""
    cells = [entry.id]
    for eight in (False, True):
        needed = need(entry, eight)
        cells += [f"{needed.total / 1e9:.2f}", smallest_card(needed)]

    return cells


def smallest_card(needed: Need) -> str:
    """The smallest of the cards that a generation fits, in GB."""
    for card in CARDS:
        if needed.fits(card):
            return str(card)

    return "none"


def table() -> str:
    """The table as Markdown."""
    head = ["model", "bf16, GB", "card, GB", "8 bits, GB", "card, GB"]
    return markdown([head, *(row(entry) for entry in drawing_entries())], markup=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    print(table())
    return 0
