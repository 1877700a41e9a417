"""Comparison grid: image batches side by side, each with its label and its main figures, and above them the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from .drawing import LONGEST, Canvas, Ink, contact_sheet, line_height, resize, text_width, wrap
from .quality import IDENTICAL, Quality, closeness, difference
from .record import Baseline, Qualities, Report, against, compared, counted
from .summary import alone, headline
from .table import percent
from .timing import BASELINE, FIRST_RUN, shown_seconds

_GAP = 20  # pixels between cells and around them
_PAD = 12  # pixels inside a cell
_TARGET_WIDTH = 400  # small images are enlarged by the integer factor closest to this width
_TARGET_HEIGHT = 4 * _TARGET_WIDTH  # elongated ones at most to this height
_MIN_WIDTH = 320
_MAX_WIDTH = 2048
_MAX_HEIGHT = 4096
MOST_COLUMNS = (LONGEST - _GAP) // (_MIN_WIDTH + 2 * _PAD + _GAP)

# Pixels of text in a sheet of two columns of _USUAL_CELL pixels. Text grows with the sheet: a graph shows all sheets
# equally wide, at half their size or less, and what is written on them has to be read there.
_USUAL_CELL = 512
_HEADLINE = 54
_LEAST_HEADLINE = 40  # of a long one, before it becomes two lines
_LABEL = 38
_BODY = 36
_TAG = 26
_NARROW = 0.7  # size of a figure that would not fit, relative to the others
_SMALLEST = 0.4  # of these sizes
_LARGEST = 1.2
_WIDER = 1.5  # the same of a result, which has the whole width, relative to the cells' text
_LINES = 7  # of figures under a cell, at most
_LONGEST_RESULT = 400  # characters of a result or figure that are measured
_LEAST_IMAGE = 200  # pixels of a cell's height that text leaves to the image, if it need not be smaller


def compare_grid(
    images: Sequence[np.ndarray],
    labels: Sequence[str],
    reports: Sequence[Report | None],
    columns: int = 0,
    baseline: Baseline = 0,
    title: str = "",
    quality: Qualities = (),
    differences: bool = False,
) -> np.ndarray:
    """Draw image batches side by side, each with its label above and its main figures below; the result stands above
    them in one large line.

    Args:
        images: one uint8 array [N, H, W, 3] per cell, drawn as a near-square sheet. Sizes and counts may differ.
        labels: one per cell; long labels wrap to two lines and are then shortened.
        reports: one per cell, None where no report exists.
        columns: cells per row, at most 22; 0 chooses (at most four).
        baseline: index of the cell that results and speed-ups refer to, or one index per cell, None for none. Each
            baseline begins a row and is followed by the cells that refer to it; cells without a baseline come last, as
            do baselines to which no other cell refers. If there are reports, baselines get a tag and a coloured
            outline.
        title: a small text above the grid, for example the settings all cells share.
        quality: of each cell against its baseline, None where there is none; () leaves it out.
        differences: whether a cell whose images have the shape of its baseline's shows their difference below them.

    Returns:
        uint8 [H, W, 3], at most 8192 pixels a side; images are reduced to fit.

    Raises:
        UserError: more cells than fit into 8192 pixels, or arrays that are not uint8 batches.
    """
    n = len(images)
    bases = compared([baseline] * n if isinstance(baseline, int) else baseline)
    qualities = list(quality) or [None] * n
    groups = cell_groups(bases)
    columns = _columns(max(map(len, groups)), columns)
    rows = sum(math.ceil(len(group) / columns) for group in groups)

    # 1. The cells' images, which decide the width of all cells, and that the size of the text.
    scale = _text_scale(columns, rows, len(groups))
    limit = _cell_limit(columns, rows, len(groups), scale)
    sheets: dict[int, np.ndarray] = {}
    for i in range(n):
        of_baseline = _baseline_images(images, bases, i) if differences else None
        sheets[i] = _cell_image(images[i], limit, of_baseline)
    inner = max(_MIN_WIDTH, *(sheet.shape[1] for sheet in sheets.values()))

    # 2. The cells with their texts.
    measured = against(reports, bases)
    tagged = n > 1 and any(report is not None for report in reports)
    numbers = [_numbers(*of_cell) for of_cell in zip(reports, measured, qualities, strict=True)]

    def arranged(scale: float) -> _Sheet:
        """The groups with all texts at a size."""
        sheet = _Sheet(columns, inner, scale, title)
        for group in groups:
            cells = [_Cell(sheets[i], labels[i], numbers[i], tagged and i in bases) for i in group]
            sheet.add(_result(group, labels, reports, bases, qualities), cells)
        return sheet

    # 3. Text as large as the cells allow, or as small as the usual cells' if it would not fit.
    sheet = arranged(_text_scale(columns, rows, len(groups), inner))
    if sheet.height > LONGEST:
        sheet = arranged(scale)
    return sheet.drawn()


def _result(
    group: Sequence[int],
    labels: Sequence[str],
    reports: Sequence[Report | None],
    bases: Sequence[int | None],
    qualities: Sequence[Quality | None],
) -> str:
    """The result of a group of cells in one line; "" without a baseline."""
    first = group[0]
    if len(reports) == 1:
        return alone(reports[first])
    if bases[first] != first:
        return ""

    return headline([labels[i] for i in group], [reports[i] for i in group], 0, [qualities[i] for i in group])


def _baseline_images(images: Sequence[np.ndarray], bases: Sequence[int | None], i: int) -> np.ndarray | None:
    """The images of a cell's baseline; None without one, and for a baseline itself."""
    base = bases[i]
    return None if base is None or base == i else images[base]


