"""Decoding schedules of discrete tokens: the cells that each pass of the transformer decides, and the rows fed to
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..driver import to_device


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of the transformer. The first pass of a schedule is the prefill, whose input is the condition only."""

    cells: tuple[int, ...]  # cells that the pass decides, as raster numbers
    rows: tuple[int, ...]  # for each of cells the index of the fed row that predicts it; 0 in the prefill
    fed: tuple[int, ...] = ()  # cells whose tokens are fed, one row each
    special: int = 0  # number of PAR's transition tokens fed behind them
    position: tuple[int, ...] = ()  # position of each fed row: a cell, or -1 for a transition token
    slot: tuple[int, ...] = ()  # cache slot of each fed row, counted from the first image slot
    last_visible: tuple[int, ...] = ()  # highest slot that each fed row attends to, which the pass itself writes
    cfg_step: int = -1  # number that is compared with the setting cfg_interval, counted as the published code does


@dataclass(frozen=True, eq=False)
class Schedule:
    """Passes that decide a whole grid."""

    grid: int  # side of the grid
    passes: tuple[Pass, ...]
    unwritten_visible: bool = False  # whether slots are attended to before they are written (ZipAR's published code)
    # number of cells, from the first in raster order, that are decided and cached already; the first pass is then empty
    known: int = 0

    @cached_property
    def slots(self) -> int:
        """Image slots of the cache."""
        highest = -1
        for p in self.passes:
            highest = max(highest, *p.slot, *p.last_visible, -1)
        return highest + 1

    @cached_property
    def fixed_at(self) -> np.ndarray:
        """int32 [G, G]: index of the pass that decides each cell; -1 for known cells."""
        return self.table.decided_at[:-1].astype(np.int32).reshape(self.grid, self.grid)

    @cached_property
    def table(self) -> Table:
        """The schedule for passes that are fed one after another."""
        return flatten(self)

    @cached_property
    def ahead(self) -> Table:
        """The schedule for several passes that are fed at once; see :func:`flatten`."""
        return flatten(self, ahead=True)


# ------------------------------------------------------------ arrays of a schedule


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """All rows, cells and slots of a schedule, int64 arrays.

    Rows and cells are in the order of their passes, and the last entry of each of their arrays is padding. Which slots
    a row attends to follows from ``last_visible``, ``row_pass``, ``place``, ``written`` and ``replaced``; see
    :func:`attention_mask`.
    """

    passes: int  # number of passes P
    slots: int  # image slots of the cache S

    # By row.
    fed: np.ndarray  # cell whose token the row feeds; N + 1 + i for transition token i; padding 0
    position: np.ndarray  # see Pass; padding 0
    slot: np.ndarray  # cache slot, from the first image slot; padding writes to the last one
    last_visible: np.ndarray  # highest place in the schedule that the row attends to; padding -1
    row_pass: np.ndarray  # pass that feeds the row; padding 0

    # By cell, in order of decision.
    cells: np.ndarray  # number of the cell; padding N
    cell_row: np.ndarray  # row that predicts the cell; padding 0
    cell_pass: np.ndarray  # pass that decides the cell; padding P

    # By pass.
    row_start: np.ndarray  # [P + 1], first row of each pass, then the number of rows
    cell_start: np.ndarray  # [P + 1], first cell of each pass, then the number of cells
    end: np.ndarray  # [P], a pass attends to slots below this one only

    # By slot of the cache, [S].
    place: np.ndarray  # slot of the schedule that it holds
    written: np.ndarray  # pass from which it is visible; P: never
    replaced: np.ndarray  # pass from which another slot holds that place; P: never

    # By cell in raster order, [N + 1]: pass that decides it; -1 for known cells, P for padding and for cells that are
    # left out.
    decided_at: np.ndarray


