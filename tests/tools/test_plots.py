"""Plots of the benchmark tables: what is read, where points are drawn, and that every committed plot has its table."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.tools.ablations import plots
from PIL import Image

PAGE = """# Page

## Other

| setting | scene % |
|---|---|
| MAR | 1.0 |

## Section

Text.

| setting | s an image | ratio, batch 1 / 8 | scene % |
|---|---|---|---|
| *real pictures* |  |  | 99.0 |
| MAR | 0.1 | 1.00 / 1.00 | 96.7 |
| window 4 | 0.2 | 1.25 / 2.50 | {scene} |
| window 2 | 0.3 |  | 30.0 |
"""
PLOT = plots.Plot(
    "small",
    "page.md",
    "Section",
    "ratio, batch 1 / 8#2",
    "scene %",
    "A title",
    ("speed-up", "scenes (%)"),
    (("windows", "window .*"),),
)
BLUE = plots.COLOURS[0]


def drawn(plot=PLOT, scene=56.3):
    return plots.draw(plot, plots.points(plot, PAGE.format(scene=scene)))


def centre(image, colour):
    """Mean (x, y) of the largest marker of a colour: legend and labels are smaller or thinner, so pixels are eroded first."""
    hit = (np.asarray(image) == colour).all(-1)
    left, top, right, bottom = 64, 40, plots.SIZE[0] - 24, plots.SIZE[1] - 52
    hit[:top], hit[bottom - 40 :], hit[:, :left], hit[:, right:] = False, False, False, False
    for _ in range(3):
        hit[1:-1, 1:-1] &= hit[:-2, 1:-1] & hit[2:, 1:-1] & hit[1:-1, :-2] & hit[1:-1, 2:]
    y, x = np.nonzero(hit)
    return x.mean(), y.mean()


def test_points_are_the_rows_with_both_values():
    found = plots.points(PLOT, PAGE.format(scene=56.3))
    assert found == [plots.Point("MAR", 1.0, 96.7, 1), plots.Point("window 4", 2.5, 56.3, 0)]
    first = plots.points(replace(PLOT, x="ratio, batch 1 / 8"), PAGE.format(scene=56.3))
    assert [p.x for p in first] == [1.0, 1.25]


@pytest.mark.parametrize(
    "change, field",
    [({"section": "Nothing"}, "section"), ({"x": "speed"}, "section"), ({"series": (), "others": "no row"}, "series")],
)
def test_what_cannot_be_read_is_refused(change, field):
    with pytest.raises(UserError, match=f"^{field}:"):
        plots.points(replace(PLOT, **change), PAGE)


def test_error_bars_need_percentages():
    with pytest.raises(UserError, match="^images:"):
        plots.draw(replace(PLOT, images=300), [plots.Point("a", 1, 250, 0)])


def test_a_plot_has_title_axis_labels_and_a_light_background():
    image = drawn()
    assert image.size == plots.SIZE and image.getpixel((plots.SIZE[0] - 2, 2)) == plots.PAPER
    for change in ({"title": "Other"}, {"labels": ("passes", "scenes (%)")}, {"labels": ("speed-up", "whole (%)")}):
        other = np.asarray(drawn(replace(PLOT, **change)))
        assert (other != np.asarray(image)).any()
    # A longer label is drawn beside its point: more of the point's colour.
    count = [(np.asarray(i) == BLUE).all(-1).sum() for i in (drawn(replace(PLOT, short=((".*", ""),))), image)]
    assert count[0] < count[1]


def test_a_point_stands_where_its_values_are():
    found = plots.points(PLOT, PAGE.format(scene=56.3))
    x, y = plots.Axes(found, [0, 0])(2.5, 56.3)
    assert centre(drawn(), BLUE) == pytest.approx((x, y), abs=1)


def test_a_point_moves_with_its_value():
    """MAR's 96.7 and a low third row fix the axis; only the blue point moves."""
    pages = [PAGE.format(scene=s).replace("| window 2 | 0.3 |  |", "| MAR 2 | 0.3 | 1 / 1 |") for s in (56.3, 76.3)]
    low, high = (centre(plots.draw(PLOT, plots.points(PLOT, page)), BLUE) for page in pages)
    assert high[0] == pytest.approx(low[0], abs=1) and high[1] < low[1] - 40


def test_error_bars_are_one_standard_error():
    assert plots._standard_error(90.0, 300) == pytest.approx(1.732, abs=1e-3)
    plain, bars = np.asarray(drawn()), np.asarray(drawn(replace(PLOT, images=300)))
    assert (plain != bars).any()


@pytest.mark.parametrize("plot", plots.PLOTS, ids=lambda plot: plot.name)
def test_every_plot_has_its_table_a_picture_and_a_page(plot):
    found = plots.points(plot, (plots.DOCS / plot.page).read_text(encoding="utf-8"))
    assert len(found) > 4 and set(range(len(plot.series))) <= {p.series for p in found}
    path = plots.DOCS / "benchmarks" / f"{plot.name}.png"
    assert path.stat().st_size < 40_000 and Image.open(path).size == plots.SIZE
    assert f"({path.parent.name}/{path.name})" in (plots.DOCS / "benchmarks.md").read_text(encoding="utf-8")


def test_committed_plots_are_of_the_present_tables(tmp_path):
    assert plots.main(["--out", str(tmp_path)]) == 0
    for plot in plots.PLOTS:
        found = plots.points(plot, (plots.DOCS / plot.page).read_text(encoding="utf-8"))
        for folder in (tmp_path, plots.DOCS / "benchmarks"):
            drawn_from = Image.open(folder / f"{plot.name}.png").text["points"]
            assert drawn_from == plots.to_json(found), f"{plot.name}: draw it again"


def test_the_summary_repeats_its_source_tables():
    """Speed against quality of MAR's accelerators, on the first page, is a join of two tables of others."""

    def key(name):
        return re.sub(r"[^a-z0-9]|exact", "", name.lower())

    def table(page, section):
        return plots.tables((plots.DOCS / page).read_text(encoding="utf-8"), section)[0]

    speed = {(key(r["sampler"]), r["batch"]): r["ratio"] for r in table("benchmarks/speed.md", "All MAR accelerators")}
    quality = {key(r["setting"]): r for r in table("benchmarks/mar.md", "All accelerators")}
    rows = table("benchmarks.md", "MAR: speed against quality")
    assert len(rows) == 8
    for row in rows:
        name = key(row["setting"])
        assert [row["speed-up, batch 1"], row["speed-up, batch 8"]] == [speed[name, "1"], speed[name, "8"]]
        assert [row["scene %"], row["Frechet"]] == [quality[name]["scene %"], quality[name]["Frechet"]]


def test_an_unknown_plot_is_named(capsys):
    assert plots.main(["nothing"]) == 2
    assert "there is no plot 'nothing'" in capsys.readouterr().err


def test_links_of_the_benchmark_pages_lead_somewhere():
    pages = [plots.DOCS / "benchmarks.md", *(plots.DOCS / "benchmarks").glob("*.md")]
    assert len(pages) == 12
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
            if target.startswith("https:"):
                continue
            file = (page.parent / target) if target else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                names = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in names, f"{page.name}: {target}#{anchor}"
