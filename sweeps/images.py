"""A sweep as an image: its cells in a grid with the axes' values, and its figures as a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from ..reports.drawing import (
    DOT,
    PAD,
    Canvas,
    Colour,
    Ink,
    Line,
    Place,
    Size,
    annotate,
    contact_sheet,
    line_height,
    resize,
    shorten,
    text_width,
    ticks,
)
from ..reports.quality import IDENTICAL
from ..reports.record import counted
from ..reports.sweep import Cell, Point
from ..reports.table import percent
from ..reports.timing import shown_seconds
from .sweep import Sweep

# Longest side of a grid in pixels. As an IMAGE, four bytes a channel, a square of it takes 200 MB.
LONGEST = 4096
_LEAST_CELL = 24
# Of a grid's text: pixels at most, and the share of a cell's width that they are.
_LARGEST_TEXT = 64
_CHARACTERS = 8
_GAP = 8


# ------------------------------------------------------------------------------------------------ grid


def sweep_grid(sweep: Sweep, side: int = 256) -> np.ndarray:
    """All cells as one image: a column per value of x, a row per value of y and seed, figures under every cell.

    The images are read from disk one after another and reduced, so that memory depends on the grid's size and not on
    theirs.

    Args:
        side: width of a cell in pixels; less if the grid would exceed 4096.

    Returns:
        uint8 [H, W, 3].

    Raises:
        UserError: the cells do not fit, or a cell's file has gone.
    """
    columns = len(sweep.x.values)
    names = []
    for j in range(len(sweep.y.values)):
        names += [_row_name(sweep, j, seed) for seed in sweep.seeds]
    rows = len(names)

    # The text is as large as the cells' images allow, so that it is read where the grid is shown small.
    lines = max(len(_figures(sweep, cell)) for cell in sweep.cells)
    at = _layout(sweep, names, lines, side)
    if at.side < side:
        at = _layout(sweep, names, lines, at.side)
    if at.side < _LEAST_CELL:
        raise UserError(f"sweep: {columns} x {rows} cells are too many for one image; give fewer values or seeds.")
    tall = _height_of(sweep, at.side, at.most_tall)

    column_width = at.side + _GAP
    row_height = tall + at.below + _GAP
    width = at.left + columns * column_width + PAD
    height = at.top + rows * row_height + PAD
    canvas = Canvas(max(width, 480), height)

    # The title, the name of x and its values.
    canvas.write(PAD, PAD, sweep.title, at.text, Ink.QUIET, canvas.image.width - 2 * PAD)
    head = PAD + line_height(at.text)
    canvas.write(PAD, head, _spaced(sweep.x.name), at.text, Ink.QUIET, at.left - 2 * PAD)
    for i, value in enumerate(sweep.x.values):
        canvas.write(at.left + i * column_width, head, value, at.text, room=at.side)

    # The cells.
    for k, cell in enumerate(sweep.cells):
        row, column = divmod(k, columns)
        x = at.left + column * column_width
        y = at.top + row * row_height
        if column == 0:
            canvas.write(PAD, y, names[row], at.text, room=at.left - 2 * PAD)

        canvas.paste(_image(sweep, cell, at.side, tall), x, y)
        for n, line in enumerate(_figures(sweep, cell)):
            text = _fitting(line, at.side, at.text)
            canvas.write(x, y + tall + 2 + n * line_height(at.text), text, at.text, Ink.QUIET if n else Ink.ACCENT)

    return canvas.pixels


class _Layout(NamedTuple):
    """Sizes of a grid in pixels."""

    text: int
    left: int  # room for the names of the rows
    top: int  # room for the title and the values of x
    below: int  # room for the figures under a cell
    side: int  # width of a cell's image
    most_tall: int  # largest height of a cell's image


def _layout(sweep: Sweep, names: Sequence[str], lines: int, side: int) -> _Layout:
    """The sizes of a grid whose cells are ``side`` wide, or less if the grid would be too large.

    Args:
        names: of the rows.
        lines: of figures under a cell.
    """
    text = max(Size.TAG, min(_LARGEST_TEXT, side // _CHARACTERS))

    widest = max(text_width(name, text) for name in [_spaced(sweep.x.name), *names])
    left = round(min(20 * text, widest)) + 2 * PAD
    top = 2 * line_height(text) + 2 * PAD
    below = lines * line_height(text) + 4

    most_tall = (LONGEST - top - PAD) // len(names) - _GAP - below
    fitting = min(side, (LONGEST - left) // len(sweep.x.values) - _GAP, most_tall)
    return _Layout(text, left, top, below, fitting, most_tall)


def _spaced(name: str) -> str:
    """The name of a setting with spaces for underscores."""
    return name.replace("_", " ")


def _row_name(sweep: Sweep, j: int, seed: int) -> str:
    """Name of a row: the value of y and the seed, as far as they vary."""
    parts = []
    if sweep.y.name:
        parts.append(f"{_spaced(sweep.y.name)} {sweep.y.values[j]}")
    if len(sweep.seeds) > 1 or not parts:
        parts.append(f"seed {seed}")

    return ", ".join(parts)


def _sheet(sweep: Sweep, cell: Cell) -> np.ndarray:
    """A cell's batch as one image; a UserError if its file has gone."""
    found = sweep.store.read(cell.key)
    if found is None:
        raise UserError(f"sweep: the image {sweep.store.path(cell.key).name} is missing; run the sweep again.")

    images, _ = found
    return contact_sheet(images)


