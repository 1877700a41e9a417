"""Comparison grid: image batches side by side, each with its label and the counts of its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from .drawing import LONGEST, PAD, Canvas, Ink, Size, check_batch, contact_sheet, line_height, resize, text_width, wrap
from .quality import IDENTICAL, Quality, difference, explain_quality
from .record import Baseline, Qualities, Report, against, counted, explain
from .table import figure, percent
from .timing import BASELINE

# Lines of figures under a cell at most, without and with those of quality.
_LINES = 7
_QUALITY_LINES = 2
_GAP = 20  # pixels between cells and around them
_TARGET_WIDTH = 400  # small images are enlarged by the integer factor closest to this width
_TARGET_HEIGHT = 4 * _TARGET_WIDTH  # elongated ones at most to this height
_MIN_WIDTH = 320
_MAX_WIDTH = 2048
_MAX_HEIGHT = 4096
MOST_COLUMNS = (LONGEST - _GAP) // (_MIN_WIDTH + 2 * PAD + _GAP)


def compare_grid(
    images: Sequence[np.ndarray],
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
        images: one uint8 array [N, H, W, 3] per cell, drawn as a near-square sheet. Sizes and counts may differ.
        labels: one per cell; long labels wrap to two lines and are then shortened.
        reports: one per cell, None where no report exists.
        columns: cells per row, at most 22; 0 chooses (at most four).
        baseline: index of the cell that speed-ups refer to, or one index per cell, None for no speed-up. Each baseline
            is followed by the cells that refer to it; cells without a baseline come last. If there are reports,
            baselines get a tag and a coloured outline.
        title: one line above the grid, for example the settings all cells share.
        explained: whether a line under the grid says what the numbers mean.
        quality: of each cell against its baseline, None where there is none; () leaves it out.
        differences: whether a cell whose images have the shape of its baseline's shows their difference below them.

    Returns:
        uint8 [H, W, 3], at most 8192 pixels a side; images are reduced to fit.

    Raises:
        UserError: more cells than fit into 8192 pixels, or arrays that are not uint8 batches.
    """
    n = len(images)
    bases = [baseline] * n if isinstance(baseline, int) else list(baseline)
    order = cell_order(bases)
    qualities = list(quality) or [None] * n

    # The cells' images, which decide the width of all cells.
    columns = _columns(n, columns)
    limit = _cell_limit(columns, math.ceil(n / columns), title, _LINES + (_QUALITY_LINES if quality else 0))
    sheets = {}
    for i in order:
        compared = _baseline_images(images, bases, i) if differences else None
        sheets[i] = _cell_image(check_batch(images[i], f"image {i + 1}"), limit, compared)

    inner = max(_MIN_WIDTH, *(sheet.shape[1] for sheet in sheets.values()))

    # The cells with their texts.
    measured = against(reports, bases)
    tags_shown = n > 1 and any(report is not None for report in reports)
    cells = []
    for i in order:
        tagged = tags_shown and i in bases
        room = inner
        if tagged:  # the tag is at the right of the label
            room -= text_width("baseline", Size.TAG) + PAD

        label = wrap(labels[i], Size.LABEL, room, 2)
        cells.append(_Cell(sheets[i], label, _numbers(reports[i], measured[i], qualities[i]), tagged))

    rows = [_Row(cells[start : start + columns]) for start in range(0, n, columns)]
    explanations = [explain(reports, bases), explain_quality(qualities)] if explained else []
    below = "; ".join(text for text in explanations if text)

    return _draw_grid(rows, columns, inner, title, below)


def _baseline_images(images: Sequence[np.ndarray], bases: Sequence[int | None], i: int) -> np.ndarray | None:
    """The images of a cell's baseline; None without one, and for a baseline itself."""
    base = bases[i]
    return None if base is None or base == i else images[base]


def _draw_grid(rows: Sequence[_Row], columns: int, inner: int, title: str, below: str) -> np.ndarray:
    """Draw rows of cells between a title and a text; ``inner`` is the width in pixels of a cell's content."""
    column_width = inner + 2 * PAD + _GAP
    width = columns * column_width + _GAP
    lines = wrap(below, Size.TAG, width - 2 * _GAP, 6)

    top = _top(title)
    height = top + sum(row.height + _GAP for row in rows)
    if lines:
        height += len(lines) * line_height(Size.TAG) + PAD

    canvas = Canvas(width, height)
    if title:
        canvas.write(_GAP, _GAP - 4, title, Size.BODY, Ink.QUIET, width - 2 * _GAP)

    y = top
    for row in rows:
        for k, cell in enumerate(row.cells):
            _draw_cell(canvas, cell, row, _GAP + k * column_width, y, inner)
        y += row.height + _GAP

    for k, line in enumerate(lines):
        canvas.write(_GAP, y + k * line_height(Size.TAG), line, colour=Ink.QUIET)

    return canvas.pixels


def expect_fits(cells: int, columns: int) -> None:
    """Raise a UserError if a grid of so many cells, with a title and all figures, would not fit.

    It is called before the cells' images are made.
    """
    columns = _columns(cells, columns)
    _cell_limit(columns, math.ceil(cells / columns), "title", _LINES + _QUALITY_LINES)


def _columns(cells: int, columns: int) -> int:
    """Cells a row: as asked, or at most four."""
    if columns > 0:
        return min(cells, columns, MOST_COLUMNS)

    rows = math.ceil(cells / 4)
    return math.ceil(cells / rows)


def _top(title: str) -> int:
    """Height in pixels above the first row of cells."""
    if not title:
        return _GAP
    return _GAP + line_height(Size.BODY) + PAD


