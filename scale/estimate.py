"""Seconds, shards and disk of a sweep: before it from a few images of every cell, after it from the recorded times."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from .store import Cell, Store, ranges
from .work import Conditions, Prepared, draw

# Images of a cell that are timed on a CPU; on other devices a whole batch, on which their speed depends.
CPU_IMAGES = 4


@dataclass(frozen=True)
class Estimate:
    """What a cell costs.

    Attributes:
        cell: the cell.
        shards: their number.
        seconds: of one worker for all images, sampler and decoder.
        ratio: seconds of the baseline over its own, or None.
        disk: bytes of all pictures.
    """

    cell: Cell
    shards: int
    seconds: float
    ratio: float | None
    disk: int


def time_cell(prepared: Prepared, conditions: Conditions, cell: Cell, batch: int) -> float:
    """Seconds per image of a short run, sampler and decoder, after a shorter one that is not timed."""
    on_cpu = prepared.ready.device.type == "cpu"
    count = min(batch, cell.images, CPU_IMAGES) if on_cpu else min(batch, cell.images)
    condition, _ = conditions.of(prepared.ready, 0, count)
    draw(prepared, condition.of(range(1)), cell.seed, 0)
    began = time.perf_counter()
    draw(prepared, condition, cell.seed, 0)
    return (time.perf_counter() - began) / count


def estimates(cells: Sequence[Cell], seconds: Mapping[str, float], batch: int) -> list[Estimate]:
    """The cost of every cell from its seconds per image, by id."""
    out = []
    for cell in cells:
        base = seconds.get(cell.baseline or "")
        own = seconds[cell.id]
        disk = cell.images * cell.size[0] * cell.size[1] * 3
        out.append(
            Estimate(cell, len(ranges(cell.images, batch)), own * cell.images, base / own if base else None, disk)
        )
    return out


def paired(store: Store) -> dict[str, Any]:
    """Seconds per image of every cell, and their ratio to the baseline's, from the recorded times of finished shards.

    A ratio is the median over the ranges that one process drew of both cells, one after the other, so that other load on the machine
    affects both. Without such ranges it is the ratio of the medians, and ``pairs`` is 0. Shards for which memory was insufficient are
    left out, and partial batches where there are whole ones.

    Returns:
        ``cells``: by id ``seconds`` (per image, sampler only), ``decoder`` (per image), ``ratio``, ``low``, ``high`` (quartiles of the
        ratio) and ``pairs``.
    """
    times = {cell.id: _times(store, cell) for cell in store.cells()}
    out: dict[str, Any] = {}
    for cell in store.cells():
        own = times[cell.id]
        if not own:
            continue
        ratios, ratio = [], None
        base = times.get(cell.baseline or "", {})
        for first, time_ in own.items():
            other = base.get(first)
            if other and (other["worker"], other["count"]) == (time_["worker"], time_["count"]):
                ratios.append(other["seconds"] / time_["seconds"])
        if ratios:
            ratio = median(ratios)
        elif base:
            ratio = _per_image(base) / _per_image(own)
        decoder = median(t["phases"].get("decoder", 0.0) / t["count"] for t in own.values())
        out[cell.id] = {
            "seconds": _per_image(own),
            "decoder": decoder,
            "ratio": ratio,
            "low": _quantile(ratios, 0),
            "high": _quantile(ratios, 2),
            "pairs": len(ratios),
        }
    return {"cells": out}


def _quantile(ratios: Sequence[float], quarter: int) -> float | None:
    """The first (0), second or third quartile; None of nothing."""
    if len(ratios) < 2:
        return ratios[0] if ratios else None
    return quantiles(ratios, n=4, method="inclusive")[quarter]


def _per_image(times: Mapping[int, Mapping[str, Any]]) -> float:
    return median(t["seconds"] / t["count"] for t in times.values())


def _times(store: Store, cell: Cell) -> dict[int, dict[str, Any]]:
    """Times of the shards of a cell that can be compared, by first image."""
    retried = {shard.first for shard in store.shards(cell) if shard.retried_batch is not None}
    found = [t for t in store.times(cell) if t["first"] not in retried and t["seconds"] > 0]
    most = max((t["count"] for t in found), default=0)
    return {t["first"]: t for t in found if t["count"] == most}
