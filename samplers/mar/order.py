"""Which tokens each AR step decides, and with which guidance scale.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. :func:`make_order` takes the order of the tokens in each image and
divides it among the AR steps. ``schedule.py`` computes how many tokens each AR step decides. Shapes: B images of L
tokens. A position is the index of a token in its image, counted row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...networks.torch_state import to_device
from .settings import MARBase


@dataclass(frozen=True, eq=False)
class Order:
    """Which positions each AR step decides, and with which guidance scale. Both are known before the first AR step.

    In an edit, the positions outside the mask are *fixed*: they count as decided before the first AR step.
    """

    # One entry for each AR step, the same for all images:
    count_before: tuple[int, ...]  # number of positions decided before the AR step, including fixed positions
    sizes: tuple[int, ...]  # number of positions that the AR step decides
    cfg: tuple[float, ...]  # guidance scale
    decision_order: Tensor  # int64 [B, L], the positions in the order of their decision; fixed positions first
    scale: Tensor  # fp32 [B, L], the guidance scale of every position; 1 at fixed positions, where it has no effect

    @property
    def steps(self) -> int:
        """Number of AR steps."""
        return len(self.sizes)

    @property
    def plan(self) -> dict[int, Tensor]:
        """The positions that each AR step decides, int64 [B, n], by the index of the AR step."""
        return {step: self.positions_from(step) for step in range(self.steps)}

    def positions_from(self, step: int, count: int = 1) -> Tensor:
        """The positions that ``count`` AR steps decide, from AR step ``step`` on, int64 [B, M], in the order of
        decision. If fewer than ``count`` AR steps are left, the result covers only these.
        """
        start = self.count_before[step]
        stop = start + sum(self.sizes[step : step + count])
        return self.decision_order[:, start:stop]

    def decided_before(self, step: int) -> Tensor:
        """The positions decided before AR step ``step``, int64 [B, K], ascending."""
        return self.decision_order[:, : self.count_before[step]].sort(dim=1).values

    def decided_before_each(self, images: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """:meth:`decided_before` for Q snapshots. A snapshot is an image at an AR step, see ``transformer.py``.

        Args:
            images: int64 [Q], the image of each snapshot.
            steps: the AR step of each snapshot.

        Returns:
            The positions of each snapshot, int64 [Q, K], ascending, then padding; and a mask, bool [Q, K], which is
            False on padding. The mask is None if there is no padding.
        """
        counts = [self.count_before[step] for step in steps]
        most = max(counts)
        decided = self.decision_order[images, :most]
        if min(counts) == most:
            return decided.sort(dim=1).values, None

        # The padding gets an index above every position, so the sort puts the padding last.
        last = self.decision_order.shape[1] - 1
        mask = torch.arange(most, device=decided.device) < to_device(torch.tensor(counts), decided.device)[:, None]
        padded_last = torch.where(mask, decided, last + 1).sort(dim=1).values
        return padded_last.clamp(max=last), mask


def make_order(orders: Tensor, settings: MARBase, regenerated: Tensor | None = None) -> Order:
    """Divide the positions of the images among the AR steps.

    Args:
        orders: int64 [B, L], the positions of each image in the order in which they are to be decided.
        settings: the settings that determine the number of AR steps and the guidance scales.
        regenerated: bool [B, L], in an edit, the positions to decide; their number is the same in every image. The
            other positions are fixed. None to decide all positions.
    """
    tokens = orders.shape[1]
    fixed_count = 0 if regenerated is None else tokens - int(regenerated[0].sum())

    # 1. How many positions each AR step decides.
    masked_counts = settings.masked_after_steps(tokens, regenerated if fixed_count else None)
    count_after = [tokens - masked for masked in masked_counts]
    count_before = [fixed_count, *count_after[:-1]]
    sizes = [after - before for before, after in zip(count_before, count_after, strict=True)]

    # 2. The guidance scale of each AR step.
    cfg = [settings.cfg] * len(sizes)
    if settings.cfg_schedule == "linear":
        # As in the published code, 1 token still counts as masked after the last AR step. So linear guidance ends
        # slightly below cfg.
        cfg = [1 + (settings.cfg - 1) * (tokens - max(1, masked)) / tokens for masked in masked_counts]

    # 3. The guidance scale of each position: first listed in the order of decision, then rearranged so that entry i
    #    belongs to position i.
    decision_order = orders if regenerated is None else moved_to_front(orders, ~regenerated)
    scale_of_steps = torch.tensor([1.0, *cfg]).repeat_interleave(torch.tensor([fixed_count, *sizes]))
    scale_in_order = to_device(scale_of_steps, orders.device).expand_as(orders)
    scale = torch.empty_like(scale_in_order).scatter(1, decision_order, scale_in_order)

    return Order(tuple(count_before), tuple(sizes), tuple(cfg), decision_order, scale)


def moved_to_front(order: Tensor, mask: Tensor) -> Tensor:
    """Move some positions to the front of ``order``, int64 [B, n]: the positions at which ``mask``, bool [B, L], is
    True. The moved positions keep their order, and so do all other positions.
    """
    is_later = (~mask).gather(1, order).to(torch.uint8)
    return order.gather(1, is_later.argsort(dim=1, stable=True))
