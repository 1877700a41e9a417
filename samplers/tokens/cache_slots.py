"""Slots of the KV cache: which slot holds the keys and values of each token that a schedule feeds.

Some terms of ``schedule.py``: a *cell* is a square of the image's grid, and holds one token. A pass of the transformer
decides cells and feeds tokens; each is a *fed row*. A token's *place* is its index in the order in which the model
reads tokens. A *stand-in* is fed at a place whose true token is not decided yet.

The slot of place p is slot p. If each call of the transformer feeds one pass, a stand-in is written to the slot of its
place, and the true token overwrites the stand-in later (:func:`serial_slots`). But if one call feeds several passes
(``jacobi.py``), the call writes the slots of all these passes before any fed row attends to a slot, so no slot may be
overwritten. Each stand-in then has its own slot, after the slots of the places (:func:`window_slots`). Fed rows attend
to this slot until a pass feeds the true token.

For example, ZipAR with window 1 on 3 x 3 cells (see ``schedule.py``) feeds tokens at the places 0 to 7. For calls of
several passes, it has 10 slots: 8 for the places, one for the stand-in at place 5, and one for padding::

    slot                 0  1  2  3  4  5  6  7  8  9
    place that it holds  0  1  2  3  4  5  6  7  5  padding
    written in pass      1  2  3  4  5  6  5  6  4  never
    replaced in pass     -  -  -  -  -  -  -  -  6  -

A fed row of pass k attends to a slot if the slot holds a place up to the row's ``last_visible``, a pass up to k writes
the slot, and no pass up to k replaces the slot. See :meth:`.DeviceTable.mask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .schedule import Pass, Schedule


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheSlots:
    """The slots that a schedule needs, as int64 arrays on the host.

    Shapes: P passes have F fed rows. The cache has S image slots. Image slot 0 is the first slot after the condition's
    slots. The last slot is for padding: padding rows write to it, and no fed row attends to it.
    """

    count: int  # S

    # For each fed row in the order of the passes, and then for padding, [F + 1].
    of_row: np.ndarray  # slot that the row writes; the last slot for padding

    # For each pass, [P].
    end: np.ndarray  # the rows of the pass attend only to slots below this slot
    # bool, True if at least one row of the pass may not attend to all slots below the pass's end. Only calls that feed
    # one pass use this array. A call of several passes always has a mask, because its passes attend to different slots.
    needs_mask: np.ndarray

    # For each slot, [S].
    place: np.ndarray  # place that the slot holds; 0 for padding
    written: np.ndarray  # first pass in which the slot is visible; -1: from the start; P: never
    replaced: np.ndarray  # first pass in which a different slot holds the place; P: never

    @property
    def count_without_padding(self) -> int:
        """Number of image slots that a cache needs if each call feeds one pass. Such calls have no padding rows."""
        return self.count - 1


@lru_cache(maxsize=64)
def serial_slots(schedule: Schedule) -> CacheSlots:
    """The slots of a schedule for calls of the transformer that feed one pass each."""
    return _slots(schedule, own_slots_for_stand_ins=False)


@lru_cache(maxsize=64)
def window_slots(schedule: Schedule) -> CacheSlots:
    """The slots of a schedule for calls of the transformer that may feed several passes."""
    return _slots(schedule, own_slots_for_stand_ins=True)


def _slots(schedule: Schedule, own_slots_for_stand_ins: bool) -> CacheSlots:
    """The slots of a schedule. If ``own_slots_for_stand_ins`` is False, the true token overwrites a stand-in."""
    passes = schedule.passes
    never = len(passes)

    # 1. A slot for each place. The known cells are in the cache from the start.
    highest = max((max(row.place, row.last_visible) for p in passes for row in p.fed_rows), default=-1)
    place = list(range(highest + 1))
    written = [-1 if slot < schedule.known else never for slot in place]
    replaced = [never] * len(place)

    # 2. The slots of the fed rows, pass by pass. A pass writes the slots of all its rows before these rows attend to
    #    any slot.
    of_row: list[int] = []
    end: list[int] = []
    slot_of_stand_in: dict[int, int] = {}  # for each place that a stand-in with its own slot holds, this slot
    for k, p in enumerate(passes):
        for row in p.fed_rows:
            if row.place in slot_of_stand_in:
                replaced[slot_of_stand_in.pop(row.place)] = k

            if row.is_stand_in and own_slots_for_stand_ins:
                slot = len(place)
                slot_of_stand_in[row.place] = slot
                place.append(row.place)
                written.append(k)
                replaced.append(never)
            else:
                slot = row.place
                written[slot] = min(written[slot], k)  # an earlier pass may have fed this place
            of_row.append(slot)

        # The slots of stand-ins come after the slots of all places. The end must be after all of these slots that are
        # not replaced yet.
        visible = [row.last_visible for row in p.fed_rows]
        end.append(1 + max([*visible, *slot_of_stand_in.values()], default=-1))

    # 3. The slot for padding.
    of_row.append(len(place))
    place.append(0)
    written.append(never)
    replaced.append(never)

    return CacheSlots(
        count=len(place),
        of_row=np.array(of_row),
        end=np.array(end),
        needs_mask=_needs_mask(passes, np.array(end), np.array(written)),
        place=np.array(place),
        written=np.array(written),
        replaced=np.array(replaced),
    )


def _needs_mask(passes: Sequence[Pass], end: np.ndarray, written: np.ndarray) -> np.ndarray:
    """For each pass, whether it needs an attention mask, bool [P]. A pass needs none if all slots below its end are
    written, and if all its rows attend to the last of these slots.

    ``end``, ``written``: see :class:`CacheSlots`.
    """
    # From pass completed_by[e] on, all slots below slot e are written.
    completed_by = np.append(-1, np.maximum.accumulate(written))
    some_slot_is_unwritten = completed_by[end] > np.arange(len(passes))

    least_visible = np.array([min((row.last_visible for row in p.fed_rows), default=-1) for p in passes])
    some_row_sees_less = least_visible < end - 1
    return some_slot_is_unwritten | some_row_sees_less
