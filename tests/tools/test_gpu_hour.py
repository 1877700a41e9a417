"""The command for whoever has a GPU, at tiny sizes on the CPU: every cell runs, and the files hold what was measured."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from fastar_nodes.bench.operations import Speed
from fastar_nodes.model_loaders.networks import speed
from fastar_nodes.samplers.registry import SAMPLERS
from fastar_nodes.tools import gpu_cells, gpu_hour

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    out = tmp_path_factory.mktemp("hour") / "deep" / "hour"
    assert gpu_hour.main(["--dry", "--plain", "--device", "cpu", "--out", str(out)]) == 0
    return json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md").read_text()


def test_every_cell_runs(dry):
    found, page = dry
    plain = [cell for cell in gpu_cells.cells() if cell.speed == speed.PLAIN]
    assert [(c["model"], c["sampler"], c["dtype"]) for c in found["cells"]] == [
        (c.model, c.sampler, c.dtype) for c in plain
    ]
    assert not found["failed"] and not found["left_out"]
    assert all(c["median"] > 0 and not c["extrapolated"] for c in found["cells"])
    counted = [c for c in found["cells"] if c["operations"] is not None]
    assert len(counted) > len(plain) - 5 and all(c["operations"] > 0 for c in counted)
    assert all(
        c["operations"] > 300 and c["floor"] > 0 for c in counted if c["sampler"] in ("mar", "llamagen", "zipar")
    )
    assert page.count("\n| MAR-B | mar |") == 4 and "the numbers mean nothing" in page


def test_acceptance_is_forced(dry):
    for cell in dry[0]["cells"]:
        if cell["sampler"].startswith("fasthybrid"):
            assert cell["acceptance"] == 1
        if cell["sampler"] == "mulosd":
            assert cell["acceptance"] == pytest.approx(0.7, abs=0.05)


def test_every_sampler_has_a_cell():
    """CSpD with LazyMAR's caches is left out."""
    run = {SAMPLERS[cell.sampler].run for cell in gpu_cells.cells()}
    assert [name for name, entry in SAMPLERS.items() if entry.run not in run] == ["cspd+lazymar"]


def test_parity(dry):
    """The device is the CPU itself here: fp32 is equal, and bf16 is not."""
    for entry in dry[0]["parity"]:
        if entry["on"] == "fp32 plain":
            assert entry.get("difference", 0) == 0 and entry.get("equal", 1) == 1
        elif "difference" in entry:
            assert 1e-4 < entry["difference"] < 0.5
    assert {entry["sampler"] for entry in dry[0]["parity"]} == {cell.sampler for cell in gpu_cells.cells()}


def test_a_compiled_cell(monkeypatch):
    torch._dynamo.reset()
    before = speed.set_backend("eager")
    try:
        cell = gpu_cells.Cell("MAR-B", "mar", speed=speed.COMPILE)
        model = gpu_cells.build("MAR-B", "fp32", CPU, True)
        found = gpu_hour.measure(cell, model, CPU, Speed(1e9, 1e9), True)
    finally:
        speed.set_backend(before)
        torch._dynamo.reset()
    assert found["median"] > 0 and "operations" not in found and found["first"] > found["median"]


def test_long_runs_are_extrapolated(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(gpu_hour, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    steps = (SimpleNamespace(done=i + 1, total=20, report=i) for i in range(20))
    # One second a look at the clock: the fourth step is the first beyond 3 s, and the end is read a second later.
    assert gpu_hour._timed(steps, CPU, 3.0) == (5 * 20 / 4, True, 3)


def test_lack_of_time_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_hour, "parity", lambda *_: [])
    assert gpu_hour.main(["--dry", "--device", "cpu", "--seconds", "-1", "--out", str(tmp_path / "x")]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    on_a_cpu = [cell for cell in gpu_cells.cells() if cell.speed in (speed.PLAIN, speed.COMPILE)]
    assert len(found["left_out"]) == len(on_a_cpu) and not found["cells"]
    assert "Left out for lack of time: MAR-B mar, batch 1" in (tmp_path / "x.md").read_text()


def test_a_failure_leaves_the_others(tmp_path, monkeypatch, capsys):
    def measure(cell, *_):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(gpu_hour, "parity", lambda *_: [])
    monkeypatch.setattr(gpu_hour, "measure", measure)
    monkeypatch.setattr(gpu_hour, "cells", lambda: gpu_cells.cells()[:2])
    assert gpu_hour.main(["--dry", "--device", "cpu", "--out", str(tmp_path / "x")]) == 1
    assert list(json.loads((tmp_path / "x.json").read_text())["failed"].values()) == ["out of memory"] * 2
    assert "Failed: MAR-B mar, batch 1, bf16, plain: out of memory" in (tmp_path / "x.md").read_text()


def test_mistakes(capsys):
    assert gpu_hour.main(["--device", "cpu"]) == 2
    assert "add --dry" in capsys.readouterr().out
    assert gpu_hour.main(["--device", "cuda:77"]) == 2
    assert "device: cuda:77 cannot be used here" in capsys.readouterr().out
