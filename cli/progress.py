"""A progress bar on stderr, by tqdm, which huggingface-hub requires."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from tqdm import tqdm

# Seconds until the bar appears, and between updates on a terminal and elsewhere.
_APPEARS = 0.7
_REDRAWN = 0.1
_PRINTED = 15.0


class Bar(tqdm):
    """A bar that is removed at the end."""

    def __init__(self, title: str):
        interval = _REDRAWN if sys.stderr.isatty() else _PRINTED

        try:
            sys.stderr.flush()
            unread = False
        except OSError:
            unread = True

        super().__init__(desc=title, delay=_APPEARS, mininterval=interval, leave=False, disable=unread)

    def __call__(self, done: int, total: int, unit: str) -> None:
        """Report progress; ``total`` is 0 if unknown."""
        self.total = total or None
        self.unit = f" {unit}"
        self.update(done - self.n)

    def display(self, *args: Any, **named: Any) -> Any:
        """Draw the bar; it ends, and the run does not, if nobody reads stderr any more."""
        try:
            return super().display(*args, **named)
        except OSError:
            self.disable = True
            return False

    def close(self) -> None:
        """Remove the bar."""
        with suppress(OSError):
            super().close()
