"""From the transformer's hidden rows to tokens: logits, guidance, and a sample with paired noise.

:class:`TokenDraw` is the draw of a generation (``engine.py``). It computes with plain functions: first
:func:`guided_logits`, then :func:`tokens_from_logits`. A network may record both together, :func:`tokens_from_hidden`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...networks.llama import Llama
from ...networks.speed import recorded
from ...networks.torch_state import to_device
from ..noise import CellNoise
from .canvas import TokenCanvas
from .schedule import Schedule
from .settings import TokenSampling
from .token_noise import TokenNoise


class Guidance(NamedTuple):
    """Whether classifier-free guidance is applied to the tokens of a pass."""

    applies: bool  # whether it is applied to any token
    only: Tensor | None = None  # bool [n] or [B, n], True for tokens to which it is applied; None: all of them


def guidance_at(sampling: TokenSampling, steps: Tensor) -> Guidance:
    """The guidance of tokens at the given steps, int64 [...], which are counted as ``cfg_interval`` counts them."""
    if sampling.cfg_interval == math.inf:
        return Guidance(sampling.guides)  # for all tokens alike
    return Guidance(sampling.guides, steps <= sampling.cfg_interval)


def guided_passes(sampling: TokenSampling, schedule: Schedule) -> list[bool]:
    """Whether guidance is applied, for each pass of a schedule."""
    return [sampling.guides and p.cfg_step <= sampling.cfg_interval for p in schedule.passes]


class DrawSetup(NamedTuple):
    """What a draw reads besides hidden rows and cells. It is the same in all passes of a generation."""

    sampling: TokenSampling
    images: int  # B
    cell_noise: CellNoise  # of the draw's stream
    given: Tensor | None = None  # tokens that an edit fixes, int64 [B, L + 1], -1 for the others; None without an edit
    span: tuple[int, int] | None = None  # token values that are image codes, half-open; None for all
    penalty: float = 1.0  # repetition penalty; 1 is none
    part: float = 0.0  # share of the condition's partial branch, see PreparedCondition
    padded_to: int = 0  # rows per image to which logits are padded, see one_shape in llama.py; 0: no padding


class TokenDraw:
    """Samples tokens of B images from the hidden rows that predict them.

    Args:
        canvas: the images.
        guided_by_pass: whether guidance is applied, for each pass; only :meth:`__call__` reads it.
        stream: name of the stream of random numbers.
        span, penalty, part, padded_to: see :class:`DrawSetup`.
    """

    def __init__(
        self,
        canvas: TokenCanvas,
        guided_by_pass: Sequence[bool] = (),
        stream: str = "token",
        *,
        span: tuple[int, int] | None = None,
        penalty: float = 1.0,
        part: float = 0.0,
        padded_to: int = 0,
    ) -> None:
        self.canvas = canvas
        self.net = canvas.model.net
        self.guided_by_pass = guided_by_pass
        self.stream = stream
        self.noise: TokenNoise = canvas.noise
        low, high = span or (0, self.net.config.vocab)
        self.values = high - low  # number of values that a token may have
        self.setup = DrawSetup(
            sampling=canvas.sampling,
            images=len(self.noise),
            cell_noise=self.noise.stream(stream, self.values, canvas.device),
            given=canvas.given,
            span=span,
            penalty=penalty,
            part=part,
            padded_to=padded_to,
        )

    def __call__(self, k: int, cells: Tensor, hidden: Tensor) -> Tensor:
        """The tokens, int64 [B, n], of the n cells of pass k."""
        return self.tokens(hidden, Guidance(self.guided_by_pass[k]), cells, self.canvas.values)

    def follow(self, schedule: Schedule) -> None:
        """Sample the passes of a schedule from now on."""
        self.guided_by_pass = guided_passes(self.canvas.sampling, schedule)

    def tokens(self, hidden: Tensor, guidance: Guidance, cells: Tensor, so_far: Tensor) -> Tensor:
        """Token values int64 [B, n] of cells int64 [n] or [B, n], from the hidden rows [R, n, C] that predict them.

        ``so_far``: the tokens of the images, int64 [B, L + 1], for the repetition penalty.
        """
        read = so_far if self.setup.penalty != 1 else None  # a recording copies its arguments
        new, *norms = tokens_from_hidden(self.net, self.setup, hidden, guidance, cells, read)
        self.canvas.watch(*norms)
        return new

    def logits(self, hidden: Tensor, guidance: Guidance) -> Tensor:
        """Logits after classifier-free guidance, fp32 [B, n, V], of hidden rows [R, n, C]."""
        logits, *norms = guided_logits(self.net, self.setup, hidden, guidance)
        self.canvas.watch(*norms)
        return logits

    def of(self, images: np.ndarray) -> TokenDraw:
        """The draw of some of the images, by their indices among the draw's images, int64 [A]."""
        some = copy(self)
        some.noise = self.noise.of(images.tolist())
        cell_noise = some.noise.stream(self.stream, self.values, self.canvas.device)
        given = self.setup.given
        if given is not None:
            given = given[to_device(images, given.device)]
        some.setup = self.setup._replace(images=len(images), cell_noise=cell_noise, given=given)
        return some