def cell_order(bases: Sequence[int | None]) -> list[int]:
    """Order of the cells: baselines followed by the cells that refer to them, cells without a baseline last.

    Args:
        bases: index of each cell's baseline.
    """
    order: list[int] = []
    for group in cell_groups(bases):
        order += group
    return order


def cell_groups(bases: Sequence[int | None]) -> list[list[int]]:
    """Cells that are compared with each other: a baseline and those that refer to it. Cells without one come last."""
    taken: set[int] = set()
    groups: list[list[int]] = []
    for base in [*(own for own in dict.fromkeys(bases) if own is not None), None]:
        group = [] if base is None else [base]
        group += [i for i, own in enumerate(bases) if own == base]

        # A baseline is listed once, where it comes first.
        group = [i for i in dict.fromkeys(group) if i not in taken]
        taken.update(group)
        if group:
            groups.append(group)

    return groups


def expect_fits(cells: int, columns: int) -> None:
    """Raise a UserError if a grid of this many cells, with a title and all figures, would not fit.

    It is called before the cells' images are made.
    """
    columns = _columns(cells, columns)
    rows = math.ceil(cells / columns)
    _cell_limit(columns, rows, 1, _text_scale(columns, rows, 1))


def _columns(cells: int, columns: int) -> int:
    """Cells a row: as asked, or at most four; four cells are two by two, which is larger in a graph."""
    if columns > 0:
        return min(cells, columns, MOST_COLUMNS)
    if cells <= 3:
        return cells

    return min(4, math.ceil(math.sqrt(cells)))


# ------------------------------------------------------------------------------------------------ sizes


def _text_scale(columns: int, rows: int, groups: int, inner: int = _USUAL_CELL) -> float:
    """Size of the text as a multiple of the usual one: in proportion to the sheet's width, and so that it fits.

    ``inner``: pixels of a cell's content.
    """
    width = _column_width(inner) * columns + _GAP

    # What text of the usual size takes of the sheet's height.
    room = LONGEST - rows * (_GAP + 2 * _PAD + _LEAST_IMAGE)
    text = rows * _text_of_a_cell(1.0) + groups * _text_above(1.0)

    return max(_SMALLEST, min(width / _usual_width(), _LARGEST * inner / _USUAL_CELL, room / text))


def _usual_width() -> int:
    """Pixels of a sheet of two usual columns."""
    return 2 * _column_width(_USUAL_CELL) + _GAP


def _column_width(inner: int) -> int:
    """Pixels of a column with its gap."""
    return inner + 2 * _PAD + _GAP


