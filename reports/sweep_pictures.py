"""A sweep as a picture: its cells in a grid with the axes' values, and its figures as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from ..errors import UserError
from .drawing import (
    ACCENT,
    BACKGROUND,
    BODY_SIZE,
    EDGE,
    PAD,
    PANEL,
    QUIET,
    TAG_SIZE,
    TEXT,
    Colour,
    annotate,
    centred,
    contact_sheet,
    font,
    line_height,
    resize,
    shorten,
    text_width,
    ticks,
)
from .quality import IDENTICAL
from .sweep import Cell, Point, Sweep

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
MEASURES = ("PSNR", "SSIM", "acceptance", "passes")


# ------------------------------------------------------------------------------------------------ grid


def sweep_grid(sweep: Sweep, side: int = 192) -> np.ndarray:
    """All cells as one picture: a column per value of x, a row per value of y and seed, figures under every cell.

    The pictures are read from disk one after another and reduced, so that memory depends on the grid's size and not on theirs.

    Args:
        side: width of a cell in pixels; less if the grid would exceed 4096 pixels.

    Returns:
        uint8 [H, W, 3].

    Raises:
        UserError: the cells do not fit, or a cell's file has gone.
    """
    seeds, columns = sweep.seeds, len(sweep.x.values)
    rows = len(sweep.y.values) * len(seeds)
    names = [_row_name(sweep, j, seed) for j in range(len(sweep.y.values)) for seed in seeds]
    left = round(min(260, max(text_width(name, TAG_SIZE) for name in [sweep.x.name, *names]))) + 2 * PAD
    top = 2 * line_height(BODY_SIZE) + 2 * PAD
    below = 2 * line_height(TAG_SIZE) + 4
    side = min(side, (LONGEST - left) // columns - _GAP, (LONGEST - top - PAD) // rows - _GAP - below)
    if side < _LEAST_CELL:
        raise UserError(f"sweep: {columns} x {rows} cells do not fit into one picture; sweep fewer values.")
    tall = _height_of(sweep, side, (LONGEST - top - PAD) // rows - _GAP - below)
    width, height = left + columns * (side + _GAP) + PAD, top + rows * (tall + below + _GAP) + PAD
    canvas = Image.new("RGB", (max(width, 480), height), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    title = shorten(sweep.title, BODY_SIZE, canvas.width - 2 * PAD)
    draw.text((PAD, PAD), title, QUIET, font=font(BODY_SIZE))
    names_x = shorten(sweep.x.name.replace("_", " "), TAG_SIZE, left - 2 * PAD)
    draw.text((PAD, PAD + line_height(BODY_SIZE) + 2), names_x, QUIET, font=font(TAG_SIZE))
    for i, value in enumerate(sweep.x.values):
        text = shorten(value, BODY_SIZE, side)
        draw.text((left + i * (side + _GAP), PAD + line_height(BODY_SIZE)), text, TEXT, font=font(BODY_SIZE))
    for k, cell in enumerate(sweep.cells):
        x, y = left + k % columns * (side + _GAP), top + k // columns * (tall + below + _GAP)
        if k % columns == 0:
            name = shorten(names[k // columns], TAG_SIZE, left - 2 * PAD)
            draw.text((PAD, y + 2), name, TEXT, font=font(TAG_SIZE))
        canvas.paste(Image.fromarray(_picture(sweep, cell, side, tall)), (x, y))
        for n, line in enumerate(_figures(cell, side)):
            at = (x, y + tall + 2 + n * line_height(TAG_SIZE))
            draw.text(at, line, QUIET if n else ACCENT, font=font(TAG_SIZE))
    return np.asarray(canvas)


def _row_name(sweep: Sweep, j: int, seed: int) -> str:
    parts = [f"{sweep.y.name.replace('_', ' ')} {sweep.y.values[j]}"] if sweep.y.name else []
    return ", ".join([*parts, *([f"seed {seed}"] if len(sweep.seeds) > 1 or not parts else [])])


def _load(sweep: Sweep, cell: Cell) -> np.ndarray:
    found = sweep.store.read(cell.key)
    if found is None:
        raise UserError(f"sweep: the picture {sweep.store.path(cell.key).name} has gone; run the sweep again.")
    return found[0]


def _height_of(sweep: Sweep, side: int, limit: int) -> int:
    """Height of the cells: the shape of the first cell's sheet, at most ``limit``."""
    sheet = contact_sheet(_load(sweep, sweep.cells[0]))
    return max(_LEAST_CELL, min(limit, round(side * sheet.shape[0] / sheet.shape[1])))


