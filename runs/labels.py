"""Class labels in text: names and ids become a condition, and messages name the closest classes. Also the words of a
prompt that a model does not know.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, cast

from ..errors import UserError
from ..networks.chat import MOST_TEXT
from ..samplers.conditioning import ClassCondition

# The label set of the demo, whose models take the demo's values of presets.
DEMO_LABELS = "picture-book"
# Classes of the demo data set in id order; a test compares them with lab/training/picture_book.py.
PICTURE_BOOK = ("sunset", "mountains", "flower", "fish", "house", "tree", "planet", "boat", "balloon", "cat")
# A message lists all names of a set that has no more than this.
_MOST_LISTED = 10
# Bounds on the time of a check and the length of a message: words of prompts that are looked up, unknown words and
# labels that a message names, and characters of one of them.
_MOST_WORDS = 1000
_MOST_SHOWN = 3
_LONGEST = 60
# Least ratio of difflib at which a name is similar.
_SIMILAR = 0.75


@lru_cache(maxsize=1)
def label_sets() -> dict[str, tuple[str, ...]]:
    """Label set name to class names in id order. Names are unique within a set, ignoring case."""
    imagenet = (Path(__file__).parent / "imagenet_1k.txt").read_text(encoding="utf-8-sig").splitlines()
    return {DEMO_LABELS: PICTURE_BOOK, "imagenet-1k": tuple(imagenet)}


@lru_cache(maxsize=8)
def _ids(label_set: str) -> dict[str, int]:
    """Class ids of a label set by lower-case name."""
    return {name.lower(): i for i, name in enumerate(label_sets().get(label_set, ()))}


def split_labels(text: str, field: str = "labels") -> list[str]:
    """The names and ids in a text, see :func:`resolve_labels`.

    Raises:
        UserError: it has more than 16384 characters.
    """
    if len(text) > MOST_TEXT:
        raise UserError(f"{field}: it has {len(text)} characters; give at most {MOST_TEXT}.")
    return [w.strip() for w in re.split(r"[,;\n]", text) if w.strip()]


def resolve_labels(text: str, label_set: str, repeat: int = 1, field: str = "label") -> ClassCondition:
    """The condition of class names or ids.

    Args:
        text: names or ids, separated by commas, semicolons or new lines; case and surrounding spaces are ignored.
        label_set: one of :func:`label_sets`, or "" if only ids are valid.
        repeat: consecutive images per label, at least 1.
        field: name of the input, for messages.

    Raises:
        UserError: empty or too long text, ``repeat`` below 1, an unknown label set, or names or ids not in it.
    """
    words = split_labels(text, field)
    if not words:
        raise UserError(
            f"{field}: it is empty; give the name or the number of a class, or several of them, separated by commas."
        )
    if repeat < 1:
        raise UserError(f"{field}: {repeat} images per label are too few; ask for at least 1.")
    if label_set and label_set not in label_sets():
        raise UserError(f"label_set: {label_set!r} is unknown; choose one of {', '.join(label_sets())}.")

    names = label_sets()[label_set] if label_set else ()
    found = {word: _class_id(word, label_set) for word in words}
    _refuse_unknown([word for word, number in found.items() if number is None], {label_set: names}, field)

    ids: list[int] = []
    for word in words:
        ids += [cast(int, found[word])] * repeat
    return ClassCondition(tuple(ids), tuple(names[i] if names else str(i) for i in ids), label_set)


def labels_for(text: str, label_set: str, repeat: int = 1, field: str = "label") -> ClassCondition:
    """The condition of class names or ids for a model of that label set: nodes and command line parse them here.

    A label set that this version does not know (a file may name any) takes ids only. Raises the errors of
    :func:`resolve_labels`.
    """
    known = label_set if label_set in label_sets() else ""
    return resolve_labels(text, known, repeat, field)


def check_labels(text: str, sets: Sequence[str], field: str = "labels") -> None:
    """Check names and ids against label sets, where it is not known which of them the model's is.

    Raises:
        UserError: words that none of the sets has; the message names three of them with the closest names.
    """
    unknown = []
    for word in split_labels(text, field):
        if all(_class_id(word, where) is None for where in sets):
            unknown.append(word)

    _refuse_unknown(unknown, {where: label_sets()[where] for where in sets}, field)


def _class_id(word: str, label_set: str) -> int | None:
    """The class id of a name or id, None if the set ("" for any ids) does not have it."""
    if re.fullmatch(r"[+-]?[0-9]{1,9}", word):
        number = int(word)
        count = len(label_sets().get(label_set, ()))
        return number if 0 <= number and (not count or number < count) else None
    return _ids(label_set).get(_key(word))


def _key(word: str) -> str:
    """A name as it is compared."""
    return " ".join(word.lower().replace("_", " ").split())


def _refuse_unknown(unknown: Sequence[str], sets: Mapping[str, Sequence[str]], field: str) -> None:
    """Raise a UserError that names the first unknown words with the closest names of the sets, if there are unknown
    words.
    """
    if not unknown:
        return

    # 1. The closest names.
    words = list(dict.fromkeys(unknown))
    close = []
    for word in words[:_MOST_SHOWN]:
        for where, names in sets.items():
            for name in _closest(_key(word), names):
                close.append(f"{name} ({_in_words(where)})" if len(sets) > 1 else name)
    hint = f"; the closest names: {', '.join(dict.fromkeys(close))}" if close else ""

    # 2. What the sets have.
    have = []
    for where, names in sets.items():
        if names:
            numbers = any(word.isdigit() for word in words)
            if len(names) <= _MOST_LISTED and not numbers:
                have.append(f"{_in_words(where)} has {', '.join(names)}")
            else:
                have.append(f"{_in_words(where)} has the ids 0 to {len(names) - 1}")
    remedy = " and ".join(have) or "FastAR does not know the class names of this model, so give class ids from 0"
    raise UserError(f"{field}: there is no class {_first_few(words, repr)}{hint}; {remedy}.")


def _in_words(label_set: str) -> str:
    """A label set in messages."""
    return "the demo" if label_set == DEMO_LABELS else label_set


def _closest(key: str, names: Sequence[str]) -> list[str]:
    """At most three names: names that share a word ("crane", "a red cat"), then names of similar spelling."""
    if len(key) > _LONGEST:
        return []
    by_key = {name.lower(): name for name in names}

    # The last of several words is usually the noun.
    close: list[str] = []
    for word in reversed(_words(key)):
        close += [other for other in by_key if word in _words(other)]
    close += difflib.get_close_matches(key, by_key, 3, _SIMILAR)

    return [by_key[other] for other in dict.fromkeys(close)][:3]


def _words(text: str) -> list[str]:
    """Words of three letters or more."""
    return [word for word in re.split(r"[^a-z]+", text) if len(word) > 2]


# ------------------------------------------------------------------------------------------------ words of prompts


def words_of(model: Any, texts: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """The words of prompts that a model with a vocabulary of words knows, and those that it does not know, each once in
    their order, of at most a thousand; None for other models.
    """
    # A model with a vocabulary of words has one token for all other words, such as these two, which are not words.
    unknown = model.tokenize("qzx") if getattr(model, "tokenize", None) is not None else []
    if len(unknown) != 1 or unknown != model.tokenize("xqz"):
        return None

    found: dict[str, None] = {}  # in the order of the texts
    for text in texts:
        found |= dict.fromkeys(re.findall(r"\w+", text[:MOST_TEXT]))

    known: list[str] = []
    strange: list[str] = []
    for word in islice(found, _MOST_WORDS):
        is_known = len(word) <= _LONGEST and model.tokenize(word) != unknown
        (known if is_known else strange).append(word)
    return known, strange


def unknown_words(model: Any, texts: Sequence[str]) -> str:
    """A sentence that names words of prompts that a model with a vocabulary of words does not know.

    If there are many words, it names the first three, shortened. "" if there are none, and for other models.
    """
    words = words_of(model, texts)
    if words is None or not words[1]:
        return ""

    return f"Words that {model.name} does not know: {_first_few(words[1])}."


def subject_like(word: str) -> str:
    """The demo's subject that a word is likely meant for ("boats", "sunsett"); "" if there is none."""
    close = difflib.get_close_matches(_key(word[:_LONGEST]), PICTURE_BOOK, 1, _SIMILAR)
    return close[0] if close else ""


def _first_few(words: Sequence[str], show: Callable[[str], str] = str) -> str:
    """The first three words in a message, shortened, and how many more there are."""
    shown = [show(word if len(word) <= _LONGEST else f"{word[: _LONGEST - 3]}...") for word in words[:_MOST_SHOWN]]
    more = f" and {len(words) - _MOST_SHOWN} more" if len(words) > _MOST_SHOWN else ""
    return f"{', '.join(shown)}{more}"
