"""Memory of a generation of a MAR, Harmon or UniPic; see ``samplers/memory.py``."""

from __future__ import annotations

from ...model_loaders.networks.mar import BUDGET, MARModel
from ...model_loaders.networks.ops import unpacking_bytes
from ..conditioning import MaskedCondition, PromptCondition
from ..memory import FEATURES, HEAD, NOISE, PROMPTS, weights_by_part
from ..noise import noise_bytes
from .schedule import masked_after
from .settings import CacheSettings, MARBase


def estimate(
    model: MARModel, condition: MaskedCondition, settings: MARBase, cache: CacheSettings | None = None
) -> dict[str, int]:
    """Bytes by stage; the model's weights may be on the meta device. ``cache``: LazyMAR's settings, where its caches
    are used.

    Weights by part, ``prompt cache``, ``noise`` and ``feature cache`` are kept during the whole generation; ``language
    model``, ``MAR`` and ``head`` are the working memory of one evaluation each.
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
    out[NOISE] = noise_bytes(images, settings.diffusion_steps, c.tokens * c.channels)
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
