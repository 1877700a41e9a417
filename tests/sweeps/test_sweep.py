"""Sweeps: digests, cells on disk, resumption after an interruption, bounded memory, grid and plot."""

import errno
import os
import tracemalloc
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.reports import drawing
from fastar_nodes.reports.drawing import text_width
from fastar_nodes.reports.quality import Quality, measure
from fastar_nodes.reports.record import Report
from fastar_nodes.reports.sweep import Cell
from fastar_nodes.sweeps.images import _LETTERS, LONGEST, _fitting, sweep_grid, sweep_plot
from fastar_nodes.sweeps.keys import digest, weights_digest
from fastar_nodes.sweeps.store import CellStore, completed
from fastar_nodes.sweeps.sweep import Axis, Sweep, sweep_table
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo


def report(seconds=1.0, images=1, accepted=9) -> Report:
    out = Report("fasthybrid", "tiny", {"threshold": 0.9}, 7, images, "cpu", seconds)
    out.add(transformer_passes=8, accepted=accepted, rejected=10 - accepted)
    out.maps["step"] = np.zeros((images, 2, 2), np.int32)
    return out


def places(x: Axis, y: Axis, seeds) -> list[tuple[int, int, int]]:
    """(index of x, index of y, seed) of all cells, by y, seed, x."""
    return [(i, j, seed) for j in range(len(y.values)) for seed in seeds for i in range(len(x.values))]


def picture(k: int, images=1, side=16) -> np.ndarray:
    return np.random.default_rng(k).integers(0, 256, (images, side, side, 3), dtype=np.uint8)


@dataclass(frozen=True)
class Part:
    a: int
    b: tuple


def test_a_digest_depends_on_every_part():
    values = [1, 1.0, True, "1", None, (), (1,), ("1",), ("", "1")]
    records = [{"a": 1}, {"a": 2}, {"b": 1}, Part(1, ()), Part(1, (2,))]
    tensors = [torch.ones(2), torch.ones(2, 1), torch.zeros(2), torch.ones(2, dtype=torch.bfloat16)]
    parts = values + records + tensors
    assert len({digest(part) for part in parts}) == len(parts)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) and digest(1, 2) != digest(12)
    with pytest.raises(TypeError):
        digest(object())


def test_a_digest_of_weights_sees_values_and_types():
    net = torch.nn.Linear(3, 2)
    first = weights_digest(net)
    assert first == weights_digest(net)
    with torch.no_grad():
        net.weight[1, 2] += 1
    assert weights_digest(net) != first and weights_digest(net) != weights_digest(net.half())


def test_a_digest_of_large_weights_samples_all_of_them():
    """100,000 values, of which every 25th is read: 0, 25, ..., 99,975."""
    net = torch.nn.Linear(1000, 100, bias=False)
    first = weights_digest(net)
    for at, seen in ((0, True), (50_000, True), (99_975, True), (99_976, False)):
        other = torch.nn.Linear(1000, 100, bias=False)
        other.load_state_dict(net.state_dict())
        with torch.no_grad():
            other.weight.view(-1)[at] += 1
        assert (weights_digest(other) != first) == seen


def test_a_cell_whose_image_holds_no_whole_images_is_made_again(tmp_path):
    """48 rows of pixels are 3 images, and 47 are none."""
    store = CellStore(tmp_path)
    store.write("a", picture(1, 3), report(images=3))
    with Image.open(tmp_path / "a.png") as image:
        about = PngInfo()
        about.add_text("fastar", image.text["fastar"])
        image.crop((0, 0, 16, 47)).save(tmp_path / "b.png", pnginfo=about)

    assert store.read("a") is not None and store.read("b") is None


def test_a_figure_that_does_not_fit_is_shortened():
    forms = ["480 diffusion calls", "480"]
    widths = [round(text_width(text, 20)) for text in forms]
    for width, text in ((widths[0] + 1, "480 diffusion calls"), (widths[0] - 1, "480"), (widths[1] - 1, "")):
        assert _fitting(forms, width, 20) == text


def test_a_cell_comes_back_as_written(tmp_path):
    store = CellStore(tmp_path / "new")
    assert store.read("a") is None and not (tmp_path / "new").exists()
    for images in (1, 3):
        store.write("a", picture(1, images), report(images=images))
        found, told = store.read("a")
        assert np.array_equal(found, picture(1, images)) and told == replace(report(images=images), maps={})
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.png"]


