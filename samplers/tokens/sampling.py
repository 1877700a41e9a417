"""From the transformer's hidden rows to tokens: logits, guidance, and a sample with paired noise.

:class:`TokenDraw` is the draw of a generation (``engine.py``). It computes with three plain functions, which a
network may record: :func:`guided_logits`, :func:`sample`, and :func:`sample_tokens`, which is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...networks.llama import Llama
from ...networks.speed import recorded
from ..device import to_device
from .canvas import TokenCanvas
from .draws import CellNoise, PairedDraws, draw, penalised
from .schedule import Schedule
from .settings import TokenSettings, guides


def guidance_applies(settings: TokenSettings, step: int | Tensor) -> bool | Tensor:
    """Whether guidance is applied at a step, or at steps int64 [...], that are counted as ``cfg_interval`` counts.

    For a tensor of steps the result is bool [...], or a bool that holds for all of them.
    """
    guided = guides(settings)
    if not guided or settings.cfg_interval is None:
        return guided
    return step <= settings.cfg_interval


def guided_passes(settings: TokenSettings, schedule: Schedule) -> list[bool]:
    """For each pass of a schedule whether guidance is applied."""
    return [bool(guidance_applies(settings, p.cfg_step)) for p in schedule.passes]


class Sampling(NamedTuple):
    """How tokens are sampled, the same in all passes of a generation."""

    settings: Any  # TokenSettings, in which the model's own values are filled in
    images: int  # B
    span: tuple[int, int] | None = None  # token values that are image codes, half-open; None for all
    penalty: float = 1.0  # repetition penalty; 1 is none
    part: float = 0.0  # share of the condition's partial branch, see PreparedCondition
    padded_to: int = 0  # rows of an image that logits are computed for, see one_shape in llama.py; 0: those given


class TokenDraw:
    """Samples tokens of B images from the hidden rows that predict them.

    Args:
        canvas: the images.
        guided_by_pass: for each pass whether guidance is applied; for :meth:`__call__`.
        stream: name of the random numbers.
        more: further fields of :class:`Sampling`.
    """

    def __init__(
        self, canvas: TokenCanvas, guided_by_pass: Sequence[bool] = (), stream: str = "token", **more: Any
    ) -> None:
        self.canvas = canvas
        self.net = canvas.model.net
        self.guided_by_pass = guided_by_pass
        self.stream = stream
        self.draws: PairedDraws = canvas.noise
        self.given = canvas.given
        self.how = Sampling(canvas.settings, len(canvas.noise), **more)

    def __call__(self, k: int, cells: Tensor, hidden: Tensor) -> Tensor:
        """The tokens int64 [B, n] of the cells [n] of pass k."""
        return self.tokens(hidden, self.guided_by_pass[k], cells, self.canvas.values)

    def tokens(self, hidden: Tensor, guided: bool | Tensor, cells: Tensor, tokens: Tensor) -> Tensor:
        """:meth:`logits`, then :meth:`sample`, in one recording."""
        low, high = self.how.span or (0, self.net.config.vocab)
        noise = self.draws.stream(self.stream, high - low, cells.device)
        so_far = tokens if self.how.penalty != 1 else None  # a recording copies its arguments
        new, *norms = sample_tokens(self.net, self.how, hidden, guided, noise, cells, self.given, so_far)
        self.canvas.watch(*norms)
        return new

    def logits(self, hidden: Tensor, guided: bool | Tensor) -> Tensor:
        """Logits fp32 [B, n, V] of hidden rows [R, n, C] after classifier-free guidance.

        ``guided``: whether it is applied, to all tokens or bool [n] or [B, n].
        """
        logits, *norms = guided_logits(self.net, self.how, hidden, guided)
        self.canvas.watch(*norms)
        return logits

    def sample(self, logits: Tensor, cells: Tensor, tokens: Tensor) -> Tensor:
        """Token values int64 [B, n] of cells int64 [n] or [B, n] from their logits fp32 [B, n, V].

        ``tokens``: those of the images so far, int64 [B, N + 1], for the repetition penalty.
        """
        noise = self.draws.stream(self.stream, logits.shape[-1], cells.device)
        return sample(self.how, logits, noise, cells, self.given, tokens)

    def of(self, images: np.ndarray) -> TokenDraw:
        """The draw of some of the images, by their places int64 [L]."""
        some = copy(self)
        some.draws = self.draws.of(images.tolist())
        some.how = self.how._replace(images=len(images))
        if self.given is not None:
            some.given = self.given[to_device(images, self.given.device)]
        return some


@recorded
def sample_tokens(
    net: Llama,
    how: Sampling,
    hidden: Tensor,
    guided: bool | Tensor,
    noise: CellNoise,
    cells: Tensor,
    given: Tensor | None,
    tokens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int64 [B, n] of hidden rows, and the norms of :func:`guided_logits`; arguments as for the two parts."""
    logits, largest, norm = guided_logits(net, how, hidden, guided)
    return sample(how, logits, noise, cells, given, tokens), largest, norm


