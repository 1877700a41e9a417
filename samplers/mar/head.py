"""Plain MAR's head plug: a full diffusion pass for every token of the AR step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .denoiser import RowNoise
from .diffusion import tables
from .loop import Conditions, Denoise, Run, Transformer


class PlainHead:
    """Every token by a full diffusion pass in its own AR step: MAR as published.

    Args:
        run: the generation.
        transformer: the other plug; it provides the denoiser.
        counts: diffusion steps of every AR step; None for ``diffusion_steps`` throughout.
    """

    reach = 1

    def __init__(self, run: Run, transformer: Transformer, counts: Sequence[int] | None = None):
        self.transformer, self.noise = transformer, RowNoise(run, "full", run.tables)
        self.counts = counts or [run.settings.diffusion_steps] * run.plan.steps
        self.denoisers: dict[int, Denoise] = {}

    def denoiser(self, run: Run, step: int) -> Denoise:
        """The denoiser for an AR step's number of diffusion steps."""
        count = self.counts[step]
        if count not in self.denoisers:
            table = run.tables if count == run.settings.diffusion_steps else tables(count, run.t_max)
            self.denoisers[count] = self.transformer.denoiser(run, table)
        return self.denoisers[count]

    def __call__(self, run: Run, step: int, z: Conditions) -> Tensor:
        """Tokens [B, n, channels] of an AR step from its z [B, n, C]."""
        where = run.plan.ahead(step)
        image, position = rows_at(where)
        scale = torch.full((len(image), 1), run.plan.cfg[step], device=where.device)
        table = self.denoiser(run, step).table
        first, noise = self.noise(image, position)
        # Fewer steps take evenly spaced entries of the full noise, so that the pictures stay comparable.
        kept = [k * len(noise) // len(table) for k in range(len(table))]
        noise = noise if len(kept) == len(noise) else noise[kept]
        return self.denoise(run, step, z.flat(), scale, first, noise, image, position).view(*where.shape, -1)

    def denoise(
        self,
        run: Run,
        step: int,
        z: Conditions,
        scale: Tensor,
        first: Tensor,
        noise: Tensor,
        image: Tensor,
        position: Tensor,
    ) -> Tensor:
        """Tokens [N, channels] of rows (image, position) int64 [N]; other arguments as :meth:`Denoiser.__call__`."""
        return self.denoiser(run, step)(z, scale, first, noise)


def rows_at(where: Tensor) -> tuple[Tensor, Tensor]:
    """Image and position, int64 [B n] each, of positions [B, n]."""
    image = torch.arange(len(where), device=where.device)[:, None].expand_as(where)
    return image.flatten(), where.flatten()
