"""Ancestral sampling with MAR's diffusion head, many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .diffusion import Tables, guide
from .loop import Conditions, Run


class Denoiser:
    """Ancestral sampling of head rows, many rows at once.

    A row is one token: its condition z (and null z), guidance scale and noise. Modulations of many diffusion steps are
    computed in one product (see ``DiffusionHead.modulations``), bounded by ``budget`` numbers.
    """

    budget = 1 << 24

    def __init__(self, run: Run, table: Tables):
        self.run, self.head, self.table = run, run.model.net.head, table
        times = table.timestep_map.flip(0).to(run.tokens.device)
        self.times = self.head.time_embed(times)  # [S, w], highest timestep first
        # Deviation: exp(middle + slope * logits), halfway between the two bounds where the logits are 0.
        low, high = table.posterior_log_variance_clipped, table.betas.log()
        middle, slope = (low + high) / 4, (high - low) / 4
        columns = (
            table.sqrt_recip_alphas_cumprod,
            table.sqrt_recipm1_alphas_cumprod,
            table.posterior_mean_coef1,
            table.posterior_mean_coef2,
            slope,
        )
        self.scalars = list(zip(*(column.flip(0).tolist() for column in columns), strict=True))
        deviation = middle.exp().flip(0) * run.settings.temperature
        self.deviation = deviation.to(run.tokens.device, torch.float32)[:, None, None]

    def __call__(
        self,
        z: Conditions,
        scale: Tensor,
        first: Tensor,
        noise: Tensor,
        draft: Tensor | None = None,
        pull: tuple[float, ...] = (),
        space: str = "mean",
    ) -> Tensor:
        """Denoise N rows.

        Args:
            z: conditions [N, C], null or None.
            scale: guidance scale [N, 1] fp32.
            first: fp32 [N, channels], what diffusion starts from.
            noise: fp32 [S, N, channels], highest timestep first; the last entry is not used.
            draft: fp32 [N, channels] to be pulled towards, or None.
            pull: gamma of every executed step (FastHybrid, eq. for mu'), highest timestep first.
            space: "mean" or "x0": what the draft is mixed into.

        Returns:
            fp32 [N, channels].
        """
        head, n = self.head, len(first)
        steps, channels = len(self.table), first.shape[1]
        both = z.cond if z.null is None else torch.cat([z.cond, z.null])
        condition = head.cond_embed(both)
        width = condition.shape[1] * (3 * len(head.res_blocks) + 2)
        chunk = max(1, self.budget // max(1, len(both) * width))
        x, noise = first, self.spread(noise)
        modulations: list[Tensor] = []
        for k in range(steps):
            if k % chunk == 0:
                modulations = head.modulations(self.times[k : k + chunk, None] + condition)
            out = head.denoise(x if z.null is None else torch.cat([x, x]), [m[k % chunk] for m in modulations])
            eps, logits = guide(out[:n], out[n:] if z.null is not None else None, scale, channels)
            x = self.advance(k, x, eps, logits, noise[k], draft, pull, space)
        self.run.report.add(head_calls=steps, head_rows=steps * len(both))
        return x

    def spread(self, noise: Tensor) -> Tensor:
        """Step noise [S, N, channels] times temperature and what the variance logits do not change of its deviation."""
        return noise * self.deviation

    def advance(
        self,
        k: int,
        x: Tensor,
        eps: Tensor,
        logits: Tensor,
        noise: Tensor,
        draft: Tensor | None,
        pull: tuple[float, ...],
        space: str,
    ) -> Tensor:
        """x [N, channels] after executed step ``k``.

        The posterior's mean is linear in x, eps and the draft, so it is summed at once and x0 never stands alone.

        Args:
            k: 0 for the highest timestep.
            x: fp32 [N, channels].
            eps, logits: the head's guided noise and variance logits at x, fp32 [N, channels].
            noise: the step's, from :meth:`spread`, [N, channels].
            draft, pull, space: as in a call.
        """
        recip, recipm1, coef1, coef2, slope = self.scalars[k]
        of_draft = 0.0
        if draft is not None and space == "x0":
            coef1, of_draft = coef1 * (1 - pull[k]), coef1 * pull[k]
        a, b = coef1 * recip + coef2, coef1 * recipm1
        if draft is not None and space == "mean":
            a, b, of_draft = a * (1 - pull[k]), b * (1 - pull[k]), pull[k]
        mean = (x * a).add_(eps, alpha=-b)
        if draft is not None:
            mean.add_(draft, alpha=of_draft)
        if k + 1 == len(self.scalars):
            return mean
        return mean.addcmul_((logits * slope).exp_(), noise)


class RowNoise:
    """Noise of a stream, on the device, handed out by (image, position) rows."""

    def __init__(self, run: Run, stream: str, table: Tables):
        c, device = run.model.net.config, run.tokens.device
        self.first = run.noise.first(stream, c.tokens, c.channels).to(device)
        self.steps = run.noise.steps(stream, len(table), c.tokens, c.channels).to(device)

    def __call__(self, image: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Start noise [N, channels] and step noise [S, N, channels] of N rows (int64 [N] each)."""
        return self.first[image, position], self.steps[image, :, position].transpose(0, 1)
