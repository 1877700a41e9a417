"""The time limit of a test."""

import os
import signal

import pytest
from timeouts import limited


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="a time limit is a signal of POSIX")
def test_a_wait_without_an_end_fails(monkeypatch):
    monkeypatch.delenv("FASTAR_SOAK", raising=False)
    read, _ = os.pipe()
    with pytest.raises(pytest.fail.Exception, match="no end within 1 s"), limited(1):
        os.read(read, 1)
