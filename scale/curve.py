"""The curve of a sweep: speed-up against quality of every cell, and the Pareto front."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError
from ..reports.quality import IDENTICAL
from .results import EQUAL, MEASURES, PAIR, Measure, Result, columns, latest, read_results
from .store import RESULTS, TIMING, Cell, Shard, Store

AUTO, SECONDS, CALLS = "auto", "seconds", "calls"
# What a curve has upwards, and its name on the axis.
HEIGHTS = {
    SECONDS: "speed-up, measured: seconds an image, plain / cell (median of pairs of shards; bars: quartiles)",
    CALLS: "sequential calls, plain / cell (passes and head calls; not seconds)",
}


@dataclass(frozen=True)
class Time:
    """Measured times of a cell; None where there are none.

    Attributes:
        seconds: per image.
        speedup: seconds per image of the baseline over its own, the median of ``pairs`` of shards that were drawn one after the other.
        low, high: their first and third quartile.
        pairs: their number.
    """

    seconds: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0


@dataclass(frozen=True)
class Point:
    """A cell on the curve.

    Attributes:
        cell: the cell.
        label: values of the settings that differ along its curve, "" for a curve of one cell.
        result: of the measure, or None.
        time: what was measured.
        calls: mean sequential calls of a shard: transformer passes and head calls.
        fewer_calls: those of the baseline over its own, or None.
        images: number of finished images.
        front: whether no other cell with the same plain sampler is at least as fast and as good, and better in one of them.
    """

    cell: Cell
    label: str
    result: Result | None
    time: Time
    calls: float
    fewer_calls: float | None
    images: int
    front: bool = False

    @property
    def plain(self) -> str:
        """Id of the plain sampler's cell, its own if it has none."""
        return self.cell.baseline or self.cell.id

    def height(self, against: str) -> float | None:
        """Value on the vertical axis."""
        return self.time.speedup if against == SECONDS else self.fewer_calls


@dataclass(frozen=True)
class Curve:
    """All cells of a sweep with one measure.

    Attributes:
        measure, extractor: the column of the results.
        against: SECONDS or CALLS.
        points: in the order of the sweep.
        reference: what the figures compare with: a file's name, "plain sampler", or "".
    """

    measure: str
    extractor: str
    against: str
    points: tuple[Point, ...]
    reference: str = ""

    @property
    def about(self) -> Measure:
        """The measure."""
        return MEASURES[self.measure]

    @property
    def title(self) -> str:
        """Name of the measure with its extractor."""
        return next((p.result.title for p in self.points if p.result is not None), self.about.title)

    @property
    def groups(self) -> dict[tuple[str, str], list[Point]]:
        """Points by model and sampler."""
        out: dict[tuple[str, str], list[Point]] = {}
        for point in self.points:
            out.setdefault((point.cell.model, point.cell.sampler), []).append(point)
        return out


def curve(store: Store, measure: str | None = None, against: str = AUTO) -> Curve:
    """The curve of a sweep.

    Args:
        measure: a name of :data:`.results.MEASURES`, with the extractor after a colon where several were used
            ("kid:clip:features"); None for the first of FID, Frechet distance, the judge's scene and PSNR that there is.
        against: SECONDS, CALLS, or AUTO: seconds if every cell was timed, else calls.

    Raises:
        UserError: no results, an unknown measure, or cells that were not timed.
    """
    cells = store.cells()
    found = latest(read_results(store))
    column = _column(store, list(found.values()), measure)
    times = timed(store, cells)
    if against == AUTO:
        against = SECONDS if all(cell.id in times for cell in cells) else CALLS
    elif against == SECONDS and (missing := [cell.id for cell in cells if cell.id not in times]):
        raise UserError(f"against: {missing[0]} has no measured seconds; finish the sweep, or plot {CALLS}.")
    elif against not in HEIGHTS:
        raise UserError(f"against: {against!r} is not one of {AUTO}, {', '.join(HEIGHTS)}.")
    shards = {cell.id: store.shards(cell) for cell in cells}
    calls = {name: sequential_calls(own) for name, own in shards.items()}
    labels = labels_of(cells)
    points = []
    for cell in cells:
        time = times.get(cell.id, Time())
        plain, own = calls.get(cell.baseline or cell.id), calls[cell.id]
        points.append(
            Point(
                cell,
                labels[cell.id],
                found.get((cell.id, column)) or _of_itself(cell, column),
                time,
                own or 0.0,
                plain / own if plain and own else None,
                sum(shard.count for shard in shards[cell.id]),
            )
        )
    on_front = front(points, against, MEASURES[column[0]].higher)
    marked = tuple(replace(point, front=point.cell.id in on_front) for point in points)
    return Curve(*column, against, marked, _compared_with(marked))


def _of_itself(cell: Cell, column: tuple[str, str]) -> Result | None:
    """The result of a plain sampler in measures of pairs: its pictures equal its own. None for other cells and measures."""
    if cell.baseline is not None or MEASURES[column[0]].kind != PAIR:
        return None
    return Result(cell.id, *column, cell.id, cell.images, "", EQUAL.get(column[0]), word=IDENTICAL)


def _column(store: Store, results: Sequence[Result], measure: str | None) -> tuple[str, str]:
    there = columns(results)
    if not there:
        raise UserError(f"folder: {store.folder.address} has no measures yet; run the command evaluate on it first.")
    names = [
        f"{name}:{extractor}" if extractor not in ("", "inception", "judge") else name for name, extractor in there
    ]
    if measure is None:
        usual = ("fid", "frechet", "judge-scene", "psnr")
        return next((column for name in usual for column in there if column[0] == name), there[0])
    chosen = [column for column, name in zip(there, names, strict=True) if measure in (name, column[0])]
    if not chosen:
        raise UserError(f"measure: {measure!r} was not measured; there are {', '.join(names)}.")
    return chosen[0]


