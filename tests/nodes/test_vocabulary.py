"""What the editor is told while one types: words of a prompt that a demo reads, names for Class Label's menu."""

import json
from typing import Any

import fake_comfy  # noqa: F401  before the nodes
import pytest
from fastar_nodes.lab.training import captions, picture_book
from fastar_nodes.nodes import vocabulary
from fastar_nodes.runs.labels import PICTURE_BOOK, label_sets, subject_like, words_of

HARMON = ("FastARLoadHarmon", "demo-hybrid")
TAR = ("FastARLoadTar", "demo-tar")
DEMO = ("FastARLoadMAR", "demo")
OFFICIAL = ("FastARLoadMAR", "mar-base (download 0.8 GB)")


def asked(*loaders: tuple[str, str], **about: Any) -> dict[str, Any]:
    named = [{"class_type": kind, "inputs": {"checkpoint": choice, "grid": "auto"}} for kind, choice in loaders]
    status, found = vocabulary.answer(json.dumps({"loaders": named, **about}).encode())
    assert status == 200, found
    return found


@pytest.mark.parametrize("loader", [HARMON, TAR])
def test_words_of_a_prompt(loader):
    text = "A purple boats and a red dog, {kitty|house}\nat night"
    words = asked(loader, text=text)["words"]
    assert words["reads"] == ["A", "and", "a", "red", "kitty", "house", "at", "night"]
    assert words["strange"] == [["purple", ""], ["boats", "boat"], ["dog", ""]]
    assert words["subjects"] == list(PICTURE_BOOK)
    assert asked(loader, text="")["words"]["reads"] == []


def test_every_word_of_the_demos_captions_is_read():
    """Words for subjects, sizes, places and times, and the colours."""
    said = [phrase for group in (*captions._THINGS, *captions._SIZES, *captions._PLACES, *captions._TIMES)
            for phrase in group]  # fmt: skip
    words = asked(HARMON, text=" ".join([*said, *picture_book.COLOURS]))["words"]
    assert words["strange"] == [] and {"cottage", "tiny", "dusk"} <= {*words["reads"]}


def test_only_a_model_with_a_vocabulary_of_words_reads_words():
    """The first of several; a MAR reads labels, and an official model, or a file that is not here, any word."""
    assert asked(DEMO, text="boat")["words"] is None and asked(text="boat")["words"] is None
    assert asked(("FastARLoadJanus", "janus-pro-1b"), text="boat")["words"] is None
    assert asked(("FastARLoadHarmon", "nothing.safetensors"), DEMO, HARMON, text="boat")["words"]["reads"] == ["boat"]
    assert words_of(object(), ["boat"]) is None


def test_a_negative_prompt_is_offered_where_a_model_reads_one():
    """Also where no model is connected, or one that is not known."""
    janus, bitdance = ("FastARLoadJanus", "janus-pro-1b"), ("FastARLoadBitDance", "bitdance-14b-64x")
    assert asked(HARMON)["negative"] and asked(janus, HARMON)["negative"] and asked()["negative"]
    assert asked(("OtherLoader", "x"))["negative"] and asked(("FastARLoadNextStep", "nextstep-1.1"))["negative"]
    assert not asked(janus)["negative"] and not asked(janus, bitdance)["negative"] and not asked(TAR)["negative"]


def test_names_for_the_menu_of_class_label():
    imagenet = list(label_sets()["imagenet-1k"])
    assert asked(DEMO)["labels"] == asked(DEMO, ("FastARLoadLlamaGen", "demo-par"))["labels"] == list(PICTURE_BOOK)
    assert asked(OFFICIAL)["labels"] == imagenet
    both = asked(OFFICIAL, DEMO)["labels"]
    assert both[:10] == list(PICTURE_BOOK) and {*both} == {*imagenet, *PICTURE_BOOK}
    # What the widget says, whatever the model.
    assert asked(OFFICIAL, label_set="picture-book")["labels"] == list(PICTURE_BOOK)
    assert asked(label_set="imagenet-1k")["labels"] == imagenet
    # Not known: without a model, with a file that does not say it.
    assert asked()["labels"] is None and asked(DEMO, ("FastARLoadMAR", "nothing.pt"))["labels"] is None
    assert asked(DEMO, label_set="auto")["labels"] == list(PICTURE_BOOK)


def test_the_subject_that_a_word_is_meant_for():
    wanted = {"boats": "boat", "SUNSETT": "sunset", "mountain": "mountains", "cats": "cat", "dog": "", "": ""}
    assert {word: subject_like(word) for word in wanted} == wanted
    assert subject_like("x" * 100_000) == ""


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"loaders": 3}', b'{"loaders": [3, null, {"inputs": 4}]}',
                                  b'{"loaders": [{"class_type": "FastARLoadMAR", "inputs": {"checkpoint": []}}]}',
                                  b'{"label_set": ["a"], "text": {"a": 1}}'])  # fmt: skip
def test_a_broken_request_is_answered(body):
    status, found = vocabulary.answer(body)
    if status == 400:
        assert found["error"]
        return
    assert found.pop("negative") in (True, False) and found == {"labels": None, "words": None}
