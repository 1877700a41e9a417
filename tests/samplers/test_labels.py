"""Class labels, and the registry of samplers."""

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.training import picture_book
from fastar_nodes.runs.labels import label_sets, resolve_labels
from fastar_nodes.runs.registry import FAMILIES, SAMPLERS, find
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from hypothesis import given
from hypothesis import strategies as st


def test_the_sets_are_complete_and_unambiguous():
    sets = label_sets()
    assert sets["picture-book"] == picture_book.LABELS
    imagenet = sets["imagenet-1k"]
    assert len(imagenet) == 1000 == len({name.lower() for name in imagenet})
    assert all(name and name == name.strip() and "," not in name and name.isascii() for name in imagenet)
    # Well-known ids, as a guard against a shifted list.
    known = {0: "tench", 134: "crane (bird)", 207: "golden retriever", 388: "giant panda", 517: "crane (machine)"}
    known |= {638: "maillot (swimsuit)", 639: "maillot (tank suit)", 980: "volcano", 999: "toilet tissue"}
    assert {i: imagenet[i] for i in known} == known


def test_a_subject_is_the_one_name_of_all_images():
    """What a comparison calls its images: "another cat"."""
    subjects = {"cat": "cat", "cat, cat": "cat", "cat, boat": ""}
    assert {text: resolve_labels(text, "picture-book").subject for text in subjects} == subjects
    assert resolve_labels("crane (bird)", "imagenet-1k").subject == "crane"
    assert from_ids((3,)).subject == "", "a bare number is no name"
    assert PromptCondition(("a red boat",)).subject == ""


@given(st.integers(0, 999))
def test_a_name_and_its_id_are_the_same(number):
    name = label_sets()["imagenet-1k"][number]
    assert resolve_labels(name.upper(), "imagenet-1k") == resolve_labels(f" {number} ", "imagenet-1k")
    assert resolve_labels(name.replace(" ", "_"), "imagenet-1k").labels == (number,)


def test_several_labels_and_repeats():
    condition = resolve_labels("Cat, 3\nBOAT;\n", "picture-book", repeat=2)
    assert condition.labels == (9, 9, 3, 3, 7, 7) and condition.names[::2] == ("cat", "fish", "boat")
    assert condition.label_set == "picture-book"
    bare = resolve_labels("5, 123456", "")
    assert bare.labels == (5, 123456) and bare.names == ("5", "123456") and bare.label_set == ""


@pytest.mark.parametrize(
    ("text", "label_set", "named"),
    [
        ("golden retriver", "imagenet-1k", ("golden retriever",)),
        ("crane", "imagenet-1k", ("crane (bird)", "crane (machine)")),
        ("corgi", "imagenet-1k", ("Pembroke Welsh corgi", "Cardigan Welsh corgi")),
        ("a red crane", "imagenet-1k", ("the closest names: crane (bird), crane (machine), ",)),
        ("tabyb", "imagenet-1k", ("the closest names: tabby",)),
        ("qqqqqq", "imagenet-1k", ("0 to 999",)),
        ("caat", "picture-book", (" cat;",)),
        ("10", "picture-book", ("'10'", "0 to 9")),
        ("-1", "", ("'-1'",)),
        ("cat", "", ("class ids",)),
        (" ,\n", "picture-book", ()),
    ],
)
def test_what_is_no_label_is_answered_with_the_closest_names(text, label_set, named):
    with pytest.raises(UserError, match="^where: ") as told:
        resolve_labels(text, label_set, field="where")
    assert all(words in str(told.value) for words in named), told.value


def test_an_unknown_label_set_and_no_images_are_refused():
    with pytest.raises(UserError, match="^label_set: .*coco.* picture-book, imagenet-1k"):
        resolve_labels("cat", "coco")
    with pytest.raises(UserError, match="^label: 0 images"):
        resolve_labels("1", "", repeat=0)


def test_samplers_by_name():
    for name, entry in SAMPLERS.items():
        assert find(f" {name.upper()} ") is entry and entry.name == name
        assert all(entry.demos(family) for family in entry.families if FAMILIES[family].demo)
    assert find("lazymar + FastHybrid") is SAMPLERS["fasthybrid+lazymar"], "the order of the parts does not matter"
    for name in ("fasthybrid+cspd", "mulosd+zipar"):
        with pytest.raises(UserError, match="^samplers: there is no sampler .* Choose one of mar, fasthybrid"):
            find(name)
    with pytest.raises(
        UserError, match=r"no sampler 'FastHybird'; did you mean fasthybrid\? Choose one of mar, fasthybrid"
    ):
        find(" FastHybird ")
    for name in ("", "ddim", "mar+ddim"):
        with pytest.raises(UserError, match="^samplers: there is no sampler '.*'; choose one of mar, fasthybrid"):
            find(name)
