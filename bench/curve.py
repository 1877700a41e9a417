"""The curve of a sweep: speed-up against quality of every cell, and the Pareto front."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from ..errors import UserError
from ..reports.quality import IDENTICAL
from .measures import EQUAL, MEASURES, PAIR, Result, columns, latest, read_results
from .records import Cell, Shard
from .spec import shown
from .store import Store

# Measures of the horizontal axis, the first that there is.
USUAL = ("fid", "frechet", "judge-scene", "psnr")


@dataclass(frozen=True)
class Time:
    """Measured times of a cell. A pair is two shards that one worker drew in turn, so that other load affects both."""

    seconds: float  # per image, sampler only; median of the shards
    speedup: float | None = None  # median of the pairs, without pairs ratio of the medians; 1 without a baseline
    low: float | None = None  # first and third quartile of the pairs' ratios
    high: float | None = None
    pairs: int = 0  # their number


def paired(store: Store) -> dict[str, Time]:
    """Times of all cells that have any, by id."""
    times = {cell.id: _whole(store.times(cell)) for cell in store.cells()}
    out: dict[str, Time] = {}
    for cell in store.cells():
        own, base = times[cell.id], times.get(cell.baseline or "", {})
        if not own:
            continue
        pairs = [(base[first], found) for first, found in own.items() if first in base]
        ratios = [a["seconds"] / b["seconds"] for a, b in pairs if all(a[n] == b[n] for n in ("worker", "count"))]
        speedup: float | None = None
        if cell.baseline is None:
            speedup = 1.0
        elif base:
            speedup = median(ratios) if ratios else _per_image(base) / _per_image(own)
        low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (None, None, None)
        out[cell.id] = Time(_per_image(own), speedup, low, high, len(ratios))
    return out


def _whole(times: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Times without partial batches where there are whole ones."""
    most = max((t["count"] for t in times.values()), default=0)
    return {first: t for first, t in times.items() if t["count"] == most}


def _per_image(times: Mapping[int, Mapping[str, Any]]) -> float:
    return median(t["seconds"] / t["count"] for t in times.values())


@dataclass(frozen=True)
class Point:
    """A cell on the curve."""

    cell: Cell
    label: str  # values of the settings that differ among the cells of its sampler, "" for a single cell
    result: Result | None  # of the measure
    time: Time | None  # what was measured
    calls: float  # mean sequential calls of a shard: transformer passes and head calls
    fewer_calls: float | None  # those of the baseline over its own
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
        """A value that is larger for better pictures: infinite for equal ones, None where the measure has no meaning."""
        if self.result is None or self.result.value is None:
            return math.inf if self.result is not None and self.result.word == IDENTICAL else None
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
    column = _column(store, list(found.values()), measure)
    times = paired(store)
    shards = {cell.id: store.shards(cell) for cell in cells}
    points = []
    for cell in cells:
        own, plain = _calls(shards[cell.id]), _calls(shards[cell.baseline or cell.id])
        result = found.get((cell.id, column)) or _of_itself(cell, column)
        images = sum(shard.count for shard in shards[cell.id])
        fewer = plain / own if own and plain else None
        points.append(Point(cell, label_of(cell, cells), result, times.get(cell.id), own, fewer, images))
    best = front(points)
    marked = tuple(replace(point, front=point.cell.id in best) for point in points)
    return Curve(_title(marked, column), marked)


def _title(points: Sequence[Point], column: tuple[str, str]) -> str:
    """Label of the axis of a measure."""
    results = [p.result for p in points if p.result is not None]
    others = {r.against for r in results} - {""}
    cells = {p.cell.id for p in points}
    compared = "plain sampler" if others & cells else ", ".join(sorted(others))
    name = results[0].title if results else MEASURES[column[0]].title
    better = "higher is better" if MEASURES[column[0]].higher else "lower is better"
    return f"{name}{f', against {compared}' if compared else ''} ({better})"