def _height_of(sweep: Sweep, side: int, limit: int) -> int:
    """Height of the cells: the shape of the first cell's sheet, at most ``limit``."""
    height, width, _ = _sheet(sweep, sweep.cells[0]).shape
    return max(_LEAST_CELL, min(limit, round(side * height / width)))


def _image(sweep: Sweep, cell: Cell, side: int, tall: int) -> np.ndarray:
    """A cell's batch as a sheet, fitted into the cell: uint8 [tall, side, 3]."""
    sheet = _sheet(sweep, cell)
    h, w, _ = sheet.shape

    scale = min(side / w, tall / h)
    if scale >= 2:
        scale = math.floor(scale)
    shown = resize(sheet, max(1, round(w * scale)), max(1, round(h * scale)))

    # Centred in the cell.
    h, w, _ = shown.shape
    y = (tall - h) // 2
    x = (side - w) // 2
    out = np.full((tall, side, 3), Ink.PANEL, np.uint8)
    out[y : y + h, x : x + w] = shown

    return out


def _figures(sweep: Sweep, cell: Cell) -> list[list[str]]:
    """The lines under a cell, each as a figure and shorter forms of it: work, acceptance, distance from the baseline
    and time.

    The work is first, because it does not depend on the machine. Work that is the same in all cells is left out, unless
    there is no other.
    """
    report = cell.report
    out: list[list[str]] = []
    for name, unit in _varying(sweep):
        count = counted(report, name)
        if count:
            out.append([f"{count} {unit}", count])

    if report.acceptance is not None:
        out.append([f"{percent(report.acceptance)} accepted", percent(report.acceptance)])

    for name, value in (cell.quality.lines() if cell.quality else [])[:1]:
        out.append([value] if name == "image" else [f"{name} {value}", value])

    # A ratio is shown with its mark, or else the seconds.
    speedup = report.speedup(cell.baseline)
    seconds = f"{shown_seconds(report.seconds)} s"
    ratio = speedup is not None and speedup.value is not None
    out.append([speedup.brief, seconds] if speedup is not None and ratio else [seconds])

    return out


def _varying(sweep: Sweep) -> list[tuple[str, str]]:
    """The counts of work in which cells differ, with their units; if there is none, the first that they have."""
    counts = {"transformer_passes": "passes", "head_calls": "diffusion calls"}
    found = {name: {cell.report.counts.get(name, 0) for cell in sweep.cells} for name in counts}
    varying = [(name, unit) for name, unit in counts.items() if len(found[name]) > 1]
    return varying or [(name, unit) for name, unit in counts.items() if any(found[name])][:1]


