"""The font of grids, plots and maps: Pillow's own, or a font of this machine for a text whose characters it lacks.

Pillow's font has the characters of English. Any other text is written in the first font here that has all of its
characters, or else most of them. A character that the font lacks becomes its code point, so that two texts never look
the same.
"""

from __future__ import annotations

import logging
import unicodedata
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import ImageFont

# Folders of fonts on Linux, macOS and Windows; the second ones are in the user's own folder.
_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "/System/Library/Fonts", "/Library/Fonts", "C:/Windows/Fonts")
_OWN_FOLDERS = (".fonts", ".local/share/fonts", "Library/Fonts", "AppData/Local/Microsoft/Windows/Fonts")
_ENDINGS = (".ttf", ".otf", ".ttc")
# Upright sans-serif fonts come first: these, then those without one of these styles in their names.
_USUAL = ("dejavusans", "notosans", "liberationsans", "arial", "segoeui")
_STYLES = ("bold", "italic", "oblique", "mono", "serif", "light", "thin", "black", "medium", "condensed", "math")
# Shows which script is missing, as our code points do.
_LAST_RESORT = "lastresort"
_NO_CHARACTER = "\U0010ffff"  # no font has it


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


@lru_cache(maxsize=64)
def _opened(file: Path | None, size: int) -> ImageFont.FreeTypeFont:
    """A font of this machine, or Pillow's own."""
    if file is not None:
        return ImageFont.truetype(str(file), size)
    own = ImageFont.load_default(size)
    assert isinstance(own, ImageFont.FreeTypeFont)
    return own


@lru_cache(maxsize=1 << 16)
def _has(file: Path | None, character: str) -> bool:
    """Whether a font draws a character; a damaged font, or one of pictures, draws none."""
    try:
        font = _opened(file, 16)
        drawn: Any = font.getmask(character)
        absent: Any = font.getmask(_NO_CHARACTER)
        if drawn.getbbox() is None:
            return unicodedata.category(character)[0] in "CMZ"
        return list(drawn) != list(absent)
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=1 << 10)
def _best(characters: frozenset[str]) -> Path | None:
    """The first font that has all of these characters, or most of them; None is Pillow's own."""
    best: Path | None = None
    most = sum(_has(None, character) for character in characters)
    for file in _files():
        if most == len(characters):
            break
        count = sum(_has(file, character) for character in characters)
        if count > most:
            best, most = file, count

    for script in {_script(character) for character in characters if not _has(best, character)}:
        _say_missing(script)
    return best


def fitting(text: str, size: int) -> tuple[ImageFont.FreeTypeFont, str]:
    """The font for a text at a size in pixels, and the text with the code points of what the font lacks."""
    if text.isascii():
        return _opened(None, size), text

    # An accent that is a character of its own would lie beside its letter.
    text = unicodedata.normalize("NFC", text)
    file = _best(frozenset(text))
    return _opened(file, size), "".join(c if _has(file, c) else f"[{ord(c):04X}]" for c in text)


# What people call the scripts whose characters have other names in Unicode.
_SCRIPTS = {"Cjk": "Chinese", "Hiragana": "Japanese", "Katakana": "Japanese", "Hangul": "Korean"}


def _script(character: str) -> str:
    """The script of a character in words."""
    if unicodedata.category(character)[0] not in "LMN":
        return "some symbols"

    name = unicodedata.name(character, "unknown characters").split()[0].capitalize()
    return _SCRIPTS.get(name, name)


@lru_cache(maxsize=64)
def _say_missing(script: str) -> None:
    """Write to the log, once, which script cannot be drawn."""
    logging.getLogger(__name__).warning(
        "FastAR: no font on this machine has %s; images show these characters as their codes. Install a font that has "
        "them, such as one of the Noto fonts.",
        script,
    )
