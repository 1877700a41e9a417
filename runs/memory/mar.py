"""Memory of a generation of a MAR, Harmon or UniPic; see ``runs/memory/__init__.py``."""

from __future__ import annotations

from typing import cast

from ...networks.hybrid import HybridModel
from ...networks.mar import BUDGET, MARModel
from ...networks.ops import unpacking_bytes
from ...samplers.conditioning import ClassOrPrompt, PromptCondition
from ...samplers.mar.lazy.schedule import measuring_block
from ...samplers.mar.lazy.settings import CacheSettings
from ...samplers.mar.prepare import prompt_tokens
from ...samplers.mar.settings import MARBase
from ...samplers.noise import noise_bytes
from . import FEATURES, HEAD, NOISE, PROMPTS, weights_by_part


def estimate(
    model: MARModel, condition: ClassOrPrompt, settings: MARBase, cache: CacheSettings | None = None
) -> dict[str, int]:
    """Bytes by stage; the model's weights may be on the meta device. ``cache``: LazyMAR's settings, where its caches
    are used.

    Weights by part, ``prompt cache``, ``noise`` and ``feature cache`` are kept during the whole generation; ``language
    model``, ``MAR`` and ``head`` are the working memory of one evaluation each.
    """
    c = model.net.config
    images = len(condition)
    branches = 1 + settings.uses_guidance
    size = next(model.net.parameters()).element_size()

    # Rows of the transformer at an AR step.
    rows = branches * images * (c.buffer + c.tokens)

    # Tokens in a call of the diffusion head. FastHybrid denoises the AR steps of a lookahead together, and CSpD the AR
    # steps of a draft.
    left = settings.masked_after_steps(c.grid**2)
    largest = max(a - b for a, b in zip([c.tokens, *left], left, strict=False))
    tokens = branches * images * min(c.tokens, largest * settings.ar_steps_per_head_call)

    # Kept during the whole generation.
    out = weights_by_part(model)
    if isinstance(condition, PromptCondition):
        out[PROMPTS] = model.prompt_bytes(prompt_tokens(cast(HybridModel, model), condition, settings.uses_guidance))
    out[NOISE] = noise_bytes(images, settings.streams(), c.tokens * c.channels)
    if cache is not None:
        out[FEATURES] = feature_bytes(model, images, settings, cache)

    # Working memory of one evaluation each.
    for name, count in model.working_bytes(rows).items():
        out[name] = settings.ar_steps_per_pass * count + unpacking_bytes(model.parts[name])

    # The modulations of several diffusion steps at once, the ones before them, and what they are made of.
    of_step = tokens * c.head_width * (3 * c.head_depth + 2)
    modulations = max(of_step, min(BUDGET, of_step * settings.diffusion_steps))
    out[HEAD] = 3 * modulations * size
    return out


def feature_bytes(model: MARModel, images: int, settings: MARBase, cache: CacheSettings) -> int:
    """Bytes that LazyMAR keeps from one pass to the next, see ``samplers/mar/lazy``; an upper estimate."""
    c = model.net.config
    size = next(model.net.parameters()).element_size()
    guided = settings.uses_guidance
    entries = images * (2 if guided and not cache.condition_cache else 1)
    rows = entries * (c.buffer + c.tokens)
    kept = 0

    # Encoder cache: keys and values of every block, the decoder's rows, and what a language model keeps of these.
    if cache.encoder_cache:
        kept += rows * (2 * c.encoder_depth + 1) * c.dim * size
        kept += model.prompt_bytes(rows)

    # Token cache: the values of the block that measures, and keys and values of the blocks after it.
    if cache.token_cache:
        block = measuring_block(c.decoder_depth)
        kept += rows * (1 + 2 * (c.decoder_depth - block)) * c.dim * size

    # Condition cache: the residual of every token, in fp32.
    if guided and cache.condition_cache:
        kept += images * c.tokens * c.dim * 4
    return kept
