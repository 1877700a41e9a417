"""Schedules of MuLo-SD: the passes of the draft model, and the waves in which rejected cells are drawn again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .schedule import Schedule, next_token_passes
from .zipar import row_groups


@lru_cache(maxsize=64)
def draft_schedule(grid: int, window: int, first: int = 0, rows: int | None = None, again: int = 0) -> Schedule:
    """Passes in which the draft model generates some rows.

    Args:
        grid: side of the draft's grid.
        window: ZipAR's window; 0, or a row or wider, is raster order.
        first: number of rows that are decided already.
        rows: number of rows to generate; None: all remaining.
        again: number of decided rows, the last ones, that are fed again.

    Returns:
        The schedule. Its clocks count tokens, as in serial decoding.
    """
    rows, known = grid - first if rows is None else rows, first * grid
    serial = not 0 < window < grid
    groups = [[c] for c in range(rows * grid)] if serial else row_groups(grid, window, rows)
    groups = [[known + c for c in group] for group in groups]
    clocks = np.cumsum([known - 1, *map(len, groups)])[:-1].tolist()
    return Schedule(grid, next_token_passes(groups, grid, clocks, known, again * grid), known=known)


class Redraw(NamedTuple):
    """One wave: int64 arrays [B, .], each image's entries left-aligned.

    Attributes:
        cells: cells to draw; padded with the number of cells of the grid.
        fed: cells fed before; padded with the last cell, which no row attends to. Empty in the first wave, whose predictions
            come from the verification.
        rows: for each of ``cells`` the index in ``fed`` of the cell that predicts it.
        end: cells below this one are attended to.
    """

    cells: np.ndarray
    fed: np.ndarray
    rows: np.ndarray
    end: int


def _stack(parts: list[np.ndarray], padding: int) -> np.ndarray:
    out = np.full((len(parts), max(map(len, parts))), padding, np.int64)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return out


def redraws(wave: np.ndarray, first: int, count: int) -> list[Redraw]:
    """The cells that each wave feeds and draws.

    A wave feeds the cells before its own, and the cells that the last wave drew.

    Args:
        wave: int32 [B, n], wave of the cells from ``first`` on; -1: not drawn.
        first: raster number of the block's first cell.
        count: cells of the grid.
    """
    last, out = first + wave.shape[1], []
    parts = []  # of each image, the cells of its waves
    for row in wave:
        order = np.argsort(row, kind="stable")[np.count_nonzero(row < 0) :]
        parts.append(np.split(first + order, np.cumsum(np.bincount(row[order]))[:-1]) if len(order) else [])
    none = np.zeros(0, np.int64)
    for k in range(int(wave.max(initial=-1)) + 1):
        cells = [part[k] if k < len(part) else none for part in parts]
        # The block's last cell is not fed: the cell it predicts is not in the block.
        drawn = [part[k - 1][part[k - 1] < last - 1] if 0 < k < len(part) else none for part in parts]
        fed = [np.union1d(c - 1, d) if k else none for c, d in zip(cells, drawn, strict=True)]
        rows = [np.searchsorted(f, c - 1) for f, c in zip(fed, cells, strict=True)]
        end = max(int(f[-1]) + 1 if len(f) else 0 for f in fed)
        out.append(Redraw(_stack(cells, count), _stack(fed, count - 1), _stack(rows, 0), end))
    return out


def redraws_to_device(plan: list[Redraw], device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """The fields of every wave on a device, in one copy."""
    if not plan:
        return
    flat = torch.from_numpy(np.concatenate([a.ravel() for p in plan for a in p[:3]])).to(device)
    parts = iter(flat.split([a.size for p in plan for a in p[:3]]))
    for p in plan:
        cells, fed, rows = (next(parts).view(a.shape) for a in p[:3])
        yield cells, fed, rows, p.end
