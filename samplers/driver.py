"""Running a sampler: every sampler is a generator that yields after each step and returns its result."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

R = TypeVar("R")
S = TypeVar("S")


def finish(sampler: Generator[Any, Any, R]) -> R:
    """Run a sampler to its end, ignoring the steps; returns its result."""
    while True:
        try:
            next(sampler)
        except StopIteration as end:
            return end.value


def timed(steps: Generator[S, None, R], run: Any) -> Generator[S, float | None, R]:
    """Run ``steps`` to its result, then stop the clock of ``run`` and write its figures into the report of ``run``.

    Sampling time excludes the pauses at each ``yield``. A driver may send the seconds it spent since the last step (on a
    preview, for example); otherwise the whole time until it resumes the generator is a pause.
    """
    paused = 0.0
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            run.clock.stop(run.report, paused)
            return end.value
        since = time.perf_counter()
        sent = yield step
        paused += time.perf_counter() - since if sent is None else sent
