"""The self-speculative diffusion head: several diffusion steps are verified in one evaluation. Lossless.

Source: De Bortoli, Galashov, Gretton & Doucet 2025 (arXiv 2501.05370), section 4, "frozen" drafts:

1. at state x_k the next L steps are drafted with the last evaluation's x0 and variance, without the head;
2. the head is evaluated at all L drafted states of all rows in one batch;
3. the longest accepted prefix is kept, and the first rejected step is replaced by the coupling (``coupling.py``).

Step k of the head is N(m_p(x_k), s_p(x_k)^2), with guidance and temperature in mean and std. Its draft is a sample of
N(m_q, s_q^2) that depends on earlier steps only, and the coupling turns it into a sample of the head's own kernel, given x_k.
Later drafts are used only if this one was accepted, so their states are valid. Noise and uniforms of discarded steps did not
affect any accepted step and are used again, which keeps pictures of one seed alike.

The last diffusion step adds no noise, so its draft is accepted only if it is exact: it always costs an evaluation. At
temperature 0 this holds for every step, and nothing is drafted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...model_loaders.networks.mar import BUDGET
from ..noise import CounterRNG
from .coupling import Gaussian, acceptable, couple
from .diffusion import HeadBatch, guide
from .loop import Run

# Lanes of a row's random numbers: one for all acceptances, two per diffusion step for redraws after a rejection.
_ACCEPT, _NORMAL, _UNIFORM = -1, 0, 1


class Drafts(NamedTuple):
    """Drafted diffusion steps of R rows."""

    path: Tensor  # states fp32 [R, W + 1, channels], the current one first
    q: Gaussian  # the distribution of each drafted step, fp32 [R, W, channels]
    width: Tensor  # number of drafted steps, int64 [R], 1 to W


class Paths:
    """N tokens in the middle of their diffusion, each at its own step; with their random numbers for verification.

    ``window``: drafted steps, L. Below 2, or at temperature 0, every step is evaluated in turn.
    """

    x: Tensor  # states fp32 [N, channels]
    at: Tensor  # diffusion steps done, int64 [N]
    # the last evaluation's, fp32 [N, channels]; drafts are made from them
    x0: Tensor
    logits: Tensor

    def __init__(self, run: Run, batch: HeadBatch, window: int, rng: CounterRNG):
        self.run, self.head, self.batch, self.rng = run, run.model.net.head, batch, rng
        temperature, table, steps = run.settings.temperature, batch.table, len(batch.table)
        self.window = window if temperature > 0 else 1
        numbers = torch.tensor(table.steps).to(batch.x.device)  # [S, 6], highest timestep first
        self._recip, self._recipm1, self._coef1, self._coef2, middle, self._slope = numbers[..., None].unbind(1)
        # The temperature is in the stds; the last step has no noise.
        self._middle = middle + (math.log(temperature) if temperature > 0 else -math.inf)
        self._middle[-1] = -math.inf
        self._embedded = self.head.cond_embed(batch.z.flatten(0, 1))
        self._times = self.head.time_embed(table.timestep_map.flip(0))
        self._width = self._times.shape[1] * (3 * len(self.head.res_blocks) + 2)  # a row's modulations, in numbers
        self._modulations: list[Tensor] | None = None
        if steps * len(self._embedded) * self._width <= BUDGET:
            self._modulations = self.head.modulations(self._times[:, None] + self._embedded)
        spread = torch.arange(steps, device=batch.x.device) * len(batch.noise) // steps
        self._noise = batch.noise[spread]
        self._uniforms = rng.uniform(_ACCEPT, 0, 2 * steps).view(-1, steps, 2)
        self.x, self.at = batch.x.clone(), torch.zeros(len(batch.x), dtype=torch.int64, device=batch.x.device)
        # The first draft uses x0 = 0, the middle of the data; a rejected draft costs no further call.
        self.x0, self.logits = torch.zeros_like(self.x), torch.zeros_like(self.x)

    def predict(self, row: Tensor, step: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Guided x0 and variance logits at M states x fp32 [M, channels] of tokens ``row`` at diffusion steps ``step``, int64 [M]."""
        branches, total, parts = len(self.batch.z), len(self.x), []
        most = max(1, BUDGET // (self._width * branches))
        for r, k, x_ in zip(row.split(most), step.split(most), x.split(most), strict=True):
            rows, steps = torch.cat([r + i * total for i in range(branches)]), torch.cat([k] * branches)
            if self._modulations is None:
                modulations = self.head.modulations(self._times[steps] + self._embedded[rows])
            else:
                modulations = [m[steps, rows] for m in self._modulations]
            out = self.head.denoise(torch.cat([x_] * branches), modulations).view(branches, len(r), -1)
            eps, logits = guide(out, self.batch.cfg[r])
            parts.append((self._recip[k] * x_ - self._recipm1[k] * eps, logits))
            self.run.report.add(head_calls=1, head_rows=len(rows))
        return torch.cat([x0 for x0, _ in parts]), torch.cat([logits for _, logits in parts])

    def kernel(self, step: Tensor, x: Tensor, x0: Tensor, logits: Tensor) -> Gaussian:
        """The distribution of a step [...] from x [..., channels]: with the temperature, and without noise in the last step."""
        return Gaussian(self._coef1[step] * x0 + self._coef2[step] * x, self._middle[step] + self._slope[step] * logits)

    def draft(self, of: Tensor) -> Drafts:
        """Drafts of rows ``of`` int64 [R] from their last evaluation: x0 and variance stay as they are."""
        steps = len(self.batch.table)
        width = (steps - self.at[of]).clamp(max=self.window)
        step = (self.at[of][:, None] + torch.arange(int(width.max()), device=of.device)).clamp(max=steps - 1)
        # Everything but the state is known beforehand: x_{k+1} = fixed_k + coef2_k x_k.
        at_rest, log_std = self.kernel(step, self.x.new_zeros(()), self.x0[of][:, None], self.logits[of][:, None])
        fixed, pull = at_rest + log_std.exp() * self._noise[step, of[:, None]], self._coef2[step]
        path = [self.x[of]]
        for j in range(step.shape[1]):
            path.append(fixed[:, j] + pull[:, j] * path[-1])
        states = torch.stack(path, 1)
        return Drafts(states, Gaussian(at_rest + pull * states[:, :-1], log_std), width)

    def verify(self, of: Tensor, drafts: Drafts) -> Tensor:
        """Evaluate the head at all drafted states of rows ``of`` int64 [R]; advance them past the accepted prefix and one step more.

        Returns the number of accepted steps, int64 [R].
        """
        # 1. All valid states in one evaluation.
        path, q, width = drafts
        ahead = torch.arange(q.mean.shape[1], device=of.device)
        which, column = (ahead < width[:, None]).nonzero(as_tuple=True)
        row, step, states = of[which], (self.at[of][:, None] + ahead)[which, column], path[which, column]
        x0, logits = self.predict(row, step, states)
        p, q = self.kernel(step, states, x0, logits), Gaussian(q.mean[which, column], q.log_std[which, column])
        uniforms = self._uniforms[row, step]
        # 2. The accepted prefix of every row.
        ok = torch.zeros(len(of), len(ahead), dtype=torch.bool, device=of.device)
        ok[which, column] = acceptable(path[which, column + 1], q, p, uniforms)
        kept = ok.to(torch.int64).cumprod(1).sum(1)
        wrong, last = kept < width, torch.minimum(kept, width - 1)
        # The newest evaluation in use: at the first rejected step, or at the last drafted one.
        newest = width.cumsum(0) - width + last
        moved = path[torch.arange(len(of), device=of.device), kept]
        # 3. The first rejected step of a row is replaced by the coupling.
        bad = wrong.nonzero()[:, 0]
        if len(bad):
            rng, lane, at = self.rng.of(of[bad]), 2 * (self.at[of] + last)[bad], newest[bad]

            def retry(m: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
                mine = rng.of(m)
                normals = mine.normal(lane[m] + _NORMAL, first, count, states.shape[1])
                return normals, mine.uniform(lane[m] + _UNIFORM, first, count)

            mine, real = Gaussian(q.mean[at], q.log_std[at]), Gaussian(p.mean[at], p.log_std[at])
            moved[bad] = couple(path[bad, last[bad] + 1], mine, real, uniforms[at], retry).value
        self.x[of], self.x0[of], self.logits[of] = moved, x0[newest], logits[newest]
        self.at[of] += kept + wrong
        return kept

    def evaluate(self, of: Tensor) -> None:
        """One step of rows ``of`` int64 [R] without a draft."""
        step = self.at[of]
        x0, logits = self.predict(of, step, self.x[of])
        p = self.kernel(step, self.x[of], x0, logits)
        self.x[of] = p.mean + p.log_std.exp() * self._noise[step, of]
        self.x0[of], self.logits[of] = x0, logits
        self.at[of] += 1

    def finish(self, of: Tensor) -> Tensor:
        """All remaining steps of rows ``of`` int64 [R]; tokens fp32 [R, channels]."""
        while len(going := of[self.at[of] < len(self.batch.table)]):
            if self.window > 1:
                drafts = self.draft(going)
                kept = self.verify(going, drafts)
                self.run.report.add(drafted_steps=int(drafts.width.sum()), accepted_steps=int(kept.sum()))
            else:
                self.evaluate(going)
        return self.x[of]