def guided_logits(net: Llama, how: Sampling, hidden: Tensor, guided: bool | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits after guidance, see :meth:`TokenDraw.logits`; the norms fp32 [] of the logits and of the hidden rows,
    which tell whether they are finite.
    """
    # 1. The logits of all branches: the condition, a part of it where there is one, the null condition.
    cells = hidden.shape[1]
    padded = F.pad(hidden, (0, 0, 0, how.padded_to - cells)) if how.padded_to else hidden
    branches = net.logits(padded, how.span)[:, :cells].split(how.images)

    # 2. The condition's, mixed with those of its part.
    mixed = branches[0]
    conditional = 1
    if how.part:
        mixed = torch.lerp(mixed, branches[1], how.part)
        conditional = 2

    # 3. Classifier-free guidance: null + cfg (cond - null).
    if guided is not False and len(branches) > conditional:
        cond = mixed
        mixed = torch.lerp(branches[-1], cond, how.settings.cfg)
        if guided is not True:
            mixed = torch.where(guided[..., None], mixed, cond)

    # Before top-k and top-p, whose -inf is no fault. RMSNorm makes zeros of rows whose squares overflow: the logits are
    # then finite and wrong, and only the norm of the rows shows it.
    return mixed, torch.linalg.vector_norm(mixed, torch.inf), torch.linalg.vector_norm(hidden.float())


def sample(
    how: Sampling,
    logits: Tensor,
    noise: CellNoise,
    cells: Tensor,
    given: Tensor | None,
    tokens: Tensor | None,
) -> Tensor:
    """Tokens int64 [B, n] from logits, see :meth:`TokenDraw.sample`.

    Args:
        given: tokens int64 [B, N + 1] of an edit, -1 for the others; None without one.
        tokens: the images' tokens so far; not read without a repetition penalty.
    """
    # 1. The repetition penalty.
    if how.penalty != 1 and tokens is not None:
        logits = penalised(logits, used_before(tokens, cells, logits.shape[-1]), how.penalty)

    # 2. Temperature, top-k, top-p, and the largest of the logits with Gumbel noise.
    new = draw(logits, how.settings, noise.gumbel(cells))

    # 3. In an edit, a given token stands in its cell, whatever is sampled for it.
    if given is None:
        return new
    fixed = given[:, cells] if cells.ndim == 1 else given.gather(1, cells)
    return torch.where(fixed >= 0, fixed, new)


def used_before(tokens: Tensor, cells: Tensor, values: int) -> Tensor:
    """Which token values, bool [B, n, values], occur before each of the cells int64 [n] or [B, n] in raster order.

    ``tokens`` int64 [B, N + 1]: the images' tokens so far; guesses count too.
    """
    codes = tokens[:, None, :-1]
    before = (torch.arange(codes.shape[2], device=cells.device) < cells[..., None]).expand(len(codes), -1, -1)

    times = torch.zeros(*before.shape[:2], values, dtype=torch.int32, device=cells.device)
    times.scatter_add_(2, codes.expand_as(before), before.to(times.dtype))
    return times > 0
