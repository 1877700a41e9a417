"""Slots of the KV cache: which slot holds the keys and values of each token that a schedule feeds.

Some terms of ``schedule.py``: a *cell* is a square of the image's grid, and holds one token. A pass of the transformer
decides cells and feeds tokens; each fed token is a *fed row*. A token's *place* is its index in the order in which the
model reads tokens. A *stand-in* is fed at a place whose true token is not decided yet.

The slot of place p is slot p. If each call of the transformer feeds one pass, a stand-in is written to the slot of its
place, and the true token overwrites the stand-in later (:func:`serial_slots`). But if one call feeds several passes
(``jacobi.py``), the call writes the slots of all these passes before any fed row attends to a slot, so no slot may be
overwritten. Each stand-in then has its own slot, after the slots of the places (:func:`window_slots`). Fed rows attend
to this slot until a pass feeds the true token.

For example, ZipAR with window 1 on 3 x 3 cells (see ``schedule.py``) feeds tokens at the places 0 to 7. For calls of
several passes, it has 10 slots: 8 for the places, one for the stand-in at place 5, and one for padding::

    slot                 0  1  2  3  4  5  6  7  8  9
    place that it holds  0  1  2  3  4  5  6  7  5  padding
    written in pass      1  2  3  4  5  6  5  6  4  NEVER
    replaced in pass     N  N  N  N  N  N  N  N  6  N        (N: NEVER)

A fed row of pass k attends to a slot if the slot holds a place up to the row's ``last_visible``, a pass up to k writes
the slot, and no pass up to k replaces the slot. See :meth:`.DeviceTable.mask`. In the same example, the rows of a pass
attend only to slots below an ``end``, and a pass that is fed alone may need a mask to exclude some of these slots::

    pass                                 0  1  2  3  4  5  6
    end, each stand-in in its own slot   0  1  2  3  9  9  8
    end, one pass in each call           0  1  2  3  6  7  8
    needs a mask, one pass in each call  -  -  -  -  x  x  x

Fed alone, pass 4 writes the slots 3 and 5, so its end is slot 6. It needs a mask for two reasons: slot 4 is not written
yet, and the fed row at place 3 does not attend to slot 5. Pass 1 attends to all slots below its end, so it needs no
mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .schedule import Pass, Schedule

# Two numbers that stand for a pass: one before all passes, and one after all passes.
ALWAYS = -1
NEVER = np.iinfo(np.int64).max


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
    written: np.ndarray  # first pass in which the slot is visible, ALWAYS or NEVER
    replaced: np.ndarray  # first pass in which a different slot holds the place, or NEVER

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


@dataclass
class _Slot:
    """The facts about one slot; the fields are columns of :class:`CacheSlots`."""

    place: int
    written: int = NEVER
    replaced: int = NEVER


def _slots(schedule: Schedule, own_slots_for_stand_ins: bool) -> CacheSlots:
    """The slots of a schedule. If ``own_slots_for_stand_ins`` is False, the true token overwrites a stand-in."""
    passes = schedule.passes
    all_rows = [row for p in passes for row in p.fed_rows]
    places = 1 + max((max(row.place, row.last_visible) for row in all_rows), default=-1)  # number of places

    # 1. A slot for each place. The known cells are in the cache from the start.
    slots = [_Slot(place, written=ALWAYS if place < schedule.known else NEVER) for place in range(places)]

    # 2. Go through the fed rows in the order of the passes. Stand-ins add their slots after the slots of the places.
    of_row = []
    stand_in_at: dict[int, _Slot] = {}  # for each place that a stand-in's own slot holds now, this slot
    for k, p in enumerate(passes):
        for row in p.fed_rows:
            # Any token that is fed at the place of a stand-in replaces it.
            if row.place in stand_in_at:
                stand_in_at.pop(row.place).replaced = k

            if own_slots_for_stand_ins and row.is_stand_in:
                slot = _Slot(row.place, written=k)
                of_row.append(len(slots))
                slots.append(slot)
                stand_in_at[row.place] = slot
            else:
                slot = slots[row.place]
                of_row.append(row.place)
                slot.written = min(slot.written, k)  # the first pass that writes the slot

    # 3. The last slot is for padding.
    of_row.append(len(slots))
    slots.append(_Slot(place=0))

    written = np.array([slot.written for slot in slots])
    replaced = np.array([slot.replaced for slot in slots])
    end, needs_mask = _ends_and_masks(passes, written, replaced, places)
    return CacheSlots(
        count=len(slots),
        of_row=np.array(of_row),
        end=end,
        needs_mask=needs_mask,
        place=np.array([slot.place for slot in slots]),
        written=written,
        replaced=replaced,
    )


def _ends_and_masks(
    passes: Sequence[Pass], written: np.ndarray, replaced: np.ndarray, places: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each pass, the end of the slots to which its rows attend, int64 [P], and whether the pass needs an attention
    mask, bool [P].

    ``written``, ``replaced``: see :class:`CacheSlots`. The slots of stand-ins come after the slots of the ``places``.
    """
    ends = []
    needs_mask = []
    for k, p in enumerate(passes):
        last_visible = [row.last_visible for row in p.fed_rows] or [-1]

        # 1. The rows attend to places up to their last_visible, and to stand-ins that are in the cache in this pass.
        is_present = (written[places:] <= k) & (k < replaced[places:])
        present_stand_ins = places + is_present.nonzero()[0]  # their slots
        end = 1 + max(last_visible + present_stand_ins.tolist())
        ends.append(end)

        # 2. A mask is needed if a slot below the end is not written yet, or if a row does not attend to the last slot.
        some_slot_is_unwritten = bool((written[:end] > k).any())
        some_row_sees_less = min(last_visible) < end - 1
        needs_mask.append(some_slot_is_unwritten or some_row_sees_less)
    return np.array(ends), np.array(needs_mask)
