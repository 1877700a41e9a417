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
# Unknown labels that a message lists.
_MOST_SHOWN = 8


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
        UserError: empty text, ``repeat`` below 1, an unknown label set, or names or ids not in it (all of
            them, with the closest names).
    """
    words = split_labels(text)
    if not words:
        raise UserError(f"{field}: nothing is named; give a class name or id, or several separated by commas.")
    if repeat < 1:
        raise UserError(f"{field}: {repeat} images of each label are asked for; 1 is the least.")
    if label_set and label_set not in label_sets():
        raise UserError(f"label_set: {label_set!r} is unknown; there are {', '.join(label_sets())}.")
    names = label_sets()[label_set] if label_set else ()
    ids, problems = [], []
    for word in words:
        found = _class_id(word, names, label_set)
        if isinstance(found, str):
            problems.append(found)
        else:
            ids += [found] * repeat
    _refuse(problems, field)
    return Condition(tuple(ids), tuple(names[i] if names else str(i) for i in ids), label_set)


def split_labels(text: str) -> list[str]:
    """The names and ids in a text; see :func:`resolve_labels`."""
    return [w.strip() for w in re.split(r"[,;\n]", text) if w.strip()]


def check_labels(text: str, field: str = "labels") -> None:
    """Check names and ids against all label sets, where the model's set is not known yet.

    Raises:
        UserError: a word that no set has; the message lists every such word with the closest names.
    """
    problems = []
    for word in split_labels(text):
        found = [_class_id(word, names, where) for where, names in label_sets().items()]
        if all(isinstance(one, str) for one in found):
            close = [
                f"{name} ({where})" for where, names in label_sets().items() for name in _closest(_key(word), names)[:2]
            ]
            hint = f"; the closest: {', '.join(close)}" if close else ""
            problems.append(f"there is no class {word!r}{hint}")
    _refuse(problems, field)


def _refuse(problems: list[str], field: str) -> None:
    """Raises UserError with all problems, if there are any."""
    if problems:
        shown = dict.fromkeys(problems)
        more = f". {len(shown) - _MOST_SHOWN} more are unknown" if len(shown) > _MOST_SHOWN else ""
        raise UserError(f"{field}: {'. '.join(list(shown)[:_MOST_SHOWN])}{more}.")


def _key(word: str) -> str:
    """A name as it is compared."""
    return " ".join(word.lower().replace("_", " ").split())


def _closest(key: str, names: tuple[str, ...]) -> list[str]:
    """At most four names: those that contain the word ("corgi", "crane"), then those with similar spelling."""
    lower = {name.lower(): name for name in names}
    close = [name for name in names if key in re.split(r"[^a-z]+", name.lower())]
    close += [lower[k] for k in difflib.get_close_matches(key, lower, 4, 0.6)]
    return list(dict.fromkeys(close))[:4]


def _class_id(word: str, names: tuple[str, ...], label_set: str) -> int | str:
    """The class id of a name or id, or a sentence without its full stop that says what is wrong."""
    if re.fullmatch(r"[+-]?[0-9]{1,9}", word):
        number = int(word)
        if number < 0 or names and number >= len(names):
            limit = f"0 to {len(names) - 1}, the ids of {label_set}" if names else "the ids, which start at 0"
            return f"{number} is outside {limit}"
        return number
    if not names:
        return f"{word!r} is a name, and this model's class names are unknown; give class ids"
    lower = {name.lower(): i for i, name in enumerate(names)}
    key = _key(word)
    if key in lower:
        return lower[key]
    close = _closest(key, names)
    hint = (
        f"the closest: {', '.join(close)}" if close else f"for example {names[0]}, or an id from 0 to {len(names) - 1}"
    )
    return f"{label_set} has no class {word!r}; {hint}"
