"""Drawing that grids, plots and token maps share: colours, text layout and image helpers.

Images are uint8 RGB arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image, ImageDraw

from .fonts import fitting

Colour = tuple[int, int, int]


class Ink:
    """Colours of areas, lines and text."""

    BACKGROUND: Colour = (22, 22, 25)
    PANEL: Colour = (34, 34, 39)
    EDGE: Colour = (58, 58, 66)
    TEXT: Colour = (238, 238, 240)
    QUIET: Colour = (164, 164, 172)
    ACCENT: Colour = (86, 180, 233)


class Size:
    """Font sizes in pixels."""

    LABEL = 18
    BODY = 15
    TAG = 13


PAD = 12  # pixels inside a cell or legend
LONGEST = 8192  # pixels of a sheet or map
_LONGEST_LINE = 1000  # characters; measuring text takes time per character


def line_height(size: int) -> int:
    """Height in pixels of a line of text."""
    return round(size * 1.4)


def text_width(text: str, size: int) -> float:
    """Width in pixels of ``text`` at font size ``size``."""
    font, shown = fitting(text, size)
    return font.getlength(shown)


def shorten(text: str, size: int, max_width: float) -> str:
    """Truncate ``text`` with an ellipsis to at most ``max_width`` pixels and 1000 characters."""
    fits = len(text) <= _LONGEST_LINE and text_width(text, size) <= max_width
    if fits:
        return text

    text = text[:_LONGEST_LINE]
    while text and text_width(text + "...", size) > max_width:
        text = text[:-1]

    return text.rstrip() + "..."


def wrap(text: str, size: int, max_width: float, lines: int) -> list[str]:
    """Break ``text`` into at most ``lines`` lines of ``max_width`` pixels.

    The last line is shortened if words remain.
    """
    words = text[: lines * _LONGEST_LINE].split()
    out: list[str] = []

    while words and len(out) + 1 < lines:
        # The words that fit into a line, and at least one.
        n = 1
        while n < len(words) and text_width(" ".join(words[: n + 1]), size) <= max_width:
            n += 1

        out.append(shorten(" ".join(words[:n]), size, max_width))
        words = words[n:]

    if words:
        out.append(shorten(" ".join(words), size, max_width))

    return out


class Canvas:
    """An image that is drawn on."""

    def __init__(self, width: int, height: int, colour: Colour = Ink.BACKGROUND):
        self.image = Image.new("RGB", (width, height), colour)
        self.draw = ImageDraw.Draw(self.image)

    def copy(self) -> Canvas:
        """What is drawn so far, to be drawn on further."""
        other = Canvas(*self.image.size)
        other.image.paste(self.image)
        return other

    @property
    def pixels(self) -> np.ndarray:
        """The image, uint8 [H, W, 3]."""
        return np.asarray(self.image)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        size: int = Size.TAG,
        colour: Colour = Ink.TEXT,
        room: float | None = None,
        before: float = 0.0,
    ) -> None:
        """Write a line of text.

        Args:
            x: where the line begins in pixels, if ``before`` is 0.
            y: the top of the line in pixels.
            room: the text is shortened to this width in pixels; None does not shorten it.
            before: the share of the text's width that is left of ``x``: 0.5 centres the text, 1 ends it at ``x``.
        """
        if room is not None:
            text = shorten(text, size, room)

        left = x - before * text_width(text, size)
        font, shown = fitting(text, size)
        # The baseline of Pillow's own font, on which every line stands.
        self.draw.text((left, y + fitting("", size)[0].getmetrics()[0]), shown, colour, font, "ls")

    def outlined(self, centre: tuple[float, float], text: str, size: int) -> None:
        """Write a text with a dark outline around a point."""
        font, shown = fitting(text, size)
        self.draw.text(centre, shown, Ink.TEXT, font, "mm", stroke_width=1, stroke_fill=(0, 0, 0))

    def paste(self, image: np.ndarray, x: int, y: int) -> None:
        """Paste uint8 [H, W, 3] with its top left corner at (x, y)."""
        self.image.paste(Image.fromarray(image), (x, y))


def resize(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resize uint8 [H, W, 3] smoothly (Lanczos)."""
    if image.shape[:2] == (height, width):
        return image

    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS))


def contact_sheet(images: np.ndarray, columns: int = 0, gap: int = 2) -> np.ndarray:
    """Tile a batch uint8 [N, H, W, 3] into one image in row-major order; ``columns`` 0 is a near-square sheet."""
    n, h, w, _ = images.shape

    if columns > 0:
        columns = min(n, columns)
    else:
        columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)

    height = rows * (h + gap) - gap
    width = columns * (w + gap) - gap
    sheet = np.full((height, width, 3), Ink.PANEL, np.uint8)

    for i, image in enumerate(images):
        y = i // columns * (h + gap)
        x = i % columns * (w + gap)
        sheet[y : y + h, x : x + w] = image

    return sheet


