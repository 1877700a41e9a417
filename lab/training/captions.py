"""Captions of the picture book for the demo's Tar: training captions, held-out prompts, and the vocabulary.

A caption states the object and any of colour, size, place and time, in varying words and order. A quarter of the
combinations of more than object and colour is held out of the training captions. Evaluation prompts are made of these,
so they ask for compositions that are new to the language model, in known words.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...model_loaders.files.tokenizer import Tokenizer, load_tokenizer
from . import picture_book
from .picture_book import Scenes
from .recipes import TRAIN_SEED

UNSAID = -1
SUNSET = picture_book.LABELS.index("sunset")
# Words for each value; evaluation prompts use the first.
_THINGS = (
    ("sunset", "sundown"),
    ("mountains", "mountain", "peaks"),
    ("flower", "blossom"),
    ("fish",),
    ("house", "cottage", "home"),
    ("tree",),
    ("planet",),
    ("boat", "ship", "sailboat"),
    ("balloon", "hot air balloon"),
    ("cat", "kitty"),
)
_SIZES = (("small", "little", "tiny"), ("large", "big", "huge"))
_PLACES = (
    ("on the left", "at the left", "to the left", "left"),
    ("in the middle", "in the center", "in the centre"),
    ("on the right", "at the right", "to the right", "right"),
)
_TIMES = (
    ("by day", "during the day", "in daylight", "in the daytime"),
    ("at sunset", "at dusk", "in the evening"),
    ("at night", "by night", "in the night"),
)
_LEADS = ("an image of", "an image of", "a drawing of", "a painting of", "a photo of", "draw", "show me", "there is")
# An adjective outside the vocabulary, and the token of unknown words.
_STRANGE, _UNKNOWN = "lovely", "[UNK]"
# Words of the chat template, and other words of prompts.
_AROUND = "system you are a helpful assistant . user , ; : ! and with the an one is it that of some in on at"
TURNS, _IMAGE, _PADDING = ("<|im_start|>", "<|im_end|>"), ("<im_start>", "<im_end>"), "<|endoftext|>"
# Words that only the hybrid's template contains.
_HYBRID_WORDS = ("generate",)
# Probability that a training caption states each parameter.
SAID = {"label": 0.98, "colour": 0.9, "size": 0.4, "place": 0.45, "time": 0.5}


@dataclass(frozen=True)
class Wishes:
    """Requested parameters of N prompts: int64 [N] each, an index into the picture book's lists or :data:`UNSAID`."""

    label: np.ndarray
    colour: np.ndarray
    size: np.ndarray
    place: np.ndarray
    time: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    def captions(self) -> list[str]:
        """The prompts in the words of the book's captions: ``a red boat at sunset``."""
        rows = np.stack([getattr(self, f.name) for f in fields(self)], 1).tolist()
        return [_plain(dict(zip(SAID, row, strict=True))) for row in rows]

    def fulfilled(self, scenes: Scenes) -> dict[str, np.ndarray]:
        """Whether N scenes match the request, bool [N] by parameter; True where a parameter is not stated."""
        pairs = {f.name: (getattr(self, f.name), getattr(scenes, f.name)) for f in fields(self)}
        return {name: (wanted == UNSAID) | (wanted == shown) for name, (wanted, shown) in pairs.items()}


def held_out(wish: dict[str, int]) -> bool:
    """Whether a request (values by the names of :class:`Wishes`) is held out of the training captions: a quarter of
    those that state object, colour and more, selected by a hash.
    """
    if min(wish["label"], wish["colour"]) == UNSAID or max(wish[name] for name in ("size", "place", "time")) == UNSAID:
        return False
    number = 0
    for name in SAID:
        number = number * 16 + wish[name] + 1

    for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9):  # splitmix64's
        number = number * factor % (1 << 64)
        number ^= number >> 31

    return number % 4 == 0


