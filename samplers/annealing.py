"""Annealed diffusion steps: later passes take fewer (DiSA, Zhao et al. 2025, arXiv 2505.20297, section 3.2, and its
code).
"""

from __future__ import annotations

import math

from .settings import Guarantees


class Annealed(Guarantees):
    """The settings that all samplers with DiSA share. Each family of samplers defines the two fields again, with its
    own help texts.
    """

    diffusion_steps: int
    diffusion_steps_end: int | None  # diffusion steps of the last pass; None if they do not fall

    def __post_init__(self) -> None:
        super().__post_init__()

        # A report states what was used: if the steps do not fall, diffusion_steps_end is None.
        if self.diffusion_steps_end is not None and self.diffusion_steps_end >= self.diffusion_steps:
            object.__setattr__(self, "diffusion_steps_end", None)

    @property
    def annealed(self) -> bool:
        """Whether the diffusion steps fall."""
        return self.diffusion_steps_end is not None

    @property
    def approximates(self) -> bool:
        return self.annealed or super().approximates


def annealed_steps(first: int, last: int | None, passes: int) -> list[int]:
    """Diffusion steps of each of S = ``passes`` passes. The paper's linear schedule gives pass s = 0 .. S - 1
    last + floor((1 - s / (S - 1)) (first - last)) steps.

    If ``last`` is None, or not below ``first``, every pass has ``first`` steps.
    """
    if last is None or last >= first or passes == 1:
        return [first] * passes

    out = []
    for s in range(passes):
        share = 1 - s / (passes - 1)
        # Rounded before the floor, because a product that should be a whole number may come out a little too small.
        out.append(last + math.floor(round(share * (first - last), 9)))
    return out
