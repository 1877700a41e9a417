"""Draw the plots of docs/benchmarks.md: cost against quality, one point a setting.

``python -m fastar_nodes.tools.ablations.plots [NAME ...] [--out DIR]`` draws the plots of ``PLOTS``, all by default. Each plot
reads two columns of one Markdown table, so that a table that was measured again moves its points. Drawing needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import hypot, sqrt
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ...errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIZE = (760, 440)
# Blue, vermilion, bluish green, reddish purple (Okabe and Ito, 2008); grey is for rows without a series.
COLOURS, GREY = ("#0072b2", "#d55e00", "#00825f", "#aa5587"), "#46464c"
SHAPES = ("o", "s", "^", "D")


@dataclass(frozen=True)
class Plot:
    """One plot of a table.

    Args:
        name: of the PNG, without ending.
        page: Markdown file, relative to docs/.
        section: heading above the table; the first table below it that has both columns is read.
        x, y: column headings. ``#2`` after a heading takes the second number of a cell.
        labels: axis labels with units, x then y.
        series: name and regular expression. A row belongs to the first expression that matches its whole title.
        others: regular expression of further rows.
        joined: whether a line joins the rows of a series, in the table's order.
        short: regular expressions and what replaces them in the labels of points.
        images: pictures a row. y must then be a percentage and gets error bars of one standard error. 0: no bars.
    """

    name: str
    page: str
    section: str
    x: str
    y: str
    title: str
    labels: tuple[str, str]
    series: tuple[tuple[str, str], ...] = ()
    others: str = r"[^*].*"
    joined: bool = True
    short: tuple[tuple[str, str], ...] = ()
    images: int = 0

    def label(self, title: str) -> str:
        """Label of a row's point."""
        for pattern, to in self.short:
            title = re.sub(pattern, to, title)
        return title


@dataclass(frozen=True)
class Point:
    """A row of a table: title, values, and index of its series (``len(series)`` without one)."""

    title: str
    x: float
    y: float
    series: int


_SCENES = "right scenes (%)"
_MULOSD = (
    ("^tau |ZipAR alone, window ", ""),
    (r"the enlarged draft.*", "0 (enlarged draft)"),
    (",.*exact.*", ", tau 1.01: exact"),
    (", the target drafts", ""),
)
PLOTS = (
    Plot(
        "accelerators",
        "benchmarks.md",
        "MAR: speed against quality",
        "speed-up, batch 1",
        "scene %",
        "MAR accelerators, one image at a time",
        ("speed-up over plain MAR (paired seconds)", _SCENES),
        images=300,
    ),
    Plot(
        "fasthybrid",
        "benchmarks/fasthybrid.md",
        "Threshold",
        "head rows an image",
        "scene %",
        "FastHybrid: similarity threshold lambda (number after RG or R)",
        ("diffusion head rows an image", _SCENES),
        (("RG: accepted drafts refined with guidance", "RG-.*"), ("R: accepted drafts kept", "R-.*")),
        "MAR",
        images=300,
    ),
    Plot(
        "hybrid",
        "benchmarks/hybrid.md",
        "Accelerators",
        "head calls a batch",
        "all %",
        "Prompts of the demo hybrid: head calls and what is met",
        ("sequential diffusion head calls a batch of 100", "everything that the prompt says, %"),
        short=(
            (", language model in full", ", no LLM cache"),
            ("FastHybrid, ", ""),
        ),
        images=300,
    ),
    Plot(
        "lazymar",
        "benchmarks/lazymar.md",
        "Caches",
        "ratio, batch 1 / 8#2",
        "Frechet",
        "LazyMAR: one cache at a time, and together",
        ("speed-up over plain MAR at batch 8 (paired seconds)", "Frechet distance (lower is better)"),
        short=((" caches?$| \\(.*", ""),),
    ),
    Plot(
        "cspd",
        "benchmarks/cspd.md",
        "Settings",
        "ratio, batch 1 / 8#2",
        "scene %",
        "CSpD: modes, draft length and pre-fill",
        ("speed-up over plain MAR at batch 8 (paired seconds)", _SCENES),
        (
            ("draft length gamma (published: 8)", r"published, gamma.*"),
            ("pre-fill (published: 15 %)", r"published, pre-fill.*"),
        ),
        r"MAR|lossless|published|published, no alignment",
        joined=False,
        short=(("^published, ", ""),),
        images=300,
    ),
    Plot(
        "zipar",
        "benchmarks/llamagen.md",
        "ZipAR",
        "steps (forwards)",
        "scene %",
        "ZipAR: window, on the LlamaGen of 16 x 16 tokens",
        ("sequential transformer passes an image", _SCENES),
        (("undecided cells masked", r"window \d+( \(a whole row.*)?"),),
        r"window 4, .*",
        short=((" \\(as published\\)", " (published)"), (r" \(a whole row: exact\)", ": exact")),
        images=300,
    ),
    Plot(
        "mulosd-llamagen",
        "benchmarks/mulosd.md",
        "LlamaGen",
        "forwards",
        "scene %",
        "MuLo-SD on the LlamaGens: threshold tau",
        ("sequential transformer passes an image, both models", _SCENES),
        (("MuLo-SD, threshold tau", r"the enlarged draft.*|tau .*"), ("ZipAR alone, window", r"ZipAR alone.*")),
        r"LlamaGen|LANTERN.*|all drawn again.*",
        short=_MULOSD,
        images=300,
    ),
    Plot(
        "mulosd-tar",
        "benchmarks/mulosd.md",
        "Tar",
        "forwards",
        "all %",
        "MuLo-SD on Tar: threshold tau",
        ("sequential transformer passes an image, both models", "prompts met in full (%)"),
        (("MuLo-SD, threshold tau", r"the enlarged draft.*|tau .*"), ("ZipAR alone, window", r"ZipAR alone.*")),
        r"Tar|LANTERN.*|all drawn again.*",
        short=_MULOSD,
        images=300,
    ),
)