def wishes(count: int, seed: int = 0) -> Wishes:
    """Held-out requests, the same on every machine: every object in
    every colour in turn (47), with one to three of size, place, time.
    """
    # A sunset is red or yellow, and its time is not stated.
    colours, labels = range(len(picture_book.COLOURS)), range(len(picture_book.LABELS))
    pairs = [(label, colour) for colour in colours for label in labels]
    suns = [picture_book.COLOURS.index(name) for name in ("red", "yellow")]
    pairs = [(label, colour) for label, colour in pairs if label != SUNSET or colour in suns]
    r, rows = Random(seed), []

    for i in range(count):
        wish = dict(zip(SAID, (*pairs[i % len(pairs)], UNSAID, UNSAID, UNSAID), strict=True))
        while not held_out(wish):
            for name, values in (("size", _SIZES), ("place", _PLACES), ("time", _TIMES)):
                wish[name] = int(r.random() * (len(values) + 1)) - 1
            if wish["label"] == SUNSET:
                wish["time"] = UNSAID
        rows.append([wish[name] for name in SAID])

    return Wishes(*np.array(rows, np.int64).reshape(-1, len(SAID)).T)


@lru_cache
def _requests_by_caption() -> dict[str, tuple[int, ...]]:
    """The values of a request, by the names of :class:`Wishes`, by its caption in the words of the evaluation."""
    counts = (len(picture_book.COLOURS), len(_SIZES), len(_PLACES), len(_TIMES))
    every = product(range(len(_THINGS)), *(range(UNSAID, count) for count in counts))

    return {_plain(dict(zip(SAID, values, strict=True))): values for values in every}


def requests(texts: Sequence[str]) -> Wishes | None:
    """The requests whose captions these are, see :meth:`Wishes.captions`; None if one is not, or names no object."""
    known = _requests_by_caption()
    if not texts or not all(text in known for text in texts):
        return None

    return Wishes(*np.array([known[text] for text in texts], np.int64).T)


def fulfilling(wanted: Wishes, seed: int) -> Scenes:
    """Scenes of the book ``seed`` that fulfil the requests, one each; unstated parameters are those of the book."""
    s = picture_book.scenes(seed, len(wanted), labels=wanted.label.tolist())

    said = {}
    for name in ("colour", "place", "size", "time"):
        asked = getattr(wanted, name)
        said[name] = np.where(asked == UNSAID, getattr(s, name), asked)

    # Place and size change; the random offset from their centre remains.
    x = s.x + ((said["place"] - s.place) * picture_book.PLACE_STEP).astype(np.float32)
    scales = np.array(picture_book.SCALES, np.float32)
    return replace(s, **said, x=x, scale=s.scale + scales[said["size"]] - scales[s.size])


def _plain(wish: dict[str, int]) -> str:
    thing = "" if wish["label"] == UNSAID else _THINGS[wish["label"]][0]
    words = ["" if thing == "mountains" else "a"] if thing else []
    words += [_SIZES[wish["size"]][0]] if wish["size"] != UNSAID else []
    words += [picture_book.COLOURS[wish["colour"]]] if wish["colour"] != UNSAID else []
    words.append(thing)
    words += [values[wish[name]][0] for name, values in (("place", _PLACES), ("time", _TIMES)) if wish[name] != UNSAID]
    return " ".join(filter(None, words))


def _choose(r: Random, among: Sequence[str], first: float = 0.6) -> str:
    """One of the options; the first with probability ``first``."""
    return among[0] if r.random() < first or len(among) == 1 else among[1 + int(r.random() * (len(among) - 1))]


