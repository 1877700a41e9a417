"""The curve: speed-up, Pareto front and plot."""

import sys
from dataclasses import replace

import made_sweeps
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps.curve import Point, curve, front, lines
from fastar_nodes.lab.sweeps.measures import Means, Result, evaluate
from fastar_nodes.lab.sweeps.plot import curve_plot
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.times import Time
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    made = made_sweeps.write(tmp_path_factory.mktemp("sweep"))
    evaluate(made, ["psnr", "ssim", "identical"], Means(resamples=20))
    return made


def test_speed_is_measured(store, tmp_path):
    found = curve(store)
    assert found.title == "PSNR, dB, against plain sampler (higher is better)"
    on = {p.cell.id for p in found.points if p.front}
    assert on == {"fasthybrid-0.8", "fasthybrid-0.9", "fasthybrid-1.0"}, "the last one is identical, CSpD has no figure"
    assert front([replace(p, result=None) for p in found.points]) == set()
    by_id = {p.cell.id: p for p in found.points}
    fast = by_id["fasthybrid-0.8"]
    assert fast.time == Time(pytest.approx(0.25), pytest.approx(4), pytest.approx(4), pytest.approx(4), 6)
    untimed = made_sweeps.write(tmp_path, timed=False)
    evaluate(untimed, ["psnr"], Means(resamples=20))
    with pytest.raises(UserError, match="no cell of this sweep has both this measure and"):
        curve_plot(curve(untimed), "")


@pytest.mark.parametrize("measure", ["psnr", "ssim", "identical"])
def test_the_plain_sampler_equals_itself(store, measure):
    """A cell that is slower than it is not on the front, however close its images are."""
    found = curve(store, measure)
    plain = next(p for p in found.points if p.cell.id == "mar-0")
    assert plain.result.word == "identical" and not plain.front, "an equal and faster cell is on the front"
    slow = [replace(p, time=Time(2.0, 0.5)) if p.cell.baseline else p for p in found.points]
    assert front(slow) == {"mar-0"}


def point(k: int, good: float | None, fast: float, model: str = "demo", measure: str = "psnr") -> Point:
    cell = made_sweeps.cell(f"c{k}", "fasthybrid", {"threshold": k}, 8, baseline=f"plain of {model}")
    result = Result(cell.id, measure, "mar-0", 8, good, word="" if good is not None else "same distribution")
    return Point(cell, "", result, Time(1.0, fast), 8)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.sampled_from("ab")), min_size=1, max_size=12),
    st.booleans(),
)
def test_nothing_beats_the_front(values, higher):
    measure = "psnr" if higher else "fid"
    points = [point(k, float(good), float(fast), model, measure) for k, (good, fast, model) in enumerate(values)]
    on = front(points)
    sign = 1 if higher else -1

    def beats(q: Point, p: Point) -> bool:
        a, b = (sign * q.result.value, q.time.speedup), (sign * p.result.value, p.time.speedup)
        return q.cell.baseline == p.cell.baseline and a[0] >= b[0] and a[1] >= b[1] and a != b

    for p in points:
        assert (p.cell.id in on) == (not any(beats(q, p) for q in points))


def test_lines_follow_the_setting_with_most_values():
    asked = [{"threshold": t, "lookahead": k} for k in (8, 4) for t in ("1", "0.95", "0.9")]
    cells = [made_sweeps.cell(str(k), "fasthybrid", a, 8) for k, a in enumerate(asked)]
    points = [replace(point(k, 1.0, 1.0), cell=cell) for k, cell in enumerate(cells)]
    found = [[(p.cell.asked["lookahead"], p.cell.asked["threshold"]) for p in line] for line in lines(points)]
    assert found == [[(8, "0.9"), (8, "0.95"), (8, "1")], [(4, "0.9"), (4, "0.95"), (4, "1")]]


pytest.importorskip("matplotlib")


def test_dots_are_where_the_figures_are(store):
    """Every cell at its measure and speed-up, with the interval of
    the measure around it; cells with a word on an axis of their own.
    """
    found = curve(store)
    figure = curve_plot(found, "a sweep")
    axes, *words = figure.axes
    assert [a.get_xticklabels()[0].get_text() for a in words] == ["identical", "same distribution"]
    marks = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in marks}
    wanted = {(p.result.value, p.time.speedup) for p in found.points if p.result.value is not None}
    assert dots == wanted and len(wanted) == 2
    ends = {tuple(segment[:, 0]) for bars in axes.collections for segment in bars.get_segments()}
    lows = {(p.result.low, p.result.high) for p in found.points if p.result.value is not None}
    assert all(any(end == pytest.approx(low) for end in ends) for low in lows)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["mar", "fasthybrid\n(labels: threshold)", "cspd"]
    rings = [line for a in figure.axes for line in a.lines if line.get_markeredgecolor() == "black"]
    assert len(rings) == 3, "the front of three cells"


def test_shares_are_drawn_in_percent(store):
    found = curve(store, "identical")
    axes = curve_plot(found, "a sweep").axes[0]
    assert max(line.get_xdata()[0] for line in axes.lines if len(line.get_xdata())) == 100
    with pytest.raises(UserError, match="no cell of this sweep has both"):
        curve_plot(replace(found, points=tuple(replace(p, result=None) for p in found.points)), "")


def test_a_missing_matplotlib_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"matplotlib cannot be imported .* pip install 'fastar-nodes\[scale\]'"):
        curve_plot(curve(store), "")
