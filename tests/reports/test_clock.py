"""Seconds of a run, without the pauses in which a caller draws previews."""

from types import SimpleNamespace

import pytest
import torch
from fastar_nodes.reports import record
from fastar_nodes.reports.record import PAUSE, Clock, Report


class Time:
    """A host with one CUDA device: seconds of the host, and
    until when the stream is busy with the work that was queued.
    """

    def __init__(self):
        self.host = 0.0
        self.busy_until = 0.0
        self.waits = 0

    def perf_counter(self) -> float:
        return self.host

    def queue(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.host) + seconds

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1
        self.host = max(self.host, self.busy_until)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace()

        def note(stream: str) -> None:
            assert stream == "stream of cuda:1"
            made.at = max(self.host, self.busy_until)

        made.record = note
        made.elapsed_time = lambda later: 1000 * (later.at - made.at)
        return made


@pytest.fixture
def time(monkeypatch):
    time = Time()
    monkeypatch.setattr(record, "time", time)
    fakes = {
        "Event": time.event,
        "synchronize": time.synchronize,
        "current_stream": lambda device: f"stream of {device}",
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: 123,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return time


def new_report() -> Report:
    return Report("mar", "m", {}, 1, 1, "cpu")


def test_wall_time_without_pauses_on_a_cpu(time):
    clock, report = Clock(torch.device("cpu")), new_report()
    with clock.phase("head"):
        time.host += 2
    with clock.phase(PAUSE):
        time.host += 100
    with clock.phase("head"):
        time.host += 3
    time.host += 4  # of no phase
    clock.stop(report)
    assert report.seconds == 9 and report.phases == {"head": 5} and report.peak_memory_bytes is None


def test_queued_work_is_no_pause_on_a_gpu(time):
    """The host is ahead of the device: it comes back from the pause while the work before it still runs."""
    clock, report = Clock(torch.device("cuda:1")), new_report()
    with clock.phase("head"):
        time.queue(5)
    with clock.phase(PAUSE):
        time.host += 1
    with clock.phase("head"):
        time.queue(2)
    waits = time.waits
    clock.stop(report)
    assert report.seconds == 7 and report.phases == {"head": 7} and report.peak_memory_bytes == 123
    assert (waits, time.waits) == (1, 2), "only the start and the end wait for the device"


def test_a_preview_is_a_pause_on_a_gpu(time):
    """It waits for the work before it, takes 3 s on the device
    and 1 s on the host, and is deducted; the waiting is not.
    """
    clock, report = Clock(torch.device("cuda:1")), new_report()
    time.queue(5)
    with clock.phase(PAUSE):
        time.synchronize(torch.device("cuda:1"))
        time.queue(3)
        time.synchronize(torch.device("cuda:1"))
        time.host += 1
    time.queue(2)
    clock.stop(report)
    assert report.seconds == 7