def tables(text: str, section: str) -> list[list[dict[str, str]]]:
    """Tables below a heading of a Markdown page, as rows of heading to cell.

    Raises:
        UserError: the page has no such heading.
    """
    parts = re.split(r"^#+ +", text, flags=re.MULTILINE)
    body = next((part for part in parts if part.split("\n", 1)[0].strip() == section), None)
    if body is None:
        raise UserError(f"section: the page has no heading {section!r}.")
    found: list[list[dict[str, str]]] = []
    heads: list[str] = []
    for line in body.split("\n"):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            heads = []
        elif not heads:
            heads = cells
            found.append([])
        elif not set(line) <= set("|-: "):
            found[-1].append(dict(zip(heads, cells, strict=True)))
    return found


def _number(cell: str, place: int) -> float | None:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", cell.replace(",", ""))
    return float(numbers[place]) if len(numbers) > place else None


def points(plot: Plot, text: str) -> list[Point]:
    """Points of a plot, read from its page. Rows without both values are left out.

    Raises:
        UserError: no table of the section has both columns, or no row is selected.
    """
    (x, _, at_x), (y, _, at_y) = plot.x.partition("#"), plot.y.partition("#")
    places = [int(at) - 1 if at else 0 for at in (at_x, at_y)]
    rows = next((t for t in tables(text, plot.section) if t and {x, y, "setting"} <= set(t[0])), None)
    if rows is None:
        raise UserError(f"section: no table below {plot.section!r} has the columns {x!r} and {y!r}.")
    out = []
    for row in rows:
        title = row["setting"]
        patterns = [pattern for _, pattern in plot.series] + [plot.others]
        series = next((i for i, pattern in enumerate(patterns) if re.fullmatch(pattern, title)), None)
        values = _number(row[x], places[0]), _number(row[y], places[1])
        if series is not None and values[0] is not None and values[1] is not None:
            out.append(Point(title, values[0], values[1], series))
    if not out:
        raise UserError(f"series: no row of the table below {plot.section!r} is selected.")
    return out


def to_json(found: Sequence[Point]) -> str:
    """Points as a JSON list of [title, x, y, series]."""
    return json.dumps([[p.title, p.x, p.y, p.series] for p in found])


def standard_error(percent: float, images: int) -> float:
    """Standard error in per cent of a percentage of ``images`` pictures."""
    return sqrt(percent * (100 - percent) / images)


