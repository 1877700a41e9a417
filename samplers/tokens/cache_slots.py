"""Slots of the KV cache: which slot holds the keys and values of each token that a schedule feeds.

Some terms of ``schedule.py``: a *cell* is a square of the image's grid, and holds one token. A pass of the transformer
decides cells and feeds *rows*, each with one token. A token's *place* is its index in the order in which the model
reads tokens. A *stand-in* is fed at a place whose true token is not decided yet.

The slot of place p is slot p. If each call of the transformer feeds one pass, a stand-in is written to the slot of its
place, and the true token overwrites the stand-in later. But if one call feeds several passes (``jacobi.py``), the call
writes the slots of all these passes before any row attends to a slot, so no slot may be overwritten. Each stand-in then
has its own slot, after the slots of the places. Rows attend to this slot until a pass feeds the true token.

For example, ZipAR with window 1 on 3 x 3 cells (see ``schedule.py``) feeds tokens at the places 0 to 7. For calls of
several passes, it has 10 slots: 8 for the places, one for the stand-in at place 5, and one for padding::

    slot                 0  1  2  3  4  5  6  7  8  9
    place that it holds  0  1  2  3  4  5  6  7  5  padding
    written in pass      1  2  3  4  5  6  5  6  4  never
    replaced in pass     -  -  -  -  -  -  -  -  6  -

A fed row of pass k attends to a slot if the slot holds a place up to the row's ``last_visible``, a pass up to k writes
the slot, and no pass up to k replaces the slot. See :meth:`.DeviceTable.mask`.

A :class:`Table` holds the rows, cells and slots of a whole schedule. :func:`serial_table` is for calls that feed one
pass each, and :func:`window_table` is for calls that may feed several passes. All arrays are on the host and are
computed once per schedule. ``device_table.py`` copies the arrays to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .schedule import Pass, Row, Schedule


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """All fed rows, decided cells and slots of a schedule, as int64 arrays.

    Shapes: P passes feed F rows and decide D of the L cells of the grid. The cache has S image slots. Image slot 0 is
    the first slot after the condition's slots. Fed rows and cells are in the order of their passes. The arrays of fed
    rows and of cells end with a padding entry, which fills up images that have fewer rows or cells in a call.
    """

    passes: int  # P
    slots: int  # S; the last slot is for padding

    # For each fed row, [F + 1].
    fed_cell: np.ndarray  # cell whose token is fed; 0 for transition tokens and padding
    transition_token: np.ndarray  # index of the fed PAR transition token (par.py); -1 for cells and padding
    position: np.ndarray  # position at which the token is fed, see Row; 0 for padding
    slot: np.ndarray  # image slot that the row writes; the last slot for padding
    last_visible: np.ndarray  # last place that the row attends to; -1 for padding
    row_pass: np.ndarray  # pass that feeds the row; 0 for padding

    # For each decided cell, [D + 1].
    cells: np.ndarray  # the cell; L for padding
    cell_row: np.ndarray  # index of the fed row that predicts the cell; 0 for padding
    cell_pass: np.ndarray  # pass that decides the cell; P for padding

    # For each pass. Pass k feeds the rows row_start[k] to row_start[k + 1] - 1, and decides the cells cell_start[k] to
    # cell_start[k + 1] - 1.
    row_start: np.ndarray  # [P + 1]
    cell_start: np.ndarray  # [P + 1]
    end: np.ndarray  # [P], the rows of the pass attend only to image slots below this slot
    # bool [P], True if at least one row of the pass may not attend to all slots below the pass's end. Only calls that
    # feed one pass use this array. A call of several passes always has a mask, because its passes attend to different
    # slots.
    needs_mask: np.ndarray

    # For each slot, [S].
    place: np.ndarray  # place that the slot holds
    written: np.ndarray  # first pass in which the slot is visible; -1: from the start; P: never
    replaced: np.ndarray  # first pass in which a different slot holds the place; P: never

    @property
    def slots_without_padding(self) -> int:
        """Number of image slots that a cache needs if each call feeds one pass. Such calls have no padding rows."""
        return self.slots - 1


@lru_cache(maxsize=64)
def serial_table(schedule: Schedule) -> Table:
    """The table of a schedule for calls of the transformer that feed one pass each."""
    return _table(schedule, Slots.for_schedule(schedule))


@lru_cache(maxsize=64)
def window_table(schedule: Schedule) -> Table:
    """The table of a schedule for calls of the transformer that may feed several passes."""
    return _table(schedule, ManyPassSlots.for_schedule(schedule))


def _table(schedule: Schedule, slots: Slots) -> Table:
    """The table of a schedule. ``slots``: the slots of all passes of the schedule, and the padding slot."""
    passes = schedule.passes
    numbers = np.arange(len(passes))

    # 1. Fed rows, pass by pass, then padding.
    rows = [row for p in passes for row in p.rows]
    rows.append(Row(position=0, place=0, last_visible=-1))
    rows_of_pass = [len(p.rows) for p in passes]
    row_start = np.append(0, np.cumsum(rows_of_pass))

    # 2. Decided cells, pass by pass, and the index of the row that predicts each cell. A pass counts rows from its own
    # first row, but cell_row counts them from the first row of the schedule.
    cells = [cell for p in passes for cell in p.cells]
    predicted_by = np.array([row for p in passes for row in p.predicted_by], np.int64)
    cells_of_pass = [len(p.cells) for p in passes]
    cell_start = np.append(0, np.cumsum(cells_of_pass))
    cell_row = predicted_by + np.repeat(row_start[:-1], cells_of_pass)

    # 3. A pass needs no mask if all slots below its end are written, and if all its rows attend to the last of these
    # slots. From pass completed_by[e] on, all slots below slot e are written.
    end = np.array(slots.end_of_pass)
    completed_by = np.append(-1, np.maximum.accumulate(slots.written))
    some_slot_is_unwritten = completed_by[end] > numbers
    least_visible = np.array([min((row.last_visible for row in p.rows), default=-1) for p in passes])
    some_row_sees_less = least_visible < end - 1

    return Table(
        passes=len(passes),
        slots=len(slots.place),
        fed_cell=np.array([row.cell for row in rows]),
        transition_token=np.array([row.transition_token for row in rows]),
        position=np.array([row.position for row in rows]),
        slot=np.array([*slots.slot_of_row, slots.padding]),
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
    """The slots for calls that feed one pass each. The slot of place p is slot p, and the true token overwrites a
    stand-in. A slot is blank until a pass writes it.

    Attributes:
        place, written, replaced: an entry for each slot so far, see :class:`Table`.
        slot_of_row: the slot of each row that the passes so far feed.
        end_of_pass: for each pass so far, a slot. The rows of the pass attend only to slots below this slot.
        padding: the last slot. Padding rows write to it, and no row attends to it.
    """

    padding: int

    @classmethod
    def for_schedule(cls, schedule: Schedule) -> Slots:
        """The slots of all passes of a schedule, and the padding slot."""
        slots = cls(schedule)
        # No sampler lets rows attend to blank slots. Only comparisons with ZipAR's published code need this.
        if schedule.unwritten_visible:
            slots.make_blank_visible(range(schedule.known, len(slots.place)))
        for k, p in enumerate(schedule.passes):
            slots.add_pass(k, p)
        slots.padding = slots.add_slot(place=0, written=slots.never)
        return slots

    def __init__(self, schedule: Schedule):
        self.never = len(schedule.passes)
        rows = [row for p in schedule.passes for row in p.rows]
        highest = max((max(row.place, row.last_visible) for row in rows), default=-1)

        self.place = list(range(highest + 1))
        self.written = [-1 if place < schedule.known else self.never for place in self.place]
        self.replaced = [self.never] * len(self.place)
        self.slot_of_row: list[int] = []
        self.end_of_pass: list[int] = []

    def add_slot(self, place: int, written: int) -> int:
        """Add a slot that holds a place and is visible from pass ``written`` on. Returns the index of the slot."""
        self.place.append(place)
        self.written.append(written)
        self.replaced.append(self.never)
        return len(self.place) - 1

    def make_blank_visible(self, places: range) -> None:
        """Let rows attend to ``places`` from the start, while they are still blank, as ZipAR's published code does."""
        for place in places:
            self.written[place] = -1

    def add_pass(self, k: int, p: Pass) -> None:
        """Add the next pass, k. The pass writes the slots of all its fed rows before these rows attend to any slot."""
        for row in p.rows:
            self._write_place(row.place, k)
        self.end_of_pass.append(1 + max((row.last_visible for row in p.rows), default=-1))

    def _write_place(self, place: int, k: int) -> None:
        """Let a row of pass k write the slot of the row's place."""
        self.slot_of_row.append(place)
        # If the place was fed in an earlier pass or was visible from the start, the earlier entry stays.
        self.written[place] = min(self.written[place], k)


