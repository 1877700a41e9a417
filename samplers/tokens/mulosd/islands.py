"""MuLo-SD's local repair: from the rejected cells R_T to the passes that resample them and the cells around them.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). The method expands
R_T by a radius to the region R_X. The *islands* are the separate parts of R_X: its 8-connected components, CC_8(R_X).
All islands are resampled at the same time, each in raster order or with ZipAR's window. A *wave* is the set of cells
that one pass resamples.

Everything here is computed on the host. One small map must be copied to the host in any case, because the number of
waves determines how many passes follow. A grid is too small for a device to be faster.

Shapes: B images, h x w cells of a block (the rows that are verified together).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ....reports.record import ACCEPTED, EXPANDED, REJECTED
from .settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings

# Stands for no wave: a number below all waves.
_BEFORE_ALL = np.iinfo(np.int32).min // 2


class Repair(NamedTuple):
    """What happens to the draft tokens of a block, in arrays [B, h, w]."""

    rejected: np.ndarray  # R_T, bool
    island_of_cell: np.ndarray  # number of the island of each cell, int32 from 1; 0 outside R_X
    wave_of_cell: np.ndarray  # number of the wave that resamples each cell, int32 from 0; -1 outside R_X

    def outcome(self) -> np.ndarray:
        """What became of every draft token, uint8 [B, h, w], as numbered in ``reports/record.py``."""
        resampled = np.where(self.rejected, REJECTED, EXPANDED)
        return np.where(self.island_of_cell > 0, resampled, ACCEPTED).astype(np.uint8)

    def counts(self) -> dict[str, int]:
        """Counts for the report: draft tokens that passed the verification; draft tokens that failed it; those that
        passed but are resampled, because the expansion includes them; islands; and waves.
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
    if settings.resample_order == ONE_BY_ONE:
        wave_of_cell = waves_of_islands(region.astype(np.int32))  # as if R_X were one island
    else:
        wave_of_cell = waves_of_islands(island_of_cell, settings.resample_window or None)
    return Repair(rejected, island_of_cell, wave_of_cell)


def islands_of_all(repairs: Sequence[Repair]) -> np.ndarray:
    """The islands of all blocks, int32 [B, G, G] for a grid of G x G cells. In every image, the numbers of a block
    continue those of the block before; 0 outside the islands.
    """
    parts = []
    so_far = np.zeros((len(repairs[0].island_of_cell), 1, 1), np.int32)  # number of islands of each image
    for repair in repairs:
        parts.append(np.where(repair.island_of_cell > 0, repair.island_of_cell + so_far, 0))
        so_far += repair.island_of_cell.max(axis=(1, 2), keepdims=True)
    return np.concatenate(parts, axis=1)


def suffix(rejected: np.ndarray) -> np.ndarray:
    """All cells from the first rejected cell on in raster order, bool [B, h, w]. ``rejected``: R_T, bool [B, h, w].

    Ordinary speculative decoding resamples these cells, because a rejection discards everything after it.
    """
    return np.logical_or.accumulate(rejected.reshape(len(rejected), -1), axis=1).reshape(rejected.shape)


