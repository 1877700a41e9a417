"""Running a sampler: every sampler is a generator that yields after each step and returns its result."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

R = TypeVar("R")


def finish(sampler: Generator[Any, Any, R]) -> R:
    """Run a sampler to its end, ignoring the steps; returns its result."""
    while True:
        try:
            next(sampler)
        except StopIteration as end:
            return end.value


class PauseClock:
    """Seconds that a sampler was suspended at its ``yield``; they do not count as sampling time.

    A driver may send the seconds it spent since the last step (on a preview, for example); otherwise all the time until it
    resumed the generator counts as a pause.

    Attributes:
        seconds: total so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def start(self) -> None:
        """Call immediately before ``yield``."""
        self._since = time.perf_counter()

    def stop(self, sent: float | None) -> None:
        """Call with the value of the ``yield`` expression."""
        self.seconds += time.perf_counter() - self._since if sent is None else sent
