"""A sweep as a picture: its cells in a grid with the axes' values, and its figures as a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import UserError
from .drawing import PAD, Canvas, Colour, Ink, Size, annotate, contact_sheet, line_height, resize, text_width, ticks
from .quality import IDENTICAL
from .sweep import Cell, Point, Sweep
from .table import figure

# Longest side of a grid in pixels. As an IMAGE, four bytes a channel, a square of it takes 200 MB.
LONGEST = 4096
_LEAST_CELL = 24
_GAP = 8
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
# Measures of a plot and the names of their axes.
_AXES = {
    "PSNR": "PSNR, dB (right is closer)",
    "SSIM": "SSIM (right is closer)",
    "acceptance": "drafts kept, %",
    "passes": "transformer passes",
}
MEASURES = tuple(_AXES)
_WIDTH, _HEIGHT = 960, 640


# ------------------------------------------------------------------------------------------------ grid


def sweep_grid(sweep: Sweep, side: int = 192) -> np.ndarray:
    """All cells as one picture: a column per value of x, a row per value of y and seed, figures under every cell.

    The pictures are read from disk one after another and reduced, so that memory depends on the grid's size and not on
    theirs. ``side``: width of a cell in pixels; less if the grid would exceed 4096. Returns uint8 [H, W, 3]; a
    UserError if the cells do not fit, or a cell's file has gone.
    """
    seeds, columns = sweep.seeds, len(sweep.x.values)
    rows = len(sweep.y.values) * len(seeds)
    names = [_row_name(sweep, j, seed) for j in range(len(sweep.y.values)) for seed in seeds]
    left = round(min(260, max(text_width(name, Size.TAG) for name in [sweep.x.name, *names]))) + 2 * PAD
    top = 2 * line_height(Size.BODY) + 2 * PAD
    below = 2 * line_height(Size.TAG) + 4
    side = min(side, (LONGEST - left) // columns - _GAP, (LONGEST - top - PAD) // rows - _GAP - below)
    if side < _LEAST_CELL:
        raise UserError(f"sweep: {columns} x {rows} cells do not fit into one picture; sweep fewer values.")
    tall = _height_of(sweep, side, (LONGEST - top - PAD) // rows - _GAP - below)
    width, height = left + columns * (side + _GAP) + PAD, top + rows * (tall + below + _GAP) + PAD
    canvas = Canvas(max(width, 480), height)
    canvas.write(PAD, PAD, sweep.title, Size.BODY, Ink.QUIET, canvas.image.width - 2 * PAD)
    head = PAD + line_height(Size.BODY)
    canvas.write(PAD, head + 2, sweep.x.name.replace("_", " "), colour=Ink.QUIET, room=left - 2 * PAD)
    for i, value in enumerate(sweep.x.values):
        canvas.write(left + i * (side + _GAP), head, value, Size.BODY, room=side)
    for k, cell in enumerate(sweep.cells):
        x, y = left + k % columns * (side + _GAP), top + k // columns * (tall + below + _GAP)
        if k % columns == 0:
            canvas.write(PAD, y + 2, names[k // columns], room=left - 2 * PAD)
        canvas.paste(_picture(sweep, cell, side, tall), x, y)
        for n, line in enumerate(_figures(cell, side)):
            canvas.write(x, y + tall + 2 + n * line_height(Size.TAG), line, colour=Ink.QUIET if n else Ink.ACCENT)
    return canvas.pixels


def _row_name(sweep: Sweep, j: int, seed: int) -> str:
    parts = [f"{sweep.y.name.replace('_', ' ')} {sweep.y.values[j]}"] if sweep.y.name else []
    return ", ".join([*parts, *([f"seed {seed}"] if len(sweep.seeds) > 1 or not parts else [])])


def _sheet(sweep: Sweep, cell: Cell) -> np.ndarray:
    """A cell's batch as one picture; a UserError if its file has gone."""
    found = sweep.store.read(cell.key)
    if found is None:
        raise UserError(f"sweep: the picture {sweep.store.path(cell.key).name} has gone; run the sweep again.")
    return contact_sheet(found[0])


def _height_of(sweep: Sweep, side: int, limit: int) -> int:
    """Height of the cells: the shape of the first cell's sheet, at most ``limit``."""
    height, width, _ = _sheet(sweep, sweep.cells[0]).shape
    return max(_LEAST_CELL, min(limit, round(side * height / width)))


def _picture(sweep: Sweep, cell: Cell, side: int, tall: int) -> np.ndarray:
    """A cell's batch as a sheet, fitted into the cell: uint8 [tall, side, 3]."""
    sheet = _sheet(sweep, cell)
    scale = min(side / sheet.shape[1], tall / sheet.shape[0])
    if scale >= 2:
        scale = math.floor(scale)
    shown = resize(sheet, max(1, round(sheet.shape[1] * scale)), max(1, round(sheet.shape[0] * scale)))
    out = np.full((tall, side, 3), Ink.PANEL, np.uint8)
    y, x = (tall - shown.shape[0]) // 2, (side - shown.shape[1]) // 2
    out[y : y + shown.shape[0], x : x + shown.shape[1]] = shown
    return out


