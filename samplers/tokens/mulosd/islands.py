"""MuLo-SD's local repair: from rejections to islands, and to the waves that resample them.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149): expansion by a
radius, rejection islands CC_8(R_X), and their concurrent resampling, inside an island in raster order or with ZipAR's
window.

Everything here is computed on the host. The number of waves determines how many passes follow, so one small map has to
be copied to the host in any case, and a grid is too small for a device to be faster.

Shapes: B images, h x w cells of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ....reports.record import ACCEPTED, EXPANDED, REJECTED
from .settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings

# A wave before all other waves.
_BEFORE_ALL = np.iinfo(np.int32).min // 2


class Repair(NamedTuple):
    """What happens to the drafts of a block; arrays [B, h, w]."""

    rejected: np.ndarray  # R_T, bool
    islands: np.ndarray  # the island of each cell of R_X, int32 from 1; 0 for accepted drafts
    wave: np.ndarray  # the wave in which a cell is resampled, int32 from 0; -1 for accepted drafts

    def outcome(self) -> np.ndarray:
        """What became of every draft, uint8, see ``reports/record.py``."""
        resampled = np.where(self.rejected, REJECTED, EXPANDED)
        return np.where(self.islands > 0, resampled, ACCEPTED).astype(np.uint8)

    def counts(self) -> dict[str, int]:
        """Counts for the report: drafts that passed the test, drafts that failed it, and the expanded ones of those
        that passed; islands; waves.
        """
        expanded = (self.islands > 0) & ~self.rejected
        return {
            "accepted": int((~self.rejected).sum()),
            "rejected": int(self.rejected.sum()),
            "expanded": int(expanded.sum()),
            "islands": int(self.islands.max(axis=(1, 2)).sum()),
            "waves": int(self.wave.max()) + 1,
        }


def repair_of(rejected: np.ndarray, settings: MuLoSDSettings) -> Repair:
    """R_X with its islands and waves. ``rejected``: R_T, bool [B, h, w]."""
    if settings.repair == SUFFIX:
        region = suffix(rejected)
    else:
        region = expand(rejected, settings.expansion)

    numbered = islands(region)
    if settings.resample_order == ONE_BY_ONE:
        wave = waves(region.astype(np.int32))  # one island in raster order
    else:
        wave = waves(numbered, settings.resample_window or None)
    return Repair(rejected, numbered, wave)


def islands_of_all(repairs: Sequence[Repair]) -> np.ndarray:
    """The islands of all blocks, int32 [B, G, G]. In every image, the numbers continue from one block to the next."""
    parts = []
    so_far = np.zeros((len(repairs[0].islands), 1, 1), np.int32)  # islands of each image
    for repair in repairs:
        parts.append(np.where(repair.islands > 0, repair.islands + so_far, 0))
        so_far += repair.islands.max(axis=(1, 2), keepdims=True)
    return np.concatenate(parts, axis=1)


def suffix(rejected: np.ndarray) -> np.ndarray:
    """All cells from the first rejected cell on in raster order, bool [B, h, w]. ``rejected``: R_T, bool [B, h, w].

    This is R_X if a rejection discards everything that follows, as in ordinary speculative decoding.
    """
    return np.logical_or.accumulate(rejected.reshape(len(rejected), -1), axis=1).reshape(rejected.shape)


def expand(rejected: np.ndarray, radius: int) -> np.ndarray:
    """R_X, bool [B, h, w]: all cells within ``radius`` rows and columns (the paper's l) of a rejected cell, without the
    cells before the first rejected cell in raster order. ``rejected``: R_T, bool [B, h, w].
    """
    near = F.max_pool2d(torch.from_numpy(rejected).float(), 2 * radius + 1, 1, radius)
    return (near > 0).numpy() & suffix(rejected)


def islands(region: np.ndarray) -> np.ndarray:
    """CC_8(R_X): the 8-connected components of each image. ``region``: R_X, bool [B, h, w].

    Returns the number of each cell's island, int32 [B, h, w]; 0 outside of the region. The islands of an image are
    numbered from 1, in raster order of their first cells.
    """
    _, height, width = region.shape
    cells = height * width
    inside = torch.from_numpy(region.copy())

    # 1. Weights fall in raster order. Every cell takes the greatest weight around it, again and again, until it has the
    #    weight of the first cell of its island.
    weight = torch.arange(cells, 0, -1, dtype=torch.float32).view(height, width) * inside
    greatest = weight
    while True:
        spread = F.max_pool2d(greatest, 3, 1, 1) * inside
        if np.array_equal(spread, greatest):  # on the host; a test forbids torch.equal, which may wait for a device
            break
        greatest = spread

    # 2. The first cells are numbered in raster order, and every other cell takes the number of its first cell.
    is_first = (inside & (greatest == weight)).flatten(1)
    first_cell = (cells - greatest).flatten(1).long().clamp(max=cells - 1)
    number = is_first.cumsum(1).gather(1, first_cell)
    return (number.view(region.shape) * inside).int().numpy()


def waves(numbered: np.ndarray, window: int | None = None) -> np.ndarray:
    """The wave in which each cell is resampled, int32 [B, h, w] from 0; -1 outside. All islands begin in wave 0.

    In its island, a cell waits for the cells to its left in its row, and for the cells in the rows above in columns up
    to its own column + ``window`` - 1. The waves are those of this loop over the cells in raster order, in which max is
    -1 if there are none::

        for cell in island:
            wave[cell] = 1 + max(wave[other] for other in island if cell waits for other)

    Here they are computed for a whole row of all islands at once.

    Args:
        numbered: islands, from :func:`islands`.
        window: see above; None, or a window as wide as a row, gives raster order.
    """
    image, row, column = np.nonzero(numbered)
    out = np.full(numbered.shape, -1, np.int32)
    if not len(image):
        return out

    images, height, width = numbered.shape
    most = int(numbered.max())  # islands of an image
    island = image * most + numbered[image, row, column] - 1
    reach = width if window is None else window

    # Go down the rows. latest_above[i, c]: the latest wave of island i in the rows above, in columns up to c.
    latest_above = np.full((images * most, width), -1, np.int32)
    for y in range(height):
        in_row = row == y
        if not in_row.any():
            continue

        # 1. The islands in this row, and which of its cells belong to each.
        present, i = np.unique(island[in_row], return_inverse=True)
        c = column[in_row]
        belongs = np.zeros((len(present), width), bool)
        belongs[i, c] = True

        # 2. The waves of these cells.
        wave = _waves_of_row(belongs, latest_above[present], reach)
        out[image[in_row], y, c] = wave[i, c]

        # 3. The row is now above the next one.
        latest = np.maximum.accumulate(np.where(belongs, wave, _BEFORE_ALL), axis=1)
        latest_above[present] = np.maximum(latest_above[present], latest)
    return out


def _waves_of_row(belongs: np.ndarray, latest_above: np.ndarray, reach: int) -> np.ndarray:
    """The waves of a row's cells in n islands, int32 [n, width]. Where a cell is not in an island, the number is
    arbitrary.

    Args:
        belongs: bool [n, width], whether each cell of the row belongs to each island.
        latest_above: int32 [n, width], the latest wave of each island in the rows above, in columns up to this one.
        reach: a cell waits for cells above in columns up to its own column + ``reach`` - 1.

    A cell waits for cells of its island in the rows above and for the cell of its island before it in the row. Its wave
    is 1 + the latest wave of all these. Let the place of a cell be its index among the island's cells in the row. The
    cell at place p waits for what each place q up to p waits for above, and then for the p - q cells from q on::

        wave[p] = max over q of 1 + latest above[q] + p - q

    So wave - place is the running maximum of 1 + latest above - place. For example, with ``reach`` 1 and an island (x)
    that leaves out the second column::

        belongs               x  .  x  x
        latest above          1  1  4  4
        place                 0     1  2
        1 + latest - place    2     4  3
        running maximum       2     4  4
        + place               2     5  6

    """
    width = belongs.shape[1]
    place = np.cumsum(belongs, axis=1, dtype=np.int32) - 1
    last_column = np.minimum(np.arange(width) + reach - 1, width - 1)  # of the cells above that each cell waits for

    without_place = np.where(belongs, 1 + latest_above[:, last_column] - place, _BEFORE_ALL)
    return np.maximum.accumulate(without_place, axis=1) + place


class WavePass(NamedTuple):
    """The pass that resamples a wave: int64 arrays [B, .], each image's entries left-aligned.

    If an image has fewer cells than another image of its batch, its row is padded:

    - ``cells`` with the number of cells of the grid, which is the index of the canvas' column for padding;
    - ``predicted_by`` with an arbitrary index;
    - ``fed`` with the last cell of the grid. This cell predicts no cell, so it is never fed for its own sake, and no
      row attends to it. A cache for more than one image needs a slot for it;
    - ``position`` with the position of the cell before the last one, because the table of positions has no entry for
      the last cell.
    """

    cells: np.ndarray  # cells to resample
    fed: np.ndarray  # cells that the pass feeds; none in the first wave, which the verification predicts
    position: np.ndarray  # positions at which they are fed: their own
    # For each cell the index in fed of the cell that predicts it; in the first wave, the cell's index in the block.
    predicted_by: np.ndarray
    end: int  # the fed cells attend to cells below this one only


def wave_passes(wave: np.ndarray, first: int, count: int) -> list[WavePass]:
    """The pass of each wave; the first wave has a pass even if it is empty. A pass feeds the cell before each cell that
    it resamples, and the cells that the previous pass has resampled.

    Args:
        wave: int32 [B, n], the wave of each of the n cells from ``first`` on; -1 where a draft is accepted.
        first: the first of these cells.
        count: number of cells of the grid.

    For example, with one island on all of 3 x 3 cells and a window of 1::

        cells    wave of each    wave  resamples  feeds  which predict
        0 1 2    0 1 2           0     0          -      -
        3 4 5    1 2 3           1     1 3        0 2    1 3
        6 7 8    2 3 4           2     2 4 6      1 3 5  2 4 6
                                 3     5 7        2 4 6  - 5 7
                                 4     8          5 7    - 8

    Cell 2 predicts nothing in wave 3. It is fed because the pass before has resampled it, and its keys and values are
    still the draft's.
    """
    n = wave.shape[1]
    last = first + n
    of_cell = np.full((len(wave), count), -1)
    of_cell[:, first:last] = wave

    # 1. The first wave. Its cells are predicted by rows that the verification has fed.
    cells = _left_aligned(of_cell == 0, count)
    nothing = cells[:, :0]
    in_block = (cells - first).clip(max=n - 1)
    out = [WavePass(cells, fed=nothing, position=nothing, predicted_by=in_block, end=0)]

    # 2. The later waves. The block's last cell is not fed: the cell that it predicts is not in the block.
    may_be_fed = slice(0, last - 1)
    predicted = slice(1, last)
    for k in range(1, int(wave.max(initial=0)) + 1):
        resampled = of_cell == k
        cells = _left_aligned(resampled, count)

        # 2.1 The pass feeds the cells that predict a cell of this wave, and the cells that the previous pass has
        #     resampled. An image without a cell in this wave feeds none.
        predicts = resampled[:, predicted]
        was_resampled_last = of_cell[:, may_be_fed] == k - 1
        has_cells = resampled.any(1, keepdims=True)
        is_fed = np.zeros_like(resampled)
        is_fed[:, may_be_fed] = (predicts | was_resampled_last) & has_cells
        fed = _left_aligned(is_fed, padding=count - 1)
        position = fed.clip(max=count - 2)
        end = int(is_fed.any(0).nonzero()[0].max(initial=-1)) + 1

        # 2.2 The cell before a cell predicts it.
        index_in_fed = is_fed.cumsum(1) - 1
        of_cell_before = np.take_along_axis(index_in_fed, (cells - 1).clip(min=0), axis=1)
        predicted_by = np.where(cells < count, of_cell_before, 0).clip(min=0)
        out.append(WavePass(cells, fed, position, predicted_by, end))
    return out


def _left_aligned(chosen: np.ndarray, padding: int) -> np.ndarray:
    """For each row the columns where ``chosen``, bool [B, L], is True, left-aligned and padded, int64 [B, n]; n is the
    largest number of columns of a row.
    """
    counts = chosen.sum(1, keepdims=True)

    columns = np.argsort(~chosen, axis=1, kind="stable")[:, : counts.max()]
    return np.where(np.arange(columns.shape[1]) < counts, columns, padding)
