"""Time reference implementations beside ours: checkouts of MAR, LazyMAR, CSpD, LlamaGen, PAR, ZipAR or Tar, and transformers for Janus.

Both programs have the same random weights of an official size and run in one process, in turn, on the CPU. The results are compared
first. With one thread the seconds are CPU seconds of the process, which other load on the machine changes little; otherwise they are wall
seconds. The floor is the least time for our matrix products on this CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..cli.bench import about, machine
from ..cli.options import MOST_IMAGES, output, save, whole
from ..errors import UserError
from ..reports.record import VERSION
from ..reports.table import markdown
from ..samplers.choice import assignment
from .operations import counted, measure_speed
from .references import SIZES_OF, Pair, identify, pair
from .sizes import PAR_SPECIAL, random_model

_HEAD = "work; ours, s; reference, s; ratio; range; floor, s; ours / floor; operations; theirs; equal"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="DIR", help="checkout of a reference implementation")
    parser.add_argument("--random", metavar="SIZE", help="official size; default the smallest")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="sets", help="a setting")
    parser.add_argument("--batch", default="1", metavar="N,N", help="batch sizes separated by commas; default 1")
    parser.add_argument("--repeats", default="5", metavar="N", help="timed runs of each program; default 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every timing")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    batches = [whole(text, "batch", 1, MOST_IMAGES) for text in options.batch.split(",")]
    repeats, device = whole(options.repeats, "repeats", 1, 1000), torch.device("cpu")
    numbers = output(options.json, "json", (".json",))
    sets = dict(assignment(text, "set") for text in options.sets)
    found = []
    for name, root in [identify(folder) for folder in options.checkouts]:
        size = options.random or next(iter(SIZES_OF[name]))
        if size not in SIZES_OF[name]:
            raise UserError(f"random: {name} has no size {size}; there are {', '.join(SIZES_OF[name])}.")
        model = None
        if name not in ("tar", "janus"):
            model = random_model(size, "fp32", device, PAR_SPECIAL if name == "par" else 0).model
        found += [measure(pair(name, root, model, size, batch, sets), repeats) for batch in batches]
    print(f"{about('Random weights', device, repeats)}\n\n{to_table(found)}")
    if numbers:
        head = {"version": VERSION, "device": device.type, "machine": machine(device), "against": found}
        save(numbers, lambda part: part.write_text(json.dumps(head, indent=2) + "\n", encoding="utf-8"))
    return 0


def measure(work: Pair, repeats: int) -> dict[str, Any]:
    """Compare the results, then time both programs in turn."""
    difference = work.compare() if work.compare else None
    if difference is not None and not difference <= work.tolerance:
        raise UserError(f"against: the results of {work.work} differ by {difference:.2g}, so times mean nothing.")
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    speed = measure_speed(clock)
    with counted() as ops:
        work.ours(0)
    with counted() as reference_ops:
        work.theirs()
    ours, theirs = [], []
    for repeat in range(repeats):
        ours.append(_seconds(clock, partial(work.ours, repeat)))
        theirs.append(_seconds(clock, work.theirs))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "work": work.work,
        "ours": [round(s, 4) for s in ours],
        "reference": [round(s, 4) for s in theirs],
        "ratio": round(median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "floor": round(ops.floor(speed), 7),
        "operations": ops.operations,
        "reference_operations": reference_ops.operations,
        "waits": ops.waits,
        "difference": difference,
        "gflops": round(speed.arithmetic / 1e9, 1),
        "gbytes": round(speed.memory / 1e9, 1),
    }


def _seconds(clock: Callable[[], float], call: Callable[[], Any]) -> float:
    began = clock()
    call()
    return clock() - began


def to_table(found: Sequence[Mapping[str, Any]]) -> str:
    """The measurements as Markdown."""
    rows = [_HEAD.split("; ")]
    for f in found:
        ours, (low, high) = median(f["ours"]), f["ratio_range"]
        row = [f["work"], f"{ours:.2f}", f"{median(f['reference']):.2f}", f"{f['ratio']:.2f}"]
        row += [f"{low:.2f}-{high:.2f}" if len(f["ours"]) > 1 else "", f"{f['floor']:.2f}"]
        row += [
            f"{ours / f['floor']:.1f}" if f["floor"] else "",
            f"{f['operations']:,}",
            f"{f['reference_operations']:,}",
        ]
        rows.append([*row, "not compared" if f["difference"] is None else "yes"])
    return markdown(rows)
