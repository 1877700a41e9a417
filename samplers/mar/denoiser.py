"""Ancestral sampling with MAR's diffusion head, many tokens at once. Source: Li et al. 2024 (arXiv 2406.11838), section 3.2."""

from __future__ import annotations

import torch
from torch import Tensor

from .diffusion import Ancestral, Tables, guide
from .loop import Conditions, Run


class Denoiser:
    """Samples tokens from their conditions. A row is one token with its own condition, guidance scale and noise.

    The modulations of several diffusion steps are computed in one matrix product (see ``DiffusionHead.modulations``), at
    most ``budget`` numbers at a time.

    Attributes:
        table: diffusion tables, S steps.
        times: time embeddings [S, w], highest timestep first.
        rule: the sampler's step.
        exact: whether every diffusion step is evaluated.
    """

    budget = 1 << 24
    exact = True

    def __init__(self, run: Run, table: Tables):
        self.run, self.head, self.table = run, run.model.net.head, table
        self.times = self.head.time_embed(table.timestep_map.flip(0).to(run.tokens.device))
        self.rule = Ancestral(table, run.settings.temperature, run.tokens.device)

    def __call__(
        self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor, rule: Ancestral | None = None
    ) -> Tensor:
        """Denoise N rows.

        Args:
            z: conditions [N, C].
            scale: guidance scale fp32 [N, 1].
            first: start noise fp32 [N, channels].
            noise: step noise fp32 [S, N, channels], highest timestep first; the last entry is not used.
            rule: the step; None for :attr:`rule`.

        Returns:
            fp32 [N, channels].
        """
        head, n, channels, rule = self.head, len(first), first.shape[1], rule or self.rule
        steps, both = len(self.table), z.both()
        condition = head.cond_embed(both)
        width = condition.shape[1] * (3 * len(head.res_blocks) + 2)
        chunk = max(1, self.budget // max(1, len(both) * width))
        x, noise = first, rule.scaled(noise)
        modulations: list[Tensor] = []
        for k in range(steps):
            if k % chunk == 0:
                modulations = head.modulations(self.times[k : k + chunk, None] + condition)
            out = head.denoise(torch.cat([x, x]) if z.guided else x, [m[k % chunk] for m in modulations])
            eps, logits = guide(out[:n], out[n:] if z.guided else None, scale, channels)
            x = rule(k, x, eps, logits, noise[k])
        self.run.report.add(head_calls=steps, head_rows=steps * len(both))
        return x


class RowNoise:
    """Noise of one stream on the device, indexed by (image, position)."""

    def __init__(self, run: Run, stream: str, table: Tables):
        c, device = run.model.net.config, run.tokens.device
        self.first = run.noise.first(stream, c.tokens, c.channels).to(device)
        self.steps = run.noise.steps(stream, len(table), c.tokens, c.channels).to(device)

    def __call__(self, image: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Start noise [N, channels] and step noise [S, N, channels] of N rows, int64 [N] each."""
        return self.first[image, position], self.steps[image, :, position].transpose(0, 1)