class ManyPassSlots(Slots):
    """The slots for calls that may feed several passes. Every stand-in has its own slot.

    If rows attend to a place before a pass writes it, the place also has its own blank slot. The slot of the place does
    not stay blank during a call, because a later pass of the same call writes it.
    """

    def __init__(self, schedule: Schedule):
        super().__init__(schedule)
        # For each place whose true token was not fed yet, the slot of its stand-in or its blank slot.
        self.stand_in_slot: dict[int, int] = {}

    def make_blank_visible(self, places: range) -> None:
        for place in places:
            self.stand_in_slot[place] = self.add_slot(place, -1)

    def add_pass(self, k: int, p: Pass) -> None:
        for row in p.rows:
            # The row's token replaces the stand-in or the blank slot of its place.
            if row.place in self.stand_in_slot:
                self.replaced[self.stand_in_slot.pop(row.place)] = k

            if row.is_stand_in:
                slot = self.add_slot(row.place, k)
                self.stand_in_slot[row.place] = slot
                self.slot_of_row.append(slot)
            else:
                self._write_place(row.place, k)

        # The slots of stand-ins and blanks come after the slots of all places. The end must be after all of these
        # slots that are not replaced yet.
        last_visible = [row.last_visible for row in p.rows]
        self.end_of_pass.append(1 + max([-1, *last_visible, *self.stand_in_slot.values()]))
