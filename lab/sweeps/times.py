"""Seconds and speed-ups of a sweep's cells, from the times of its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from .records import Cell
from .store import Store


@dataclass(frozen=True)
class Time:
    """Measured times of a cell. A pair is two shards that one worker drew in turn, so that other load affects both."""

    seconds: float  # per image, sampler only; median of the shards
    # Median of the pairs, or the ratio of the medians if there are no pairs; 1 for a baseline, None for a cell without
    # one.
    speedup: float | None = None
    low: float | None = None  # first and third quartile of the pairs' ratios
    high: float | None = None
    pairs: int = 0  # their number


def paired(store: Store, plain: Cell | None = None) -> dict[str, Time]:
    """Times of all cells that have any, by id.

    ``plain``: the cell that speed-ups are relative to; None for each cell's own plain sampler.
    """
    cells = store.cells()
    times = {cell.id: _whole(store.times(cell)) for cell in cells}
    referred_to = baselines_of(cells) if plain is None else {plain.id for cell in cells if cell.id != plain.id}

    out: dict[str, Time] = {}
    for cell in cells:
        own = times[cell.id]
        if not own:
            continue

        name = (cell.baseline or cell.id) if plain is None else plain.id
        base = times.get(name, {}) if name in referred_to else {}
        ratios = _ratios(own, base) if name != cell.id else []

        speedup: float | None = None
        if name == cell.id and base:
            speedup = 1.0
        elif ratios:
            speedup = median(ratios)
        elif base:
            speedup = _per_image(base) / _per_image(own)

        low: float | None = None
        high: float | None = None
        if len(ratios) > 1:
            low, _, high = quantiles(ratios, n=4, method="inclusive")

        out[cell.id] = Time(_per_image(own), speedup, low, high, len(ratios))

    return out


def baselines_of(cells: Iterable[Cell]) -> set[str]:
    """Ids of the cells that others are compared with."""
    return {cell.baseline for cell in cells if cell.baseline is not None}


def _ratios(own: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]]) -> list[float]:
    """The baseline's seconds over a cell's, of every pair of shards that one worker drew."""
    ratios = []
    for first, timed in own.items():
        other = base.get(first)
        if other is not None and other["worker"] == timed["worker"] and other["count"] == timed["count"]:
            ratios.append(other["seconds"] / timed["seconds"])

    return ratios


def _whole(times: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Times without partial batches where there are whole ones."""
    most = max((t["count"] for t in times.values()), default=0)
    return {first: t for first, t in times.items() if t["count"] == most}


def _per_image(times: Mapping[int, Mapping[str, Any]]) -> float:
    """Seconds per image, the median of shards."""
    return median(t["seconds"] / t["count"] for t in times.values())
