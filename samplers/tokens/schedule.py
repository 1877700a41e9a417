"""Decoding schedules of discrete tokens: the cells that each pass of the transformer decides, and the rows fed to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Pass:
    """One pass of the transformer. The first pass of a schedule is the prefill, whose input is the condition only."""

    cells: tuple[int, ...]  # cells that the pass decides, as raster numbers
    rows: tuple[int, ...]  # for each of cells the index of the fed row that predicts it; 0 in the prefill
    fed: tuple[int, ...] = ()  # cells whose tokens are fed, one row each
    special: int = 0  # number of PAR's transition tokens fed behind them
    position: tuple[int, ...] = ()  # position of each fed row: a cell, or -1 for a transition token
    slot: tuple[int, ...] = ()  # cache slot of each fed row, counted from the first image slot
    last_visible: tuple[int, ...] = ()  # highest slot that each fed row attends to
    clock: int = -1  # step counter compared with cfg_interval, counted as the reference does


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
        return 1 + max((s for p in self.passes for s in (*p.slot, *p.last_visible)), default=-1)

    @cached_property
    def fixed_at(self) -> np.ndarray:
        """int32 [G, G]: index of the pass that decides each cell; -1 for known cells."""
        return self.table.decided_at.astype(np.int32).reshape(self.grid, self.grid)

    @cached_property
    def table(self) -> Table:
        """The schedule for passes that are fed one after another."""
        return _table(self, ahead=False)

    @cached_property
    def ahead(self) -> Table:
        """The schedule for several passes that are fed at once: a stand-in has a slot of its own, behind the others, to which rows attend
        up to the pass that feeds the true token."""
        return _table(self, ahead=True)


@dataclass(frozen=True, eq=False)
class Table:
    """All rows and cells of a schedule in the order of their passes, int64; the last entry of a row's or a cell's array is padding."""

    passes: int  # number of passes P
    slots: int  # image slots of the cache
    fed: np.ndarray  # cell whose token a row feeds; N + 1 + i for transition token i
    position: np.ndarray  # see Pass; padding 0
    slot: np.ndarray  # cache slot of a row, from the first image slot; padding writes to the last one
    visible: np.ndarray  # bool [rows, slots], slots that a row attends to
    # row_start, cell_start: [P + 1], the first row and cell of each pass, and their numbers
    row_start: np.ndarray
    cell_start: np.ndarray
    pass_end: np.ndarray  # [P], slots below this one are attended to in a pass
    cells: np.ndarray  # cells in order of decision; padding N
    cell_row: np.ndarray  # row that predicts a cell
    cell_pass: np.ndarray  # pass that decides a cell; padding P
    # [N] by cell: pass that decides it; -1 for known cells, P for cells that the schedule leaves out
    decided_at: np.ndarray


def _table(schedule: Schedule, ahead: bool) -> Table:
    passes, count = schedule.passes, schedule.grid**2
    fed = np.array([c for p in passes for c in (*p.fed, *range(count + 1, count + 1 + p.special))] + [0])
    position = np.array([n for p in passes for n in p.position] + [0])
    row_start = np.cumsum([0, *(len(p.position) for p in passes)])
    cell_start = np.cumsum([0, *(len(p.cells) for p in passes)])
    # Slots: those of the schedule, and with ``ahead`` one for every stand-in and one for padding.
    logical = np.array([s for p in passes for s in p.slot], np.int64)
    stand_in = ((fed <= count) & (position >= 0) & (fed != position))[:-1] & ahead
    slots = schedule.slots + (int(stand_in.sum()) + 1 if ahead else 0)
    slot = np.append(logical, slots - 1)
    slot[:-1][stand_in] = schedule.slots + np.arange(stand_in.sum())
    # holder: the slot that holds each slot of the schedule after a pass; -1: not written.
    every = np.arange(schedule.slots)
    holder = np.where((every < schedule.known) | schedule.unwritten_visible, every, -1)
    last_visible = [n for p in passes for n in p.last_visible]
    visible = np.zeros((len(fed), slots), bool)
    for first, last in zip(row_start, row_start[1:], strict=False):
        holder[logical[first:last]] = slot[first:last]
        for row in range(first, last):
            seen = holder[: last_visible[row] + 1]
            visible[row, seen[seen >= 0]] = True
    ends = np.max(np.where(visible, np.arange(1, slots + 1), 0), axis=1, initial=0)
    cells = np.array([c for p in passes for c in p.cells] + [count])
    cell_pass = np.repeat(np.arange(len(passes) + 1), [*(len(p.cells) for p in passes), 1])
    cell_row = np.array([int(row_start[k]) + r for k, p in enumerate(passes) for r in p.rows] + [0])
    decided_at = np.where(np.arange(count) < schedule.known, -1, len(passes))
    decided_at[cells[:-1]] = cell_pass[:-1]
    pass_end = np.array([ends[a:b].max(initial=0) for a, b in zip(row_start, row_start[1:], strict=False)])
    rows = (fed, position, slot, visible, row_start, cell_start, pass_end)
    return Table(len(passes), slots, *rows, cells, cell_row, cell_pass, decided_at)


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


def on_device(schedule: Schedule, prefix: int, device: torch.device) -> list[DevicePass]:
    """A schedule's passes behind ``prefix`` cache slots of the condition, copied before the first one, so that none waits."""
    t = schedule.table
    visible = np.pad(t.visible, ((0, 0), (prefix, 0)), constant_values=True)
    fed, position, slot, cells, seen = (
        torch.from_numpy(a).to(device) for a in (t.fed, t.position, t.slot + prefix, t.cells, visible)
    )
    cell_row = torch.from_numpy(t.cell_row - t.row_start[t.cell_pass.clip(max=t.passes - 1)]).to(device)
    out = []
    for k in range(t.passes):
        rows, own, end = slice(*t.row_start[k : k + 2]), slice(*t.cell_start[k : k + 2]), prefix + int(t.pass_end[k])
        mask = None if visible[rows, :end].all() else seen[rows, :end]
        out.append(DevicePass(cells[own], cell_row[own], fed[rows], position[rows], slot[rows], mask, end))
    return out