@recorded
def tokens_from_hidden(
    net: Llama,
    setup: DrawSetup,
    hidden: Tensor,
    guidance: Guidance,
    cells: Tensor,
    so_far: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample tokens, int64 [B, n], from the hidden rows that predict them. Also returns the norms of
    :func:`guided_logits`. Arguments as for :func:`guided_logits` and :func:`tokens_from_logits`.
    """
    logits, largest, norm = guided_logits(net, setup, hidden, guidance)
    return tokens_from_logits(setup, logits, cells, so_far), largest, norm


def guided_logits(net: Llama, setup: DrawSetup, hidden: Tensor, guidance: Guidance) -> tuple[Tensor, Tensor, Tensor]:
    """Logits after guidance, see :meth:`TokenDraw.logits`, and two norms, fp32 [] each: of the logits and of the hidden
    rows. A norm is not finite if one of its values is not.
    """
    # 1. The logits of all branches: the condition, a part of it where there is one, the null condition.
    cells = hidden.shape[1]
    padded = F.pad(hidden, (0, 0, 0, setup.padded_to - cells)) if setup.padded_to else hidden
    branches = net.logits(padded, setup.span)[:, :cells].split(setup.images)

    # 2. The condition's logits, mixed with the logits of its part.
    mixed = branches[0]
    conditional = 1
    if setup.part:
        mixed = torch.lerp(mixed, branches[1], setup.part)
        conditional = 2

    # 3. Classifier-free guidance: null + cfg (cond - null).
    if guidance.applies and len(branches) > conditional:
        cond = mixed
        mixed = torch.lerp(branches[-1], cond, setup.sampling.cfg)
        if guidance.only is not None:
            mixed = torch.where(guidance.only[..., None], mixed, cond)

    # The logits' norm is computed before top-k and top-p, because their -inf is no fault. If the squares of a row
    # overflow, RMSNorm turns the row into zeros. The logits are then finite but wrong, and only the rows' norm shows
    # it.
    return mixed, torch.linalg.vector_norm(mixed, torch.inf), torch.linalg.vector_norm(hidden.float())


def tokens_from_logits(setup: DrawSetup, logits: Tensor, cells: Tensor, so_far: Tensor | None) -> Tensor:
    """Tokens, int64 [B, n], of cells, int64 [n] or [B, n], from their logits, fp32 [B, n, V].

    ``so_far``: the images' tokens, int64 [B, L + 1], for the repetition penalty; None without a penalty.
    """
    # 1. The repetition penalty.
    if so_far is not None:
        logits = penalised(logits, used_before(so_far, cells, logits.shape[-1]), setup.penalty)

    # 2. Temperature, top-k, top-p, and the largest of the logits with Gumbel noise.
    new = gumbel_max(logits, setup.sampling, setup.cell_noise, cells)

    # 3. In an edit, a given token stands in its cell, whatever is sampled for it.
    if setup.given is None:
        return new
    fixed = setup.given[:, cells] if cells.ndim == 1 else setup.given.gather(1, cells)
    return torch.where(fixed >= 0, fixed, new)


def used_before(tokens: Tensor, cells: Tensor, values: int) -> Tensor:
    """Which token values occur before each of the cells in raster order, bool [B, n, values].

    ``tokens``: the images' tokens so far, int64 [B, L + 1]; guesses count too. ``cells``: int64 [n] or [B, n].
    """
    codes = tokens[:, None, :-1]
    before = (torch.arange(codes.shape[2], device=cells.device) < cells[..., None]).expand(len(codes), -1, -1)

    times = torch.zeros(*before.shape[:2], values, dtype=torch.int32, device=cells.device)
    times.scatter_add_(2, codes.expand_as(before), before.to(times.dtype))
    return times > 0


# ------------------------------------------------------------ the distribution


def allowed(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits, fp32 [..., V], with -inf for every value that may not be sampled.

    Top-k keeps the k largest logits and all logits that equal the smallest of these; 0 keeps all. Then top-p (Holtzman
    et al. 2019) keeps the smallest set of most probable values whose total probability exceeds top_p; 1 keeps all.
    """
    values = logits.shape[-1]
    if 0 < top_k < values:
        least = logits.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < least, -torch.inf)

    if top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        beyond = ordered.softmax(-1).cumsum(-1) > top_p
        # The value at which the sum crosses top_p stays.
        beyond = torch.cat([torch.zeros_like(beyond[..., :1]), beyond[..., :-1]], dim=-1)
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    return logits


