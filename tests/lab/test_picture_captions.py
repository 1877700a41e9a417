"""Captions of the demo's Tar: correct statements, known words, and no held-out request in training captions."""

import re
from itertools import product
from random import Random

import numpy as np
import pytest
from fastar_nodes.lab.training import captions as words
from fastar_nodes.lab.training import picture_book as book

pytestmark = pytest.mark.slow

BOOK = book.scenes(1, 1500)
TRAINED = words.training_captions(BOOK, 3)


def wish(label=-1, colour=-1, size=-1, place=-1, time=-1) -> dict[str, int]:
    return {"label": label, "colour": colour, "size": size, "place": place, "time": time}


def test_prompts_read_as_captions_of_the_book() -> None:
    s = book.scenes(5, 40)
    told = words.Wishes(s.label, s.colour, s.size, s.place, np.where(s.label == words.SUNSET, -1, s.time))
    assert told.captions() == s.captions()
    some = words.Wishes(*(np.array(v) for v in ([7, 1], [0, -1], [-1, 0], [-1, 2], [1, -1])))
    assert some.captions() == ["a red boat at sunset", "small mountains on the right"]


def test_training_captions_say_nothing_false() -> None:
    """Every word for a value of a parameter is one of the scene's value."""
    values_of = (words._THINGS, words._SIZES, words._PLACES, words._TIMES)
    for name, values in zip(("label", "size", "place", "time"), values_of, strict=True):
        wrong = [
            (caption, phrase)
            for caption, truth in zip(TRAINED, getattr(BOOK, name), strict=True)
            for value, phrases in enumerate(values)
            for phrase in phrases
            # A sunset is an object as well as a time.
            if value != truth and phrase != "sunset" and re.search(rf"\b{phrase}\b", caption)
        ]
        assert not wrong, wrong[:3]
    for caption, truth in zip(TRAINED, BOOK.colour, strict=True):
        assert not any(colour in caption for i, colour in enumerate(book.COLOURS) if i != truth), caption


def test_every_word_is_known() -> None:
    known = words.tokenizer(16, 3)
    around = ("You are a helpful assistant.", "system", "user", "assistant")
    for text in (*TRAINED, *around, *book.scenes(2, 300).captions()):
        unknown = [w for w in re.findall(r"\w+|[^\w\s]", text) if known.encode(w) == [0]]
        assert set(unknown) <= {words._STRANGE}, text
    assert known.encode("a zebra") == [known.encode("a")[0], 0]
    ids = sorted(known.special_tokens.values())
    assert ids == list(range(known.size, known.size + 4 + 3 + 16)), "marks follow the words without a gap"


def test_held_out_wishes_are_in_no_training_caption() -> None:
    r = Random(1)
    rows = np.stack([getattr(BOOK, name) for name in words.SAID], 1).tolist()
    trained = {tuple(words.training_wish(row, r).values()) for row in rows for _ in range(4)}
    told = words.wishes(300)
    asked = {tuple(int(getattr(told, name)[i]) for name in words.SAID) for i in range(300)}
    assert len(asked) > 150 and not asked & trained
    assert all(words.held_out(dict(zip(words.SAID, row, strict=True))) for row in asked)
    assert not words.held_out(wish(label=7, colour=0)) and not words.held_out(wish(label=7, size=1, place=0, time=0))
    composed = [wish(*values) for values in product(range(10), range(5), range(2), range(-1, 3), range(-1, 3))]
    assert np.mean([words.held_out(w) for w in composed]) == pytest.approx(0.25, abs=0.03)


def test_held_out_prompts_are_the_same_everywhere() -> None:
    told = words.wishes(94)
    first = ["a large red sunset on the left", "small red mountains on the right at sunset"]
    first += ["a small red flower in the middle by day"]
    assert told.captions()[:3] == first
    pairs = list(zip(told.label.tolist(), told.colour.tolist(), strict=True))
    assert len(set(pairs[:47])) == 47 and pairs[47:] == pairs[:47], "every thing in every colour in turn"
    assert not any(label == words.SUNSET and time >= 0 for label, time in zip(told.label, told.time, strict=True))
    assert words.wishes(94, seed=1).captions() != told.captions()
    assert len(words.wishes(0)) == 0
