"""The commands evaluate and plot."""

import sys

import made_sweeps
import numpy as np
import pytest
import torch
from fastar_nodes.lab.sweeps.measures import read_results
from fastar_nodes.lab.sweeps.store import Store
from PIL import Image

pytestmark = pytest.mark.slow


@pytest.fixture
def sweep(tmp_path) -> Store:
    return made_sweeps.write(tmp_path / "sweep")


def test_evaluate_and_plot_from_the_command_line(sweep, lab, tmp_path):
    code, out, err = lab("evaluate sweep --resamples 20")
    head = [title.strip() for title in out.splitlines()[0].split("|")[1:-1]]
    assert code == 0 and head[:5] == ["cell", "images", "s / image, batch 8", "speed-up, batch 8", "PSNR, dB"]
    assert "fasthybrid-0.8: 3 measured" in err
    assert lab("evaluate sweep --resamples 20")[:2] == (0, out), "figures are deterministic"
    code, out, _ = lab("plot sweep")
    assert code == 0 and out.splitlines()[0] == "plot: curve.png"
    assert Image.open(tmp_path / "curve.png").size == (1100, 680)


def test_evaluate_refuses_bad_input_before_any_work(sweep, lab, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "pictures", lambda *_: pytest.fail("no image should be read"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    np.savez(tmp_path / "large.npz", arr_0=np.zeros((50, 32, 32, 3), np.uint8))
    assert "nowhere" in sentence(lab("evaluate", "nowhere"))
    for field, *options in (
        ("measures", "--measures", "psnr,sharpness"),
        ("measures", "--measures", " , "),
        ("reference", "--reference", "none.npz"),
        ("reference", "--reference", "large.npz"),
        ("reference", "--reference", "large.npz", "--measures", "psnr"),
        ("resamples", "--resamples", 3),
    ):
        assert sentence(lab("evaluate", "sweep", *options)).startswith(f"{field}: "), options
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    assert "torch-fidelity" in sentence(lab("evaluate", "sweep", "--measures", "fid"))
    assert read_results(sweep) == []


def test_plot_refuses_bad_input(sweep, lab, sentence, tmp_path):
    sentence(lab("plot", "sweep"))
    lab("evaluate sweep --resamples 20")
    wrong = {"measure": ("fid",), "out": ("curve.txt",)}
    for field, value in [(field, value) for field, values in wrong.items() for value in values]:
        assert sentence(lab("plot", "sweep", f"--{field}", value)).startswith(f"{field}: ")
    assert not (tmp_path / "curve.png").exists()
