"""The command for whoever has a GPU, at tiny sizes on the CPU: every cell runs, and the files hold
what was measured.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from fastar_nodes.tools import gpu_hour

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    out = tmp_path_factory.mktemp("hour") / "deep" / "hour"
    assert gpu_hour.main(["--dry", "--plain", "--device", "cpu", "--out", str(out)]) == 0
    return json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md").read_text()


def test_every_cell_runs(dry):
    found, page = dry
    plain = [cell for cell in gpu_hour.cells() if cell.speed == gpu_hour.PLAIN]
    names = [(c.model, c.sampler, c.dtype) for c in plain]
    assert [(c["model"], c["sampler"], c["dtype"]) for c in found["cells"]] == names
    assert not found["failed"] and not found["left_out"]
    assert all(c["median"] > 0 and not c["extrapolated"] for c in found["cells"])
    assert page.count("MAR-B ") == 10 and "the numbers mean nothing" in page
    for cell in found["cells"]:  # acceptance is forced
        if cell["sampler"].startswith("fasthybrid"):
            assert cell["acceptance"] == 1
        if cell["sampler"] == "mulosd":
            assert cell["acceptance"] == pytest.approx(0.7, abs=0.05)


def test_parity(dry):
    """The device is the CPU itself here: fp32 is equal, and bf16 is not."""
    for entry in dry[0]["parity"]:
        if entry["on"] == "fp32 plain":
            assert entry.get("difference", 0) == 0 and entry.get("equal", 1) == 1
        elif "difference" in entry:
            assert 1e-4 < entry["difference"] < 0.5
    assert {entry["sampler"] for entry in dry[0]["parity"]} == {cell.sampler for cell in gpu_hour.cells()}


def test_long_runs_are_extrapolated(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(gpu_hour, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    steps = (SimpleNamespace(done=i + 1, total=20, report=i) for i in range(20))
    # One second a look at the clock: the fourth step is the first beyond 3 s, and the end is read a second later.
    assert gpu_hour.timed(steps, torch.device("cpu"), 3.0) == (5 * 20 / 4, True, 3)


@pytest.mark.parametrize(("seconds", "code", "words"), [("-1", 0, "Left out for lack of time"), ("100", 1, "Failed: ")])
def test_lack_of_time_and_failures_are_reported(tmp_path, monkeypatch, seconds, code, words):
    def measure(cell, *_):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(gpu_hour, "parity", lambda *_: [])
    monkeypatch.setattr(gpu_hour, "measure", measure)
    kept = gpu_hour.cells()[:2]
    monkeypatch.setattr(gpu_hour, "cells", lambda: kept)
    assert gpu_hour.main(["--dry", "--device", "cpu", "--seconds", seconds, "--out", str(tmp_path / "x")]) == code
    text = (tmp_path / "x.md").read_text()
    assert words in text and "MAR-B mar, batch 1, bf16, compile" in text and "and more" not in text


def test_mistakes(capsys):
    assert gpu_hour.main(["--device", "cpu"]) == 2
    assert "add --dry" in capsys.readouterr().out
    assert gpu_hour.main(["--device", "cuda:77"]) == 2
    assert "device:" in capsys.readouterr().out