def _text_of_a_cell(scale: float) -> int:
    """Height in pixels of a cell's texts at most: two lines of the label, and figures."""
    return round(scale * (2 * line_height(_LABEL) + _LINES * line_height(_BODY))) + 2 * _PAD


def _text_above(scale: float) -> int:
    """Height in pixels of the result above a group at most: two lines."""
    return round(_WIDER * scale * 2 * line_height(_HEADLINE)) + _GAP


def _cell_limit(columns: int, rows: int, groups: int, scale: float) -> tuple[int, int]:
    """Largest width and height in pixels of a cell's image.

    Raises:
        UserError: the cells do not fit into a sheet.
    """
    width = (LONGEST - _GAP) // columns - _column_width(0)

    above = _GAP + groups * _text_above(scale) + 2 * line_height(_BODY)  # of results and title
    height = (LONGEST - above) // rows - _GAP - 2 * _PAD - _text_of_a_cell(scale)
    if height < 32:
        raise UserError(f"images: {columns * rows} cells are too many for one image; compare fewer images at a time.")

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


# ------------------------------------------------------------------------------------------------ drawing


def _numbers(report: Report | None, baseline: Report | None, quality: Quality | None = None) -> list[tuple[str, str]]:
    """(name, value) lines of a cell in a fixed order, without values that are missing.

    Those that are read at a glance; tables have the others. The work is first and the seconds are last: what does not
    depend on the machine, then the distance from the baseline's image, then what varies from run to run.
    """
    image, _ = closeness(quality)
    distance = [("image" if quality is not None and quality.word else "PSNR", image)]
    if report is None:
        return [(name, value) for name, value in distance if value]

    work = [
        ("passes", counted(report, "transformer_passes")),
        ("diffusion calls", counted(report, "head_calls")),
        ("computed tokens", _computed(report, baseline)),
        (report.judged, percent(report.acceptance)),
    ]

    seconds = shown_seconds(report.seconds) if report.seconds else ""
    if seconds and report.first_run:
        seconds = f"{seconds} ({FIRST_RUN})"
    time = [("seconds", seconds)]
    speedup = report.speedup(baseline)
    if speedup is not None and speedup.value is not None and speedup.note != BASELINE:
        spread = f"{speedup.low:.2f} to {speedup.high:.2f}" if speedup.told else ""
        time += [("speed-up", speedup.brief), ("spread", spread)]

    return [(name, value) for name, value in [*work, *distance, *time] if value]


def _computed(report: Report, baseline: Report | None) -> str:
    """The tokens that a transformer with a cache computed, as a share of the baseline's: "46 %"; their number without a
    baseline; "" without a cache, which makes no fewer passes.
    """
    if not report.counts.get("cached_tokens"):
        return ""

    plain = baseline.counts.get("transformer_tokens") if baseline is not None else None
    if not plain:
        return counted(report, "transformer_tokens")
    return percent(report.counts["transformer_tokens"] / plain)


class _Cell(NamedTuple):
    """A cell: its image, its label, its numbers, and whether it is tagged as a baseline."""

    sheet: np.ndarray
    label: str
    numbers: list[tuple[str, str]]
    tagged: bool


class _Result(NamedTuple):
    """The result of a group: its lines, their size, and the height of them all, in pixels."""

    lines: list[str]
    size: int
    height: int


class _Row(NamedTuple):
    """Cells side by side with the lines of their labels, and heights in pixels."""

    cells: list[_Cell]
    labels: list[list[str]]
    label: int  # of the tallest label
    sheet: int  # of the tallest image
    height: int


