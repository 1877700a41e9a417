"""The equations of ``diffusion_steps.py`` for states at different steps, with the temperature in the stds.

``speculation.py`` uses them. In contrast, :func:`.chain.advance` takes the same step with all rows.

The last step of most diffusions adds no noise, so its result is the mean. Two rules hold for such a step:

- :meth:`StepEquations.next_state` returns the mean, whatever state the caller sampled.
- If the variances are fixed, :attr:`StepEquations.verified_steps` excludes the step: there is nothing to verify, and
  the report does not count the step. The coupling computes this step with all others, and divides by its std of 0, but
  nothing uses the results. If the variances are learned (MAR), the step is verified and counted, because in CSpD a
  draft model may have drafted all steps of a token. The draft is accepted if it equals the mean.

The batch may have no noise for such a step (:attr:`.DiffusionBatch.noise`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .chain import DiffusionBatch
from .diffusion_steps import StepNumbers


class StepEquations:
    """The equations of the S steps of a batch.

    In all methods, ``step`` is int64 [...]; states, data, predictions and logits are fp32 [..., *, c]. For the letters
    in shapes see ``chain.py``.
    """

    step_count: int  # S
    verified_steps: int  # how many of the S steps are verified and counted: S, or S - 1 without the last step

    def __init__(self, batch: DiffusionBatch):
        table = batch.table
        self.step_count = len(table)
        verifies_last_step = table.learns_variance or table.ends_with_noise
        self.verified_steps = self.step_count if verifies_last_step else self.step_count - 1
        self._ends_with_noise = table.ends_with_noise
        self._noise = batch.noise
        self._state_dimensions = batch.x.ndim - 1  # number of dimensions in [*, c]

        log_temperature = math.log(batch.temperature) if batch.temperature > 0 else -math.inf
        columns = table.columns()
        columns = columns._replace(log_std_middle=columns.log_std_middle + log_temperature)
        self._table = torch.stack(columns, 1)  # [S, 8], a column for each field of StepNumbers

    def numbers_of(self, step: Tensor) -> StepNumbers:
        """The coefficients of the steps, fp32 [..., 1 ...] each. They broadcast to the shape of the states."""
        numbers = self._table[step]
        numbers = numbers.view(*numbers.shape, *(1,) * self._state_dimensions)
        return StepNumbers(*numbers.unbind(step.ndim))

    def noise(self, step: Tensor, row: Tensor) -> Tensor:
        """The noise of rows at steps, see :attr:`.DiffusionBatch.noise`. ``row``: int64, broadcasts to ``step``."""
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
        """The states after M steps: ``sample``, but the mean after a last step without noise. ``x``: the states
        before the steps; ``data``: the data that the head predicted for x. Here ``step`` is int64 [M], and the other
        arguments and the result are fp32 [M, *, c].
        """
        if self._ends_with_noise:
            return sample
        is_last = (step == self.step_count - 1).view(-1, *(1,) * self._state_dimensions)
        return torch.where(is_last, self.mean(step, x, data), sample)
