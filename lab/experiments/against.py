"""Time reference implementations beside ours.

DIR is a checkout of MAR, LazyMAR, CSpD, LlamaGen, PAR, ZipAR or Tar, or of transformers for Janus.

Both programs use the same random weights of an official size and run in one process, in turn, on the CPU. The results
are compared first. With one thread, seconds are CPU seconds of the process, on which other load has little effect;
otherwise they are wall-clock seconds. The floor is the minimum time for our matrix products on this CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from ...cli.bench import about
from ...cli.options import whole
from ...errors import UserError
from ...reports.files import typed_path
from ...reports.table import markdown
from ...runs.choice import assignment
from ...runs.limits import MOST_IMAGES
from ..work.operations import counted, measure_speed
from .references import REFERENCES, Pair, identify

_HEAD = "work; ours, s; reference, s; ratio; range; floor, s; ours / floor; operations; theirs; equal"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("checkouts", nargs="+", metavar="DIR", help="checkout of a reference implementation")
    parser.add_argument("--random", metavar="SIZE", help="official size; default the smallest")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="sets", help="a setting")
    parser.add_argument("--batch", default="1", metavar="N,N", help="batch sizes separated by commas; default 1")
    parser.add_argument("--repeats", default="5", metavar="N", help="timed runs of each program; default 5")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    batches = [whole(text, "batch", 1, MOST_IMAGES) for text in options.batch.split(",")]
    repeats = whole(options.repeats, "repeats", 1, 1000)
    sets = dict(assignment(text, "set") for text in options.sets)
    checkouts = [identify(typed_path(folder, "against")) for folder in options.checkouts]

    rows = [_HEAD.split("; ")]
    for name, root in checkouts:
        known = REFERENCES[name]
        size = options.random or next(iter(known.sizes))
        if size not in known.sizes:
            raise UserError(f"random: {name} has no size {size}; choose one of {', '.join(known.sizes)}.")

        for batch in batches:
            work = known.pair(root, size, batch, sets, name)
            rows.append(measure(work, repeats))

    print(f"{about('Random weights', torch.device('cpu'), repeats)}\n\n{markdown(rows)}")
    return 0


def measure(work: Pair, repeats: int) -> list[str]:
    """Compare the results, then time both programs in turn; a row of the table."""
    difference = work.compare() if work.compare else None
    if difference is not None and not difference <= work.tolerance:
        raise UserError(f"against: the results of {work.work} differ by {difference:.2g}, so times mean nothing.")

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    speed = measure_speed(clock)

    # What both compute. These runs also warm up.
    with counted() as ops:
        work.ours(0)
    with counted() as reference_ops:
        work.theirs()

    ours = []
    theirs = []
    for repeat in range(repeats):
        ours.append(_seconds(clock, partial(work.ours, repeat)))
        theirs.append(_seconds(clock, work.theirs))

    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    floor = ops.floor(speed)

    return [
        work.work,
        f"{median(ours):.2f}",
        f"{median(theirs):.2f}",
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}" if repeats > 1 else "",
        f"{floor:.2f}",
        f"{median(ours) / floor:.1f}" if floor else "",
        f"{ops.operations:,}",
        f"{reference_ops.operations:,}",
        "yes" if work.compare else "not compared",
    ]


def _seconds(clock: Callable[[], float], call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    began = clock()
    call()
    return clock() - began
