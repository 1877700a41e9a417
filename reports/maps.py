"""Token maps: per-token outcomes, steps and counts of a report drawn over the image, with a legend.

Outcome colours come from a palette for colour-blind readers (Okabe & Ito 2008). The ramp for steps and counts is
uniform in OKLab (Ottosson 2020), so equal differences look equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ..errors import UserError, amount
from .drawing import PAD, Canvas, Colour, Ink, Size, line_height, resize, text_width
from .record import ACCEPTED, EXPANDED, GIVEN, PLAIN, REDONE, REJECTED, Report

# Outcome value to name and colour.
OUTCOMES: dict[int, tuple[str, Colour]] = {
    ACCEPTED: ("accepted", (0, 114, 178)),
    REDONE: ("redone", (230, 159, 0)),
    REJECTED: ("rejected", (213, 94, 0)),
    EXPANDED: ("expanded", (230, 159, 0)),  # same colour as redone: both are resampled, and no report has both
    PLAIN: ("plain", (74, 74, 82)),
    GIVEN: ("given", (40, 40, 46)),
}
_LARGEST = 4096  # pixels of a map's height
_MOST_BYTES = 1 << 28  # of all maps of a report
_BLANK: Colour = OUTCOMES[GIVEN][1]  # tokens without a value in a numeric map

_Legend = list[tuple[str, Colour]]
_Coloured = tuple[np.ndarray, np.ndarray, _Legend]  # colours [h, w, 3], weights [h, w] and legend of a map

# OKLab to LMS' and LMS to linear sRGB.
_OKLAB_TO_LMS = np.array(
    [
        [1, 0.3963377774, 0.2158037573],
        [1, -0.1055613458, -0.0638541728],
        [1, -0.0894841775, -1.2914855480],
    ]
)
_LMS_TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


def token_map(
    report: Report, what: str, image: np.ndarray | None = None, opacity: float = 0.6, size: int = 384
) -> np.ndarray:
    """Draw one map of a report as a coloured token grid over the images, with a legend below.

    Args:
        report: report of the sampler run.
        what: one of :data:`WHAT`. "fixed at step" colours the AR step at which a token was fixed; "order" also writes
            its number, from 1. "cached" colours the number of AR steps at which the token's rows came from a cache,
            "tokens per step" the number of tokens fixed at the same step. "outcome" shows all outcomes, the name of an
            outcome only that one. "islands" gives each island of resampled tokens a hue and a number, "waves" colours
            the wave in which a token was resampled.
        image: backdrop, uint8 [B, H, W, 3], or one image for all; None for the bare map.
        opacity: weight of the map, from 0 (backdrop only) to 1 (map only). A bare map is always opaque.
        size: width in pixels; the height follows from the token grid, and is at most 4096.

    Returns:
        uint8 [B, height + legend, size, 3].

    Raises:
        UserError: the report has no such map, the backdrop has another batch size, or the maps exceed 256 MB.
    """
    kind = _kind_of(report, what)
    grids = kind.values(np.asarray(report.maps[kind.source]))
    batch, h, w = grids.shape
    if image is not None and len(image) not in (1, batch):
        raise UserError(
            f"image: it holds {len(image)} images, but the report is for {batch}; connect the image and the report of "
            "the same run."
        )

    height = min(_LARGEST, max(1, round(size * h / w)))
    if batch * height * size * 3 > _MOST_BYTES:
        raise UserError(f"size: {batch} maps of {size}x{height} pixels exceed 256 MB; choose a smaller size.")

    # The colours of all images first: the legend with the most rows decides the height of the strip below the maps.
    low, high = _range(grids)
    coloured = [kind.colour(grid, low, high) for grid in grids]
    legends = [_legend_rows(legend, size) for _, _, legend in coloured]
    legend_rows = max(1, *(len(rows) for rows in legends))
    strip = 14 + line_height(Size.TAG) * legend_rows

    # Token row of every pixel row, token column of every pixel column.
    ys = np.arange(height) * h // height
    xs = np.arange(size) * w // size

    out = np.empty((batch, height + strip, size, 3), np.uint8)
    for i, grid in enumerate(grids):
        colours, weight, _ = coloured[i]
        backdrop = None if image is None else image[i % len(image)]
        drawn = _blend(colours[ys][:, xs], (opacity * weight)[ys][:, xs, None], backdrop)
        _grid_lines(drawn, ys, xs)

        out[i, :height] = kind.write(drawn, grid)

        if kind.ends is None:
            out[i, height:] = _legend_strip(size, strip, legends[i])
        else:
            out[i, height:] = _ramp_strip(size, strip, *kind.ends(low, high))

    return out


def ramp(t: np.ndarray) -> np.ndarray:
    """Colours of values in 0..1, uint8 [..., 3]: dark blue over teal to yellow, linear in OKLab lightness and hue."""
    t = np.clip(np.asarray(t, np.float64), 0, 1)
    return _oklch(0.30 + 0.62 * t, 0.09 + 0.02 * t, 290 - 185 * t)


def hues(number: np.ndarray) -> np.ndarray:
    """Colours of numbers from 1, uint8 [..., 3].

    Consecutive numbers differ in hue by the golden angle, and in lightness.
    """
    number = np.asarray(number)
    lightness = 0.62 + 0.09 * (number % 3)
    return _oklch(lightness, np.full(number.shape, 0.12), number * 137.508)


def _oklch(lightness: np.ndarray, chroma: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """OKLab lightness, chroma and hue [...] to uint8 sRGB [..., 3] (Ottosson 2020)."""
    hue = np.radians(degrees)
    lab = np.stack([lightness, chroma * np.cos(hue), chroma * np.sin(hue)], axis=-1)

    linear = np.clip((lab @ _OKLAB_TO_LMS.T) ** 3 @ _LMS_TO_RGB.T, 0, 1)
    rgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)

    return np.round(rgb * 255).astype(np.uint8)


# ------------------------------------------------------------------------------------------------ values and colours


def _tokens_per_step(step: np.ndarray) -> np.ndarray:
    """Number of tokens of the same image fixed at the same step, int32 [B, h, w]; -1 for given tokens."""
    out = np.full(step.shape, -1, np.int32)

    for count, grid in zip(out, step, strict=True):
        fixed = grid >= 0
        count[fixed] = np.bincount(grid[fixed])[grid[fixed]]

    return out


def _range(grids: np.ndarray) -> tuple[int, int]:
    """Smallest and largest non-negative value; (0, -1) if all are negative."""
    high = int(grids.max())
    if high < 0:
        return 0, high

    return int(grids[grids >= 0].min()), high


def _colour_ramp(grid: np.ndarray, low: int, high: int) -> _Coloured:
    """Colours [h, w, 3] and weights [h, w] of a map of numbers [h, w]; ``low`` and ``high`` end the ramp."""
    colours = ramp(np.clip((grid - low) / max(1, high - low), 0, 1))
    colours[grid < 0] = _BLANK
    return colours, np.ones(grid.shape), []


def _colour_outcomes(what: str, grid: np.ndarray, low: int, high: int) -> _Coloured:
    """Colours [h, w, 3], weights [h, w] and legend of an outcome map [h, w].

    Other outcomes than ``what`` are dimmed. A value without a name (3 or 4 of earlier versions) is drawn as plain.
    """
    grid = np.where(np.isin(grid, list(OUTCOMES)), grid, PLAIN)
    colours = np.zeros((*grid.shape, 3), np.uint8)
    weight = np.ones(grid.shape)
    legend = []

    for value, (name, colour) in OUTCOMES.items():
        mask = grid == value
        if what not in ("outcome", name):
            colours[mask] = Ink.BACKGROUND
            weight[mask] = 0.75
            continue

        colours[mask] = colour
        count = int(mask.sum())
        if count or what == name:
            legend.append((f"{name} {count} ({100 * count / grid.size:.0f} %)", colour))

    if what != "outcome":
        legend.append((f"of {grid.size} tokens", Ink.BACKGROUND))

    return colours, weight, legend


def _colour_islands(grid: np.ndarray, low: int, high: int) -> _Coloured:
    """Colours, weights and legend of a map of island numbers [h, w]; tokens outside islands (0) are dimmed."""
    inside = grid > 0
    colours = np.where(inside[..., None], hues(grid), np.array(Ink.BACKGROUND, np.uint8)).astype(np.uint8)
    weight = np.where(inside, 1.0, 0.75)

    count = int(grid.max(initial=0))
    tokens = int(inside.sum())
    text = f"{amount(count, 'islands')}, {tokens} of {grid.size} tokens ({100 * tokens / grid.size:.0f} %)"

    return colours, weight, [(text, Ink.BACKGROUND)]


# ------------------------------------------------------------------------------------------------ drawing


def _blend(colours: np.ndarray, weight: np.ndarray, backdrop: np.ndarray | None) -> np.ndarray:
    """Blend map colours uint8 [H, W, 3] over a backdrop with weights [H, W, 1].

    Without a backdrop the map is opaque.
    """
    paint = colours.astype(np.float32)

    if backdrop is not None:
        height, width = colours.shape[:2]
        under = resize(backdrop, width, height).astype(np.float32)

        # Desaturate the backdrop below the map, so that its hues do not mix with the map's.
        grey = under @ np.array([[0.299], [0.587], [0.114]], np.float32)
        under += (grey - under) * np.minimum(1, 2 * weight)

        paint = under * (1 - weight) + paint * weight

    return np.round(paint).astype(np.uint8)


def _grid_lines(image: np.ndarray, ys: np.ndarray, xs: np.ndarray) -> None:
    """Darken the first row and column of every token, in place; ys, xs: token index of every pixel row and column."""
    rows = np.flatnonzero(np.diff(ys) > 0) + 1
    image[rows] = (image[rows] * 0.6).astype(np.uint8)

    columns = np.flatnonzero(np.diff(xs) > 0) + 1
    image[:, columns] = (image[:, columns] * 0.6).astype(np.uint8)


def _legend_rows(legend: _Legend, width: int) -> list[_Legend]:
    """Break legend entries into rows of at most ``width`` pixels."""
    rows: list[_Legend] = [[]]
    used = float(PAD)

    for entry in legend:
        need = Size.TAG + 6 + text_width(entry[0], Size.TAG) + 14
        if rows[-1] and used + need > width:
            rows.append([])
            used = PAD

        rows[-1].append(entry)
        used += need

    return rows


def _legend_strip(width: int, height: int, rows: list[_Legend]) -> np.ndarray:
    """Legend of an outcome or island map, uint8 [height, width, 3]."""
    canvas = Canvas(width, height)

    for k, row in enumerate(rows):
        x = float(PAD)
        y = 8 + k * line_height(Size.TAG)

        for text, colour in row:
            if colour != Ink.BACKGROUND:
                canvas.draw.rectangle((x, y + 1, x + Size.TAG - 1, y + Size.TAG), fill=colour, outline=Ink.EDGE)
                x += Size.TAG + 6

            canvas.write(x, y, text)
            x += text_width(text, Size.TAG) + 14

    return canvas.pixels


def _ramp_strip(width: int, height: int, left: str, right: str) -> np.ndarray:
    """Legend of a numeric map: the ramp between its end texts, uint8 [height, width, 3]."""
    canvas = Canvas(width, height)
    start = round(PAD + text_width(left, Size.TAG) + 8)
    end = round(width - PAD - text_width(right, Size.TAG) - 8)

    canvas.write(PAD, 8, left)
    canvas.write(end + 8, 8, right)

    if end > start:
        colours = ramp(np.linspace(0, 1, end - start))
        canvas.paste(np.repeat(colours[None], Size.TAG - 1, axis=0), start, 10)

    return canvas.pixels


def _write_steps(image: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Write the step number, from 1, at the centre of every token that is large enough."""
    size = min(15, int(image.shape[1] / grid.shape[1] * 0.42))
    if size < 8:
        return image

    numbers = [(y, x, int(step) + 1) for (y, x), step in np.ndenumerate(grid) if step >= 0]
    return _write(image, grid, numbers, size)