def next_token_passes(
    groups: Sequence[Sequence[int]], grid: int, clocks: Sequence[int], start: int = 0, again: int = 0
) -> tuple[Pass, ...]:
    """Passes of a model that predicts the next cell of the raster, deciding groups of cells one after another, with a clock each.

    Cell c is predicted by a row at position c - 1. Until that cell is decided, a stand-in token is fed there: the nearest
    decided token in the row above, or the nearest of all. Every token is fed once after it is decided, and overwrites the
    stand-in's slot. The prefill predicts the first group, cell 0 in it. Or ``start`` cells are decided already: the first pass is then
    empty, and the last ``again`` of these cells are fed once more with the first group.
    """
    passes = [Pass((), ())] if start else []
    decided = set(range(start))
    pending = set(range(start - again, start))  # decided, but not fed yet
    for k, cells in enumerate(groups):
        if not k and not start:
            passes.append(Pass(tuple(cells), (0,) * len(cells)))
        else:
            before = [c - 1 for c in cells]
            positions = sorted({*pending, *before})
            fed = tuple(p if p in decided else _stand_in(p, decided, grid) for p in positions)
            rows = tuple(positions.index(p) for p in before)
            position = tuple(positions)
            passes.append(Pass(tuple(cells), rows, fed, 0, position, position, position, clocks[k]))
            pending.clear()
        decided.update(cells)
        pending.update(cells)
    return tuple(passes)


def _stand_in(position: int, decided: set[int], grid: int) -> int:
    """The decided cell whose token is fed at a position that is not decided yet."""
    row, column = divmod(position, grid)
    above = [c for c in range((row - 1) * grid, row * grid) if c in decided] if row else []
    if above:
        return min(above, key=lambda c: (abs(c % grid - column), c))
    return min(decided, key=lambda c: ((c // grid - row) ** 2 + (c % grid - column) ** 2, c))


@lru_cache(maxsize=4)
def raster(grid: int) -> Schedule:
    """One cell per pass: G * G passes."""
    cells = range(grid * grid)
    return Schedule(grid, next_token_passes([[c] for c in cells], grid, [c - 1 for c in cells]))


def group_clocks(groups: Sequence[Sequence[int]], start: int) -> list[int]:
    """Clocks that count passes over the first ``start`` of them, and then the tokens decided since."""
    clocks, since = [], 0
    for k, cells in enumerate(groups):
        clocks.append(k - 1 if k < start else since)
        since += len(cells) if k >= start else 0
    return clocks
