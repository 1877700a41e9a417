"""The curve of a sweep as a plot, and the same pictures of every cell as a contact sheet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from ..errors import UserError
from ..reports.drawing import (
    BACKGROUND,
    BODY_SIZE,
    EDGE,
    LONGEST_SIDE,
    PAD,
    PANEL,
    QUIET,
    TAG_SIZE,
    TEXT,
    Colour,
    annotate,
    centred,
    font,
    line_height,
    resize,
    shorten,
    text_width,
    ticks,
    wrap,
)
from ..reports.sweep_pictures import SERIES
from .curve import CALLS, HEIGHTS, SECONDS, Curve, Point, labels_of, lines, varying
from .store import Cell, Store

INDICES = (0, 1, 2, 3, 4, 5)
_LEGEND, _COLUMN = 250, 120  # pixels: the legend, and a column of words
_LEAST_SIDE, _MOST_SIDE = 24, 192


def curve_plot(found: Curve, title: str = "", size: tuple[int, int] = (1100, 680)) -> np.ndarray:
    """Speed-up against a measure: a colour per sampler, a dot per cell with its 95 % interval, the Pareto front ringed and joined.

    Cells whose pictures equal the plain sampler's, or that have another word in place of a figure, are in columns of their own.

    Args:
        title: above the plot.
        size: width and height in pixels.

    Returns:
        uint8 [height, width, 3].

    Raises:
        UserError: no cell has this measure.
    """
    drawn = [p for p in found.points if p.result is not None and p.height(found.against) is not None]
    if not drawn:
        raise UserError(
            f"measure: no cell of this sweep has {found.title}; evaluate it first, or choose another measure."
        )
    words = list(dict.fromkeys(p.result.word for p in drawn if p.result is not None and p.result.value is None))
    return _Plot(found, drawn, words, size).draw(title)


class _Plot:
    """The geometry of a plot and what is drawn on it."""

    def __init__(self, found: Curve, drawn: Sequence[Point], words: Sequence[str], size: tuple[int, int]):
        self.found, self.drawn, self.words = found, drawn, words
        self.image = Image.new("RGB", size, BACKGROUND)
        self.canvas = ImageDraw.Draw(self.image)
        scale = found.about.scale
        ends = [x for p in drawn for x in self._ends(p)]
        self.xticks = ticks([x * scale for x in ends] or [0.0, 1.0])
        ratios = [p.height(found.against) or 1.0 for p in drawn]
        # Room for the label of the highest dot. Bars end at the axes: a single stalled shard would stretch them.
        self.yticks = ticks([1.0, *ratios, 1.03 * max(ratios)])
        self.x0, self.y0 = 64, PAD + line_height(BODY_SIZE) + 2 * line_height(TAG_SIZE)
        self.x1, self.y1 = size[0] - _LEGEND - 24 - _COLUMN * len(words), size[1] - 72

    @staticmethod
    def _ends(p: Point) -> list[float]:
        r = p.result
        return [] if r is None or r.value is None else [x for x in (r.value, r.low, r.high) if x is not None]

    def x(self, value: float) -> float:
        """Column of a value in the measure's own unit."""
        at = (value * self.found.about.scale - self.xticks[0]) / (self.xticks[-1] - self.xticks[0])
        return self.x0 + at * (self.x1 - self.x0)

    def y(self, value: float) -> float:
        """Row of a ratio."""
        return self.y1 - (value - self.yticks[0]) / (self.yticks[-1] - self.yticks[0]) * (self.y1 - self.y0)

    def at(self, p: Point) -> tuple[float, float]:
        """Centre of a point's dot."""
        assert p.result is not None
        if p.result.value is None:
            across = self.x1 + _COLUMN * (self.words.index(p.result.word) + 0.5)
        else:
            across = self.x(p.result.value)
        return across, self.y(p.height(self.found.against) or 0.0)

    def draw(self, title: str) -> np.ndarray:
        """The whole plot."""
        self._axes(title)
        groups = self.found.groups
        self._front()
        taken: list[tuple[float, float, float, float]] = []
        for k, points in enumerate(groups.values()):
            own = [p for p in points if p in self.drawn]
            taken += [(x - 9, y - 9, x + 9, y + 9) for x, y in map(self.at, own)]
            self._series(own, SERIES[k % len(SERIES)])
        for points in groups.values():
            for p in (p for p in points if p in self.drawn):
                x, y = self.at(p)
                annotate(self.canvas, p.label or p.cell.sampler, x, y - 10, taken, 10)  # above the horizontal bar
        self._legend(groups)
        return np.asarray(self.image)

    def _axes(self, title: str) -> None:
        width, draw = self.image.width, self.canvas
        draw.text((PAD, PAD), shorten(title, BODY_SIZE, width - 2 * PAD), TEXT, font=font(BODY_SIZE))
        top = self.y0 - line_height(TAG_SIZE) - 4
        draw.text(
            (PAD, top), shorten(HEIGHTS[self.found.against], TAG_SIZE, width - 2 * PAD), QUIET, font=font(TAG_SIZE)
        )
        for tick in self.xticks:
            x = self.x0 + (tick - self.xticks[0]) / (self.xticks[-1] - self.xticks[0]) * (self.x1 - self.x0)
            draw.line((x, self.y0, x, self.y1), fill=EDGE)
            centred(draw, x, self.y1 + 6, f"{tick:g}")
        for tick in self.yticks:
            y = self.y(tick)
            draw.line((self.x0, y, self.x1, y), fill=EDGE)
            text = f"{tick:g}x"
            draw.text((self.x0 - 8 - text_width(text, TAG_SIZE), y - TAG_SIZE * 0.6), text, QUIET, font=font(TAG_SIZE))
        for k, word in enumerate(self.words):
            x = self.x1 + _COLUMN * (k + 0.5)
            draw.line((x, self.y0, x, self.y1), fill=EDGE)
            for n, line in enumerate(wrap(word, TAG_SIZE, _COLUMN - 8, 2)):
                centred(draw, x, self.y1 + 6 + n * line_height(TAG_SIZE), line)
        better = "higher is better" if self.found.about.higher else "lower is better"
        against = f", against {self.found.reference}" if self.found.reference else ""
        name = shorten(f"{self.found.title}{against} ({better})", BODY_SIZE, self.x1 - self.x0)
        centred(draw, (self.x0 + self.x1) / 2, self.y1 + 8 + line_height(TAG_SIZE), name, BODY_SIZE)
        note = "horizontal bars: 95 % intervals of the measure; rings: Pareto front"
        draw.text((self.x0, self.image.height - line_height(TAG_SIZE) - 4), note, QUIET, font=font(TAG_SIZE))

    def _series(self, points: Sequence[Point], colour: Colour) -> None:
        """Lines, intervals and dots of a sampler."""
        for line in lines(points):
            path = [self.at(p) for p in line if p.result is not None and p.result.value is not None]
            if len(path) > 1:
                self.canvas.line(path, fill=colour, width=2)
        for p in points:
            x, y = self.at(p)
            ends = self._ends(p)
            if len(ends) == 3:
                low, high = self.x(ends[1]), self.x(ends[2])
                self.canvas.line((low, y, high, y), fill=colour, width=2)
                for end in (low, high):
                    self.canvas.line((end, y - 4, end, y + 4), fill=colour, width=2)
            if self.found.against == SECONDS and p.time.low is not None and p.time.high is not None:
                bottom, top = min(self.y1, self.y(p.time.low)), max(self.y0, self.y(p.time.high))
                self.canvas.line((x, bottom, x, top), fill=colour, width=1)
            if p.front:
                self.canvas.ellipse((x - 9, y - 9, x + 9, y + 9), None, TEXT, 2)
            self.canvas.ellipse((x - 5, y - 5, x + 5, y + 5), colour, BACKGROUND)

    def _front(self) -> None:
        """A line along the Pareto front of every plain sampler."""
        for plain in dict.fromkeys(p.plain for p in self.drawn):
            on = [self.at(p) for p in self.drawn if p.front and p.plain == plain]
            if len(on) > 1:
                self.canvas.line(sorted(on, key=lambda at: (at[1], at[0])), fill=QUIET, width=1)

    def _legend(self, groups: dict[tuple[str, str], list[Point]]) -> None:
        models = {model for model, _ in groups}
        x, y = self.image.width - _LEGEND, self.y0
        for k, ((model, sampler), points) in enumerate(groups.items()):
            if not any(p in self.drawn for p in points):
                continue
            self.canvas.rectangle((x, y + 4, x + 10, y + 14), fill=SERIES[k % len(SERIES)])
            names = ", ".join(name.replace("_", " ") for name in varying([p.cell for p in points]))
            text = f"{model}: {sampler}" if len(models) > 1 else sampler
            width = _LEGEND - 18 - PAD
            self.canvas.text((x + 18, y), shorten(text, TAG_SIZE, width), TEXT, font=font(TAG_SIZE))
            y += line_height(TAG_SIZE)
            if names:
                self.canvas.text((x + 18, y), shorten(f"labels: {names}", TAG_SIZE, width), QUIET, font=font(TAG_SIZE))
                y += line_height(TAG_SIZE)
            y += 4


