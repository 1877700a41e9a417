"""From the transformer's hidden rows to tokens: guidance, then a draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_loaders.networks.llama import Llama
from ...model_loaders.networks.speed import recorded
from ..device import to_device
from .canvas import TokenCanvas
from .draws import PairedDraws, draw, penalised
from .schedule import Schedule
from .settings import TokenSettings, guides


def guidance_applies(settings: TokenSettings, step: int | Tensor) -> bool | Tensor:
    """Whether guidance is applied at a step, or at steps int64 [...], that are counted as ``cfg_interval`` counts.

    Of a tensor of steps the result is bool [...], or a bool that holds for all of them.
    """
    guided = guides(settings)
    if not guided or settings.cfg_interval is None:
        return guided
    return step <= settings.cfg_interval


def guided_passes(settings: TokenSettings, schedule: Schedule) -> list[bool]:
    """For each pass of a schedule whether guidance is applied."""
    return [bool(guidance_applies(settings, p.cfg_step)) for p in schedule.passes]


class TokenDraw:
    """Tokens of B images from the hidden rows that predict them.

    Args:
        canvas: the images.
        guided_by_pass: of each pass whether guidance is applied; for :meth:`__call__`.
        stream: of the random numbers.
        span: token values that are image codes, half-open; None for all.
        penalty: repetition penalty; 1 is none.
        padded_to: rows of an image that logits are computed of, see ``looks.py``; 0 for those that are there.
        part: of the condition, see :class:`.PreparedCondition`.
    """

    def __init__(
        self,
        canvas: TokenCanvas,
        guided_by_pass: Sequence[bool] = (),
        stream: str = "token",
        span: tuple[int, int] | None = None,
        penalty: float = 1.0,
        padded_to: int = 0,
        part: float = 0.0,
    ):
        self.canvas = canvas
        self.net = canvas.model.net
        self.settings: Any = canvas.settings
        self.guided_by_pass = guided_by_pass
        self.stream = stream
        self.span = span
        self.penalty = penalty
        self.padded_to = padded_to
        self.part = part
        self.draws: PairedDraws = canvas.noise
        self.given = canvas.given

    def __call__(self, k: int, cells: Tensor, hidden: Tensor) -> Tensor:
        """The tokens int64 [B, n] of the cells [n] of pass k."""
        return self.tokens(hidden, self.guided_by_pass[k], cells, self.canvas.values)

    def of(self, images: np.ndarray) -> TokenDraw:
        """The draw of some of the images, by their places int64 [L]."""
        part = copy(self)
        part.draws = self.draws.of(images.tolist())
        if self.given is not None:
            part.given = self.given[to_device(images, self.given.device)]
        return part

    def tokens(self, hidden: Tensor, guided: bool | Tensor, cells: Tensor, tokens: Tensor) -> Tensor:
        """:meth:`logits`, then :meth:`sample`, as one function that may be recorded."""
        low, high = self.span or (0, self.net.config.vocab)
        source = self._source(cells, tokens, high - low)
        values, *norms = recordable_tokens(self.net, self.rule, hidden, guided, len(self.draws), *source)
        self.canvas.watch(*norms)
        return values

    def logits(self, hidden: Tensor, guided: bool | Tensor) -> Tensor:
        """Logits fp32 [B, n, V] of hidden rows [R, n, C] after classifier-free guidance.

        ``guided``: whether it is applied, to all tokens or bool [n] or [B, n].
        """
        logits, *norms = recordable_logits(self.net, self.rule, hidden, guided, len(self.draws))
        self.canvas.watch(*norms)
        return logits

    def sample(self, logits: Tensor, cells: Tensor, tokens: Tensor) -> Tensor:
        """Token values int64 [B, n] of cells int64 [n] or [B, n] from their logits fp32 [B, n, V].

        ``tokens``: those of the images so far, int64 [B, N + 1], for the repetition penalty.
        """
        return recordable_sample(self.rule, logits, *self._source(cells, tokens, logits.shape[-1]))

    @property
    def rule(self) -> Rule:
        """What does not change from one pass to the next."""
        return Rule(self.settings, self.span, self.penalty, self.padded_to, self.part)

    def _source(self, cells: Tensor, tokens: Tensor, values: int) -> tuple[Any, ...]:
        """The arguments of :func:`recordable_sample` behind logits of so many token values."""
        gumbel, noise_keys = self.draws.source(self.stream, cells, values)
        return gumbel, noise_keys, cells, self.given, tokens if self.penalty != 1 else None


class Rule(NamedTuple):
    """How tokens are drawn, see :class:`TokenDraw`."""

    settings: Any  # TokenSettings, in which the model's own values are filled in
    span: tuple[int, int] | None
    penalty: float
    padded_to: int
    part: float


@recorded
def recordable_tokens(
    net: Llama, rule: Rule, hidden: Tensor, guided: bool | Tensor, images: int, *source: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int64 [B, n] of hidden rows, and the norms of :func:`recordable_logits`, as a function to record."""
    logits, largest, norm = recordable_logits(net, rule, hidden, guided, images)
    return recordable_sample(rule, logits, *source), largest, norm


def recordable_logits(
    net: Llama, rule: Rule, hidden: Tensor, guided: bool | Tensor, images: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :meth:`TokenDraw.logits`; and norms of the logits and of the hidden rows, which tell whether they are
    finite.
    """
    cells = hidden.shape[1]
    padded = F.pad(hidden, (0, 0, 0, rule.padded_to - cells)) if rule.padded_to else hidden
    logits = net.logits(padded, rule.span)[:, :cells]

    cond = logits[:images]
    conditional = images
    if rule.part:
        conditional = 2 * images
        cond = torch.lerp(cond, logits[images:conditional], rule.part)

    mixed = cond
    if guided is not False and len(logits) > conditional:
        null = logits[conditional:]
        mixed = torch.lerp(null, cond, rule.settings.cfg)
        if guided is not True:
            mixed = torch.where(guided[..., None], mixed, cond)

    # Before top-k and top-p, whose -inf is no fault. RMSNorm makes zeros of rows whose squares overflow: the logits are
    # then finite and wrong, and only the norm of the rows shows it.
    return mixed, torch.linalg.vector_norm(mixed, torch.inf), torch.linalg.vector_norm(hidden.float())


def recordable_sample(
    rule: Rule,
    logits: Tensor,
    gumbel: Callable[..., Tensor],
    noise_keys: Sequence[Tensor],
    cells: Tensor,
    given: Tensor | None,
    tokens: Tensor | None,
) -> Tensor:
    """See :meth:`TokenDraw.sample`.

    Args:
        gumbel, noise_keys: of :meth:`PairedDraws.source`.
        given: tokens int64 [B, N + 1] of an edit, -1 for the others; None without one.
        tokens: those of the images so far, for the repetition penalty; None without one.
    """
    if tokens is not None:
        # Of the tokens before each cell, guesses among them.
        codes = tokens[:, None, :-1]
        before = (torch.arange(codes.shape[2], device=cells.device) < cells[..., None]).expand(len(codes), -1, -1)
        times = torch.zeros(logits.shape, dtype=torch.int32, device=cells.device)
        times.scatter_add_(2, codes.expand_as(before), before.to(times.dtype))
        logits = penalised(logits, times > 0, rule.penalty)

    new = draw(logits, rule.settings, gumbel(*noise_keys, cells))
    if given is None:
        return new

    # A given token stands in its cell whatever is drawn for it.
    kept = given[:, cells] if cells.ndim == 1 else given.gather(1, cells)
    return torch.where(kept >= 0, kept, new)
