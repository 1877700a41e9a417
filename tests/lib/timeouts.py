"""Time limits, so that a test that waits for a process, a socket or a FIFO fails."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

# Of a test, and of the fixtures that begin or end with it.
SECONDS = 900


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    """Fail the test if the block takes longer.

    Not on Windows, nor in the soak, whose tests take an hour, nor with a model of the user's, which may be large.
    """
    if not hasattr(signal, "SIGALRM") or os.environ.get("FASTAR_SOAK") or os.environ.get("FASTAR_MODEL"):
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"no end within {seconds} s"))
    left = signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(left)
        signal.signal(signal.SIGALRM, before)


def forked(seconds: int) -> None:
    """To be called in a forked process: one thread, because OpenMP
    would wait for the parent's others, and an end after ``seconds``.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent's handler does not run within a call of C
    signal.alarm(seconds)
