"""Print what a generation of one image needs of a graphics card, for every model of the catalogue, and what fits.

``python -m fastar_nodes.bench.fits`` prints the table of docs/benchmarks/eight_bits.md. Everything is computed from
shapes: the weights of the network that draws, in 16 bits or with blocks of 8 bits, and the working memory of one image
with guidance. Nothing was measured on a card.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model_loaders import hub
from ..model_loaders.networks.eight_bits import INT8
from ..model_loaders.networks.hybrid import HybridModel
from ..model_loaders.networks.janus import Janus
from ..model_loaders.networks.llama import Llama, LlamaConfig, TokenModel
from ..model_loaders.networks.mar import MAR, MARModel
from ..model_loaders.networks.ops import quantize
from ..reports.table import markdown
from ..samplers.conditioning import Condition, PromptCondition
from ..samplers.mar import memory as mar_memory
from ..samplers.mar.settings import MARSettings
from ..samplers.tokens import memory as token_memory
from ..samplers.tokens.settings import LlamaGenSettings, PARSettings
from .sizes import (
    dtok_config,
    janus_config,
    language_config,
    official,
    official_gpt,
    official_text_gpt,
    random_hybrid,
)

# Memory of the cards, GiB, of which the driver, PyTorch and a desktop take about one.
CARDS = (8, 12, 16, 24)
TAKEN = 1.0
GIB = 1 << 30
# Families of networks that draw an image, or write the codes of one.
DRAWING = ("mar", "llamagen", "dtok", "tar", "hybrid", "janus")
# Rows of a prompt: those of the longest text that LlamaGen was trained with.
PROMPT_ROWS = 120
# Semantic codes of an image of Tar at the finest of its scales.
SEMANTIC_SIDE = 27


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


def _made(make: Callable[[], nn.Module], eight: bool) -> Any:
    """A network without memory, of 16 bits, or with blocks of 8 bits."""
    with torch.device("meta"):
        net = make().to(torch.bfloat16).requires_grad_(False)
    return quantize(net, INT8) if eight else net


def _size(net: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in net.parameters())


def _tokens(config: LlamaConfig, grid: int, prefix: int, eight: bool, settings: Any = None) -> Need:
    """Of a token model."""
    net = _made(lambda: Llama(config), eight)
    settings = settings or LlamaGenSettings()
    cells = net.config.regions
    working = token_memory.decoding(TokenModel(net, "", grid), 1, settings, prefix, cells)
    return Need(_size(net), int(working))


def _mar(size: str, eight: bool) -> Need:
    net = _made(lambda: MAR(official(size)), eight)
    bytes_by_stage = mar_memory.estimate(MARModel(net, size), Condition((1,), ("",), ""), MARSettings())
    return Need(_size(net), mar_memory.total(bytes_by_stage) - _size(net))


def _hybrid(size: str, eight: bool) -> Need:
    model: HybridModel = random_hybrid(size, torch.bfloat16, "meta")
    if eight:
        quantize(model.hybrid, INT8)

    weights = sum(model.weights().values())
    bytes_by_stage = mar_memory.estimate(model, PromptCondition(("word " * PROMPT_ROWS,)), MARSettings())
    return Need(weights, mar_memory.total(bytes_by_stage) - weights)


def _janus(size: str, eight: bool) -> Need:
    net = _made(lambda: Janus(janus_config(size)).fold(), eight)
    working = token_memory.decoding(TokenModel(net, "", 24), 1, LlamaGenSettings(), PROMPT_ROWS, 1)
    return Need(_size(net), int(working))


# By the id of an entry.
NEEDS: dict[str, Callable[[bool], Need]] = {
    "mar-base": lambda eight: _mar("MAR-B", eight),
    "mar-base-ema": lambda eight: _mar("MAR-B", eight),
    "mar-large": lambda eight: _mar("MAR-L", eight),
    "mar-huge": lambda eight: _mar("MAR-H", eight),
    "llamagen-b-256": lambda eight: _tokens(official_gpt("LlamaGen-B"), 16, 1, eight),
    "llamagen-b-384": lambda eight: _tokens(official_gpt("LlamaGen-B"), 24, 1, eight),
    "llamagen-l-256": lambda eight: _tokens(official_gpt("LlamaGen-L"), 16, 1, eight),
    "llamagen-l-384": lambda eight: _tokens(official_gpt("LlamaGen-L"), 24, 1, eight),
    "llamagen-xl-384": lambda eight: _tokens(official_gpt("LlamaGen-XL"), 24, 1, eight),
    "llamagen-xxl-384": lambda eight: _tokens(official_gpt("LlamaGen-XXL"), 24, 1, eight),
    "llamagen-3b-384": lambda eight: _tokens(official_gpt("LlamaGen-3B"), 24, 1, eight),
    "llamagen-t2i-xl-256": lambda eight: _tokens(official_text_gpt(), 16, PROMPT_ROWS, eight),
    "llamagen-t2i-xl-512": lambda eight: _tokens(official_text_gpt(), 32, PROMPT_ROWS, eight),
    "par-xl-4x": lambda eight: _tokens(official_gpt("LlamaGen-XL", 3), 24, 1, eight, PARSettings()),
    "par-xxl-4x": lambda eight: _tokens(official_gpt("LlamaGen-XXL", 3), 24, 1, eight, PARSettings()),
    "par-3b-4x": lambda eight: _tokens(official_gpt("LlamaGen-3B", 3), 24, 1, eight, PARSettings()),
    "par-3b-16x": lambda eight: _tokens(official_gpt("LlamaGen-3B", 15), 24, 1, eight, PARSettings()),
    "tar-1.5b": lambda eight: _tokens(language_config("Tar-1.5B"), SEMANTIC_SIDE, PROMPT_ROWS, eight),
    "tar-7b": lambda eight: _tokens(language_config("Tar-7B"), SEMANTIC_SIDE, PROMPT_ROWS, eight),
    "ar-dtok-256": lambda eight: _tokens(dtok_config("AR-DTok-LP"), 16, SEMANTIC_SIDE**2, eight),
    "ar-dtok-512": lambda eight: _tokens(dtok_config("AR-DTok-LP"), 32, SEMANTIC_SIDE**2, eight),
    "ar-dtok-1024": lambda eight: _tokens(dtok_config("AR-DTok-LP"), 64, SEMANTIC_SIDE**2, eight),
    "harmon-0.5b": lambda eight: _hybrid("Harmon-0.5B", eight),
    "harmon-1.5b": lambda eight: _hybrid("Harmon-1.5B", eight),
    "harmon-1.5b-o": lambda eight: _hybrid("Harmon-1.5B", eight),
    "unipic-1.5b": lambda eight: _hybrid("UniPic-1.5B", eight),
    "janus-pro-1b": lambda eight: _janus("Janus-Pro-1B", eight),
    "janus-pro-7b": lambda eight: _janus("Janus-Pro-7B", eight),
}


def drawing_entries() -> list[str]:
    """Ids of the downloads of the catalogue with a network that draws."""
    return [entry.id for family in DRAWING for entry in hub.entries(family) if entry.repo]


def row(name: str) -> list[str]:
    """An entry's row of the table: weights and all memory of both precisions, and the smallest card for each."""
    needs = [NEEDS[name](eight) for eight in (False, True)]
    sizes = [f"{part / 1e9:.2f}" for need in needs for part in (need.weights, need.total)]

    cards = []
    for card in CARDS:
        whole, eight = (need.fits(card) for need in needs)
        cards.append("bf16" if whole else "8 bits" if eight else "no")
    return [name, *sizes, *cards]


def table() -> str:
    """The table as Markdown."""
    sizes = ["bf16: weights, GB", "with one image", "8 bits: weights, GB", "with one image"]
    head = ["entry", *sizes, *(f"{card} GB card" for card in CARDS)]
    return markdown([head, *(row(name) for name in drawing_entries())], markup=True)


if __name__ == "__main__":
    print(table())
    sys.exit(0)