# ------------------------------------------------------------------------------------------------ plots


def ticks(values: Sequence[float]) -> list[float]:
    """4 to 9 round numbers, evenly spaced, that enclose the values."""
    low = min(values)
    high = max(values)
    if high - low < 1e-9:
        low -= 0.5
        high += 0.5

    # The step is the smallest of 1, 2, 5 and 10 times a power of ten that makes at most five steps.
    least_step = (high - low) / 5
    unit = 10 ** math.floor(math.log10(least_step))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= least_step)

    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)

    return [round(k * step, 12) for k in range(first, last + 1)]


Place = tuple[float, float]  # x, y
Box = tuple[float, float, float, float]  # left, top, right, bottom
Line = tuple[float, float, float, float]  # x, y of an end, x, y of the other

DOT = 7  # radius of a dot in pixels
_NEAR = 12  # pixels from the centre of a dot to its label
# Where a label may be, seen from its dot: beside it, above, below, then at the corners.
_SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))


def annotate(canvas: Canvas, labels: Sequence[tuple[str, Place]], size: int, room: Box, lines: Sequence[Line]) -> None:
    """Write the labels of dots, each near its dot and within ``room``, apart from dots and other labels.

    The nearest place is taken that is apart from the ``lines`` too and not nearer to another dot. If there is none, a
    label lies on a line; without any place it is not written. A label that is away from its dot is joined to it by a
    thin line.
    """
    dots = [dot for _, dot in labels]
    taken = [_box(dot, DOT, DOT) for dot in dots]

    for text, dot in labels:
        text = shorten(text, size, 8 * size)
        boxes = _places(dot, text_width(text, size) / 2, size / 2)
        free = [box for box in boxes if _inside(box, room) and not _hidden(box, dot, taken)]
        clear = [box for box in free if not any(_crosses(line, _wider(box)) for line in lines)]
        own = [box for box in clear if all(_distance(dot, box) <= _distance(other, box) for other in dots)]
        best = own or clear or free
        if not best:
            continue

        box = best[0]
        left, top, right, bottom = box
        if _distance(dot, box) > 2 * _NEAR:
            canvas.draw.line((*dot, *_nearest(dot, box)), fill=Ink.QUIET)
        canvas.outlined(((left + right) / 2, (top + bottom) / 2), text, size)
        taken.append(box)


def _inside(box: Box, room: Box) -> bool:
    """Whether a box is within another one."""
    return box[0] >= room[0] and box[1] >= room[1] and box[2] <= room[2] and box[3] <= room[3]


def _hidden(box: Box, dot: Place, taken: Sequence[Box]) -> bool:
    """Whether a label would touch what is drawn, or the line that joins it to its dot would cross another thing."""
    if any(_overlap(_wider(box), other) for other in taken):
        return True

    join = (*dot, *_nearest(dot, box))
    return any(_crosses(join, other) for other in taken if _distance(dot, other) > 0)


def _places(dot: Place, half_width: float, half_height: float) -> Iterator[Box]:
    """Boxes around a dot, the nearest first."""
    x, y = dot
    for away in (_NEAR, _NEAR + 2 * half_height, _NEAR + 4 * half_height):
        for across, down in _SIDES:
            centre = (x + across * (away + half_width), y + down * (away + half_height))
            yield _box(centre, half_width, half_height)


def _wider(box: Box) -> Box:
    """A box with a margin."""
    return (box[0] - 3, box[1] - 3, box[2] + 3, box[3] + 3)


def _nearest(place: Place, box: Box) -> Place:
    """The point of a box that is nearest to a place."""
    x, y = place
    return min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])


def _distance(place: Place, box: Box) -> float:
    """Pixels between a place and a box."""
    return math.dist(place, _nearest(place, box))


def _box(centre: Place, half_width: float, half_height: float) -> Box:
    """The box around a point."""
    x, y = centre
    return (x - half_width, y - half_height, x + half_width, y + half_height)


def _overlap(a: Box, b: Box) -> bool:
    """Whether two boxes have a point in common."""
    apart_across = a[2] < b[0] or a[0] > b[2]
    apart_down = a[3] < b[1] or a[1] > b[3]
    return not apart_across and not apart_down


def _crosses(line: Line, box: Box) -> bool:
    """Whether a line has a point in a box."""
    # The part of the line, from 0 to 1, that is between the box's sides, then also between its top and bottom.
    first = 0.0
    last = 1.0
    for begin, end, low, high in ((line[0], line[2], box[0], box[2]), (line[1], line[3], box[1], box[3])):
        if begin == end:
            if not low <= begin <= high:
                return False
            continue

        enters, leaves = sorted(((low - begin) / (end - begin), (high - begin) / (end - begin)))
        first = max(first, enters)
        last = min(last, leaves)

    return first <= last
