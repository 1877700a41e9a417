"""Speculation in a diffusion head: one call of the head verifies several diffusion steps. The distribution of the
samples does not change, except for two tiny errors: see :data:`_PROPOSALS`, and ``ROUNDING`` in ``coupling.py``.

Source: De Bortoli, Galashov, Gretton & Doucet 2025 (arXiv 2501.05370), section 4, "frozen" drafts. A row is a token, or
a block of tokens in BitDance. A *window* consists of three parts:

1. The sampler drafts the next steps of each row from its state x_k, without a call of the head. All these drafts use
   the *data* (``diffusion_steps.py``) and the variance that the head last predicted for the row.
2. The head computes its predictions for all drafted states of all rows in one batch.
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

The host keeps an array with the number of steps that each row has done. Once per window, the host reads from the device
which steps are accepted, and for which steps the coupling found a sample. If it found none for the step at which a row
stops, the coupling tries batches of proposals. After each batch, the host reads whether a proposal is accepted.

The file has :func:`take_steps`, which runs a whole diffusion for BitDance and NextStep; the parts of a window; and
:class:`Speculation`, which computes the windows. MAR's samplers use this class directly.

Shapes: N rows in the batch, and S diffusion steps. A row of the diffusion has the shape [*, c], see ``chain.py``. A
window has G of the N rows (those that have steps left) and M steps in all. It is a table of G lines and W columns, see
:class:`_Window`. ``length`` is a setting, the largest allowed W. The actual W is smaller if no row has ``length`` steps
left: it is the largest number of steps that a row has left.
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
from .chain import DiffusionBatch, HeadSampler, SpeculationHead, guide, run_chain
from .coupling import Coupled, Gaussian, Proposals, couple, couple_fixed
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
    heads: HeadSampler, batch: DiffusionBatch, length: int, rng: CounterRNG | None
) -> Iterator[tuple[int, Tensor]]:
    """Take all steps of all rows of a batch. The report of ``heads`` counts the work.

    After every call of the head (with speculation, after every window), yields the number of steps that each row has
    done (the minimum over the rows, if they differ), and the states, fp32 [N, *, c]. The last states are the samples.

    Args:
        heads: makes the object that calls the head for the batch.
        batch: the rows.
        length: largest number of steps that a window drafts for a row; 1 for no speculation.
        rng: random numbers that decide for each row which drafts are accepted; None without speculation.
    """
    if length == 1:
        for done, result in enumerate(run_chain(batch, heads.for_chain(batch)), 1):
            yield done, result.x
        return

    assert rng is not None
    speculation = Speculation(heads.net, heads.for_speculation(batch), batch, rng, heads.report)
    for _ in speculation.windows(np.arange(len(batch.x)), length):
        yield int(speculation.done.min()), speculation.x


class DraftedSteps(NamedTuple):
    """The next W steps of G rows, as drafts. In a row that has fewer than W steps left, nothing reads the entries after
    its last step.
    """

    states: Tensor  # state before each step, fp32 [G, W, *, c]
    values: Tensor  # state after each step, fp32 [G, W, *, c]
    q: Gaussian  # distributions of the values, fp32 [G, W, *, c]; for fixed variances, log stds [G, W, 1 ...]


class VerificationRule(NamedTuple):
    """How speculation verifies drafted steps: :data:`LEARNED` for learned variances, :data:`FIXED` for fixed ones."""

    function: Callable[..., Coupled]  # the coupling; takes draft, q, p and uniforms
    uniforms_per_step: int  # how many uniform random numbers the function takes for a step


# MAR's head predicts the variances, and a rejected draft may need proposals.
LEARNED = VerificationRule(couple, uniforms_per_step=2)
# The variances of BitDance and NextStep are fixed, so the draft and the head's kernel have the same std.
FIXED = VerificationRule(couple_fixed, uniforms_per_step=1)


class _Window:
    """The layout of a window, on the host: a table with a line for each of G rows, and W columns.

    A line holds the next steps of its row. If the row has fewer than W steps left, the last entries of the line are
    empty. The other entries of the table are the M steps of the window. Line by line, they have the indices 0 to M - 1.

    In this example, the diffusion has 10 steps, and W is 4. Rows 3, 4 and 7 of the batch have done 5, 8 and 7 steps, so
    G is 3 and M is 9. The coupling accepts (+) or rejects (-) each of the 9 steps. :meth:`progress` computes the last
    three columns::

        row   done    steps      count    indices    coupling    accepted   taken   stop_in_window
         3     5      5 6 7 8      4      0 1 2 3    + + - +         2        3           2
         4     8      8 9          2      4 5        + +             2        2           5
         7     7      7 8 9        3      6 7 8      - + -           0        1           6
    """

    count: np.ndarray  # number of steps in each line, int64 [G]
    filled: np.ndarray  # which entries of the table are steps, bool [G, W]
    # For each of the M steps, int64 [M]:
    line: np.ndarray  # its line in the table
    column: np.ndarray  # its column in the table
    step: np.ndarray  # its index among the S steps of the diffusion

    def __init__(self, done: np.ndarray, column_count: int, step_count: int):
        """``done``: number of steps that each row has done, int64 [G]. ``column_count``: W. ``step_count``: S."""
        self.count = np.minimum(step_count - done, column_count)
        self.filled = np.arange(column_count) < self.count[:, None]
        self.line, self.column = self.filled.nonzero()
        self.step = done[self.line] + self.column

    def progress(self, is_accepted: np.ndarray) -> _Progress:
        """How far each row comes. ``is_accepted``: whether the coupling accepts each of the M steps, bool [M]."""
        table = np.zeros_like(self.filled)
        table[self.filled] = is_accepted
        accepted = np.logical_and.accumulate(table, axis=1).sum(1)  # + + - + becomes + + - -, so 2 steps

        taken = np.minimum(accepted + 1, self.count)
        first = self.count.cumsum() - self.count  # index of the first step in each line: 0 4 6 in the example
        return _Progress(accepted, taken, stop_in_window=first + taken - 1)


class _Progress(NamedTuple):
    """How far the G rows of a window come, int64 [G] each, on the host. See the example of :class:`_Window`."""

    accepted: np.ndarray  # how many steps of the row are accepted before the first rejected one
    taken: np.ndarray  # how many steps the row takes: the accepted steps, then the first rejected one if there is one
    stop_in_window: np.ndarray  # the last step that the row takes, as an index among the M steps of the window


class _CouplingInputs(NamedTuple):
    """The arguments of the coupling for M steps. A state is flattened to one dimension of n numbers, which the coupling
    accepts or rejects together.
    """

    draft: Tensor  # drafted states after the steps, fp32 [M, n]
    q: Gaussian  # distributions from which the drafts were sampled
    p: Gaussian  # the head's kernels
    uniforms: Tensor  # uniform random numbers, fp32 [M, VerificationRule.uniforms_per_step]

    def at(self, index: Tensor) -> _CouplingInputs:
        """The arguments for the steps with the indices ``index``, which count the M steps."""
        draft, q, p, uniforms = self
        return _CouplingInputs(draft[index], q.at(index), p.at(index), uniforms[index])


class Speculation:
    """The diffusion of N rows with speculation. Each row may be at a different step.

    :meth:`windows` takes all remaining steps of some rows. In each window, it calls :meth:`draft`, then :meth:`verify`.
    :meth:`finish` can also take the steps one after another, without drafts (:meth:`advance`).

    In all methods, ``host_rows`` holds the indices of G of the N rows, int64 [G] on the host. ``row`` and ``step`` are
    int64 tensors on the device. They say where some states are in the diffusion: state i is a state of row ``row[i]``
    of the N rows, before step ``step[i]`` of the S steps.

    A window numbers its G rows (index g, the line of the row) and its M steps (index m). These arrays translate between
    the numbers::

        host_rows[g]                        row of line g, among the N rows
        window.line[m] = g                  line of step m
        row[m] = host_rows[window.line[m]]  row of step m, among the N rows
        step[m] = window.step[m]            step m, among the S steps
        stop_in_window[g] = m               last step that the row of line g takes

    In an edit, the fixed tokens of a block follow a path of their own (:class:`.FixedTokens`). Their drafts follow the
    same path, so these tokens cannot cause a rejection.
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
        """``report``: counts the steps that :meth:`verify` verifies and accepts. If it is None, nothing counts them."""
        learns_variance = batch.table.learns_variance
        rule = LEARNED if learns_variance else FIXED
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
        self._compiled_couple = net.compiled(rule.function, "verification of speculation")
        # The numbers that decide the acceptance, fp32 [N, S, uniforms_per_step]: consecutive numbers of one lane.
        uniforms = rng.uniform(_LANE_OF_ACCEPTANCES, 0, rule.uniforms_per_step * self.step_count)
        self._uniforms = uniforms.view(-1, self.step_count, rule.uniforms_per_step)

    def finish(self, host_rows: np.ndarray, length: int) -> Tensor:
        """Take all remaining steps of the rows. Returns the samples, fp32 [G, *, c].

        ``length``: largest number of steps that a window drafts for a row; 1 for no drafts, so each step calls the
        head.
        """
        if length > 1:
            for _ in self.windows(host_rows, length):
                pass
        else:
            while len(going := self._going(host_rows)):
                self.advance(going)

        (row,) = self._on_device(host_rows)
        return self.x[row]

    def windows(self, host_rows: np.ndarray, length: int) -> Iterator[None]:
        """Take all remaining steps of the rows. Each window drafts at most ``length`` steps of each row. Yields after
        every window.
        """
        while len(going := self._going(host_rows)):
            self.verify(going, self.draft(going, length))
            yield

    def _going(self, host_rows: np.ndarray) -> np.ndarray:
        """Those of the rows that have steps left."""
        return host_rows[self.done[host_rows] < self.step_count]

    # --- a window

    def draft(self, host_rows: np.ndarray, length: int) -> DraftedSteps:
        """Draft the next steps of the rows, at most ``length`` steps of each row. All drafts of a row use the data and
        the variance from the row's last call of the head.
        """
        self.net.note_plain("drafts of speculation")
        column_count = min(length, self.step_count - int(self.done[host_rows].min()))  # W
        row, done = self._on_device(host_rows, self.done[host_rows])
        # In a row that has fewer steps left, the clamp repeats the last step; nothing reads these entries.
        step = (done[:, None] + torch.arange(column_count, device=self.device)).clamp(max=self.step_count - 1)  # [G, W]

        # 1. A draft of step k is x_{k+1} = x_coefficient_k x_k + added_k, with added_k = offset_k + std_k noise_k. Only
        # x_k is not known before the loop.
        coefficients = self._equations.coefficients_at(step)
        x_coefficient = coefficients.x_coefficient
        offset = coefficients.data_coefficient * self.data[row][:, None]
        log_std = self._equations.log_std(step, None if self.logits is None else self.logits[row][:, None])
        added = offset + log_std.exp() * self._equations.noise(step, row[:, None])

        # 2. A loop over the W columns computes the states one after another. A column has one step of each row, [G].
        states = []
        values = []
        x = self.x[row]
        columns = zip(step.unbind(1), x_coefficient.unbind(1), added.unbind(1), strict=True)
        for step_of_column, x_coefficient_of_column, added_of_column in columns:
            if self.batch.fixed_tokens is not None:
                x = self.batch.fixed_tokens.follow_rows(x, row, step_of_column)
            states.append(x)
            x = torch.addcmul(added_of_column, x_coefficient_of_column, x)
            values.append(x)

        before = torch.stack(states, 1)
        return DraftedSteps(before, torch.stack(values, 1), Gaussian(offset + x_coefficient * before, log_std))

    def verify(self, host_rows: np.ndarray, drafts: DraftedSteps) -> np.ndarray:
        """Call the head for all drafted states of the rows. Move each row past its accepted steps, and past its first
        rejected step if there is one.

        Args:
            drafts: the next steps of the rows.

        Returns:
            The number of accepted steps of each row, int64 [G] on the host.
        """
        # 1. Lay out the M steps of the window. In parts 1 to 3, every tensor has an entry for each of these steps.
        window = _Window(self.done[host_rows], drafts.states.shape[1], self.step_count)
        row, step, line, column = self._on_device(host_rows[window.line], window.step, window.line, window.column)
        x = drafts.states[line, column]

        # 2. The head's predictions give the kernels at all drafted states.
        data, logits = self.predict(row, step, x)
        p = self.kernel(row, step, x, data, logits).flat()

        # 3. The coupling accepts drafts or replaces them.
        draft = drafts.values[line, column].flatten(1)
        q = drafts.q.at(line, column).flat()
        inputs = _CouplingInputs(draft, q, p, self._uniforms[row, step])
        after, progress = self._couple_window(window, row, step, inputs)

        # 4. Pick the step at which each row stops, so that every tensor has an entry for each of the G rows. The row
        # continues with the state after this step, and its next drafts use the head's prediction at this step.
        (stop,) = self._on_device(progress.stop_in_window)
        last_row, last_step, last_x, last_data = row[stop], step[stop], x[stop], data[stop]
        sample = after[stop].view(last_x.shape)
        self.x[last_row] = self._equations.next_state(last_step, last_x, last_data, sample)
        self._remember(last_row, last_data, None if logits is None else logits[stop])
        self.done[host_rows] += progress.taken
        return progress.accepted

    def _couple_window(
        self, window: _Window, row: Tensor, step: Tensor, inputs: _CouplingInputs
    ) -> tuple[Tensor, _Progress]:
        """Couple the M steps of a window. Returns the states after the steps, fp32 [M, n], and how far the rows come.
        If a row stops at a step, the row's entries for later steps mean nothing. ``row``, ``step``: int64 [M].
        """
        coupled = self._compiled_couple(*inputs)
        # One transfer to the host. The host waits for the device only here, unless some row needs proposals.
        is_accepted, is_sample = torch.stack([coupled.accepted, coupled.is_sample]).cpu().numpy()

        # A last step that is not verified counts as rejected. The row ends there in any case. The variances are fixed
        # then, so couple_fixed reports is_sample = True, and the step gets no proposals.
        is_verified = window.step < self._equations.verified_steps
        progress = window.progress(is_accepted & is_verified)
        if self.report is not None:
            self.report.add(drafted_steps=int(is_verified.sum()), accepted_steps=int(progress.accepted.sum()))

        after = coupled.value
        # The rows that stop at these steps have no sample: the coupling rejected the draft and found no replacement.
        missing_in_window = progress.stop_in_window[~is_sample[progress.stop_in_window]]
        if len(missing_in_window):
            (missing,) = self._on_device(missing_in_window)
            after = self._propose(missing, row, step, inputs, after)
        return after, progress

    def _propose(self, missing: Tensor, row: Tensor, step: Tensor, inputs: _CouplingInputs, after: Tensor) -> Tensor:
        """Replace rejected drafts, by coupling their steps with proposals. Only steps with learned variances need
        proposals.

        Args:
            missing: the steps whose drafts are rejected, as indices among the M steps of the window.
            row, step: for each of the M steps, int64 [M].
            after: the states after the M steps, fp32 [M, n].

        Returns:
            ``after`` itself, with the new states at ``missing``. A copy would cost an operation more.
        """
        left = missing  # the steps that still have no sample, also as indices among the M steps
        for count in _PROPOSALS:
            rng = self.rng.for_rows(row[left])
            lane = 2 * step[left]
            normals = rng.normal(lane + _LANE_OF_NORMALS, 0, count, after.shape[1])
            proposals = Proposals(normals, rng.uniform(lane + _LANE_OF_UNIFORMS, 0, count))

            # This is not self._compiled_couple, because the number of steps differs from call to call.
            coupled = couple(*inputs.at(left), proposals)
            after[left] = coupled.value

            left = left[~coupled.is_sample]  # the host waits for the device here
            if not len(left):
                break
        return after

    # --- a step of each row

    def advance(self, host_rows: np.ndarray) -> None:
        """Take one step of each row, with a call of the head and without a draft. This is the step of
        :func:`.chain.advance`, but the rows may be at different steps.
        """
        row, step = self._on_device(host_rows, self.done[host_rows])
        x = self.x[row]
        if self.batch.fixed_tokens is not None:
            x = self.batch.fixed_tokens.follow_rows(x, row, step)
        data, logits = self.predict(row, step, x)
        p = self.kernel(row, step, x, data, logits)
        sample = p.mean + p.log_std.exp() * self._equations.noise(step, row)
        self.x[row] = self._equations.next_state(step, x, data, sample)
        self._remember(row, data, logits)
        self.done[host_rows] += 1

    def predict(self, row: Tensor, step: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the head for M states x. Returns the data after guidance, and the variance logits, fp32 [M, *, c] each.
        The logits are None if the variances are fixed. ``row``, ``step``: int64 [M].
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