def figure(plot: Plot, found: Sequence[Point]) -> Any:
    """The plot of its points, a matplotlib figure of ``SIZE``.

    Raises:
        UserError: error bars are asked for and a value is no percentage.
    """
    from matplotlib.figure import Figure

    if plot.images and not all(0 <= p.y <= 100 for p in found):
        raise UserError(f"images: error bars need percentages in {plot.y!r}.")
    made = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, layout="constrained")
    axes = made.add_subplot()
    styles = [*zip(COLOURS, SHAPES, strict=True)][: len(plot.series)] + [(GREY, "o")]
    for i, (colour, shape) in enumerate(styles):
        rows = [p for p in found if p.series == i]
        bars = [standard_error(p.y, plot.images) for p in rows] if plot.images else None
        line = "-" if plot.joined and i < len(plot.series) else ""
        name = plot.series[i][0] if i < len(plot.series) else "_"  # "_" is left out of the legend
        axes.errorbar(
            [p.x for p in rows], [p.y for p in rows], bars, marker=shape, color=colour, ls=line, capsize=3, label=name
        )
    axes.set(title=plot.title, xlabel=plot.labels[0], ylabel=plot.labels[1])
    axes.margins(0.08)
    axes.set_ylim(bottom=max(0, axes.get_ylim()[0]), top=min(axes.get_ylim()[1], 102) if plot.images else None)
    axes.grid(color="#e1e1e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if plot.series:
        axes.legend(fontsize=9)
    made.draw_without_rendering()  # fixes the layout, which the places of labels depend on
    _label(
        axes, [(p.x, p.y) for p in found], [plot.label(p.title) for p in found], [styles[p.series][0] for p in found]
    )
    return made


def _label(axes: Any, places: Sequence[tuple[float, float]], labels: Sequence[str], colours: Sequence[str]) -> None:
    """Write a label beside each point, where it covers least of markers, the legend and other labels."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in axes.transData.transform(places)]
    taken += [axes.get_legend().get_window_extent()] if axes.get_legend() else []
    frame = axes.get_window_extent()
    sides = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))

    def overlap(a: Any, b: Any) -> float:
        both = Bbox.intersection(a, b)
        return both.width * both.height if both else 0.0

    for place, label, colour in zip(places, labels, colours, strict=True):
        text = axes.annotate(label, place, (0, 0), textcoords="offset points", color=colour, fontsize=9)
        text.set_path_effects([withStroke(linewidth=2, foreground="white")])

        def at(gap: int, dx: int, dy: int, text: Any = text) -> Any:
            text.set(ha=("right", "center", "left")[dx + 1], va=("top", "center", "bottom")[dy + 1])
            text.xyann = dx * gap / hypot(dx, dy), dy * gap / hypot(dx, dy)
            return text.get_window_extent()

        def cost(choice: tuple[int, int, int], at: Any = at) -> float:
            box = at(*choice)
            outside = box.width * box.height - overlap(box, frame)
            return sum(overlap(box, other) for other in taken) + 20 * outside + choice[0]

        taken.append(at(*min(((gap, dx, dy) for gap in (7, 14, 24, 36) for dx, dy in sides), key=cost)))


def draw(plot: Plot, found: Sequence[Point], path: Path) -> None:
    """Write the plot as a PNG of 64 colours that holds its points, which a test compares with the table."""
    drawn, about = BytesIO(), PngInfo()
    figure(plot, found).savefig(drawn)
    about.add_text("points", to_json(found))
    small = Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(path, optimize=True, pnginfo=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw plots into a folder; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastar_nodes.tools.ablations.plots", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default all: {', '.join(p.name for p in PLOTS)}")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="folder of the pages; default docs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the PNGs; default docs/benchmarks")
    options = parser.parse_args(arguments)
    known = {plot.name: plot for plot in PLOTS}
    try:
        for name in options.names or known:
            if name not in known:
                raise UserError(f"name: there is no plot {name!r}; there are {', '.join(known)}.")
            plot = known[name]
            path = (options.out or options.docs / "benchmarks") / f"{name}.png"
            found = points(plot, (options.docs / plot.page).read_text(encoding="utf-8"))
            draw(plot, found, path)
            print(f"wrote {path}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
