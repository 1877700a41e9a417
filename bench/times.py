"""Seconds of a sweep: before it from a few images of every cell, after it from the recorded times."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from .records import Cell
from .store import Store
from .work import Conditions, Prepared, draw

# Images of a cell that are timed on a CPU; on other devices a whole batch, on which their speed depends.
CPU_IMAGES = 4


def time_cell(prepared: Prepared, conditions: Conditions, cell: Cell, batch: int) -> float:
    """Seconds per image of a short run, sampler and decoder, after a shorter one that is not timed."""
    on_cpu = prepared.ready.device.type == "cpu"
    count = min(batch, cell.images, CPU_IMAGES) if on_cpu else min(batch, cell.images)
    condition, _ = conditions.of(prepared.ready, 0, count)
    draw(prepared, condition.of(range(1)), cell.seed, 0)
    began = time.perf_counter()
    draw(prepared, condition, cell.seed, 0)
    return (time.perf_counter() - began) / count


@dataclass(frozen=True)
class Time:
    """Measured times of a cell. The speed-up is the median over pairs of shards that one worker drew one after the other, so that other
    load on the machine affects both; without pairs the ratio of the medians."""

    seconds: float  # per image, sampler only
    speedup: float | None = None  # seconds per image of the baseline over its own; 1 without a baseline
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


def duration(seconds: float) -> str:
    """A duration in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def estimates(cells: Sequence[Cell], seconds: Mapping[str, float], batch: int) -> list[list[str]]:
    """Rows of a table: shards, seconds, speed-up and disk of every cell, from its seconds per image by id."""
    rows = [["cell", "shards", "s / image", "time", "speed-up", "MB"]]
    for cell in cells:
        own, base = seconds[cell.id], seconds.get(cell.baseline or "")
        speed = "" if base is None else f"{base / own:.2f}x"
        row = [cell.id, str(-(-cell.images // batch)), f"{own:.3f}", duration(own * cell.images), speed]
        rows.append([*row, f"{disk(cell) / 1e6:,.0f}"])
    return rows


def disk(cell: Cell) -> int:
    """Bytes of all pictures of a cell."""
    return cell.images * cell.size[0] * cell.size[1] * 3
