"""Marks of shards that are being drawn: one process at a time, and none that outlives its process for long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fastar_nodes.scale import claims as module
from fastar_nodes.scale.claims import FOLDER, Claims
from fastar_nodes.scale.folder import Folder, host


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    return Folder(tmp_path if request.param == "local" else f"memory://{tmp_path.name}")


def mark(folder, name, **about):
    other = {"process": "other", "pid": os.getppid(), "host": host(), "beat": 0}
    folder.write(f"{FOLDER}/{name}.json", json.dumps({**other, **about}).encode())


def test_one_process_at_a_time(folder):
    with Claims(folder) as a, Claims(folder) as b:
        # Within one process the marks differ only by the claims' own id; the other one counts as alive elsewhere.
        b._me["host"] = "elsewhere"
        a._me["host"] = "here"
        assert a.take("x") and not b.take("x")
        assert b.take("y") and not a.take("y")
        a.release("x")
        assert b.take("x")
        a.release("x")  # not its own
        assert folder.names(FOLDER) == ["x.json", "y.json"]
    assert folder.names(FOLDER) == []


@pytest.mark.skipif(os.name != "posix", reason="elsewhere processes are not asked for")
def test_a_mark_of_an_ended_process_is_void(folder):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mark(folder, "x", pid=ended.pid)
    mark(folder, "y")
    with Claims(folder) as a:
        assert a.take("x"), "its process has ended"
        assert not a.take("y"), "its process is this test's parent"


def test_the_number_of_this_process_may_have_been_anothers(folder):
    mark(folder, "x", pid=os.getpid())
    with Claims(folder) as a:
        assert a.take("x")


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"pid": "x", "host": 1, "process": 2}'])
def test_a_damaged_mark_is_void_after_a_while(folder, text, monkeypatch):
    """It may be one that is being written."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    folder.write(f"{FOLDER}/x.json", text)
    a = Claims(folder)
    assert not a.take("x")
    now[0] = 31.0
    assert a.take("x")


def test_a_mark_that_does_not_change_is_void_after_a_while_and_no_clock_is_compared(folder, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    # Clocks that differ by years change nothing.
    monkeypatch.setattr(time, "time", lambda: -1e9)
    mark(folder, "x", host="elsewhere")
    a = Claims(folder, stale=30)
    assert not a.take("x")
    now[0] = 29.0
    assert not a.take("x")
    mark(folder, "x", host="elsewhere", beat=1)
    now[0] = 31.0
    assert not a.take("x"), "its counter changed"
    now[0] = 60.0
    assert not a.take("x")
    now[0] = 62.0
    assert a.take("x")


def test_counters_rise_while_a_shard_is_drawn(folder):
    with Claims(folder, beat=0.01) as a:
        a.take("x")
        until = time.monotonic() + 20
        while json.loads(folder.read(f"{FOLDER}/x.json"))["beat"] < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert folder.names(FOLDER) == []


def test_only_posix_is_asked_for_processes(folder, monkeypatch):
    """Elsewhere signal 0 would be Ctrl-C."""
    monkeypatch.setattr(module, "os", SimpleNamespace(name="nt", getpid=os.getpid))
    mark(folder, "x", pid=1 << 30)
    assert not Claims(folder).take("x")
