"""Comparison grid: image batches side by side, each with its label and the counts of its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from .drawing import LONGEST, PAD, Canvas, Ink, Size, check_batch, contact_sheet, line_height, resize, text_width, wrap
from .quality import IDENTICAL, Quality, difference, explain_quality
from .record import Baseline, Qualities, Report, against, explain
from .table import figure

_GAP = 20  # pixels between cells and around them
_TARGET_WIDTH = 352  # small images are enlarged by the integer factor closest to this width
_TARGET_HEIGHT = 4 * _TARGET_WIDTH  # elongated ones at most to this height
_MIN_WIDTH, _MAX_WIDTH, _MAX_HEIGHT = 320, 2048, 4096
MOST_COLUMNS = (LONGEST - _GAP) // (_MIN_WIDTH + 2 * PAD + _GAP)


def compare_grid(
    pictures: Sequence[np.ndarray],
    labels: Sequence[str],
    reports: Sequence[Report | None],
    columns: int = 0,
    baseline: Baseline = 0,
    title: str = "",
    explained: bool = False,
    quality: Qualities = (),
    differences: bool = False,
) -> np.ndarray:
    """Draw image batches side by side, each with its label above and its numbers below.

    Args:
        pictures: one uint8 array [N, H, W, 3] per cell, drawn as a near-square sheet. Sizes and counts may differ.
        labels: one per cell; long labels wrap to two lines and are then shortened.
        reports: one per cell, None where no report exists.
        columns: cells per row, at most 22; 0 chooses (at most four).
        baseline: index of the cell that speed-ups refer to, or one index per cell, None for no speed-up. Each baseline is followed by the
            cells that refer to it; cells without a baseline come last. If there are reports, baselines get a tag and a coloured outline.
        title: one line above the grid, for example the settings all cells share.
        explained: whether a line under the grid says what the numbers mean.
        quality: of each cell against its baseline, None where there is none; () leaves it out.
        differences: whether a cell whose pictures have the shape of its baseline's shows their difference below them.

    Returns:
        uint8 [H, W, 3], at most 8192 pixels a side; pictures are reduced to fit.

    Raises:
        UserError: more cells than fit into 8192 pixels, or arrays that are not uint8 batches.
    """
    n = len(pictures)
    bases = [baseline] * n if isinstance(baseline, int) else list(baseline)
    order, measured, found = cell_order(bases), against(reports, bases), list(quality) or [None] * n
    columns = _columns(n, columns)
    limit = _cell_limit(columns, math.ceil(n / columns), title, 7 if quality else 5)
    sheets = {}
    for i in order:
        batch, own = check_batch(pictures[i], f"picture {i + 1}"), bases[i]
        sheets[i] = _cell_picture(batch, limit, pictures[own] if differences and own is not None and own != i else None)
    inner = max(_MIN_WIDTH, *(sheet.shape[1] for sheet in sheets.values()))
    marked = n > 1 and any(report is not None for report in reports)
    cells = []
    for i in order:
        tagged = marked and i in bases
        room = inner - (text_width("baseline", Size.TAG) + PAD if tagged else 0)  # the tag is at the right of the label
        numbers = _numbers(reports[i], measured[i], found[i])
        cells.append(_Cell(sheets[i], wrap(labels[i], Size.LABEL, room, 2), numbers, tagged))
    rows = [_Row(cells[start : start + columns]) for start in range(0, n, columns)]
    width = columns * (inner + 2 * PAD + _GAP) + _GAP
    below = "; ".join(filter(None, (explain(reports), explain_quality(found)))) if explained else ""
    lines = wrap(below, Size.TAG, width - 2 * _GAP, 4)
    y = _GAP + (line_height(Size.BODY) + PAD if title else 0)
    bottom = len(lines) * line_height(Size.TAG) + (PAD if lines else 0)
    canvas = Canvas(width, y + sum(row.height + _GAP for row in rows) + bottom)
    if title:
        canvas.write(_GAP, _GAP - 4, title, Size.BODY, Ink.QUIET, width - 2 * _GAP)
    for row in rows:
        for k, cell in enumerate(row.cells):
            _draw_cell(canvas, cell, row, _GAP + k * (inner + 2 * PAD + _GAP), y, inner)
        y += row.height + _GAP
    for k, line in enumerate(lines):
        canvas.write(_GAP, y + k * line_height(Size.TAG), line, colour=Ink.QUIET)
    return canvas.pixels


def expect_fits(cells: int, columns: int) -> None:
    """Raise a UserError if a grid of so many cells with a title and all figures would not fit, before its pictures are made."""
    columns = _columns(cells, columns)
    _cell_limit(columns, math.ceil(cells / columns), "title", 7)


def _columns(cells: int, columns: int) -> int:
    """Cells a row: as asked, or at most four."""
    return min(cells, columns, MOST_COLUMNS) if columns > 0 else math.ceil(cells / math.ceil(cells / 4))


class _Cell(NamedTuple):
    """A cell: its picture, the lines of its label, its numbers, and whether it is tagged as a baseline."""

    sheet: np.ndarray
    label: list[str]
    numbers: list[tuple[str, str]]
    tagged: bool


class _Row:
    """Cells side by side, and heights in pixels: of the tallest label and picture, and of the row."""

    def __init__(self, cells: list[_Cell]):
        self.cells = cells
        self.label = max(len(cell.label) for cell in cells) * line_height(Size.LABEL) + 6
        self.sheet = max(cell.sheet.shape[0] for cell in cells)
        lines = max(len(cell.numbers) for cell in cells)
        numbers = lines * line_height(Size.BODY) + PAD // 2 if lines else 0
        self.height = PAD + self.label + self.sheet + PAD + numbers


def cell_order(bases: Sequence[int | None]) -> list[int]:
    """Order of the cells, by the index of each one's baseline: baselines followed by the cells that refer to them, None last."""
    out = []
    for base in sorted(dict.fromkeys(bases), key=lambda b: b is None):
        out += [*([] if base is None else [base]), *(i for i, b in enumerate(bases) if b == base and i != base)]
    return list(dict.fromkeys(out))


