"""Class label sets, and parsing of label text into a :class:`Condition`."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path

from ..errors import UserError
from .conditioning import Condition

# Classes of the demo data set in id order; a test compares them with tools/training/picture_book.py.
PICTURE_BOOK = ("sunset", "mountains", "flower", "fish", "house", "tree", "planet", "boat", "balloon", "cat")
# Unknown labels that a message lists: the closest names of one take some milliseconds to find.
_MOST_SHOWN = 3
# Characters of a label text, and of a word whose closest names are looked for.
MOST_TEXT, _LONGEST_NAME = 1 << 15, 200


@lru_cache(maxsize=1)
def label_sets() -> dict[str, tuple[str, ...]]:
    """Label set name to class names in id order. Names are unique within a set, ignoring case."""
    imagenet = (Path(__file__).parent / "imagenet_1k.txt").read_text(encoding="utf-8").splitlines()
    return {"picture-book": PICTURE_BOOK, "imagenet-1k": tuple(imagenet)}


def resolve_labels(text: str, label_set: str, repeat: int = 1, field: str = "label") -> Condition:
    """Parse class names or ids into a condition.

    Args:
        text: names or class ids, one per image, separated by commas, semicolons or new lines; case and surrounding
            spaces are ignored.
        label_set: one of :func:`label_sets`, or "" if only ids are valid.
        repeat: consecutive images per label, at least 1.
        field: name of the input, for messages.

    Returns:
        A condition with one class id per image.

    Raises:
        UserError: empty or too long text, ``repeat`` below 1, an unknown label set, or names or ids not in it (three of
            them with the closest names, and how many more).
    """
    words = split_labels(text, field)
    if not words:
        raise UserError(f"{field}: nothing is named; give a class name or id, or several separated by commas.")
    if repeat < 1:
        raise UserError(f"{field}: {repeat} images of each label are asked for; 1 is the least.")
    if label_set and label_set not in label_sets():
        raise UserError(f"label_set: {label_set!r} is unknown; there are {', '.join(label_sets())}.")
    names = label_sets()[label_set] if label_set else ()
    places = _places(label_set) if names else {}
    found = [_class_id(word, names, places) for word in words]
    _refuse([word for word, number in zip(words, found, strict=True) if number is None], field, [label_set])
    ids = [number for number in found if number is not None for _ in range(repeat)]
    return Condition(tuple(ids), tuple(names[i] if names else str(i) for i in ids), label_set)


def split_labels(text: str, field: str = "labels") -> list[str]:
    """The names and ids in a text; see :func:`resolve_labels`.

    Raises:
        UserError: the text has more than 32768 characters.
    """
    if len(text) > MOST_TEXT:
        raise UserError(f"{field}: it has {len(text)} characters; give at most {MOST_TEXT}.")
    return [w.strip() for w in re.split(r"[,;\n]", text) if w.strip()]


def check_labels(text: str, field: str = "labels") -> None:
    """Check names and ids against all label sets, where the model's set is not known yet.

    Raises:
        UserError: a word that no set has; the message lists three such words with the closest names, and how many more there are.
    """
    sets = label_sets()
    unknown = [
        word
        for word in split_labels(text, field)
        if all(_class_id(word, names, _places(where)) is None for where, names in sets.items())
    ]
    _refuse(unknown, field, list(sets))


def _refuse(unknown: list[str], field: str, sets: list[str]) -> None:
    """Raises UserError if there are unknown words."""
    words = list(dict.fromkeys(unknown))
    if words:
        problems = [_problem(word, sets) for word in words[:_MOST_SHOWN]]
        more = f". {len(words) - _MOST_SHOWN} more are unknown" if len(words) > _MOST_SHOWN else ""
        raise UserError(f"{field}: {'. '.join(problems)}{more}.")


def _problem(word: str, sets: list[str]) -> str:
    """What is wrong with a word, without the full stop. A label set "" has ids only."""
    shown = repr(word if len(word) <= 60 else f"{word[:57]}...")
    if len(sets) > 1:
        close = [f"{name} ({where})" for where in sets for name in _closest(word, label_sets()[where])[:2]]
        return f"there is no class {shown}" + (f"; the closest: {', '.join(close)}" if close else "")
    (label_set,) = sets
    names = label_sets()[label_set] if label_set else ()
    if _ID.fullmatch(word):
        limit = f"0 to {len(names) - 1}, the ids of {label_set}" if names else "the ids, which start at 0"
        return f"{int(word)} is outside {limit}"
    if not names:
        return f"{shown} is a name, and this model's class names are unknown; give class ids"
    close = _closest(word, names)
    hint = (
        f"the closest: {', '.join(close)}" if close else f"for example {names[0]}, or an id from 0 to {len(names) - 1}"
    )
    return f"{label_set} has no class {shown}; {hint}"


_ID = re.compile(r"[+-]?[0-9]{1,9}")


def _key(word: str) -> str:
    """A name as it is compared."""
    return " ".join(word.lower().replace("_", " ").split())


@lru_cache(maxsize=2)
def _places(label_set: str) -> dict[str, int]:
    """Name as it is compared to class id."""
    return {name.lower(): i for i, name in enumerate(label_sets()[label_set])}


def _closest(word: str, names: tuple[str, ...]) -> list[str]:
    """At most four names: those that contain the word ("corgi", "crane"), then those with similar spelling."""
    if len(word) > _LONGEST_NAME:
        return []
    key, lower = _key(word), {name.lower(): name for name in names}
    close = [name for name in names if key in re.split(r"[^a-z]+", name.lower())]
    close += [lower[k] for k in difflib.get_close_matches(key, lower, 4, 0.6)]
    return list(dict.fromkeys(close))[:4]


def _class_id(word: str, names: tuple[str, ...], places: dict[str, int]) -> int | None:
    """The class id of a name or id; None if there is no such class."""
    if _ID.fullmatch(word):
        number = int(word)
        return number if 0 <= number and (not names or number < len(names)) else None
    return places.get(_key(word))
