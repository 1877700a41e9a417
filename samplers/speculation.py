"""Speculation in a diffusion head: several steps are verified in one evaluation. Lossless.

Source: De Bortoli, Galashov, Gretton & Doucet 2025 (arXiv 2501.05370), section 4, "frozen" drafts:

1. at state x_k the next L steps are drafted with the last evaluation's data and variance, without the head;
2. the head is evaluated at all L drafted states of all rows in one batch;
3. each row continues after its longest accepted prefix: the coupling (``coupling.py``) replaces its first rejected
   step.

Step k of the head is a sample of the head's kernel N(m_p(x_k), s_p(x_k)^2); mean and std include guidance and
temperature. The draft of the step is a sample of N(m_q, s_q^2), which depends on earlier steps only. The coupling turns
the draft into a sample of the head's kernel, given x_k. Later drafts are used only if this one was accepted, so their
states are valid. The noise and the uniforms of discarded steps did not affect any accepted step. They are used again,
which keeps images of one seed alike. All numbers of a row are accepted or rejected together, because the head reads all
tokens of a block.

The last step of most diffusions adds no noise: the sample is the mean of the head's kernel, whether the draft of the
step is accepted or not. With MAR's learned variances the report counts this step, as accepted if the draft is exact,
because another model may have drafted all of a token (CSpD). With fixed variances the report does not count it. A last
step with noise is verified and counted as the others are, and its state is the sample.

Fixed tokens of a block follow their own path. Their drafts follow the same path, so these tokens have no part in the
coupling.

The host keeps the number of steps that every row has done, as an array. It reads from the device once a window: how
many steps of every row are accepted, at which step the row stops, and whether the coupling found a sample there. If the
coupling needs proposals, the host also reads after every batch of proposals whether one was accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..networks.speed import Recordable
from ..networks.torch_state import to_device
from ..reports.record import Report
from .chain import DiffusionBatch, HeadAtStates, StepNumbers, guide
from .coupling import Coupled, Gaussian, Proposals, couple, couple_fixed
from .noise import CounterRNG

# Lanes of a row's random numbers: one for all acceptances, two per step for proposals after a rejection.
_LANE_OF_ACCEPTANCES = -1
_LANE_OF_NORMALS = 0  # 2 step + this
_LANE_OF_UNIFORMS = 1  # 2 step + this
# Numbers of proposals that may replace a rejected step. All rows that need a proposal get the first batch. The few rows
# that accept none of its proposals get the next, larger batch, which begins with the same proposals. If a row accepts
# none of the last batch, its last proposal is taken all the same; the probability of this is below 1 / 2^18.
_PROPOSALS = (1 << 8, 1 << 13, 1 << 18)


class DraftedSteps(NamedTuple):
    """W drafted steps of R rows. A row with fewer steps left repeats its last one, which is not used."""

    states: Tensor  # before each step, fp32 [R, W, *, c]
    values: Tensor  # after each step, fp32 [R, W, *, c]
    q: Gaussian  # distributions of the values, fp32 [R, W, *, c]; the stds of fixed variances [R, W, 1 ...]


class Coupling(NamedTuple):
    """How drafted steps are verified, by the kind of the head's variances."""

    function: Callable[..., Coupled]  # of draft, q, p and uniforms
    uniforms: int  # how many uniform random numbers the function takes for a step
    # Whether a last step that takes the data without noise is one of the steps that the report counts.
    counts_last: bool


# MAR's head predicts the variances, and a rejected draft may need proposals.
LEARNED = Coupling(couple, uniforms=2, counts_last=True)
# BitDance's and NextStep's variances are fixed, so the stds of draft and head are equal.
FIXED = Coupling(couple_fixed, uniforms=1, counts_last=False)


class _Window(NamedTuple):
    """The M drafted steps that are verified together: for each of R rows as many as the window is long, or fewer if the
    row has fewer steps left. For example, a window of four steps for the rows 3, 4 and 7, which have done 5, 8 and 7 of
    10 steps::

        of each step  row         3 3 3 3 4 4 7 7 7
                      step        5 6 7 8 8 9 7 8 9
                      row_index   0 0 0 0 1 1 2 2 2
                      step_index  0 1 2 3 0 1 0 1 2
        of each row   rows        3       4   7
                      first       0       4   6
                      last        3       5   8

    All fields are int64 on the device.
    """

    # Of each step, [M].
    row: Tensor  # number of its row
    step: Tensor  # its number
    row_index: Tensor  # index of its row among the R rows
    step_index: Tensor  # how many steps of its row come before it in the window
    # Of each row, [R].
    rows: Tensor  # its number
    first: Tensor  # index of its first step among the M steps
    last: Tensor  # index of its last step among the M steps

    @property
    def in_drafts(self) -> tuple[Tensor, Tensor]:
        """The index of each step in the tensors [R, W, ...] of :class:`DraftedSteps`."""
        return self.row_index, self.step_index

    def accepted_before_rejection(self, accepted: Tensor, length: int) -> Tensor:
        """How many steps of each row are accepted before its first rejected step, int64 [R]. ``accepted``: bool [M];
        ``length``: W.
        """
        of_rows = torch.zeros(len(self.rows), length, dtype=torch.int64, device=accepted.device)
        of_rows[self.in_drafts] = accepted.to(torch.int64)
        return of_rows.cumprod(1).sum(1)  # 1 1 0 1 -> 1 1 0 0 -> 2


