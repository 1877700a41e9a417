"""Annealed diffusion steps (DiSA): later passes take fewer diffusion steps.

Source: Zhao et al. 2025, arXiv 2505.20297, section 3.2, and the published code.
"""

from __future__ import annotations

import math

from .settings import HeadGuarantees


class Annealed(HeadGuarantees):
    """The settings that all samplers with DiSA share. The settings class of each sampler declares both fields again,
    because each sampler has its own help texts.
    """

    diffusion_steps: int  # diffusion steps of the first pass
    diffusion_steps_end: int | None  # diffusion steps of the last pass; None: all passes have diffusion_steps

    def __post_init__(self) -> None:
        super().__post_init__()

        # If later passes would not have fewer steps, DiSA is off. The report shows this by the value None. The derived
        # classes are frozen dataclasses, so only object.__setattr__ can change the field.
        if self.diffusion_steps_end is not None and self.diffusion_steps_end >= self.diffusion_steps:
            object.__setattr__(self, "diffusion_steps_end", None)

    @property
    def annealed(self) -> bool:
        """Whether later passes have fewer diffusion steps."""
        return self.diffusion_steps_end is not None

    @property
    def approximates(self) -> bool:
        return self.annealed or super().approximates


def annealed_steps(first: int, last: int | None, passes: int) -> list[int]:
    """The number of diffusion steps of each pass.

    In the paper's linear schedule, pass k = 0 .. passes - 1 has last + floor((1 - k / (passes - 1)) (first - last))
    steps. Every pass has ``first`` steps if ``last`` is None, if ``last`` is not below ``first``, or if there is only
    one pass.
    """
    if last is None or last >= first or passes == 1:
        return [first] * passes

    out = []
    for k in range(passes):
        share = 1 - k / (passes - 1)
        # Round before the floor: a product that should be a whole number may come out a little too small.
        out.append(last + math.floor(round(share * (first - last), 9)))
    return out
