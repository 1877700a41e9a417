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
and is not replaced in pass k or before; see :meth:`.DeviceTable.mask`.

A :class:`Table` holds this for a whole schedule: :func:`serial_table` for passes that are fed one by one, and
:func:`window_table` for calls that may feed several. All arrays are on the host, and made once for a schedule;
``looks.py`` copies them to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .schedule import Pass, Row, Schedule


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """All fed rows, decided cells and slots of a schedule, int64 arrays.

    Shapes: P passes feed F rows and decide D cells, of L cells of the grid; the cache has S image slots, which are
    counted from the first one after the condition's slots. Fed rows and cells are in the order of their passes, and one
    more entry at the end of their arrays is padding.
    """

    passes: int  # P
    slots: int  # S; the last slot is for padding

    # For each fed row, [F + 1].
    fed: np.ndarray  # cell whose token is fed; 0 for transition tokens and padding
    special: np.ndarray  # number of the transition token that is fed; -1 for cells and padding
    position: np.ndarray  # see Row; padding 0
    slot: np.ndarray  # image slot that is written; padding writes to the last one
    last_visible: np.ndarray  # last place that the row attends to; padding -1
    row_pass: np.ndarray  # pass that feeds the row; padding 0

    # For each decided cell, [D + 1].
    cells: np.ndarray  # number of the cell; padding L
    cell_row: np.ndarray  # fed row that predicts the cell; padding 0
    cell_pass: np.ndarray  # pass that decides the cell; padding P

    # For each pass. Pass k feeds the rows row_start[k] to row_start[k + 1] - 1; cells likewise.
    row_start: np.ndarray  # [P + 1]
    cell_start: np.ndarray  # [P + 1]
    end: np.ndarray  # [P], a pass attends to image slots below this one only
    # bool [P], whether some row of the pass does not attend to some slot below its end. This is read only if passes are
    # fed one by one: a window always has a mask, because its passes attend to different slots.
    needs_mask: np.ndarray

    # For each slot, [S].
    place: np.ndarray  # place that it holds
    written: np.ndarray  # pass from which it is visible; -1: from the start; P: never
    replaced: np.ndarray  # pass from which another slot holds that place; P: never

    @property
    def slots_without_padding(self) -> int:
        """Image slots that a cache needs if every call feeds one pass, because rows are then never padded."""
        return self.slots - 1


@lru_cache(maxsize=64)
def serial_table(schedule: Schedule) -> Table:
    """The arrays of a schedule whose passes are fed one by one."""
    return _table(schedule, Slots.of(schedule))


@lru_cache(maxsize=64)
def window_table(schedule: Schedule) -> Table:
    """The arrays of a schedule of which one call may feed several passes."""
    return _table(schedule, WindowSlots.of(schedule))


def _table(schedule: Schedule, slots: Slots) -> Table:
    """The arrays of a schedule, with the slots of its passes and of the padding."""
    passes = schedule.passes
    numbers = np.arange(len(passes))

    # 1. Fed rows, pass by pass, and padding.
    rows = [row for p in passes for row in p.rows]
    rows.append(Row(position=0, place=0, last_visible=-1))
    rows_of_pass = [len(p.rows) for p in passes]
    row_start = np.append(0, np.cumsum(rows_of_pass))

    # 2. Decided cells, pass by pass, and padding. A pass counts the rows that predict its cells from its own first row.
    cells = [cell for p in passes for cell in p.cells]
    predicted_by = np.array([row for p in passes for row in p.predicted_by], np.int64)
    cells_of_pass = [len(p.cells) for p in passes]
    cell_start = np.append(0, np.cumsum(cells_of_pass))
    cell_row = predicted_by + np.repeat(row_start[:-1], cells_of_pass)

    # 3. A pass needs no mask if all slots below its end are written, and all its rows attend to the last of them.
    end = np.array(slots.end_of_pass)
    completed_by = np.append(-1, np.maximum.accumulate(slots.written))  # the pass that completes the slots below each
    some_slot_is_unwritten = completed_by[end] > numbers
    least_visible = np.array([min((row.last_visible for row in p.rows), default=-1) for p in passes])
    some_row_sees_less = least_visible < end - 1

    return Table(
        passes=len(passes),
        slots=len(slots.place),
        fed=np.array([row.cell for row in rows]),
        special=np.array([row.special for row in rows]),
        position=np.array([row.position for row in rows]),
        slot=np.array([*slots.of_rows, slots.padding]),
        last_visible=np.array([row.last_visible for row in rows]),
        row_pass=np.append(np.repeat(numbers, rows_of_pass), 0),
        cells=np.array([*cells, schedule.grid**2]),
        cell_row=np.append(cell_row, 0),
        cell_pass=np.append(np.repeat(numbers, cells_of_pass), len(passes)),
        row_start=row_start,
        cell_start=cell_start,
        end=end,
        needs_mask=some_slot_is_unwritten | some_row_sees_less,
        place=np.array(slots.place),
        written=np.array(slots.written),
        replaced=np.array(slots.replaced),
    )


