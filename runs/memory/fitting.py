"""The GPU memory that one image of a published model needs, and about how long it takes: from shapes, before any
download.

The seconds are computed, not measured. A pass reads the weights of the blocks and the KV cache at a share of the GPU's
memory bandwidth, and everything else takes a fixed time for every block. What does not fit on the GPU is copied from
system memory in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...model_loaders.catalogue import hub
from ...model_loaders.kinds import KINDS, dtypes_of
from ...networks.llama import cache_bytes
from ...networks.ops import quantize
from ...networks.quantized import INT4, INT4_SMALL, INT8, QUANTISED
from ...samplers.conditioning import ClassCondition, FeatureCondition, PromptCondition
from ...samplers.tokens.cache_slots import serial_slots
from ...samplers.tokens.par import PARSettings
from ...samplers.tokens.settings import LlamaGenSettings
from ..loading import LANGUAGE
from ..outlines import SEMANTIC_SIDE, outlined
from ..registry import FAMILIES, family_of_files, plain_sampler
from . import tokens as token_memory
from . import total

# GiB of a GPU that the driver, PyTorch and a desktop take.
TAKEN = 1.0
GIB = 1 << 30
# Kinds of files of networks that draw an image, or write the codes of one.
DRAWING = (*(family.files for family in FAMILIES.values()), LANGUAGE)
# dtypes that are compared.
DTYPES = ("bf16", INT8, INT4, INT4_SMALL)
# A guidance scale at which the null branch is evaluated too; the memory is the same for all of these.
GUIDED = 2.0
# Rows of a prompt: those of the longest text that LlamaGen was trained with.
PROMPT_ROWS = 120
# Rows of other conditions.
_ROWS = {ClassCondition.kind: 1, FeatureCondition.kind: SEMANTIC_SIDE**2}


@dataclass(frozen=True)
class Card:
    """A widespread GPU with a certain memory."""

    name: str
    memory: float  # GB
    rate: float  # bytes a second of its memory
    bus: float  # bytes per second from system memory


CARDS = (
    Card("RTX 3060 Laptop", 6, 336e9, 12e9),
    Card("RTX 4060", 8, 272e9, 12e9),
    Card("RTX 3060", 12, 360e9, 24e9),
    Card("RTX 4060 Ti", 16, 288e9, 12e9),
    Card("RTX 4090", 24, 1008e9, 24e9),
)
# Share of the memory rate that products of few rows reach, by bits of a weight. Assumed from what gpt-fast states for
# an A100, whose rate is higher: 0.69, 0.52 and 0.42.
_SHARES = {"bf16": 0.85, INT8: 0.75, INT4: 0.75, INT4_SMALL: 0.75}
# Seconds of a block beside its reading: Janus-Pro-7B's 576 passes of 30 blocks took 3.34 s in bf16 on an H200, of which
# reading 12.46 GB a pass, at 0.69 of 4.8 TB/s, is a part.
BLOCK_SECONDS = 68e-6


@dataclass(frozen=True)
class Need:
    """Bytes of a generation of one image."""

    weights: int
    working: int

    @property
    def total(self) -> int:
        """All bytes at once."""
        return self.weights + self.working

    def fits(self, card: float) -> bool:
        """Whether it fits on a GPU with ``memory`` GiB."""
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
    slots = prefix + serial_slots(settings.schedule(model)).count
    rows = max(prefix, token_memory.FED * cells)
    working = token_memory.decoding_bytes(model, 1, scale > 1, slots=slots, cells=cells, rows=rows)
    return Need(weights, int(working))


def _condition(model: Any) -> ClassCondition | PromptCondition:
    """A condition of one image, of the longest prompt."""
    if model.condition == PromptCondition.kind:
        return PromptCondition(("word " * PROMPT_ROWS,))
    return ClassCondition((1,), ("",), "")


def dtypes_for(entry: hub.Entry) -> tuple[str, ...]:
    """Those of the compared dtypes that an entry has."""
    return tuple(dtype for dtype in DTYPES if dtype in dtypes_of(KINDS[entry.family]))


def card_of(memory: float) -> Card:
    """The largest of the cards with no more memory than this many GB, or the smallest, with that memory."""
    known = max((card for card in CARDS if card.memory <= memory), default=CARDS[0], key=lambda card: card.memory)
    return Card(known.name, memory, known.rate, known.bus)


def seconds(entry: hub.Entry, dtype: str, card: Card) -> float | None:
    """About how many seconds an image takes on a GPU; None where products decide, not memory."""
    family = family_of_files(entry.family)
    if family is not None and not family.codes:
        return None

    model: Any = outlined(entry).model
    net = model.net if family is None else family.network(model)
    if dtype in QUANTISED:
        quantize(net, dtype)
    blocks = sum(weight.nbytes for weight in net.layers.parameters())
    branches = 1 if family is None else 2
    cache = cache_bytes(model.net, branches * model.tokens) / 2  # half of it, on average
    reading = (blocks + cache) / (card.rate * _SHARES[dtype])

    over = need(entry, dtype).total + TAKEN * GIB - card.memory * GIB
    return float(model.tokens * (reading + len(net.layers) * BLOCK_SECONDS + max(0.0, over) / card.bus))
