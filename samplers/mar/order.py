"""Which tokens each AR step decides, and with which guidance scale.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. :class:`Order` combines the orders and the numbers of tokens that
``schedule.py`` computes. Shapes: B images of L tokens. A position is the index of a token in its image, counted row by
row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...networks.torch_state import to_device
from .settings import MARBase


class Order:
    """Which positions each AR step decides, and with which guidance scale. Both are known before the first AR step.

    Args:
        orders: int64 [B, L], the positions of each image in the order in which they are to be decided.
        settings: the settings that determine the number of AR steps and the guidance scales.
        regenerated: bool [B, L], in an edit, the positions to decide; their number is the same in every image. The
            other positions are *fixed*: they count as decided before the first AR step. None to decide all positions.
    """

    steps: int  # AR steps
    # One entry for each AR step, the same for all images:
    count_before: list[int]  # number of positions decided before the AR step, including fixed positions
    sizes: list[int]  # number of positions that the AR step decides
    cfg: list[float]  # guidance scale
    decision_order: Tensor  # int64 [B, L], the positions in the order of their decision; fixed positions first
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
            # In the published code, 1 token still counts as masked after the last AR step. So linear guidance ends
            # slightly below cfg.
            self.cfg = [1 + (settings.cfg - 1) * (tokens - max(1, masked)) / tokens for masked in masked_counts]

        self.decision_order = orders if regenerated is None else moved_to_front(orders, ~regenerated)
        # Fixed positions are not sampled, so their scale of 1 has no effect.
        scale_in_order = torch.tensor([1.0, *self.cfg]).repeat_interleave(torch.tensor([fixed_count, *self.sizes]))
        self._set_scale(to_device(scale_in_order, orders.device).expand_as(orders))

    def _set_scale(self, scale_in_order: Tensor) -> None:
        """Set :attr:`scale` from the guidance scales in the order of decision, fp32 [B, L]."""
        self.scale = torch.empty_like(scale_in_order).scatter(1, self.decision_order, scale_in_order)

    @property
    def plan(self) -> dict[int, Tensor]:
        """The positions that each AR step decides, int64 [B, n], by the index of the AR step."""
        return {step: self.positions_from(step) for step in range(self.steps)}

    def positions_from(self, step: int, steps: int = 1) -> Tensor:
        """The positions that AR step ``step`` and the ``steps - 1`` AR steps after it decide, int64 [B, M], in the
        order of decision. AR steps after the last one decide none.
        """
        return self.next_positions(step, sum(self.sizes[step : step + steps]))

    def decided_before(self, step: int) -> Tensor:
        """The positions decided before AR step ``step``, int64 [B, K], ascending."""
        return self.decision_order[:, : self.count_before[step]].sort(dim=1).values

    def decided_before_each(self, images: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """:meth:`decided_before` for R batch rows. Each batch row is an image at its own AR step.

        Args:
            images: int64 [R], the image of each batch row.
            steps: the AR step of each batch row.

        Returns:
            The positions of each batch row, int64 [R, K], ascending, then padding; and a mask, bool [R, K], which is
            False on padding. The mask is None if there is no padding.
        """
        counts = [self.count_before[step] for step in steps]
        most = max(counts)
        decided = self.decision_order[images, :most]
        if min(counts) == most:
            return decided.sort(dim=1).values, None

        # The padding gets an index above every position, so the sort puts it last.
        last = self.decision_order.shape[1] - 1
        mask = torch.arange(most, device=decided.device) < to_device(torch.tensor(counts), decided.device)[:, None]
        padded_last = torch.where(mask, decided, last + 1).sort(dim=1).values
        return padded_last.clamp(max=last), mask

    def next_positions(self, step: int, count: int) -> Tensor:
        """The first ``count`` positions that are undecided before AR step ``step``, int64 [B, M]; fewer if fewer are
        left.
        """
        start = self.count_before[step]
        return self.decision_order[:, start : start + count]

    def choose(self, step: int, positions: Tensor) -> None:
        """Let AR step ``step`` decide ``positions``, int64 [B, n]. They must be undecided, and n must be the size of
        the AR step. All other undecided positions keep their order.

        This is for methods that choose the positions of an AR step from :meth:`next_positions`. FastAR has no such
        sampler, but CONTRIBUTING.md has an example.
        """
        scale_in_order = self.scale.gather(1, self.decision_order)
        start = self.count_before[step]
        undecided = self.decision_order[:, start:]
        chosen = torch.zeros_like(self.decision_order, dtype=torch.bool).scatter(1, positions, True)
        others = moved_to_front(undecided, ~chosen)[:, : undecided.shape[1] - self.sizes[step]]

        self.decision_order = torch.cat([self.decision_order[:, :start], positions, others], 1)
        self._set_scale(scale_in_order)


def moved_to_front(order: Tensor, mask: Tensor) -> Tensor:
    """Move some positions to the front of ``order``, int64 [B, n]: the positions at which ``mask``, bool [B, L], is
    True. The moved positions keep their order, and so do all other positions.
    """
    is_later = (~mask).gather(1, order).to(torch.uint8)
    return order.gather(1, is_later.argsort(dim=1, stable=True))
