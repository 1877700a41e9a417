"""Decoding schedules of discrete tokens: which cells each pass of the transformer decides, and what it is fed for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Pass:
    """One pass of the transformer. The first of a schedule is the prefill, which is fed the condition only.

    Attributes:
        cells: cells it decides, in raster numbers.
        by: for each of them the fed row that predicts it; 0 in the prefill.
        fed: cells whose tokens are fed, a row each.
        special: PAR's transition tokens that are fed behind them.
        place: where each fed row stands: a cell, or -1 for a transition token.
        slot: the cache slot that each fed row is written to, counted from the first picture slot.
        sees: the highest slot that each fed row looks at.
        clock: the step counter that cfg_interval is compared with, as the reference counts.
    """

    cells: tuple[int, ...]
    by: tuple[int, ...]
    fed: tuple[int, ...] = ()
    special: int = 0
    place: tuple[int, ...] = ()
    slot: tuple[int, ...] = ()
    sees: tuple[int, ...] = ()
    clock: int = -1


@dataclass(frozen=True)
class Schedule:
    """Passes that decide a whole grid.

    Attributes:
        grid: side of the grid.
        passes: see :class:`Pass`.
        blanks: whether slots are looked at before they are written (ZipAR's published code).
        known: so many cells of the raster are there already, and in their slots; then the first pass is empty.
    """

    grid: int
    passes: tuple[Pass, ...]
    blanks: bool = False
    known: int = 0

    @cached_property
    def slots(self) -> int:
        """Picture slots of the cache."""
        return 1 + max((s for p in self.passes for s in (*p.slot, *p.sees)), default=-1)

    @cached_property
    def fixed_at(self) -> np.ndarray:
        """int32 [G, G]: the pass that decides each cell, counted from 0."""
        out = np.full(self.grid**2, -1, np.int32)
        for k, p in enumerate(self.passes):
            out[list(p.cells)] = k
        return out.reshape(self.grid, self.grid)

    def visible(self) -> list[np.ndarray]:
        """For every pass but the first, bool [rows, slots up to the highest seen]: what each row looks at."""
        written = np.full(self.slots, self.blanks)
        written[: self.known] = True
        out = []
        for p in self.passes[1:]:
            written[list(p.slot)] = True
            end = max(p.sees) + 1
            out.append(written[:end] & (np.arange(end) <= np.array(p.sees)[:, None]))
        return out


def next_token_passes(
    groups: Iterable[Sequence[int]], grid: int, clocks: Sequence[int] | None = None, start: int = 0, again: int = 0
) -> tuple[Pass, ...]:
    """Passes of a model that predicts the next cell of the raster, deciding groups of cells one after another.

    Cell c is predicted by a row at c - 1. Where that cell's token is not known yet, another one stands in for it: the
    nearest in the row above, or the nearest of all. Every token is fed once it is known, and takes the slot back.

    Args:
        groups: cells of each pass; the first holds cell 0, and all of it is drawn from the prefix's prediction.
        grid: side of the grid.
        clocks: see :class:`Pass`, of every group; None counts groups.
        start: so many cells of the raster are there already; an empty pass stands for them, and ``groups`` follow.
        again: so many of them, the last, are fed once more with the first group.
    """
    passes = [Pass((), ())] if start else []
    known = set(range(start))
    waiting = set(range(start - again, start))  # known, but not fed yet
    for k, cells in enumerate(groups):
        if not k and not start:
            passes.append(Pass(tuple(cells), (0,) * len(cells)))
        else:
            before = [c - 1 for c in cells]
            places = sorted({*waiting, *before})
            fed = tuple(p if p in known else _stand_in(p, known, grid) for p in places)
            by = tuple(places.index(p) for p in before)
            place = tuple(places)
            passes.append(Pass(tuple(cells), by, fed, 0, place, place, place, clocks[k] if clocks else k - 1))
            waiting.clear()
        known.update(cells)
        waiting.update(cells)
    return tuple(passes)


def _stand_in(place: int, known: set[int], grid: int) -> int:
    row, column = divmod(place, grid)
    above = [c for c in range((row - 1) * grid, row * grid) if c in known] if row else []
    if above:
        return min(above, key=lambda c: (abs(c % grid - column), c))
    return min(known, key=lambda c: ((c // grid - row) ** 2 + (c % grid - column) ** 2, c))


def sequential_start(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same groups, but the first one cell by cell."""
    return [*([c] for c in groups[0]), *(list(g) for g in groups[1:])]


def group_clocks(groups: Sequence[Sequence[int]], start: int) -> list[int]:
    """Clocks that count single steps over the first ``start`` passes and then anew, by tokens decided since."""
    clocks, since = [], 0
    for k, cells in enumerate(groups):
        clocks.append(k - 1 if k < start else since)
        since += len(cells) if k >= start else 0
    return clocks
