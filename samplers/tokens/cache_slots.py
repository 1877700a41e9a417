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
    written in pass      1  2  3  4  5  6  5  6  4  NEVER
    replaced in pass     N  N  N  N  N  N  N  N  6  N        (N: NEVER)

A fed row of pass k attends to a slot if the slot holds a place up to the row's ``last_visible``, a pass up to k writes
the slot, and no pass up to k replaces the slot. See :meth:`.DeviceTable.mask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .schedule import FedRow, Pass, Schedule

# In the place of a pass: before all passes, and after all passes.
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


def _slots(schedule: Schedule, own_slots_for_stand_ins: bool) -> CacheSlots:
    """The slots of a schedule. If ``own_slots_for_stand_ins`` is False, the true token overwrites a stand-in."""
    passes = schedule.passes
    fed = [(k, row) for k, p in enumerate(passes) for row in p.fed_rows]
    places = 1 + max((max(row.place, row.last_visible) for _, row in fed), default=-1)  # number of places

    # 1. The slots after those of the places: one for each stand-in that has its own slot, and one for padding.
    stand_ins = _stand_ins(fed) if own_slots_for_stand_ins else []
    padding = places + len(stand_ins)

    # 2. The slot that each fed row writes. The stand-ins are in the order of the fed rows.
    stand_in_slots = iter(range(places, padding))
    has_own_slot = [own_slots_for_stand_ins and row.is_stand_in for _, row in fed]
    of_row = [next(stand_in_slots) if own else row.place for (_, row), own in zip(fed, has_own_slot, strict=True)]

    # 3. The first pass that writes the slot of each place. The known cells are in the cache from the start.
    written_place = [ALWAYS if place < schedule.known else NEVER for place in range(places)]
    for (k, row), own in zip(fed, has_own_slot, strict=True):
        if not own:
            written_place[row.place] = min(written_place[row.place], k)

    # 4. The facts about all slots: first the places, then the stand-ins, then padding.
    written = np.array([*written_place, *(s.written for s in stand_ins), NEVER])
    replaced = np.array([NEVER] * places + [s.replaced for s in stand_ins] + [NEVER])
    end = _ends(passes, written, replaced, places)
    return CacheSlots(
        count=padding + 1,
        of_row=np.array([*of_row, padding]),
        end=end,
        needs_mask=_needs_mask(passes, end, written),
        place=np.array([*range(places), *(s.place for s in stand_ins), 0]),
        written=written,
        replaced=replaced,
    )


class _StandIn(NamedTuple):
    """A stand-in that has its own slot."""

    place: int
    written: int  # the pass that feeds the stand-in
    replaced: int  # the next pass that feeds a token at this place; NEVER if there is none


def _stand_ins(fed: Sequence[tuple[int, FedRow]]) -> list[_StandIn]:
    """The stand-ins of a schedule, in the order of its fed rows. ``fed``: for each fed row, its pass and the row."""
    stand_ins = []
    next_pass: dict[int, int] = {}  # for each place, the next pass that feeds a token there
    for k, row in reversed(fed):
        if row.is_stand_in:
            stand_ins.append(_StandIn(row.place, written=k, replaced=next_pass.get(row.place, NEVER)))
        next_pass[row.place] = k
    return stand_ins[::-1]


def _ends(passes: Sequence[Pass], written: np.ndarray, replaced: np.ndarray, places: int) -> np.ndarray:
    """For each pass, the end of the slots to which its rows attend, int64 [P]. The rows attend to places up to their
    ``last_visible``, and to the stand-ins that are written and not replaced yet. The slots of stand-ins come after the
    slots of the ``places``.

    ``written``, ``replaced``: see :class:`CacheSlots`.
    """
    ends = []
    for k, p in enumerate(passes):
        last_place = max((row.last_visible for row in p.fed_rows), default=-1)
        present = places + np.flatnonzero((written[places:] <= k) & (k < replaced[places:]))
        ends.append(1 + max(last_place, int(present.max(initial=-1))))
    return np.array(ends)


def _needs_mask(passes: Sequence[Pass], end: np.ndarray, written: np.ndarray) -> np.ndarray:
    """For each pass, whether it needs an attention mask, bool [P]. A pass needs none if all slots below its end are
    written, and if all its rows attend to the last of these slots.

    ``end``, ``written``: see :class:`CacheSlots`.
    """
    # From pass completed_by[e] on, all slots below slot e are written.
    completed_by = np.append(ALWAYS, np.maximum.accumulate(written))
    some_slot_is_unwritten = completed_by[end] > np.arange(len(passes))

    least_visible = np.array([min((row.last_visible for row in p.fed_rows), default=-1) for p in passes])
    some_row_sees_less = least_visible < end - 1
    return some_slot_is_unwritten | some_row_sees_less