def expand(rejected: np.ndarray, radius: int) -> np.ndarray:
    """R_X, bool [B, h, w]: all cells that are at most ``radius`` (the paper's l) rows and columns away from a rejected
    cell, except the cells before the first rejected cell in raster order. ``rejected``: R_T, bool [B, h, w].
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
    inside = torch.from_numpy(region.copy())

    # 1. The weights of the cells decrease in raster order. Every cell repeatedly takes the greatest weight around it,
    #    until it has the weight of the first cell of its island.
    weight = torch.arange(cells, 0, -1, dtype=torch.float32).view(height, width) * inside
    greatest = weight
    while True:
        spread = F.max_pool2d(greatest, 3, 1, 1) * inside
        if np.array_equal(spread, greatest):  # not torch.equal, which may wait for a device
            break
        greatest = spread

    # 2. The first cells are numbered in raster order. Every cell takes the number of its island's first cell.
    is_first = (inside & (greatest == weight)).flatten(1)
    first_cell = (cells - greatest).flatten(1).long().clamp(max=cells - 1)
    number = is_first.cumsum(1).gather(1, first_cell)
    return (number.view(region.shape) * inside).int().numpy()


def waves_of_islands(island_of_cell: np.ndarray, window: int | None = None) -> np.ndarray:
    """The wave that resamples each cell, int32 [B, h, w], from 0; -1 outside the islands. All islands begin in wave 0.

    A cell waits for two kinds of cells of its island: those to its left in its row, and those in the rows above, in
    columns up to its own column + ``window`` - 1. This loop over the cells in raster order defines the waves; max is -1
    if the cell waits for no other cell::

        for cell in island:
            wave[cell] = 1 + max(wave[other] for other in island if cell waits for other)

    The function computes the waves of a row for all islands at once.

    Args:
        island_of_cell: number of each cell's island, from :func:`find_islands`.
        window: see above; None, or a window as wide as a row, gives raster order.
    """
    image, row, column = np.nonzero(island_of_cell)
    wave_of_cell = np.full(island_of_cell.shape, -1, np.int32)
    if not len(image):
        return wave_of_cell

    images, height, width = island_of_cell.shape
    most_islands = int(island_of_cell.max())  # the largest number of islands in an image
    island = image * most_islands + island_of_cell[image, row, column] - 1
    reach = width if window is None else window

    # Go down the rows. latest_above[i, c] is the latest wave of island i in the rows above, in columns up to c; -1 if
    # the island has no cells there.
    latest_above = np.full((images * most_islands, width), -1, np.int32)
    for y in range(height):
        in_row = row == y
        if not in_row.any():
            continue

        # 1. The islands that have cells in this row, and which cells of the row belong to each of them.
        present, index_in_present = np.unique(island[in_row], return_inverse=True)
        column_in_row = column[in_row]
        belongs = np.zeros((len(present), width), bool)
        belongs[index_in_present, column_in_row] = True

        # 2. The waves of these cells.
        row_waves = _waves_of_row(belongs, latest_above[present], reach)
        wave_of_cell[image[in_row], y, column_in_row] = row_waves[index_in_present, column_in_row]

        # 3. For the next row, this row is above.
        latest = np.maximum.accumulate(np.where(belongs, row_waves, _BEFORE_ALL), axis=1)
        latest_above[present] = np.maximum(latest_above[present], latest)
    return wave_of_cell


def _waves_of_row(belongs: np.ndarray, latest_above: np.ndarray, reach: int) -> np.ndarray:
    """The waves of a row's cells in n islands, int32 [n, width]. If a cell is not in an island, its number for this
    island is arbitrary.

    Args:
        belongs: bool [n, width], whether each cell of the row belongs to each island.
        latest_above: int32 [n, width], for each column c the latest wave of each island in the rows above, in columns
            up to c.
        reach: a cell waits for cells above in columns up to its own column + ``reach`` - 1.

    The wave of a cell is 1 + the latest wave of the cells for which it waits: cells of its island in the rows above,
    and the previous cell of its island in the row. Let the *place* of a cell be its index among the island's cells in
    the row, and let latest above[q] be the latest wave for which the cell at place q waits in the rows above. This cell
    is in wave 1 + latest above[q] at the earliest, and every next place at least one wave later. So for place p::

        wave[p] = max over q up to p of 1 + latest above[q] + p - q

    This means that wave - place is the running maximum of 1 + latest above - place. For example, with ``reach`` 1 and
    an island (x) that has no cell in the second column::

        belongs               x  .  x  x
        latest above          1  1  4  4
        place                 0     1  2
        1 + latest - place    2     4  3
        running maximum       2     4  4
        + place               2     5  6

    """
    width = belongs.shape[1]
    place = np.cumsum(belongs, axis=1, dtype=np.int32) - 1
    last_column_above = np.minimum(np.arange(width) + reach - 1, width - 1)  # in which a cell waits for cells above

    wave_minus_place = np.where(belongs, 1 + latest_above[:, last_column_above] - place, _BEFORE_ALL)
    return np.maximum.accumulate(wave_minus_place, axis=1) + place


class WavePass(NamedTuple):
    """The pass that resamples a wave, in int64 arrays [B, .]. Each row of an array is for one image.

    If an image has fewer entries than another image of its batch, its rows are padded at the end:

    - ``cells`` with the number of cells of the grid, which is the index of the canvas' column for padding;
    - ``predicted_by`` with an arbitrary index;
    - ``fed`` with the last cell of the grid. This cell predicts no cell, so it is fed only as padding, and no fed token
      attends to it. A cache for more than one image needs a slot for it;
    - ``position`` with the position of the last cell but one, because the table of positions has no entry for the last
      cell.
    """

    cells: np.ndarray  # cells to resample
    fed: np.ndarray  # cells whose tokens are fed; none for the first wave, which the verifying pass has predicted
    position: np.ndarray  # positions of the fed cells
    # For each cell to resample, the index in fed of the cell that predicts it. In the first wave, the index of the cell
    # itself in its block.
    predicted_by: np.ndarray
    end: int  # fed tokens attend only to cells with a number below this


def wave_passes(wave_in_block: np.ndarray, first: int, count: int) -> list[WavePass]:
    """The pass of each wave. There is always a pass for the first wave, even if no cell is resampled. A pass feeds the
    cell before each cell that it resamples, and the cells that the previous pass has resampled.

    Args:
        wave_in_block: int32 [B, n], the wave of each of the n cells of a block; -1 for a cell that is not resampled.
        first: number of the block's first cell.
        count: number of cells of the grid.

    For example, if one island covers all of 3 x 3 cells and the window is 1::

        cells    wave of each    wave  resamples  feeds  which predict
        0 1 2    0 1 2           0     0          -      -
        3 4 5    1 2 3           1     1 3        0 2    1 3
        6 7 8    2 3 4           2     2 4 6      1 3 5  2 4 6
                                 3     5 7        2 4 6  - 5 7
                                 4     8          5 7    - 8

    In wave 3, cell 2 predicts no cell (-). It is fed because the previous pass has resampled it, and the cache still
    holds the keys and values of its draft token.
    """
    n = wave_in_block.shape[1]
    last = first + n
    wave_of_cell = np.full((len(wave_in_block), count), -1)
    wave_of_cell[:, first:last] = wave_in_block

    # 1. The first wave. The pass that verified the block has already predicted its cells, so nothing is fed.
    cells = _left_aligned(wave_of_cell == 0, count)
    nothing = cells[:, :0]
    in_block = (cells - first).clip(max=n - 1)
    out = [WavePass(cells, fed=nothing, position=nothing, predicted_by=in_block, end=0)]

    # 2. The later waves. The block's last cell is not fed, because it predicts a cell outside the block.
    may_be_fed = slice(0, last - 1)
    predicted = slice(1, last)
    for k in range(1, int(wave_in_block.max(initial=0)) + 1):
        resampled = wave_of_cell == k
        cells = _left_aligned(resampled, count)

        # 2.1 The pass feeds the cells that predict a cell of this wave, and the cells that the previous pass has
        #     resampled. For an image without a cell in this wave, it feeds nothing.
        predicts = resampled[:, predicted]
        was_resampled_last = wave_of_cell[:, may_be_fed] == k - 1
        has_cells = resampled.any(1, keepdims=True)
        is_fed = np.zeros_like(resampled)
        is_fed[:, may_be_fed] = (predicts | was_resampled_last) & has_cells
        fed = _left_aligned(is_fed, padding=count - 1)
        position = fed.clip(max=count - 2)
        end = int(is_fed.any(0).nonzero()[0].max(initial=-1)) + 1

        # 2.2 Each cell is predicted by the cell before it.
        index_in_fed = is_fed.cumsum(1) - 1
        of_cell_before = np.take_along_axis(index_in_fed, (cells - 1).clip(min=0), axis=1)
        predicted_by = np.where(cells < count, of_cell_before, 0).clip(min=0)
        out.append(WavePass(cells, fed, position, predicted_by, end))
    return out


def _left_aligned(chosen: np.ndarray, padding: int) -> np.ndarray:
    """For each row of ``chosen``, bool [B, L], the indices of its True columns, int64 [B, n]. n is the largest number
    of True columns in a row. Rows with fewer True columns are padded at the end with ``padding``.
    """
    counts = chosen.sum(1, keepdims=True)

    columns = np.argsort(~chosen, axis=1, kind="stable")[:, : counts.max()]
    return np.where(np.arange(columns.shape[1]) < counts, columns, padding)