def _of_itself(cell: Cell, column: tuple[str, str]) -> Result | None:
    """The result of a plain sampler in measures of pairs: its pictures equal its own. None for other cells and measures."""
    if cell.baseline is not None or MEASURES[column[0]].kind != PAIR:
        return None
    return Result(cell.id, *column, cell.id, cell.images, EQUAL.get(column[0]), word=IDENTICAL)


def _column(store: Store, results: Sequence[Result], measure: str | None) -> tuple[str, str]:
    """The measure and extractor that a name means."""
    there = columns(results)
    if not there:
        raise UserError(f"folder: {store.folder.address} has no measures yet; run the command evaluate on it first.")
    if measure is None:
        return next((column for name in USUAL for column in there if column[0] == name), there[0])
    chosen = next((column for column in there if measure in (column[0], ":".join(column))), None)
    if chosen is None:
        names = ", ".join(":".join(column).rstrip(":") for column in there)
        raise UserError(f"measure: {measure!r} was not measured; there are {names}.")
    return chosen


def _calls(shards: Sequence[Shard]) -> float:
    """Mean number of sequential calls of a shard: transformer passes and head calls; 0 without shards or counts."""
    names = ("transformer_passes", "head_calls")
    return sum(s.counts.get(name, 0) for s in shards for name in names) / len(shards) if shards else 0.0


def varying(cells: Iterable[Cell]) -> list[str]:
    """Names of the asked settings that differ among cells."""
    cells = list(cells)
    names = dict.fromkeys(name for cell in cells for name in cell.asked)
    return [name for name in names if len({shown(cell.asked.get(name)) for cell in cells}) > 1]


def label_of(cell: Cell, cells: Sequence[Cell]) -> str:
    """The values of a cell's settings that differ among the cells of its model and sampler."""
    names = varying(c for c in cells if (c.model, c.sampler) == (cell.model, cell.sampler))
    return ", ".join(shown(cell.asked.get(name, "default")) for name in names)


def front(points: Sequence[Point]) -> set[str]:
    """Ids of the cells on the Pareto front of those with the same plain sampler, which the speed-ups refer to."""
    placed = [(p, good, fast) for p in points if (good := p.goodness()) is not None and (fast := p.speed)]
    return {
        p.cell.id
        for p, good, fast in placed
        if not any(q.plain == p.plain and g >= good and f >= fast and (g > good or f > fast) for q, g, f in placed)
    }


def lines(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The points of a sampler in the order of one setting, one list for each combination of the others."""
    names = varying(p.cell for p in points)
    values = {name: {shown(p.cell.asked.get(name)) for p in points} for name in names}
    along = max(names, key=lambda name: len(values[name]), default="")
    groups: dict[tuple[str, ...], list[Point]] = {}
    for p in points:
        groups.setdefault(tuple(shown(p.cell.asked.get(name)) for name in names if name != along), []).append(p)
    for group in groups.values():
        yield sorted(group, key=lambda p: _order(p.cell.asked.get(along)))


def _order(value: Any) -> tuple[int, float, str]:
    """Sorts numbers by size, also those in text, and words after them."""
    try:
        return 0, float(value), ""
    except (TypeError, ValueError):
        return 1, 0.0, str(value)


def to_csv(found: Curve) -> str:
    """The curve as CSV, one row per cell, in the measure's own unit, with seven digits."""
    rows = [_row(point) for point in found.points]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow(f"{x:.7g}" if isinstance(x, float) else x for x in row.values())
    return out.getvalue()


def _row(p: Point) -> dict[str, Any]:
    r, time = p.result, p.time
    return {
        "cell": p.cell.id,
        "sampler": p.cell.sampler,
        "asked": " ".join(f"{name}={shown(value)}" for name, value in p.cell.asked.items()),
        "images": p.images,
        **{name: getattr(time, name, None) for name in ("seconds", "speedup", "pairs")},
        **{f"speedup_{name}": getattr(time, name, None) for name in ("low", "high")},
        "sequential_calls": p.calls,
        "fewer_calls": p.fewer_calls,
        "pareto_front": int(p.front),
        **{name: getattr(r, name, None) for name in ("measure", "extractor", "against", "value", "word")},
        **{f"value_{name}": getattr(r, name, None) for name in ("low", "high")},
    }
