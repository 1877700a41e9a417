"""Print the GPU memory that one image needs with every model of the catalogue, and the cards that it fits.

Everything is computed from shapes: the weights of the network that draws, in 16 bits or with quantised blocks, and the
working memory of one image with guidance.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ...model_loaders.catalogue import hub
from ...model_loaders.kinds import KINDS, dtypes_of
from ...networks.ops import quantize
from ...networks.quantized import INT4, INT4_SMALL, INT8, QUANTISED
from ...reports.table import markdown
from ...runs.loading import LANGUAGE
from ...runs.memory import tokens as token_memory
from ...runs.memory import total
from ...runs.registry import FAMILIES, family_of_files, plain_sampler
from ...samplers.conditioning import Condition, FeatureCondition, PromptCondition
from ...samplers.tokens.cache_slots import table_of
from ...samplers.tokens.par import PARSettings
from ...samplers.tokens.settings import LlamaGenSettings
from .outlines import SEMANTIC_SIDE, outlined

# dtypes of the table.
DTYPES = ("bf16", INT8, INT4, INT4_SMALL)
# Memory of the cards, GiB, of which the driver, PyTorch and a desktop take about one.
CARDS = (6, 8, 12, 16, 24)
TAKEN = 1.0
GIB = 1 << 30
# Kinds of files of networks that draw an image, or write the codes of one.
DRAWING = (*(family.files for family in FAMILIES.values()), LANGUAGE)
# A guidance scale at which the null branch is evaluated too; the memory is the same for all of these.
GUIDED = 2.0
# Rows of a prompt: those of the longest text that LlamaGen was trained with.
PROMPT_ROWS = 120
# Rows of other conditions.
_ROWS = {Condition.kind: 1, FeatureCondition.kind: SEMANTIC_SIDE**2}


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


def need(entry: hub.Entry, dtype: str) -> Need:
    """What a generation of one image of an entry needs.

    Args:
        entry: of a kind in :data:`DRAWING`.
        dtype: of the blocks, a key of :data:`.quantized.QUANTISED`; all weights have 16 bits otherwise.
    """
    ready = outlined(entry)
    model: Any = ready.model
    family = family_of_files(entry.family)  # None: Tar's language model
    net = model.net if family is None else family.network(model)
    if dtype in QUANTISED:
        quantize(net, dtype)
    weights = sum(parameter.nbytes for parameter in net.parameters())

    if family is not None and not family.codes:
        settings = plain_sampler(family).settings(**family.published(model))
        bytes_by_stage = family.memory(model, _condition(model), settings)
        return Need(weights, total(bytes_by_stage) - weights)

    scale = 1.0 if family is None else GUIDED  # Tar's language model has no guidance
    settings = PARSettings(cfg=scale) if net.config.special else LlamaGenSettings(cfg=scale)
    prefix = PROMPT_ROWS if family is None else _ROWS.get(model.condition, PROMPT_ROWS)
    cells = net.config.regions
    slots = prefix + table_of(settings.schedule(model), one_by_one=True).slots
    rows = max(prefix, token_memory.FED * cells)
    working = token_memory.decoding_bytes(model, 1, settings, slots=slots, cells=cells, rows=rows)
    return Need(weights, int(working))


def _condition(model: Any) -> Condition | PromptCondition:
    """A condition of one image, of the longest prompt."""
    if model.condition == PromptCondition.kind:
        return PromptCondition(("word " * PROMPT_ROWS,))
    return Condition((1,), ("",), "")


def drawing_entries() -> list[hub.Entry]:
    """The downloads of the catalogue with a network that draws."""
    return [entry for kind in DRAWING for entry in hub.entries(kind) if entry.repo]


def row(entry: hub.Entry) -> list[str]:
    """An entry's row of the table: all memory in every dtype, and the smallest card for each."""
    cells = [entry.id]
    for dtype in DTYPES:
        if dtype not in dtypes_of(KINDS[entry.family]):
            cells += ["", ""]
            continue
        needed = need(entry, dtype)
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
    head = ["model", *(cell for dtype in DTYPES for cell in (f"{dtype}, GB", "card, GB"))]
    return markdown([head, *(row(entry) for entry in drawing_entries())], markup=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    print(table())
    return 0
