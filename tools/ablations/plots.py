"""Draw the plots of docs/benchmarks.md: cost against quality, one point a setting.

``python -m fastar_nodes.tools.ablations.plots [NAME ...] [--out DIR]`` draws the
plots of ``PLOTS``, all by default. Each plot reads two columns of one Markdown table,
so that a table that was measured again moves its points. Drawing needs matplotlib.
"""

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
# Images a row of the tables.
IMAGES = 300
# Blue, vermilion, bluish green, reddish purple (Okabe and Ito, 2008); grey is for rows without a series.
COLOURS, GREY = ("#0072b2", "#d55e00", "#00825f", "#aa5587"), "#46464c"
SHAPES = ("o", "s", "^", "D")


@dataclass(frozen=True)
class Plot:
    """One plot of a table.

    Args:
        name: of the PNG, without ending.
        source: Markdown file, relative to docs/, and heading above the table, with
            # between them; the first table below it that has both columns is read.
        title: above the plot.
        x, y: column heading and label of an axis. ``#2`` after a heading takes
            the second number of a cell. Percentages on the y-axis get error bars.
        series: name and regular expression. A row belongs to the first expression that matches its whole title.
        others: regular expression of further rows.
        joined: whether a line joins the rows of a series, in the table's order.
        short: regular expressions and what replaces them in the labels of points.
    """

    name: str
    source: str
    title: str
    x: tuple[str, str]
    y: tuple[str, str]
    series: tuple[tuple[str, str], ...] = ()
    others: str = r"[^*].*"
    joined: bool = True
    short: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """The Markdown file."""
        return (DOCS / self.source.partition("#")[0]).read_text(encoding="utf-8")

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


_SCENES = "scene %", "right scenes (%)"
_BATCH_8 = "ratio, batch 1 / 8#2", "speed-up over plain MAR at batch 8 (paired seconds)"
_PASSES = "forwards", "sequential transformer passes an image, both models"
_MULOSD = ("MuLo-SD, threshold tau", r"the enlarged draft.*|tau .*"), ("ZipAR alone, window", r"ZipAR alone.*")
_SHORT = (
    ("^tau |ZipAR alone, window ", ""),
    (r"the enlarged draft.*", "0 (enlarged draft)"),
    (",.*exact.*", ", tau 1.01: exact"),
    (", the target drafts", ""),
)
PLOTS = (
    Plot(
        "accelerators",
        "benchmarks.md#MAR: speed against quality",
        "MAR accelerators, one image at a time",
        ("speed-up, batch 1", "speed-up over plain MAR (paired seconds)"),
        _SCENES,
    ),
    Plot(
        "fasthybrid",
        "benchmarks/fasthybrid.md#Threshold",
        "FastHybrid: similarity threshold lambda (number after RG or R)",
        ("head rows an image", "diffusion head rows an image"),
        _SCENES,
        (("RG: accepted drafts refined with guidance", "RG-.*"), ("R: accepted drafts kept", "R-.*")),
        "MAR",
    ),
    Plot(
        "hybrid",
        "benchmarks/hybrid.md#Accelerators",
        "Prompts of the demo hybrid: head calls and what is met",
        ("head calls a batch", "sequential diffusion head calls a batch of 100"),
        ("all %", "everything that the prompt says, %"),
        short=(("FastHybrid, ", ""),),
    ),
    Plot(
        "lazymar",
        "benchmarks/lazymar.md#Caches",
        "LazyMAR: one cache at a time, and together",
        _BATCH_8,
        ("Frechet", "Frechet distance (lower is better)"),
        short=((r" caches?$| \(.*", ""),),
    ),
    Plot(
        "cspd",
        "benchmarks/cspd.md#Settings",
        "CSpD: modes, draft length and pre-fill",
        _BATCH_8,
        _SCENES,
        (
            ("draft length gamma (published: 8)", r"published, gamma.*"),
            ("pre-fill (published: 15 %)", r"published, pre-fill.*"),
        ),
        r"MAR|lossless|published|published, no alignment",
        joined=False,
        short=(("^published, ", ""),),
    ),
    Plot(
        "zipar",
        "benchmarks/llamagen.md#ZipAR",
        "ZipAR: window, on the LlamaGen of 16 x 16 tokens",
        ("steps (forwards)", "sequential transformer passes an image"),
        _SCENES,
        (("undecided cells masked", r"window \d+( \(a whole row.*)?"),),
        r"window 4, .*",
        short=((r" \(as published\)", " (published)"), (r" \(a whole row: exact\)", ": exact")),
    ),
    Plot(
        "mulosd-llamagen",
        "benchmarks/mulosd.md#LlamaGen",
        "MuLo-SD on the LlamaGens: threshold tau",
        _PASSES,
        _SCENES,
        _MULOSD,
        r"LlamaGen|LANTERN.*|all drawn again.*",
        short=_SHORT,
    ),
    Plot(
        "mulosd-tar",
        "benchmarks/mulosd.md#Tar",
        "MuLo-SD on Tar: threshold tau",
        _PASSES,
        ("all %", "prompts met in full (%)"),
        _MULOSD,
        r"Tar|LANTERN.*|all drawn again.*",
        short=_SHORT,
    ),
)