def _cell_limit(columns: int, rows: int, title: str, lines: int) -> tuple[int, int]:
    """Largest width and height in pixels of a cell's picture, above ``lines`` of numbers; a UserError if the cells do not fit."""
    around = _GAP + 2 * PAD
    text = 2 * line_height(Size.LABEL) + 6 + lines * line_height(Size.BODY) + PAD // 2
    top = _GAP + (line_height(Size.BODY) + PAD if title else 0)
    width, height = (LONGEST - _GAP) // columns - around, (LONGEST - top) // rows - around - text
    if height < 32:
        raise UserError(f"pictures: {columns * rows} cells do not fit into one sheet; compare fewer at a time.")
    return min(width, _MAX_WIDTH), min(height, _MAX_HEIGHT)


def _cell_picture(batch: np.ndarray, limit: tuple[int, int], baseline: np.ndarray | None = None) -> np.ndarray:
    """A batch as one sheet, enlarged by an integer factor or reduced to ``limit``, above its difference from a baseline of its shape."""
    if baseline is not None and baseline.shape == batch.shape:
        half = (limit[0], (limit[1] - 2) // 2)
        parts = [_cell_picture(part, half) for part in (batch, difference(batch, baseline))]
        return np.concatenate([parts[0], np.zeros_like(parts[0][:2]), parts[1]])
    n, h, w, _ = batch.shape
    columns = math.ceil(math.sqrt(n))
    factor = max(1, min(round(_TARGET_WIDTH / (columns * w)), _TARGET_HEIGHT // (math.ceil(n / columns) * h)))
    sheet = contact_sheet(batch.repeat(factor, axis=1).repeat(factor, axis=2), columns, gap=2 * (n > 1))
    h, w = sheet.shape[:2]
    if w <= limit[0] and h <= limit[1]:
        return sheet
    scale = min(limit[0] / w, limit[1] / h)
    return resize(sheet, max(1, round(w * scale)), max(1, round(h * scale)))


def _numbers(report: Report | None, baseline: Report | None, quality: Quality | None = None) -> list[tuple[str, str]]:
    """(name, value) lines of a cell in a fixed order, without values that are missing."""
    distance = quality.lines() if quality is not None else []
    if report is None:
        return distance
    lines = [
        ("speed-up", figure(report.speedup(baseline), ".2f", "x")),
        ("seconds", figure(report.seconds or None, ".2f")),
        ("transformer passes", figure(report.counts.get("transformer_passes"), ",")),
        ("head calls", figure(report.counts.get("head_calls"), ",")),
        ("acceptance", figure(report.acceptance, ".1f", " %", 100)),
    ]
    return [*((name, value) for name, value in lines if value), *distance]


def _draw_cell(canvas: Canvas, cell: _Cell, row: _Row, x: int, y: int, inner: int) -> None:
    """Draw a cell with its top left corner at (x, y) and ``inner`` pixels for its content."""
    left, right = x + PAD, x + PAD + inner
    frame = (x, y, right + PAD - 1, y + row.height - 1)
    canvas.draw.rectangle(frame, Ink.PANEL, Ink.ACCENT if cell.tagged else Ink.EDGE)
    for k, line in enumerate(cell.label):
        canvas.write(left, y + PAD + k * line_height(Size.LABEL), line, Size.LABEL)
    if cell.tagged:
        canvas.write(right, y + PAD + (Size.LABEL - Size.TAG) * 0.8, "baseline", colour=Ink.ACCENT, before=1)
    canvas.paste(cell.sheet, x + (inner + 2 * PAD - cell.sheet.shape[1]) // 2, y + PAD + row.label)
    for k, (name, value) in enumerate(cell.numbers):
        top = y + PAD + row.label + row.sheet + PAD + k * line_height(Size.BODY)
        strong = name == "speed-up" or value == IDENTICAL
        canvas.write(left, top, name, Size.BODY, Ink.TEXT if strong else Ink.QUIET)
        canvas.write(right, top, value, Size.BODY, Ink.ACCENT if strong else Ink.TEXT, before=1)
        if k:
            canvas.draw.line((left, top - 2, right, top - 2), fill=Ink.EDGE)
