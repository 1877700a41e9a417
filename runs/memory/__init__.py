"""Stages of a memory estimate, and their total.

Every family estimates the bytes of a run from shapes, before anything is allocated: upper bounds, if attention kernels
hold no scores.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...networks.bitdance import BlockModel
from ...networks.llama import TokenModel
from ...networks.mar import MARModel
from ...networks.ops import offloaded_bytes
from ...networks.tar import TarModel

# Kept during the whole generation: entries that begin with this, and all other entries that are not working memory.
WEIGHTS = "weights: "
# Weights off the device end with this, and are not counted.
STREAMED = " (streamed)"
NOISE = "noise"
PROMPTS = "prompt cache"
FEATURES = "feature cache"
KV_CACHE = "KV cache"
POSITIONS = "positions"
SAMPLING = "sampling"  # of token models: KV caches, the rows of a pass and logits

# Working memory, not at once: the largest of these counts.
MAR = "MAR"
HEAD = "head"
LLM = "language model"
TRANSFORMER = "transformer"
DECODE = "decode"
WORKING = (MAR, HEAD, LLM, TRANSFORMER, DECODE)


def weights_by_part(model: MARModel | BlockModel | TokenModel | TarModel, of: str = "") -> dict[str, int]:
    """Bytes of a model's weights by stage: of each part those on the device, and those that are streamed to it; ``of``
    begins the names of the parts.
    """
    out = {}
    for name, part in model.parts.items():
        count = sum(weight.nbytes for weight in part.parameters())
        streamed = offloaded_bytes(part, model.net.operations)
        out[f"{WEIGHTS}{of}{name}"] = count - streamed
        if streamed:
            out[f"{WEIGHTS}{of}{name}{STREAMED}"] = streamed

    return out


def total(memory: Mapping[str, int]) -> int:
    """Most bytes at once: all that is kept, and the largest working memory."""
    kept = 0
    working = 0
    for stage, count in memory.items():
        if stage in WORKING:
            working = max(working, count)
        elif not stage.endswith(STREAMED):
            kept += count

    return kept + working