def _fitting(forms: Sequence[str], width: int, size: int) -> str:
    """The first of a text's forms that fits into a width in pixels; "" if none does."""
    return next((form for form in forms if text_width(form, size) <= width), "")


# ------------------------------------------------------------------------------------------------ plot

# Pixels of a plot.
_WIDTH = 720
_HEIGHT = 400
_LETTERS = 26  # size of its text: a node shows a plot at half its size or less
_LINE = line_height(_LETTERS)
_LEGEND = 170  # width of the legend
# Series of a plot: safe for colour-blind eyes (Okabe and Ito).
SERIES: tuple[Colour, ...] = (
    (86, 180, 233),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (213, 94, 0),
    (240, 228, 66),
    (170, 170, 178),
    (0, 114, 178),
)


def side_by_side(grid: np.ndarray, plot: np.ndarray) -> np.ndarray:
    """A grid with its plot on the right, enlarged to at least a third of the grid's width; uint8 [H, W, 3].

    The editor shows one image much larger than each of two.
    """
    rows, columns, _ = grid.shape
    height, width, _ = plot.shape
    scale = max(1.0, columns / 3 / width)
    height = round(height * scale)
    width = round(width * scale)

    canvas = Canvas(columns + width, max(rows, height))
    canvas.paste(grid, 0, 0)
    canvas.paste(resize(plot, width, height), columns, 0)
    return canvas.pixels


class _Measure(NamedTuple):
    """What the horizontal axis of a plot shows."""

    axis: str  # its name
    of: Callable[[Point], float | None]


_MEASURES = {
    "PSNR": _Measure("PSNR, dB (right is closer)", lambda point: point.psnr),
    "SSIM": _Measure("SSIM (right is closer)", lambda point: point.ssim),
    "acceptance": _Measure(
        "drafts accepted, %", lambda point: None if point.acceptance is None else 100 * point.acceptance
    ),
    "passes": _Measure("transformer passes", lambda point: point.passes),
}
MEASURES = tuple(_MEASURES)
AUTO = "auto"


class _Dot(NamedTuple):
    """A combination of values in a plot."""

    point: Point
    across: float | None  # the measure; None of images that are identical to the baseline's
    up: float  # speed-up or seconds


def _dots(points: Sequence[Point], measure: str, up: Callable[[Point], float]) -> list[_Dot]:
    """The points with a measure, followed by those whose images are identical to the baseline's and have no PSNR."""
    value = _MEASURES[measure].of
    dots = [_Dot(point, value(point), up(point)) for point in points]

    known = [dot for dot in dots if dot.across is not None]
    identical = [dot for dot in dots if dot.across is None and measure == "PSNR" and dot.point.word == IDENTICAL]
    return [*known, *identical]


def measured_by(sweep: Sweep, wanted: str = AUTO) -> str:
    """The measure of a plot: ``wanted`` if a cell has it, else the first of PSNR, acceptance and passes that does."""
    points = sweep.points()
    for measure in (wanted, "PSNR", "acceptance"):
        if measure in MEASURES and _dots(points, measure, lambda point: 0.0):
            return measure

    return "passes"


