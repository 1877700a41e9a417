"""Which positions each AR step decides. Source: Li et al. 2024 (arXiv 2406.11838), section 3."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from .settings import MARBase


def masked_after(tokens: int, steps: int) -> list[int]:
    """Masked tokens left after each AR step: floor(L cos(pi/2 (s+1)/S)), at least one fewer each step, 0 at the end.

    As upstream except for the last entry, which is 1 there although the last step decides everything.

    Raises:
        UserError: more steps than tokens, or none.
    """
    if not 1 <= steps <= tokens:
        raise UserError(f"ar_steps: {steps} is outside 1 to {tokens}, the tokens of the picture.")
    left, out = tokens, []
    for s in range(steps - 1):
        ratio = np.cos(math.pi / 2 * (s + 1) / steps)
        # fp32 as upstream: the product is rounded before the floor.
        left = max(1, min(left - 1, int(np.floor(np.float32(tokens * ratio)))))
        out.append(left)
    return [*out, 0]


class Plan:
    """Which positions each AR step decides, and its guidance scale.

    Attributes:
        steps: AR steps.
        cfg: guidance scale of each step.
        sizes: tokens per image decided at each step; the same for the whole batch.
        reveal: int64 [B, L], positions in the order in which they are decided; given ones first.

    Args:
        orders: int64 [B, L], a permutation an image.
        settings: number of AR steps, guidance.
        drawn: bool [B, L], positions to decide, equally many in every image; None for all.

    Raises:
        UserError: more steps than the picture has tokens. An edit with fewer tokens than steps decides one per step.
    """

    def __init__(self, orders: Tensor, settings: MARBase, drawn: Tensor | None = None):
        tokens = orders.shape[1]
        given = 0 if drawn is None else tokens - int(drawn[0].sum())
        left = masked_after(tokens, settings.ar_steps)
        if given:
            left = masked_after(tokens - given, min(settings.ar_steps, tokens - given))
        self.steps, self.tokens = len(left), tokens
        self.ends = [tokens - m for m in left]
        self.starts = [given, *self.ends[:-1]]
        self.sizes = [b - a for a, b in zip(self.starts, self.ends, strict=True)]
        # Upstream's last mask length is 1, so that its linear guidance ends just short of cfg.
        grown = [1 + (settings.cfg - 1) * (tokens - max(1, m)) / tokens for m in left]
        self.cfg = grown if settings.cfg_schedule == "linear" else [settings.cfg] * self.steps
        self.reveal = orders.flip(1)  # upstream masks the front of an order and reveals from its end
        if drawn is not None:
            first = drawn.gather(1, self.reveal).to(torch.uint8).argsort(dim=1, stable=True)
            self.reveal = self.reveal.gather(1, first)

    def ahead(self, step: int, reach: int = 1) -> Tensor:
        """int64 [B, M]: positions of steps ``step .. step + reach - 1``, in order of the steps."""
        return self.reveal[:, self.starts[step] : self.ends[min(step + reach, self.steps) - 1]]

    def known(self, step: int) -> Tensor:
        """int64 [B, K]: positions decided before ``step``, ascending."""
        return self.reveal[:, : self.starts[step]].sort(dim=1).values


def raster_orders(images: int, tokens: int) -> Tensor:
    """Orders that reveal row by row, int64 [images, tokens]."""
    return torch.arange(tokens - 1, -1, -1).expand(images, -1)
