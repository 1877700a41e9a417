"""The curve of a sweep: speed-up against quality of every cell, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UserError
from ...reports.quality import IDENTICAL
from ...sweeps.plan import shown
from .measures import EQUAL, MEASURES, PAIR, Result, latest, measured, read_results
from .records import Cell
from .store import Store
from .times import Time, baselines_of, paired

# Measures of the horizontal axis, the first that there is.
USUAL = ("fid", "judge-scene", "psnr")


@dataclass(frozen=True)
class Point:
    """A cell on the curve."""

    cell: Cell
    label: str  # values of the settings that differ among the cells of its sampler, "" for a single cell
    result: Result | None  # of the measure
    time: Time | None  # what was measured
    images: int  # number of finished images
    front: bool = False  # whether no other cell with the same plain sampler is as fast and good, and better in one

    @property
    def plain(self) -> str:
        """Id of the plain sampler's cell, its own if it has none."""
        return self.cell.baseline or self.cell.id

    @property
    def speed(self) -> float | None:
        """Measured speed-up."""
        return self.time.speedup if self.time else None

    def goodness(self) -> float | None:
        """A value that is larger for better images; infinite for equal ones, None where the measure means nothing."""
        if self.result is None:
            return None
        if self.result.value is None:
            return math.inf if self.result.word == IDENTICAL else None

        return self.result.value if MEASURES[self.result.measure].higher else -self.result.value


@dataclass(frozen=True)
class Curve:
    """All cells of a sweep with one measure."""

    title: str  # of the axis: the measure, what it compares with, and which way is better
    points: tuple[Point, ...]  # in the order of the sweep


def curve(store: Store, measure: str | None = None) -> Curve:
    """The curve of a sweep."""
    cells = store.cells()
    found = latest(read_results(store))
    name = _measure(store, list(found.values()), measure)
    times = paired(store)
    referred_to = baselines_of(cells)

    points = []
    for cell in cells:
        of_itself = _of_itself(cell, name) if cell.id in referred_to else None
        point = Point(
            cell=cell,
            label=label_of(cell, cells),
            result=found.get((cell.id, name)) or of_itself,
            time=times.get(cell.id),
            images=sum(shard.count for shard in store.shards(cell)),
        )
        points.append(point)

    best = front(points)
    marked = tuple(replace(point, front=point.cell.id in best) for point in points)

    return Curve(_title(marked, name), marked)


def _title(points: Sequence[Point], name: str) -> str:
    """Label of the axis of a measure."""
    measure = MEASURES[name]
    title = measure.title

    # What the figures compare with.
    others = {p.result.against for p in points if p.result is not None} - {""}
    cells = {p.cell.id for p in points}
    compared = "plain sampler" if others & cells else ", ".join(sorted(others))
    if compared:
        title = f"{title}, against {compared}"

    better = "higher is better" if measure.higher else "lower is better"
    return f"{title} ({better})"


def _of_itself(cell: Cell, measure: str) -> Result | None:
    """The result of a baseline in a measure of pairs, which compares its images with themselves.

    None for other measures.
    """
    if MEASURES[measure].kind != PAIR:
        return None

    return Result(cell.id, measure, cell.id, cell.images, EQUAL.get(measure), word=IDENTICAL)


def _measure(store: Store, results: Sequence[Result], name: str | None) -> str:
    """The measure that a name means; without a name, the first of the usual ones."""
    there = measured(results)
    if not there:
        raise UserError(
            f"folder: {store.folder.path} has no measures yet; first run the command evaluate on this folder."
        )

    if name is None:
        return next((usual for usual in USUAL if usual in there), there[0])
    if name not in there:
        raise UserError(f"measure: {name!r} was not measured; choose one of {', '.join(there)}.")
    return name


def varying(cells: Iterable[Cell]) -> list[str]:
    """Names of the asked settings that differ among cells."""
    cells = list(cells)

    # The values of every setting, by its name.
    values: dict[str, set[str]] = {}
    for cell in cells:
        for name in cell.asked:
            if name not in values:
                values[name] = {shown(other.asked.get(name)) for other in cells}

    return [name for name, found in values.items() if len(found) > 1]


def label_of(cell: Cell, cells: Sequence[Cell]) -> str:
    """The values of a cell's settings that differ among the cells of its model and sampler."""
    names = varying(c for c in cells if (c.model, c.sampler) == (cell.model, cell.sampler))
    return ", ".join(shown(cell.asked.get(name, "default")) for name in names)


def front(points: Sequence[Point]) -> set[str]:
    """Ids of the cells on the Pareto front of those with the same plain sampler, which the speed-ups refer to."""
    placed: list[tuple[Point, float, float]] = []
    for point in points:
        goodness = point.goodness()
        if goodness is not None and point.speed:
            placed.append((point, goodness, point.speed))

    out = set()
    for point, good, fast in placed:
        beaten = any(
            other.plain == point.plain and g >= good and f >= fast and (g > good or f > fast) for other, g, f in placed
        )
        if not beaten:
            out.add(point.cell.id)

    return out


def lines(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The points of a sampler in the order of one setting, one list for each combination of the others."""
    names = varying(p.cell for p in points)

    # The setting with most values orders the points of a line.
    values: dict[str, set[str]] = {}
    for name in names:
        values[name] = {shown(p.cell.asked.get(name)) for p in points}

    along = max(names, key=lambda name: len(values[name]), default="")
    others = [name for name in names if name != along]

    groups: dict[tuple[str, ...], list[Point]] = {}
    for p in points:
        combination = tuple(shown(p.cell.asked.get(name)) for name in others)
        groups.setdefault(combination, []).append(p)

    for group in groups.values():
        yield sorted(group, key=lambda p: _order(p.cell.asked.get(along)))


def _order(value: Any) -> tuple[int, float, str]:
    """Sorts numbers by size, also those in text, and words after them."""
    try:
        return 0, float(value), ""
    except (TypeError, ValueError):
        return 1, 0.0, str(value)
