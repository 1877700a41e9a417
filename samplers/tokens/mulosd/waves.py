"""The waves in which MuLo-SD resamples islands, and the pass of the transformer for each wave.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). ``islands.py``
explains *islands*. A *wave* is the set of cells that one pass resamples. The target resamples all islands at the same
time, each in raster order or with ZipAR's window (``zipar.py``). The host computes everything here.

Shapes: B images; h x w cells of a block; L cells of the grid. A block is the grid rows that the target verifies
together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Stands for "no wave" in a maximum: it is below the index of every wave.
_BEFORE_ALL = np.iinfo(np.int32).min // 2


def waves_of_islands(island_of_cell: np.ndarray, reach: int) -> np.ndarray:
    """The index of the wave that resamples each cell, int32 [B, h, w], from 0; -1 outside the islands. All islands
    begin in wave 0.

    A cell waits for two kinds of cells in its island. The first kind is to its left, in the same grid row. The second
    kind is in the grid rows above, in columns up to the cell's own column + ``reach`` - 1. This loop over the cells in
    raster order defines the waves. If a cell waits for no other cell, max is -1::

        for cell in island:
            wave[cell] = 1 + max(wave[other] for other in island if cell waits for other)

    For 4 images of 32 x 32 cells, this loop takes 0.2 to 0.5 s in Python, in which the device waits. The function
    therefore computes the waves of a grid row for all islands of all images at once, with NumPy, in about 0.01 s.

    Args:
        island_of_cell: number of each cell's island, int32 [B, h, w], from :func:`.islands.find_islands`.
        reach: at least 1. If it is w or more, the order is raster order. If it is lower, it is ZipAR's window.
    """
    image, grid_row, column = np.nonzero(island_of_cell)
    wave_of_cell = np.full(island_of_cell.shape, -1, np.int32)
    if not len(image):
        return wave_of_cell

    images, height, width = island_of_cell.shape
    most_islands = int(island_of_cell.max())  # the largest number of islands in an image
    island = image * most_islands + island_of_cell[image, grid_row, column] - 1

    # Go from the top grid row to the bottom grid row. latest_above[i, c] is the latest wave of island i in the rows
    # above, in columns up to c; -1 if the island has no cells there.
    latest_above = np.full((images * most_islands, width), -1, np.int32)
    for y in range(height):
        in_row = grid_row == y
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

        # 3. Add this row to the rows above the next row.
        latest = np.maximum.accumulate(np.where(belongs, row_waves, _BEFORE_ALL), axis=1)
        latest_above[present] = np.maximum(latest_above[present], latest)
    return wave_of_cell


def _waves_of_row(belongs: np.ndarray, latest_above: np.ndarray, reach: int) -> np.ndarray:
    """The waves of the cells of a grid row in n islands, int32 [n, width]. If a cell is not in an island, the entry of
    this cell and island is arbitrary.

    The wave of a cell is 1 + the latest wave of the cells for which it waits. The cells of an island in the row are
    numbered from 0: cell n is the n-th of them. Let latest above[m] be the latest wave in the rows above for which cell
    m waits. Cell m is in wave 1 + latest above[m] at the earliest, and each cell after it is at least one wave later.
    So for cell n::

        wave[n] = max over m up to n of 1 + latest above[m] + n - m

    This means that wave[n] - n is the running maximum of 1 + latest above[n] - n, which NumPy computes without a loop
    over the cells. In this example, ``reach`` is 1, and an island (x) has no cell in the second column::

        belongs             x  .  x  x
        latest above        1  1  4  4
        n                   0     1  2
        1 + latest - n      2     4  3
        running maximum     2     4  4
        + n                 2     5  6

    Args:
        belongs: bool [n, width], whether each cell of the row belongs to each island.
        latest_above: int32 [n, width]; column c holds the latest wave of each island in the rows above, in columns up
            to c.
        reach: see :func:`waves_of_islands`.
    """
    width = belongs.shape[1]
    nth = np.cumsum(belongs, axis=1, dtype=np.int32) - 1  # n of each cell
    last_column_above = np.minimum(np.arange(width) + reach - 1, width - 1)  # a cell waits for cells above up to here

    earliest_minus_nth = np.where(belongs, 1 + latest_above[:, last_column_above] - nth, _BEFORE_ALL)
    return np.maximum.accumulate(earliest_minus_nth, axis=1) + nth


class WavePass(NamedTuple):
    """The pass that resamples a later wave, a wave after the first one. All arrays are int64 [B, ...]. If an image has
    fewer entries than other images, its entries end with padding.
    """

    # Cells to resample, [B, a]. Padding is L: the canvas has a column for padding after its L cells.
    cells: np.ndarray
    # Cells whose tokens are fed, [B, m]. Padding is L - 1, the last cell of the grid. It predicts no cell, so it is fed
    # only as padding, and no fed token attends to it. A cache for several images needs a slot for this cell.
    fed: np.ndarray
    # For each cell to resample, the index in ``fed`` of the cell that predicts it, [B, a]. Padding is 0.
    predicted_by: np.ndarray
    end: int  # fed tokens attend only to cells before this cell


def later_wave_passes(wave_of_cell: np.ndarray, block_end: int) -> list[WavePass]:
    """The pass of each wave after the first one. The first wave needs no pass, because the pass that verified the block
    has already predicted all cells of the block.

    In this example, one island covers a grid of 3 x 3 cells, and ``reach`` is 1::

        cells    wave of each    wave  resamples  feeds  which predict
        0 1 2    0 1 2           0     0          -      -
        3 4 5    1 2 3           1     1 3        0 2    1 3
        6 7 8    2 3 4           2     2 4 6      1 3 5  2 4 6
                                 3     5 7        2 4 6  - 5 7
                                 4     8          5 7    - 8

    In wave 3, cell 2 predicts no cell (-). It is fed because the previous pass has resampled it, and the cache still
    holds the keys and values of its draft token.

    Args:
        wave_of_cell: int [B, L], the wave of each cell; -1 for a cell that is not resampled.
        block_end: the first cell after the block.
    """
    passes = []
    for k in range(1, int(wave_of_cell.max(initial=0)) + 1):
        passes.append(_wave_pass(wave_of_cell == k, wave_of_cell == k - 1, block_end))
    return passes


def _wave_pass(resampled: np.ndarray, resampled_before: np.ndarray, block_end: int) -> WavePass:
    """The pass that resamples some cells. It feeds the cell before each of these cells, and the cells that the previous
    pass has resampled.

    Args:
        resampled, resampled_before: bool [B, L], the cells that this pass and the previous pass resample.
        block_end: as for :func:`later_wave_passes`.
    """
    # 1. The cells to feed.
    is_fed = resampled_before.copy()
    is_fed[:, :-1] |= resampled[:, 1:]  # the cell before each cell predicts it
    is_fed[:, block_end - 1] = False  # the block's last cell predicts a cell outside the block
    is_fed &= resampled.any(1, keepdims=True)  # nothing is fed for an image without a cell in this wave
    end = int(is_fed.any(0).nonzero()[0].max()) + 1

    # 2. For each cell to resample, the index in ``fed`` of the cell before it. cumsum is 1 at the first fed cell.
    count = resampled.shape[1]
    cells = left_aligned(resampled, padding=count)
    index_in_fed = is_fed.cumsum(1) - 1
    predicted_by = np.where(cells < count, np.take_along_axis(index_in_fed, cells - 1, axis=1), 0)
    return WavePass(cells, left_aligned(is_fed, padding=count - 1), predicted_by, end)


def left_aligned(chosen: np.ndarray, padding: int) -> np.ndarray:
    """The cells that are ``chosen`` in each image, int64 [B, n]. ``chosen``: bool [B, L]. n is the largest number of
    chosen cells in an image. For an image with fewer chosen cells, ``padding`` follows.
    """
    counts = chosen.sum(1, keepdims=True)

    cells = np.argsort(~chosen, axis=1, kind="stable")[:, : counts.max()]
    return np.where(np.arange(cells.shape[1]) < counts, cells, padding)