@pytest.mark.parametrize("cut", [0, 10, 400])
def test_a_damaged_cell_is_drawn_again(tmp_path, cut):
    store = CellStore(tmp_path)
    store.write("a", picture(1), report())
    path = store.path("a")
    path.write_bytes(path.read_bytes()[:cut])
    assert store.read("a") is None


class Stop(Exception):
    pass


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    store, keys, drawn = CellStore(tmp_path), [f"k{i}" for i in range(100)], []

    def make(k, last=10**9):
        if len(drawn) >= last:
            raise Stop
        drawn.append(k)
        return picture(k), report(1 + k)

    with pytest.raises(Stop):
        for _ in completed(store, keys, lambda k: make(k, 37)):
            pass
    assert drawn == list(range(37)) and len(list(tmp_path.iterdir())) == 37
    done = list(completed(store, keys, make))
    assert drawn == list(range(100)), "cells on disk are not drawn again"
    assert [k for k, *_ in done] == list(range(100))
    assert all(np.array_equal(p, picture(k)) and r.seconds == 1 + k and not r.maps for k, p, r in done)
    assert len(list(completed(store, keys, None))) == 100


def test_a_cell_reads_the_same_when_it_is_drawn_and_later(tmp_path):
    store = CellStore(tmp_path)
    [(_, _, drawn)] = completed(store, ["k0"], lambda k: (picture(k), report(0.0120004999)))
    [(_, _, later)] = completed(store, ["k0"], None)
    assert drawn.seconds == later.seconds == 0.012


@pytest.mark.parametrize(
    "spoil", [lambda folder: folder.touch(), lambda folder: (folder / "k3.png").mkdir(parents=True)]
)
def test_a_folder_that_cannot_be_written_is_one_line_and_no_cell_is_sampled_in_vain(tmp_path, spoil):
    folder = tmp_path / "cells"
    spoil(folder)
    sampled = []

    def make(k):
        sampled.append(k)
        return picture(k), report()

    with pytest.raises(UserError, match="^folder: ") as told:
        list(completed(CellStore(folder), [f"k{i}" for i in range(5)], make))
    assert "\n" not in str(told.value) and sampled in ([], [0, 1, 2])
    assert all(CellStore(folder).read(f"k{k}") is not None for k in sampled), "finished cells are kept"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize(("where", "call"), [(Path, "mkdir"), (Path, "write_bytes"), (os, "replace")])
def test_a_disk_that_fails_is_one_line_and_leaves_what_was_there(tmp_path, monkeypatch, number, where, call):
    store = CellStore(tmp_path)
    store.write("a", picture(1), report())

    def fails(*args, **more):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched, pytest.raises(UserError, match="^folder: "):
        patched.setattr(where, call, fails)
        store.write("b", picture(2), report())
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"] and np.array_equal(store.read("a")[0], picture(1))