class _Sheet:
    """Groups of cells, each under its result, with all texts at one scale."""

    def __init__(self, columns: int, inner: int, scale: float, title: str):
        self.scale = scale
        self.label = round(_LABEL * scale)
        self.body = round(_BODY * scale)
        self.tag = round(_TAG * scale)
        self.columns = columns
        self.inner = inner
        self.width = columns * _column_width(inner) + _GAP

        self.title = wrap(title, self.body, self.width - 2 * _GAP, 2)
        self.height = _GAP + len(self.title) * line_height(self.body)
        self.groups: list[tuple[_Result, list[_Row]]] = []

    def add(self, result: str, cells: list[_Cell]) -> None:
        """Add a group below the others."""
        large = self._large(result)
        rows = [self._row(cells[start : start + self.columns]) for start in range(0, len(cells), self.columns)]
        self.groups.append((large, rows))

        self.height += large.height + sum(row.height + _GAP for row in rows)

    def _large(self, result: str) -> _Result:
        """A result as one line, in smaller letters if it is long, or as two."""
        if not result:
            return _Result([], 0, 0)

        room = self.width - 2 * _GAP
        scale = min(_WIDER * self.scale, self.width / _usual_width())
        size = round(_HEADLINE * scale)
        fitting = int(size * room / max(1.0, text_width(result[:_LONGEST_RESULT], size)))
        size = max(round(_LEAST_HEADLINE * scale), min(size, fitting))

        lines = wrap(result, size, room, 2)
        return _Result(lines, size, len(lines) * line_height(size) + _GAP // 2)

    def _row(self, cells: list[_Cell]) -> _Row:
        """Measure a row of cells."""
        tag = text_width("baseline", self.tag) + _PAD  # at the right of the label
        labels = [wrap(cell.label, self.label, self.inner - tag * cell.tagged, 2) for cell in cells]

        label = max(map(len, labels)) * line_height(self.label)
        sheet = max(cell.sheet.shape[0] for cell in cells)
        lines = max(len(cell.numbers) for cell in cells)
        figures = lines * line_height(self.body) + _PAD if lines else 0

        return _Row(cells, labels, label, sheet, _PAD + label + sheet + figures + _PAD)

    def drawn(self) -> np.ndarray:
        """The sheet, uint8 [H, W, 3]."""
        canvas = Canvas(self.width, self.height)
        y = _GAP
        for line in self.title:
            canvas.write(_GAP, y - _GAP // 2, line, self.body, Ink.QUIET)
            y += line_height(self.body)

        for result, rows in self.groups:
            for n, line in enumerate(result.lines):
                canvas.write(_GAP, y - _GAP // 4 + n * line_height(result.size), line, result.size)
            y += result.height

            for row in rows:
                for k in range(len(row.cells)):
                    self._draw_cell(canvas, row, k, y)
                y += row.height + _GAP

        return canvas.pixels

    def _draw_cell(self, canvas: Canvas, row: _Row, k: int, y: int) -> None:
        """Draw the k-th cell of a row that begins at ``y``."""
        cell = row.cells[k]
        x = _GAP + k * _column_width(self.inner)
        left = x + _PAD
        right = left + self.inner
        top = y + _PAD

        frame = (x, y, right + _PAD - 1, y + row.height - 1)
        canvas.draw.rectangle(frame, Ink.PANEL, Ink.ACCENT if cell.tagged else Ink.EDGE)

        for n, line in enumerate(row.labels[k]):
            canvas.write(left, top + n * line_height(self.label) - _PAD // 2, line, self.label)
        if cell.tagged:
            lower = (self.label - self.tag) * 0.8 - _PAD // 2
            canvas.write(right, top + lower, "baseline", self.tag, Ink.ACCENT, before=1)

        centred = x + (self.inner + 2 * _PAD - cell.sheet.shape[1]) // 2
        canvas.paste(cell.sheet, centred, top + row.label)

        first_number = top + row.label + row.sheet + _PAD
        for n, (name, value) in enumerate(cell.numbers):
            line_top = first_number + n * line_height(self.body)
            room = self.inner - text_width(name, self.body) - _PAD
            fits = text_width(value[:_LONGEST_RESULT], self.body) <= room
            size = self.body if fits else round(_NARROW * self.body)
            if n:
                canvas.draw.line((left, line_top - 1, right, line_top - 1), fill=Ink.EDGE)

            strong = value == IDENTICAL
            canvas.write(left, line_top, name, self.body, Ink.TEXT if strong else Ink.QUIET)
            lower = (self.body - size) * 0.8
            canvas.write(right, line_top + lower, value, size, Ink.ACCENT if strong else Ink.TEXT, room, 1)