def timed(store: Store, cells: Sequence[Cell]) -> dict[str, Time]:
    """Times of every timed cell, by id. The ratio of a cell without a baseline is 1."""
    rows = (store.timing() or {}).get("cells")
    out = {}
    for cell in cells:
        row = rows.get(cell.id) if isinstance(rows, Mapping) else None
        if not isinstance(row, Mapping) or not _positive(row.get("seconds")):
            continue
        if cell.baseline is None:
            out[cell.id] = Time(row["seconds"], 1.0)
        elif _positive(row.get("ratio")):
            low, high = (row[name] if _positive(row.get(name)) else None for name in ("low", "high"))
            pairs = row.get("pairs")
            out[cell.id] = Time(row["seconds"], row["ratio"], low, high, pairs if isinstance(pairs, int) else 0)
    return out


def state(store: Store) -> str:
    """What changes when shards, measures or times are added to a sweep. No shard is read."""
    counts = [len(store.folder.names(f"cells/{cell.id}")) for cell in store.cells()]
    sizes = [store.folder.size(name) for name in (RESULTS, TIMING)]
    return f"{[cell.key for cell in store.cells()]} {counts} {sizes}"


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def sequential_calls(shards: Sequence[Shard]) -> float | None:
    """Mean number of sequential calls of a shard: transformer passes and head calls; None without shards or counts."""
    if not shards:
        return None
    return (
        sum(s.counts.get(name, 0) for s in shards for name in ("transformer_passes", "head_calls")) / len(shards)
        or None
    )


def labels_of(cells: Sequence[Cell]) -> dict[str, str]:
    """By cell the values of the settings that differ among the cells of its model and sampler, separated by commas."""
    out = {}
    for cell in cells:
        names = varying([c for c in cells if (c.model, c.sampler) == (cell.model, cell.sampler)])
        out[cell.id] = ", ".join(_value(cell.asked[name]) if name in cell.asked else "default" for name in names)
    return out


def varying(cells: Sequence[Cell]) -> list[str]:
    """Names of the asked settings that differ among cells."""
    names = dict.fromkeys(name for cell in cells for name in cell.asked)
    return [name for name in names if len({_value(cell.asked.get(name)) for cell in cells}) > 1]


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def goodness(point: Point, higher: bool) -> float | None:
    """A value that is larger for better pictures: infinite for equal ones, None where the measure has no meaning."""
    result = point.result
    if result is None:
        return None
    if result.value is None:
        return math.inf if result.word == IDENTICAL else None
    return result.value if higher else -result.value


def front(points: Sequence[Point], against: str, higher: bool) -> set[str]:
    """Ids of the cells on the Pareto front of those with the same plain sampler, which the speed-ups refer to."""
    placed: list[tuple[Point, float, float]] = []
    for point in points:
        good, fast = goodness(point, higher), point.height(against)
        if good is not None and fast is not None:
            placed.append((point, good, fast))
    return {
        p.cell.id
        for p, good, fast in placed
        if not any(q.plain == p.plain and g >= good and f >= fast and (g > good or f > fast) for q, g, f in placed)
    }


def _compared_with(points: Sequence[Point]) -> str:
    names = {p.result.against for p in points if p.result is not None} - {""}
    cells = {p.cell.id for p in points}
    return "plain sampler" if names & cells else ", ".join(sorted(names))


def lines(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The points of a sampler in the order of one setting, one list for each combination of the others."""
    names = varying([p.cell for p in points])
    values = {name: {_value(p.cell.asked.get(name)) for p in points} for name in names}
    along = max(names, key=lambda name: len(values[name]), default="")
    groups: dict[tuple[str, ...], list[Point]] = {}
    for p in points:
        groups.setdefault(tuple(_value(p.cell.asked.get(name)) for name in names if name != along), []).append(p)
    for group in groups.values():
        yield sorted(group, key=lambda p: _order(p.cell.asked.get(along)))


def _order(value: Any) -> tuple[int, float, str]:
    """Sorts numbers by size, also those in text, and words after them."""
    try:
        return 0, float(value), ""
    except (TypeError, ValueError):
        return 1, 0.0, str(value)


_HEAD = (
    "cell",
    "model",
    "sampler",
    "asked",
    "images",
    "speed_up",
    "speed_up_low",
    "speed_up_high",
    "pairs",
    "seconds_per_image",
    "sequential_calls",
    "fewer_calls",
    "measure",
    "extractor",
    "against",
    "value",
    "low",
    "high",
    "difference",
    "difference_low",
    "difference_high",
    "word",
    "pareto_front",
)


def to_csv(found: Curve) -> str:
    """The curve as CSV, one row per cell, in the measure's own unit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_HEAD)
    for p in found.points:
        r = p.result
        asked = " ".join(f"{name}={_value(value)}" for name, value in p.cell.asked.items())
        measured = [None] * 7 + [""] if r is None else [r.against, r.value, r.low, r.high, *r.difference, r.word]
        writer.writerow(
            [p.cell.id, p.cell.model, p.cell.sampler, asked, p.images]
            + [
                _short(x)
                for x in (p.time.speedup, p.time.low, p.time.high, p.time.pairs, p.time.seconds, p.calls, p.fewer_calls)
            ]
            + [found.measure, found.extractor, *(_short(x) for x in measured), int(p.front)]
        )
    return out.getvalue()


def _short(value: Any) -> Any:
    """Seven digits, which are more than any figure has."""
    return "" if value is None else f"{value:.7g}" if isinstance(value, float) else value
