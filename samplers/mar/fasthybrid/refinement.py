"""FastHybrid's few-step diffusion of accepted drafts; ``__init__.py`` explains the method and its symbols.

Shapes: B images of L tokens, N accepted tokens, c channels of a token. Of the T_g guided steps, the last S are run; all
subclasses of :class:`Refinement` choose S and the states before the first of these S steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...chain import DiffusionBatch, MeanAdjustment
from ...diffusion_steps import StepTable, noise_for_steps
from ..canvas import MARCanvas
from ..tokens import StreamNoise, Tokens


class Refinement(ABC):
    """The diffusion of accepted drafts. If S is 0, the result is :meth:`start`.

    Args:
        canvas: the images.
        table: all T_g steps.
        noise: the noise of the state before the first step that is run, and of all T_g steps.
        left_out: how many of the first steps are left out, T_g - S.
    """

    # gamma of the S steps, fp32 [S]; None if the means of the steps are not mixed with the draft.
    gamma: Tensor | None = None

    def __init__(self, canvas: MARCanvas, table: StepTable, noise: StreamNoise, left_out: int):
        self.canvas = canvas
        self.table = table.some_steps(left_out, len(table))
        self.noise = noise._replace(steps=noise.steps[left_out:])

    @abstractmethod
    def start(self, drafts: Tensor, noise: Tensor) -> Tensor:
        """The states of N tokens before the first step that is run, made from their drafts x' and from noise; fp32
        [N, c] each.
        """

    def batch(self, tokens: Tokens, z: Tensor, drafts: Tensor) -> DiffusionBatch:
        """The batch of N accepted tokens, with S steps.

        ``tokens``, ``z``: see :meth:`.MARCanvas.batch`; ``drafts``: the drafts x' of the tokens, fp32 [N, c].
        """
        batch = self.canvas.batch(self.table, tokens, z, self.noise)
        adjustment = None if self.gamma is None else MeanAdjustment(drafts, self.gamma)
        return replace(batch, x=self.start(drafts, noise=batch.x), mean_adjustment=adjustment)


class Guided(Refinement):
    """Steps whose means are mixed with the draft. They start from noise, or, if the first steps are left out, from the
    draft with added noise.
    """

    sigma: Tensor | None = None  # std of the noise that is added to the draft; None: the steps start from noise alone

    def __init__(self, canvas: MARCanvas):
        settings = canvas.settings
        table, noise = all_guided_steps(canvas)
        weights = guidance_weights(settings.guidance_schedule, len(table))

        left_out = 0
        last_left_out = last_step_with_full_weight(weights)
        if last_left_out is not None:
            left_out = last_left_out + 1
            # The state after this step is the draft with the step's noise. The head learned to choose sigma from a
            # range. Without the head, sigma is the middle of this range, times the temperature.
            self.sigma = table.columns().log_std_middle[last_left_out].exp() * settings.temperature
            noise = noise._replace(start=noise.steps[last_left_out])
        super().__init__(canvas, table, noise, left_out)
        self.gamma = to_device(torch.tensor(weights[left_out:]), canvas.device)

    def start(self, drafts: Tensor, noise: Tensor) -> Tensor:
        return noise if self.sigma is None else drafts + self.sigma * noise


class Renoised(Refinement):
    """The last of T_g steps. They start from the draft with as much noise as the state before these steps has:
    x = sqrt(abar_t) x' + sqrt(1 - abar_t) noise. t is the timestep of the first step that is run, and abar_t is the
    product of all 1 - beta up to t.
    """

    def __init__(self, canvas: MARCanvas):
        table, noise = all_guided_steps(canvas)
        steps = len(table)
        # The number of steps is rounded down, as is usual in image-to-image pipelines. For example, 15 steps times
        # denoise = 0.9 is 13.5, so 13 steps are run.
        left_out = steps - int(round(steps * canvas.settings.denoise, 6))
        super().__init__(canvas, table, noise, left_out)

        # data_x is 1 / sqrt(abar_t), and data_out is -sqrt(1 / abar_t - 1). If no step is run, there is no noise:
        # abar_t is 1.
        self.data_x: Tensor | float = 1.0
        self.data_out: Tensor | float = 0.0
        if left_out < steps:
            self.data_x = table.columns().data_x[left_out]
            self.data_out = table.columns().data_per_prediction[left_out]

    def start(self, drafts: Tensor, noise: Tensor) -> Tensor:
        # The head predicts the noise in a state x, and x' = data_x x + data_out noise. This is solved for x.
        return (drafts - self.data_out * noise) / self.data_x


class Unchanged(Refinement):
    """No steps: an accepted draft does not change."""

    def __init__(self, canvas: MARCanvas):
        table, noise = all_guided_steps(canvas)
        super().__init__(canvas, table, noise, left_out=len(table))

    def start(self, drafts: Tensor, noise: Tensor) -> Tensor:
        return drafts


# For each value of the setting ``accepted``: what happens to an accepted draft.
REFINEMENTS: dict[str, type[Guided | Renoised | Unchanged]] = {
    "refine": Guided,
    "renoise": Renoised,
    "keep": Unchanged,
}


def all_guided_steps(canvas: MARCanvas) -> tuple[StepTable, StreamNoise]:
    """The table of all T_g steps, and their noise; the noise has one entry per step."""
    table = canvas.step_table(canvas.settings.guided_steps)
    noise = canvas.noise_of("guided")
    return table, noise._replace(steps=noise_for_steps(noise.steps, len(table)))


def guidance_weights(schedule: str, steps: int) -> tuple[float, ...]:
    """gamma_t for t = T_g .. 1, which is the order in which the steps run. The paper gives a formula only for cos; we
    chose the other formulas to fit their names.
    """
    weight = {
        "cos": lambda t: math.sin(math.pi / 2 * (t / steps)) ** 2,  # 1 - cos^2(pi t / (2 T_g))
        "linear-down": lambda t: t / steps,
        "square": lambda t: (t / steps) * (t / steps),
        "linear-up": lambda t: 1 - (t - 1) / steps,
        "none": lambda t: 0.0,
    }[schedule]
    return tuple(weight(t) for t in range(steps, 0, -1))


def last_step_with_full_weight(weights: Sequence[float]) -> int | None:
    """The index of the last step whose gamma, its entry in ``weights``, is 1; None if there is no such step.

    If gamma is 1, a step gives x' + sigma noise whatever the head predicts, so this step and all steps before it need
    not run. In most schedules it is the first step. The last step adds no noise. If its gamma is 1, as in the schedule
    linear-up, no step is run, and the state is the draft. The same holds if there is only one step, except in the
    schedule none.
    """
    return max((k for k, weight in enumerate(weights) if weight == 1), default=None)
