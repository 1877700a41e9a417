"""Which tokens each AR step decides, and with which guidance scale.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. ``schedule.py`` has the orders and the numbers of tokens from
which :class:`Order` is made. Shapes: B images of L tokens. A position is the index of a token in its image, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...networks.torch_state import to_device
from .settings import MARBase


class Order:
    """Which positions each AR step decides, and with which guidance scale. All of it is known before the first AR step.

    Args:
        orders: int64 [B, L], a permutation of the positions per image; the first position is decided first.
        settings: the settings that give the number of AR steps and the guidance.
        regenerated: bool [B, L], the positions to decide, the same number in every image; None to decide all positions.
    """

    steps: int  # AR steps
    # One entry for each AR step, the same for all images:
    count_before: list[int]  # number of positions decided before the AR step
    sizes: list[int]  # number of positions that the AR step decides
    cfg: list[float]  # guidance scale
    decision_order: Tensor  # int64 [B, L], the positions in the order of their decision; fixed ones first
    scale: Tensor  # fp32 [B, L], the guidance scale of every position

    def __init__(self, orders: Tensor, settings: MARBase, regenerated: Tensor | None = None):
        tokens = orders.shape[1]
        fixed_count = 0 if regenerated is None else tokens - int(regenerated[0].sum())
        masked_counts = settings.masked_after_steps(tokens, regenerated if fixed_count else None)
        count_after = [tokens - masked for masked in masked_counts]
        self.steps = len(count_after)
        self.count_before = [fixed_count, *count_after[:-1]]
        self.sizes = [after - before for before, after in zip(self.count_before, count_after, strict=True)]

        self.cfg = [settings.cfg] * self.steps
        if settings.cfg_schedule == "linear":
            # The published code's last mask length is 1, so its linear guidance ends just short of cfg.
            self.cfg = [1 + (settings.cfg - 1) * (tokens - max(1, masked)) / tokens for masked in masked_counts]

        self.decision_order = orders if regenerated is None else moved_to_front(orders, ~regenerated)
        # The positions that an edit fixes are not sampled, so their scale of 1 has no effect.
        scale_in_order = torch.tensor([1.0, *self.cfg]).repeat_interleave(torch.tensor([fixed_count, *self.sizes]))
        self._set_scale(to_device(scale_in_order, orders.device).expand_as(orders))

    def _set_scale(self, scale_in_order: Tensor) -> None:
        """Set :attr:`scale` from the guidance scales in the order of decision, fp32 [B, L]."""
        self.scale = torch.empty_like(scale_in_order).scatter(1, self.decision_order, scale_in_order)

    @property
    def plan(self) -> dict[int, Tensor]:
        """The positions that each AR step decides, int64 [B, n], by the number of the AR step."""
        return {step: self.positions_from(step) for step in range(self.steps)}

    def positions_from(self, step: int, steps: int = 1) -> Tensor:
        """The positions that ``steps`` AR steps from ``step`` on decide, int64 [B, M], in the order of these AR steps.
        Near the end there may be fewer AR steps.
        """
        return self.next_positions(step, sum(self.sizes[step : step + steps]))

    def decided_before(self, step: int) -> Tensor:
        """The positions decided before AR step ``step``, int64 [B, K], ascending."""
        return self.decision_order[:, : self.count_before[step]].sort(dim=1).values

    def decided_before_each(self, images: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """:meth:`decided_before` for R rows, each of which is an image at its own AR step.

        Args:
            images: int64 [R], the image of each row.
            steps: the AR step of each row.

        Returns:
            The positions of each row, int64 [R, K], ascending, with padding after them; and a mask, bool [R, K], which
            is False on padding. The mask is None if there is no padding.
        """
        counts = [self.count_before[step] for step in steps]
        most = max(counts)
        decided = self.decision_order[images, :most]
        if min(counts) == most:
            return decided.sort(dim=1).values, None

        # For the sort, the padding gets a number above every position, so it comes last.
        last = self.decision_order.shape[1] - 1
        mask = torch.arange(most, device=decided.device) < to_device(torch.tensor(counts), decided.device)[:, None]
        padded_last = torch.where(mask, decided, last + 1).sort(dim=1).values
        return padded_last.clamp(max=last), mask

    def next_positions(self, step: int, count: int) -> Tensor:
        """The next ``count`` positions to decide at AR step ``step``, int64 [B, M]; fewer if fewer are left."""
        start = self.count_before[step]
        return self.decision_order[:, start : start + count]

    def choose(self, step: int, positions: Tensor) -> None:
        """Let AR step ``step`` decide ``positions``, int64 [B, n], which must be undecided; n is the size of the AR
        step. All other undecided positions keep their order.

        This is for methods that choose the positions of an AR step from :meth:`next_positions`. No sampler of FastAR
        does this; CONTRIBUTING.md has an example.
        """
        scale_in_order = self.scale.gather(1, self.decision_order)
        start = self.count_before[step]
        undecided = self.decision_order[:, start:]
        chosen = torch.zeros_like(self.decision_order, dtype=torch.bool).scatter(1, positions, True)
        others = moved_to_front(undecided, ~chosen)[:, : undecided.shape[1] - self.sizes[step]]

        self.decision_order = torch.cat([self.decision_order[:, :start], positions, others], 1)
        self._set_scale(scale_in_order)


def moved_to_front(order: Tensor, mask: Tensor) -> Tensor:
    """Move the positions where ``mask``, bool [B, L], is True to the front of ``order``, int64 [B, n]. The moved
    positions keep their order, and so do all other positions.
    """
    is_later = (~mask).gather(1, order).to(torch.uint8)
    return order.gather(1, is_later.argsort(dim=1, stable=True))
