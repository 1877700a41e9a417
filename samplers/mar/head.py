"""Plain MAR's head plug: a full diffusion pass for every token of the AR step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .denoiser import RowNoise
from .diffusion import Tables
from .loop import Conditions, Denoise, HeadRows, Run, Transformer


class PlainHead:
    """Every token by a full diffusion pass in its own AR step: MAR as published.

    Args:
        run: the generation.
        transformer: the other plug; it provides the denoiser.
        tables: diffusion tables of every AR step; None for ``run.tables`` throughout.
    """

    def __init__(self, run: Run, transformer: Transformer, tables: Sequence[Tables] | None = None):
        self.noise = RowNoise(run, "full", run.tables)
        self.tables = tables or [run.tables] * run.plan.steps
        self.denoisers = denoisers(run, transformer, self.tables)

    def reach(self, step: int) -> int:
        """Its own AR step only."""
        return 1

    def __call__(self, run: Run, step: int, z: Conditions) -> Tensor:
        """Tokens [B, n, channels] of an AR step from its z [B, n, C]."""
        where = run.plan.ahead(step)
        image, position = rows_at(where)
        scale = torch.full((len(image), 1), run.plan.cfg[step], device=where.device)
        first, noise = self.noise.spaced(image, position, len(self.tables[step]))
        rows = HeadRows(z.flat(), scale, first, noise)
        return self.denoise(step, rows, image, position).view(*where.shape, -1)

    def denoise(self, step: int, rows: HeadRows, image: Tensor, position: Tensor) -> Tensor:
        """Tokens [N, channels] of the head rows of an AR step, at (image, position) int64 [N]."""
        return self.denoisers[step](*rows)


def rows_at(where: Tensor) -> tuple[Tensor, Tensor]:
    """Image and position, int64 [B n] each, of positions [B, n]."""
    image = torch.arange(len(where), device=where.device)[:, None].expand_as(where)
    return image.flatten(), where.flatten()


def denoisers(run: Run, transformer: Transformer, tables: Sequence[Tables]) -> list[Denoise]:
    """The denoiser of every AR step; equal tables share one."""
    made: dict[int, Denoise] = {}
    for table in tables:
        if id(table) not in made:
            made[id(table)] = transformer.denoiser(run, table)
    return [made[id(table)] for table in tables]
