"""The equations of ``diffusion_steps.py`` for states at different steps.

``speculation.py`` uses them. In contrast, :func:`.chain.advance` takes the same step with all rows. The other
difference is the temperature: :func:`.chain.run_chain` multiplies the noise by it. Speculation compares the stds
themselves, so here the temperature is a part of each log std.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .chain import DiffusionBatch
from .diffusion_steps import StepNumbers


class StepEquations:
    """The equations of the S steps of a batch. All rows must share the same steps.

    The last step of most diffusions adds no noise, so its result is the mean. There are three cases::

        last step                       verified, counted   next_state   coupling
        adds noise                      yes                 the sample   as in every other step
        no noise, learned variances     yes                 the mean     accepts only a draft that equals the mean
        no noise, fixed variances       no                  the mean     divides by the std 0, nothing uses the result

    In the second case, the step is verified because in CSpD a draft model may have drafted all steps of a token. In the
    third case, there is nothing to verify. The coupling computes such a step only because it computes all steps of a
    window at once.

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
        self._table = torch.stack(columns, 1)  # [S, 8], a column for each field of StepNumbers

    def numbers_of(self, step: Tensor) -> StepNumbers:
        """The coefficients of the steps, fp32 [..., 1 ...] each. They broadcast to the shape of the states."""
        numbers = self._table[step]  # [..., 8]
        # One view with the added dimensions, [..., 8, 1 ...], costs the host less than a view of each coefficient. The
        # dimension of size 8 comes after those of ``step``.
        numbers = numbers.view(*numbers.shape, *(1,) * self._state_dimensions)
        return StepNumbers(*numbers.unbind(step.ndim))

    def noise(self, step: Tensor, row: Tensor) -> Tensor:
        """The noise of rows at steps, fp32 [..., *, c]. ``row``: int64, broadcasts to ``step``."""
        # The last step may have no entry of its own, see DiffusionBatch.noise.
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
