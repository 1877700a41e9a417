"""A progress bar on stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_APPEARS = 0.7  # seconds before the bar is shown
_REDRAWN, _PRINTED = 0.1, 15.0  # seconds between updates on a terminal, and between lines elsewhere
_WIDTH = 28


class Bar:
    """A line that is redrawn on a terminal, or a line every 15 seconds elsewhere; nothing in the first 0.7 seconds."""

    def __init__(self, title: str, stream: TextIO | None = None):
        self.title, self.stream = title, stream or sys.stderr
        self.live = self.stream.isatty()
        self._began = self._printed = time.monotonic()
        self._shown = False

    def __enter__(self) -> Bar:
        return self

    def __call__(self, done: float, total: float, unit: str = "") -> None:
        """Report progress; ``total`` is 0 if unknown."""
        now = time.monotonic()
        if now - self._began < _APPEARS or now - self._printed < (_REDRAWN if self.live else _PRINTED):
            return
        self._printed, self._shown = now, True
        share = min(1.0, done / total) if total else 0.0
        left = (now - self._began) * (1 / share - 1) if share else 0.0
        numbers = f"{done:,.0f}" + (f"/{total:,.0f}" if total else "") + f" {unit}".rstrip()
        bar = f"[{('#' * round(share * _WIDTH)).ljust(_WIDTH, '.')}]  " if self.live else ""
        line = f"{self.title}  {bar}{numbers}  {left:.0f} s left"
        self.stream.write(f"\r{line} \x1b[K" if self.live else f"{line}\n")
        self.stream.flush()

    def __exit__(self, *error: object) -> None:
        if self._shown and self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
