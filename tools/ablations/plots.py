"""Draw the plots of docs/benchmarks.md: cost against quality, one point a setting.

``python -m fastar_nodes.tools.ablations.plots [NAME ...] [--out DIR]`` draws the plots of ``PLOTS``, all by default. Each plot
reads two columns of one Markdown table, so that a table that was measured again moves its points. Pillow only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, log10, sqrt
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from ...errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIZE = (760, 440)
# Pixels between the edges of the image and of the axes: left, top, right, bottom.
MARGIN = (64, 40, 24, 52)
TEXT, QUIET, GRID, PAPER = (30, 30, 34), (95, 95, 102), (225, 225, 229), (255, 255, 255)
# Blue, vermilion, bluish green, reddish purple (Okabe and Ito, 2008); the last is for rows without a series.
COLOURS = ((0, 114, 178), (213, 94, 0), (0, 130, 95), (170, 85, 135), (70, 70, 76))
SHAPES = ("circle", "square", "triangle", "diamond", "circle")
_SCALE = 4  # markers and lines are drawn at this scale and reduced

Box = tuple[float, float, float, float]


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
        r"MAR|lossless|paper|published|published, no alignment",
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


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round values that cover an interval, about ``count`` of them."""
    raw = (high - low) / count or 1.0
    power = 10 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw - 1e-9)
    first = floor(low / step + 1e-9)
    last = -floor(-high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


class Axes:
    """Linear map from values to pixels, with margins around the data."""

    def __init__(self, found: Sequence[Point], bars: Sequence[float]):
        xs = [p.x for p in found]
        ys = [p.y + sign * bar for p, bar in zip(found, bars, strict=True) for sign in (-1, 1)]
        self.x_ticks, self.y_ticks = _ticks(*_padded(xs)), _ticks(*_padded(ys, 100.0 if any(bars) else inf))
        left, top, right, bottom = MARGIN
        self.box: Box = (left, top, SIZE[0] - right, SIZE[1] - bottom)

    def __call__(self, x: float, y: float) -> tuple[float, float]:
        """Pixel of a pair of values."""
        left, top, right, bottom = self.box
        across = (x - self.x_ticks[0]) / (self.x_ticks[-1] - self.x_ticks[0])
        up = (y - self.y_ticks[0]) / (self.y_ticks[-1] - self.y_ticks[0])
        return left + across * (right - left), bottom - up * (bottom - top)


def _padded(values: Sequence[float], most: float = inf) -> tuple[float, float]:
    """The interval of non-negative values with a small margin, at most up to ``most``."""
    pad = 0.04 * (max(values) - min(values) or abs(values[0]) or 1.0)
    return max(0.0, min(values) - pad), min(most, max(values) + pad)


def _standard_error(percent: float, images: int) -> float:
    share = percent / 100
    return 100 * sqrt(share * (1 - share) / images)


def _marker(draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, colour: tuple[int, ...]) -> None:
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        draw.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), fill=colour)
    elif shape == "triangle":
        draw.polygon([(x, y - 1.15 * r), (x - r, y + 0.8 * r), (x + r, y + 0.8 * r)], fill=colour)
    else:
        draw.polygon([(x, y - 1.2 * r), (x - 1.2 * r, y), (x, y + 1.2 * r), (x + 1.2 * r, y)], fill=colour)


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _place(size: tuple[float, float], x: float, y: float, taken: Sequence[Box], inside: Box) -> Box:
    """The place of a label near its marker that covers least of what is drawn already; nearer places win ties."""
    w, h = size
    best: tuple[float, Box] | None = None
    for gap in (8, 16, 28, 42, 58):
        for dx, dy in ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1)):
            left = x + gap if dx > 0 else x - gap - w if dx < 0 else x - w / 2
            upper = y + gap if dy > 0 else y - gap - h if dy < 0 else y - h / 2
            box = (left, upper, left + w, upper + h)
            outside = w * h - _overlap(box, inside)
            cost = sum(_overlap(box, other) for other in taken) + 20 * outside + 1.5 * gap
            if best is None or cost < best[0]:
                best = cost, box
    assert best is not None
    return best[1]


