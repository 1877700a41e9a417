"""The words that the models connected to a prompt or a label know: words of a prompt, a negative prompt, the names of
classes.

The editor asks ``POST /fastar/words`` (web/js/vocabulary.js) while one types. As for presets, only the header of a
model's file is read, which holds the demo's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import UserError
from ..model_loaders.files.checkpoint import parse_json
from ..runs.labels import PICTURE_BOOK, label_sets, subject_like, words_of
from ..runs.loading import AUTO
from . import filling
from .conditioning import set_of_entry

PATH = "/fastar/words"
# Bytes of a request: a long prompt, and the widgets of a few loaders.
MOST_BYTES = 1 << 17
# Loaders of a request that are looked at.
_MOST_LOADERS = 8


def answer(body: bytes) -> tuple[int, dict[str, Any]]:
    """Status and content of the answer to a request; see :func:`known` for its fields. Raises nothing."""
    try:
        asked = parse_json(body.decode("utf-8", "replace"), "the request", "words")
        return 200, known(asked.get("loaders"), asked.get("text"), asked.get("label_set"))
    except UserError as problem:
        return 400, {"error": str(problem)}


def known(loaders: Any, text: Any = "", label_set: Any = AUTO) -> dict[str, Any]:
    """What the models that loaders would load know.

    Args:
        loaders: a list of the loaders connected to a prompt or a label, each as in :func:`.filling.fill`.
        text: the prompt.
        label_set: what the widget of Class Label says.

    Returns:
        ``labels``: the names of classes that a Class Label may hold; None where that is not known. ``words``: the words
        of the text that the first model with a vocabulary of words ``reads``, those that it does not know, ``strange``,
        each with the subject that may be meant, and all ``subjects``; None if there is no such model. ``negative``:
        False if none of the models reads a negative prompt, else True.
    """
    listed = list(loaders)[:_MOST_LOADERS] if isinstance(loaders, list) else []
    reading = [filling.reads_negatives(loader) for loader in listed]

    return {
        "labels": _names(listed, label_set),
        "words": _words(listed, str(text or "")),
        "negative": not reading or any(reads is not False for reads in reading),
    }


def _names(loaders: Iterable[Any], label_set: Any) -> list[str] | None:
    """The names of the chosen label set, or of the models' sets; None if one of the models is not known."""
    if label_set in list(label_sets()):
        return list(label_sets()[label_set])

    sets: set[str] = set()
    for loader in loaders:
        found = _set_of(loader)
        if found is None:
            return None
        sets.add(found)

    names: list[str] = []
    for name in sorted(sets, reverse=True):  # the demo's first
        names += label_sets()[name]
    return list(dict.fromkeys(names)) or None


def _network(loader: Any) -> Any:
    """The model that a loader would load, without weights; None if its file is not here or cannot be read."""
    try:
        model, _ = filling.model_of(loader)
        return model.model
    except Exception:  # a file may be damaged in any way, which a run reports
        return None


def _set_of(loader: Any) -> str | None:
    """The label set of the model that a loader would load; None if it is not known."""
    inputs = loader.get("inputs") if isinstance(loader, dict) else None
    stated = getattr(_network(loader), "label_set", "") or set_of_entry((inputs or {}).get("checkpoint"))
    return stated if stated in label_sets() else None


def _words(loaders: Iterable[Any], text: str) -> dict[str, list[Any]] | None:
    """What the first model with a vocabulary of words reads in a prompt."""
    for loader in loaders:
        found = words_of(_network(loader), [text])
        if found is not None:
            reads, strange = found
            meant = [[word, subject_like(word)] for word in strange]
            return {"reads": reads, "strange": meant, "subjects": list(PICTURE_BOOK)}

    return None
