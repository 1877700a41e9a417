"""Working memory of the token samplers, estimated from shapes before anything is allocated. Upper estimates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from ...networks.janus import JanusModel
from ...networks.llama import Llama, TokenModel, cache_bytes, is_16_bit
from ...networks.ops import unpacking_bytes
from ...networks.tar import TarModel
from ...samplers.conditioning import AnyCondition, FeatureCondition, ImagePromptCondition, PromptCondition
from ...samplers.tokens.cache_slots import serial_slots, window_slots
from ...samplers.tokens.jacobi import padded_row_count
from ...samplers.tokens.mulosd.verification import cells_at_once, nearest_codes_bytes
from ...samplers.tokens.prepare import prompt_ids
from ...samplers.tokens.schedule import Schedule, raster
from ...samplers.tokens.settings import sampling_of
from ...samplers.tokens.tar import DETAILS, TarPromptSettings
from . import SAMPLING, weights_by_part

# Buffers of a block of the network, each as large as a fed row or as its inner row. Fed rows: input, norm, queries,
# keys, values, their heads in the layout of attention, its output, and its projection. Inner rows of the MLP: gate, up,
# and their product.
_ROWS = 8
_INNER_ROWS = 3
# Buffers as large as the logits of a branch in fp32, while a token is drawn: mixed, tempered, cut, sorted with int64
# indices (3), and their probabilities with the running sum (2). The random numbers take the place of the branches'.
_LOGITS = 8
# Rows that a pass may feed for a cell that it decides: the token before it, and one that was decided since.
FED = 2


def estimate(model: TokenModel, condition: AnyCondition, settings: Any, draft: TokenModel | None = None) -> float:
    """Bytes of KV caches, rows of the largest pass and logits; with a draft model, of both models, and the neighbour
    table.
    """
    images = len(condition)
    prefix = _prefix(model, condition)
    guided = sampling_of(settings, model).uses_guidance
    if draft is None:
        schedule = settings.schedule(model)
        cells = _cells_of_a_call(model.net, schedule, settings.parallel)
        slots = (window_slots(schedule) if settings.parallel else serial_slots(schedule)).count
        rows = max(math.ceil(prefix * _read_at_once(condition) / max(1, images)), FED * cells)
        return decoding_bytes(model, images, guided, prefix + slots, cells, rows, conditional_branches(condition))

    # The target judges all cells, a piece of their logits at once, and resamples fewer of them in the same way.
    vocab = model.net.config.vocab
    piece = min(model.tokens, cells_at_once((1 + guided) * images, vocab))
    whole = prefix + model.tokens
    verifying = decoding_bytes(model, images, guided, whole, piece, rows=whole)

    cells = min(draft.tokens, draft.grid * max(1, settings.draft_parallel))
    slots = draft.tokens + draft.grid  # with a stand-in for every row of the image
    drafting = decoding_bytes(draft, images, guided, prefix + slots, cells, rows=max(prefix, FED * cells))

    return verifying + drafting + nearest_codes_bytes(vocab, settings.neighbours_among(vocab))


def stages(
    model: TokenModel, condition: AnyCondition, settings: Any, draft: TokenModel | None = None
) -> dict[str, int]:
    """Bytes by stage, see ``runs/memory/__init__.py``: weights of both models, and :func:`estimate`."""
    out = weights_by_part(model)
    if draft is not None:
        out |= weights_by_part(draft, of="draft ")

    out[SAMPLING] = int(estimate(model, condition, settings, draft))
    return out


def conditional_branches(condition: AnyCondition) -> int:
    """Branches of guidance without the null condition's, see :class:`.PreparedCondition`."""
    return 2 if isinstance(condition, ImagePromptCondition) and condition.freedom > 0 else 1


def _read_at_once(condition: AnyCondition) -> int:
    """Prompts or other entries of a condition that the first pass reads; images of one pair share it."""
    if isinstance(condition, ImagePromptCondition):
        return len(set(condition.digests()))
    return len(condition)


def _prefix(model: TokenModel, condition: AnyCondition) -> int:
    """Condition rows of an image, at most."""
    if condition.kind == "class":
        return 1
    if isinstance(condition, PromptCondition | ImagePromptCondition):
        return max(map(len, prompt_ids(cast(JanusModel, model), condition)))

    # A row for every feature or code.
    entries: Sequence[Tensor] = cast(FeatureCondition, condition).entries
    return max(map(len, entries), default=1)


def estimate_prompt(model: TarModel, settings: TarPromptSettings, text: str, images: int) -> float:
    """Bytes of Tar's language model for a prompt: the KV cache, the rows of the prompt, and logits."""
    scale = DETAILS.index(settings.detail)
    rows = len(model.prompt(text, scale))

    side = model.sides[scale]
    cache = cache_bytes(model.net, images * (rows + side**2))
    cells = _cells_of_a_call(model.net, raster(side), settings.parallel if side > 1 else 0)
    # The logits of its only branch, and those after the repetition penalty.
    logits = 4.0 * model.special.codes * images * cells * (2 + _LOGITS)
    return cache + max(rows, images * cells) * _row_bytes(model.net) + logits + unpacking_bytes(model.net)


def _cells_of_a_call(net: Llama, schedule: Schedule, parallel: int) -> int:
    """Tokens of an image that one call decides, at most, with its padding."""
    if parallel and is_16_bit(net):
        return padded_row_count(schedule, parallel)

    most = max(len(p.cells) for p in schedule.passes)
    return min(schedule.grid**2, most * max(1, parallel))


def decoding_bytes(
    model: TokenModel, images: int, guided: bool, slots: int, cells: int, rows: int, conditional: int = 1
) -> float:
    """Bytes of one model's part: KV cache, rows of the largest pass and logits.

    Args:
        guided: whether there is a branch of the null condition.
        slots: of the cache for an image, including the condition's.
        cells: that are decided at once, of an image.
        rows: of an image that the largest pass feeds.
        conditional: branches of guidance without the null condition's.
    """
    branches = conditional + guided

    cache = cache_bytes(model.net, branches * images * slots)
    hidden = branches * images * rows * _row_bytes(model.net)
    logits = 4.0 * model.net.config.vocab * images * cells * (branches + _LOGITS)
    return cache + hidden + logits + unpacking_bytes(model.net)


def _row_bytes(net: Llama) -> int:
    """Bytes of a fed row on its way through a block of the network."""
    size = next(net.parameters()).element_size()
    return (_ROWS * net.config.dim + _INNER_ROWS * net.config.hidden) * size
