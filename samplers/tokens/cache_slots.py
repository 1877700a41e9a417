"""Slots of the KV cache: from the places of a schedule (``schedule.py``) to where keys and values are kept.

The slot of a place has the place's number. If passes are fed one by one, a stand-in is written to the slot of its
place, and the true token overwrites it later. If one call feeds several passes (``jacobi.py``), it writes all their
slots before any row attends to them. Every stand-in then has its own slot, after the slots of the places, and rows of
passes before the one that feeds the true token attend to that slot. ZipAR's example of ``schedule.py``, window 1 on
3 x 3 cells, then has two more slots than places, one for the stand-in at place 5 and one for padding::

    slot                 0  1  2  3  4  5  6  7  8  9
    place that it holds  0  1  2  3  4  5  6  7  5  padding
    written in pass      1  2  3  4  5  6  5  6  4  never
    replaced in pass     -  -  -  -  -  -  -  -  6  -

A fed row of pass k attends to a slot if it holds a place that is visible to the row, is written in pass k or before,
and is not replaced in pass k or before; see :func:`.attention_mask`.

All arrays are on the host, and made once for a schedule; ``looks.py`` copies them to the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .schedule import Pass, Row, Schedule


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """All fed rows, cells and slots of a schedule, int64 arrays.

    Fed rows and cells are in the order of their passes, and the last entry of each of their arrays is padding.
    """

    passes: int  # number of passes P
    slots: int  # image slots of the cache S; the last one is for padding

    # An entry for each fed row.
    fed: np.ndarray  # cell whose token is fed; 0 for transition tokens and padding
    special: np.ndarray  # number of the transition token that is fed; -1 for cells and padding
    position: np.ndarray  # see Row; padding 0
    slot: np.ndarray  # slot that is written, from the first image slot; padding writes to the last one
    last_visible: np.ndarray  # last place that the row attends to; padding -1
    row_pass: np.ndarray  # pass that feeds the row; padding 0

    # An entry for each cell, in the order in which they are decided.
    cells: np.ndarray  # number of the cell; padding N
    cell_row: np.ndarray  # fed row that predicts the cell; padding 0
    cell_pass: np.ndarray  # pass that decides the cell; padding P

    # An entry for each pass.
    row_start: np.ndarray  # [P + 1], first fed row of each pass, then the number of rows
    cell_start: np.ndarray  # [P + 1], first cell of each pass, then the number of cells
    end: np.ndarray  # [P], a pass attends to slots below this one only

    # An entry for each slot, [S].
    place: np.ndarray  # place that it holds
    written: np.ndarray  # pass from which it is visible; -1: from the start; P: never
    replaced: np.ndarray  # pass from which another slot holds that place; P: never


@lru_cache(maxsize=64)
def table_of(schedule: Schedule, one_by_one: bool = False) -> Table:
    """The arrays of a schedule. ``one_by_one``: whether every call feeds one pass; else a call may feed several."""
    passes = schedule.passes

    # 1. Fed rows, pass by pass.
    numbers = np.arange(len(passes))
    rows = [row for p in passes for row in p.rows]
    rows.append(Row(position=0, place=0, last_visible=-1))  # padding
    position, _, last_visible, fed, special = np.array(rows).T.copy()  # the fields of Row
    row_counts = [len(p.rows) for p in passes]
    row_start = np.append(0, np.cumsum(row_counts))

    # 2. Decided cells, pass by pass.
    cells = [len(p.cells) for p in passes]
    cell_start = np.append(0, np.cumsum(cells))

    cell_row = _joined((p.predicted_by for p in passes), 0)
    cell_row[:-1] += np.repeat(row_start[:-1], cells)
    cell_pass = np.repeat(numbers, cells)

    # 3. The slots of the cache.
    slots = Slots(schedule) if one_by_one else WindowSlots(schedule)
    if schedule.unwritten_visible:
        slots.show_blank(range(schedule.known, len(slots.place)))
    for k, p in enumerate(passes):
        slots.write(k, p)
    padding = slots.add(place=0, written=len(passes))

    return Table(
        passes=len(passes),
        slots=len(slots.place),
        fed=fed,
        special=special,
        position=position,
        slot=_joined([slots.of_rows], padding),
        last_visible=last_visible,
        row_pass=np.append(np.repeat(numbers, row_counts), 0),
        cells=_joined((p.cells for p in passes), schedule.grid**2),
        cell_row=cell_row,
        cell_pass=np.append(cell_pass, len(passes)),
        row_start=row_start,
        cell_start=cell_start,
        end=np.array(slots.ends),
        place=np.array(slots.place),
        written=np.array(slots.written),
        replaced=np.array(slots.replaced),
    )


def slots_of(schedule: Schedule, one_by_one: bool) -> int:
    """Image slots that a cache needs for a schedule. The slot of padding is needed only where a call feeds several
    passes.
    """
    slots = table_of(schedule, one_by_one).slots
    return slots - 1 if one_by_one else slots


def _joined(parts: Iterable[Iterable[int]], padding: int) -> np.ndarray:
    """The numbers of all parts one after another, and then the number ``padding``."""
    joined: list[int] = []
    for part in parts:
        joined += part
    return np.array([*joined, padding])


class Slots:
    """The slots of passes that are fed one by one. The slot of a place has the same number, and the true token
    overwrites a stand-in. A place that rows attend to before it is written is blank until then.
    """

    def __init__(self, schedule: Schedule):
        self.never = len(schedule.passes)
        rows = [row for p in schedule.passes for row in p.rows]
        highest = max((max(row.place, row.last_visible) for row in rows), default=-1)

        # place, written, replaced: as in Table. ends is Table.end and of_rows is Table.slot, of the passes so far.
        self.place = list(range(highest + 1))
        self.written = [-1 if place < schedule.known else self.never for place in self.place]
        self.replaced = [self.never] * len(self.place)
        self.ends: list[int] = []
        self.of_rows: list[int] = []

    def show_blank(self, places: range) -> None:
        """Let rows attend to places from the start, before they are written."""
        for place in places:
            self.written[place] = -1

    def add(self, place: int, written: int) -> int:
        """Add a slot that holds a place from pass ``written`` on; returns the slot's number."""
        self.place.append(place)
        self.written.append(written)
        self.replaced.append(self.never)
        return len(self.place) - 1

    def write(self, k: int, p: Pass) -> None:
        """Add pass k, which writes the slots of its fed rows before these rows attend to them."""
        for row in p.rows:
            self.of_rows.append(row.place)
            # A place that is fed again, or visible from the start, keeps its earlier pass.
            self.written[row.place] = min(self.written[row.place], k)
        self.ends.append(1 + max((row.last_visible for row in p.rows), default=-1))


class WindowSlots(Slots):
    """The slots of passes that are fed several in one call: every stand-in has its own slot. A place that is attended
    to before it is written also has its own blank slot, because a later pass of the same call already writes the
    place's slot.
    """

    def __init__(self, schedule: Schedule):
        super().__init__(schedule)
        self.stand_in_slot: dict[int, int] = {}  # for each place whose true token was not fed yet

    def show_blank(self, places: range) -> None:
        for place in places:
            self.stand_in_slot[place] = self.add(place, -1)

    def write(self, k: int, p: Pass) -> None:
        for row in p.rows:
            place = row.place
            if place in self.stand_in_slot:
                self.replaced[self.stand_in_slot.pop(place)] = k

            if row.is_stand_in:
                self.stand_in_slot[place] = self.add(place, k)
                self.of_rows.append(self.stand_in_slot[place])
            else:
                self.of_rows.append(place)
                self.written[place] = min(self.written[place], k)
        # The slots of present stand-ins come after the slots of all places.
        last_visible = [row.last_visible for row in p.rows]
        self.ends.append(1 + max([-1, *last_visible, *self.stand_in_slot.values()]))
