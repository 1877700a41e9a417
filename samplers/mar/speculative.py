"""The self-speculative diffusion head: several diffusion steps are verified in one evaluation. Lossless.

Source: De Bortoli, Galashov, Gretton & Doucet 2025 (arXiv 2501.05370), section 4, "frozen" drafts:

1. at state x_k the next L steps are drafted with the last evaluation's x0 and variance, without the head;
2. the head is evaluated at all L drafted states of all rows in one batch;
3. the longest accepted prefix is kept, and the first rejected step is replaced by the coupling (``coupling.py``).

Step k of the head is N(m_p(x_k), s_p(x_k)^2), with guidance and temperature in mean and std. Its draft is a sample of
N(m_q, s_q^2) that depends on earlier steps only, and the coupling turns it into a sample of the head's own kernel,
given x_k. Later drafts are used only if this one was accepted, so their states are valid. Noise and uniforms of
discarded steps did not affect any accepted step and are used again, which keeps images of one seed alike.

The last diffusion step adds no noise, so its draft is accepted only if it is exact: it always costs an evaluation. At
temperature 0 this holds for every step, and nothing is drafted.

The host keeps the number of diffusion steps that every token has done, as an array. It reads from the device once a
window: the accepted steps, and whether the coupling found a sample for every row. Where it needs redraws, a second read
says whether one was kept.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...model_loaders.networks.mar import BUDGET
from ..driver import to_device
from ..noise import CounterRNG
from .coupling import Gaussian, Redraws, couple
from .diffusion import HeadBatch, guide
from .loop import Run

# Lanes of a row's random numbers: one for all acceptances, two per diffusion step for redraws after a rejection.
_ACCEPT = -1
_NORMAL = 0
_UNIFORM = 1
# Redraws of a rejected step, as many at once as few rows need more of. The last of all redraws is taken
# unconditionally; the probability of needing as many is below 1 / 2^18.
_REDRAWS = (1 << 8, 1 << 13, 1 << 18)


class _States(NamedTuple):
    """Drafted steps of rows, with the head's evaluation of the states that they start from."""

    row: Tensor  # int64 [M]
    step: Tensor  # diffusion step, int64 [M]
    draft: Tensor  # the drafted next state, fp32 [M, channels]
    q: Gaussian  # distribution of the draft, fp32 [M, channels]
    p: Gaussian  # the head's
    uniforms: Tensor  # fp32 [M, 2]

    def rows(self, index: Tensor) -> _States:
        """Some of them."""
        q = self.q.rows(index)
        p = self.p.rows(index)
        return _States(self.row[index], self.step[index], self.draft[index], q, p, self.uniforms[index])