def _write_islands(image: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Write each island's number on its token nearest to the centroid."""
    numbers = []

    for number in range(1, int(grid.max(initial=0)) + 1):
        cells = np.argwhere(grid == number)
        if len(cells):
            distances = ((cells - cells.mean(0)) ** 2).sum(1)
            y, x = cells[distances.argmin()]
            numbers.append((y, x, number))

    size = max(9, min(16, int(image.shape[1] / grid.shape[1] * 0.6)))
    return _write(image, grid, numbers, size)


def _write(image: np.ndarray, grid: np.ndarray, numbers: list[tuple[int, int, int]], size: int) -> np.ndarray:
    """Write numbers (token row, token column, number) at token centres."""
    canvas = Canvas(image.shape[1], image.shape[0])
    canvas.paste(image, 0, 0)

    token_height = image.shape[0] / grid.shape[0]
    token_width = image.shape[1] / grid.shape[1]
    for y, x, number in numbers:
        centre = ((x + 0.5) * token_width, (y + 0.5) * token_height)
        canvas.outlined(centre, str(number), size)

    return canvas.pixels


# ------------------------------------------------------------------------------------------------ kinds of maps


class _Kind(NamedTuple):
    """How a map is made from a report's, and drawn."""

    source: str  # the report's map
    colour: Callable[[np.ndarray, int, int], _Coloured] = _colour_ramp  # of one image's grid, lowest and highest value
    # Texts at the ends of the ramp, for the lowest and the highest value; None if the map has a legend.
    ends: Callable[[int, int], tuple[str, str]] | None = None
    values: Callable[[np.ndarray], np.ndarray] = lambda found: found  # [B, h, w] to [B, h, w]
    # Image and grid to the image with numbers on its tokens.
    write: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda image, grid: image


def _of_steps(low: int, high: int) -> tuple[str, str]:
    """Steps are counted from 0 and shown from 1."""
    return f"step {low + 1}", f"{high + 1}"


def _of_waves(low: int, high: int) -> tuple[str, str]:
    """So are waves."""
    return (f"wave {low + 1}", f"{high + 1}") if high >= 0 else ("no waves", "")


def _outcome(what: str) -> _Kind:
    """The map of all outcomes, or of one by its name."""
    return _Kind("outcome", partial(_colour_outcomes, what))


_KINDS = {
    "fixed at step": _Kind("step", ends=_of_steps),
    "outcome": _outcome("outcome"),
    "accepted": _outcome("accepted"),
    "redone": _outcome("redone"),
    "order": _Kind("step", ends=_of_steps, write=_write_steps),
    "cached": _Kind("cached", ends=lambda low, high: (f"cached {low} times", f"{high}")),
    "rejected": _outcome("rejected"),
    "tokens per step": _Kind("step", ends=lambda low, high: (f"{low} at a time", f"{high}"), values=_tokens_per_step),
    "islands": _Kind("islands", _colour_islands, write=_write_islands),
    "waves": _Kind("waves", ends=_of_waves),
    "expanded": _outcome("expanded"),
}
# Maps that token_map draws, in menu order. Append only: saved graphs refer to these names. Token Map converts a name
# that was removed, see nodes/compare.py.
WHAT = tuple(_KINDS)


def _kind_of(report: Report, what: str) -> _Kind:
    """The kind of a map; a UserError for an unknown name, or if the report has no such map."""
    if what not in _KINDS:
        raise UserError(f"what: {what!r} is not a token map; choose one of {', '.join(WHAT)}.")

    kind = _KINDS[what]
    if kind.source not in report.maps:
        have = [name for name, other in _KINDS.items() if other.source in report.maps]
        remedy = f"choose one of {', '.join(have)}" if have else "connect the report of a different sampler"
        raise UserError(f"what: the report of {report.sampler} has no map for {what!r}; {remedy}.")

    return kind
