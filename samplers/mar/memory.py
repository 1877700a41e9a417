"""Memory of a generation, estimated from shapes before anything is allocated: upper bounds, if attention kernels hold
no scores.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...model_loaders.networks.bitdance import BlockModel
from ...model_loaders.networks.mar import BUDGET, MARModel
from ...model_loaders.networks.ops import offloaded_bytes, unpacking_bytes
from ..conditioning import MaskedCondition, PromptCondition
from ..noise import noise_bytes
from .schedule import masked_after
from .settings import CacheSettings, MARBase

# Kept during the whole generation: entries that begin with this, and these.
WEIGHTS = "weights: "
# Weights off the device end with this, and are not counted.
STREAMED = " (streamed)"
NOISE = "noise"
PROMPTS = "prompt cache"
FEATURES = "feature cache"
# Not at once: the largest of these counts.
MAR = "MAR"
HEAD = "head"
LLM = "language model"
TRANSFORMER = "transformer"
DECODE = "decode"


def weights_by_part(model: MARModel | BlockModel) -> dict[str, int]:
    """Bytes of a model's weights by stage: of each part those on the device, and those that are streamed to it."""
    out = {}
    for name, part in model.parts.items():
        count = sum(weight.nbytes for weight in part.parameters())
        streamed = offloaded_bytes(part, model.net.operations)
        out[f"{WEIGHTS}{name}"] = count - streamed
        if streamed:
            out[f"{WEIGHTS}{name}{STREAMED}"] = streamed

    return out


def estimate(
    model: MARModel, condition: MaskedCondition, settings: MARBase, cache: CacheSettings | None = None
) -> dict[str, int]:
    """Bytes by stage; the model's weights may be on the meta device. ``cache``: LazyMAR's settings, where its caches
    are used.

    Weights by part, ``prompt cache``, ``noise`` and ``feature cache`` are kept during the whole generation; ``language
    model``, ``MAR`` and ``head`` are the working memory of one evaluation each.

    Raises:
        UserError: more AR steps than tokens; a prompt that the model cannot read.
    """
    c = model.net.config
    images = len(condition)
    values = vars(settings)
    branches = 1 + (settings.cfg != 1.0)
    size = next(model.net.parameters()).element_size()
    left = masked_after(c.tokens, settings.steps)
    largest = max(a - b for a, b in zip([c.tokens, *left], left, strict=False))
    rows = branches * images * (c.buffer + c.tokens)

    # CSpD verifies the AR steps of a draft in one pass; FastHybrid denoises those of a lookahead together.
    segment = values.get("draft_length", 1)
    ahead = max(1, values.get("lookahead", 1))
    tokens = branches * images * min(c.tokens, largest * ahead)

    # Kept during the whole generation.
    out = weights_by_part(model)
    if isinstance(condition, PromptCondition):
        out[PROMPTS] = model.prompt_bytes(condition.prompt_tokens(model, settings.cfg != 1.0))
    out[NOISE] = noise_bytes(images, settings.diffusion_steps, c.tokens, c.channels)
    if cache is not None:
        out[FEATURES] = feature_bytes(model, images, settings, cache)

    # Working memory of one evaluation each.
    for name, count in model.working_bytes(rows).items():
        out[name] = segment * count + unpacking_bytes(model.parts[name])
    modulations = tokens * c.head_width * (3 * c.head_depth + 2)
    out[HEAD] = 3 * max(modulations, min(BUDGET, modulations * settings.diffusion_steps)) * size
    return out


def feature_bytes(model: MARModel, images: int, settings: MARBase, cache: CacheSettings) -> int:
    """Keys, values and inputs that LazyMAR keeps."""
    c = model.net.config
    size = next(model.net.parameters()).element_size()

    live = images * (2 if settings.cfg != 1.0 and not cache.condition_cache else 1)
    encoded = images * (1 + (settings.cfg != 1.0))
    rows = c.buffer + c.tokens

    # Of the decoder also its input, the values of a block, and a difference of the residual stream, which is fp32.
    kept = (2 * encoded * c.encoder_depth + live * (2 * c.decoder_depth + 2)) * size + live * 4
    return kept * rows * c.dim + (model.prompt_bytes(live * rows) if cache.encoder_cache else 0)


def total(memory: Mapping[str, int]) -> int:
    """Most bytes at once: all that is kept, and the largest of the stages."""
    stages = (MAR, HEAD, LLM, TRANSFORMER, DECODE)
    kept = sum(v for k, v in memory.items() if k not in stages and not k.endswith(STREAMED))

    return kept + max((memory[k] for k in stages if k in memory), default=0)