class _Cell(NamedTuple):
    """A cell: its image, the lines of its label, its numbers, and whether it is tagged as a baseline."""

    sheet: np.ndarray
    label: list[str]
    numbers: list[tuple[str, str]]
    tagged: bool


class _Row:
    """Cells side by side, and heights in pixels: of the tallest label and image, and of the row."""

    def __init__(self, cells: list[_Cell]):
        self.cells = cells
        self.label = max(len(cell.label) for cell in cells) * line_height(Size.LABEL) + 6
        self.sheet = max(cell.sheet.shape[0] for cell in cells)
        self.height = PAD + self.label + self.sheet + PAD

        lines = max(len(cell.numbers) for cell in cells)
        if lines:
            self.height += lines * line_height(Size.BODY) + PAD // 2


def cell_order(bases: Sequence[int | None]) -> list[int]:
    """Order of the cells: baselines followed by the cells that refer to them, cells without a baseline last.

    Args:
        bases: index of each cell's baseline.
    """
    order: list[int] = []
    for base in dict.fromkeys(bases):
        if base is not None:
            order.append(base)
            order += [i for i, own in enumerate(bases) if own == base]

    order += [i for i, own in enumerate(bases) if own is None]

    # A baseline is listed once, where it comes first.
    return list(dict.fromkeys(order))


def _cell_limit(columns: int, rows: int, title: str, lines: int) -> tuple[int, int]:
    """Largest width and height in pixels of a cell's image, above ``lines`` of numbers.

    Raises:
        UserError: the cells do not fit into a sheet.
    """
    around = _GAP + 2 * PAD
    text = 2 * line_height(Size.LABEL) + 6 + lines * line_height(Size.BODY) + PAD // 2

    width = (LONGEST - _GAP) // columns - around
    height = (LONGEST - _top(title)) // rows - around - text
    if height < 32:
        raise UserError(f"images: {columns * rows} cells do not fit into one sheet; compare fewer at a time.")

    return min(width, _MAX_WIDTH), min(height, _MAX_HEIGHT)


def _cell_image(batch: np.ndarray, limit: tuple[int, int], baseline: np.ndarray | None = None) -> np.ndarray:
    """A batch as one sheet, enlarged by an integer factor or reduced to ``limit``.

    Under it is its difference from a baseline of its shape.
    """
    if baseline is not None and baseline.shape == batch.shape:
        half = (limit[0], (limit[1] - 2) // 2)
        upper = _cell_image(batch, half)
        lower = _cell_image(difference(batch, baseline), half)
        gap = np.zeros_like(upper[:2])
        return np.concatenate([upper, gap, lower])

    # Enlarge the images by the factor that brings the sheet closest to the usual width.
    n, h, w, _ = batch.shape
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    factor = max(1, min(round(_TARGET_WIDTH / (columns * w)), _TARGET_HEIGHT // (rows * h)))
    enlarged = np.stack([resize(image, w * factor, h * factor) for image in batch])
    sheet = contact_sheet(enlarged, columns, gap=2 if n > 1 else 0)

    # Reduce a sheet that is too large.
    h, w = sheet.shape[:2]
    if w <= limit[0] and h <= limit[1]:
        return sheet

    scale = min(limit[0] / w, limit[1] / h)
    return resize(sheet, max(1, round(w * scale)), max(1, round(h * scale)))


def _numbers(report: Report | None, baseline: Report | None, quality: Quality | None = None) -> list[tuple[str, str]]:
    """(name, value) lines of a cell in a fixed order, without values that are missing.

    The work is first and the seconds are last: what does not depend on the machine, then the distance from the
    baseline's image, then what varies from run to run.
    """
    distance = quality.lines() if quality is not None else []
    if report is None:
        return distance

    work = [
        ("transformer passes", counted(report, "transformer_passes", ",")),
        ("head calls", counted(report, "head_calls", ",")),
        ("head rows", figure(report.counts.get("head_rows"), ",")),
        ("acceptance", percent(report.acceptance, 1)),
    ]

    time = [("seconds", report.timed if report.seconds else "")]
    speedup = report.speedup(baseline)
    if speedup is not None and speedup.note != BASELINE:
        time += [("speed-up", speedup.short), ("spread", speedup.range)]

    return [(name, value) for name, value in [*work, *distance, *time] if value]


def _draw_cell(canvas: Canvas, cell: _Cell, row: _Row, x: int, y: int, inner: int) -> None:
    """Draw a cell with its top left corner at (x, y) and ``inner`` pixels for its content."""
    left = x + PAD
    right = left + inner
    top = y + PAD

    frame = (x, y, right + PAD - 1, y + row.height - 1)
    canvas.draw.rectangle(frame, Ink.PANEL, Ink.ACCENT if cell.tagged else Ink.EDGE)

    for k, line in enumerate(cell.label):
        canvas.write(left, top + k * line_height(Size.LABEL), line, Size.LABEL)
    if cell.tagged:
        canvas.write(right, top + (Size.LABEL - Size.TAG) * 0.8, "baseline", colour=Ink.ACCENT, before=1)

    centred = x + (inner + 2 * PAD - cell.sheet.shape[1]) // 2
    canvas.paste(cell.sheet, centred, top + row.label)

    first_number = top + row.label + row.sheet + PAD
    for k, (name, value) in enumerate(cell.numbers):
        line_top = first_number + k * line_height(Size.BODY)
        room = inner - text_width(name, Size.BODY) - PAD
        if k:
            canvas.draw.line((left, line_top - 2, right, line_top - 2), fill=Ink.EDGE)

        strong = value == IDENTICAL
        canvas.write(left, line_top, name, Size.BODY, Ink.TEXT if strong else Ink.QUIET)
        canvas.write(right, line_top, value, Size.BODY, Ink.ACCENT if strong else Ink.TEXT, room, 1)
