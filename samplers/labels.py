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
        UserError: empty text, ``repeat`` below 1, an unknown label set, or a name or id not in it (with the closest names).
    """
    words = [w.strip() for w in re.split(r"[,;\n]", text) if w.strip()]
    if not words:
        raise UserError(f"{field}: nothing is named; give a class name or id, or several separated by commas.")
    if repeat < 1:
        raise UserError(f"{field}: {repeat} images of each label are asked for; 1 is the least.")
    if label_set and label_set not in label_sets():
        raise UserError(f"label_set: {label_set!r} is unknown; there are {', '.join(label_sets())}.")
    names = label_sets()[label_set] if label_set else ()
    ids = [_class_id(word, names, label_set, field) for word in words for _ in range(repeat)]
    return Condition(tuple(ids), tuple(names[i] if names else str(i) for i in ids), label_set)


def _class_id(word: str, names: tuple[str, ...], label_set: str, field: str) -> int:
    if re.fullmatch(r"[+-]?[0-9]{1,9}", word):
        number = int(word)
        if number < 0 or names and number >= len(names):
            limit = f"0 to {len(names) - 1}, the ids of {label_set}" if names else "the ids, which start at 0"
            raise UserError(f"{field}: {number} is outside {limit}.")
        return number
    if not names:
        raise UserError(f"{field}: {word!r} is a name, and this model's class names are unknown; give class ids.")
    lower = {name.lower(): i for i, name in enumerate(names)}
    key = " ".join(word.lower().replace("_", " ").split())
    if key in lower:
        return lower[key]
    # Names that contain the word ("corgi", "crane") come before names with similar spelling.
    close = [name for name in names if key in re.split(r"[^a-z]+", name.lower())]
    close += [names[lower[k]] for k in difflib.get_close_matches(key, lower, 4, 0.6)]
    close = list(dict.fromkeys(close))[:4]
    hint = f"the closest: {', '.join(close)}"
    if not close:
        hint = f"for example {names[0]}, or an id from 0 to {len(names) - 1}"
    raise UserError(f"{field}: {label_set} has no class {word!r}; {hint}.")
