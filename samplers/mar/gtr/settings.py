"""Settings of GtR. Their methods make the plan: the order of the tokens, and how many tokens each AR step decides.

``__init__.py`` describes the method, ``stages.py`` computes the plan, and ``samplers/settings.py`` explains the
arguments of ``knob``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ....errors import UserError
from ...settings import knob
from ..settings import DiSASettings
from .stages import (
    PAPER,
    QUARTERS,
    expect_enough_tokens,
    in_stages,
    stage_count,
    stage_sizes,
    staged_after,
    stages_of_cells,
    steps_of_paper,
    steps_of_quarters,
)

# In each call of ``knob``: first the default and the tooltip, then the range.


@dataclass(frozen=True)
class GtRSettings(DiSASettings):
    """Settings of GtR.

    All tokens of the first AR step take ``diffusion_steps`` diffusion steps. So do the tokens with the most detail in
    every other AR step. The other tokens of the reconstruction take ``diffusion_steps_end`` diffusion steps.
    """

    fewest_steps: ClassVar[int] = 4
    different_image: ClassVar[bool] = True  # because the order of the tokens differs from MAR's

    # fmt: off
    steps: int = knob(17, "Number of AR steps (the steps in which the tokens of the image are decided), including "
        "reconstruction_steps; more is slower and finer. Usual: 17 for 256 tokens, as in the paper, and 6 to 9 for the "
        "demo.",
        low=1, high=4096, step=1)
    reconstruction_steps: int = knob(1, "Number of AR steps at the end, which decide the second half of the tokens "
        "(the tokens of one colour of a checkerboard); more is slower and finer. Usual: 1; the paper allows 1 or 2.",
        low=0, high=256, step=1, unit="AR steps",
        more="At 0, the order of the tokens and the number of tokens per AR step are the same as in MAR Sampler.")
    detail_share: float = knob(0.1, "Share of the tokens of an AR step that get the full number of diffusion steps. "
        "These are the tokens with the most detail; the other tokens get fewer diffusion steps. A higher share is "
        "slower and finer. Usual: 0.1; at 0, all tokens of an AR step get the same number of diffusion steps.",
        low=0.0, high=1.0, step=0.01,
        more="The setting has no effect if *diffusion_steps_end* equals *diffusion_steps*.")
    first_share: float = knob(0.75, "Share of AR steps for the first stage (see stages); the AR steps of the "
        "reconstruction do not count here. A higher share spends more AR steps on the layout and fewer on the other "
        "stages. Usual: 0.75, which is 12 of 16 AR steps.",
        low=0.01, high=0.99, step=0.01, advanced=True,
        more="The second stage takes the same share of the remaining AR steps: at 0.75, 3 of 4.")
    stages: str = knob(PAPER, "The tokens that are decided before the reconstruction are decided in stages: with "
        "paper, three stages of 1/8, 1/8 and 1/4 of all tokens; with quarters, two stages of 1/4. Usual: paper; "
        "quarters is for workflows that were saved before this setting existed.",
        choices=(PAPER, QUARTERS), advanced=True)
    # fmt: on

    @property
    def stage_steps(self) -> tuple[int, ...]:
        """Number of AR steps of each stage, the reconstruction last.

        Raises:
            UserError: the reconstruction leaves less than one AR step for each of the other stages.
        """
        last = self.reconstruction_steps
        before = self.steps - last  # AR steps before the reconstruction
        fewest = stage_count(self.stages) - 1
        if before < fewest:
            raise UserError(
                f"reconstruction_steps: {last} is too many if steps is {self.steps}, because the stages before the "
                f"reconstruction need at least {fewest} AR steps; set steps to at least {last + fewest}, or reduce "
                "reconstruction_steps."
            )

        if self.stages == QUARTERS:
            return *steps_of_quarters(self.first_share, self.steps, before), last
        return *steps_of_paper(self.first_share, before), last

    def orders(self, random_orders: Tensor) -> Tensor:
        orders = super().orders(random_orders)
        if not self.reconstruction_steps:
            return orders

        grid = math.isqrt(orders.shape[1])
        return in_stages(orders, stages_of_cells(grid, self.stages))

    def masked_after_steps(self, tokens: int, regenerated: Tensor | None = None) -> list[int]:
        """See :meth:`MARBase.masked_after_steps`. In an edit, a stage with fewer tokens than AR steps decides one token
        per AR step.

        Raises:
            UserError: without an edit, there are more AR steps than tokens in the image or in a stage; there are too
                few AR steps for the stages; or, in an edit, a stage does not have the same number of tokens in every
                image.
        """
        if not self.reconstruction_steps:
            return super().masked_after_steps(tokens, regenerated)

        steps = self.stage_steps
        sizes = stage_sizes(math.isqrt(tokens), self.stages, regenerated)
        if regenerated is None:  # in an edit, a stage with too few tokens has fewer AR steps
            expect_enough_tokens(sizes, steps)
        return staged_after(sizes, steps)

    def reconstruction(self, tokens: int, regenerated: Tensor | None = None) -> int:
        """Number of AR steps of the reconstruction; arguments as for :meth:`masked_after_steps`. If an edit has fewer
        tokens to reconstruct than ``reconstruction_steps``, each of these tokens takes one AR step.
        """
        if not self.reconstruction_steps:
            return 0

        *_, tokens_to_reconstruct = stage_sizes(math.isqrt(tokens), self.stages, regenerated)
        return min(self.reconstruction_steps, tokens_to_reconstruct)

    @property
    def approximates(self) -> bool:
        return self.reconstruction_steps > 0 or super().approximates
