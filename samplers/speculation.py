"""Speculation in a diffusion head: one call of the head verifies several diffusion steps. The distribution of the
samples does not change, except for two tiny errors: see :data:`_PROPOSALS`, and ``ROUNDING`` in ``coupling.py``.

Source: De Bortoli, Galashov, Gretton & Doucet 2025 (arXiv 2501.05370), section 4, "frozen" drafts. A row is a token, or
a block of tokens in BitDance. A *window* consists of three parts:

1. The sampler drafts the next L steps of each row from its state x_k, without a call of the head. All L drafts use the
   *data* (``diffusion_steps.py``) and the variance that the head last predicted for the row.
2. The head computes its predictions for all L drafted states of all rows in one batch.
3. The coupling (``coupling.py``) accepts or replaces the drafts. Each row continues after its first rejected step, or
   after its last drafted step if no step is rejected.

Without speculation, step k is a sample of the head's *kernel*, the Gaussian N(m_p(x_k), s_p(x_k)^2). Its mean and std
include guidance and temperature. The draft of the step is a sample of N(m_q, s_q^2). Only earlier steps determine m_q
and s_q. The coupling turns the draft into a sample of the kernel at x_k. If the draft is rejected, the row discards all
later drafts, because they started from a wrong state. The noise and the uniform random numbers of the discarded steps
did not affect any accepted step. The next window uses them again, so an image stays similar to the image that the same
seed gives without speculation. The coupling accepts or rejects a whole row at once, because the head reads all tokens
of a block together.

``step_equations.py`` has the equations of the steps, and the rules for a last step without noise.

In an edit, the fixed tokens of a block follow a path of their own (:class:`.FixedTokens`). Their drafts follow the same
path, so these tokens cannot cause a rejection.

The host keeps an array with the number of steps that each row has done. Once per window, the host reads from the device
how many steps of each row are accepted, and whether the coupling found a sample for the step at which the row stops. If
it found none, the coupling tries batches of proposals. After each batch, the host reads whether a proposal is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..networks.speed import Recordable
from ..networks.torch_state import to_device
from ..reports.record import Report
from .chain import DiffusionBatch, guide, run_chain
from .coupling import Coupled, Gaussian, Proposals, couple, couple_fixed
from .heads import FullChainHead, HeadNetwork, SpeculationHead
from .noise import CounterRNG
from .step_equations import StepEquations

# Lanes of a row's random numbers (noise.py). One lane decides the acceptance of all steps. Step k has two more lanes,
# 2 k and 2 k + 1, for proposals that may replace a rejected draft (coupling.py).
_LANE_OF_ACCEPTANCES = -1
_LANE_OF_NORMALS = 0  # plus 2 k
_LANE_OF_UNIFORMS = 1  # plus 2 k
# The sizes of the batches of proposals. All rows that need a proposal get the first batch. The few rows that accept
# none of its proposals get the next, larger batch, which begins with the same proposals. A row that accepts no proposal
# of the last batch takes the last proposal all the same. For each drafted step, the probability of this is below
# 1 / 2^18 = 0.000004. So the distribution of the step's result differs from the head's kernel by less than this, in
# total variation.
_PROPOSALS = (1 << 8, 1 << 13, 1 << 18)


def take_steps(
    net: Recordable,
    head: HeadNetwork,
    batch: DiffusionBatch,
    report: Report,
    *,
    budget: int,
    length: int,
    rng: CounterRNG | None,
) -> Iterator[tuple[int, Tensor]]:
    """Take all steps of all rows of a batch. The report counts the work.

    After every call of the head (with speculation, after every window), yields the number of steps that each row has
    done (the minimum over the rows, if they differ), and the states, fp32 [N, *, c]. The last states are the samples.

    Args:
        head: the diffusion head of ``net``.
        budget: see :mod:`.heads`.
        length: number of steps of a window, the L of this file; 1 for no speculation.
        rng: random numbers that decide for each row which drafts are accepted; None without speculation.
    """
    if length == 1:
        for done, result in enumerate(run_chain(batch, FullChainHead(net, head, batch, report, budget)), 1):
            yield done, result.x
        return

    assert rng is not None
    speculation = Speculation(net, SpeculationHead(net, head, batch, report, budget), batch, rng, report)
    for _ in speculation.windows(np.arange(len(batch.x)), length):
        yield int(speculation.done.min()), speculation.x


class DraftedSteps(NamedTuple):
    """The next L steps of R rows, as drafts. L is the smaller of two numbers: the length of the window, and the largest
    number of steps that a row has left. In a row that has fewer than L steps left, nothing reads the entries after its
    last step.
    """

    states: Tensor  # state before each step, fp32 [R, L, *, c]
    values: Tensor  # state after each step, fp32 [R, L, *, c]
    q: Gaussian  # distributions of the values, fp32 [R, L, *, c]; for fixed variances, log stds [R, L, 1 ...]


class Coupling(NamedTuple):
    """How speculation verifies drafted steps: :data:`LEARNED` for learned variances, :data:`FIXED` for fixed ones."""

    function: Callable[..., Coupled]  # takes draft, q, p and uniforms
    uniforms: int  # how many uniform random numbers the function takes for a step


# MAR's head predicts the variances, and a rejected draft may need proposals.
LEARNED = Coupling(couple, uniforms=2)
# The variances of BitDance and NextStep are fixed, so the draft and the head's kernel have the same std.
FIXED = Coupling(couple_fixed, uniforms=1)


class _Window(NamedTuple):
    """The drafted steps of R rows that one call verifies: at most L steps of each row. Together these are M steps, one
    row after another.

    In this example, the diffusion has 10 steps, and L is 4. Row 3 of the batch has done 5 steps, row 4 has done 8, and
    row 7 has done 7. So R is 3, and M is 9. The last two lines come from :meth:`accepted_before_rejection` and
    :meth:`stops`, if the coupling rejects step 7 of row 3, and steps 7 and 9 of row 7::

        for each of the M steps  batch_row    3 3 3 3 4 4 7 7 7
                                 step         5 6 7 8 8 9 7 8 9
                                 window_row   0 0 0 0 1 1 2 2 2
                                 window_step  0 1 2 3 0 1 0 1 2
        for each of the R rows   rows         3       4   7
                                 first        0       4   6
                                 last         3       5   8
                                 accepted     2       2   0
                                 stop         2       5   6

    All fields are int64 on the device.
    """

    # For each of the M steps:
    batch_row: Tensor  # the step's row, as an index among the N rows of the batch
    step: Tensor  # the step, as an index among the S steps of the diffusion
    window_row: Tensor  # the step's row, as an index among the R rows of the window
    window_step: Tensor  # the step, as an index among the at most L steps of its row in the window
    # For each of the R rows:
    rows: Tensor  # the row, as an index among the N rows of the batch
    first: Tensor  # the row's first step, as an index among the M steps
    last: Tensor  # the row's last step, as an index among the M steps

    @property
    def in_drafts(self) -> tuple[Tensor, Tensor]:
        """The indices of the M steps in the tensors [R, L, ...] of :class:`DraftedSteps`."""
        return self.window_row, self.window_step

    def accepted_before_rejection(self, accepted: Tensor, length: int) -> Tensor:
        """For each row, the number of accepted steps before its first rejected step, int64 [R].

        ``accepted``: bool [M], for each step; ``length``: L.
        """
        accepted_in_rows = torch.zeros(len(self.rows), length, dtype=torch.int64, device=accepted.device)
        accepted_in_rows[self.in_drafts] = accepted.to(torch.int64)
        return accepted_in_rows.cumprod(1).sum(1)  # 1 1 0 1 -> 1 1 0 0 -> 2

    def stops(self, accepted: Tensor) -> Tensor:
        """For each row, the step at which it stops, as an index among the M steps, int64 [R]. This is the row's first
        rejected step, or else its last step in the window.

        ``accepted``: the result of :meth:`accepted_before_rejection`.
        """
        return torch.minimum(self.first + accepted, self.last)


class _StepsToCouple(NamedTuple):
    """M drafted steps, with the distributions that the coupling compares. A state is flattened to one dimension of n
    numbers.
    """

    batch_row: Tensor  # see _Window, int64 [M]
    step: Tensor  # see _Window, int64 [M]
    draft: Tensor  # drafted states after the steps, fp32 [M, n]
    q: Gaussian  # distributions from which the drafts were sampled
    p: Gaussian  # the head's kernels
    uniforms: Tensor  # uniform random numbers for the coupling, fp32 [M, Coupling.uniforms]

    def at(self, index: Tensor) -> _StepsToCouple:
        """The steps with the indices ``index``, int64 [K]."""
        batch_row, step, draft, q, p, uniforms = self
        return _StepsToCouple(batch_row[index], step[index], draft[index], q.at(index), p.at(index), uniforms[index])


class _Stops(NamedTuple):
    """Where the R rows of a window stop, see :meth:`_Window.stops`."""

    stop: Tensor  # the step at which each row stops, as an index among the M steps of the window, int64 [R]
    sample: Tensor  # the row's state after this step, fp32 [R, *, c]
    accepted: np.ndarray  # number of accepted steps of each row, int64 [R] on the host


class Speculation:
    """The diffusion of N rows with speculation. Each row may be at a different step.

    :meth:`windows` takes all remaining steps of some rows. In each window, it calls :meth:`draft`, then :meth:`verify`.
    :meth:`finish` can also take the steps one after another, without drafts. In all methods, the argument ``rows``
    holds the indices of R of the N rows, int64 [R] on the host.
    """

    done: np.ndarray  # number of steps that each row has done, int64 [N]
    x: Tensor  # states, fp32 [N, *, c]
    # The data and the variance logits that the head last predicted for each row, fp32 [N, *, c] each. The next drafts
    # use them.
    data: Tensor
    logits: Tensor | None  # None if the variances are fixed

    def __init__(
        self,
        net: Recordable,
        head: SpeculationHead,
        batch: DiffusionBatch,
        rng: CounterRNG,
        report: Report | None = None,
    ):
        """``report``: counts the steps that :meth:`windows` drafts and accepts. If it is None, nothing counts them."""
        learns_variance = batch.table.learns_variance
        coupling = LEARNED if learns_variance else FIXED
        self.net = net
        self.head = head
        self.batch = batch
        self.rng = rng
        self.report = report
        self.device = batch.x.device
        self.step_count = len(batch.table)

        # The head has predicted nothing yet, so the first drafts use zeros. The coupling mostly rejects these drafts.
        # This costs nothing, because the call that verifies them also computes the first step.
        self.done = np.zeros(len(batch.x), np.int64)
        self.x = batch.x.clone()
        self.data = torch.zeros_like(self.x)
        self.logits = torch.zeros_like(self.x) if learns_variance else None

        self._equations = StepEquations(batch)
        self._couple = net.compiled(coupling.function, "verification of speculation")
        uniforms = rng.uniform(_LANE_OF_ACCEPTANCES, 0, coupling.uniforms * self.step_count)
        self._uniforms = uniforms.view(-1, self.step_count, coupling.uniforms)

    def finish(self, rows: np.ndarray, length: int) -> Tensor:
        """Take all remaining steps of the rows. Returns the samples, fp32 [R, *, c].

        ``length``: number of steps of a window; 1 for no drafts, so each step calls the head.
        """
        if length > 1:
            for _ in self.windows(rows, length):
                pass
        else:
            while len(going := self._going(rows)):
                self.advance(going)

        (row,) = self._on_device(rows)
        return self.x[row]

    def windows(self, rows: np.ndarray, length: int) -> Iterator[None]:
        """Take all remaining steps of the rows, in windows of ``length`` drafted steps. Yields after every window."""
        while len(going := self._going(rows)):
            left = self._equations.verified_steps - self.done[going]
            accepted = self.verify(going, self.draft(going, length))
            if self.report is not None:
                self.report.add(drafted_steps=int(np.minimum(left, length).sum()))
                self.report.add(accepted_steps=int(np.minimum(left, accepted).sum()))
            yield

    def _going(self, rows: np.ndarray) -> np.ndarray:
        """Those of the rows that have steps left."""
        return rows[self.done[rows] < self.step_count]

    # --- a window

    def draft(self, rows: np.ndarray, length: int) -> DraftedSteps:
        """Draft the next steps of the rows, at most ``length`` steps of each row. All drafts of a row use the data and
        the variance from the row's last call of the head.
        """
        self.net.note_plain("drafts of speculation")
        length = min(length, self.step_count - int(self.done[rows].min()))
        row, done = self._on_device(rows, self.done[rows])
        step = (done[:, None] + torch.arange(length, device=self.device)).clamp(max=self.step_count - 1)

        # 1. A draft is x_{k+1} = x_coefficient_k x_k + offset_k + std_k noise_k. Only x_k is not known before the loop.
        numbers = self._equations.numbers_of(step)
        offset = numbers.data_coefficient * self.data[row][:, None]
        log_std = self._equations.log_std(step, None if self.logits is None else self.logits[row][:, None])
        fixed = offset + log_std.exp() * self._equations.noise(step, row[:, None])

        # 2. A loop computes the states one after another.
        states = []
        values = []
        x = self.x[row]
        for k, x_coefficient_k, fixed_k in zip(
            step.unbind(1), numbers.x_coefficient.unbind(1), fixed.unbind(1), strict=True
        ):
            if self.batch.fixed_tokens is not None:
                x = self.batch.fixed_tokens.follow_rows(x, row, k)
            states.append(x)
            x = torch.addcmul(fixed_k, x_coefficient_k, x)
            values.append(x)

        before = torch.stack(states, 1)
        return DraftedSteps(before, torch.stack(values, 1), Gaussian(offset + numbers.x_coefficient * before, log_std))

    def verify(self, rows: np.ndarray, drafts: DraftedSteps) -> np.ndarray:
        """Call the head for all drafted states of the rows. Advance each row past its accepted steps, and past its
        first rejected step if there is one.

        Args:
            drafts: the next steps of ``rows``.

        Returns:
            The number of accepted steps of each row, int64 [R] on the host.
        """
        length = drafts.states.shape[1]
        counts = self._steps_left(rows, length)
        window = self._window(rows, counts)

        # 1. The head's predictions give the kernels at all drafted states.
        x = drafts.states[window.in_drafts]
        data, logits = self.predict(window.batch_row, window.step, x)
        p = self.kernel(window.batch_row, window.step, x, data, logits)

        # 2. The coupling accepts drafts or replaces them. Each row stops at its first rejected step, whose draft was
        # replaced.
        draft = drafts.values[window.in_drafts].flatten(1)
        q = drafts.q.at(*window.in_drafts)
        uniforms = self._uniforms[window.batch_row, window.step]
        steps = _StepsToCouple(window.batch_row, window.step, draft, q.flat(), p.flat(), uniforms)
        stop, sample, accepted = self._couple_steps(window, steps, length)

        # 3. Each row has done the step at which it stopped. Its next drafts use the head's prediction at this step.
        self.done[rows] += np.minimum(accepted + 1, counts)
        self.x[window.rows] = self._equations.next_state(window.step[stop], x[stop], data[stop], sample)
        self._remember(window.rows, data[stop], None if logits is None else logits[stop])
        return accepted

    def _steps_left(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Number of steps of each row in a window of ``length`` steps, int64 [R]. Rows near their end have fewer."""
        return np.minimum(self.step_count - self.done[rows], length)

    def _window(self, rows: np.ndarray, counts: np.ndarray) -> _Window:
        """A window with the next steps of ``rows``. ``counts``: the number of steps of each row, int64 [R]."""
        ends = counts.cumsum()
        firsts = ends - counts

        window_row = np.arange(len(rows)).repeat(counts)
        window_step = np.arange(len(window_row)) - firsts[window_row]
        step = self.done[rows][window_row] + window_step
        step_fields = self._on_device(rows[window_row], step, window_row, window_step)
        row_fields = self._on_device(rows, firsts, ends - 1)
        return _Window(*step_fields, *row_fields)

    def _couple_steps(self, window: _Window, steps: _StepsToCouple, length: int) -> _Stops:
        """Couple the M steps of a window, and find where each row stops. ``length``: L."""
        coupled = self._couple(steps.draft, steps.q, steps.p, steps.uniforms)
        accepted = window.accepted_before_rejection(coupled.accepted, length)
        stop = window.stops(accepted)
        value = coupled.value[stop]

        # One transfer to the host. The host waits for the device only here, unless some row needs proposals.
        is_sample = coupled.is_sample[stop].to(torch.int64)
        accepted_on_host, is_sample_on_host = torch.stack([accepted, is_sample]).cpu().numpy()

        # In these rows, the coupling rejected the draft and found no replacement.
        missing = np.flatnonzero(is_sample_on_host == 0)
        if len(missing):
            (i,) = self._on_device(missing)
            value[i] = self._propose(steps.at(stop[i]))
        return _Stops(stop, value.view(-1, *self.x.shape[1:]), accepted_on_host)

    def _propose(self, rejected: _StepsToCouple) -> Tensor:
        """Find the states that replace K rejected drafts, fp32 [K, n], by coupling the steps with proposals. Only steps
        with learned variances need proposals.
        """
        values = torch.empty_like(rejected.draft)
        index = torch.arange(len(values), device=self.device)  # the steps that have no value yet, among the K steps
        for count in _PROPOSALS:
            batch_row, step, draft, q, p, uniforms = rejected.at(index)

            rng = self.rng.for_rows(batch_row)
            normals = rng.normal(2 * step + _LANE_OF_NORMALS, 0, count, draft.shape[1])
            proposals = Proposals(normals, rng.uniform(2 * step + _LANE_OF_UNIFORMS, 0, count))
            coupled = couple(draft, q, p, uniforms, proposals)

            values[index] = coupled.value
            index = index[~coupled.is_sample]  # the host waits for the device here
            if not len(index):
                break

        return values

    # --- a step

    def advance(self, rows: np.ndarray) -> None:
        """Take one step of each row, with a call of the head and without a draft."""
        row, step = self._on_device(rows, self.done[rows])
        x = self.x[row]
        if self.batch.fixed_tokens is not None:
            x = self.batch.fixed_tokens.follow_rows(x, row, step)
        data, logits = self.predict(row, step, x)
        p = self.kernel(row, step, x, data, logits)
        sample = p.mean + p.log_std.exp() * self._equations.noise(step, row)
        self.x[row] = self._equations.next_state(step, x, data, sample)
        self._remember(row, data, logits)
        self.done[rows] += 1

    def predict(self, row: Tensor, step: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the head for M states x. Returns the data after guidance, and the variance logits, fp32 [M, *, c] each.
        The logits are None if the variances are fixed.

        State i belongs to row ``row[i]`` before step ``step[i]``. Both are int64 [M] on the device.
        """
        prediction, logits = guide(self.head.at_states(row, step, x), self.batch.cfg[row], x.shape[-1])
        return self._equations.data(step, x, prediction), logits

    def kernel(self, row: Tensor, step: Tensor, x: Tensor, data: Tensor, logits: Tensor | None) -> Gaussian:
        """The head's kernels (the distributions of the next states), from the results ``data`` and ``logits`` of
        :meth:`predict`.
        """
        # At fixed tokens, the kernel takes the data that the draft used. So p equals q at these tokens, and they never
        # cause a rejection.
        if self.batch.fixed_tokens is not None:
            data = torch.where(self.batch.fixed_tokens.free[row], data, self.data[row])
        return Gaussian(self._equations.mean(step, x, data), self._equations.log_std(step, logits))

    def _remember(self, row: Tensor, data: Tensor, logits: Tensor | None) -> None:
        """Store the newest predictions for rows, because the next drafts of these rows use them."""
        self.data[row] = data
        if self.logits is not None and logits is not None:
            self.logits[row] = logits

    def _on_device(self, *numbers: np.ndarray) -> Tensor:
        """Copy arrays of numbers, int64 [K] each, to the device in one transfer. Returns int64 [number of arrays, K].
        The caller unpacks this tensor.
        """
        return to_device(np.stack(numbers), self.device)