def sweep_plot(sweep: Sweep, measure: str = "PSNR") -> np.ndarray:
    """Speed-up (seconds without a baseline) against a measure, one line per value of y, one dot per value of x.

    Dots whose images are identical to the baseline's have no PSNR; they are drawn in a column of their own at the
    right.

    Args:
        measure: one of :data:`MEASURES`.

    Returns:
        uint8 [400, 720, 3].

    Raises:
        UserError: no cell has the measure.
    """
    # 1. The dots.
    points = sweep.points()
    speedups = {point: point.speedup.value for point in points if point.speedup and point.speedup.value is not None}
    has_speedups = len(speedups) == len(points)
    dots = _dots(points, measure, lambda point: speedups[point] if has_speedups else point.seconds)
    if not dots:
        others = [other for other in MEASURES if _dots(points, other, lambda point: 0.0)]
        raise UserError(
            f"measure: this sweep has no values of {measure}; choose a different measure: {' or '.join(others)}."
        )

    # 2. The axes.
    axes = _axes_of(dots, has_speedups, legend=len(sweep.y.values) > 1)
    canvas = Canvas(_WIDTH, _HEIGHT)
    _draw_texts(canvas, axes, sweep, measure)
    _draw_ticks(canvas, axes)
    if any(dot.across is None for dot in dots):
        _draw_column(canvas, axes)

    # 3. The lines and dots, then their labels.
    lines = _draw_series(canvas, axes, dots, len(sweep.y.values))
    labels = [(sweep.x.values[dot.point.x], axes.place(dot)) for dot in dots]
    room = (axes.left + 2, axes.top - 14, _WIDTH - (_LEGEND if axes.legend else 2), axes.bottom + 12)
    annotate(canvas, labels, _LETTERS, room, lines)
    if axes.legend:
        _draw_legend(canvas, sweep, axes.top)

    return canvas.pixels


@dataclass(frozen=True)
class _Axes:
    """Where the dots of a plot are, in pixels, and the marks of both axes."""

    left: int
    top: int
    right: int
    bottom: int
    column: float  # of the identical images
    xticks: Sequence[float]
    yticks: Sequence[float]
    has_speedups: bool  # whether the vertical axis is the speed-up, else seconds
    legend: bool

    def across(self, value: float) -> float:
        """From a measure to pixels."""
        return _scaled(value, self.xticks, self.left, self.right)

    def up(self, value: float) -> float:
        """From a speed-up or seconds to pixels."""
        return _scaled(value, self.yticks, self.bottom, self.top)

    def place(self, dot: _Dot) -> Place:
        """Where a dot is."""
        return (self.column if dot.across is None else self.across(dot.across)), self.up(dot.up)


def _axes_of(dots: Sequence[_Dot], has_speedups: bool, legend: bool) -> _Axes:
    """The axes of a plot, with room for their numbers, the column of identical images and the legend."""
    xticks = ticks([dot.across for dot in dots if dot.across is not None] or [0.0, 1.0])
    one = [1.0] if has_speedups else []  # the baseline's own speed-up is always on the axis
    yticks = ticks([dot.up for dot in dots] + one)

    # The column of identical images is right of the dots, its name beside the numbers of the axis.
    half = text_width(IDENTICAL, _LETTERS) / 2
    apart = _widest(f"{tick:g}" for tick in xticks) / 2 + 14 + half
    has_column = any(dot.across is None for dot in dots)

    right = _WIDTH - (_LEGEND if legend else 64) - (round(apart + half) if has_column else 0)
    return _Axes(
        left=PAD + 8 + round(_widest(_mark(tick, has_speedups) for tick in yticks)),
        top=PAD + 2 * _LINE + 14,
        right=right,
        bottom=_HEIGHT - 2 * _LINE - 12,
        column=right + apart,
        xticks=xticks,
        yticks=yticks,
        has_speedups=has_speedups,
        legend=legend,
    )


def _mark(tick: float, speedup: bool) -> str:
    """The number at a mark of the vertical axis: "1.5x" of a speed-up, "1.5" of seconds."""
    return f"{tick:g}x" if speedup else f"{tick:g}"


def _widest(texts: Iterable[str]) -> float:
    """Width in pixels of the widest of texts."""
    return max(text_width(text, _LETTERS) for text in texts)


def _scaled(value: float, marks: Sequence[float], low: int, high: int) -> float:
    """From a value to pixels, on an axis whose first mark is at ``low`` and last one at ``high``."""
    return low + (value - marks[0]) / (marks[-1] - marks[0]) * (high - low)


