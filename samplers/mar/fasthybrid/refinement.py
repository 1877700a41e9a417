"""FastHybrid's few-step diffusion of accepted drafts; ``__init__.py`` explains the method and its symbols.

The T_g diffusion steps are numbered from 0, in the order in which they run. A refinement runs only the steps from
``first_step`` on: S = T_g - first_step steps. It computes their *start*, which is the state before ``first_step``, from
the draft x' and noise. The setting ``accepted`` determines both::

    accepted    first_step                                 start
    refine      0, if no step has gamma 1                  noise
                k + 1, if step k is the last with gamma 1  x' + sigma noise
    renoise     T_g - floor(T_g denoise)                   sqrt(abar_t) x' + sqrt(1 - abar_t) noise
    keep        T_g: no step runs                          x'

Shapes: B images of L tokens; N tokens with an accepted draft, c channels of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...chain import DiffusionBatch, MeanAdjustment
from ...diffusion_steps import StepTable, noise_for_steps
from ...noise import StreamNoise
from ..canvas import MARCanvas
from ..tokens import TokenIndex


@dataclass(eq=False)
class Refinement:
    """The diffusion of accepted drafts in S steps. If S is 0, the result is the start."""

    canvas: MARCanvas
    table: StepTable  # the S steps that run
    noise: StreamNoise  # the noise for ``start`` and for the S steps
    # Computes the states of N tokens before the S steps from their drafts x' and from their noise ``noise.start``. The
    # result and both arguments are fp32 [N, c].
    start: Callable[[Tensor, Tensor], Tensor]
    gamma: Tensor | None = None  # gamma of each of the S steps, fp32 [S]; None if no step mixes its mean with the draft

    def batch(self, tokens: TokenIndex, z: Tensor, drafts: Tensor) -> DiffusionBatch:
        """A batch of N tokens with accepted drafts, for S diffusion steps.

        ``tokens``, ``z``: see :meth:`.MARCanvas.batch`; ``drafts``: the drafts x' of the tokens, fp32 [N, c].
        """
        from_noise = self.canvas.batch(self.table, tokens, z, self.noise)  # its states x are ``noise.start``
        adjustment = None if self.gamma is None else MeanAdjustment(drafts, self.gamma)
        return replace(from_noise, x=self.start(drafts, from_noise.x), mean_adjustment=adjustment)


def guided(canvas: MARCanvas) -> Refinement:
    """Steps that mix their means with the draft.

    A step with gamma 1 gives x' + sigma noise, whatever the head predicts. So this step and all steps before it need
    not run. In most schedules, only step 0 has gamma 1. In the schedule linear-up, only the last step has gamma 1, so
    no step runs. The result is then the draft, because the last step adds no noise: its sigma is 0. If T_g is 1, the
    only step has gamma 1 in all schedules except none, so the result is the draft too.
    """
    settings = canvas.settings
    table, stream = all_guided_steps(canvas)
    weights = guidance_weights(settings.guidance_schedule, len(table))
    gamma = to_device(torch.tensor(weights), canvas.device)

    # 1. No step has gamma 1: all steps run, and they start from noise.
    if 1 not in weights:
        return Refinement(canvas, table, stream, start=lambda drafts, noise: noise, gamma=gamma)

    # 2. Only the steps after the last step with gamma 1 run. They start from the result of that step.
    last_with_gamma_1 = max(k for k, weight in enumerate(weights) if weight == 1)
    first_step = last_with_gamma_1 + 1

    # When a step is run, the head chooses sigma from a range. Here sigma is the middle of this range, times the
    # temperature.
    sigma = table.columns().log_std_middle[last_with_gamma_1].exp() * settings.temperature
    return Refinement(
        canvas,
        table.some_steps(first_step, len(table)),
        StreamNoise(start=stream.steps[last_with_gamma_1], steps=stream.steps[first_step:]),
        start=lambda drafts, noise: drafts + sigma * noise,
        gamma=gamma[first_step:],
    )


def renoised(canvas: MARCanvas) -> Refinement:
    """The last S of T_g ordinary steps. They start from the draft x' with added noise: x = sqrt(abar_t) x' +
    sqrt(1 - abar_t) noise. A diffusion that starts from pure noise has as much noise before these steps. t is the
    timestep of the first of the S steps, and abar_t is the product of all 1 - beta up to t.

    ``diffusion_steps.py`` has the equation data = data_x x + data_per_prediction prediction. Here the data is the draft
    x', and the prediction is the noise; data_x is 1 / sqrt(abar_t), and data_per_prediction is -sqrt(1 / abar_t - 1).
    ``start`` solves this equation for the state x.
    """
    table, stream = all_guided_steps(canvas)
    # S is T_g times denoise, rounded down, as is usual in image-to-image pipelines. For example, 15 steps times
    # denoise = 0.9 is 13.5, so S is 13.
    first_step = len(table) - int(round(len(table) * canvas.settings.denoise, 6))
    if first_step == len(table):
        return unchanged(canvas)

    data_x = table.columns().data_x[first_step]
    data_per_prediction = table.columns().data_per_prediction[first_step]
    return Refinement(
        canvas,
        table.some_steps(first_step, len(table)),
        stream._replace(steps=stream.steps[first_step:]),
        start=lambda drafts, noise: (drafts - data_per_prediction * noise) / data_x,
    )


def unchanged(canvas: MARCanvas) -> Refinement:
    """No step: an accepted draft does not change."""
    table, stream = all_guided_steps(canvas)
    first_step = len(table)
    return Refinement(
        canvas,
        table.some_steps(first_step, len(table)),
        stream._replace(steps=stream.steps[first_step:]),
        start=lambda drafts, noise: drafts,
    )


# The refinement for each value of the setting ``accepted``.
REFINEMENTS: dict[str, Callable[[MARCanvas], Refinement]] = {
    "refine": guided,
    "renoise": renoised,
    "keep": unchanged,
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
