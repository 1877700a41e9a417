"""FastHybrid's few-step diffusion of accepted drafts; ``__init__.py`` has the method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...chain import DiffusionBatch, MeanAdjustment, StepTable, spread
from ..canvas import MARCanvas, StreamNoise


class Refinement(ABC):
    """The few-step diffusion of accepted tokens: all or the last of T_g steps, from a state made from the draft.
    Without steps, the state is the draft, which does not change.
    """

    table: StepTable  # the S steps that are run
    noise: StreamNoise  # ``start`` is the noise from which the states are made, ``steps`` that of the S steps

    def __init__(self, canvas: MARCanvas):
        """All T_g steps; a subclass leaves out the first ones."""
        self.table = canvas.step_table(canvas.settings.guided_steps)
        noise = canvas.noise_of("guided")
        self.noise = noise._replace(steps=spread(noise.steps, len(self.table)))

    def skip(self, steps: int) -> None:
        """Leave out the first ``steps`` steps."""
        self.table = self.table.some_steps(steps, len(self.table))
        self.noise = self.noise._replace(steps=self.noise.steps[steps:])

    @abstractmethod
    def from_drafts(self, batch: DiffusionBatch, drafts: Tensor) -> DiffusionBatch:
        """Accepted tokens in their states before the first step that is run.

        Args:
            batch: the same N tokens with noise, :attr:`StreamNoise.start`, in place of these states.
            drafts: x' of the tokens, fp32 [N, channels].
        """


class Guided(Refinement):
    """T_g steps whose means are mixed with the draft. They start from noise."""

    sigma: Tensor | None = None  # std of the noise that is added to the draft; None: the steps start from noise alone

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)
        settings = canvas.settings
        weights = guidance_weights(settings.guidance_schedule, len(self.table))

        # A step with gamma = 1 gives x' + sigma noise whatever the head predicts, so this step and the steps before it
        # are skipped. In most schedules it is the first step. The last step has no noise: if its gamma is 1, as with
        # linear-up or a single step, no step is run, and the state is the draft.
        skipped = max((k + 1 for k, weight in enumerate(weights) if weight == 1), default=0)
        if skipped:
            # The step's logits are not computed, so sigma is the middle of the learned range, with the temperature.
            last = skipped - 1
            self.sigma = self.table.columns().middle[last].exp() * settings.temperature
            self.noise = self.noise._replace(start=self.noise.steps[last])
        self.skip(skipped)
        self.gamma = to_device(torch.tensor(weights[skipped:]), canvas.device)  # gamma_t of the S steps, fp32 [S]

    def from_drafts(self, batch: DiffusionBatch, drafts: Tensor) -> DiffusionBatch:
        x = batch.x if self.sigma is None else drafts + self.sigma * batch.x
        return replace(batch, x=x, change=MeanAdjustment(drafts, self.gamma))


class Renoised(Refinement):
    """The last of T_g steps, from the draft with added noise."""

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)

        # Rounded down, as pipelines that start from an image count their steps: 13 of 15 * 0.9 are run.
        steps = len(self.table)
        skipped = steps - int(round(steps * canvas.settings.denoise, 6))

        # x_t = sqrt(abar_t) x' + sqrt(1 - abar_t) noise, where t is the timestep of the first step that is run. After
        # the last step there is no noise: abar_t is 1.
        self.data_x: Tensor | float = 1.0  # 1 / sqrt(abar_t)
        self.data_out: Tensor | float = 0.0  # -sqrt(1 / abar_t - 1)
        if skipped < steps:
            self.data_x = self.table.columns().data_x[skipped]
            self.data_out = self.table.columns().data_out[skipped]
        self.skip(skipped)

    def from_drafts(self, batch: DiffusionBatch, drafts: Tensor) -> DiffusionBatch:
        return replace(batch, x=(drafts - self.data_out * batch.x) / self.data_x)


class Kept(Refinement):
    """No steps: an accepted draft stays as it is."""

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)
        self.skip(len(self.table))

    def from_drafts(self, batch: DiffusionBatch, drafts: Tensor) -> DiffusionBatch:
        return replace(batch, x=drafts)


# For each value of the setting ``accepted``: what happens to an accepted draft.
REFINEMENTS: dict[str, type[Refinement]] = {
    "refine": Guided,
    "renoise": Renoised,
    "keep": Kept,
}


def guidance_weights(schedule: str, steps: int) -> tuple[float, ...]:
    """gamma_t for t = T_g .. 1 (the order of execution). The paper gives a formula for cos only; the other weights
    follow from their names.
    """
    weight = {
        "cos": lambda t: math.sin(math.pi / 2 * (t / steps)) ** 2,  # 1 - cos^2(pi t / 2 T_g)
        "linear-down": lambda t: t / steps,
        "square": lambda t: (t / steps) * (t / steps),
        "linear-up": lambda t: 1 - (t - 1) / steps,
        "none": lambda t: 0.0,
    }[schedule]
    return tuple(weight(t) for t in range(steps, 0, -1))
