"""FastHybrid's few-step diffusion of accepted drafts; ``__init__.py`` explains the method and its symbols.

A refinement runs the last S of T_g diffusion steps. Each subclass of :class:`Refinement` chooses S, and the states
before the first of these S steps. Shapes: N tokens with an accepted draft, c channels of a token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...chain import DiffusionBatch, MeanAdjustment
from ...diffusion_steps import StepTable, noise_for_steps
from ...noise import StreamNoise
from ..canvas import MARCanvas
from ..tokens import TokenIndex


class Refinement(ABC):
    """The diffusion of accepted drafts. If S is 0, the result is :meth:`start`.

    Args:
        canvas: the images.
        table: all T_g steps.
        noise: the noise for :meth:`start`, and the noise of all T_g steps.
        left_out: how many of the first steps are left out, T_g - S.
    """

    # gamma of each of the S steps, fp32 [S]; None if the steps do not mix their means with the draft.
    gamma: Tensor | None = None

    def __init__(self, canvas: MARCanvas, table: StepTable, noise: StreamNoise, left_out: int):
        self.canvas = canvas
        self.table = table.some_steps(left_out, len(table))
        self.noise = noise._replace(steps=noise.steps[left_out:])

    @abstractmethod
    def start(self, drafts: Tensor, noise: Tensor) -> Tensor:
        """The states of N tokens before the first of the S steps, computed from the tokens' drafts x' and from noise.
        The result and both arguments are fp32 [N, c].
        """

    def batch(self, tokens: TokenIndex, z: Tensor, drafts: Tensor) -> DiffusionBatch:
        """A batch of N tokens with accepted drafts, for S diffusion steps.

        ``tokens``, ``z``: see :meth:`.MARCanvas.batch`; ``drafts``: the drafts x' of the tokens, fp32 [N, c].
        """
        batch = self.canvas.batch(self.table, tokens, z, self.noise)
        adjustment = None if self.gamma is None else MeanAdjustment(drafts, self.gamma)
        return replace(batch, x=self.start(drafts, noise=batch.x), mean_adjustment=adjustment)


class Guided(Refinement):
    """Steps that mix their means with the draft. They start from noise or, if the first steps are left out, from the
    draft with added noise.
    """

    def __init__(self, canvas: MARCanvas):
        settings = canvas.settings
        table, noise = all_guided_steps(canvas)
        weights = guidance_weights(settings.guidance_schedule, len(table))
        beginning = beginning_of_guided(table, noise, weights, settings.temperature)

        super().__init__(canvas, table, noise._replace(start=beginning.noise), beginning.left_out)
        self.sigma = beginning.sigma
        self.gamma = to_device(torch.tensor(weights[beginning.left_out :]), canvas.device)

    def start(self, drafts: Tensor, noise: Tensor) -> Tensor:
        return noise if self.sigma is None else drafts + self.sigma * noise


class GuidedBeginning(NamedTuple):
    """Where the guided steps begin, see :func:`beginning_of_guided`."""

    left_out: int  # how many of the first steps are left out
    noise: Tensor  # the noise in the states before the other steps, fp32 [B, L, c]
    sigma: Tensor | None  # std of this noise around the draft; None if the states are this noise alone


def beginning_of_guided(
    table: StepTable, noise: StreamNoise, weights: Sequence[float], temperature: float
) -> GuidedBeginning:
    """Where the guided steps begin. ``weights``: gamma of each step.

    A step with gamma 1 gives x' + sigma noise whatever the head predicts. So the last step with gamma 1 and all steps
    before it are left out. The other steps begin with x' + sigma noise, with the noise and the sigma of the last step
    that is left out. If no step has gamma 1, all steps run, and they begin with the noise for the first step.

    In most schedules, only the first of all steps has gamma 1. In the schedule linear-up, only the last of all steps
    has gamma 1. Then no step is run, and the result is the draft, because the last step adds no noise. If T_g is 1, the
    only step has gamma 1 in all schedules except none, so the result is the draft too.
    """
    steps_with_full_weight = [k for k, weight in enumerate(weights) if weight == 1]
    if not steps_with_full_weight:
        return GuidedBeginning(left_out=0, noise=noise.start, sigma=None)

    # When a step is run, the head chooses sigma from a range. Here sigma is the middle of this range, times the
    # temperature.
    last = steps_with_full_weight[-1]
    sigma = table.columns().log_std_middle[last].exp() * temperature
    return GuidedBeginning(left_out=last + 1, noise=noise.steps[last], sigma=sigma)


class Renoised(Refinement):
    """The last S of T_g steps, without the mixing of :class:`Guided`. They start from the draft x' with added noise:
    x = sqrt(abar_t) x' + sqrt(1 - abar_t) noise. A diffusion that starts from pure noise has as much noise before these
    steps. t is the timestep of the first of the S steps, and abar_t is the product of all 1 - beta up to t.

    ``diffusion_steps.py`` has the equation data = data_x x + data_per_prediction prediction. Here the data is the draft
    x', and the prediction is the noise; data_x is 1 / sqrt(abar_t), and data_per_prediction is -sqrt(1 / abar_t - 1).
    :meth:`start` solves this equation for the state x.
    """

    def __init__(self, canvas: MARCanvas):
        table, noise = all_guided_steps(canvas)
        steps = len(table)
        # S is T_g times denoise, rounded down, as is usual in image-to-image pipelines. For example, 15 steps times
        # denoise = 0.9 is 13.5, so S is 13.
        left_out = steps - int(round(steps * canvas.settings.denoise, 6))
        super().__init__(canvas, table, noise, left_out)

        # If S is 0, there is no noise: abar_t is 1.
        self.data_x: Tensor | float = 1.0
        self.data_per_prediction: Tensor | float = 0.0
        if left_out < steps:
            self.data_x = table.columns().data_x[left_out]
            self.data_per_prediction = table.columns().data_per_prediction[left_out]

    def start(self, drafts: Tensor, noise: Tensor) -> Tensor:
        return (drafts - self.data_per_prediction * noise) / self.data_x


class Unchanged(Refinement):
    """No step is run (S is 0): an accepted draft does not change."""

    def __init__(self, canvas: MARCanvas):
        table, noise = all_guided_steps(canvas)
        super().__init__(canvas, table, noise, left_out=len(table))

    def start(self, drafts: Tensor, noise: Tensor) -> Tensor:
        return drafts


# The refinement for each value of the setting ``accepted``.
REFINEMENTS: dict[str, type[Guided | Renoised | Unchanged]] = {
    "refine": Guided,
    "renoise": Renoised,
    "keep": Unchanged,
}


def all_guided_steps(canvas: MARCanvas) -> tuple[StepTable, StreamNoise]:
    """The table of all T_g steps, and the noise, with an entry for each of these steps."""
    table = canvas.step_table(canvas.settings.guided_steps)
    noise = canvas.noise_of("guided")
    return table, noise._replace(steps=noise_for_steps(noise.steps, len(table)))


def guidance_weights(schedule: str, steps: int) -> tuple[float, ...]:
    """gamma_t for each of the T_g = ``steps`` steps, in the order in which they run: t = T_g .. 1. The paper gives a
    formula only for cos. We chose the other formulas to fit their names.
    """
    weight = {
        "cos": lambda t: math.sin(math.pi / 2 * (t / steps)) ** 2,  # 1 - cos^2(pi t / (2 T_g))
        "linear-down": lambda t: t / steps,
        "square": lambda t: (t / steps) * (t / steps),
        "linear-up": lambda t: 1 - (t - 1) / steps,
        "none": lambda t: 0.0,
    }[schedule]
    return tuple(weight(t) for t in range(steps, 0, -1))
