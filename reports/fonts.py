"""The font of grids, plots and maps: Pillow's own, and for what it lacks the fonts of this machine.

Pillow's font has the characters of English. Every other character is taken from the first font here that has it. One
that no font has is drawn as a box with its code point, so that two texts never look the same.
"""

from __future__ import annotations

import logging
import math
import struct
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Folders of fonts on Linux, macOS and Windows; the second ones are in the user's own folder.
_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "/System/Library/Fonts", "/Library/Fonts", "C:/Windows/Fonts")
_OWN_FOLDERS = (".fonts", ".local/share/fonts", "Library/Fonts", "AppData/Local/Microsoft/Windows/Fonts")
_ENDINGS = (".ttf", ".otf", ".ttc")
# Upright sans-serif fonts come first: these, then those without one of these styles in their names.
_USUAL = ("dejavusans", "notosans", "liberationsans", "arial", "segoeui")
_STYLES = ("bold", "italic", "oblique", "mono", "serif", "light", "thin", "black", "medium", "condensed", "math")
# Shows which script is missing, as our boxes do.
_LAST_RESORT = "lastresort"

# Bytes of a font's table of characters.
_MOST_BYTES = 1 << 24
_FORMAT_4 = 4
_FORMAT_12 = 12


# ------------------------------------------------------------------------------------------------ fonts of this machine


@lru_cache(maxsize=1)
def _files() -> tuple[Path, ...]:
    """Files of fonts, the best first."""
    folders = [Path(folder) for folder in _FOLDERS]
    with suppress(RuntimeError):  # a user without a home
        folders += [Path.home() / folder for folder in _OWN_FOLDERS]

    found: list[Path] = []
    for folder in folders:
        with suppress(OSError):
            found += [file for file in folder.rglob("*") if file.suffix.lower() in _ENDINGS]

    def order(file: Path) -> tuple[bool, int, str]:
        name = file.stem.lower()
        return not name.startswith(_USUAL), sum(style in name for style in _STYLES), name

    found = [file for file in found if _LAST_RESORT not in file.stem.lower()]
    return (*sorted(found, key=order), *_of_matplotlib())


