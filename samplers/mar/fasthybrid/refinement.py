"""FastHybrid's few-step diffusion of accepted drafts; ``__init__.py`` explains the method and its symbols."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...chain import DiffusionBatch, MeanAdjustment, StepTable, noise_for_steps
from ..canvas import MARCanvas, StreamNoise


class Refinement(ABC):
    """The few-step diffusion of accepted drafts: all T_g steps, or only the last S of them. If S is 0, the tokens are
    the drafts.
    """

    table: StepTable  # the S steps that are run
    noise: StreamNoise  # ``start``: noise for the states before the first step; ``steps``: noise of the S steps

    def __init__(self, canvas: MARCanvas):
        """Run all T_g steps; a subclass may leave out the first steps."""
        self.table = canvas.step_table(canvas.settings.guided_steps)
        noise = canvas.noise_of("guided")
        self.noise = noise._replace(steps=noise_for_steps(noise.steps, len(self.table)))

    def leave_out_first(self, steps: int) -> None:
        """Leave out the first ``steps`` steps."""
        self.table = self.table.some_steps(steps, len(self.table))
        self.noise = self.noise._replace(steps=self.noise.steps[steps:])

    @abstractmethod
    def from_drafts(self, batch: DiffusionBatch, drafts: Tensor) -> DiffusionBatch:
        """The accepted tokens in their states before the first step that is run.

        Args:
            batch: the same N tokens; their states are only noise, :attr:`StreamNoise.start`.
            drafts: the drafts x' of the tokens, fp32 [N, channels].
        """


class Guided(Refinement):
    """Steps whose means are mixed with the draft. They start from noise, or, if the first steps are left out, from the
    draft with added noise.
    """

    sigma: Tensor | None = None  # std of the noise that is added to the draft; None: the steps start from noise alone

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)
        settings = canvas.settings
        weights = guidance_weights(settings.guidance_schedule, len(self.table))

        # If gamma is 1, a step gives x' + sigma noise whatever the head predicts, so this step and all steps before it
        # are left out. In most schedules it is the first step. The last step adds no noise. If its gamma is 1, as in
        # the schedule linear-up, no step is run, and the state is the draft. The same holds if there is only one step,
        # except in the schedule none.
        left_out = 0
        last_left_out = last_step_with_full_weight(weights)
        if last_left_out is not None:
            left_out = last_left_out + 1
            # The head learned to choose sigma from a range. Without the head, sigma is the middle of this range, times
            # the temperature.
            self.sigma = self.table.columns().middle[last_left_out].exp() * settings.temperature
            self.noise = self.noise._replace(start=self.noise.steps[last_left_out])
        self.leave_out_first(left_out)
        self.gamma = to_device(torch.tensor(weights[left_out:]), canvas.device)  # gamma of the S steps, fp32 [S]

    def from_drafts(self, batch: DiffusionBatch, drafts: Tensor) -> DiffusionBatch:
        x = batch.x if self.sigma is None else drafts + self.sigma * batch.x
        return replace(batch, x=x, mean_adjustment=MeanAdjustment(drafts, self.gamma))


class Renoised(Refinement):
    """The last of T_g steps. They start from the draft with added noise."""

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)

        # The number of steps is rounded down, as is usual in image-to-image pipelines. For example, 15 steps times
        # denoise = 0.9 is 13.5, so 13 steps are run.
        steps = len(self.table)
        left_out = steps - int(round(steps * canvas.settings.denoise, 6))

        # The state before the first step is x_t = sqrt(abar_t) x' + sqrt(1 - abar_t) noise. t is the timestep of this
        # step, and abar_t is the product of all 1 - beta up to t. If no step is run, there is no noise: abar_t is 1.
        self.data_x: Tensor | float = 1.0  # 1 / sqrt(abar_t)
        self.data_out: Tensor | float = 0.0  # -sqrt(1 / abar_t - 1)
        if left_out < steps:
            self.data_x = self.table.columns().data_x[left_out]
            self.data_out = self.table.columns().data_out[left_out]
        self.leave_out_first(left_out)

    def from_drafts(self, batch: DiffusionBatch, drafts: Tensor) -> DiffusionBatch:
        return replace(batch, x=(drafts - self.data_out * batch.x) / self.data_x)


class Unchanged(Refinement):
    """No steps: an accepted draft does not change."""

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)
        self.leave_out_first(len(self.table))

    def from_drafts(self, batch: DiffusionBatch, drafts: Tensor) -> DiffusionBatch:
        return replace(batch, x=drafts)


# For each value of the setting ``accepted``: what happens to an accepted draft.
REFINEMENTS: dict[str, type[Refinement]] = {
    "refine": Guided,
    "renoise": Renoised,
    "keep": Unchanged,
}


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
    """The index of the last step whose gamma, its entry in ``weights``, is 1; None if there is no such step."""
    return max((k for k, weight in enumerate(weights) if weight == 1), default=None)
