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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UserError
from ..noise import CounterRNG, copied, row_keys
from .coupling import Coupled, Gaussian, acceptable, couple
from .denoiser import Denoiser
from .diffusion import Tables, guide
from .head import PlainHead
from .loop import Conditions, HeadRows, Run, Transformer

# Lanes of a row's random numbers: one for all acceptances, two per diffusion step for redraws after a rejection.
_ACCEPT, _NORMAL, _UNIFORM = -1, 0, 1


@dataclass(eq=False)
class Rows:
    """N tokens in the middle of their diffusion, each at its own step.

    Attributes:
        embedded: embedded conditions [N, w]; with guidance [2N, w], the null class last.
        guided: whether there is a null branch.
        scale: guidance scale fp32 [N, 1].
        noise: fp32 [S, N, channels], highest timestep first.
        rng: random numbers for verification.
        uniforms: for acceptance, fp32 [N, S, 2].
        x: state fp32 [N, channels].
        at: diffusion steps done, int64 [N] on the host, which decides what to evaluate next.
        x0, logits: the last evaluation's, fp32 [N, channels]; drafts are made from them.
        modulations: of all steps, if they fit the budget.
    """

    embedded: Tensor
    guided: bool
    scale: Tensor
    noise: Tensor
    rng: CounterRNG
    uniforms: Tensor
    x: Tensor
    at: Tensor
    x0: Tensor
    logits: Tensor
    modulations: list[Tensor] | None = None


@dataclass(eq=False)
class Drafts:
    """Drafted diffusion steps of R rows.

    Attributes:
        path: states fp32 [R, W + 1, channels], the current one first.
        q: the distribution of each drafted step, fp32 [R, W, channels].
        width: number of drafted steps, int64 [R], 1 to W, on the host.
    """

    path: Tensor
    q: Gaussian
    width: Tensor