def _picture(sweep: Sweep, cell: Cell, side: int, tall: int) -> np.ndarray:
    """A cell's batch as a sheet, fitted into the cell: uint8 [tall, side, 3]."""
    sheet = contact_sheet(_load(sweep, cell))
    scale = min(side / sheet.shape[1], tall / sheet.shape[0])
    if scale >= 2:
        scale = math.floor(scale)
    shown = resize(sheet, max(1, round(sheet.shape[1] * scale)), max(1, round(sheet.shape[0] * scale)))
    out = np.full((tall, side, 3), PANEL, np.uint8)
    y, x = (tall - shown.shape[0]) // 2, (side - shown.shape[1]) // 2
    out[y : y + shown.shape[0], x : x + shown.shape[1]] = shown
    return out


def _figures(cell: Cell, width: int) -> list[str]:
    """The two lines under a cell: time and acceptance, distance from the baseline. What does not fit is left out, the last first."""
    r, ratio = cell.report, cell.report.speedup(cell.baseline) if cell.baseline else None
    first = [f"{ratio:.2f}x" if ratio is not None else f"{r.seconds:.2f} s"]
    first += [f"{100 * r.acceptance:.0f} % kept"] if r.acceptance is not None else []
    second = [
        value if name == "picture" else f"{name} {value}"
        for name, value in (cell.quality.lines() if cell.quality else [])
    ]
    return [_fitting(first, width), _fitting(second, width) or _fitting([v.partition(" ")[2] for v in second], width)]


def _fitting(parts: list[str], width: int) -> str:
    """As many parts from the front as fit into a width in pixels; of one that does not fit alone, nothing."""
    while parts and text_width(", ".join(parts), TAG_SIZE) > width:
        parts = parts[:-1]
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------ plot