class _StepsToCouple(NamedTuple):
    """M drafted steps beside the head's kernels. All n numbers of a state are in one dimension."""

    row: Tensor  # int64 [M]
    step: Tensor  # int64 [M]
    draft: Tensor  # fp32 [M, n]
    q: Gaussian  # of the draft
    p: Gaussian  # the head's
    uniforms: Tensor  # fp32 [M, uniforms of a step]

    def rows(self, index: Tensor) -> _StepsToCouple:
        """The steps at these indices, int64 [K]."""
        row, step, draft, q, p, uniforms = self
        return _StepsToCouple(row[index], step[index], draft[index], q.rows(index), p.rows(index), uniforms[index])


class _Equations:
    """The equations of ``chain.py``, with the temperature in the stds. :func:`.chain.advance` takes the same step with
    all rows, but here each state is at its own step.

    ``step`` is int64 [...]; states, data, predictions and logits are fp32 [..., *, c].
    """

    def __init__(self, batch: DiffusionBatch):
        table = batch.table
        self.state_dimensions = batch.x.ndim - 1  # of [*, c]

        columns = table.columns()
        middle = columns.middle + (math.log(batch.temperature) if batch.temperature > 0 else -math.inf)
        if not table.learned and not table.ends_with_noise:
            # The coupling would divide by the last step's std, which is 0. Any other std works: a row that reaches its
            # last step stops there, accepted or not, and the state after it is the predicted data.
            middle[-1] = 0
        self._table = torch.stack(columns._replace(middle=middle), 1)  # [S, 8], a column for each of StepNumbers

    def numbers_of(self, step: Tensor) -> StepNumbers:
        """The numbers of the steps, fp32 [..., 1 ...] each, with which states can be multiplied."""
        numbers = self._table[step]
        numbers = numbers.view(*numbers.shape, *(1,) * self.state_dimensions)
        return StepNumbers(*numbers.unbind(step.ndim))

    def data(self, step: Tensor, x: Tensor, prediction: Tensor) -> Tensor:
        """The data that the head's prediction at state x says."""
        numbers = self.numbers_of(step)
        return torch.addcmul(numbers.data_x * x, numbers.data_out, prediction)

    def mean(self, step: Tensor, x: Tensor, data: Tensor) -> Tensor:
        """Means of the states after x."""
        numbers = self.numbers_of(step)
        return numbers.data_coefficient * data + numbers.x_coefficient * x

    def log_std(self, step: Tensor, logits: Tensor | None) -> Tensor:
        """Log stds of the states after the steps; [..., 1 ...] if the variances are fixed."""
        numbers = self.numbers_of(step)
        return numbers.middle if logits is None else numbers.middle + numbers.slope * logits