def _of_matplotlib() -> list[Path]:
    """DejaVu Sans, for Latin, Greek and Cyrillic, where matplotlib is installed."""
    with suppress(ValueError):  # matplotlib was replaced by something without a specification
        spec = find_spec("matplotlib")
        if spec is not None and spec.origin:
            return [Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"]
    return []


@cache
def _ranges(file: Path) -> np.ndarray:
    """First and last code points of the characters that a font has, int64 [N, 2], in order; none if it is damaged."""
    try:
        with file.open("rb") as opened:
            return _read_ranges(opened)
    except (OSError, ValueError, struct.error):
        return np.zeros((0, 2), np.int64)


def _read_ranges(opened: BinaryIO) -> np.ndarray:
    """As :func:`_ranges`, of an open OpenType file, or of the first font of a collection."""
    head = opened.read(16)
    start = struct.unpack(">I", head[12:])[0] if head[:4] == b"ttcf" else 0

    opened.seek(start + 4)
    (tables,) = struct.unpack(">H", opened.read(2))
    opened.seek(start + 12)
    for _ in range(tables):
        tag, _, offset, length = struct.unpack(">4s3I", opened.read(16))
        if tag == b"cmap":
            opened.seek(offset)
            return _parse(opened.read(min(length, _MOST_BYTES)))

    raise ValueError("no table of characters")


def _parse(cmap: bytes) -> np.ndarray:
    """As :func:`_ranges`, of a table of characters: its Unicode subtable of format 12, else that of format 4."""
    by_format: dict[int, int] = {}
    (count,) = struct.unpack_from(">H", cmap, 2)
    for i in range(count):
        platform, encoding, offset = struct.unpack_from(">HHI", cmap, 4 + 8 * i)
        if platform == 0 or (platform == 3 and encoding in (1, 10)):
            (kind,) = struct.unpack_from(">H", cmap, offset)
            by_format[kind] = offset

    if _FORMAT_12 in by_format:
        offset = by_format[_FORMAT_12]
        (groups,) = struct.unpack_from(">I", cmap, offset + 12)
        return np.frombuffer(cmap, ">u4", 3 * groups, offset + 16).reshape(-1, 3)[:, :2].astype(np.int64)

    if _FORMAT_4 in by_format:
        offset = by_format[_FORMAT_4]
        segments = struct.unpack_from(">H", cmap, offset + 6)[0] // 2
        last = np.frombuffer(cmap, ">u2", segments, offset + 14)
        first = np.frombuffer(cmap, ">u2", segments, offset + 16 + 2 * segments)
        return np.stack([first, last], 1).astype(np.int64)

    return np.zeros((0, 2), np.int64)


def _has(ranges: np.ndarray, character: str) -> bool:
    """Whether a character is in sorted ranges."""
    code = ord(character)
    i = int(np.searchsorted(ranges[:, 0], code, "right")) - 1
    return i >= 0 and code <= int(ranges[i, 1])


@lru_cache(maxsize=1)
def _built_in() -> tuple[bytes, np.ndarray]:
    """Pillow's own font, and its characters."""
    font = ImageFont.load_default(16)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font.font_bytes, _read_ranges(BytesIO(font.font_bytes))


# Where a character comes from: a file of this machine, or one of these.
_OWN = "Pillow's font"
_NONE = "no font"


@lru_cache(maxsize=1 << 14)
def _source(character: str) -> Path | str:
    """The font of a character."""
    if _has(_built_in()[1], character):
        return _OWN

    for file in _files():
        if _has(_ranges(file), character) and _draws(file, character):
            return file

    _say_missing(_script(character))
    return _NONE


def _draws(file: Path, character: str) -> bool:
    """Whether a font really draws a character: it may be damaged, or hold pictures of another size only."""
    try:
        seen = _opened(file, 16).getmask(character).getbbox()
    except (OSError, ValueError):
        return False
    return seen is not None or unicodedata.category(character)[0] in "CMZ"


# What people call the scripts whose characters have other names in Unicode.
_SCRIPTS = {"Cjk": "Chinese", "Hiragana": "Japanese", "Katakana": "Japanese", "Hangul": "Korean"}


def _script(character: str) -> str:
    """The script of a character in words."""
    if unicodedata.category(character)[0] not in "LMN":
        return "some symbols"

    name = unicodedata.name(character, "unknown characters").split()[0].capitalize()
    return _SCRIPTS.get(name, name)


@cache
def _say_missing(script: str) -> None:
    """Write to the log, once, which script cannot be drawn."""
    logging.getLogger(__name__).warning(
        "FastAR: no font on this machine has %s; images show these characters as boxes with their codes. Install a "
        "font that has them, such as one of the Noto fonts.",
        script,
    )


@lru_cache(maxsize=64)
def _opened(file: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(file), size)


# ------------------------------------------------------------------------------------------------ the font


class Font(ImageFont.FreeTypeFont):
    """Pillow's own font at a size in pixels, with the characters of other fonts.

    Text is drawn from left to right in pieces of one font each; within a piece Arabic and others run in their own
    direction, if Pillow was built with Raqm.
    """

    def __init__(self, size: int) -> None:
        data, _ = _built_in()
        super().__init__(BytesIO(data), size, layout_engine=ImageFont.Layout.BASIC)

    def getlength(self, text: Any, *args: Any, **kwargs: Any) -> float:
        pieces = self._pieces(text)
        if not pieces:
            return super().getlength(text, *args, **kwargs)
        return sum(self._width(source, part) for source, part in pieces)

    def getbbox(
        self,
        text: Any,
        mode: str = "",
        direction: str | None = None,
        features: list[str] | None = None,
        language: str | None = None,
        stroke_width: float = 0,
        anchor: str | None = None,
    ) -> tuple[float, float, float, float]:
        pieces = self._pieces(text)
        if not pieces:
            return super().getbbox(text, mode, direction, features, language, stroke_width, anchor)

        x, y = self._begin(pieces, anchor)
        width = sum(self._width(source, part) for source, part in pieces)
        tops, bottoms = zip(*[self._height(source, part) for source, part in pieces], strict=True)
        left, top = math.floor(x - stroke_width) - 1, math.floor(y + min(tops) - stroke_width)
        return left, top, math.ceil(x + width + stroke_width) + 1, math.ceil(y + max(bottoms) + stroke_width) + 1

    def getmask2(  # type: ignore[override]
        self,
        text: Any,
        mode: str = "",
        direction: str | None = None,
        features: list[str] | None = None,
        language: str | None = None,
        stroke_width: float = 0,
        anchor: str | None = None,
        ink: int = 0,
        start: tuple[float, float] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, tuple[int, int]]:
        pieces = self._pieces(text)
        if not pieces:
            about = (mode, direction, features, language, stroke_width, anchor, ink, start)
            return super().getmask2(text, *about, *args, **kwargs)

        left, top, right, bottom = map(int, self.getbbox(text, stroke_width=stroke_width, anchor=anchor))
        mask = Image.new("L", (right - left, bottom - top))
        draw = ImageDraw.Draw(mask)

        x, y = self._begin(pieces, anchor)
        x, y = x - left + (start or (0, 0))[0], y - top + (start or (0, 0))[1]
        for source, part in pieces:
            if source == _NONE:
                self._draw_boxes(draw, x, y, part)
            else:
                draw.text((x, y), part, 255, self._font(source), "ls", stroke_width=stroke_width)
            x += self._width(source, part)

        return mask.im, (left, top)

    def _pieces(self, text: Any) -> list[tuple[Path | str, str]]:
        """A text as pieces of one font each; [] if Pillow's font has all of it."""
        if not isinstance(text, str) or text.isascii():
            return []

        pieces: list[tuple[Path | str, str]] = []
        # An accent that is a character of its own would lie beside its letter.
        for character in unicodedata.normalize("NFC", text):
            source = _source(character)
            before, part = pieces[-1] if pieces else ("", "")

            # The words of a right-to-left script stay together.
            continues = character.isspace() or unicodedata.combining(character)
            if continues and isinstance(before, Path) and _has(_ranges(before), character):
                source = before

            if source == before:
                pieces[-1] = (source, part + character)
            else:
                pieces.append((source, character))

        return [] if all(source == _OWN for source, _ in pieces) else pieces

    def _font(self, source: Path | str) -> ImageFont.FreeTypeFont:
        return _opened(source, int(self.size)) if isinstance(source, Path) else self

    def _begin(self, pieces: Sequence[tuple[Path | str, str]], anchor: str | None) -> tuple[float, float]:
        """Where the baseline of a text begins, from the point of an anchor, which Pillow describes."""
        anchor = anchor or "la"
        width = sum(self._width(source, part) for source, part in pieces)
        ascent, descent = self.getmetrics()

        x = {"l": 0.0, "m": -width / 2, "r": -width}[anchor[0]]
        y = {"a": ascent, "m": (ascent - descent) / 2, "s": 0, "d": -descent}[anchor[1]]
        return x, y

    def _width(self, source: Path | str, part: str) -> float:
        if source == _NONE:
            return sum(self._box(character)[0] + 1 for character in part)
        return self._font(source).getlength(part)

    def _height(self, source: Path | str, part: str) -> tuple[float, float]:
        """Top and bottom of a piece, from the baseline down."""
        if source == _NONE:
            return -self._ascent, self._descent

        _, top, _, bottom = self._font(source).getbbox(part, anchor="ls")
        return top, bottom

    # --- characters that no font has

    @property
    def _ascent(self) -> int:
        """Of a box, in pixels."""
        return 2 * self._digits - self._descent

    @property
    def _descent(self) -> int:
        return round(0.2 * self.size)

    @property
    def _digits(self) -> int:
        """Size of the digits in a box, two lines of them; the smallest that can be read."""
        return max(8, round(0.55 * self.size))

    def _box(self, character: str) -> tuple[int, list[str]]:
        """Width of the box of a character, and the two lines of its code point."""
        code = f"{ord(character):04X}"
        half = (len(code) + 1) // 2
        lines = [code[:-half], code[-half:]]

        font = _opened_built_in(self._digits)
        return math.ceil(max(font.getlength(line) for line in lines)) + 4, lines

    def _draw_boxes(self, draw: ImageDraw.ImageDraw, x: float, y: float, part: str) -> None:
        """Draw characters as boxes with their code points, from the point (x, y) of the baseline."""
        left = round(x)
        top = round(y) - self._ascent
        font = _opened_built_in(self._digits)

        for character in part:
            width, lines = self._box(character)
            draw.rectangle((left, top, left + width - 1, top + 2 * self._digits), outline=140)
            for row, line in enumerate(lines):
                middle = top + self._digits * (row + 0.5) + 0.5
                draw.text((left + width / 2, middle), line, 255, font, "mm")
            left += width + 1


@lru_cache(maxsize=16)
def _opened_built_in(size: int) -> Font:
    return Font(size)