@pytest.mark.slow
def test_a_hundred_large_cells_fit_into_little_memory(tmp_path):
    """100 cells of 1024 x 1024 pixels: 300 MB of images, of which one or two are in memory at a
    time, and the grid.
    """
    store = CellStore(tmp_path)
    x, y = Axis("threshold", tuple(map(str, range(10)))), Axis("lookahead", tuple(map(str, range(10))))
    where = places(x, y, [7])
    flat = np.zeros((1, 1024, 1024, 3), np.uint8)

    def make(k):
        flat[:] = k
        return flat.copy(), report()

    tracemalloc.start()
    cells = []
    for k, pictures, told in completed(store, [f"k{k}" for k in range(100)], make):
        cells.append(Cell(*where[k], f"k{k}", told))
        assert pictures[0, 0, 0, 0] == k
    grid = sweep_grid(Sweep("t", store, x, y, (7,), tuple(cells)), side=1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(grid.shape[:2]) <= LONGEST
    assert peak < 100 * flat.nbytes, f"{peak / 1e6:.0f} MB"


def made(tmp_path, seeds=(7,), y=("2", "4")) -> Sweep:
    store = CellStore(tmp_path)
    x, rows = Axis("threshold", ("0.8", "0.9", "0.99")), Axis("lookahead", y) if y != ("",) else Axis("", ("",))
    base, cells = report(4.0), []
    store.write("base", picture(99), base)
    for n, (i, j, seed) in enumerate(places(x, rows, seeds)):
        shown = picture(99) if i == 2 else np.clip(picture(99).astype(int) + (2 - i) * 8, 0, 255).astype(np.uint8)
        store.write(f"c{n}", shown, report(1.0 + i))
        cells.append(Cell(i, j, seed, f"c{n}", report(1.0 + i, accepted=9 - i), base, measure(shown, picture(99))))
    return Sweep("FastHybrid", store, x, rows, seeds, tuple(cells))


def test_the_table_names_both_axes(tmp_path):
    lines = sweep_table(made(tmp_path)).splitlines()
    assert len(lines) == 8 and lines[0].startswith("| threshold | lookahead | passes ")
    assert len({len(line) for line in lines}) == 1 and {*lines[1]} == {"|", "-"}
    assert "about 4.00x (one run each)" in lines[2] and "identical" in lines[4]
    assert "lookahead" not in sweep_table(made(tmp_path, y=("",)))


def test_a_cell_that_has_gone_is_named(tmp_path):
    sweep = made(tmp_path)
    sweep.store.path("c1").unlink()
    with pytest.raises(UserError, match=r"^sweep: the image c1\.png is missing"):
        sweep_grid(sweep)


def test_a_measure_that_no_cell_has(tmp_path):
    sweep = made(tmp_path)
    bare = replace(sweep, cells=tuple(replace(c, report=Report("mar", "t", {}, 7, 1, "cpu", 1.0)) for c in sweep.cells))
    with pytest.raises(UserError, match="^measure: "):
        sweep_plot(bare, "acceptance")


@pytest.fixture
def pen(monkeypatch):
    """What the last drawing consists of: places by text, lines, and dots with their colours.

    The place is the top left of a text, or the middle of an outlined one.
    """
    pens = []

    def draw(image):
        pens.append(Mock(wraps=ImageDraw.Draw(image)))
        return pens[-1]

    def drawn():
        texts = {}
        for call in pens[-1].text.call_args_list:
            (x, y), text, _, font, anchor = call.args
            top = y - font.getmetrics()[0] if anchor == "ls" else y  # a line is placed by its baseline
            texts.setdefault(text, []).append((x, top))
        lines = [call.args[0] for call in pens[-1].line.call_args_list]
        return SimpleNamespace(texts=texts, lines=lines, dots=[call.args for call in pens[-1].ellipse.call_args_list])

    monkeypatch.setattr(drawing, "ImageDraw", SimpleNamespace(Draw=draw, ImageDraw=ImageDraw.ImageDraw))
    return drawn


def centres(drawn):
    """Of the dots."""
    return [((a + c) / 2, (b + d) / 2) for (a, b, c, d), *_ in drawn.dots]


def test_names_are_beside_their_rows_and_above_their_columns(tmp_path, pen):
    sweep = made(tmp_path, (7, 8))
    pasted = []
    grid = sweep_grid(sweep, 128)
    cell = drawing.resize(picture(99)[0], 128, 128)
    for y, x in zip(*np.nonzero((grid == cell[0, 0]).all(-1)), strict=True):
        found = grid[y : y + 128, x : x + 128]
        if found.shape == cell.shape and (found == cell).all():
            pasted.append((x, y))
    texts = pen().texts
    assert [x for x, _ in pasted] == [texts["0.99"][0][0]] * 4
    assert sweep_grid(sweep, 32).shape[0] < grid.shape[0]
    rows = [texts[f"lookahead {a}, seed {seed}"][0][1] for a in (2, 4) for seed in (7, 8)]
    assert rows == [y for _, y in pasted]
    assert texts["0.8"][0][0] < texts["0.9"][0][0] < texts["0.99"][0][0]
    for line in ("90 % accepted", "80 % accepted", "70 % accepted", "about 4.00x", "about 2.00x", "identical"):
        assert len(texts[line]) == 4
    assert len(texts["8 passes"]) == 12
    sweep_grid(sweep, 40)
    assert len(pen().texts["1.00 s"]) == 4, "a ratio that has no room gives way to the seconds"


def test_a_plot_has_axes_and_a_column_of_identical_pictures(tmp_path, pen):
    sweep = made(tmp_path)
    sweep_plot(sweep, "PSNR")
    found = pen()
    named = {"speed-up (one run each)", "PSNR, dB (right is closer)", "identical", "labels: threshold", "lookahead"}
    assert named <= {*found.texts}
    dots = centres(found)
    assert len(dots) == 6
    column = max(x for x, _ in dots)
    assert sum(x == column for x, _ in dots) == 2, "one of every line"
    assert any(line[0] == line[2] == column for line in found.lines if len(line) == 4)
    assert abs(found.texts["identical"][0][0] + drawing.text_width("identical", _LETTERS) / 2 - column) < 1
    assert column > max(x for x, _ in dots if x != column) + 20
    # Higher is faster.
    of_first = sorted(dots[:3])
    assert of_first[0][1] < of_first[1][1] < of_first[2][1]


def plotted(places: dict[str, tuple[float, float]]) -> Sweep:
    """A sweep whose cells have these values, PSNR and speed-ups."""
    cells = []
    for i, (psnr, speedup) in enumerate(places.values()):
        cells.append(Cell(i, 0, 7, "", report(4 / speedup), report(4.0), Quality(psnr, 0.9)))
    return Sweep("FastHybrid", Mock(), Axis("threshold", tuple(places)), Axis("", ("",)), (7,), tuple(cells))


# Values of x with PSNR and speed-up. Those of the template, twice: the seconds are of one run each.
PLOTS = {
    "a steep line": {"0.5": (10.3, 1.61), "0.9": (10.2, 1.48), "0.98": (33.5, 1.8), "0.99": (34.0, 1.1)},
    "dots that touch": {"0.5": (10.3, 3.41), "0.9": (13.2, 3.3), "0.98": (33.5, 2.8), "0.99": (33.7, 2.75)},
    "dots at the top that are near": {
        "0.5": (10.25, 1.6),
        "0.9": (10.2, 1.51),
        "0.98": (33.5, 1.36),
        "0.99": (34.0, 1.25),
    },
    "dots at the bottom": {"0.5": (10.25, 1.44), "0.9": (10.2, 1.12), "0.98": (33.5, 1.05), "0.99": (34.0, 1.01)},
    "a zigzag": {f"0.{n}": (20 + n / 4, 1 + n % 2 / 4) for n in range(10, 17)},
}


@pytest.mark.parametrize("name", PLOTS)
def test_labels_of_a_plot_are_apart_from_each_other_and_from_the_line(tmp_path, pen, name):
    sweep_plot(plotted(PLOTS[name]))
    found = pen()
    assert found.texts.keys() >= PLOTS[name].keys()
    boxes = []
    for value in PLOTS[name]:
        (x, y) = found.texts[value][-1]
        half = text_width(value, _LETTERS) / 2
        boxes.append((x - half, y - _LETTERS / 2, x + half, y + _LETTERS / 2))
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert left > 0 and right < 720 and bottom < 400
        nearest = min(centres(found), key=lambda dot: drawing._distance(dot, boxes[i]))
        assert nearest == centres(found)[i], "of its own dot"
        assert not any(drawing._overlap(boxes[i], other) for other in boxes[:i])
        for (x0, y0), (x1, y1) in pairwise(centres(found)):
            for t in np.linspace(0, 1, 500):
                x, y = x0 + t * (x1 - x0), y0 + t * (y1 - y0)
                assert not (left < x < right and top < y < bottom), f"the line is not in the label {i}"


def test_without_a_baseline_a_plot_shows_seconds(tmp_path, pen):
    sweep = made(tmp_path)
    bare = replace(sweep, cells=tuple(replace(c, baseline=None) for c in sweep.cells))
    sweep_plot(bare, "acceptance")
    texts = pen().texts
    assert "seconds (one run each)" in texts and "identical" not in texts and "drafts accepted, %" in texts
    of_first = sorted(centres(pen())[:3])  # by drafts kept, of which the slowest run has fewest
    assert of_first[0][1] < of_first[1][1] < of_first[2][1], "more seconds are higher"