class Speculation:
    """N rows in the middle of their diffusion, each at its own step.

    :meth:`finish` and :meth:`windows` take all remaining steps of rows. A window is :meth:`draft`, then :meth:`verify`.
    Methods take the numbers of rows, int64 [R] on the host.
    """

    done: np.ndarray  # steps done, int64 [N]
    x: Tensor  # states fp32 [N, *, c]
    # What the head said of each row when it was last evaluated, fp32 [N, *, c]: the next steps are drafted from it.
    data: Tensor
    logits: Tensor | None  # None if the variances are fixed

    def __init__(
        self, net: Recordable, head: HeadAtStates, batch: DiffusionBatch, rng: CounterRNG, report: Report | None = None
    ):
        """``report``: counts the steps of :meth:`windows` that were drafted and accepted; None: nothing is counted."""
        learned = batch.table.learned
        coupling = LEARNED if learned else FIXED
        self.net = net
        self.head = head
        self.batch = batch
        self.rng = rng
        self.report = report
        self.device = batch.x.device
        self.steps = len(batch.table)
        self.ends_with_noise = batch.table.ends_with_noise
        # How many of the steps the report counts.
        self.counted = self.steps if coupling.counts_last or self.ends_with_noise else self.steps - 1

        # Nothing has been predicted yet, so the first steps are drafted from zeros. Such a draft is mostly rejected.
        # That costs nothing, because the call that verifies it also evaluates the first step.
        self.done = np.zeros(len(batch.x), np.int64)
        self.x = batch.x.clone()
        self.data = torch.zeros_like(self.x)
        self.logits = torch.zeros_like(self.x) if learned else None

        self._equations = _Equations(batch)
        self._couple = net.compiled(coupling.function, "verification of speculation")
        uniforms = rng.uniform(_LANE_OF_ACCEPTANCES, 0, coupling.uniforms * self.steps)
        self._uniforms = uniforms.view(-1, self.steps, coupling.uniforms)

    def finish(self, rows: np.ndarray, length: int) -> Tensor:
        """Do all remaining steps of rows by :meth:`windows`, and return the samples, fp32 [R, *, c]."""
        for _ in self.windows(rows, length):
            pass

        (row,) = self._on_device(rows)
        return self.x[row]

    def windows(self, rows: np.ndarray, length: int) -> Iterator[None]:
        """Do all remaining steps of rows, in windows of ``length`` drafted steps; yields after every window. If
        ``length`` is below 2, nothing is drafted: every step is evaluated in turn.
        """
        going = rows[self.done[rows] < self.steps]
        while len(going):
            if length > 1:
                left = self.counted - self.done[going]
                accepted = self.verify(going, self.draft(going, length))
                if self.report is not None:
                    self.report.add(drafted_steps=int(np.minimum(left, length).sum()))
                    self.report.add(accepted_steps=int(np.minimum(left, accepted).sum()))
            else:
                self.advance(going)
            yield

            going = going[self.done[going] < self.steps]

    # --- a window

    def draft(self, rows: np.ndarray, length: int) -> DraftedSteps:
        """Draft the next steps of rows, up to ``length`` of each. All drafts use the data and the variance of the row's
        last evaluation.
        """
        self.net.note_plain("drafts of speculation")
        width = min(length, self.steps - int(self.done[rows].min()))
        row, done = self._on_device(rows, self.done[rows])
        step = (done[:, None] + torch.arange(width, device=self.device)).clamp(max=self.steps - 1)

        # 1. Everything but the state is known beforehand: x_{k+1} = x_coefficient x_k + offset_k + std_k noise_k.
        numbers = self._equations.numbers_of(step)
        offset = numbers.data_coefficient * self.data[row][:, None]
        log_std = self._equations.log_std(step, None if self.logits is None else self.logits[row][:, None])
        fixed = offset + log_std.exp() * self._noise(step, row[:, None])

        # 2. The states, one after another.
        states = []
        values = []
        x = self.x[row]
        for k, x_coefficient_k, fixed_k in zip(
            step.unbind(1), numbers.x_coefficient.unbind(1), fixed.unbind(1), strict=True
        ):
            if self.batch.given is not None:
                x = self.batch.given.follow_rows(x, row, k)
            states.append(x)
            x = torch.addcmul(fixed_k, x_coefficient_k, x)
            values.append(x)

        before = torch.stack(states, 1)
        return DraftedSteps(before, torch.stack(values, 1), Gaussian(offset + numbers.x_coefficient * before, log_std))

    def verify(self, rows: np.ndarray, drafts: DraftedSteps) -> np.ndarray:
        """Evaluate the head at all drafted states of rows, and advance each row past its accepted steps and its first
        rejected step, if there is one.

        Args:
            drafts: the rows' next steps.

        Returns:
            The number of accepted steps of each row, int64 [R].
        """
        length = drafts.states.shape[1]
        window, step_on_host = self._window(rows, length)

        # 1. The head at all drafted states.
        x = drafts.states[window.in_drafts]
        data, logits = self.predict(window.row, window.step, x)
        p = self.kernel(window.row, window.step, x, data, logits)

        # 2. The coupling accepts drafts or replaces them.
        draft = drafts.values[window.in_drafts].flatten(1)
        q = drafts.q.rows(*window.in_drafts)
        uniforms = self._uniforms[window.row, window.step]
        steps = _StepsToCouple(window.row, window.step, draft, q.flat(), p.flat(), uniforms)
        coupled = self._couple(steps.draft, steps.q, steps.p, steps.uniforms)

        # 3. A row stops at its first rejected step, which was replaced, or else at its last one.
        accepted = window.accepted_before_rejection(coupled.accepted, length)
        stop = torch.minimum(window.first + accepted, window.last)  # index among the M
        value = coupled.value[stop]

        # 4. The only read, unless some row needs proposals.
        is_sample = coupled.is_sample[stop].to(torch.int64)
        accepted_on_host, stop_on_host, is_sample_on_host = torch.stack([accepted, stop, is_sample]).cpu().numpy()
        missing = np.flatnonzero(is_sample_on_host == 0)
        if len(missing):
            self._propose(steps, stop, value, missing)
        value = self._without_last_noise(window.step[stop], x[stop], data[stop], value.view(-1, *self.x.shape[1:]))

        # 5. Every row has now done the step at which it stopped. The evaluation of that step is the row's newest.
        self.done[rows] = step_on_host[stop_on_host] + 1
        self.x[window.rows] = value
        self._remember(window.rows, data[stop], None if logits is None else logits[stop])
        return accepted_on_host

    def _window(self, rows: np.ndarray, length: int) -> tuple[_Window, np.ndarray]:
        """A window with the next steps of ``rows``, int64 [R], at most ``length`` steps of each row. Also returns the
        numbers of these steps on the host, int64 [M].
        """
        done = self.done[rows]
        widths = np.minimum(self.steps - done, length)
        ends = widths.cumsum()
        firsts = ends - widths

        row_index = np.arange(len(rows)).repeat(widths)
        step_index = np.arange(len(row_index)) - firsts[row_index]
        step = done[row_index] + step_index
        of_steps = self._on_device(rows[row_index], step, row_index, step_index)
        of_rows = self._on_device(rows, firsts, ends - 1)
        return _Window(*of_steps, *of_rows), step

    def _propose(self, steps: _StepsToCouple, stop: Tensor, value: Tensor, missing: np.ndarray) -> None:
        """Couple the rows that need proposals, and write their next states. Only learned variances need proposals.

        Args:
            steps: the M drafted steps.
            stop: int64 [R], index among the M steps of the step at which each row stops.
            value: fp32 [R, n], the rows' next states, written in place.
            missing: int64 [K], indices among the R rows of the rows that need proposals.
        """
        for count in _PROPOSALS:
            (some,) = self._on_device(missing)
            row, step, draft, q, p, uniforms = steps.rows(stop[some])

            rng = self.rng.of(row)
            normals = rng.normal(2 * step + _LANE_OF_NORMALS, 0, count, draft.shape[1])
            proposals = Proposals(normals, rng.uniform(2 * step + _LANE_OF_UNIFORMS, 0, count))
            coupled = couple(draft, q, p, uniforms, proposals)
            value[some] = coupled.value
            missing = missing[~coupled.is_sample.cpu().numpy()]
            if not len(missing):
                return

    # --- a step

    def advance(self, rows: np.ndarray) -> None:
        """Do one step of rows, without a draft."""
        row, step = self._on_device(rows, self.done[rows])
        x = self.x[row]
        if self.batch.given is not None:
            x = self.batch.given.follow_rows(x, row, step)
        data, logits = self.predict(row, step, x)
        p = self.kernel(row, step, x, data, logits)
        value = p.mean + p.log_std.exp() * self._noise(step, row)
        self.x[row] = self._without_last_noise(step, x, data, value)
        self._remember(row, data, logits)
        self.done[rows] += 1

    def predict(self, row: Tensor, step: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Data and variance logits, fp32 [M, *, c] each, that the head predicts with guidance for states x [M, *, c].

        The states belong to rows ``row`` before steps ``step``, int64 [M] on the device.
        """
        prediction, logits = guide(self.head.at_states(row, step, x), self.batch.cfg[row], x.shape[-1])
        return self._equations.data(step, x, prediction), logits

    def kernel(self, row: Tensor, step: Tensor, x: Tensor, data: Tensor, logits: Tensor | None) -> Gaussian:
        """The head's distributions of the next states, from its predictions ``data`` and ``logits``."""
        # Fixed tokens take no part in the coupling. With the draft's data, p equals q at these tokens, so they never
        # cause a rejection.
        if self.batch.given is not None:
            data = torch.where(self.batch.given.free[row], data, self.data[row])
        return Gaussian(self._equations.mean(step, x, data), self._equations.log_std(step, logits))

    def _without_last_noise(self, step: Tensor, x: Tensor, data: Tensor, value: Tensor) -> Tensor:
        """The states after steps int64 [R] from ``x``: after a last step without noise the mean that the predicted
        ``data`` give, else ``value``; all fp32 [R, *, c].
        """
        if self.ends_with_noise:
            return value
        last = (step == self.steps - 1).view(-1, *(1,) * (value.ndim - 1))
        return torch.where(last, self._equations.mean(step, x, data), value)

    def _remember(self, row: Tensor, data: Tensor, logits: Tensor | None) -> None:
        """Remember the newest predictions of rows, from which their next steps will be drafted."""
        self.data[row] = data
        if self.logits is not None and logits is not None:
            self.logits[row] = logits

    def _noise(self, step: Tensor, row: Tensor) -> Tensor:
        """The noise of rows at steps."""
        return self.batch.noise[step.clamp(max=len(self.batch.noise) - 1), row]

    def _on_device(self, *numbers: np.ndarray) -> Tensor:
        """Copy arrays of numbers, int64 [R] each, to the device in one transfer. The caller unpacks the result, int64
        [number of arrays, R].
        """
        return to_device(np.stack(numbers), self.device)
