"""Schedules for the samplers of discrete tokens: which cells each pass of the transformer decides, and which tokens the
pass feeds.

A *cell* is one square of the token grid. Cells are numbered in raster order, and each cell holds one token. A pass
feeds tokens to the transformer. Each fed token is a *fed row*, and the transformer's output for the row may predict a
cell. This is the schedule of ZipAR with window 1 on 3 x 3 cells::

    cells     decided in pass     pass   decides   feeds the tokens of cells ... at positions ...
    0 1 2     0  1  2             0      0         none: the prefill, which reads the condition
    3 4 5     3  4  5             1-3    1, 2, 3   the cell before, at its own position
    6 7 8     4  5  6             4      4, 6      3 at 3, and 2 at 5: a stand-in for cell 5
                                  5      5, 7      4 at 4, and 6 at 6
                                  6      8         5 at 5, which replaces the stand-in, and 7 at 7

The model predicts the next cell in raster order, as most models do: the fed row at position c - 1 predicts cell c. In
pass 4, cell 6 is decided before cell 5. So the token of cell 5 is not known, and the pass feeds a different token at
position 5, the *stand-in*.

Four numbers belong to a fed row:

- its cell: the cell whose token is fed;
- its *position*: the cell whose position encoding the token gets;
- its *place*: the index of the token in the order in which the model was trained to read tokens. A fed row attends to
  the tokens at all places up to its ``last_visible``;
- its *slot* in the KV cache (``cache_slots.py``).

Usually, the token of cell c is fed at position c and place c, and is written to slot c, so all four numbers are c.
There are three exceptions:

- A stand-in is fed at the position of a different cell.
- A PAR reads tokens in its own order, so place and cell are different (``par.py``).
- A PAR also reads transition tokens, which belong to no cell.

The fed rows thus are::

    fed token                             cell    position   place            slot
    of cell c                             c       c          c                c
    of cell s, as a stand-in for cell c   s       c          c                c; in Jacobi decoding, a slot of its own
    of cell c, in a PAR                   c       c          in PAR's order   the place
    PAR's transition token                none    none       in PAR's order   the place

A schedule may also continue an image whose first grid rows exist already. Only the draft model of MuLo-SD needs this:
it generates an image in blocks of grid rows, and the target may change a block before the next one is generated
(``mulosd/drafting.py``). All cells of earlier blocks are *known*: they are decided before the schedule begins, and all
of them except the last are in the cache. If there are known cells, no prefill is needed, so the first pass is empty. If
the token of a known cell may have changed since the cell was fed, the cell is *fed again*.

The file has, in this order: the parts of a schedule (:class:`FedRow`, :class:`Pass`, :class:`Schedule`); the schedules
of a model that predicts the next token (:func:`next_token_passes`, :func:`raster`, :func:`guidance_steps`); and all
passes of a schedule in arrays (:class:`ScheduleTable`). The arrays are on the host, and are computed once per schedule.
``looks.py`` copies them to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class FedRow(NamedTuple):
    """A fed row: a token that a pass feeds, which is the token of a cell or one of PAR's transition tokens."""

    position: int  # a cell, or -1 for a transition token
    place: int  # place of the fed token in the sequence
    last_visible: int  # last place to which the row attends; the row's own pass always feeds a token at this place
    cell: int = 0  # the cell whose token is fed; unused for a transition token
    transition_token: int = -1  # the index of the transition token; -1 for the token of a cell

    @property
    def is_stand_in(self) -> bool:
        """Whether the row feeds a different cell's token, because the token of ``position`` is not decided yet."""
        return self.transition_token < 0 and self.cell != self.position


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of the transformer. The first pass of a schedule is the prefill, whose input is the condition only. With
    known cells, the first pass is empty instead.
    """

    cells: tuple[int, ...]  # cells that the pass decides
    # For each of ``cells``, the index of the row that predicts the cell, counted from the first row of ``fed_rows``; 0
    # in the prefill.
    predicted_by: tuple[int, ...]
    fed_rows: tuple[FedRow, ...] = ()
    # The decoding step, which is compared with the setting cfg_interval: the pass is guided if cfg_step is at most
    # cfg_interval. In raster order, it is the number of tokens decided before the pass, minus 1: -1 in the prefill, and
    # 0 in the pass after it. For other orders see guidance_steps, and draft_schedule in mulosd/drafting.py.
    cfg_step: int = -1


@dataclass(frozen=True, eq=False)
class Schedule:
    """Passes that decide all cells of a grid, or in MuLo-SD a part of the grid."""

    grid: int  # side of the grid in cells
    passes: tuple[Pass, ...]
    known: int = 0  # number of known cells, see the top of this file; 0 except in MuLo-SD


def next_token_passes(
    groups: Sequence[Sequence[int]], grid: int, cfg_steps: Sequence[int], known: int = 0, fed_again: int = 0
) -> tuple[Pass, ...]:
    """Passes of a model that predicts the next cell in raster order. Each pass decides one group of cells.

    The fed row at position c - 1 predicts cell c. Until cell c - 1 is decided, a stand-in is fed at this position. The
    stand-in is the nearest decided token in the grid row above. If no cell of that grid row is decided, the stand-in is
    the nearest decided token of the whole grid. Each pass also feeds the tokens that the previous pass decided. If a
    stand-in was fed at the position of such a token, the token replaces the stand-in.

    If no cells are known, the first pass is the prefill. It decides the first group, which contains cell 0. If there
    are known cells, the first pass is empty, and the pass after it decides the first group.

    Args:
        groups: the cells of each group.
        grid: side of the grid.
        cfg_steps: the ``cfg_step`` of every group, see :class:`Pass`.
        known: number of known cells, see the top of this file; 0 except in MuLo-SD.
        fed_again: the pass of the first group feeds the last ``fed_again`` known cells again.
    """
    # 1. The first pass. ``to_feed``: the decided cells that the next pass feeds, in addition to the cell before each
    #    cell that it decides.
    if known:
        passes = [Pass(cells=(), predicted_by=())]
        decided = set(range(known))
        to_feed: Sequence[int] = range(known - fed_again, known)
        first_group = 0
    else:
        passes = [Pass(cells=tuple(groups[0]), predicted_by=(0,) * len(groups[0]))]
        decided = set(groups[0])
        to_feed = groups[0]
        first_group = 1

    # 2. The later passes.
    for cells, cfg_step in zip(groups[first_group:], cfg_steps[first_group:], strict=True):
        before = [c - 1 for c in cells]
        positions = sorted({*to_feed, *before})
        rows = []
        for position in positions:
            cell = position if position in decided else _stand_in(position, decided, grid)
            rows.append(FedRow(position=position, place=position, last_visible=position, cell=cell))

        predicted_by = tuple(positions.index(position) for position in before)
        passes.append(Pass(cells=tuple(cells), predicted_by=predicted_by, fed_rows=tuple(rows), cfg_step=cfg_step))
        decided.update(cells)
        to_feed = cells
    return tuple(passes)


def _stand_in(position: int, decided: set[int], grid: int) -> int:
    """The decided cell whose token is fed at an undecided ``position``, see :func:`next_token_passes`."""
    grid_row, column = divmod(position, grid)
    # Above grid row 0, the range has negative numbers only, and no cell has a negative number.
    above = [c for c in range((grid_row - 1) * grid, grid_row * grid) if c in decided]
    if above:
        return min(above, key=lambda c: (abs(c % grid - column), c))
    return min(decided, key=lambda c: ((c // grid - grid_row) ** 2 + (c % grid - column) ** 2, c))


@lru_cache(maxsize=4)
def raster(grid: int) -> Schedule:
    """The schedule with one cell per pass in raster order: ``grid`` * ``grid`` passes."""
    cells = range(grid * grid)
    return Schedule(grid, next_token_passes([[c] for c in cells], grid, [c - 1 for c in cells]))


def guidance_steps(groups: Sequence[Sequence[int]], sequential_groups: int) -> list[int]:
    """The ``cfg_step`` of every group of cells, counted as in the published code.

    If group k is one of the first ``sequential_groups`` groups, it gets k - 1. For the later groups, the count starts
    again from 0, and counts tokens instead of groups: a later group gets the number of tokens in the later groups
    before it. Guidance that has ended can therefore start again. For example, if ``sequential_groups`` is 2, groups of
    1, 1, 4 and 4 cells get -1, 0, 0 and 4.
    """
    cfg_steps = []
    tokens_since_start = 0
    for k, cells in enumerate(groups):
        if k < sequential_groups:
            cfg_steps.append(k - 1)
        else:
            cfg_steps.append(tokens_since_start)
            tokens_since_start += len(cells)
    return cfg_steps


# ------------------------------------------------------------ all passes in arrays


@dataclass(frozen=True, eq=False, kw_only=True)
class ScheduleTable:
    """All fed rows and decided cells of a schedule, as int64 arrays in the order of the passes. A slice of an array
    holds the facts of one pass, or of several successive passes.

    Shapes: together, P passes feed F rows and decide N of the L cells of the grid. The last entry of an array of fed
    rows or of cells is padding: a call uses this entry for images with fewer rows or cells than other images have.
    """

    passes: int  # P

    # For each fed row, [F + 1].
    fed_cell: np.ndarray  # cell whose token is fed; 0 for transition tokens and padding
    transition_token: np.ndarray  # index of the fed PAR transition token (par.py); -1 for cells and padding
    position: np.ndarray  # position at which the token is fed, see FedRow; 0 for padding
    last_visible: np.ndarray  # last place that the row attends to; -1 for padding
    pass_of_row: np.ndarray  # pass that feeds the row; 0 for padding

    # For each decided cell, [N + 1].
    cells: np.ndarray  # the cell; L for padding
    # Index of the fed row that predicts the cell, counted from the first row of the schedule; 0 for padding.
    row_of_cell: np.ndarray
    pass_of_cell: np.ndarray  # pass that decides the cell; P for padding

    # For each pass, and for the end of the schedule, [P + 1]. Pass k feeds the rows row_start[k] to
    # row_start[k + 1] - 1, and decides the cells cell_start[k] to cell_start[k + 1] - 1.
    row_start: np.ndarray
    cell_start: np.ndarray


@lru_cache(maxsize=64)
def schedule_table(schedule: Schedule) -> ScheduleTable:
    """The table of a schedule."""
    passes = schedule.passes
    pass_indices = np.arange(len(passes))

    # 1. Fed rows, pass by pass, then padding.
    rows = [row for p in passes for row in p.fed_rows]
    rows.append(FedRow(position=0, place=0, last_visible=-1))
    row_counts = [len(p.fed_rows) for p in passes]
    row_start = np.append(0, np.cumsum(row_counts))

    # 2. Decided cells, pass by pass, and the index of the row that predicts each cell. predicted_by counts rows from
    #    the first row of the pass, but row_of_cell counts rows from the first row of the schedule.
    cells = [cell for p in passes for cell in p.cells]
    predicted_by = np.array([row for p in passes for row in p.predicted_by], np.int64)
    cell_counts = [len(p.cells) for p in passes]
    cell_start = np.append(0, np.cumsum(cell_counts))
    row_of_cell = predicted_by + np.repeat(row_start[:-1], cell_counts)

    return ScheduleTable(
        passes=len(passes),
        fed_cell=np.array([row.cell for row in rows]),
        transition_token=np.array([row.transition_token for row in rows]),
        position=np.array([row.position for row in rows]),
        last_visible=np.array([row.last_visible for row in rows]),
        pass_of_row=np.append(np.repeat(pass_indices, row_counts), 0),
        cells=np.array([*cells, schedule.grid**2]),
        row_of_cell=np.append(row_of_cell, 0),
        pass_of_cell=np.append(np.repeat(pass_indices, cell_counts), len(passes)),
        row_start=row_start,
        cell_start=cell_start,
    )
