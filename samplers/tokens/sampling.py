"""From the transformer's hidden rows to tokens: guidance, then a draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
    """

    def __init__(
        self,
        canvas: TokenCanvas,
        guided_by_pass: Sequence[bool] = (),
        stream: str = "token",
        span: tuple[int, int] | None = None,
        penalty: float = 1.0,
        padded_to: int = 0,
    ):
        self.canvas = canvas
        self.net = canvas.model.net
        self.settings: Any = canvas.settings
        self.guided_by_pass = guided_by_pass
        self.stream = stream
        self.span = span
        self.penalty = penalty
        self.padded_to = padded_to
        self.draws: PairedDraws = canvas.noise
        self.given = canvas.given

    def __call__(self, k: int, cells: Tensor, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The tokens int64 [B, n] of the cells [n] of pass k."""
        logits = self.logits(hidden, self.guided_by_pass[k])
        yield 1, self.sample(logits, cells, self.canvas.values)

    def of(self, images: np.ndarray) -> TokenDraw:
        """The draw of some of the images, by their places int64 [L]."""
        part = copy(self)
        part.draws = self.draws.of(images.tolist())
        if self.given is not None:
            part.given = self.given[to_device(images, self.given.device)]
        return part

    def logits(self, hidden: Tensor, guided: bool | Tensor) -> Tensor:
        """Logits fp32 [B, n, V] of hidden rows [R, n, C] after classifier-free guidance.

        ``guided``: whether it is applied, to all tokens or bool [n] or [B, n].
        """
        images = len(self.draws)
        cells = hidden.shape[1]
        padded = F.pad(hidden, (0, 0, 0, self.padded_to - cells)) if self.padded_to else hidden
        logits = self.net.logits(padded, self.span)[:, :cells]

        mixed = cond = logits[:images]
        if guided is not False and len(logits) > images:
            null = logits[images:]
            mixed = torch.lerp(null, cond, self.settings.cfg)
            if guided is not True:
                mixed = torch.where(guided[..., None], mixed, cond)

        # Before top-k and top-p, whose -inf is no fault. RMSNorm makes zeros of rows whose squares overflow: the logits
        # are then finite and wrong, and only the norm of the rows shows it.
        self.canvas.watch(torch.linalg.vector_norm(mixed, torch.inf), torch.linalg.vector_norm(hidden.float()))
        return mixed

    def sample(self, logits: Tensor, cells: Tensor, tokens: Tensor) -> Tensor:
        """Token values int64 [B, n] of cells int64 [n] or [B, n] from their logits fp32 [B, n, V].

        ``tokens``: those of the images so far, int64 [B, N + 1], for the repetition penalty.
        """
        if self.penalty != 1:
            # Of the tokens before each cell, guesses among them.
            codes = tokens[:, None, :-1]
            before = (torch.arange(codes.shape[2], device=cells.device) < cells[..., None]).expand(len(codes), -1, -1)
            times = torch.zeros(logits.shape, dtype=torch.int32, device=cells.device)
            times.scatter_add_(2, codes.expand_as(before), before.to(times.dtype))
            logits = penalised(logits, times > 0, self.penalty)

        drawn = draw(logits, self.settings, self.draws.gumbel(self.stream, cells, logits.shape[-1]))
        if self.given is None:
            return drawn

        # A given token stands in its cell whatever is drawn for it.
        given = self.given[:, cells] if cells.ndim == 1 else self.given.gather(1, cells)
        return torch.where(given >= 0, given, drawn)