class SpeculativeDenoiser(Denoiser):
    """A denoiser that verifies ``window`` drafted diffusion steps an evaluation.

    Args:
        run: the generation.
        table: diffusion tables.
        window: drafted steps, L. Below 2, or at temperature 0, every step is evaluated in turn.
    """

    def __init__(self, run: Run, table: Tables, window: int):
        super().__init__(run, table)
        self.temperature = run.settings.temperature
        self.window = window if self.temperature > 0 else 1

        def constant(values: Tensor) -> Tensor:  # [S, 1], highest timestep first
            return values.flip(0).to(run.tokens.device, torch.float32)[:, None]

        self._recip, self._recipm1 = (
            constant(table.sqrt_recip_alphas_cumprod),
            constant(table.sqrt_recipm1_alphas_cumprod),
        )
        self._coef1, self._coef2 = constant(table.posterior_mean_coef1), constant(table.posterior_mean_coef2)
        low, high = table.posterior_log_variance_clipped, table.betas.log()
        self._low, self._half = constant(low), constant((high - low) / 2)
        # Log of the noise's factor: the temperature; the last step has no noise.
        self._scale = torch.full_like(self._low, math.log(self.temperature) if self.temperature > 0 else -math.inf)
        self._scale[-1] = -math.inf

    # -------------------------------------------------------------------------------------------- pieces

    def rows(self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor, rng: CounterRNG) -> Rows:
        """Rows before their first step; arguments as :meth:`__call__`.

        The first draft uses x0 = 0, the middle of the data; a rejected draft costs no further call.
        """
        both = z.both()
        embedded, at = self.head.cond_embed(both), torch.zeros(len(first), dtype=torch.int64)
        x0, logits, steps = torch.zeros_like(first), torch.zeros_like(first), len(self.table)
        uniforms = rng.uniform(_ACCEPT, 0, 2 * steps).view(-1, steps, 2)
        out = Rows(embedded, z.guided, scale, noise, rng, uniforms, first.clone(), at, x0, logits)
        if steps * len(both) * self._width <= self.budget:
            out.modulations = self.head.modulations(self.times[:, None] + embedded)
        return out

    @property
    def _width(self) -> int:
        """Numbers of one row's modulations."""
        return self.times.shape[1] * (3 * len(self.head.res_blocks) + 2)

    def predict(self, rows: Rows, row: Tensor, step: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The head at M states in one call, or several where they do not fit the budget.

        Args:
            rows: the tokens.
            row, step: int64 [M], the token and the diffusion step of each state.
            x: fp32 [M, channels].

        Returns:
            Guided x0 and variance logits, fp32 [M, channels].
        """
        total, n = len(rows.x), x.shape[1]
        most = max(1, self.budget // (self._width * (1 + rows.guided)))
        parts = []
        for row_, step_, x_ in zip(row.split(most), step.split(most), x.split(most), strict=True):
            where = torch.cat([row_, row_ + total]) if rows.guided else row_
            when = torch.cat([step_, step_]) if rows.guided else step_
            if rows.modulations is None:
                modulations = self.head.modulations(self.times[when] + rows.embedded[where])
            else:
                modulations = [m[when, where] for m in rows.modulations]
            out = self.head.denoise(torch.cat([x_, x_]) if rows.guided else x_, modulations)
            eps, logits = guide(out[: len(x_)], out[len(x_) :] if rows.guided else None, rows.scale[row_], n)
            parts.append((self._recip[step_] * x_ - self._recipm1[step_] * eps, logits))
            self.run.report.add(head_calls=1, head_rows=len(where))
        return torch.cat([x0 for x0, _ in parts]), torch.cat([logits for _, logits in parts])

    def learned(self, step: Tensor, x: Tensor, x0: Tensor, logits: Tensor) -> Gaussian:
        """The model's kernel of a step [...] from x [..., channels], without temperature."""
        mean = self._coef1[step] * x0 + self._coef2[step] * x
        return Gaussian(mean, 0.5 * (self._low[step] + (logits + 1) * self._half[step]))

    def kernel(self, step: Tensor, x: Tensor, x0: Tensor, logits: Tensor) -> Gaussian:
        """The sampled kernel: :meth:`learned` with the temperature, and without noise in the last step."""
        mean, log_std = self.learned(step, x, x0, logits)
        return Gaussian(mean, log_std + self._scale[step])

    def frozen(self, rows: Rows, of: Tensor) -> Drafts:
        """Drafts of rows ``of`` int64 [R], on the host, from their last evaluation."""
        width = (len(self.table) - rows.at[of]).clamp(max=self.window)
        ahead = torch.arange(int(width.max()))
        step, row = self._copied((rows.at[of][:, None] + ahead).clamp(max=len(self.table) - 1), of)
        # Everything but the state is known beforehand: x_{k+1} = fixed_k + coef2_k x_k.
        at_rest, log_std = self.kernel(step, rows.x.new_zeros(()), rows.x0[row][:, None], rows.logits[row][:, None])
        scaled = log_std.exp() * rows.noise[step, row[:, None]]
        fixed, pull, path = at_rest + scaled, self._coef2[step], [rows.x[row]]
        for j in range(len(ahead)):
            path.append(torch.addcmul(fixed[:, j], pull[:, j], path[-1]))
        states = torch.stack(path, 1)
        return Drafts(states, Gaussian(at_rest + pull * states[:, :-1], log_std), width)

    def verify(self, rows: Rows, of: Tensor, drafts: Drafts) -> Tensor:
        """Evaluate the head at all drafted states; advance rows past the accepted prefix and one step more.

        The host waits for the device once, to know what was accepted; again only if a row's first redraws were all rejected.

        Args:
            rows: the tokens.
            of: int64 [R], on the host.
            drafts: their drafts.

        Returns:
            int64 [R], on the host: accepted drafted steps.
        """
        # 1. All valid states in one evaluation.
        most, device = drafts.q.mean.shape[1], rows.x.device
        ahead = torch.arange(most)
        which, column = (ahead < drafts.width[:, None]).nonzero(as_tuple=True)
        steps = rows.at[of][:, None] + ahead
        first = drafts.width.cumsum(0) - drafts.width  # of each row among the valid states
        row, step, where, ahead_of, every, here, width, first, start = self._copied(
            of[which], steps[which, column], which, column, of, torch.arange(len(of)), drafts.width, first, rows.at[of]
        )
        states = drafts.path[where, ahead_of]
        x0, logits = self.predict(rows, row, step, states)
        p = self.kernel(step, states, x0, logits)
        q = Gaussian(drafts.q.mean[where, ahead_of], drafts.q.log_std[where, ahead_of])
        uniforms = rows.uniforms[row, step]
        ok = torch.zeros(len(of), most, dtype=torch.bool, device=device)
        ok[where, ahead_of] = acceptable(drafts.path[where, ahead_of + 1], q, p, uniforms)
        kept = ok.to(torch.int64).cumprod(1).sum(1)
        # 2. The newest evaluation in use: at the first rejected step, or at the last drafted one.
        wrong, last = kept < width, torch.minimum(kept, width - 1)
        newest, moved = first + last, drafts.path[here, kept]
        # 3. The first rejected step of a row is replaced by the coupling. A GPU computes that for all rows: their choice is not known yet.
        watched = device.type == "cpu"
        bad = wrong.nonzero()[:, 0] if watched else here

        def coupled(bad: Tensor, wait: bool) -> Coupled:
            rng, lane, at = rows.rng.of(every[bad]), 2 * (start + last)[bad], newest[bad]

            def retry(m: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
                mine = rng.of(m)
                normals = mine.normal(lane[m] + _NORMAL, first, count, states.shape[1])
                return normals, mine.uniform(lane[m] + _UNIFORM, first, count)

            mine, real = Gaussian(q.mean[at], q.log_std[at]), Gaussian(p.mean[at], p.log_std[at])
            return couple(drafts.path[bad, last[bad] + 1], mine, real, uniforms[at], retry, wrong[bad], wait)

        known = kept
        if len(bad):
            new = coupled(bad, watched)
            if new.open is not None:
                known, still = torch.stack([kept, new.open.to(kept.dtype)]).cpu()
                if bool(still.any()):
                    new = coupled(bad, True)
            moved[bad] = torch.where(wrong[bad][:, None], new.value, moved[bad])
        rows.x[every], rows.x0[every], rows.logits[every] = moved, x0[newest], logits[newest]
        rows.at[of] += known + (known < drafts.width)
        return known

    def take(self, rows: Rows, of: Tensor) -> None:
        """One evaluated step of rows ``of`` int64 [R], on the host, without a draft."""
        row, step = self._copied(of, rows.at[of])
        x0, logits = self.predict(rows, row, step, rows.x[row])
        p = self.kernel(step, rows.x[row], x0, logits)
        rows.x[row] = p.mean + p.log_std.exp() * rows.noise[step, row]
        rows.x0[row], rows.logits[row] = x0, logits
        rows.at[of] += 1

    def finish(self, rows: Rows, of: Tensor) -> Tensor:
        """All remaining steps of rows ``of`` int64 [R], on the host; tokens fp32 [R, channels]."""
        going = of[rows.at[of] < len(self.table)]
        while len(going):
            if self.window > 1:
                drafts = self.frozen(rows, going)
                kept = self.verify(rows, going, drafts)
                self.run.report.add(drafted_steps=int(drafts.width.sum()), accepted_steps=int(kept.sum()))
            else:
                self.take(rows, going)
            going = going[rows.at[going] < len(self.table)]
        return rows.x[self._copied(of)[0]]

    def _copied(self, *indices: Tensor) -> list[Tensor]:
        """Index tensors of the host on the device, in one copy for which the host does not wait."""
        flat = copied(torch.cat([x.flatten() for x in indices]), self.times.device)
        parts = flat.split([x.numel() for x in indices])
        return [part.view(x.shape) for part, x in zip(parts, indices, strict=True)]

    def sample(self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor, rng: CounterRNG) -> Tensor:
        """Tokens fp32 [N, channels]; arguments as :meth:`Denoiser.__call__`, and the random numbers of the N rows."""
        rows = self.rows(z, scale, first, noise, rng)
        return self.finish(rows, torch.arange(len(first)))


class SpeculativeHead(PlainHead):
    """:class:`PlainHead` whose denoising steps are drafted ``window`` at a time and verified together.

    Raises:
        UserError: the transformer plug caches the head, which verification would bypass.
    """

    def __init__(self, run: Run, transformer: Transformer, window: int, tables: Sequence[Tables] | None = None):
        super().__init__(run, transformer, tables)
        if not all(denoiser.exact for denoiser in self.denoisers):
            raise UserError(
                "speculation: it needs the diffusion head uncached; switch the cache's head_cache off, or set it to 0."
            )
        made = {id(d): SpeculativeDenoiser(run, d.table, window) for d in self.denoisers}
        self.speculative = [made[id(d)] for d in self.denoisers]
        self.keys = row_keys(run.noise, "verify", run.tokens.shape[1]).to(run.tokens.device)

    @staticmethod
    def of(run: Run, transformer: Transformer, window: int, tables: Sequence[Tables] | None = None) -> PlainHead:
        """The speculative head, or the plain one where there is nothing to speculate on: window 0 or temperature 0."""
        if window and run.settings.temperature > 0:
            return SpeculativeHead(run, transformer, window, tables)
        return PlainHead(run, transformer, tables)

    def denoise(self, step: int, rows: HeadRows, image: Tensor, position: Tensor) -> Tensor:
        """Tokens [N, channels] of the head rows of an AR step, at (image, position) int64 [N]."""
        rng = CounterRNG(self.keys[image, position])
        return self.speculative[step].sample(rows.z, rows.scale, rows.first, rows.noise, rng)
