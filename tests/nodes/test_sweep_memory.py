"""Memory of the process while a sweep of 100 large cells is made; minutes, so only with FASTAR_SOAK=1 (``make soak``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(
    not os.environ.get("FASTAR_SOAK"), reason="NOT TESTED: a sweep of 100 large cells; set FASTAR_SOAK=1"
)
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_a_sweep_of_100_large_cells_stays_below_a_gigabyte_above_idle(tmp_path):
    script = Path(__file__).with_name("sweep_memory.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    idle, peak, cells, *_ = map(int, done.stdout.split())
    assert cells == 101 and peak - idle < 1e9, f"{(peak - idle) / 1e6:.0f} MB above idle"
