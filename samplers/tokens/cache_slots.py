"""Slots of the KV cache: which slot holds the keys and values of each token that a schedule feeds.

For *cell*, *place*, *stand-in* and ``last_visible`` see ``schedule.py``. It also has the example that this file uses,
ZipAR with window 1 on 3 x 3 cells::

    pass   feeds the tokens at the places
    0      none: the prefill
    1      0
    2      1
    3      2
    4      3 and 5; at place 5, the pass feeds a stand-in, because cell 5 is not decided yet
    5      4 and 6
    6      5 and 7; at place 5, the pass now feeds the true token

The *end* of a pass is 1 + the largest slot that a row of the pass may *see*, which means attend to. With serial slots,
slots are places: slot i holds place i. With window slots, a stand-in's slot may be larger. The slots of the condition
come before slot 0, and every fed row sees all of them. Of the other slots, a fed row sees only slots that hold a place
up to its ``last_visible``.

Where the cache holds the two tokens of place 5 depends on the number of passes in each call of the transformer, so the
rest of this text has two sections.

**One pass in each call** (:func:`serial_slots`). A stand-in is written to the slot of its place, and later the true
token overwrites it. These are the slots below the end of each pass, after the pass has written its own slots. A number
is a place whose true token is in its slot, S is the stand-in, and a dot is a slot that is not written yet::

    pass   feeds places   slots below the end   end   needs a mask
    3      2              0 1 2                 3     no
    4      3 and 5        0 1 2 3 . S           6     yes: slot 4 is not written; the row at place 3 must not see S
    5      4 and 6        0 1 2 3 4 S 6         7     yes: the row at place 4 must not see the places 5 and 6
    6      5 and 7        0 1 2 3 4 5 6 7       8     yes: the row at place 5 must not see the places 6 and 7

The end is 1 + the largest ``last_visible`` of the rows. A pass needs no mask if all its rows see all slots below its
end.

**Several passes in each call** (:func:`window_slots`, for ``jacobi.py``). Such a call writes the slots of all its
passes before any fed row reads a slot. If the call feeds the passes 4 to 6, the rows of pass 5 must see the stand-in,
and the rows of pass 6 must see the true token. So both tokens need a slot: every stand-in has its own slot, after the
slots of the places. The example has 10 slots: 8 for the places, one for the stand-in, and one for padding::

    slot                 0  1  2  3  4  5  6  7  8  9
    place that it holds  0  1  2  3  4  5  6  7  5  padding
    written in pass      1  2  3  4  5  6  5  6  4  NEVER
    replaced in pass     N  N  N  N  N  N  N  N  6  N        (N: NEVER)

    pass                 0  1  2  3  4  5  6
    end                  0  1  2  3  9  9  8

A fed row of pass k sees a slot if three conditions hold: the slot holds a place up to the row's ``last_visible``, a
pass up to k writes the slot, and no pass up to k replaces the slot. :meth:`.DeviceTable.mask` computes this mask. In
the passes 4 and 5, the end is 9, because slot 8 holds the stand-in. The calls always have a mask, because their passes
see different slots.
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
    end: np.ndarray  # 1 + the largest slot that a row of the pass may see; 0 if the pass feeds no rows
    # bool, False if all rows of the pass attend to all slots below the pass's end, so that no mask is needed. True for
    # all passes of window_slots.
    needs_mask: np.ndarray

    # For each slot, [S].
    place: np.ndarray  # place that the slot holds; 0 for padding
    written: np.ndarray  # first pass whose rows may read the slot; ALWAYS for known cells, NEVER for padding
    replaced: np.ndarray  # first pass in which another slot holds the place instead; NEVER if the slot keeps its place

    @property
    def count_without_padding(self) -> int:
        """Number of image slots that a cache needs if each call feeds one pass. Such calls have no padding rows."""
        return self.count - 1


@dataclass
class _Slot:
    """One slot. The fields are an entry of the arrays of the same names in :class:`CacheSlots`."""

    place: int
    written: int = NEVER
    replaced: int = NEVER


@lru_cache(maxsize=64)
def serial_slots(schedule: Schedule) -> CacheSlots:
    """The slots of a schedule for calls of the transformer that feed one pass each."""
    passes = schedule.passes
    slots = _slots_of_places(schedule)
    of_row = []
    for k, p in enumerate(passes):
        for row in p.fed_rows:
            slot = slots[row.place]
            slot.written = min(slot.written, k)  # the first pass that writes the slot
            of_row.append(row.place)

    ends = [1 + _last_visible_place(p) for p in passes]
    return _in_arrays(slots, of_row, ends, _needs_mask(passes, slots, ends))


@lru_cache(maxsize=64)
def window_slots(schedule: Schedule) -> CacheSlots:
    """The slots of a schedule for calls of the transformer that may feed several passes."""
    slots = _slots_of_places(schedule)
    of_row = []
    ends = []
    # The stand-ins that are not replaced yet: place -> the stand-in's slot. A place has at most one present stand-in,
    # because step 1 removes it before step 2 may add another one.
    present_stand_ins: dict[int, int] = {}
    for k, p in enumerate(schedule.passes):
        for row in p.fed_rows:
            # 1. Any token that is fed at the place of a stand-in replaces it.
            if row.place in present_stand_ins:
                old_slot = present_stand_ins.pop(row.place)
                slots[old_slot].replaced = k

            # 2. A stand-in adds its own slot at the end.
            if row.is_stand_in:
                present_stand_ins[row.place] = len(slots)
                of_row.append(len(slots))
                slots.append(_Slot(row.place, written=k))
            else:
                slot = slots[row.place]
                slot.written = min(slot.written, k)  # the first pass that writes the slot
                of_row.append(row.place)

        # 3. The last slot that a row may see: the slot of the last visible place, or a present stand-in's slot. Slot i
        #    holds place i.
        last = max([_last_visible_place(p), *present_stand_ins.values()])
        ends.append(1 + last)

    return _in_arrays(slots, of_row, ends, needs_mask=[True] * len(ends))


def _slots_of_places(schedule: Schedule) -> list[_Slot]:
    """A slot for each place; slot i holds place i. The known cells are in the cache from the start."""
    rows = [row for p in schedule.passes for row in p.fed_rows]
    place_count = 1 + max((max(row.place, row.last_visible) for row in rows), default=-1)
    return [_Slot(place, written=ALWAYS if place < schedule.known else NEVER) for place in range(place_count)]


def _last_visible_place(p: Pass) -> int:
    """The last place to which any row of a pass attends; -1 if the pass feeds no rows."""
    return max((row.last_visible for row in p.fed_rows), default=-1)


def _needs_mask(passes: Sequence[Pass], slots: Sequence[_Slot], ends: Sequence[int]) -> list[bool]:
    """For each pass, whether its rows need an attention mask, see the first table of this file. Slot i of ``slots``
    holds place i. ``ends``: the end of each pass.
    """
    written = np.array([slot.written for slot in slots])
    needs_mask = []
    for k, (p, end) in enumerate(zip(passes, ends, strict=True)):
        some_slot_is_unwritten = bool((written[:end] > k).any())
        some_row_sees_less = any(row.last_visible < end - 1 for row in p.fed_rows)
        needs_mask.append(some_slot_is_unwritten or some_row_sees_less)
    return needs_mask


def _in_arrays(
    slots: Sequence[_Slot], of_row: Sequence[int], ends: Sequence[int], needs_mask: Sequence[bool]
) -> CacheSlots:
    """Add the slot for padding to ``slots``, and store the facts in arrays."""
    padding = len(slots)
    slots = [*slots, _Slot(place=0)]
    return CacheSlots(
        count=len(slots),
        of_row=np.array([*of_row, padding]),
        end=np.array(ends),
        needs_mask=np.array(needs_mask),
        place=np.array([slot.place for slot in slots]),
        written=np.array([slot.written for slot in slots]),
        replaced=np.array([slot.replaced for slot in slots]),
    )
