"""Running a sampler: every sampler is a generator that yields after each step and returns its result."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import torch

from ..reports.record import Clock, Report

R = TypeVar("R")
S = TypeVar("S")


def finish(sampler: Generator[Any, Any, R]) -> R:
    """Run a sampler to its end, ignoring the steps; returns its result."""
    while True:
        try:
            next(sampler)
        except StopIteration as end:
            return end.value


def start_clock(device: torch.device) -> Clock:
    """Start the clock and the peak memory count of a generation; :func:`timed` stops both."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return Clock(device)


def timed(
    steps: Generator[S, None, R], clock: Clock, report: Report, device: torch.device
) -> Generator[S, float | None, R]:
    """Run ``steps``, then write sampling time, phases and peak memory into ``report``; returns the result of ``steps``.

    Sampling time excludes the pauses at each ``yield``. A driver may send the seconds it spent since the last step (on a
    preview, for example); otherwise the whole time until it resumes the generator is a pause.

    Args:
        steps: the sampler without time keeping.
        clock: from :func:`start_clock`.
        report: the report of the run.
        device: of the run.
    """
    paused = 0.0
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            result = end.value
            break
        since = time.perf_counter()
        sent = yield step
        paused += time.perf_counter() - since if sent is None else sent
    clock.stop(report, paused)
    if device.type == "cuda":
        report.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
    return result