def _figures(cell: Cell, width: int) -> list[str]:
    """The two lines under a cell: time and acceptance, distance from the baseline. What does not fit is left out, the last first."""
    r = cell.report
    first = [figure(r.speedup(cell.baseline), ".2f", "x") or f"{r.seconds:.2f} s"]
    first += [f"{100 * r.acceptance:.0f} % kept"] if r.acceptance is not None else []
    lines = cell.quality.lines() if cell.quality else []
    second = [value if name == "picture" else f"{name} {value}" for name, value in lines]
    return [_fitting(first, width), _fitting(second, width) or _fitting([v.partition(" ")[2] for v in second], width)]


def _fitting(parts: list[str], width: int) -> str:
    """As many parts from the front as fit into a width in pixels; of one that does not fit alone, nothing."""
    while parts and text_width(", ".join(parts), Size.TAG) > width:
        parts = parts[:-1]
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------ plot


def sweep_plot(sweep: Sweep, measure: str = "PSNR") -> np.ndarray:
    """Speed-up (seconds without a baseline) against a measure, one line per value of y, one dot per value of x.

    Dots whose pictures are identical to the baseline's have no PSNR; they are drawn in a column of their own at the
    right. ``measure``: one of :data:`MEASURES`. Returns uint8 [640, 960, 3]; a UserError if no cell has the measure.
    """
    points = sweep.points()
    fast = all(p.speedup is not None for p in points)
    found = {p: _measured(p, measure) for p in points}
    heights = {p: p.speedup if fast and p.speedup is not None else p.seconds for p in points}
    shown = [p for p in points if found[p] is not None]
    exact = [p for p in points if found[p] is None and p.word == IDENTICAL and measure == "PSNR"]
    if not shown and not exact:
        raise UserError(f"measure: no cell of this sweep has a {measure}; choose another of {', '.join(MEASURES)}.")
    xticks = ticks([x for x in found.values() if x is not None] or [0.0, 1.0])
    yticks = ticks([*(heights[p] for p in [*shown, *exact]), *([1.0] if fast else [])])
    canvas = Canvas(_WIDTH, _HEIGHT)
    draw, legend = canvas.draw, len(sweep.y.values) > 1
    x0, y0 = 72, 3 * PAD + line_height(Size.BODY)
    x1, y1 = _WIDTH - (170 if legend else 24) - (90 if exact else 0), _HEIGHT - 64
    column = x1 + 55.0  # of identical pictures
    across, up = _scale(xticks, x0, x1), _scale(yticks, y1, y0)
    canvas.write(PAD, PAD, sweep.title, Size.BODY, room=_WIDTH - 2 * PAD)
    for tick in xticks:
        draw.line((across(tick), y0, across(tick), y1), fill=Ink.EDGE)
        canvas.write(across(tick), y1 + 6, f"{tick:g}", colour=Ink.QUIET, before=0.5)
    for tick in yticks:
        draw.line((x0, up(tick), x1, up(tick)), fill=Ink.EDGE)
        canvas.write(x0 - 8, up(tick) - Size.TAG * 0.6, f"{tick:g}{'x' if fast else ''}", colour=Ink.QUIET, before=1)
    canvas.write((x0 + x1) / 2, y1 + 6 + line_height(Size.TAG), _AXES[measure], Size.BODY, Ink.QUIET, before=0.5)
    canvas.write(PAD, y0 - line_height(Size.TAG) - 2, "speed-up" if fast else "seconds", colour=Ink.QUIET)
    if exact:
        draw.line((column, y0, column, y1), fill=Ink.EDGE)
        canvas.write(column, y1 + 6, IDENTICAL, colour=Ink.QUIET, before=0.5)
    places = {p: (across(x) if (x := found[p]) is not None else column, up(heights[p])) for p in [*shown, *exact]}
    taken: list[tuple[float, float, float, float]] = []
    for j, value in enumerate(sweep.y.values):
        colour = SERIES[j % len(SERIES)]
        line = [places[p] for p in shown if p.y == j]
        if len(line) > 1:
            draw.line(line, fill=colour, width=2)
        hollow = j >= len(SERIES)  # the colours repeat
        inside, edge = (Ink.BACKGROUND, colour) if hollow else (colour, Ink.BACKGROUND)
        for p, (x, y) in places.items():
            if p.y == j:
                draw.ellipse((x - 5, y - 5, x + 5, y + 5), inside, edge, 2)
                annotate(canvas, sweep.x.values[p.x], x, y, taken)
        if legend:
            top = y0 + j * line_height(Size.TAG)
            draw.rectangle((_WIDTH - 150, top + 3, _WIDTH - 140, top + 13), fill=colour)
            text = f"{sweep.y.name.replace('_', ' ')} {value}" if j == 0 else value
            canvas.write(_WIDTH - 132, top, text, room=124)
    means = f"; means of {len(sweep.seeds)} seeds" if len(sweep.seeds) > 1 else ""
    note = f"labels: {sweep.x.name.replace('_', ' ')}{means}"
    canvas.write(x0, _HEIGHT - line_height(Size.TAG) - 2, note, colour=Ink.QUIET)
    return canvas.pixels


def _scale(marks: Sequence[float], low: int, high: int) -> Callable[[float], float]:
    """From values to pixels, for an axis whose first mark is at ``low`` and last one at ``high``."""
    return lambda value: low + (value - marks[0]) / (marks[-1] - marks[0]) * (high - low)


def _measured(p: Point, measure: str) -> float | None:
    """Value of a measure; figures whose place a word takes are left out."""
    share = None if p.acceptance is None else 100 * p.acceptance
    return {"PSNR": p.psnr, "SSIM": p.ssim, "acceptance": share, "passes": p.passes}[measure]
