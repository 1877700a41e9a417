"""Working memory of the token samplers, estimated from shapes before anything is allocated. Upper estimates."""

from __future__ import annotations

import math
from typing import Any, cast

from ...model_loaders.networks.llama import Llama, TokenModel, is_16_bit
from ...model_loaders.networks.ops import unpacking_bytes
from ...model_loaders.networks.tar import TarModel
from ..conditioning import AnyCondition, CodeCondition, Condition, FeatureCondition, PromptCondition
from .conditioning import prompt_ids
from .jacobi import ROWS
from .settings import DETAILS, PARSettings, TarPromptSettings, ZipARSettings, guides, neighbours_of

# Places that a wave of MuLo-SD decides in one pass, at most.
_WAVE = 256


def estimate(model: TokenModel, condition: AnyCondition, settings: Any, draft: TokenModel | None = None) -> float:
    """Bytes of KV caches, rows of the largest pass and logits; with a draft model, those of both, and the neighbour
    table.
    """
    images = len(condition)
    prefix = _prefix(model, condition)
    if draft is None:
        cells = _window_cells(model.net, settings.parallel, model.grid, _cells(model, settings))
        return decoding(model, images, settings, prefix, cells)

    # Islands are separated, so a wave has at most one cell of every second row and column.
    vocab = model.net.config.vocab
    wave = min(math.ceil(model.grid / 2) ** 2, _WAVE)
    verifying = decoding(model, images, settings, prefix, wave, block=model.tokens)

    rows = draft.grid * max(1, settings.draft_parallel)
    drafting = decoding(draft, images, settings, prefix, min(draft.tokens, rows))

    table = 4.0 * vocab * (neighbours_of(settings, vocab) + 4096)
    return verifying + drafting + table


def _prefix(model: TokenModel, condition: AnyCondition) -> int:
    """Condition rows of an image, at most."""
    if isinstance(condition, PromptCondition):
        return max(map(len, prompt_ids(model, condition)))
    if isinstance(condition, Condition):
        return 1
    if isinstance(condition, CodeCondition):
        entries = condition.codes
    else:
        entries = cast(FeatureCondition, condition).features  # or a TextCondition's
    return max(map(len, entries), default=1)


def estimate_prompt(model: TarModel, settings: TarPromptSettings, text: str, images: int) -> float:
    """Bytes of Tar's language model for a prompt: the KV cache, the rows of the prompt, and logits."""
    scale = DETAILS.index(settings.detail)
    config = model.net.config
    size = next(model.net.parameters()).element_size()
    rows = len(model.prompt(text, scale))

    side = model.sides[scale]
    positions = rows + side**2
    cache = 2.0 * config.depth * config.kv_heads * config.head_dim * positions * images * size
    cells = _window_cells(model.net, settings.parallel if side > 1 else 0, side)
    hidden = max(rows, images * cells) * (8 * config.dim + 3 * config.hidden) * size
    # Mixed, cut, sorted (values and indices), and the random numbers, in fp32.
    logits = 4.0 * model.special.codes * images * cells * 10
    return cache + hidden + logits + unpacking_bytes(model.net)


def _window_cells(net: Llama, parallel: int, side: int, each: int = 1) -> int:
    """Tokens of an image that one call decides, at most, of passes that decide ``each``; with its padding, see
    :func:`.jacobi.padded_rows`.
    """
    if not parallel or not is_16_bit(net):
        return min(side**2, each * max(1, parallel))

    most = min(side**2, each * max(side, parallel))
    return ROWS * math.ceil(most / ROWS)


def _cells(model: TokenModel, settings: Any) -> int:
    """Tokens of an image that one pass decides, at most."""
    if isinstance(settings, PARSettings):
        return model.regions if model.regions > 1 else settings.group
    return math.ceil(model.grid / settings.window) if isinstance(settings, ZipARSettings) else 1


def decoding(model: TokenModel, images: int, settings: Any, prefix: int, cells: int, block: int = 0) -> float:
    """One model's part; ``block`` are further rows of its largest pass beyond the prefix."""
    c = model.net.config
    size = next(model.net.parameters()).element_size()
    branches = 2 if guides(settings) else 1

    rows = branches * images * max(prefix + block, 2 * cells)
    hidden = rows * (8 * c.dim + 3 * c.hidden) * size
    # Logits of both branches, mixed, cut, sorted (values and indices), and the random numbers, in fp32.
    logits = 4.0 * c.vocab * images * cells * (branches + 8)
    cache = model.cache_bytes(images, branches > 1, prefix)
    return cache + hidden + logits + unpacking_bytes(model.net)
