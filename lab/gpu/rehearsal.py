"""Tiny stand-ins for the official sizes, with which the whole command runs on a CPU in seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...model_loaders.catalogue import official
from ...networks import bitdance, speed
from ...networks.bitdance import BitDanceClass, BitDanceText, BlockNetwork
from ...networks.hybrid import HybridConfig
from ...networks.quantized import QUANTISED
from ...runs.registry import find
from ...samplers.settings import knobs
from ..work import sizes
from . import measure
from .cases import Case

_HYBRID_GRID = 4
_SHORT = {"steps": 4, "diffusion_steps": 2}
_OFFICIAL_BITDANCE = official.official_bitdance
_OFFICIAL_HYBRID = official.official_hybrid


def make_tiny() -> None:
    """Replace the official sizes of this process."""
    for size in official.SIZES:
        official.SIZES[size] = (32, 2, 2, 1, 32)
    for size in official.TOKEN_SIZES:
        official.TOKEN_SIZES[size] = (32, 2, 2, 4)
    for size in official.JANUS_SIZES:
        official.JANUS_SIZES[size] = (32, 2, 2, 64)
    for size, (llm, mar, stored, _, beta, steps) in official.HYBRID_SIZES.items():
        official.HYBRID_SIZES[size] = (llm, mar, stored, _HYBRID_GRID, beta, steps)

    torch.set_num_threads(1)
    speed.BACKEND = "eager"  # a rehearsal of compile compiles nothing
    measure.SHORT = 0.0
    measure.COUNTED = float("inf")  # a busy machine counts whole images too
    measure.LARGEST_BATCH = 3
    sizes.JANUS_GRID = 4
    bitdance.LARGE_SIZES = ((256, 256),)  # type: ignore[assignment]
    sizes.official_hybrid = _hybrid
    sizes.official_bitdance = _bitdance  # type: ignore[assignment]


def _hybrid(size: str, grid: int | None = None) -> HybridConfig:
    whole = _OFFICIAL_HYBRID(size, grid)
    shape = {"dim": 32, "encoder_depth": 2, "decoder_depth": 2, "heads": 2, "head_depth": 1, "head_width": 32}
    text: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 2, "kv_heads": 1, "queries": 0, "hidden": 64}
    return HybridConfig(replace(whole.mar, **shape), replace(whole.llm, **text))


def _bitdance(size: str) -> BlockNetwork:
    with official.shapes_only():
        whole = _OFFICIAL_BITDANCE(size)
    head = replace(whole.head_config, condition=32, width=64, depth=2, modulations=1)
    if head.heads:
        head = replace(head, heads=1)
    config: Any = replace(whole.config, dim=32, depth=2, heads=2, kv_heads=2, hidden=64)
    if isinstance(whole, BitDanceText):
        return BitDanceText(replace(config, queries=0), head, whole.block)
    return BitDanceClass(config, head)


def shorter(case: Case) -> str:
    """Arguments that make a run of a case short and fit for a CPU; the last value of an option holds."""
    words = case.arguments.split()
    entry = find(words[words.index("--samplers") + 1]) if "--samplers" in words else find("bitdance")
    known = knobs(entry.settings)
    sets = [f"--set {name}={value}" for name, value in _SHORT.items() if name in known]
    dtype = [] if not QUANTISED.keys().isdisjoint(words) else ["--dtype fp32"]
    grid = ["--grid 4"] if "demo-llamagen" in words else []
    return " ".join([*sets, *dtype, *grid])