def places(widths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the states of R windows of W states each stand, one window after another; ``widths`` int64 [R].

    Returns the index of each window's first state, int64 [R], and of all M states their window and their place in it,
    int64 [M] each.
    """
    firsts = widths.cumsum() - widths
    window = np.arange(len(widths)).repeat(widths)
    return firsts, window, np.arange(len(window)) - firsts[window]


class Paths:
    """N tokens in the middle of their diffusion, each at its own step; with their random numbers for verification.

    ``window``: drafted steps, L. Below 2, or at temperature 0, every step is evaluated in turn. Methods take the
    numbers of rows, int64 [R] on the host.
    """

    done: np.ndarray  # diffusion steps done, int64 [N]
    x: Tensor  # states fp32 [N, channels]
    # The last evaluation's, fp32 [N, channels]; drafts are made from them.
    x0: Tensor
    logits: Tensor

    def __init__(self, run: Run, batch: HeadBatch, window: int, rng: CounterRNG):
        temperature = run.settings.temperature
        self.run = run
        self.head = run.model.net.head
        self.batch = batch
        self.rng = rng
        self.window = window if temperature > 0 else 1
        self.steps = len(batch.table.steps)
        self.device = batch.x.device
        self._denoise = run.model.net.region(type(self.head).denoise, "diffusion head")
        self._couple = run.model.net.region(couple, "verification of speculation")

        # The first draft uses x0 = 0, the middle of the data; a rejected draft costs no further call.
        self.done = np.zeros(len(batch.x), np.int64)
        self.x = batch.x.clone()
        self.x0 = torch.zeros_like(self.x)
        self.logits = torch.zeros_like(self.x)

        # The numbers of every step, see StepNumbers, fp32 [S, 6]. The temperature is in the stds; the last step has no
        # noise.
        log_temperature = math.log(temperature) if temperature > 0 else -math.inf
        steps = [numbers._replace(middle=numbers.middle + log_temperature) for numbers in batch.table.steps]
        steps[-1] = steps[-1]._replace(middle=-math.inf)
        self._table = to_device(torch.tensor(steps), self.device)

        # Modulations of all rows at all steps, where they fit.
        self._embedded = self.head.cond_embed(batch.z.flatten(0, 1))
        self._times = self.head.time_embed(batch.table.timestep_map.flip(0))
        self._width = self._times.shape[1] * (3 * len(self.head.res_blocks) + 2)  # a row's modulations, in numbers
        self._modulations: list[Tensor] | None = None
        if self.steps * len(self._embedded) * self._width <= BUDGET:
            self._modulations = self.head.modulations(self._times[:, None] + self._embedded)

        # A table of S <= T steps takes noise k T // S at step k.
        spread = torch.arange(self.steps, device=self.device) * len(batch.noise) // self.steps
        self._noise = batch.noise[spread]
        self._uniforms = rng.uniform(_ACCEPT, 0, 2 * self.steps).view(-1, self.steps, 2)

    def predict(self, row: Tensor, step: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Guided x0 and variance logits, fp32 [M, channels] each, at M states.

        The states x fp32 [M, channels] are those of rows ``row`` at diffusion steps ``step``, int64 [M] on the device.
        """
        branches = len(self.batch.z)
        most = max(1, BUDGET // (self._width * branches))
        x0s = []
        logits = []
        for some, k, state in zip(row.split(most), step.split(most), x.split(most), strict=True):
            # 1. The rows of every branch of guidance.
            rows = torch.cat([some + branch * len(self.x) for branch in range(branches)])
            steps = k.repeat(branches)
            if self._modulations is None:
                modulations = self.head.modulations(self._times[steps] + self._embedded[rows])
            else:
                modulations = [m[steps, rows] for m in self._modulations]

            # 2. The head, and x0 of its guided noise.
            out = self._denoise(self.head, state.repeat(branches, 1), modulations).view(branches, len(some), -1)
            eps, logit = guide(out, self.batch.cfg[some])
            recip, recipm1, _, _, _, _ = self._numbers(k)
            x0s.append(recip * state - recipm1 * eps)
            logits.append(logit)
            self.run.report.add(head_calls=1, head_rows=len(rows))
        return torch.cat(x0s), torch.cat(logits)

    def kernel(self, step: Tensor, x: Tensor, x0: Tensor, logits: Tensor) -> Gaussian:
        """The distribution of a step [...] from x [..., channels], with the temperature; the last step has no noise."""
        _, _, coef1, coef2, middle, slope = self._numbers(step)
        return Gaussian(coef1 * x0 + coef2 * x, middle + slope * logits)

    def draft(self, rows: np.ndarray) -> tuple[Tensor, Gaussian]:
        """Draft the next W steps of rows from their last evaluation, whose x0 and variance stay as they are.

        Returns the states fp32 [R, W + 1, channels], the current one first, and the distribution of each step, fp32
        [R, W, channels]. A row with fewer steps left repeats its last one, which is not used.
        """
        self.run.model.net.runs_plain("drafts of speculation")
        width = int(self._widths(rows, self.window).max())
        row, done = self._on_device(rows, self.done[rows])
        step = (done[:, None] + torch.arange(width, device=self.device)).clamp(max=self.steps - 1)

        # 1. Everything but the state is known beforehand: x_{k+1} = offset_k + coef2_k x_k + std_k noise_k.
        _, _, coef1, coef2, middle, slope = self._numbers(step)
        offset = coef1 * self.x0[row][:, None]
        log_std = middle + slope * self.logits[row][:, None]
        fixed = offset + log_std.exp() * self._noise[step, row[:, None]]

        # 2. The states, one after another.
        states = [self.x[row]]
        for fixed_k, coef2_k in zip(fixed.unbind(1), coef2.unbind(1), strict=True):
            states.append(torch.addcmul(fixed_k, coef2_k, states[-1]))
        path = torch.stack(states, 1)
        return path, Gaussian(offset + coef2 * path[:, :-1], log_std)

    def verify(self, rows: np.ndarray, path: Tensor, q: Gaussian) -> np.ndarray:
        """Evaluate the head at all drafted states of rows; advance them past the accepted prefix and one step more.

        ``path`` and ``q`` are as :meth:`draft` returns them, from the rows' present steps on. Returns the number of
        accepted steps, int64 [R].
        """
        # 1. The M drafted states, those of the first row first.
        widths = self._widths(rows, q.mean.shape[1])
        firsts, index, columns = places(widths)
        of, column, token, step = self._on_device(index, columns, rows[index], self.done[rows][index] + columns)
        row, first, width = self._on_device(rows, firsts, widths)

        # 2. The head at all of them.
        x = path[of, column]
        x0, logits = self.predict(token, step, x)
        p = self.kernel(step, x, x0, logits)
        states = _States(token, step, path[of, column + 1], q.rows(of, column), p, self._uniforms[token, step])

        # 3. The coupling accepts drafts or replaces them. Of each row the accepted prefix is used, and the first
        # rejected step, which is its last evaluation that is.
        coupled = self._couple(states.draft, states.q, states.p, states.uniforms)
        ok = torch.zeros(len(rows), path.shape[1] - 1, dtype=torch.int64, device=self.device)
        ok[of, column] = coupled.accepted.to(torch.int64)
        accepted = ok.cumprod(1).sum(1)
        newest = first + torch.minimum(accepted, width - 1)
        value = coupled.value[newest]

        # 4. The only read, unless some row needs redraws.
        kept, found = torch.stack([accepted, coupled.found[newest].to(torch.int64)]).cpu().numpy()
        missing = np.flatnonzero(found == 0)
        if len(missing):
            self._redraw(states, newest, value, missing)

        # 5. Advance.
        self.x[row] = value
        self.x0[row] = x0[newest]
        self.logits[row] = logits[newest]
        self.done[rows] += np.minimum(kept + 1, widths)
        return kept

    def evaluate(self, rows: np.ndarray) -> None:
        """One step of rows without a draft."""
        row, step = self._on_device(rows, self.done[rows])
        x0, logits = self.predict(row, step, self.x[row])
        p = self.kernel(step, self.x[row], x0, logits)
        self.x[row] = p.mean + p.log_std.exp() * self._noise[step, row]
        self.x0[row] = x0
        self.logits[row] = logits
        self.done[rows] += 1

    def finish(self, rows: np.ndarray) -> Tensor:
        """All remaining steps of rows; tokens fp32 [R, channels]."""
        going = rows[self.done[rows] < self.steps]
        while len(going):
            if self.window > 1:
                drafted = int(self._widths(going, self.window).sum())
                kept = self.verify(going, *self.draft(going))
                self.run.report.add(drafted_steps=drafted, accepted_steps=int(kept.sum()))
            else:
                self.evaluate(going)
            going = going[self.done[going] < self.steps]
        (row,) = self._on_device(rows)
        return self.x[row]

    def _widths(self, rows: np.ndarray, most: int) -> np.ndarray:
        """How many steps of rows are drafted, ``most`` at a time, int64 [R]."""
        return np.minimum(self.steps - self.done[rows], most)

    def _numbers(self, step: Tensor) -> tuple[Tensor, ...]:
        """The numbers of diffusion steps [...] in the order of :class:`StepNumbers`, fp32 [..., 1] each."""
        return self._table[step][..., None].unbind(-2)

    def _on_device(self, *numbers: np.ndarray) -> Tensor:
        """Arrays of numbers, int64 [R] each, in one copy."""
        return to_device(np.stack(numbers), self.device)

    def _redraw(self, states: _States, newest: Tensor, value: Tensor, missing: np.ndarray) -> None:
        """Write the coupling's results of those rows that need redraws, ``missing`` int64 [M].

        Args:
            states: all states of a window.
            newest: int64 [R], the state of each row at which it leaves its draft.
            value: fp32 [R, channels], the rows' next states, written in place.
        """
        for count in _REDRAWS:
            (some,) = self._on_device(missing)
            row, step, draft, q, p, uniforms = states.rows(newest[some])
            rng = self.rng.of(row)
            normals = rng.normal(2 * step + _NORMAL, 0, count, draft.shape[1])
            redraws = Redraws(normals, rng.uniform(2 * step + _UNIFORM, 0, count))
            coupled = couple(draft, q, p, uniforms, redraws)
            value[some] = coupled.value
            missing = missing[~coupled.found.cpu().numpy()]
            if not len(missing):
                return
