"""Comparison grid: image batches side by side, each with its label and the counts of its report."""

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
    LABEL_SIZE,
    LONGEST_SIDE,
    PAD,
    PANEL,
    QUIET,
    TAG_SIZE,
    TEXT,
    check_batch,
    contact_sheet,
    font,
    line_height,
    resize,
    shorten,
    text_width,
    wrap,
)
from .quality import IDENTICAL, Quality, difference, explain_quality
from .record import Baseline, Qualities, Report, against, explain

_GAP = 20  # pixels between cells and around them
_TARGET_WIDTH = 352  # small images are enlarged by the integer factor closest to this width
_TARGET_HEIGHT = 4 * _TARGET_WIDTH  # elongated ones at most to this height
_MIN_WIDTH, _MAX_WIDTH, _MAX_HEIGHT = 320, 2048, 4096
_MOST_COLUMNS = (LONGEST_SIDE - _GAP) // (_MIN_WIDTH + 2 * PAD + _GAP)


def compare_grid(
    pictures: Sequence[np.ndarray],
    labels: Sequence[str],
    reports: Sequence[Report | None],
    columns: int = 0,
    baseline: Baseline = 0,
    marked: bool = True,
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
        baseline: index of the cell that speed-ups refer to, or one index per cell, None for no speed-up. Each baseline
            is followed by the cells that refer to it; cells without a baseline come last.
        marked: whether baseline cells get a tag and a coloured outline.
        title: one line above the grid, for example the settings all cells share.
        explained: whether a line under the grid says what the numbers mean.
        quality: of each cell against its baseline, None where there is none; () leaves it out.
        differences: whether a cell whose pictures have the shape of its baseline's shows their difference below them.

    Returns:
        uint8 [H, W, 3], at most 8192 pixels a side; pictures are reduced to fit.

    Raises:
        UserError: no cells, more than fit into 8192 pixels, lists of different lengths, a baseline out of range, or
            arrays that are not uint8 batches.
    """
    n = len(pictures)
    if not n:
        raise UserError("pictures: there is nothing to compare; connect at least one image.")
    if len(labels) != n or len(reports) != n:
        given = f"{n} given with {len(labels)} labels and {len(reports)} reports"
        raise UserError(f"pictures: {given}; give one of each a picture.")
    bases = [baseline] * n if isinstance(baseline, int) else list(baseline)
    wrong = next((b for b in bases if b is not None and not 0 <= b < n), None)
    if wrong is not None or len(bases) != n:
        raise UserError(
            f"baseline: {len(bases) if wrong is None else wrong} is outside 0 to {n - 1}, the pictures given."
        )
    order = cell_order(bases)
    measured = against(reports, bases)
    columns = min(n, columns, _MOST_COLUMNS) if columns > 0 else math.ceil(n / math.ceil(n / 4))
    limit = _cell_limit(columns, math.ceil(n / columns), title, 7 if quality else 5)
    found = list(quality) or [None] * n
    sheets = []
    for i in order:
        batch, own = check_batch(pictures[i], f"picture {i + 1}"), bases[i]
        below = pictures[own] if differences and own is not None and own != i else None
        sheets.append(_cell_picture(batch, limit, below))
    numbers = [_numbers(reports[i], measured[i], found[i]) for i in order]
    inner = max(_MIN_WIDTH, *(s.shape[1] for s in sheets), 0)
    width = inner + 2 * PAD
    tagged = [marked and n > 1 and i in bases for i in order]
    # The baseline tag is drawn to the right of its label.
    label_width = [inner - (text_width("baseline", TAG_SIZE) + PAD if tag else 0) for tag in tagged]
    titles = [wrap(labels[i], LABEL_SIZE, label_width[k], 2) for k, i in enumerate(order)]
    rows = []
    for start in range(0, n, columns):
        cells = range(start, min(n, start + columns))
        label_height = max(len(titles[k]) for k in cells) * line_height(LABEL_SIZE) + 6
        sheet_height = max(sheets[k].shape[0] for k in cells)
        lines = max(len(numbers[k]) for k in cells)
        height = PAD + label_height + sheet_height + PAD + (lines * line_height(BODY_SIZE) + PAD // 2 if lines else 0)
        rows.append(
            [
                _draw_cell(sheets[k], titles[k], numbers[k], tagged[k], (width, height), label_height, sheet_height)
                for k in cells
            ]
        )
    below_all = "; ".join(filter(None, (explain(reports), explain_quality(found)))) if explained else ""
    return _arrange(rows, columns * (width + _GAP) + _GAP, title, below_all)


def cell_order(bases: Sequence[int | None]) -> list[int]:
    """Order of the cells: each baseline followed by the cells that refer to it, cells without a baseline last.

    Args:
        bases: for each cell the index of its baseline, or None.
    """
    out = []
    for base in sorted(dict.fromkeys(bases), key=lambda b: b is None):
        out += [*([] if base is None else [base]), *(i for i, b in enumerate(bases) if b == base and i != base)]
    return list(dict.fromkeys(out))


def _cell_limit(columns: int, rows: int, title: str, lines: int) -> tuple[int, int]:
    """Largest width and height in pixels of a cell's picture; ``lines`` of numbers are below it.

    Raises:
        UserError: the cells do not fit into a sheet of :data:`.drawing.LONGEST_SIDE`.
    """
    around = _GAP + 2 * PAD
    text = 2 * line_height(LABEL_SIZE) + 6 + lines * line_height(BODY_SIZE) + PAD // 2
    top = _GAP + (line_height(BODY_SIZE) + PAD if title else 0)
    width, height = (LONGEST_SIDE - _GAP) // columns - around, (LONGEST_SIDE - top) // rows - around - text
    if height < 32:
        raise UserError(f"pictures: {columns * rows} cells do not fit into one sheet; compare fewer at a time.")
    return min(width, _MAX_WIDTH), min(height, _MAX_HEIGHT)


def _cell_picture(batch: np.ndarray, limit: tuple[int, int], baseline: np.ndarray | None = None) -> np.ndarray:
    """A batch as one sheet, enlarged by an integer factor, or reduced to ``limit`` (width, height).

    Args:
        baseline: the difference from it is drawn below, if its shape is the same.
    """
    if baseline is not None and baseline.shape == batch.shape:
        half = (limit[0], (limit[1] - 2) // 2)
        parts = [_cell_picture(part, half) for part in (batch, difference(batch, baseline))]
        return np.concatenate([parts[0], np.zeros_like(parts[0][:2]), parts[1]])
    n, h, w, _ = batch.shape
    columns = math.ceil(math.sqrt(n))
    factor = min(round(_TARGET_WIDTH / (columns * w)), _TARGET_HEIGHT // (math.ceil(n / columns) * h))
    factor = max(1, factor)
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
    counts = report.counts
    ratio = report.speedup(baseline) if baseline is not None else None
    lines = [
        ("speed-up", f"{ratio:.2f}x" if ratio is not None else None),
        ("seconds", f"{report.seconds:.2f}" if report.seconds else None),
        ("transformer passes", f"{counts['transformer_passes']:,}" if "transformer_passes" in counts else None),
        ("head calls", f"{counts['head_calls']:,}" if "head_calls" in counts else None),
        ("acceptance", f"{100 * report.acceptance:.1f} %" if report.acceptance is not None else None),
    ]
    return [*((name, value) for name, value in lines if value is not None), *distance]


def _draw_cell(
    sheet: np.ndarray,
    label: list[str],
    numbers: list[tuple[str, str]],
    tagged: bool,
    shape: tuple[int, int],
    label_height: int,
    sheet_height: int,
) -> Image.Image:
    """One cell of ``shape`` (width, height); heights in pixels are those of the tallest label and sheet of its row."""
    width, height = shape
    cell = Image.new("RGB", shape, PANEL)
    draw = ImageDraw.Draw(cell)
    draw.rectangle((0, 0, width - 1, height - 1), outline=ACCENT if tagged else EDGE)
    for i, line in enumerate(label):
        draw.text((PAD, PAD + i * line_height(LABEL_SIZE)), line, TEXT, font=font(LABEL_SIZE))
    if tagged:
        x = width - PAD - text_width("baseline", TAG_SIZE)
        draw.text((x, PAD + (LABEL_SIZE - TAG_SIZE) * 0.8), "baseline", ACCENT, font=font(TAG_SIZE))
    cell.paste(Image.fromarray(sheet), ((width - sheet.shape[1]) // 2, PAD + label_height))
    top = PAD + label_height + sheet_height + PAD
    for i, (name, value) in enumerate(numbers):
        y = top + i * line_height(BODY_SIZE)
        strong = name == "speed-up" or value == IDENTICAL
        draw.text((PAD, y), name, TEXT if strong else QUIET, font=font(BODY_SIZE))
        x = width - PAD - text_width(value, BODY_SIZE)
        draw.text((x, y), value, ACCENT if strong else TEXT, font=font(BODY_SIZE))
        if i:
            draw.line((PAD, y - 2, width - PAD, y - 2), fill=EDGE)
    return cell


def _arrange(rows: list[list[Image.Image]], width: int, title: str, below: str) -> np.ndarray:
    """Paste rows of cells below the title and above another text; uint8 [H, width, 3]."""
    top = line_height(BODY_SIZE) + PAD if title else 0
    lines = wrap(below, TAG_SIZE, width - 2 * _GAP, 4) if below else []
    bottom = len(lines) * line_height(TAG_SIZE) + (PAD if lines else 0)
    height = top + sum(row[0].height + _GAP for row in rows) + _GAP + bottom
    canvas = Image.new("RGB", (width, height), BACKGROUND)
    if title:
        line = shorten(title, BODY_SIZE, width - 2 * _GAP)
        ImageDraw.Draw(canvas).text((_GAP, _GAP - 4), line, QUIET, font=font(BODY_SIZE))
    y = _GAP + top
    for row in rows:
        for k, cell in enumerate(row):
            canvas.paste(cell, (_GAP + k * (cell.width + _GAP), y))
        y += row[0].height + _GAP
    for i, line in enumerate(lines):
        ImageDraw.Draw(canvas).text((_GAP, y + i * line_height(TAG_SIZE)), line, QUIET, font=font(TAG_SIZE))
    return np.asarray(canvas)
