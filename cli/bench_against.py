"""``bench --against``: our seconds beside those of a reference implementation, with the same random weights.

Both programs run in one process, in turn. With one thread the seconds are CPU seconds of the process, which other load on the
machine changes little; otherwise they are wall seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..errors import UserError
from .bench_checkouts import Pair
from .bench_work import counted, measure_speed

_COLUMNS = ("work", "ours, s", "reference, s", "ratio", "range", "floor, s", "ours / floor", "operations", "equal")


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """Compare the results, then time both programs in turn.

    Raises:
        UserError: the results differ.
    """
    difference = pair.compare() if pair.compare else None
    if difference is not None and not difference <= pair.tolerance:
        raise UserError(
            f"against: the results of {pair.work} differ by {difference:.2g}; the times would mean nothing."
        )
    clock = _clock()
    speed = measure_speed(clock)
    with counted() as work:
        pair.ours(0)
    ours, theirs = [], []
    for repeat in range(repeats):
        ours.append(_seconds(clock, partial(pair.ours, repeat)))
        theirs.append(_seconds(clock, pair.theirs))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    floor = work.floor(speed)
    return {
        "work": pair.work,
        "ours": [round(s, 4) for s in ours],
        "reference": [round(s, 4) for s in theirs],
        "ratio": round(median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "floor": round(floor, 7),
        "operations": work.operations,
        "waits": work.waits,
        "difference": difference,
        "gflops": round(speed.arithmetic / 1e9, 1),
        "gbytes": round(speed.memory / 1e9, 1),
    }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The measurements as Markdown."""
    rows = [list(_COLUMNS)]
    for f in found:
        ours, (low, high) = median(f["ours"]), f["ratio_range"]
        rows.append(
            [
                f["work"],
                f"{ours:.2f}",
                f"{median(f['reference']):.2f}",
                f"{f['ratio']:.2f}",
                f"{low:.2f}-{high:.2f}" if len(f["ours"]) > 1 else "",
                f"{f['floor']:.2f}",
                f"{ours / f['floor']:.1f}" if f["floor"] else "",
                f"{f['operations']:,}",
                "not compared" if f["difference"] is None else "yes",
            ]
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(_COLUMNS), *lines[1:]])


def write(path: Path, about: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    """Write the measurements as JSON."""
    path.write_text(json.dumps({**about, "against": list(found)}, indent=2) + "\n", encoding="utf-8")


def _clock() -> Callable[[], float]:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _seconds(clock: Callable[[], float], call: Callable[[], Any]) -> float:
    began = clock()
    call()
    return clock() - began
