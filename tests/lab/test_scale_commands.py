"""The commands evaluate and plot."""

import csv
import sys
from types import ModuleType

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


@pytest.fixture
def colour(monkeypatch):
    made = ModuleType("colour_features")
    made.mean = lambda pictures: pictures.float().mean((1, 2))
    monkeypatch.setitem(sys.modules, "colour_features", made)


def test_evaluate_and_plot_from_the_command_line(sweep, lab, tmp_path):
    code, out, err = lab("evaluate sweep --resamples 20")
    head = [title.strip() for title in out.splitlines()[0].split("|")[1:-1]]
    assert code == 0 and head[:5] == ["cell", "images", "s / image", "speed-up", "PSNR, dB"]
    assert "fasthybrid-0.8: 3 measured" in err
    assert lab("evaluate sweep --resamples 20")[:2] == (0, out), "figures are deterministic"
    code, out, _ = lab("plot sweep")
    assert code == 0 and out.splitlines()[0] == "plot: curve.png"
    assert Image.open(tmp_path / "curve.png").size == (1100, 680)
    assert Image.open(tmp_path / "curve-sheet.png").size[0] > 400
    with open(tmp_path / "curve.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 5


def test_features_of_a_function_against_a_reference(sweep, lab, tmp_path, colour, fake_fidelity):
    np.savez(tmp_path / "real.npz", arr_0=made_sweeps.pictures(900, 60, 2.0))
    options = ("--reference", "real.npz", "--extractor", "colour_features:mean", "--resamples", 20, "--device", "cpu")
    code, out, _ = lab("evaluate", "sweep", *options)
    assert code == 0 and "Frechet distance (colour_features:mean)" in out
    assert "Difference from the plain sampler, paired:" in out
    measures = {r.measure for r in read_results(sweep)}
    assert measures == {"psnr", "ssim", "identical", "frechet", "kid", "precision", "recall"}
    code, out, _ = lab("plot", "sweep", "--measure", "kid", "--out", "k.jpg", "--indices", "3, 8..10")
    assert code == 0 and (tmp_path / "k.jpg").is_file() and (tmp_path / "k-sheet.jpg").is_file()


def test_evaluate_refuses_bad_input_before_any_work(sweep, lab, sentence, tmp_path, monkeypatch, colour):
    monkeypatch.setattr(Store, "pictures", lambda *_: pytest.fail("no image should be read"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    np.savez(tmp_path / "large.npz", arr_0=np.zeros((50, 32, 32, 3), np.uint8))
    assert "nowhere" in sentence(lab("evaluate", "nowhere"))
    colour_only = ("--extractor", "colour_features:mean")
    for field, *options in (
        ("measures", "--measures", "psnr,sharpness"),
        ("measures", "--measures", " , "),
        ("reference", "--reference", "none.npz"),
        ("reference", "--reference", "large.npz"),
        ("reference", "--reference", "large.npz", "--measures", "psnr"),
        ("measures", "--measures", "fid", *colour_only),
        ("extractor", "--measures", "psnr", *colour_only),
        ("resamples", "--resamples", 3),
        ("extractor", "--extractor", "resnet"),
    ):
        assert sentence(lab("evaluate", "sweep", *options)).startswith(f"{field}: "), options
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    assert "torch-fidelity" in sentence(lab("evaluate", "sweep", "--measures", "fid"))
    assert read_results(sweep) == []


def test_plot_refuses_bad_input(sweep, lab, sentence, tmp_path):
    sentence(lab("plot", "sweep"))
    lab("evaluate sweep --resamples 20")
    (tmp_path / "a.csv").mkdir()
    wrong = {"measure": ("fid",), "out": ("curve.txt", "a.png"), "indices": ("5, 99", "one")}
    for field, value in [(field, value) for field, values in wrong.items() for value in values]:
        assert sentence(lab("plot", "sweep", f"--{field}", value)).startswith(f"{field}: ")
    assert not (tmp_path / "curve.png").exists()