def tables(text: str, section: str) -> list[list[dict[str, str]]]:
    """Tables below a heading of a Markdown page, as rows of heading to cell. Raises UserError without that heading."""
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


def points(plot: Plot, text: str) -> list[Point]:
    """Points of a plot, read from its page, without the rows that lack a value. Raises UserError if there is none."""
    section, axes = plot.source.partition("#")[2], [heading.partition("#") for heading, _ in (plot.x, plot.y)]
    needed = {"setting", *(heading for heading, _, _ in axes)}
    rows = next((t for t in tables(text, section) if t and needed <= set(t[0])), None)
    if rows is None:
        raise UserError(f"section: no table below {section!r} has the columns {', '.join(sorted(needed))}.")
    out, patterns = [], [*(pattern for _, pattern in plot.series), plot.others]

    for row in rows:
        series = next((i for i, pattern in enumerate(patterns) if re.fullmatch(pattern, row["setting"])), None)
        numbers = [re.findall(r"-?\d+(?:\.\d+)?", row[heading].replace(",", "")) for heading, _, _ in axes]
        values = [
            float(n[int(at or 1) - 1]) for n, (_, _, at) in zip(numbers, axes, strict=True) if len(n) >= int(at or 1)
        ]
        if series is not None and len(values) == 2:
            out.append(Point(row["setting"], values[0], values[1], series))

    if not out:
        raise UserError(f"series: no row of the table below {section!r} is selected.")

    return out


def to_json(found: Sequence[Point]) -> str:
    """Points as a JSON list of [title, x, y, series]."""
    return json.dumps([[p.title, p.x, p.y, p.series] for p in found])


def figure(plot: Plot, found: Sequence[Point]) -> Any:
    """The plot of its points, a matplotlib figure of ``SIZE``."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, layout="constrained")
    axes, percent = made.add_subplot(), plot.y[0].endswith("%")
    styles = [*zip(COLOURS, SHAPES, strict=True)][: len(plot.series)] + [(GREY, "o")]

    for i, (colour, shape) in enumerate(styles):
        rows = [p for p in found if p.series == i]
        # One standard error of a percentage of IMAGES images.
        bars = [sqrt(p.y * (100 - p.y) / IMAGES) for p in rows] if percent else None
        line = "-" if plot.joined and i < len(plot.series) else ""
        name = plot.series[i][0] if i < len(plot.series) else "_"  # "_" is left out of the legend
        x, y = [p.x for p in rows], [p.y for p in rows]
        axes.errorbar(x, y, bars, marker=shape, color=colour, ls=line, capsize=3, label=name)

    axes.set(title=plot.title, xlabel=plot.x[1], ylabel=plot.y[1])
    axes.margins(0.08)
    axes.set_ylim(bottom=max(0, axes.get_ylim()[0]), top=min(axes.get_ylim()[1], 102) if percent else None)
    axes.grid(color="#e1e1e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if plot.series:
        axes.legend(fontsize=9)
    made.draw_without_rendering()  # fixes the layout, which the places of labels depend on
    _label(axes, [(p.x, p.y, plot.label(p.title), styles[p.series][0]) for p in found])

    return made


def _label(axes: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the label of each point (x, y, label, colour) beside it,
    where it covers least of markers, the legend and other labels.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    centres = [point[:2] for point in points]
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in axes.transData.transform(centres)]
    taken += [axes.get_legend().get_window_extent()] if axes.get_legend() else []
    frame = axes.get_window_extent()
    sides = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))

    def overlap(a: Any, b: Any) -> float:
        both = Bbox.intersection(a, b)
        return both.width * both.height if both else 0.0

    def placed(text: Any, gap: int, dx: int, dy: int) -> Any:
        text.set(ha=("right", "center", "left")[dx + 1], va=("top", "center", "bottom")[dy + 1])
        text.xyann = dx * gap / hypot(dx, dy), dy * gap / hypot(dx, dy)
        return text.get_window_extent()

    def cost(text: Any, gap: int, dx: int, dy: int) -> float:
        box = placed(text, gap, dx, dy)
        outside = box.width * box.height - overlap(box, frame)
        return sum(overlap(box, other) for other in taken) + 20 * outside + gap

    for x, y, label, colour in points:
        text = axes.annotate(label, (x, y), (0, 0), textcoords="offset points", color=colour, fontsize=9)
        text.set_path_effects([withStroke(linewidth=2, foreground="white")])
        choices = [(cost(text, gap, *side), gap, *side) for gap in (7, 14, 24, 36) for side in sides]
        taken.append(placed(text, *min(choices, key=lambda choice: choice[0])[1:]))


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
    parser.add_argument("--out", type=Path, default=DOCS / "benchmarks", metavar="DIR", help="default docs/benchmarks")
    options = parser.parse_args(arguments)
    known = {plot.name: plot for plot in PLOTS}

    for name in options.names or known:
        if name not in known:
            parser.error(f"name: there is no plot {name!r}; there are {', '.join(known)}.")
        path = options.out / f"{name}.png"
        draw(known[name], points(known[name], known[name].text()), path)
        print(f"wrote {path}")

    return 0


if __name__ == "__main__":
    sys.exit(main())
