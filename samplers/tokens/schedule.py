"""Decoding schedules of discrete tokens: which cells each pass of the transformer decides, and what is fed to it.

A *cell* is a token of the image, by its number in raster order. A pass feeds tokens to the transformer, each as a *fed
row*, whose output predicts a cell. In a model of the next token, cell c is predicted by the row that is fed at the
*position* before it, c - 1. If several rows of the image are decoded at once, the token of that position may not be
decided yet; another token, a *stand-in*, is then fed there. For example, ZipAR with window 1 on 3 x 3 cells::

    cells     decided in pass     pass   decides   feeds the tokens of cells ... at positions
    0 1 2     0  1  2             0      0         none: the prefill, which reads the condition
    3 4 5     3  4  5             1-3    1, 2, 3   the one before, at its own position
    6 7 8     4  5  6             4      4, 6      3 at 3, and 2 at 5: a stand-in for cell 5
                                  5      5, 7      4 at 4, and 6 at 6
                                  6      8         5 at 5, in place of the stand-in, and 7 at 7

The *place* of a token is its index in the order in which the model was trained to read tokens. Places determine what a
fed row attends to: the tokens at all places up to its ``last_visible``. For a model of the next token, a place is a
cell; a PAR has its own order (``par.py``). Slots of the KV cache follow from the places, see ``cache_slots.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Row(NamedTuple):
    """A row that a pass feeds: the token of a cell, or one of PAR's transition tokens."""

    position: int  # a cell, or -1 for a transition token
    place: int  # its place in the sequence
    last_visible: int  # last place that the row attends to; this pass always writes that place itself
    cell: int = 0  # the cell whose token is fed; not read for a transition token
    special: int = -1  # the number of the transition token, or -1 for the token of a cell

    @property
    def is_stand_in(self) -> bool:
        """Whether another cell's token is fed, because the token of ``position`` is not decided yet."""
        return self.special < 0 and self.cell != self.position


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of the transformer. The first pass of a schedule is the prefill, whose input is the condition only."""

    cells: tuple[int, ...]  # cells that the pass decides
    predicted_by: tuple[int, ...]  # for each of cells the index of the fed row that predicts it; 0 in the prefill
    rows: tuple[Row, ...] = ()  # the rows that the pass feeds
    cfg_step: int = -1  # number that is compared with the setting cfg_interval, counted as the published code does


@dataclass(frozen=True, eq=False)
class Schedule:
    """Passes that decide a whole grid."""

    grid: int  # side of the grid
    passes: tuple[Pass, ...]
    # Whether places are attended to before they are written. Only comparisons with ZipAR's published code set this.
    unwritten_visible: bool = False
    # Number of cells, from the first in raster order, that are decided and cached already; the first pass is then empty
    known: int = 0


def next_token_passes(
    groups: Sequence[Sequence[int]], grid: int, cfg_steps: Sequence[int], known: int = 0, fed_again: int = 0
) -> tuple[Pass, ...]:
    """Passes of a model that predicts the next cell of the raster, deciding groups of cells one after another.

    Cell c is predicted by a row at position c - 1. Until cell c - 1 is decided, a stand-in token is fed at this
    position: the nearest decided token in the row above, or, if that row has none, the nearest decided token of all.
    Every token is fed once after it is decided, and replaces the stand-in. The prefill predicts the first group, which
    contains cell 0.

    Args:
        groups: cells, one group for each pass.
        grid: side of the grid.
        cfg_steps: the ``cfg_step`` of every group, see :class:`Pass`.
        known: number of cells that are decided already. If there are any, the first pass is empty.
        fed_again: how many of the ``known`` cells, counted back from the last, are fed once more, together with the
            first group.
    """
    passes = []
    decided = set(range(known))
    pending = set(range(known - fed_again, known))  # decided cells that the next pass feeds
    if known:
        passes.append(Pass(cells=(), predicted_by=()))

    for cells, cfg_step in zip(groups, cfg_steps, strict=True):
        if not passes:
            passes.append(Pass(cells=tuple(cells), predicted_by=(0,) * len(cells)))
        else:
            before = [c - 1 for c in cells]
            positions = sorted({*pending, *before})
            rows = []
            for p in positions:
                cell = p if p in decided else _stand_in(p, decided, grid)
                rows.append(Row(position=p, place=p, last_visible=p, cell=cell))

            predicted_by = tuple(positions.index(p) for p in before)
            passes.append(Pass(cells=tuple(cells), predicted_by=predicted_by, rows=tuple(rows), cfg_step=cfg_step))
            pending.clear()
        decided.update(cells)
        pending.update(cells)
    return tuple(passes)


def _stand_in(position: int, decided: set[int], grid: int) -> int:
    """The decided cell whose token is fed at a position that is not decided yet."""
    row, column = divmod(position, grid)
    above = [c for c in range((row - 1) * grid, row * grid) if c in decided]
    if above:
        return min(above, key=lambda c: (abs(c % grid - column), c))
    return min(decided, key=lambda c: ((c // grid - row) ** 2 + (c % grid - column) ** 2, c))


@lru_cache(maxsize=4)
def raster(grid: int) -> Schedule:
    """One cell per pass: G * G passes."""
    cells = range(grid * grid)
    return Schedule(grid, next_token_passes([[c] for c in cells], grid, [c - 1 for c in cells]))


def guidance_steps(groups: Sequence[Sequence[int]], start: int) -> list[int]:
    """``cfg_step`` of every group of cells. Group k of the first ``start`` groups gets k - 1, a count of passes.

    After these groups, the published code counts again from 0, and it counts tokens: each group gets the number of
    tokens decided since. Guidance that has ended can therefore come back. For example, groups of 1, 1, 4 and 4 cells
    with start 2 get -1, 0, 0 and 4.
    """
    steps = []
    since = 0
    for k, cells in enumerate(groups):
        if k < start:
            steps.append(k - 1)
        else:
            steps.append(since)
            since += len(cells)
    return steps