def tempered(logits: Tensor, sampling: TokenSampling) -> Tensor:
    """Logits of the sampling distribution, fp32 [..., V]: after temperature, top-k, top-p and the factor of
    ``entropy_temperature``.

    At temperature 0 the likeliest value has the whole probability.
    """
    if sampling.temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, likeliest, 0.0)

    kept = logits if sampling.temperature == 1 else logits / max(sampling.temperature, 1e-5)
    kept = allowed(kept, sampling.top_k, sampling.top_p)
    if sampling.entropy_temperature == 0:
        return kept

    # The entropy of the values that may be sampled, before any temperature.
    untempered = logits.masked_fill(kept.isneginf(), -torch.inf)
    return kept / entropy_factor(untempered, sampling.entropy_temperature)


def entropy_factor(logits: Tensor, strength: float) -> Tensor:
    """Factor of the temperature, fp32 [..., 1], by the entropy of a distribution with these logits, fp32 [..., V].

    Source: Ma et al. 2025, "Towards Better & Faster Autoregressive Image Generation: From the Perspective of Entropy"
    (NeurIPS 2025, arXiv 2510.09012), equation 2 with LlamaGen's constants: 2.5 exp(-H / 3) + 0.6. Where the text leaves
    a choice open, this follows the published code: H is in nats, and it is the entropy of the logits after guidance,
    top-k and top-p but before the temperature. The factor then multiplies the temperature. Regions in which the model
    is certain get more randomness (a factor of 3.1 at H = 0), and uncertain regions get less (below 1 from H = 5.5 on).
    At a temperature other than 1, top-p does not keep the same values as in the published code, because here top-p
    comes after the temperature, as in LlamaGen.

    At ``strength`` 1 the result is this factor, at 0 it is 1 for every distribution, and in between it changes in
    proportion. The paper has no such strength. Equal logits have equal factors, whatever else the batch samples.
    """
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)

    published = 2.5 * torch.exp(-entropy / 3) + 0.6
    return 1 + strength * (published - 1)


def gumbel_max(logits: Tensor, sampling: TokenSampling, noise: CellNoise, cells: Tensor) -> Tensor:
    """Token values, int64 [B, n], of cells, int64 [n] or [B, n], from their logits, fp32 [B, n, V]: the largest of the
    logits with Gumbel noise. At temperature 0 there is no noise.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return (tempered(logits, sampling) + noise.gumbel(cells)).argmax(-1)


def penalised(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, CTRL, as in Hugging Face transformers); 1 changes nothing.

    A logit of a value that was sampled before is divided by ``penalty`` if it is positive, and multiplied by
    ``penalty`` otherwise. ``logits``: fp32 [..., V]; ``used``: which values were sampled before, bool [..., V].
    """
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(used, lowered, logits)