# ------------------------------------------------------------------------------------------------ contact sheet


def pick(store: Store, cell: Cell, indices: Sequence[int]) -> list[np.ndarray | None]:
    """Pictures of a cell by index, uint8 [H, W, 3]; None for those that are not finished."""
    found: dict[int, np.ndarray] = {}
    for first, count in store.ranges(cell):
        wanted = [i for i in indices if first <= i < first + count]
        shard = store.shard(cell, first, count) if wanted else None
        if shard is not None:
            pictures = store.pictures(cell, shard)
            found |= {i: pictures[i - first] for i in wanted}
    return [found.get(i) for i in indices]


def cell_sheet(store: Store, indices: Sequence[int] = INDICES, side: int = 96) -> np.ndarray:
    """The same pictures of every cell: a row per cell, a column per index.

    Args:
        indices: of the pictures.
        side: width of a picture in pixels; less if the sheet would exceed 8192 pixels.

    Returns:
        uint8 [H, W, 3].

    Raises:
        UserError: no index, one that the sweep does not have, or too many cells.
    """
    cells = store.cells()
    least = min(cell.images for cell in cells)
    if not indices or not all(0 <= i < least for i in indices):
        raise UserError(f"indices: {', '.join(map(str, indices)) or 'none'}; the cells have images 0 to {least - 1}.")
    labels = labels_of(cells)
    names = [_name(cell, labels[cell.id]) for cell in cells]
    left = round(min(340, max(text_width(name, TAG_SIZE) for name in names))) + 2 * PAD
    top, gap = PAD + line_height(TAG_SIZE) + 4, 4
    tallest = max(cell.size[0] / cell.size[1] for cell in cells)
    room = min((LONGEST_SIDE - left) / len(indices), (LONGEST_SIDE - top) / len(cells) / tallest) - gap
    side = min(side, _MOST_SIDE, int(room))
    if side < _LEAST_SIDE:
        raise UserError(
            f"indices: {len(cells)} x {len(indices)} pictures do not fit into one sheet; choose fewer indices."
        )
    tall = round(side * tallest)
    canvas = Image.new(
        "RGB", (left + len(indices) * (side + gap) + PAD, top + len(cells) * (tall + gap) + PAD), BACKGROUND
    )
    draw = ImageDraw.Draw(canvas)
    for k, i in enumerate(indices):
        draw.text((left + k * (side + gap), PAD), f"image {i}", QUIET, font=font(TAG_SIZE))
    for row, (cell, name) in enumerate(zip(cells, names, strict=True)):
        y = top + row * (tall + gap)
        for n, line in enumerate(wrap(name, TAG_SIZE, left - 2 * PAD, 2)):
            draw.text((PAD, y + 2 + n * line_height(TAG_SIZE)), line, TEXT, font=font(TAG_SIZE))
        for k, picture in enumerate(pick(store, cell, indices)):
            x = left + k * (side + gap)
            if picture is None:
                draw.rectangle((x, y, x + side - 1, y + tall - 1), fill=PANEL)
                continue
            own = round(side * cell.size[0] / cell.size[1])
            canvas.paste(Image.fromarray(resize(picture, side, own)), (x, y))
    return np.asarray(canvas)


def _name(cell: Cell, label: str) -> str:
    """Name of a row."""
    names = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in cell.asked.items())
    return cell.title or " ".join(filter(None, (cell.sampler, names or label)))


def title_of(store: Store, found: Curve) -> str:
    """A line above the plot: models and images of a cell."""
    models = ", ".join(dict.fromkeys(cell.model for cell in store.cells()))
    images = sorted({p.images for p in found.points})
    return f"{models}: {'-'.join(map(str, dict.fromkeys((images[0], images[-1]))))} images a cell"


def note(found: Curve) -> str:
    """A remark about the vertical axis, or ""."""
    return (
        "The sweep was not timed, or not all of it: the plot shows sequential calls." if found.against == CALLS else ""
    )
