"""The equations of ``diffusion_steps.py`` for states at different steps.

``speculation.py`` uses them. :func:`.chain.advance` computes the same equations for rows that are all at one step. This
file differs in two points:

1. Each state has its own step.
2. The temperature is a part of each log std, because speculation compares stds. :func:`.chain.run_chain` multiplies the
   noise by it instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .chain import DiffusionBatch
from .diffusion_steps import StepNumbers


class StepEquations:
    """The equations of the S steps of a batch. All rows must share the same steps.

    The last step of most diffusions adds no noise. Two questions have a special answer for such a step:

    - What is the state after it? The mean (:meth:`next_state`). After every step with noise, it is the sample.
    - Is it verified and counted? Yes with learned variances, no with fixed variances (``verified_steps``). Every step
      with noise is verified and counted.

    With learned variances, the step is verified because in CSpD a draft model may have drafted all steps of a token.
    The coupling accepts only a draft that equals the mean. With fixed variances, there is nothing to verify. The
    coupling computes such a step only because it computes all steps of a window at once, see :func:`.couple_fixed`.

    In all methods, ``step`` is int64 [...]; states, data, predictions and logits are fp32 [..., *, c]. For the letters
    in shapes see ``chain.py``.
    """

    step_count: int  # S
    verified_steps: int  # how many of the S steps are verified and counted: S, or S - 1 without the last step

    def __init__(self, batch: DiffusionBatch):
        table = batch.table
        assert table.numbers.ndim == 2, "all rows share the same steps"
        self.step_count = len(table)
        verifies_last_step = table.learns_variance or table.ends_with_noise
        self.verified_steps = self.step_count if verifies_last_step else self.step_count - 1
        self._ends_with_noise = table.ends_with_noise
        self._noise = batch.noise
        self._state_dimensions = batch.x.ndim - 1  # number of dimensions in [*, c]

        # log(temperature std) = log temperature + log std. With temperature 0, every step is without noise.
        log_temperature = math.log(batch.temperature) if batch.temperature > 0 else -math.inf
        columns = table.columns()
        columns = columns._replace(log_std_middle=columns.log_std_middle + log_temperature)
        self._coefficients = torch.stack(columns, 1)  # [S, 8], a column for each field of StepNumbers

    def coefficients_at(self, step: Tensor) -> StepNumbers:
        """The coefficients of the steps, fp32 [..., 1 ...] each. They broadcast to the shape of the states."""
        selected = self._coefficients[step]  # [..., 8]
        # One view with the added dimensions, [..., 8, 1 ...], costs the host less than a view of each coefficient. The
        # dimension of size 8 comes after the dimensions of ``step``.
        selected = selected.view(*selected.shape, *(1,) * self._state_dimensions)
        return StepNumbers(*selected.unbind(step.ndim))

    def noise(self, step: Tensor, row: Tensor) -> Tensor:
        """The noise of rows at steps, fp32 [..., *, c]. ``row``: int64, broadcasts to ``step``."""
        # The last step may have no entry of its own, see DiffusionBatch.noise.
        return self._noise[step.clamp(max=len(self._noise) - 1), row]

    def data(self, step: Tensor, x: Tensor, prediction: Tensor) -> Tensor:
        """The data, from the states x before the steps and the head's predictions for them."""
        coefficients = self.coefficients_at(step)
        return torch.addcmul(coefficients.data_x * x, coefficients.data_per_prediction, prediction)

    def mean(self, step: Tensor, x: Tensor, data: Tensor) -> Tensor:
        """Means of the states after the steps, from the states x before the steps and the data."""
        coefficients = self.coefficients_at(step)
        return coefficients.data_coefficient * data + coefficients.x_coefficient * x

    def log_std(self, step: Tensor, logits: Tensor | None) -> Tensor:
        """Log stds of the states after the steps; [..., 1 ...] for fixed variances, where ``logits`` is None."""
        coefficients = self.coefficients_at(step)
        if logits is None:
            return coefficients.log_std_middle
        return coefficients.log_std_middle + coefficients.log_std_per_logit * logits

    def next_state(self, step: Tensor, x: Tensor, data: Tensor, sample: Tensor) -> Tensor:
        """The states after M steps: ``sample``, but the mean after a last step without noise. ``x``: the states
        before the steps; ``data``: the data that the head predicted for x. Here ``step`` is int64 [M], and the other
        arguments and the result are fp32 [M, *, c].
        """
        if self._ends_with_noise:
            return sample
        is_last = (step == self.step_count - 1).view(-1, *(1,) * self._state_dimensions)
        return torch.where(is_last, self.mean(step, x, data), sample)