class Slots:
    """The slots of passes that are fed one by one. The slot of a place has the same number, and the true token
    overwrites a stand-in. A place that rows attend to before it is written is blank until then.

    Attributes:
        place, written, replaced: an entry for each slot so far, see :class:`Table`.
        of_rows: the slot of each row that the passes so far feed.
        end_of_pass: for each pass so far, the slot below which its rows attend to slots.
        padding: the last slot, which padding rows write and no row attends to.
    """

    padding: int

    @classmethod
    def of(cls, schedule: Schedule) -> Slots:
        """The slots of all passes of a schedule, and of the padding."""
        slots = cls(schedule)
        # No sampler shows blanks, only comparisons with ZipAR's published code do.
        if schedule.unwritten_visible:
            slots.show_blank(range(schedule.known, len(slots.place)))
        for k, p in enumerate(schedule.passes):
            slots.write(k, p)
        slots.padding = slots.add(place=0, written=slots.never)
        return slots

    def __init__(self, schedule: Schedule):
        self.never = len(schedule.passes)
        rows = [row for p in schedule.passes for row in p.rows]
        highest = max((max(row.place, row.last_visible) for row in rows), default=-1)

        self.place = list(range(highest + 1))
        self.written = [-1 if place < schedule.known else self.never for place in self.place]
        self.replaced = [self.never] * len(self.place)
        self.of_rows: list[int] = []
        self.end_of_pass: list[int] = []

    def add(self, place: int, written: int) -> int:
        """Add a slot that holds a place from pass ``written`` on; returns the slot's number."""
        self.place.append(place)
        self.written.append(written)
        self.replaced.append(self.never)
        return len(self.place) - 1

    def show_blank(self, places: range) -> None:
        """Let rows attend to places from the start, before they are written, as in ZipAR's published code."""
        for place in places:
            self.written[place] = -1

    def write(self, k: int, p: Pass) -> None:
        """Add pass k, which writes the slots of its fed rows before these rows attend to them."""
        for row in p.rows:
            self._write_place(row.place, k)
        self.end_of_pass.append(1 + max((row.last_visible for row in p.rows), default=-1))

    def _write_place(self, place: int, k: int) -> None:
        """Let a row of pass k write the slot of its place."""
        self.of_rows.append(place)
        # A place that is fed again, or visible from the start, keeps its earlier pass.
        self.written[place] = min(self.written[place], k)


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
            # The row's token replaces the stand-in, or the blank, of its place.
            if row.place in self.stand_in_slot:
                self.replaced[self.stand_in_slot.pop(row.place)] = k

            if row.is_stand_in:
                slot = self.add(row.place, k)
                self.stand_in_slot[row.place] = slot
                self.of_rows.append(slot)
            else:
                self._write_place(row.place, k)

        # The slots of present stand-ins come after the slots of all places.
        last_visible = [row.last_visible for row in p.rows]
        self.end_of_pass.append(1 + max([-1, *last_visible, *self.stand_in_slot.values()]))