def _draw_texts(canvas: Canvas, axes: _Axes, sweep: Sweep, measure: str) -> None:
    """Write the title, the names of the axes, and what the labels of the dots are."""
    canvas.write(PAD, PAD, sweep.title, _LETTERS, room=_WIDTH - 2 * PAD)

    # One pair of runs a dot, or one a seed: never repeats in turn.
    seeds = len(sweep.seeds)
    how = "one run each" if seeds == 1 else f"{seeds} seeds"
    axis = f"{'speed-up' if axes.has_speedups else 'seconds'} ({how})"
    canvas.write(PAD, PAD + _LINE, axis, _LETTERS, Ink.QUIET)

    labels = shorten(f"labels: {_spaced(sweep.x.name)}", _LETTERS, _WIDTH - 4 * PAD - text_width(axis, _LETTERS))
    canvas.write(_WIDTH - PAD, PAD + _LINE, labels, _LETTERS, Ink.QUIET, before=1)

    middle = (axes.left + axes.right) / 2
    canvas.write(middle, axes.bottom + 8 + _LINE, _MEASURES[measure].axis, _LETTERS, Ink.QUIET, before=0.5)


def _draw_ticks(canvas: Canvas, axes: _Axes) -> None:
    """Draw the lines of both axes with their numbers, of the horizontal axis as many as there is room for."""
    first, second, *_ = axes.xticks
    wide = _widest(f"{tick:g}" for tick in axes.xticks) + 10
    every = math.ceil(wide / (axes.across(second) - axes.across(first)))
    for k, tick in enumerate(axes.xticks):
        x = axes.across(tick)
        canvas.draw.line((x, axes.top, x, axes.bottom), fill=Ink.EDGE)
        if k % every == 0:
            canvas.write(x, axes.bottom + 8, f"{tick:g}", _LETTERS, Ink.QUIET, before=0.5)

    for tick in axes.yticks:
        y = axes.up(tick)
        canvas.draw.line((axes.left, y, axes.right, y), fill=Ink.EDGE)
        canvas.write(axes.left - 8, y - _LETTERS * 0.6, _mark(tick, axes.has_speedups), _LETTERS, Ink.QUIET, before=1)


def _draw_column(canvas: Canvas, axes: _Axes) -> None:
    """Draw the column of identical images."""
    canvas.draw.line((axes.column, axes.top, axes.column, axes.bottom), fill=Ink.EDGE)
    canvas.write(axes.column, axes.bottom + 8, IDENTICAL, _LETTERS, Ink.QUIET, before=0.5)


def _draw_series(canvas: Canvas, axes: _Axes, dots: Sequence[_Dot], series: int) -> list[Line]:
    """Draw a line through the dots of each value of y, but for identical images, and all dots; returns the pieces of
    the lines.
    """
    pieces: list[Line] = []
    for j in range(series):
        colour = SERIES[j % len(SERIES)]
        own = [dot for dot in dots if dot.point.y == j]
        line = [axes.place(dot) for dot in own if dot.across is not None]
        if len(line) > 1:
            canvas.draw.line(line, fill=colour, width=3)
        pieces += [(*one, *other) for one, other in pairwise(line)]

        inside = colour
        edge = Ink.BACKGROUND
        if j >= len(SERIES):  # the colours repeat: hollow dots
            inside = Ink.BACKGROUND
            edge = colour

        for x, y in map(axes.place, own):
            canvas.draw.ellipse((x - DOT, y - DOT, x + DOT, y + DOT), inside, edge, 2)

    return pieces


def _draw_legend(canvas: Canvas, sweep: Sweep, top: int) -> None:
    """Draw the name of y, and the colours of its values."""
    left = _WIDTH - _LEGEND + 20
    canvas.write(left, top - 8, _spaced(sweep.y.name), _LETTERS, Ink.QUIET, _LEGEND - 20 - PAD)
    for j, value in enumerate(sweep.y.values):
        y = top - 8 + (j + 1) * _LINE
        canvas.draw.rectangle((left, y + 8, left + 18, y + 26), fill=SERIES[j % len(SERIES)])
        canvas.write(left + 28, y, value, _LETTERS, room=_LEGEND - 48 - PAD)