def flatten(schedule: Schedule, ahead: bool = False) -> Table:
    """The arrays of a schedule.

    With ``ahead``, several passes can be fed at once, in one call that writes all their slots: every stand-in, a token
    that is fed at the position of another cell, then has a slot of its own behind the others. Rows attend to it up to
    the pass that feeds the true token. One more slot, the last, is for padding.
    """
    passes = schedule.passes
    count = schedule.grid**2

    # 1. Rows and cells, pass by pass.
    fed: list[int] = []
    position: list[int] = []
    slot: list[int] = []
    last_visible: list[int] = []
    row_pass: list[int] = []
    row_start = [0]
    cells: list[int] = []
    cell_row: list[int] = []
    cell_pass: list[int] = []
    cell_start = [0]
    for k, p in enumerate(passes):
        cells += p.cells
        cell_row += [len(fed) + row for row in p.rows]
        cell_pass += [k] * len(p.cells)
        cell_start.append(len(cells))

        fed += p.fed
        fed += range(count + 1, count + 1 + p.special)
        position += p.position
        slot += p.slot
        last_visible += p.last_visible
        row_pass += [k] * len(p.position)
        row_start.append(len(fed))

    # 2. The slots of the cache.
    layout = _layout(schedule, fed, slot, row_start, ahead)

    decided_at = np.full(count + 1, len(passes))
    decided_at[: schedule.known] = -1
    decided_at[cells] = cell_pass

    return Table(
        passes=len(passes),
        slots=len(layout.place),
        fed=np.array([*fed, 0]),
        position=np.array([*position, 0]),
        slot=np.array([*layout.slot, len(layout.place) - 1]),
        last_visible=np.array([*last_visible, -1]),
        row_pass=np.array([*row_pass, 0]),
        cells=np.array([*cells, count]),
        cell_row=np.array([*cell_row, 0]),
        cell_pass=np.array([*cell_pass, len(passes)]),
        row_start=np.array(row_start),
        cell_start=np.array(cell_start),
        end=np.array(layout.end),
        place=np.array(layout.place, np.int64),
        written=np.array(layout.written, np.int64),
        replaced=np.array(layout.replaced, np.int64),
        decided_at=decided_at,
    )


class _Layout(NamedTuple):
    """Slots of a cache, as :class:`Table` holds them, without padding but for its own slot."""

    slot: list[int]
    end: list[int]
    place: list[int]
    written: list[int]
    replaced: list[int]


def _layout(schedule: Schedule, fed: list[int], slot: list[int], row_start: list[int], ahead: bool) -> _Layout:
    """The slots of a schedule's rows, which feed ``fed`` and have the slots ``slot`` in the schedule."""
    never = len(schedule.passes)
    visible_at_once = schedule.slots if schedule.unwritten_visible else schedule.known
    place = list(range(schedule.slots))
    written = [-1 if number < visible_at_once else never for number in place]
    replaced = [never] * schedule.slots
    end = []
    own_slots = []

    stand_ins: dict[int, int] = {}  # place to the slot of its present stand-in
    for k, p in enumerate(schedule.passes):
        # A pass writes the slots of its rows before it attends to them.
        for row, position in zip(range(row_start[k], row_start[k + 1]), p.position, strict=True):
            own = slot[row]
            if own in stand_ins:
                replaced[stand_ins.pop(own)] = k

            stand_in = -1 < position != fed[row] <= schedule.grid**2
            if ahead and stand_in:
                own_slots.append(len(place))
                stand_ins[own] = len(place)
                place.append(own)
                written.append(k)
                replaced.append(never)
            else:
                own_slots.append(own)
                written[own] = min(written[own], k)
        end.append(1 + max([-1, *p.last_visible, *stand_ins.values()]))

    # The slot of padding, which nothing attends to.
    if ahead:
        place.append(0)
        written.append(never)
        replaced.append(never)
    return _Layout(own_slots, end, place, written, replaced)


class DevicePass(NamedTuple):
    """A :class:`Pass` as tensors on a device."""

    # cells, rows, fed, position: int64, see Pass; fed as in Table
    cells: Tensor
    rows: Tensor
    fed: Tensor
    position: Tensor
    slot: Tensor  # int64, counted from the first slot of the cache
    mask: Tensor | None  # bool [rows, end]; None: every row attends to all slots below end
    end: int  # slots below this one are attended to


