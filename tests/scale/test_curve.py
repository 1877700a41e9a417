"""The curve: speed-up, Pareto front, CSV, plot and contact sheet."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import made_sweeps
import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports.drawing import TEXT
from fastar_nodes.reports.sweep_pictures import SERIES
from fastar_nodes.scale.curve import CALLS, SECONDS, Point, Time, curve, front, labels_of, lines, to_csv
from fastar_nodes.scale.curve_pictures import cell_sheet, curve_plot, pick
from fastar_nodes.scale.measures import Means, evaluate
from fastar_nodes.scale.results import Result
from fastar_nodes.scale.store import Store
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    made = made_sweeps.write(tmp_path_factory.mktemp("sweep"))
    evaluate(made, ["psnr", "ssim", "identical"], Means(resamples=20))
    return made


def has(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((picture == np.array(colour)).all(-1).sum())


# ------------------------------------------------------------------------------------------------ figures


def test_speed_is_measured_where_it_was_and_calls_otherwise(store, tmp_path):
    found = curve(store)
    assert (found.measure, found.against, found.reference) == ("psnr", SECONDS, "plain sampler")
    by_id = {p.cell.id: p for p in found.points}
    assert by_id["fasthybrid-0.8"].time.speedup == pytest.approx(4) and by_id[
        "fasthybrid-0.8"
    ].time.seconds == pytest.approx(0.25)
    assert by_id["fasthybrid-0.8"].fewer_calls == pytest.approx(4) and by_id["mar-0"].fewer_calls == 1
    untimed = made_sweeps.write(tmp_path, timed=False)
    evaluate(untimed, ["psnr"], Means(resamples=20))
    assert curve(untimed).against == CALLS
    with pytest.raises(UserError, match="against: mar-0 has no measured seconds; finish the sweep, or plot calls"):
        curve(untimed, against=SECONDS)
    with_range = {"seconds": 0.2, "ratio": 4.0, "low": 3.0, "high": 5.0, "pairs": 6}
    plain = {"seconds": 1.0, "ratio": None}
    untimed.write_timing({"cells": {c.id: with_range if c.baseline else plain for c in untimed.cells()}})
    timed = curve(untimed)
    assert timed.against == SECONDS and timed.points[0].time == Time(1.0, 1.0)
    assert timed.points[1].time == Time(0.2, 4.0, 3.0, 5.0, 6)
    untimed.write_timing({"cells": {"mar-0": plain, "cspd-0": {"seconds": "x", "ratio": None}}})
    assert curve(untimed).against == CALLS, "a part of the cells is not enough"


def test_the_front_of_the_sweep(store):
    assert {p.cell.id for p in curve(store).points if p.front} == {"fasthybrid-0.8", "fasthybrid-0.9", "fasthybrid-1.0"}


@pytest.mark.parametrize("measure", ["psnr", "ssim", "identical"])
def test_the_plain_sampler_equals_itself(store, measure):
    """A cell that is slower than it is not on the front, however close its pictures are."""
    found = curve(store, measure)
    plain = next(p for p in found.points if p.cell.id == "mar-0")
    assert plain.result.word == "identical" and not plain.front, "an equal and faster cell is on the front"
    slow = [replace(p, time=Time(2.0, 0.5)) if p.cell.baseline else p for p in found.points]
    assert front(slow, SECONDS, True) == {"mar-0"}


def point(k: int, good: float | None, fast: float, model: str = "demo") -> Point:
    cell = made_sweeps.cell(f"c{k}", "fasthybrid", {"threshold": k}, 8, baseline=f"plain of {model}")
    result = Result(cell.id, "psnr", "", "mar-0", 8, "", good, word="" if good is not None else "same distribution")
    return Point(cell, "", result, Time(1.0, fast), 1.0, fast, 8)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.sampled_from("ab")), min_size=1, max_size=12),
    st.booleans(),
)
def test_nothing_beats_the_front(values, higher):
    points = [point(k, float(good), float(fast), model) for k, (good, fast, model) in enumerate(values)]
    on = front(points, SECONDS, higher)
    sign = 1 if higher else -1

    def beats(q: Point, p: Point) -> bool:
        a, b = (sign * q.result.value, q.time.speedup), (sign * p.result.value, p.time.speedup)
        return q.cell.baseline == p.cell.baseline and a[0] >= b[0] and a[1] >= b[1] and a != b

    for p in points:
        assert (p.cell.id in on) == (not any(beats(q, p) for q in points))


def test_words_are_not_on_the_front_unless_equal():
    points = [point(1, 20.0, 2.0), point(2, None, 9.0), point(3, None, 1.5)]
    points[2] = replace(points[2], result=replace(points[2].result, word="identical"))
    assert front(points, SECONDS, True) == {"c1", "c3"}
    assert front([replace(points[0], result=None)], SECONDS, True) == set()


def test_labels_are_the_settings_that_differ(store):
    assert labels_of(store.cells()) == {
        "mar-0": "",
        "fasthybrid-0.8": "0.8",
        "fasthybrid-0.9": "0.9",
        "fasthybrid-1.0": "1",
        "cspd-0": "",
    }


def test_lines_follow_the_setting_with_most_values():
    asked = [{"threshold": t, "lookahead": k} for k in (8, 4) for t in ("1", "0.95", "0.9")]
    points = [
        replace(point(k, 1.0, 1.0), cell=made_sweeps.cell(str(k), "fasthybrid", a, 8)) for k, a in enumerate(asked)
    ]
    found = [[(p.cell.asked["lookahead"], p.cell.asked["threshold"]) for p in line] for line in lines(points)]
    assert found == [[(8, "0.9"), (8, "0.95"), (8, "1")], [(4, "0.9"), (4, "0.95"), (4, "1")]]


def test_the_csv_holds_every_cell(store):
    rows = list(csv.DictReader(io.StringIO(to_csv(curve(store)))))
    assert [row["cell"] for row in rows] == [cell.id for cell in store.cells()]
    own = rows[1]
    assert own["asked"] == "threshold=0.8" and float(own["speed_up"]) == 4 and own["pareto_front"] == "1"
    assert float(own["low"]) < float(own["value"]) < float(own["high"]) and own["difference"] == ""
    assert rows[3]["word"] == "identical" and rows[3]["value"] == "" and rows[0]["word"] == "identical"


def test_unknown_measures_and_empty_folders_are_refused(store, tmp_path):
    with pytest.raises(UserError, match="measure: 'fid' was not measured; there are psnr, ssim, identical"):
        curve(store, "fid")
    with pytest.raises(UserError, match="has no measures yet; run the command evaluate"):
        curve(made_sweeps.write(tmp_path, images=8))
    with pytest.raises(UserError, match="against: 'time' is not one of"):
        curve(store, against="time")


# ------------------------------------------------------------------------------------------------ pictures


def test_the_plot_shows_every_sampler_and_the_front(store):
    for measure in ("psnr", "ssim", "identical"):
        found = curve(store, measure)
        picture = curve_plot(found, "a sweep")
        assert picture.shape == (680, 1100, 3) and picture.dtype == np.uint8
        assert has(picture, SERIES[1]) > 200 and has(picture, SERIES[2]) > 50
    plain = curve_plot(replace(found, points=tuple(replace(p, front=False) for p in found.points)), "a sweep")
    assert has(picture, TEXT) > has(plain, TEXT) + 50, "the front is ringed"


def test_dots_are_where_the_figures_are(store):
    """A higher speed-up is higher, a higher figure further to the right, and intervals lie around their dot."""
    from fastar_nodes.scale import curve_pictures

    found = curve(store, "ssim")
    drawn = [p for p in found.points if p.result is not None and p.result.value is not None]
    plot = curve_pictures._Plot(found, drawn, [], (1100, 680))
    by_speed = sorted(drawn, key=lambda p: p.time.speedup)
    assert [plot.at(p)[1] for p in by_speed] == sorted((plot.at(p)[1] for p in drawn), reverse=True)
    by_value = sorted(drawn, key=lambda p: p.result.value)
    assert [plot.at(p)[0] for p in by_value] == sorted(plot.at(p)[0] for p in drawn)
    for p in drawn:
        x, y = plot.at(p)
        assert plot.x0 <= x <= plot.x1 and plot.y0 <= y <= plot.y1
        if p.result.low is not None:
            assert plot.x0 <= plot.x(p.result.low) <= x <= plot.x(p.result.high) <= plot.x1


def test_a_measure_of_no_cell_has_no_plot(store):
    found = curve(store)
    with pytest.raises(UserError, match="no cell of this sweep has"):
        curve_plot(replace(found, points=tuple(replace(p, result=None) for p in found.points)))


def test_the_sheet_shows_the_same_indices_in_every_cell(store):
    sheet = cell_sheet(store, (0, 9, 47), side=made_sweeps.SIDE * 2)
    rows = {}
    for cell in store.cells():
        for index in (0, 9, 47):
            pictures = np.concatenate([part for _, part in store.images(cell)])
            rows[cell.id, index] = pictures[index].repeat(2, 0).repeat(2, 1)
    (h, w), side, gap = sheet.shape[:2], made_sweeps.SIDE * 2, 4
    left = w - 12 - 3 * (side + gap)
    for row, cell in enumerate(store.cells()):
        y = h - 12 - (len(store.cells()) - row) * (side + gap)
        for k, index in enumerate((0, 9, 47)):
            x = left + k * (side + gap)
            assert np.array_equal(sheet[y : y + side, x : x + side], rows[cell.id, index]), (cell.id, index)


def test_unfinished_pictures_are_left_out(tmp_path):
    store = made_sweeps.write(tmp_path, finished=16)
    assert [p is None for p in pick(store, store.cell("cspd-0"), (3, 15, 16))] == [False, False, True]
    assert cell_sheet(store, (3, 40)).shape[2] == 3


@pytest.mark.parametrize("indices", [(), (48,), (-1, 2)])
def test_indices_are_checked(store, indices):
    with pytest.raises(UserError, match="indices: .*the cells have images 0 to 47"):
        cell_sheet(store, indices)


def test_too_many_pictures_are_refused(store):
    with pytest.raises(UserError, match="do not fit into one sheet"):
        cell_sheet(store, tuple(range(48)) * 8)