def caption(wish: dict[str, int], r: Random) -> str:
    """A random wording of a request (values by the names of :class:`Wishes`); "" if it states nothing."""
    said = {name: "" for name in SAID}
    if wish["colour"] != UNSAID:
        said["colour"] = picture_book.COLOURS[wish["colour"]]

    for name, values in (("label", _THINGS), ("size", _SIZES), ("place", _PLACES), ("time", _TIMES)):
        if wish[name] != UNSAID:
            said[name] = _choose(r, values[wish[name]])

    if not any(said.values()):
        return ""
    if r.random() < 0.2:  # keywords in random order
        parts = sorted(filter(None, said.values()), key=lambda _: r.random())
        text = (", " if r.random() < 0.5 else " ").join(parts)
    else:
        article = "" if said["label"] == "mountains" else "a"
        words = [_choose(r, (article, "the", ""), 0.65)] if said["label"] else []
        words += [said["colour"], said["size"]] if r.random() < 0.1 else [said["size"], said["colour"]]
        phrase, order = " ".join(filter(None, [*words, said["label"]])), r.random()
        parts = [phrase, said["place"], said["time"]]
        if order < 0.2:
            parts = [phrase, said["time"], said["place"]]
        elif order < 0.35:
            parts = [f"{said['time']}," if said["time"] else "", phrase, said["place"]]
        elif order < 0.4:
            parts = [said["place"], phrase, said["time"]]
        if r.random() < 0.12:
            parts.insert(0, _LEADS[int(r.random() * len(_LEADS))])
        text = " ".join(filter(None, parts))

    if r.random() < 0.08:
        words = text.split(" ")
        words.insert(int(r.random() * (len(words) + 1)), _STRANGE)
        text = " ".join(words)

    return text + "." if r.random() < 0.08 else text


def training_wish(scene: Sequence[int], r: Random) -> dict[str, int]:
    """The part of a scene (label, colour, size, place, time) that a training caption states; never
    a held-out request.
    """
    everything = r.random() < 0.15
    stated = (everything or r.random() < share for share in SAID.values())
    wish = {name: value if says else UNSAID for name, value, says in zip(SAID, scene, stated, strict=True)}
    if scene[0] == SUNSET:
        wish["time"] = UNSAID
    while held_out(wish):
        wish[("size", "place", "time")[int(r.random() * 3)]] = UNSAID

    return wish


def training_captions(s: Scenes, seed: int) -> list[str]:
    """One caption for each of N scenes."""
    r = Random(seed)
    rows = np.stack([getattr(s, name) for name in SAID], 1).tolist()
    return [caption(training_wish(row, r), r) for row in rows]


def prompt_book(prompt: Callable[[str], list[int]], count: int, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Prompts of the first training images, a caption for every seed: ids int16 [count, seeds, L], padded with 0 at
    the end, and lengths."""
    s = picture_book.scenes(TRAIN_SEED, count)
    texts = zip(*(training_captions(s, i) for i in seeds), strict=True)
    rows = [torch.tensor(prompt(text)) for several in texts for text in several]
    lengths = torch.tensor([len(ids) for ids in rows], dtype=torch.int16).view(count, -1)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(torch.int16).view(count, len(seeds), -1), lengths


def vocabulary() -> list[str]:
    """The words in the order of their ids; the first is the unknown word."""
    phrases = [phrase for values in (_THINGS, _SIZES, _PLACES, _TIMES) for names in values for phrase in names]
    words = {word for phrase in (*phrases, *_LEADS, *picture_book.COLOURS, _AROUND) for word in phrase.split()}
    return [_UNKNOWN, *sorted(words)]


def word_level(words: Sequence[str], marks: Sequence[str]) -> dict[str, Any]:
    """Content of a ``tokenizer.json`` that looks words up; the special tokens ``marks`` follow the words."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(words) + i, "content": name, **flags} for i, name in enumerate(marks)],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": _UNKNOWN},
    }


def tokenizer_json(codes: int, scales: int) -> dict[str, Any]:
    """Content of a ``tokenizer.json``: the words, then the
    special tokens of the chat template, images, scales and codes.
    """
    marks = [*TURNS, *_IMAGE, *(f"<S{i}>" for i in range(scales)), *(f"<I{i}>" for i in range(codes))]
    return word_level(vocabulary(), marks)


def prompt_tokenizer_json() -> dict[str, Any]:
    """Content of the hybrid's ``tokenizer.json``: the same words,
    those of its template, and the special tokens of Qwen2.5.
    """
    return word_level([*vocabulary(), *_HYBRID_WORDS], [*TURNS, _PADDING])


def tokenizer(codes: int, scales: int) -> Tokenizer:
    """The tokenizer of :func:`tokenizer_json`."""
    return load_tokenizer(Path(), "", {"tokenizer": json.dumps(tokenizer_json(codes, scales))})