def draw(plot: Plot, found: Sequence[Point]) -> Image.Image:
    """The plot of its points, RGB of ``SIZE``.

    Raises:
        UserError: error bars are asked for and a value is no percentage.
    """
    if plot.images and not all(0 <= p.y <= 100 for p in found):
        raise UserError(f"images: error bars need percentages in {plot.y!r}.")
    bars = [_standard_error(p.y, plot.images) if plot.images else 0.0 for p in found]
    axes = Axes(found, bars)
    left, top, right, bottom = axes.box
    large = Image.new("RGB", (SIZE[0] * _SCALE, SIZE[1] * _SCALE), PAPER)
    pen = ImageDraw.Draw(large)

    def line(ends: Sequence[tuple[float, float]], colour: tuple[int, ...], width: float) -> None:
        pen.line([(_SCALE * x, _SCALE * y) for x, y in ends], fill=colour, width=round(_SCALE * width), joint="curve")

    for tick in axes.x_ticks:
        x, _ = axes(tick, axes.y_ticks[0])
        line([(x, top), (x, bottom)], GRID, 1)
    for tick in axes.y_ticks:
        _, y = axes(axes.x_ticks[0], tick)
        line([(left, y), (right, y)], GRID, 1)
    line([(left, top), (left, bottom), (right, bottom)], QUIET, 1)
    where = [axes(p.x, p.y) for p in found]
    taken: list[Box] = []
    kinds = [p.series if p.series < len(plot.series) else len(COLOURS) - 1 for p in found]
    for series in range(len(plot.series)):
        path = [at for at, p in zip(where, found, strict=True) if p.series == series]
        if not plot.joined or len(path) < 2:
            continue
        line(path, COLOURS[series], 1.5)
        for (ax, ay), (bx, by) in zip(path, path[1:], strict=False):
            # Labels keep off the line: small boxes along it.
            steps = max(1, round(max(abs(bx - ax), abs(by - ay)) / 6))
            for i in range(steps + 1):
                x, y = ax + (bx - ax) * i / steps, ay + (by - ay) * i / steps
                taken.append((x - 2, y - 2, x + 2, y + 2))
    for (x, y), p, bar, kind in zip(where, found, bars, kinds, strict=True):
        if bar:
            ends = [axes(p.x, min(100.0, max(0.0, p.y + sign * bar))) for sign in (-1, 1)]
            line(ends, COLOURS[kind], 1)
            for _, end in ends:
                line([(x - 4, end), (x + 4, end)], COLOURS[kind], 1)
            taken.append((x - 4, ends[1][1], x + 4, ends[0][1]))
        _marker(pen, SHAPES[kind], _SCALE * x, _SCALE * y, _SCALE * 5, COLOURS[kind])
        taken.append((x - 7, y - 7, x + 7, y + 7))
    image = large.resize(SIZE, Image.Resampling.BOX)
    _write(ImageDraw.Draw(image), image, plot, axes, found, where, kinds, taken)
    return image


def _write(
    pen: ImageDraw.ImageDraw,
    image: Image.Image,
    plot: Plot,
    axes: Axes,
    found: Sequence[Point],
    where: Sequence[tuple[float, float]],
    kinds: Sequence[int],
    taken: list[Box],
) -> None:
    """Title, axis labels, tick labels, legend and the labels of all points."""
    left, top, right, bottom = axes.box
    heading, normal, small = (ImageFont.load_default(size) for size in (16, 14, 13))
    pen.text((left, top / 2 - 2), plot.title, fill=TEXT, font=heading, anchor="lm")
    for tick in axes.x_ticks:
        pen.text((axes(tick, axes.y_ticks[0])[0], bottom + 6), f"{tick:g}", fill=QUIET, font=small, anchor="mt")
    for tick in axes.y_ticks:
        pen.text((left - 7, axes(axes.x_ticks[0], tick)[1]), f"{tick:g}", fill=QUIET, font=small, anchor="rm")
    pen.text(((left + right) / 2, SIZE[1] - 20), plot.labels[0], fill=TEXT, font=normal, anchor="mm")
    width = round(pen.textlength(plot.labels[1], font=normal)) + 4
    upright = Image.new("RGB", (width, 20), PAPER)
    ImageDraw.Draw(upright).text((width / 2, 10), plot.labels[1], fill=TEXT, font=normal, anchor="mm")
    image.paste(upright.rotate(90, expand=True), (8, round((top + bottom - width) / 2)))
    if plot.series:
        # The legend takes the corner with the fewest points.
        w = max(pen.textlength(name, font=small) for name, _ in plot.series) + 26
        h = 20 * len(plot.series) + 4
        corners = [(x, y) for y in (bottom - h - 8, top + 8) for x in (right - w - 8, left + 10)]
        x, y = min(corners, key=lambda c: sum(_overlap((c[0], c[1], c[0] + w, c[1] + h), box) for box in taken))
        taken.append((x, y, x + w, y + h))
        for i, (name, _) in enumerate(plot.series):
            _marker(pen, SHAPES[i], x + 8, y + 12 + 20 * i, 5, COLOURS[i])
            pen.text((x + 22, y + 12 + 20 * i), name, fill=TEXT, font=small, anchor="lm")
    for (x, y), p, kind in zip(where, found, kinds, strict=True):
        label = plot.label(p.title)
        box = _place((pen.textlength(label, font=small) + 4, 15), x, y, taken, axes.box)
        near = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
        if abs(near[0] - x) + abs(near[1] - y) > 14:
            pen.line([(x, y), near], fill=COLOURS[kind], width=1)
        at = (box[0] + 2, (box[1] + box[3]) / 2)
        pen.text(at, label, fill=COLOURS[kind], font=small, anchor="lm", stroke_width=2, stroke_fill=PAPER)
        taken.append(box)


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
            about = PngInfo()
            about.add_text("points", to_json(found))  # a test compares them with the table
            draw(plot, found).quantize(64, dither=Image.Dither.NONE).save(path, optimize=True, pnginfo=about)
            print(f"wrote {path}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