def sweep_plot(sweep: Sweep, measure: str = "PSNR", size: tuple[int, int] = (960, 640)) -> np.ndarray:
    """Speed-up (seconds without a baseline) against a measure, one line per value of y, one dot per value of x.

    Dots whose pictures are identical to the baseline's have no PSNR; they are drawn in a column of their own at the right.

    Args:
        measure: one of :data:`MEASURES`.
        size: width and height in pixels.

    Returns:
        uint8 [height, width, 3].

    Raises:
        UserError: an unknown measure, or one that no cell has.
    """
    if measure not in MEASURES:
        raise UserError(f"measure: {measure!r} is not one of {', '.join(MEASURES)}.")
    points = sweep.points()
    fast = all(p.speedup is not None for p in points)
    across = {p: _measured(p, measure) for p in points}
    exact = [p for p in points if across[p] is None and p.word == IDENTICAL and measure == "PSNR"]
    shown = [p for p in points if across[p] is not None]
    if not shown and not exact:
        raise UserError(f"measure: no cell of this sweep has a {measure}; choose another of {', '.join(MEASURES)}.")
    xs, ys = [across[p] for p in shown], [_height(p, fast) for p in [*shown, *exact]]
    xticks, yticks = ticks([x for x in xs if x is not None] or [0.0, 1.0]), ticks([*ys, 1.0] if fast else ys)
    image = Image.new("RGB", size, BACKGROUND)
    draw = ImageDraw.Draw(image)
    legend = len(sweep.y.values) > 1
    x0, y0 = 72, 3 * PAD + line_height(BODY_SIZE)
    x1, y1 = size[0] - (170 if legend else 24) - (90 if exact else 0), size[1] - 64

    def at(value: float, marks: Sequence[float], low: int, high: int) -> float:
        return low + (value - marks[0]) / (marks[-1] - marks[0]) * (high - low)

    title = shorten(sweep.title, BODY_SIZE, size[0] - 2 * PAD)
    draw.text((PAD, PAD), title, TEXT, font=font(BODY_SIZE))
    for tick in xticks:
        x = at(tick, xticks, x0, x1)
        draw.line((x, y0, x, y1), fill=EDGE)
        centred(draw, x, y1 + 6, f"{tick:g}")
    for tick in yticks:
        y = at(tick, yticks, y1, y0)
        draw.line((x0, y, x1, y), fill=EDGE)
        text = f"{tick:g}{'x' if fast else ''}"
        draw.text((x0 - 8 - text_width(text, TAG_SIZE), y - TAG_SIZE * 0.6), text, QUIET, font=font(TAG_SIZE))
    centred(draw, (x0 + x1) / 2, y1 + 6 + line_height(TAG_SIZE), _axis_name(measure), BODY_SIZE)
    name = "speed-up" if fast else "seconds"
    draw.text((PAD, y0 - line_height(TAG_SIZE) - 2), name, QUIET, font=font(TAG_SIZE))
    if exact:
        draw.line((x1 + 55, y0, x1 + 55, y1), fill=EDGE)
        centred(draw, x1 + 55, y1 + 6, IDENTICAL)
    taken: list[tuple[float, float, float, float]] = []
    for j, value in enumerate(sweep.y.values):
        colour = SERIES[j % len(SERIES)]
        line = [
            (p, at(across[p] or 0.0, xticks, x0, x1), at(_height(p, fast), yticks, y1, y0)) for p in shown if p.y == j
        ]
        if len(line) > 1:
            draw.line([(x, y) for _, x, y in line], fill=colour, width=2)
        dots = [*line, *((p, x1 + 55.0, at(_height(p, fast), yticks, y1, y0)) for p in exact if p.y == j)]
        for p, x, y in dots:
            hollow = j >= len(SERIES)  # the colours repeat
            draw.ellipse(
                (x - 5, y - 5, x + 5, y + 5), BACKGROUND if hollow else colour, colour if hollow else BACKGROUND, 2
            )
            annotate(draw, sweep.x.values[p.x], x, y, taken)
        if legend:
            top = y0 + j * line_height(TAG_SIZE)
            draw.rectangle((size[0] - 150, top + 3, size[0] - 140, top + 13), fill=colour)
            text = f"{sweep.y.name.replace('_', ' ')} {value}" if j == 0 else value
            draw.text((size[0] - 132, top), shorten(text, TAG_SIZE, 124), TEXT, font=font(TAG_SIZE))
    note = f"labels: {sweep.x.name.replace('_', ' ')}" + (
        f"; means of {len(sweep.seeds)} seeds" if len(sweep.seeds) > 1 else ""
    )
    draw.text((x0, size[1] - line_height(TAG_SIZE) - 2), note, QUIET, font=font(TAG_SIZE))
    return np.asarray(image)


def _measured(p: Point, measure: str) -> float | None:
    """Value of a measure; figures whose place a word takes are left out."""
    if measure == "passes":
        return p.passes
    if measure == "acceptance":
        return None if p.acceptance is None else 100 * p.acceptance
    return p.psnr if measure == "PSNR" else p.ssim


def _axis_name(measure: str) -> str:
    units = {"PSNR": "PSNR, dB (right is closer)", "SSIM": "SSIM (right is closer)", "acceptance": "drafts kept, %"}
    return units.get(measure, "transformer passes")


def _height(p: Point, fast: bool) -> float:
    return p.seconds if not fast or p.speedup is None else p.speedup
