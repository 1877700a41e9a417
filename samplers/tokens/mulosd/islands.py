"""MuLo-SD's local repair: from rejections to islands, and to the waves that resample them.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149): expansion by a
radius, rejection islands CC_8(R_X), and their concurrent resampling, inside an island in raster order or with ZipAR's
window.

All of it is computed on the host: the number of waves determines how many passes follow, so one small map has to be
copied in any case, and a grid is too small for a device to be faster.

Shapes: B images, h x w cells of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ....reports.record import ACCEPTED, EXPANDED, REJECTED
from ..settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings

# A wave before all other waves.
_NEVER = np.iinfo(np.int32).min // 2


class Repair(NamedTuple):
    """What becomes of the drafts of a block, arrays [B, h, w]."""

    rejected: np.ndarray  # R_T, bool
    islands: np.ndarray  # the island of each cell of R_X, int32 from 1; 0 for accepted drafts
    wave: np.ndarray  # the wave in which a cell is resampled, int32 from 0; -1 for accepted drafts

    def outcome(self) -> np.ndarray:
        """What became of every draft, uint8, see ``reports/record.py``."""
        resampled = np.where(self.rejected, REJECTED, EXPANDED)
        return np.where(self.islands > 0, resampled, ACCEPTED).astype(np.uint8)

    def counts(self) -> dict[str, int]:
        """Counts for the report."""
        expanded = (self.islands > 0) & ~self.rejected
        return {
            "accepted": int((~self.rejected).sum()),
            "rejected": int(self.rejected.sum()),
            "expanded": int(expanded.sum()),
            "islands": int(self.islands.max(axis=(1, 2)).sum()),
            "waves": int(self.wave.max()) + 1,
        }


def repair_of(rejected: np.ndarray, settings: MuLoSDSettings) -> Repair:
    """R_X and its islands and waves, of R_T bool [B, h, w]."""
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
    """The islands of all blocks, int32 [B, G, G]: in every image, numbers continue from one block to the next."""
    parts = []
    so_far = np.zeros((len(repairs[0].islands), 1, 1), np.int32)  # islands of each image
    for repair in repairs:
        parts.append(np.where(repair.islands > 0, repair.islands + so_far, 0))
        so_far += repair.islands.max(axis=(1, 2), keepdims=True)
    return np.concatenate(parts, axis=1)


def suffix(rejected: np.ndarray) -> np.ndarray:
    """Cells from the first rejected one on in raster order, bool [B, h, w] of R_T bool [B, h, w].

    This is R_X if a rejection discards everything that follows, as in ordinary speculative decoding.
    """
    return np.logical_or.accumulate(rejected.reshape(len(rejected), -1), axis=1).reshape(rejected.shape)


def expand(rejected: np.ndarray, radius: int) -> np.ndarray:
    """R_X: cells within ``radius`` (the paper's l) rows and columns of a rejected one (R_T), from the first of them on.

    Both are bool [B, h, w].
    """
    near = F.max_pool2d(torch.from_numpy(rejected).float(), 2 * radius + 1, 1, radius)
    return (near > 0).numpy() & suffix(rejected)


def islands(region: np.ndarray) -> np.ndarray:
    """CC_8(R_X): 8-connected components of each image of bool [B, h, w].

    Returns int32 [B, h, w]: 0 outside, else the number of the island from 1, in raster order of their first cells.
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
        if np.array_equal(spread, greatest):
            break
        greatest = spread

    # 2. The first cells are numbered in raster order, and every other cell takes the number of its first cell.
    is_first = (inside & (greatest == weight)).flatten(1)
    first_cell = (cells - greatest).flatten(1).long().clamp(max=cells - 1)
    number = is_first.cumsum(1).gather(1, first_cell)
    return (number.view(region.shape) * inside).int().numpy()


def waves(numbered: np.ndarray, window: int | None = None) -> np.ndarray:
    """The wave in which each cell is resampled, int32 [B, h, w] from 0; -1 outside. All islands begin in wave 0.

    A cell waits for the cells of its island to its left, and for the cells of its island above it in columns up to
    column + ``window`` - 1. ``numbered`` is from :func:`islands`; a window of None, or of a row and more, is raster
    order.
    """
    image, row, column = np.nonzero(numbered)
    out = np.full(numbered.shape, -1, np.int32)
    if not len(image):
        return out

    images, height, width = numbered.shape
    most = int(numbered.max())  # islands of an image
    island = image * most + numbered[image, row, column] - 1
    reach = width if window is None else window

    # latest_above[i, c]: the latest wave of island i in the rows above, in columns up to c.
    latest_above = np.full((images * most, width), -1, np.int32)
    for y in range(height):
        in_row = row == y
        if not in_row.any():
            continue
        present, i = np.unique(island[in_row], return_inverse=True)
        c = column[in_row]
        belongs = np.zeros((len(present), width), bool)
        belongs[i, c] = True

        wave = _waves_of_row(belongs, latest_above[present], reach)
        out[image[in_row], y, c] = wave[i, c]

        latest = np.maximum.accumulate(np.where(belongs, wave, _NEVER), axis=1)
        latest_above[present] = np.maximum(latest_above[present], latest)
    return out


def _waves_of_row(belongs: np.ndarray, latest_above: np.ndarray, reach: int) -> np.ndarray:
    """The waves of a row's cells, int32 [n, width]; cells outside of the island have any number.

    Args:
        belongs: bool [n, width], whether a cell belongs to each of n islands.
        latest_above: int32 [n, width], the latest wave of the island in the rows above, in columns up to each.
        reach: a cell waits for those above it in columns up to its own + ``reach`` - 1.

    A wave is 1 + the latest wave that the cell waits for: of the island above, and of the island's cell before it in
    the row, whose wave is at least one less. With the place of a cell among the island's cells in the row, wave - place
    is therefore a running maximum of 1 + latest above - place. With ``reach`` 1 and an island (x) that leaves out the
    second column::

        belongs               x  .  x  x
        latest above          1  1  4  4
        place                 0     1  2
        1 + latest - place    2     4  3
        running maximum       2     4  4
        + place               2     5  6

    """
    width = belongs.shape[1]
    place = np.cumsum(belongs, axis=1, dtype=np.int32) - 1
    seen = np.minimum(np.arange(width) + reach - 1, width - 1)

    earliest = np.where(belongs, latest_above[:, seen] + 1 - place, _NEVER)
    return np.maximum.accumulate(earliest, axis=1) + place


class WavePass(NamedTuple):
    """The pass that resamples a wave: int64 arrays [B, .], each image's entries left-aligned.

    Where an image has fewer cells than another one of its batch, its row is padded:

    - ``cells`` with the number of cells of the grid: the token sampled for it goes to the canvas' column for padding;
    - ``predicted_by`` with 0, any row;
    - ``fed`` with the last cell of the grid. It predicts no cell, so it is never fed for its own sake, and no row
      attends to it. A cache for more than one image needs a slot for it. The table of positions has no entry for it:
      it is fed at the position before.
    """

    cells: np.ndarray  # cells to resample
    fed: np.ndarray  # cells fed before; none in the first wave, whose predictions come from the verification
    predicted_by: np.ndarray  # for each cell the index in fed of the cell that predicts it
    end: int  # cells below this one are attended to


def wave_passes(wave: np.ndarray, first: int, count: int) -> list[WavePass]:
    """The pass of each wave, and of the first one even if it is empty. A pass feeds the cells before those that it
    resamples, and the cells that the pass before has resampled.

    ``wave`` int32 [B, n] is the wave of the cells from ``first`` on, -1 where a draft is accepted; ``count`` cells are
    in the grid. For one island on all of 3 x 3 cells, with a window of 1::

        cells    wave of each    wave  resamples  feeds  which predict
        0 1 2    0 1 2           0     0          -      -
        3 4 5    1 2 3           1     1 3        0 2    1 3
        6 7 8    2 3 4           2     2 4 6      1 3 5  2 4 6
                                 3     5 7        2 4 6  - 5 7
                                 4     8          5 7    - 8

    Cell 2 predicts nothing in wave 3. It is fed because the pass before has resampled it, and its keys and values are
    still the draft's.
    """
    last = first + wave.shape[1]
    of_cell = np.full((len(wave), count), -1)
    of_cell[:, first:last] = wave

    cells = _left_aligned(of_cell == 0, count)
    out = [WavePass(cells, fed=cells[:, :0], predicted_by=np.zeros_like(cells), end=0)]
    for k in range(1, int(wave.max(initial=0)) + 1):
        resampled = of_cell == k
        cells = _left_aligned(resampled, count)

        # The block's last cell is not fed: the cell it predicts is not in the block.
        predicts = resampled[:, 1:last]
        is_new = of_cell[:, : last - 1] == k - 1
        fed = np.zeros_like(resampled)
        fed[:, : last - 1] = (predicts | is_new) & resampled.any(1, keepdims=True)
        row_of = fed.cumsum(1) - 1
        row_before = np.take_along_axis(row_of, (cells - 1).clip(min=0), axis=1)
        predicted_by = np.where(cells < count, row_before, 0).clip(min=0)
        end = int(fed.any(0).nonzero()[0].max(initial=-1)) + 1
        out.append(WavePass(cells=cells, fed=_left_aligned(fed, count - 1), predicted_by=predicted_by, end=end))
    return out


def _left_aligned(chosen: np.ndarray, padding: int) -> np.ndarray:
    """The columns where bool [B, N] is True, int64 [B, most of a row], left-aligned and padded."""
    counts = chosen.sum(1, keepdims=True)

    columns = np.argsort(~chosen, axis=1, kind="stable")[:, : counts.max()]
    return np.where(np.arange(columns.shape[1]) < counts, columns, padding)
