"""What samplers did, drawn: pictures side by side with their numbers, and token maps. numpy and Pillow only.

Everything takes and returns uint8 RGB arrays. Colours mean the same everywhere and are told apart by colour-blind eyes
(Okabe & Ito 2008); the ramp for steps is even in OKLab, so equal steps look equally far apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..errors import UserError
from .record import ACCEPTED, CACHED, DRAFTED, EXPANDED, GIVEN, PLAIN, REDONE, REJECTED, Baseline, Report, against

Colour = tuple[int, int, int]

# What token_map can draw, in the order a menu shows it; only ever appended.
WHAT = (
    "fixed at step",
    "outcome",
    "accepted",
    "redone",
    "order",
    "cached",
    "rejected",
    "drafted",
    "tokens per step",
    "islands",
    "waves",
    "expanded",
)

# Outcome value to word and colour.
OUTCOMES: dict[int, tuple[str, Colour]] = {
    ACCEPTED: ("accepted", (0, 114, 178)),
    REDONE: ("redone", (230, 159, 0)),
    DRAFTED: ("drafted", (86, 180, 233)),
    REJECTED: ("rejected", (213, 94, 0)),
    EXPANDED: ("expanded", (230, 159, 0)),  # made again like a redone one, and no report holds both
    CACHED: ("cached", (168, 168, 168)),
    PLAIN: ("plain", (74, 74, 82)),
    GIVEN: ("given", (40, 40, 46)),
}
# What a step map leaves blank: tokens that were there from the start.
_BLANK: Colour = OUTCOMES[GIVEN][1]

BACKGROUND: Colour = (22, 22, 25)
PANEL: Colour = (34, 34, 39)
EDGE: Colour = (58, 58, 66)
TEXT: Colour = (238, 238, 240)
QUIET: Colour = (164, 164, 172)
ACCENT: Colour = (86, 180, 233)

_GAP = 20  # between cells and around them
_PAD = 12  # inside a cell
_TARGET = 352  # small pictures are enlarged by the whole factor that comes closest to this width
_NARROWEST, _WIDEST = 320, 2048


# ------------------------------------------------------------------------------------------------ pieces


@lru_cache(maxsize=16)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    try:
        return ImageFont.load_default(size)
    except (TypeError, OSError, ImportError):  # Pillow before 10.1, or built without FreeType: one small size
        return ImageFont.load_default()


def _line(size: int) -> int:
    """Height of a line of text."""
    return round(size * 1.4)


def _width(text: str, size: int) -> float:
    return _font(size).getlength(text)


def _shorten(text: str, size: int, room: float) -> str:
    """The text, or as much of its front as fits with an ellipsis."""
    if _width(text, size) <= room:
        return text
    while text and _width(text + "...", size) > room:
        text = text[:-1]
    return text.rstrip() + "..."


def _wrap(text: str, size: int, room: float, lines: int) -> list[str]:
    """At most ``lines`` lines that fit; the last one is shortened if words are left over."""
    out: list[str] = []
    words = text.split()
    while words and len(out) + 1 < lines:
        n = 1
        while n < len(words) and _width(" ".join(words[: n + 1]), size) <= room:
            n += 1
        out.append(_shorten(" ".join(words[:n]), size, room))
        words = words[n:]
    return [*out, _shorten(" ".join(words), size, room)] if words else out


def _checked(pictures: np.ndarray, name: str) -> np.ndarray:
    if not isinstance(pictures, np.ndarray):
        raise UserError(f"{name}: it holds a {type(pictures).__name__}, not uint8 pictures [N, H, W, 3].")
    if pictures.ndim != 4 or pictures.shape[3] != 3 or pictures.dtype != np.uint8:
        found = f"{pictures.dtype} {list(pictures.shape)}"
        raise UserError(f"{name}: it holds {found}, not uint8 pictures [N, H, W, 3].")
    if 0 in pictures.shape:
        raise UserError(f"{name}: it holds no picture.")
    return pictures


def _resized(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """Whole factors repeat pixels, so that small pictures stay crisp; anything else is filtered."""
    h, w = picture.shape[:2]
    if (h, w) == (height, width):
        return picture
    whole = width % w == 0 and height % h == 0
    how = Image.Resampling.NEAREST if whole else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(picture).resize((width, height), how))


def contact_sheet(pictures: np.ndarray, columns: int = 0, gap: int = 2) -> np.ndarray:
    """A batch as one picture, row by row.

    Args:
        pictures: uint8 [N, H, W, 3].
        columns: pictures a row; 0 for a near-square sheet.
        gap: pixels between neighbours.

    Returns:
        uint8 [H', W', 3].

    Raises:
        UserError: not uint8 pictures, or none.
    """
    n, h, w, _ = _checked(pictures, "pictures").shape
    columns = min(n, columns) if columns > 0 else math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    sheet = np.full((rows * (h + gap) - gap, columns * (w + gap) - gap, 3), PANEL, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = i // columns * (h + gap), i % columns * (w + gap)
        sheet[y : y + h, x : x + w] = picture
    return sheet


# ------------------------------------------------------------------------------------------------ side by side


def _cell_picture(batch: np.ndarray) -> np.ndarray:
    """A batch as it stands in its cell: enlarged by a whole factor, or shrunk when it is very wide."""
    n, h, w, _ = batch.shape
    columns = math.ceil(math.sqrt(n))
    factor = max(1, round(_TARGET / (columns * w)))
    sheet = contact_sheet(batch.repeat(factor, axis=1).repeat(factor, axis=2), columns, gap=2 * (n > 1))
    h, w = sheet.shape[:2]
    return sheet if w <= _WIDEST else _resized(sheet, _WIDEST, max(1, round(h * _WIDEST / w)))


def _numbers(report: Report | None, baseline: Report | None) -> list[tuple[str, str]]:
    """(name, value) lines of a cell, in the fixed order, only what is known."""
    if report is None:
        return []
    counts = report.counts
    ratio = report.speedup(baseline) if baseline is not None else None
    lines = [
        ("speed-up", f"{ratio:.2f}x" if ratio is not None else None),
        ("seconds", f"{report.seconds:.2f}" if report.seconds else None),
        ("transformer passes", f"{counts['transformer_passes']:,}" if "transformer_passes" in counts else None),
        ("head calls", f"{counts['head_calls']:,}" if "head_calls" in counts else None),
        ("acceptance", f"{100 * report.acceptance:.1f} %" if report.acceptance is not None else None),
    ]
    return [(name, value) for name, value in lines if value is not None]


_LABEL, _BODY, _TAG = 18, 15, 13


def _draw_cell(
    picture: np.ndarray,
    label: list[str],
    numbers: list[tuple[str, str]],
    first: bool,
    shape: tuple[int, int],
    head: int,
    tall: int,
) -> Image.Image:
    """One cell of (width, height); ``head`` pixels of label and ``tall`` pixels of picture stand above the numbers."""
    width, height = shape
    cell = Image.new("RGB", shape, PANEL)
    draw = ImageDraw.Draw(cell)
    draw.rectangle((0, 0, width - 1, height - 1), outline=ACCENT if first else EDGE)
    for i, line in enumerate(label):
        draw.text((_PAD, _PAD + i * _line(_LABEL)), line, TEXT, font=_font(_LABEL))
    if first:
        tag = _width("baseline", _TAG)
        draw.text((width - _PAD - tag, _PAD + (_LABEL - _TAG) * 0.8), "baseline", ACCENT, font=_font(_TAG))
    cell.paste(Image.fromarray(picture), ((width - picture.shape[1]) // 2, _PAD + head))
    y = _PAD + head + tall + _PAD
    for i, (name, value) in enumerate(numbers):
        at = y + i * _line(_BODY)
        bold = name == "speed-up"
        draw.text((_PAD, at), name, TEXT if bold else QUIET, font=_font(_BODY))
        draw.text((width - _PAD - _width(value, _BODY), at), value, ACCENT if bold else TEXT, font=_font(_BODY))
        if i:
            draw.line((_PAD, at - 2, width - _PAD, at - 2), fill=EDGE)
    return cell


def compare_grid(
    pictures: Sequence[np.ndarray],
    labels: Sequence[str],
    reports: Sequence[Report | None],
    columns: int = 0,
    baseline: Baseline = 0,
    marked: bool = True,
    title: str = "",
) -> np.ndarray:
    """Pictures side by side: the label above each, its numbers underneath, baselines first and marked.

    Args:
        pictures: one uint8 array [N, H, W, 3] a cell; a batch is shown as a near-square sheet. Sizes and counts may
            differ.
        labels: one a cell; long ones wrap once and are then shortened.
        reports: one a cell, None where nothing is known.
        columns: cells a row; 0 chooses (at most four).
        baseline: the cell that speed-ups are measured against; or for each cell the one that it is, None for no speed-up.
            Cells of one baseline stand together behind it, those of none at the end.
        marked: whether a baseline is marked as such; pointless where nothing is measured.
        title: one line above everything, for example what all pictures have in common.

    Returns:
        uint8 [H, W, 3].

    Raises:
        UserError: nothing to show, lengths that differ, a baseline that is no cell, or arrays that are no pictures.
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
    shown = [_cell_picture(_checked(pictures[i], f"picture {i + 1}")) for i in order]
    numbers = [_numbers(reports[i], measured[i]) for i in order]
    inner = max(_NARROWEST, *(p.shape[1] for p in shown), 0)
    width = inner + 2 * _PAD
    tagged = [marked and n > 1 and i in bases for i in order]
    # The baseline's tag stands beside its label.
    room = [inner - (_width("baseline", _TAG) + _PAD if tag else 0) for tag in tagged]
    titles = [_wrap(labels[i], _LABEL, room[k], 2) for k, i in enumerate(order)]
    columns = min(n, columns) if columns > 0 else math.ceil(n / math.ceil(n / 4))
    rows = []
    for at in range(0, n, columns):
        these = range(at, min(n, at + columns))
        head = max(len(titles[k]) for k in these) * _line(_LABEL) + 6
        tall = max(shown[k].shape[0] for k in these)
        lines = max(len(numbers[k]) for k in these)
        height = _PAD + head + tall + _PAD + (lines * _line(_BODY) + _PAD // 2 if lines else 0)
        rows.append(
            [_draw_cell(shown[k], titles[k], numbers[k], tagged[k], (width, height), head, tall) for k in these]
        )
    return _arrange(rows, columns * (width + _GAP) + _GAP, title)


def cell_order(bases: Sequence[int | None]) -> list[int]:
    """Cells, those of one baseline behind it, in the order in which baselines are first named; those of none last."""
    out = []
    for base in sorted(dict.fromkeys(bases), key=lambda b: b is None):
        out += [*([] if base is None else [base]), *(i for i, b in enumerate(bases) if b == base and i != base)]
    return list(dict.fromkeys(out))


def _arrange(rows: list[list[Image.Image]], width: int, title: str) -> np.ndarray:
    """Rows of cells on the canvas, the title above them."""
    top = _line(_BODY) + _PAD if title else 0
    canvas = Image.new("RGB", (width, top + sum(row[0].height + _GAP for row in rows) + _GAP), BACKGROUND)
    if title:
        line = _shorten(title, _BODY, width - 2 * _GAP)
        ImageDraw.Draw(canvas).text((_GAP, _GAP - 4), line, QUIET, font=_font(_BODY))
    y = _GAP + top
    for row in rows:
        for k, cell in enumerate(row):
            canvas.paste(cell, (_GAP + k * (cell.width + _GAP), y))
        y += row[0].height + _GAP
    return np.asarray(canvas)


# ------------------------------------------------------------------------------------------------ token maps


def ramp(t: np.ndarray) -> np.ndarray:
    """Colours of values 0..1, uint8 [..., 3]: dark blue over teal to yellow, even in OKLab lightness and hue."""
    t = np.clip(np.asarray(t, np.float64), 0, 1)
    return _oklch(0.30 + 0.62 * t, 0.09 + 0.02 * t, 290 - 185 * t)


def hues(number: np.ndarray) -> np.ndarray:
    """Colours of numbers from 1, uint8 [..., 3]: neighbouring numbers differ in hue by the golden angle, and in lightness."""
    number = np.asarray(number)
    return _oklch(0.62 + 0.09 * (number % 3), np.full(number.shape, 0.12), number * 137.508)


def _oklch(lightness: np.ndarray, chroma: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """OKLab lightness, chroma and hue [...] to uint8 sRGB [..., 3] (Ottosson 2020)."""
    lightness, chroma, hue = (x[..., None] for x in (lightness, chroma, np.radians(degrees)))
    lab = np.concatenate([lightness, chroma * np.cos(hue), chroma * np.sin(hue)], axis=-1)
    to_lms = np.array(
        [
            [1, 0.3963377774, 0.2158037573],
            [1, -0.1055613458, -0.0638541728],
            [1, -0.0894841775, -1.2914855480],
        ]
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = np.clip((lab @ to_lms.T) ** 3 @ to_rgb.T, 0, 1)
    rgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.round(rgb * 255).astype(np.uint8)


def _map_of(report: Report, what: str) -> np.ndarray:
    if what == "step":
        what = "fixed at step"
    if what not in WHAT:
        raise UserError(f"what: {what!r} is no token map; there are {', '.join(WHAT)}.")
    of_step = what in ("fixed at step", "order", "tokens per step")
    name = "step" if of_step else what if what in ("cached", "islands", "waves") else "outcome"
    if name not in report.maps:
        have = ", ".join(sorted(report.maps)) or "none at all"
        raise UserError(f"what: the {report.sampler} report has no map for {what!r}; its maps: {have}.")
    found = np.asarray(report.maps[name])
    return _together(found) if what == "tokens per step" else found


def _together(step: np.ndarray) -> np.ndarray:
    """How many tokens of its image were fixed at the same step as each token; int32 like ``step``, -1 where it was given."""
    out = np.full(step.shape, -1, np.int32)
    for there, grid in zip(out, step, strict=True):
        known = grid >= 0
        there[known] = np.bincount(grid[known])[grid[known]]
    return out


def _swatches(grid: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray, list[tuple[str, Colour]]]:
    """Of one outcome map [h, w]: colours [h, w, 3], strengths [h, w] and the legend."""
    colours, strength = np.zeros((*grid.shape, 3), np.uint8), np.ones(grid.shape)
    legend = []
    for value, (word, colour) in OUTCOMES.items():
        here = grid == value
        focus = what in ("outcome", word)
        if focus:
            colours[here] = colour
        else:
            colours[here], strength[here] = BACKGROUND, 0.75  # the rest steps back
        count = int(here.sum())
        if focus and (count or what == word):
            legend.append((f"{word} {count} ({100 * count / grid.size:.0f} %)", colour))
    if what != "outcome":
        legend.append((f"of {grid.size} tokens", BACKGROUND))
    return colours, strength, legend


def _island_swatches(grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[tuple[str, Colour]]]:
    """The same of a map of island numbers: a hue each, and what is in none steps back."""
    on = grid > 0
    colours = np.where(on[..., None], hues(grid), np.array(BACKGROUND, np.uint8)).astype(np.uint8)
    count, cells = int(grid.max(initial=0)), int(on.sum())
    text = f"{count} island{'s' * (count != 1)}, {cells} of {grid.size} tokens ({100 * cells / grid.size:.0f} %)"
    return colours, np.where(on, 1.0, 0.75), [(text, BACKGROUND)]


def _legend_rows(legend: list[tuple[str, Colour]], width: int) -> list[list[tuple[str, Colour]]]:
    rows: list[list[tuple[str, Colour]]] = [[]]
    used = float(_PAD)
    for entry in legend:
        need = _TAG + 6 + _width(entry[0], _TAG) + 14
        if rows[-1] and used + need > width:
            rows.append([])
            used = _PAD
        rows[-1].append(entry)
        used += need
    return rows


def _strip(width: int, height: int, rows: list[list[tuple[str, Colour]]]) -> np.ndarray:
    """The legend under an outcome map."""
    strip = Image.new("RGB", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(strip)
    for k, row in enumerate(rows):
        x, y = float(_PAD), 8 + k * _line(_TAG)
        for text, colour in row:
            if colour != BACKGROUND:
                draw.rectangle((x, y + 1, x + _TAG - 1, y + _TAG), fill=colour, outline=EDGE)
                x += _TAG + 6
            draw.text((x, y), text, TEXT, font=_font(_TAG))
            x += _width(text, _TAG) + 14
    return np.asarray(strip)


def _ramp_strip(width: int, height: int, left: str, right: str) -> np.ndarray:
    """The legend under a map of numbers: the ramp between the lowest and the highest."""
    strip = Image.new("RGB", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(strip)
    a, b = round(_PAD + _width(left, _TAG) + 8), round(width - _PAD - _width(right, _TAG) - 8)
    draw.text((_PAD, 8), left, TEXT, font=_font(_TAG))
    draw.text((b + 8, 8), right, TEXT, font=_font(_TAG))
    out = np.array(strip)
    if b > a:
        out[10 : 8 + _TAG + 1, a:b] = ramp(np.linspace(0, 1, b - a))[None]
    return out


def _grid_lines(picture: np.ndarray, ys: np.ndarray, xs: np.ndarray) -> None:
    """Darken the first row and column of every token, in place; ys, xs: token index of every pixel row and column."""
    picture[1:][np.diff(ys) > 0] = (picture[1:][np.diff(ys) > 0] * 0.6).astype(np.uint8)
    cut = np.flatnonzero(np.diff(xs) > 0) + 1
    picture[:, cut] = (picture[:, cut] * 0.6).astype(np.uint8)


def _write_steps(picture: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The step number in the middle of every token, where there is room."""
    cell = picture.shape[1] / grid.shape[1]
    size = min(15, int(cell * 0.42))
    if size < 8 or not isinstance(_font(size), ImageFont.FreeTypeFont):  # bitmap fonts have neither anchor nor stroke
        return picture
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    for (y, x), step in np.ndenumerate(grid):
        if step < 0:
            continue
        spot = ((x + 0.5) * cell, (y + 0.5) * picture.shape[0] / grid.shape[0])
        draw.text(spot, str(int(step) + 1), TEXT, font=_font(size), anchor="mm", stroke_width=1, stroke_fill=(0, 0, 0))
    return np.asarray(image)


def _write_islands(picture: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Every island's number on that of its tokens which is nearest to its middle."""
    cell = picture.shape[1] / grid.shape[1]
    size = max(9, min(16, int(cell * 0.6)))
    if not isinstance(_font(size), ImageFont.FreeTypeFont):
        return picture
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    for number in range(1, int(grid.max(initial=0)) + 1):
        cells = np.argwhere(grid == number)
        if not len(cells):
            continue
        y, x = cells[((cells - cells.mean(0)) ** 2).sum(1).argmin()]
        spot = ((x + 0.5) * cell, (y + 0.5) * picture.shape[0] / grid.shape[0])
        draw.text(spot, str(number), TEXT, font=_font(size), anchor="mm", stroke_width=1, stroke_fill=(0, 0, 0))
    return np.asarray(image)


def token_map(
    report: Report, what: str, image: np.ndarray | None = None, opacity: float = 0.6, size: int = 384
) -> np.ndarray:
    """What happened to every token, as a coloured grid over the picture, with a legend underneath.

    Args:
        report: of the sampler that made the picture.
        what: one of :data:`WHAT`. "fixed at step" (or "step") colours the AR step at which a token was fixed, "order"
            writes it as a number too (the first step is 1); "cached" colours at how many AR steps its rows came from a
            cache; "tokens per step" colours how many tokens were fixed together with it; "outcome" shows every outcome, its
            single names one; "islands" gives every island of tokens made again a hue and its number, "waves" colours in which
            wave they were.
        image: backdrop, uint8 [B, H, W, 3], or one picture for all; None for the bare map.
        opacity: 0 shows the backdrop only, 1 the map only. A bare map is always opaque.
        size: width in pixels, at least 64; the height follows the token grid.

    Returns:
        uint8 [B, height + legend, size, 3].

    Raises:
        UserError: the report has no such map, the backdrop has another number of pictures, a number out of range.
    """
    grids = _map_of(report, what)
    if not 0 <= opacity <= 1:
        raise UserError(f"opacity: {opacity:g} is outside 0 to 1.")
    if size < 64:
        raise UserError(f"size: {size} is too small for a map; 64 is the least.")
    batch, h, w = grids.shape
    if image is not None and len(_checked(image, "image")) not in (1, batch):
        raise UserError(f"image: it holds {len(image)} pictures, the report is of {batch}; connect those of that run.")
    height = max(1, round(size * h / w))
    ys, xs = np.arange(height) * h // height, np.arange(size) * w // size
    stepwise = what in ("step", "fixed at step", "order")
    numbers = stepwise or what in ("cached", "tokens per step", "waves")
    high = int(grids.max())
    low = int(grids[grids >= 0].min()) if high >= 0 else 0
    ends = (f"step {low + 1}", f"{high + 1}") if stepwise else (f"cached {low} times", f"{high}")
    if what == "tokens per step":
        ends = (f"{low} at a time", f"{high}")
    elif what == "waves":
        ends = (f"wave {low + 1}", f"{high + 1}") if high >= 0 else ("no waves", "")

    def swatches(grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[tuple[str, Colour]]]:
        return _island_swatches(grid) if what == "islands" else _swatches(grid, what)

    legends = [] if numbers else [_legend_rows(swatches(g)[2], size) for g in grids]
    strip = 14 + _line(_TAG) * max([1, *(len(rows) for rows in legends)])
    out = np.empty((batch, height + strip, size, 3), np.uint8)
    for i, grid in enumerate(grids):
        if numbers:
            colours, strength = ramp(np.clip((grid - low) / max(1, high - low), 0, 1)), np.ones(grid.shape)
            colours[grid < 0] = _BLANK
        else:
            colours, strength, _ = swatches(grid)
        paint = colours[ys][:, xs].astype(np.float32)
        if image is not None:
            under = _resized(image[i % len(image)], size, height).astype(np.float32)
            weight = (opacity * strength)[ys][:, xs, None]
            # The backdrop loses its own colours where the map speaks, or a red roof would turn blue into purple.
            grey = under @ np.array([[0.299], [0.587], [0.114]], np.float32)
            under += (grey - under) * np.minimum(1, 2 * weight)
            paint = under * (1 - weight) + paint * weight
        picture = np.round(paint).astype(np.uint8)
        _grid_lines(picture, ys, xs)
        write = {"order": _write_steps, "islands": _write_islands}.get(what)
        out[i, :height] = write(picture, grid) if write else picture
        out[i, height:] = _ramp_strip(size, strip, *ends) if numbers else _strip(size, strip, legends[i])
    return out
