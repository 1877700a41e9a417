"""MuLo-SD's local repair: from the rejected cells R_T to the cells that the target resamples, and in which pass.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). The method expands
R_T by a radius to the region R_X. The *islands* are the separate parts of R_X: its 8-connected components, CC_8(R_X).
The target resamples all islands at the same time, each in raster order or with ZipAR's window (``zipar.py``). A *wave*
is the set of cells that one pass resamples. The file has, in this order:

1. :class:`Repair`, and :func:`repair_of`, which makes it: the region, its islands, and the wave of each cell;
2. from R_T to R_X (:func:`expand`, or :func:`suffix`), and from R_X to the islands (:func:`find_islands`);
3. :func:`waves_of_islands`, from the islands to the wave of each cell;
4. :func:`waves_of_block`, from the wave of each cell to each :class:`Wave`: its cells, and the cells that its pass
   feeds to the transformer.

The host computes everything in this file. The host needs the map of rejected cells in any case, because the number of
waves determines how many passes follow. A grid is so small that a GPU would not be faster.

A block is the grid rows that the target verifies together. In this file, cells are counted from the first cell of the
block.

Shapes: B images; h grid rows of a block, with G columns; n = h G cells of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ....reports.record import ACCEPTED, EXPANDED, REJECTED
from .settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings


class Repair(NamedTuple):
    """What happens to the draft tokens of a block. Each array is [B, h, G].

    The verification accepts or rejects each token. R_X has all rejected tokens and some accepted tokens, so a token has
    one of three outcomes: ACCEPTED (outside R_X), REJECTED, or EXPANDED (accepted, but resampled because it is in R_X).
    """

    rejected: np.ndarray  # R_T, bool
    island_of_cell: np.ndarray  # for each cell the number of its island, int32 from 1; 0 outside R_X
    wave_of_cell: np.ndarray  # for each cell the index of the wave that resamples it, int32 from 0; -1 outside R_X

    @property
    def region(self) -> np.ndarray:
        """R_X, the cells to resample, bool [B, h, G]."""
        return self.island_of_cell > 0

    def outcome(self) -> np.ndarray:
        """The outcome of every draft token, uint8 [B, h, G]: ACCEPTED, REJECTED or EXPANDED."""
        if_resampled = np.where(self.rejected, REJECTED, EXPANDED)
        return np.where(self.region, if_resampled, ACCEPTED).astype(np.uint8)

    def counts(self) -> dict[str, int]:
        """Counts for the report. ``accepted`` counts all draft tokens that the verification accepted, including the
        ``expanded`` tokens.
        """
        return {
            "accepted": int((~self.rejected).sum()),
            "rejected": int(self.rejected.sum()),
            "expanded": int((self.region & ~self.rejected).sum()),
            "islands": int(self.island_of_cell.max(axis=(1, 2)).sum()),
            "waves": int(self.wave_of_cell.max()) + 1,
        }


def repair_of(rejected: np.ndarray, settings: MuLoSDSettings) -> Repair:
    """Expand the rejected cells to R_X, and divide R_X into islands and waves. ``rejected``: R_T, bool [B, h, G]."""
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


# ------------------------------------------------------------ the region and its islands


def suffix(rejected: np.ndarray) -> np.ndarray:
    """The first rejected cell in raster order and all cells after it, bool [B, h, G]. ``rejected``: R_T, bool
    [B, h, G].

    Ordinary speculative decoding resamples these cells, because it discards everything after a rejected token.
    """
    return np.logical_or.accumulate(rejected.reshape(len(rejected), -1), axis=1).reshape(rejected.shape)


def expand(rejected: np.ndarray, radius: int) -> np.ndarray:
    """R_X, bool [B, h, G]: the cells that are at most ``radius`` rows and at most ``radius`` columns away from a
    rejected cell. Cells before the first rejected cell in raster order are excluded.

    ``rejected``: R_T, bool [B, h, G]; ``radius``: the paper's l.
    """
    near = F.max_pool2d(torch.from_numpy(rejected).float(), 2 * radius + 1, 1, radius)
    return (near > 0).numpy() & suffix(rejected)


def find_islands(region: np.ndarray) -> np.ndarray:
    """CC_8(R_X): the 8-connected components of the region in each image. ``region``: R_X, bool [B, h, G].

    Returns the number of each cell's island, int32 [B, h, G]; 0 outside the region. The islands of an image are
    numbered from 1, in raster order of their first cells. For example, for an image with two islands (x)::

        region   weight   greatest   first_cell   firsts_up_to   island
        x . x    6 0 4    6 0 4      0 5 2        1 1 2          1 0 2
        x . x    3 0 1    6 0 4      0 5 2        2 2 2          1 0 2
    """
    _, height, width = region.shape
    n = height * width
    inside = torch.from_numpy(np.ascontiguousarray(region))  # torch does not read arrays with negative strides

    # 1. Cell c of the region has the weight n - c. So the weights decrease in raster order, and the greatest weight of
    #    an island is the weight of its first cell. The weight outside the region is 0.
    weight = torch.arange(n, 0, -1, dtype=torch.float32).view(height, width) * inside

    # 2. In every round, each cell takes the greatest weight among itself and its eight neighbours. So each weight
    #    spreads by one cell within its island. When a round changes nothing, each cell has the greatest weight of its
    #    island.
    greatest = weight
    while True:
        spread = F.max_pool2d(greatest, 3, 1, 1) * inside
        if np.array_equal(spread, greatest):  # the project's tests count torch.equal as a wait for the device
            break
        greatest = spread

    # 3. Find the first cell of each island, and number the first cells in raster order. Every cell takes the number of
    #    its island's first cell. Outside the region, first_cell would be n, so it is clamped to a valid index.
    is_first = (inside & (greatest == weight)).flatten(1)
    first_cell = (n - greatest).flatten(1).long().clamp(max=n - 1)
    firsts_up_to = is_first.cumsum(1)  # for each cell, the number of first cells up to and including it
    island_of_cell = firsts_up_to.gather(1, first_cell)
    return (island_of_cell.view(region.shape) * inside).int().numpy()


# ------------------------------------------------------------ the waves of the islands


def waves_of_islands(island_of_cell: np.ndarray, reach: int) -> np.ndarray:
    """The index of the wave that resamples each cell, int32 [B, h, G], from 0; -1 outside the islands. The rule is::

        for each cell (y, c) of an island, in raster order:
            waits_for = cells of the same island, in row y left of c, or in rows above y in columns up to c + reach - 1
            wave of (y, c) = 1 + the latest wave in waits_for, or 0 if waits_for is empty

    For example, if one island (x) has these cells, and ``reach`` is 2::

        island     wave
        x x x .    0  1  2 -1
        x . x x    2 -1  3  4

    The first cell of the second row waits for the cells above it in the columns 0 and 1, whose waves are 0 and 1.

    The device waits for this function. So the function computes the waves of a whole grid row at once, for all islands
    of all images. For 4 images of 32 x 32 cells, it takes less than 0.01 s; a loop over the cells takes up to 0.05 s.

    Args:
        island_of_cell: number of each cell's island, int32 [B, h, G], from :func:`find_islands`.
        reach: at least 1. If it is G or more, the order is raster order. If it is lower, it is ZipAR's window.
    """
    images, height, width = island_of_cell.shape
    wave_of_cell = np.full(island_of_cell.shape, -1, np.int32)

    # ``island_in_batch`` numbers the islands of all images together, from 0. Image b has the numbers from
    # b * most_islands on; some of them may stay unused. The numbers outside the islands are not used either.
    most_islands = int(island_of_cell.max())
    island_in_batch = island_of_cell - 1 + most_islands * np.arange(images)[:, None, None]

    # latest_so_far[i, c] is the latest wave of island i in the grid rows above row y, in columns up to c; -1 if the
    # island has no cells there.
    latest_so_far = np.full((images * most_islands, width), -1, np.int32)

    for y in range(height):
        # 1. The cells of this grid row that are in an island: image and column of each.
        image, column = np.nonzero(island_of_cell[:, y])
        if not len(image):
            continue

        # 2. The islands that have cells in this row, and which cells of the row each of them has. ``which`` is, for
        #    each cell, the index of its island in ``islands_in_row``.
        islands_in_row, which = np.unique(island_in_batch[image, y, column], return_inverse=True)
        cell_mask = np.zeros((len(islands_in_row), width), bool)
        cell_mask[which, column] = True

        # 3. The waves of these cells.
        row_waves = _waves_of_row(cell_mask, latest_so_far[islands_in_row], reach)
        wave_of_cell[image, y, column] = row_waves[which, column]

        # 4. Now this row is one of the rows above.
        latest = np.maximum.accumulate(np.where(cell_mask, row_waves, -1), axis=1)
        latest_so_far[islands_in_row] = np.maximum(latest_so_far[islands_in_row], latest)
    return wave_of_cell


def _waves_of_row(cell_mask: np.ndarray, latest_so_far: np.ndarray, reach: int) -> np.ndarray:
    """The waves of the cells of one grid row in I islands, int32 [I, G]; I is the number of islands in the row. If a
    cell is not in an island, the entry of this cell and island is arbitrary.

    The cells of an island in the row are numbered from 0, left to right. If no cell waited for the rows above, the
    waves would be these numbers. But a cell also has an *earliest* wave: 1 + the latest wave of the cells for which it
    waits in the rows above. The cell's *delay* is how much its earliest wave is above its number. A delay also delays
    all cells to the right, because each of them waits for the cell before it. So the wave of a cell is its number + the
    largest delay so far.

    In this example, an island (x) has no cell in column 1, so nothing reads the results of this column. The island's
    cell 1, in column 2, has to wait until wave 5. That is 4 more than the cell's number, so cell 2 is also 4 waves
    later than its number, in wave 6. ``reach`` is 1::

        column                  0  1  2  3
        cell_mask               x  .  x  x
        latest_so_far           1  4  4  4
        number                  0  0  1  2
        earliest                2  5  5  5
        delay                   2 -4  4  3      (column 1: -G)
        largest_delay_so_far    2  2  4  4
        wave                    2  2  5  6

    Args:
        cell_mask: bool [I, G], whether each cell of the row belongs to each island.
        latest_so_far: int32 [I, G]; column c holds the latest wave of each island in the rows above, in columns up to
            c.
        reach: see :func:`waves_of_islands`.
    """
    width = cell_mask.shape[1]
    number = np.cumsum(cell_mask, axis=1, dtype=np.int32) - 1

    last_column_above = np.minimum(np.arange(width) + reach - 1, width - 1)  # a cell waits for cells above up to here
    earliest = 1 + latest_so_far[:, last_column_above]

    # A cell outside the island must not delay the cells to its right, so it gets a delay below all delays of the
    # island's cells: an earliest wave is at least 0, and a number is less than the width.
    delay = np.where(cell_mask, earliest - number, -width)
    largest_delay_so_far = np.maximum.accumulate(delay, axis=1)
    return number + largest_delay_so_far


# ------------------------------------------------------------ the pass of each wave


class Wave(NamedTuple):
    """A wave of a block, and the cells whose tokens its pass feeds to the transformer.

    ``predicted_by`` counts hidden rows (the transformer's outputs for fed tokens) of the pass that predicts the cells.
    In wave 0, this is the pass that verified the block: its hidden row i predicts cell i of the block. In a later wave,
    it is the wave's own pass: its hidden row i belongs to the cell ``fed[:, i]``, and predicts the cell after it.

    The arrays are int64, unless stated otherwise. In each image, at most a cells are resampled and m cells are fed. If
    an image has fewer entries than other images, its entries end with padding.
    """

    cells: np.ndarray  # cells to resample, [B, a]; n, the number of cells of the block, for padding
    outcome: np.ndarray  # outcomes of the draft tokens of ``cells``, uint8 [B, a]; 0 for padding
    predicted_by: np.ndarray  # index of the hidden row that predicts each cell of ``cells``, [B, a]; 0 for padding
    fed: np.ndarray  # cells whose tokens are fed, [B, m]; n for padding. Wave 0 feeds none: m is 0
    # The first cell after all fed cells. A fed token attends to itself and to all earlier cells, including drafts of
    # other islands, so no token attends to this cell or to a later cell.
    end: int


def waves_of_block(wave_of_cell: np.ndarray, outcome_of_cell: np.ndarray) -> list[Wave]:
    """The waves of a block, from wave 0. There is always a wave 0, even if it has no cells.

    Wave 0 feeds nothing, because the pass that verified the block has already predicted all cells of the block. A later
    wave feeds two kinds of cells: the cell before each of its cells, because a fed token predicts the next cell; and
    the cells of the previous wave, because the cache still holds the keys and values of their draft tokens. In this
    example, one island covers a block of 3 x 3 cells, and ``reach`` is 1::

        cells    wave of each    wave  resamples  feeds  which predict
        0 1 2    0 1 2           0     0          -      -
        3 4 5    1 2 3           1     1 3        0 2    1 3
        6 7 8    2 3 4           2     2 4 6      1 3 5  2 4 6
                                 3     5 7        2 4 6  - 5 7
                                 4     8          5 7    - 8

    In wave 3, cell 2 predicts no cell (-). It is fed only because wave 2 has resampled it.

    Args:
        wave_of_cell: int [B, n], the wave of each cell; -1 for a cell that is not resampled. The first cell of the
            block waits for no cell, so it is in wave 0 or is not resampled. The cell before it is therefore never fed.
        outcome_of_cell: uint8 [B, n], the outcome of each draft token.
    """
    n = wave_of_cell.shape[1]
    padded_outcome = np.pad(outcome_of_cell, ((0, 0), (0, 1)))  # [B, n + 1]; the entry n, for padding, is 0

    waves = []
    for wave in range(int(wave_of_cell.max(initial=0)) + 1):
        resampled = wave_of_cell == wave
        cells = left_aligned(resampled)
        outcome = np.take_along_axis(padded_outcome, cells, axis=1)
        if wave == 0:
            nothing = np.empty((len(cells), 0), np.int64)
            waves.append(Wave(cells, outcome, predicted_by=np.where(cells < n, cells, 0), fed=nothing, end=0))
        else:
            is_fed = fed_cells(resampled, resampled_before=wave_of_cell == wave - 1)
            fed_in_any_image = is_fed.any(axis=0).nonzero()[0]
            end = int(fed_in_any_image.max()) + 1
            waves.append(Wave(cells, outcome, predicting_index(cells, is_fed), left_aligned(is_fed), end))
    return waves


def fed_cells(resampled: np.ndarray, resampled_before: np.ndarray) -> np.ndarray:
    """The cells that the pass of a later wave feeds, bool [B, n]: the cell before each cell of the wave, and the cells
    of the previous wave (:func:`waves_of_block` says why).

    The last cell of the block is never fed, because it predicts a cell outside the block. Nothing is fed for an image
    without a cell in this wave. Such an image has no cell in a later wave either, because a cell waits for a cell of
    the wave before its own. ``resampled``, ``resampled_before``: bool [B, n], the cells of this wave and of the
    previous wave.
    """
    assert not resampled[:, 0].any(), "the first cell of a block can only be in wave 0"
    is_in_wave = resampled.any(axis=1, keepdims=True)
    is_fed = np.zeros_like(resampled)
    is_fed[:, :-1] = is_in_wave & (resampled[:, 1:] | resampled_before[:, :-1])
    return is_fed


def predicting_index(cells: np.ndarray, is_fed: np.ndarray) -> np.ndarray:
    """For each cell to resample, the index of the cell before it among the fed cells, int64 [B, a]; 0 for padding.

    For example, in wave 3 of :func:`waves_of_block`, cells 5 and 7 have the indices 1 and 2::

        cell               0  1  2  3  4  5  6  7  8
        is_fed             .  .  x  .  x  .  x  .  .
        index_among_fed          0     1     2
        predicts cell            3     5     7

    Args:
        cells: the cells to resample, int64 [B, a]; n for padding. The cell before each of them is fed.
        is_fed: the fed cells, bool [B, n], from :func:`fed_cells`.
    """
    images, n = is_fed.shape
    index_among_fed = is_fed.cumsum(axis=1) - 1  # used only at fed cells
    # Shifted by one cell, so that the entry of a cell is the index of the cell before it. Entry 0 is not used, and
    # entry n, for padding, is 0.
    index_of_cell_before = np.zeros((images, n + 1), np.int64)
    index_of_cell_before[:, 1:n] = index_among_fed[:, :-1]
    return np.take_along_axis(index_of_cell_before, cells, axis=1)


def left_aligned(chosen: np.ndarray) -> np.ndarray:
    """The cells that are ``chosen`` in each image, in raster order, int64 [B, most]. ``chosen``: bool [B, n]; most is
    the largest number of chosen cells in an image. For an image with fewer chosen cells, padding follows: n.
    """
    n = chosen.shape[1]
    counts = chosen.sum(axis=1, keepdims=True)
    most = counts.max()
    chosen_first = np.argsort(~chosen, axis=1, kind="stable")  # False sorts before True; stable keeps raster order
    return np.where(np.arange(most) < counts, chosen_first[:, :most], n)
