"""Plots of the benchmark tables: what is read, where points are drawn, and that every committed plot has its table."""

import re
from dataclasses import replace

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
| *real images* |  |  | 99.0 |
| MAR | 0.1 | 1.00 / 1.00 | 96.7 |
| window 4 | 0.2 | 1.25 / 2.50 | {scene} |
| window 2 | 0.3 |  | 30.0 |
"""
AXES = ("ratio, batch 1 / 8#2", "speed-up"), ("scene %", "scenes (%)")
PLOT = plots.Plot("small", "page.md#Section", "A title", *AXES, (("windows", "window .*"),))


def test_points_are_the_rows_with_both_values():
    found = plots.points(PLOT, PAGE.format(scene=56.3))
    assert found == [plots.Point("MAR", 1.0, 96.7, 1), plots.Point("window 4", 2.5, 56.3, 0)]
    first = plots.points(replace(PLOT, x=("ratio, batch 1 / 8", "")), PAGE.format(scene=56.3))
    assert [p.x for p in first] == [1.0, 1.25]


SECTIONS = [({"source": "page.md#Nothing"}, "section"), ({"x": ("speed", "")}, "section")]


@pytest.mark.parametrize("change, field", [*SECTIONS, ({"series": (), "others": "no row"}, "series")])
def test_what_cannot_be_read_is_refused(change, field):
    with pytest.raises(UserError, match=f"^{field}:"):
        plots.points(replace(PLOT, **change), PAGE)


def test_a_figure_shows_the_values_titles_and_error_bars():
    pytest.importorskip("matplotlib")
    found = [plots.Point("MAR", 1.0, 90.0, 1), plots.Point("window 4", 2.5, 50.0, 0)]
    axes = plots.figure(PLOT, found).axes[0]
    assert [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()] == ["A title", "speed-up", "scenes (%)"]
    window, mar = axes.containers  # the series, then the rows without one
    assert [c.lines[0].get_xydata().tolist() for c in (window, mar)] == [[[2.5, 50.0]], [[1.0, 90.0]]]
    low, high = mar.lines[2][0].get_segments()[0][:, 1]
    assert [90 - low, high - 90] == pytest.approx([100 * (0.9 * 0.1 / 300) ** 0.5] * 2)
    assert [text.get_text() for text in axes.texts] == ["MAR", "window 4"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["windows"]


def test_labels_do_not_cover_each_other():
    pytest.importorskip("matplotlib")
    found = [plots.Point(f"row {i}", 1.0 + 0.01 * i, 50.0, 0) for i in range(4)]
    made = plots.figure(PLOT, found)
    boxes = [text.get_window_extent() for text in made.axes[0].texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize("plot", plots.PLOTS, ids=lambda plot: plot.name)
def test_every_plot_is_of_its_present_table_and_on_a_page(plot):
    found = plots.points(plot, plot.text())
    assert len(found) > 4 and set(range(len(plot.series))) <= {p.series for p in found}
    path = plots.DOCS / "benchmarks" / f"{plot.name}.png"
    with Image.open(path) as drawn:
        assert drawn.size == plots.SIZE and drawn.text["points"] == plots.to_json(found), "draw it again"
    assert f"({path.parent.name}/{path.name})" in (plots.DOCS / "benchmarks.md").read_text(encoding="utf-8")


def test_a_file_holds_its_points(tmp_path):
    pytest.importorskip("matplotlib")
    plot = plots.PLOTS[0]
    assert plots.main([plot.name, "--out", str(tmp_path)]) == 0
    with Image.open(tmp_path / f"{plot.name}.png") as made:
        assert made.size == plots.SIZE and made.text["points"] == plots.to_json(plots.points(plot, plot.text()))


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


def test_links_of_the_benchmark_pages_lead_somewhere():
    index, *pages = plots.DOCS / "benchmarks.md", *(plots.DOCS / "benchmarks").glob("*.md")
    listed = index.read_text(encoding="utf-8")
    assert pages and all(f"(benchmarks/{page.name})" in listed for page in pages)
    for page in (index, *pages):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
            if target.startswith("https:"):
                continue
            file = (page.parent / target) if target else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                names = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in names, f"{page.name}: {target}#{anchor}"
