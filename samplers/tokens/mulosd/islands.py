"""MuLo-SD's local repair: from the rejected cells R_T to the *islands* of cells that the target resamples.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). The method expands
R_T by a radius to the region R_X. The islands are the separate parts of R_X: its 8-connected components, CC_8(R_X).
``waves.py`` divides the islands into *waves*: a wave is a set of cells that the target resamples together.

The host computes everything in this file. The host needs the map of rejected cells in any case, because the number of
waves determines how many passes follow. A grid is so small that a GPU would not be faster.

Shapes: B images; h x w cells of a block. A block is the grid rows that the target verifies together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ....reports.record import ACCEPTED, EXPANDED, REJECTED
from .settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings
from .waves import waves_of_islands


class Repair(NamedTuple):
    """What happens to the draft tokens of a block. Each array is [B, h, w]."""

    rejected: np.ndarray  # R_T, bool
    island_of_cell: np.ndarray  # for each cell the number of its island, int32 from 1; 0 outside R_X
    wave_of_cell: np.ndarray  # for each cell the index of the wave that resamples it, int32 from 0; -1 outside R_X

    def outcome(self) -> np.ndarray:
        """The outcome of every draft token, uint8 [B, h, w]: ACCEPTED, REJECTED or EXPANDED."""
        resampled = np.where(self.rejected, REJECTED, EXPANDED)
        return np.where(self.island_of_cell > 0, resampled, ACCEPTED).astype(np.uint8)

    def counts(self) -> dict[str, int]:
        """Counts for the report. ``accepted`` counts the draft tokens that the verification accepted, and ``rejected``
        counts the draft tokens that it rejected. ``expanded`` counts the accepted tokens that are resampled because
        they are in R_X.
        """
        expanded = (self.island_of_cell > 0) & ~self.rejected
        return {
            "accepted": int((~self.rejected).sum()),
            "rejected": int(self.rejected.sum()),
            "expanded": int(expanded.sum()),
            "islands": int(self.island_of_cell.max(axis=(1, 2)).sum()),
            "waves": int(self.wave_of_cell.max()) + 1,
        }


def repair_of(rejected: np.ndarray, settings: MuLoSDSettings) -> Repair:
    """Expand the rejected cells to R_X, and divide R_X into islands and waves. ``rejected``: R_T, bool [B, h, w]."""
    if settings.repair == SUFFIX:
        region = suffix(rejected)
    else:
        region = expand(rejected, settings.expansion)

    island_of_cell = find_islands(region)
    width = region.shape[2]
    if settings.resample_order == ONE_BY_ONE:
        wave_of_cell = waves_of_islands(region.astype(np.int32), reach=width)  # as if R_X were one island
    else:
        wave_of_cell = waves_of_islands(island_of_cell, reach=settings.resample_window or width)
    return Repair(rejected, island_of_cell, wave_of_cell)


def islands_of_all(repairs: Sequence[Repair]) -> np.ndarray:
    """The number of each cell's island, int32 [B, G, G] for a grid of G x G cells; 0 outside the islands. In every
    image, the numbers continue from block to block.
    """
    parts = []
    so_far = np.zeros((len(repairs[0].island_of_cell), 1, 1), np.int32)  # number of islands of each image
    for repair in repairs:
        parts.append(np.where(repair.island_of_cell > 0, repair.island_of_cell + so_far, 0))
        so_far += repair.island_of_cell.max(axis=(1, 2), keepdims=True)
    return np.concatenate(parts, axis=1)


def suffix(rejected: np.ndarray) -> np.ndarray:
    """The first rejected cell in raster order and all cells after it, bool [B, h, w]. ``rejected``: R_T, bool
    [B, h, w].

    Ordinary speculative decoding resamples these cells, because it discards everything after a rejected token.
    """
    return np.logical_or.accumulate(rejected.reshape(len(rejected), -1), axis=1).reshape(rejected.shape)


def expand(rejected: np.ndarray, radius: int) -> np.ndarray:
    """R_X, bool [B, h, w]: the cells that are at most ``radius`` rows and at most ``radius`` columns away from a
    rejected cell. Cells before the first rejected cell in raster order are excluded.

    ``rejected``: R_T, bool [B, h, w]; ``radius``: the paper's l.
    """
    near = F.max_pool2d(torch.from_numpy(rejected).float(), 2 * radius + 1, 1, radius)
    return (near > 0).numpy() & suffix(rejected)


def find_islands(region: np.ndarray) -> np.ndarray:
    """CC_8(R_X): the 8-connected components of the region in each image. ``region``: R_X, bool [B, h, w].

    Returns the number of each cell's island, int32 [B, h, w]; 0 outside the region. The islands of an image are
    numbered from 1, in raster order of their first cells.
    """
    _, height, width = region.shape
    cells = height * width
    inside = torch.from_numpy(np.ascontiguousarray(region))  # torch does not read arrays with negative strides

    # 1. The weights of the cells decrease in raster order, and the weight outside the region is 0. In every round, each
    #    cell takes the greatest weight among itself and its neighbours in the region. After i rounds, each cell has the
    #    greatest weight of the cells that are at most i steps away in its island; a step leads to a neighbour. When a
    #    round changes nothing, each cell has the greatest weight of its whole island: that of the island's first cell.
    weight = torch.arange(cells, 0, -1, dtype=torch.float32).view(height, width) * inside
    greatest = weight
    while True:
        spread = F.max_pool2d(greatest, 3, 1, 1) * inside
        if np.array_equal(spread, greatest):  # not torch.equal, which may wait for a device
            break
        greatest = spread

    # 2. Number the first cells of the islands in raster order. Every cell takes the number of its island's first cell.
    is_first = (inside & (greatest == weight)).flatten(1)
    first_cell = (cells - greatest).flatten(1).long().clamp(max=cells - 1)
    number = is_first.cumsum(1).gather(1, first_cell)
    return (number.view(region.shape) * inside).int().numpy()
