"""Load Sweep Cell and Sweep Plot on a folder that the command line drew."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from pathlib import Path

import fake_comfy
import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import sweep_cells, sweeps
from fastar_nodes.nodes.storage import drawn_sweep
from fastar_nodes.scale.measures import Means, evaluate
from fastar_nodes.scale.store import Store

sys.path.append(str(Path(__file__).parents[1] / "scale"))
import made_sweeps  # noqa: E402


@pytest.fixture
def base(tmp_path):
    fake_comfy.state.folder = tmp_path
    (tmp_path / "input").mkdir()
    return tmp_path


@pytest.fixture
def store(base) -> Store:
    return made_sweeps.write(base / "output" / "big" / "run1", finished=16)


def load(**changes):
    return sweep_cells.LoadSweepCell.execute(
        **{"folder": "big/run1", "cell": "1", "first": 0, "count": 6} | changes
    ).result


def test_a_cell_is_shown_from_an_index(store):
    image, text = load(cell="2", first=6, count=5)
    wanted = np.concatenate([part for _, part in store.images(store.cell("fasthybrid-0.8"))])[6:11]
    assert np.array_equal((image.numpy() * 255).round().astype(np.uint8), wanted)
    assert text.splitlines()[0] == "fasthybrid-0.8 on demo, seed 7, 48 of 48 images"
    assert "speed-up: 4.00x, 0.2500 s an image" in text and "threshold=0.8" in text
    assert text.splitlines()[-5:] == [
        "1: mar-0",
        "2: fasthybrid-0.8",
        "3: fasthybrid-0.9",
        "4: fasthybrid-1.0",
        "5: cspd-0",
    ]


def test_measures_are_in_the_text(store):
    evaluate(store, ["psnr"], Means(resamples=20))
    _, text = load(cell="fasthybrid-0.9")
    assert "PSNR, dB: " in text and "[" in text


@pytest.mark.parametrize("cell", ["3", "fasthybrid-0.9", " 0.9 ", "HYBRID-0.9"])
def test_a_cell_has_a_number_a_name_and_parts_of_it(store, cell):
    assert sweep_cells.find_cell(store, cell).id == "fasthybrid-0.9"


def test_unfinished_images_are_left_out(store):
    image, text = load(cell="cspd", first=12, count=20)
    assert len(image) == 4 and "16 of 48 images" in text
    image, _ = load(first=44, count=64)
    assert len(image) == 4, "the cell ends"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"cell": "fasthybrid"},
            "cell: 3 cells have 'fasthybrid' in the name; give a number from 1 to 5, or one of mar-0",
        ),
        ({"cell": "zipar"}, "cell: no cell has 'zipar'"),
        ({"cell": "6"}, "cell: no cell has '6'"),
        ({"cell": " "}, "cell: it is empty; there are mar-0"),
        ({"first": 48}, "first: mar-0 has 48 images, 0 to 47"),
        ({"cell": "cspd", "first": 20}, "first: images 20 to 25 of cspd-0 are not finished"),
        ({"count": 65}, "count"),
        ({"first": -1}, "first"),
    ],
)
def test_bad_values_are_refused(store, changes, words):
    with pytest.raises(UserError, match=words):
        load(**changes)


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "../secret", "big/../../secret", "/etc", "none", "a\0b", "x" * 5000, "big/link"]
)
def test_folders_outside_are_refused(store, base, name):
    (base / "secret").mkdir(exist_ok=True)
    if not (base / "output" / "big" / "link").exists():
        os.symlink(base / "secret", base / "output" / "big" / "link")
    with pytest.raises(UserError, match="folder: there is no folder"):
        load(folder=name)
    with pytest.raises(UserError, match="folder: there is no folder"):
        drawn_sweep(name)


def test_a_shard_that_claims_a_terabyte_is_refused(store):
    header, file = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("arr_0.npy", header.getvalue() + b"short")
    cell = store.cell("mar-0")
    store.folder.write(f"cells/mar-0/{store.shards(cell)[0].stem}.npz", file.getvalue())
    with pytest.raises(UserError, match="mar-0/shard-0000000-0000007.npz .* is missing or damaged"):
        load()


def test_the_input_folder_is_one_too(base):
    made_sweeps.write(base / "input" / "mine", images=8)
    assert load(folder="mine")[0].shape[0] == 6
    (base / "output" / "empty").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no sweep"):
        load(folder="empty")


# ------------------------------------------------------------------------------------------------ Sweep Plot


def plot(**changes):
    return sweeps.SweepPlot.execute(**{"measure": "PSNR"} | changes).result[0]


def test_a_folder_is_plotted(store):
    evaluate(store, ["psnr", "ssim", "identical"], Means(resamples=20))
    pictures = [plot(measure=m, folder="big/run1") for m in ("PSNR", "SSIM", "identical")]
    assert all(p.shape == (1, 680, 1100, 3) and p.std() > 0.01 for p in pictures)
    assert not np.array_equal(pictures[0], pictures[1])


def test_the_plot_of_a_folder_refuses_bad_input(store):
    with pytest.raises(UserError, match="sweep: nothing is connected"):
        plot()
    with pytest.raises(UserError, match="folder: a sweep is connected too"):
        plot(sweep=object(), folder="big/run1")
    with pytest.raises(UserError, match="has no measures yet"):
        plot(folder="big/run1")
    evaluate(store, ["psnr"], Means(resamples=20))
    with pytest.raises(UserError, match="measure: 'acceptance' was not measured; there are psnr"):
        plot(folder="big/run1", measure="acceptance")
    with pytest.raises(UserError, match="^measure: "):
        plot(folder="big/run1", measure="beauty")


def test_a_grown_folder_is_read_again(store, base):
    for node in (sweeps.SweepPlot, sweep_cells.LoadSweepCell):
        before = node.fingerprint_inputs(folder="big/run1")
        assert node.fingerprint_inputs(folder="big/run1") == before
        assert before != node.fingerprint_inputs(folder="elsewhere")
    made_sweeps.write(base / "output" / "big" / "run1")
    assert sweep_cells.LoadSweepCell.fingerprint_inputs(folder="big/run1") != before
    before = sweeps.SweepPlot.fingerprint_inputs(folder="big/run1")
    evaluate(store, ["psnr"], Means(resamples=20))
    assert sweeps.SweepPlot.fingerprint_inputs(folder="big/run1") != before
    assert sweeps.SweepPlot.fingerprint_inputs(folder="", sweep=None) == ""
