"""The equations of ``diffusion_steps.py`` for states at different steps, with the temperature in the stds.

``speculation.py`` uses them. In contrast, :func:`.chain.advance` takes the same step with all rows.

The last step of most diffusions adds no noise, so its result is the mean. This file has all rules for such a last step:

- :meth:`StepEquations.noise` returns noise that has no effect.
- :meth:`StepEquations.next_state` returns the mean, whatever state the caller sampled.
- :func:`log_stds_to_couple` gives the step a std with which the coupling can compute, if the variances are fixed.
- If the variances are fixed, :attr:`StepEquations.coupled_steps` excludes the step: there is nothing to verify, and the
  report does not count the step. If the variances are learned (MAR), the step is verified and counted, because in CSpD
  a draft model may have drafted all steps of a token. The draft is accepted if it equals the mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .chain import DiffusionBatch
from .diffusion_steps import StepNumbers, StepTable


class StepEquations:
    """The equations of the S steps of a batch.

    In all methods, ``step`` is int64 [...]; states, data, predictions and logits are fp32 [..., *, c]. For the letters
    in shapes see ``chain.py``.
    """

    step_count: int  # S
    coupled_steps: int  # how many of the S steps are verified and counted: S, or S - 1 without the last step

    def __init__(self, batch: DiffusionBatch):
        table = batch.table
        self.step_count = len(table)
        self.coupled_steps = self.step_count if _couples_last_step(table) else self.step_count - 1
        self._ends_with_noise = table.ends_with_noise
        self._noise = batch.noise
        self._state_dimensions = batch.x.ndim - 1  # number of dimensions in [*, c]

        columns = table.columns()
        columns = columns._replace(log_std_middle=log_stds_to_couple(table, batch.temperature))
        self._table = torch.stack(columns, 1)  # [S, 8], a column for each field of StepNumbers

    def numbers_of(self, step: Tensor) -> StepNumbers:
        """The coefficients of the steps, fp32 [..., 1 ...] each. They broadcast to the shape of the states."""
        numbers = self._table[step]
        numbers = numbers.view(*numbers.shape, *(1,) * self._state_dimensions)
        return StepNumbers(*numbers.unbind(step.ndim))

    def noise(self, step: Tensor, row: Tensor) -> Tensor:
        """The noise of rows at steps. ``row``: int64, broadcasts to the shape of ``step``."""
        return self._noise[step.clamp(max=len(self._noise) - 1), row]

    def data(self, step: Tensor, x: Tensor, prediction: Tensor) -> Tensor:
        """The data, from the states x before the steps and the head's predictions for them."""
        numbers = self.numbers_of(step)
        return torch.addcmul(numbers.data_x * x, numbers.data_per_prediction, prediction)

    def mean(self, step: Tensor, x: Tensor, data: Tensor) -> Tensor:
        """Means of the states after the steps, from the states x before the steps and the data."""
        numbers = self.numbers_of(step)
        return numbers.data_coefficient * data + numbers.x_coefficient * x

    def log_std(self, step: Tensor, logits: Tensor | None) -> Tensor:
        """Log stds of the states after the steps; [..., 1 ...] for fixed variances, where ``logits`` is None."""
        numbers = self.numbers_of(step)
        if logits is None:
            return numbers.log_std_middle
        return numbers.log_std_middle + numbers.log_std_per_logit * logits

    def next_state(self, step: Tensor, x: Tensor, data: Tensor, sample: Tensor) -> Tensor:
        """The states after the steps: ``sample``, but the mean after a last step without noise. ``x``: the states
        before the steps; ``data``: the data that the head predicted for x.
        """
        if self._ends_with_noise:
            return sample
        is_last = (step == self.step_count - 1).view(-1, *(1,) * self._state_dimensions)
        return torch.where(is_last, self.mean(step, x, data), sample)


def _couples_last_step(table: StepTable) -> bool:
    """Whether the last step of a table is verified and counted: unless its variance is fixed and it adds no noise."""
    return table.learns_variance or table.ends_with_noise


def log_stds_to_couple(table: StepTable, temperature: float) -> Tensor:
    """The ``log_std_middle`` of each step with the temperature, as the coupling needs it, fp32 [S].

    The coupling computes the last step with all others. For fixed variances, it divides by the std of every step. So if
    the last step is not to be coupled, its std here is 1 instead of 0. This changes no state and no count, because
    :meth:`StepEquations.next_state` and :attr:`StepEquations.coupled_steps` ignore the coupling of this step.
    """
    log_temperature = math.log(temperature) if temperature > 0 else -math.inf
    log_stds = table.columns().log_std_middle + log_temperature
    if not _couples_last_step(table):
        log_stds[-1] = 0
    return log_stds
