"""A progress bar on stderr, for whatever takes more than a moment."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_APPEARS = 0.7  # seconds after which there is something to show
_REDRAWN, _SAID = 0.1, 15.0  # seconds between pictures of the bar on a terminal, and between lines elsewhere
_WIDTH = 28


class Bar:
    """One line that is redrawn on a terminal; elsewhere a line now and then.

    Use as a context manager; nothing is written unless it takes a moment.

    Args:
        title: what is going on.
        stream: where to write; stderr by default.
    """

    def __init__(self, title: str, stream: TextIO | None = None):
        self.title, self.stream = title, stream or sys.stderr
        self.live = self.stream.isatty()
        self._began = self._said = time.monotonic()
        self._shown = False

    def __enter__(self) -> Bar:
        return self

    def __call__(self, done: float, total: float, unit: str = "") -> None:
        """Tell how far it is; total 0 if that is not known."""
        now = time.monotonic()
        if now - self._began < _APPEARS or now - self._said < (_REDRAWN if self.live else _SAID):
            return
        self._said = now
        share = min(1.0, done / total) if total else 0.0
        left = (now - self._began) * (1 / share - 1) if share else 0.0
        numbers = f"{done:,.0f}" + (f"/{total:,.0f}" if total else "") + f" {unit}".rstrip()
        if self.live:
            bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH, ".")
            self.stream.write(f"\r{self.title}  [{bar}]  {numbers}  {left:.0f} s left \x1b[K")
        else:
            self.stream.write(f"{self.title}  {numbers}  {left:.0f} s left\n")
        self.stream.flush()
        self._shown = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
