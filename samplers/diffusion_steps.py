"""The coefficients of a diffusion's steps, in a table on the device.

The head makes a *prediction* from the state x of a row (``chain.py``). The prediction and x determine the *data*, an
estimate of the row without noise. The next state is a sample from a Gaussian:

    data     = data_x x + data_per_prediction prediction
    mean     = x_coefficient x + data_coefficient data
    log_std  = log_std_middle + log_std_per_logit logits
    x       <- N(mean, exp(log_std)^2)

The first line, put into the second, gives the *fused* form mean = mean_x x + mean_per_prediction prediction. Only a
head that learned its variances predicts logits.

The models differ in what the head predicts, in whether it learned its variances, and in the last step:

========  ==============  =========  =====================================================  ==========================
model     prediction      variances  source                                                 state after the last step
========  ==============  =========  =====================================================  ==========================
MAR       the noise in x  learned    Li et al. 2024 (arXiv 2406.11838), section 3.2; see    the data
                                     ``mar/tables.py``
BitDance  the data        fixed      arXiv 2602.14041, see ``blocks/diffusion.py``          the data
NextStep  a velocity      fixed      arXiv 2508.10711, see ``nextstep/flow.py``             depends on the solver; with
                                                                                            some, it contains noise
========  ==============  =========  =====================================================  ==========================

Three tuples hold these coefficients, each for one use. A method states its steps as :class:`DiffusionStep`.
:func:`step_table` copies them to the device. From there, ``step_equations.py`` takes :class:`StepNumbers`, and
:func:`.chain.advance` takes :class:`MeanNumbers`.

Shapes: S steps; time embeddings of width w. Usually, all rows of a batch share the same steps. In a batch that
:func:`.chain.joined` made, each of N rows has its own steps. Only then do the tensors have a dimension N. "1 ..."
stands for dimensions of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..networks.torch_state import to_device


class DiffusionStep(NamedTuple):
    """The coefficients of a step as a method states them, see the equations at the top of this file. In MAR,
    x_coefficient and data_coefficient are coef2 and coef1 of the published code.
    """

    data_x: float
    data_per_prediction: float
    x_coefficient: float
    data_coefficient: float
    log_std_middle: float  # log std at logit 0; for a fixed variance, the log std itself; minus infinity for no noise
    log_std_per_logit: float  # 0 for a fixed variance


@dataclass(frozen=True)
class HeadCalls:
    """The times at which BitDance or NextStep calls the head for a row, and the step after each call. Time t runs from
    0 (noise) to 1 (data).
    """

    times: tuple[float, ...]  # time t of each call
    steps: tuple[DiffusionStep, ...]


class StepNumbers(NamedTuple):
    """All coefficients of many steps as tensors, for states at different steps (``step_equations.py``): the fields of
    :class:`DiffusionStep`, then the two coefficients of the fused mean.
    """

    data_x: Tensor
    data_per_prediction: Tensor
    x_coefficient: Tensor
    data_coefficient: Tensor
    log_std_middle: Tensor
    log_std_per_logit: Tensor
    mean_x: Tensor
    mean_per_prediction: Tensor


class MeanNumbers(NamedTuple):
    """The coefficients of one step that :func:`.chain.advance` reads: fp32 [] each, or [N, 1] if each row has its own
    steps. This function computes the mean from the prediction with the fused form, so it does not compute the data.
    """

    mean_x: Tensor
    mean_per_prediction: Tensor
    log_std_middle: Tensor
    log_std_per_logit: Tensor


@dataclass(frozen=True, eq=False)
class StepTable:
    """The coefficients of S steps, on the device. The step with the most noise is first."""

    # fp32 [S, 8], one column for each field of StepNumbers; [S, 8, N, 1] if each row has its own steps.
    numbers: Tensor
    times: Tensor  # embeddings of the steps' times, [S, w]; [S, N, w] if each row has its own steps
    learns_variance: bool  # whether the head predicts logits of the variance
    ends_with_noise: bool = False  # whether the last step adds noise; usually False

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def mean_numbers(self) -> list[MeanNumbers]:
        """For each step, the coefficients that :func:`.chain.advance` takes."""
        all_steps = StepNumbers(*self.numbers.unbind(1))
        log_std = (all_steps.log_std_middle, all_steps.log_std_per_logit)
        return list(map(MeanNumbers, all_steps.mean_x, all_steps.mean_per_prediction, *log_std))

    def columns(self) -> StepNumbers:
        """The coefficients of all steps, fp32 [S] each; [S, N, 1] if each row has its own steps."""
        return StepNumbers(*self.numbers.unbind(1))

    def some_steps(self, first: int, stop: int) -> StepTable:
        """The steps ``first`` to ``stop - 1``. All steps before the last one of this table must add noise."""
        return replace(
            self,
            numbers=self.numbers[first:stop],
            times=self.times[first:stop],
            ends_with_noise=self.ends_with_noise or stop < len(self),
        )


def step_table(steps: Sequence[DiffusionStep], times: Tensor) -> StepTable:
    """The table of ``steps``, which all rows of a batch share. ``times``: embeddings of the steps' times, [S, w]."""
    numbers = []  # for each step, the fields of StepNumbers
    for step in steps:
        mean_x = step.data_coefficient * step.data_x + step.x_coefficient
        mean_per_prediction = step.data_coefficient * step.data_per_prediction
        numbers.append((*step, mean_x, mean_per_prediction))

    # A head that learned its variances predicts logits, so its steps have coefficients for them.
    learns_variance = any(step.log_std_per_logit for step in steps)
    ends_with_noise = steps[-1].log_std_middle > -math.inf
    return StepTable(to_device(torch.tensor(numbers), times.device), times, learns_variance, ends_with_noise)
