"""Figures of reports, sweeps and maps on small cases whose values were worked out by hand."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports import exchange, maps
from fastar_nodes.reports.drawing import ticks
from fastar_nodes.reports.grid import _numbers, cell_order
from fastar_nodes.reports.quality import Quality
from fastar_nodes.reports.record import Report, joined, repeated, to_csv, to_table
from fastar_nodes.reports.summary import one_line
from fastar_nodes.reports.sweep import Cell, summary
from fastar_nodes.runs.baseline import no_gain
from fastar_nodes.sweeps import images as sweep_images
from fastar_nodes.sweeps.store import CellStore
from fastar_nodes.sweeps.sweep import Axis, Sweep


def run(sampler="mar", seconds=1.0, images=1, settings=None, **counts) -> Report:
    out = Report(sampler, "tiny", settings or {}, 7, images, "cpu", seconds)
    out.add(**counts)
    return out


# ------------------------------------------------------------------------------------------------ record


def test_tokens_per_pass():
    """Two images of 4 tokens, of which 7 were decided in 3 passes, the first at step 0: 7 / 2 / 3."""
    out = run(transformer_passes=3)
    out.maps["step"] = np.array([[[0, 1], [1, 2]], [[0, 0], [-1, 2]]], np.int32)
    assert out.tokens_per_pass == pytest.approx(7 / 6)


# Values of two parts of a batch, and of the batch, by field: a new one is added here too.
JOINED = {
    **{name: ("a", "b", "a") for name in ("sampler", "model", "device", "note", "prompt", "process", "dtype")},
    **{name: (1, 2, 1) for name in ("seed", "threads", "parameters")},
    **{name: ((1, 2), (3,), (1, 2)) for name in ("timings", "grid")},
    **{name: (("a",), ("b", "a"), ("a", "b", "a")) for name in ("conditions", "edits")},
    **{"settings": ({"cfg": 1}, {"cfg": 2}, {"cfg": 1}), "subject": ("cat", "boat", "")},
    **{"images": (1, 2, 3), "seconds": (1.5, 2.0, 3.5), "first_run": (False, True, True)},
    **{name: ({"a": 1, "b": 2}, {"b": 3, "c": 4}, {"a": 1, "b": 5, "c": 4}) for name in ("phases", "counts")},
    "memory": ({"a": 1, "b": 2}, {"b": 1, "c": 4}, {"a": 1, "b": 2, "c": 4}),
    "peak_memory_bytes": (3, None, 3),
    "maps": ({"step": np.zeros((1, 1, 1))}, {"step": np.ones((2, 1, 1))}, {"step": np.array([[[0]], [[1]], [[1]]])}),
    "similarity": (np.array([0.5]), np.array([0.25]), np.array([0.5, 0.25])),
}


def test_every_field_of_a_report_joins_as_it_says():
    assert set(JOINED) == {one.name for one in fields(Report)}
    first, second = (Report(**{name: values[k] for name, values in JOINED.items()}) for k in (0, 1))
    out = vars(joined([first, second]))
    for name, (*_, expected) in JOINED.items():
        if name == "maps":
            assert np.array_equal(out[name]["step"], expected["step"])
        else:
            assert np.array_equal(out[name], expected), name


def test_the_work_of_a_draft_model_is_shown_apart():
    """A sum of both would say nothing: the draft model is smaller than its target."""
    report = Report("cspd", "m", {"steps": 32}, 1, 1, "cpu", seconds=1.0)
    report.add(transformer_passes=39, draft_passes=27, head_calls=1872, draft_head_calls=1296, head_rows=11808)
    assert (report.own("transformer_passes"), report.of_draft("transformer_passes")) == (12, 27)
    assert report.own("restarts") is None
    assert _numbers(report, None) == [
        ("passes", "12 (draft 27)"),
        ("diffusion calls", "576 (draft 1,296)"),
        ("seconds", "1.00"),
    ]
    assert one_line(report) == "12 passes (draft 27), 576 diffusion calls (draft 1,296), 1.00 s (one run)"
    assert "| 12 (draft 27) | 576 (draft 1296) |" in to_table([report])
    head, row = to_csv(report).split()
    found = dict(zip(head.split(","), row.split(","), strict=True))
    assert (found["transformer_passes"], found["draft_passes"], found["draft_head_calls"]) == ("39", "27", "1296")
    assert summary([Cell(0, 0, 7, "k", report, report, None)]).passes == 12


# ------------------------------------------------------------------------------------------------ summary


def test_a_loss_is_told_from_repeats_that_all_lost():
    """Three repeats beside 1 s of the baseline: 1.25 s each, then two of them slower and one faster."""
    plain = repeated([run("mar", 1.0) for _ in range(3)])
    slow = repeated([run("mar", 1.25) for _ in range(3)])
    mixed = repeated([run("mar", seconds) for seconds in (1.25, 0.9, 1.4)])
    assert no_gain(slow, plain) == "No gain here. This run took 1.25 times as long as the baseline."
    assert no_gain(mixed, plain) == ""
    assert no_gain(run("mar", 9.0), run("mar", 1.0)) == "", "one run each says nothing"


def test_limits_at_which_nothing_is_gained():
    drafted = {"lookahead": 4, "threshold": 1.0}
    assert no_gain(run("fasthybrid", settings=drafted)) == "", "a similarity of 1 passes a threshold of 1"
    assert no_gain(run("fasthybrid", settings={**drafted, "threshold": 1.01})).startswith("No draft could be accepted")
    for idle in ({"lookahead": 1}, {"lookahead_start": 64, "steps": 64}):
        assert no_gain(run("fasthybrid", settings={**drafted, **idle})).startswith("No draft could be accepted"), idle
    fewer = {"lookahead": 0, "diffusion_steps": 50, "diffusion_steps_end": 10}
    assert no_gain(run("fasthybrid", settings={**drafted, **fewer})) == "", "later tokens take fewer diffusion steps"
    beside = run("fasthybrid+lazymar", cached_calls=10, settings={**drafted, "lookahead": 0, "steps": 64})
    assert no_gain(beside) == "", "the cache was used"
    prefilled = {"prefill_ratio": 1.0, "mode": "lossless"}
    assert no_gain(run("cspd", settings=prefilled)).startswith("Nothing was drafted")
    for passes, words in ((4, "Every pass decided only one token"), (3, "")):
        out = run("zipar", transformer_passes=passes)
        out.maps["step"] = np.arange(4).reshape(1, 2, 2)
        found = no_gain(out)
        assert found.startswith(words) and bool(found) == bool(words)


# ------------------------------------------------------------------------------------------------ sweeps


def test_no_speed_up_over_seeds_of_which_one_has_none():
    plain, fast = run("mar", 2.0), run("mar", 1.0)
    both = [Cell(0, 0, seed, "k", fast, plain, None) for seed in (1, 2)]
    assert summary(both).speedup.value == 2.0 and summary(both).speedup.pairs == 2
    assert summary([both[0], Cell(0, 0, 2, "k", fast, None, None)]).speedup is None


def cell(seed, seconds, base, psnr=None, ssim=None, word="", **counts) -> Cell:
    quality = Quality(psnr, ssim, word)
    return Cell(0, 0, seed, f"k{seed}", run(seconds=seconds, **counts), run(seconds=base), quality)


def test_a_point_takes_medians_of_times_and_means_of_the_rest():
    """Seconds 1, 2, 6 against 4, 3, 3: ratios 4, 1.5, 0.5. PSNR 20, 30, 70; passes 8, 8, 11; acceptance 1, 1, 0.25.

    A tenth of the way from the first to the third of three values is a fifth of the way to the second.
    """
    cells = [
        cell(1, 1.0, 4.0, 20.0, 0.2, transformer_passes=8, accepted=4),
        cell(2, 2.0, 3.0, 30.0, 0.3, transformer_passes=8, accepted=4),
        cell(3, 6.0, 3.0, 70.0, 0.7, transformer_passes=11, accepted=1, rejected=3),
    ]
    point = summary(cells)
    assert (point.speedup.value, point.seconds, point.passes) == (1.5, 2.0, 9.0)
    assert point.speedup.text == "no measurable difference (0.50 to 4.00 over 3 seeds)"
    assert point.timed == "2.00 (median of 3)"
    assert (point.psnr, point.psnr_low) == (30.0, pytest.approx(22.0))
    assert point.ssim == pytest.approx(0.4) and point.acceptance == pytest.approx(0.75)
    assert point.word == ""


def test_a_word_is_shown_if_all_seeds_have_it():
    same, other = cell(1, 1.0, 1.0, word="identical"), cell(2, 1.0, 1.0, 30.0, 0.9)
    assert summary([same, same]).word == "identical" and summary([same, other]).word == ""


def test_points_are_ordered_by_y_and_then_x():
    x, y = Axis("a", ("1", "2")), Axis("b", ("1", "2", "3"))
    cells = [Cell(i, j, 7, "k", run(seconds=10 * j + i + 1)) for j in range(3) for i in range(2)]
    points = Sweep("t", CellStore(Path("nowhere")), x, y, (7,), tuple(cells)).points()
    assert [(p.x, p.y, p.seconds) for p in points] == [
        (0, 0, 1),
        (1, 0, 2),
        (0, 1, 11),
        (1, 1, 12),
        (0, 2, 21),
        (1, 2, 22),
    ]


def test_ticks_are_round_and_enclose():
    assert ticks([0, 10]) == [0, 2, 4, 6, 8, 10]
    assert ticks([1.3, 4.9]) == [1, 2, 3, 4, 5]
    assert ticks([0.21, 0.38]) == [0.2, 0.25, 0.3, 0.35, 0.4]
    assert ticks([3, 3]) == [2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6]


def test_a_picture_fits_into_its_cell(tmp_path):
    """A batch of one image of 10 x 20 pixels in a cell of 64 x 64: three times as large, in the middle."""
    store = CellStore(tmp_path)
    store.write("k", np.full((1, 10, 20, 3), 200, np.uint8), run())
    sweep = Sweep("t", store, Axis("a", ("1",)), Axis("", ("",)), (7,), ())
    drawn = sweep_images._image(sweep, Cell(0, 0, 7, "k", run()), 64, 64)
    ys, xs = np.nonzero((drawn == 200).all(-1))
    assert (ys.min(), ys.max() + 1, xs.min(), xs.max() + 1) == (17, 47, 2, 62)


# ------------------------------------------------------------------------------------------------ grids and maps


def test_baselines_come_before_their_cells_and_cells_without_one_last():
    assert cell_order([1, 1, None, 3, 3]) == [1, 0, 3, 4, 2]
    assert cell_order([None, 2, 2]) == [2, 1, 0]


def test_tokens_per_step_of_each_image():
    step = np.array([[[0, 0, 1], [0, 2, -1]], [[1, 1, 1], [2, 2, 2]]], np.int32)
    assert maps._tokens_per_step(step).tolist() == [[[3, 3, 1], [3, 1, -1]], [[3, 3, 3], [3, 3, 3]]]


@pytest.fixture
def written(monkeypatch):
    """Numbers that a map writes, and their centres in pixels."""
    found = []
    monkeypatch.setattr(maps.Canvas, "outlined", lambda self, centre, text, size: found.append((text, centre)))
    return found


def test_the_order_is_written_at_the_centres_from_one(written):
    """A grid of 2 x 4 tokens on 200 pixels: cells of 50 pixels."""
    report = run()
    report.maps["step"] = np.array([[[0, 1, 2, 3], [-1, 4, 4, 5]]], np.int32)
    maps.token_map(report, "order", size=200)
    assert written == [
        ("1", (25.0, 25.0)), ("2", (75.0, 25.0)), ("3", (125.0, 25.0)), ("4", (175.0, 25.0)),
        ("5", (75.0, 75.0)), ("5", (125.0, 75.0)), ("6", (175.0, 75.0)),
    ]  # fmt: skip


def test_an_islands_number_is_on_the_token_nearest_to_its_centroid(written):
    """The row of three tokens has its centroid on the second, the column of three too."""
    report = run()
    report.maps["islands"] = np.array([[[1, 1, 1, 0], [0, 0, 0, 2], [0, 0, 0, 2], [0, 0, 0, 2]]], np.int32)
    maps.token_map(report, "islands", size=200)
    assert written == [("1", (75.0, 25.0)), ("2", (175.0, 125.0))]


# ------------------------------------------------------------------------------------------------ time-lapse, metadata


def test_the_newest_runs_are_kept():
    metadata = {}
    for seconds in range(1, exchange.MOST_RUNS + 3):
        exchange.add_runs(metadata, exchange.described([run(seconds=float(seconds))]))
    kept = [entry["seconds"] for entry in metadata[exchange.KEY]["runs"]]
    assert (len(kept), kept[0], kept[-1]) == (exchange.MOST_RUNS, 3.0, exchange.MOST_RUNS + 2)


def test_only_the_chunks_of_metadata_are_bounded(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    store = CellStore(tmp_path)
    store.write("k", noise[None], run())
    size = store.path("k").stat().st_size
    assert size > 12_000
    monkeypatch.setattr(exchange, "_MOST_CHUNKS", 5000)
    assert store.read("k") is not None, "the image itself is larger than the bound"
    monkeypatch.setattr(exchange, "_MOST_CHUNKS", 50)
    with pytest.raises(UserError, match=r"^image: k.png is not an image that FastAR reads \(its metadata is larger"):
        exchange.read_runs(store.path("k"))