class DeviceTable:
    """A :class:`Table` on a device, behind ``prefix`` slots of the condition, to which every row attends."""

    def __init__(self, table: Table, prefix: int, device: torch.device):
        self.host = table
        self.prefix = prefix

        self.fed = to_device(table.fed, device)
        self.position = to_device(table.position, device)
        self.slot = to_device(table.slot + prefix, device)
        self.last_visible = to_device(table.last_visible, device)
        self.row_pass = to_device(table.row_pass, device)
        self.row_start = to_device(table.row_start, device)

        self.cells = to_device(table.cells, device)
        self.cell_row = to_device(table.cell_row, device)
        self.row_in_pass = to_device(table.cell_row - table.row_start[table.cell_pass], device)
        self.cell_pass = to_device(table.cell_pass, device)
        self.cell_start = to_device(table.cell_start, device)
        self.decided_at = to_device(table.decided_at, device)

        # The condition's slots come before all others, in the cache as in the schedule.
        always = np.full(prefix, -1)
        self.place = to_device(np.concatenate([always, table.place]), device)
        self.written = to_device(np.concatenate([always, table.written]), device)
        self.replaced = to_device(np.concatenate([np.full(prefix, table.passes), table.replaced]), device)

        # The passes in which a slot and all slots before it are written: a row then sees all of them without a mask.
        self._filled = np.maximum.accumulate(table.written)

    def at(self, k: int) -> DevicePass:
        """Pass k, alone. The host does not wait."""
        t = self.host
        rows = slice(t.row_start[k], t.row_start[k + 1])
        cells = slice(t.cell_start[k], t.cell_start[k + 1])
        end = int(t.end[k])

        sees_all = end == 0 or self._filled[end - 1] <= k and t.last_visible[rows].min() == end - 1
        return DevicePass(
            cells=self.cells[cells],
            rows=self.row_in_pass[cells],
            fed=self.fed[rows],
            position=self.position[rows],
            slot=self.slot[rows],
            mask=None if sees_all else attention_mask(self, rows, self.prefix + end),
            end=self.prefix + end,
        )


def attention_mask(table: DeviceTable, rows: slice | Tensor, end: int) -> Tensor:
    """Which of the slots below ``end``, the condition's among them, the rows int64 [...] of a table attend to: bool
    [..., end].

    A row of pass k attends to the slots that are written in pass k or before and hold a place up to the row's last
    visible one, unless the token at that place was replaced in pass k or before. Padding attends to the condition only.
    """
    last_visible = table.last_visible[rows][..., None]
    k = table.row_pass[rows][..., None]
    before = table.place[:end] <= last_visible
    there = (table.written[:end] <= k) & (k < table.replaced[:end])
    return before & there


# ------------------------------------------------------------ schedules of next-token models


def next_token_passes(
    groups: Sequence[Sequence[int]], grid: int, cfg_steps: Sequence[int], start: int = 0, again: int = 0
) -> tuple[Pass, ...]:
    """Passes of a model that predicts the next cell of the raster, deciding groups of cells one after another.

    Cell c is predicted by a row at position c - 1. Until that cell is decided, a stand-in token is fed there: the
    nearest decided token in the row above, or the nearest of all. Every token is fed once after it is decided, and
    overwrites the stand-in's slot. The prefill predicts the first group, cell 0 in it.

    Args:
        groups: cells, a group a pass.
        grid: side of the grid.
        cfg_steps: of every group, see :class:`Pass`.
        start: number of cells that are decided already. If there are any, the first pass is empty.
        again: number of cells, the last of these, that are fed once more with the first group.
    """
    passes = []
    decided = set(range(start))
    pending = set(range(start - again, start))  # decided, but not fed yet
    if start:
        passes.append(Pass(cells=(), rows=()))

    for cells, cfg_step in zip(groups, cfg_steps, strict=True):
        if not passes:
            passes.append(Pass(cells=tuple(cells), rows=(0,) * len(cells)))
        else:
            before = [c - 1 for c in cells]
            positions = tuple(sorted({*pending, *before}))
            fed = [p if p in decided else _stand_in(p, decided, grid) for p in positions]
            passes.append(
                Pass(
                    cells=tuple(cells),
                    rows=tuple(positions.index(p) for p in before),
                    fed=tuple(fed),
                    position=positions,
                    slot=positions,
                    last_visible=positions,
                    cfg_step=cfg_step,
                )
            )
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
    """``cfg_step`` of every group of cells: passes over the first ``start`` of them, and then the tokens decided
    since.
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
