"""Conditions of token models: packed for the network, or refused in a sentence."""

import dataclasses

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.samplers.conditioning import ClassCondition, CodeCondition, FeatureCondition, TextCondition, from_ids
from fastar_nodes.samplers.tokens.prepare import prepare
from tokens_reference import tiny_gpt

CPU = torch.device("cpu")


def features(*counts: int, width: int = 6) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((n, width), float(i + 1)) for i, n in enumerate(counts))


def test_texts_of_unlike_length_stand_from_the_left():
    made = prepare(tiny_gpt("text"), TextCondition(features(2, 5), ("a", "b")), CPU)
    assert made.entries.shape == (2, 5, 6) and made.lengths.tolist() == [2, 5]
    assert made.entries[0, :2].eq(1).all() and not made.entries[0, 2:].any() and made.entries[1].eq(2).all()
    assert prepare(tiny_gpt("text"), TextCondition(features(3, 3), ("a", "b")), CPU).lengths is None


def test_labels_pass_as_they_are():
    made = prepare(tiny_gpt(), from_ids((4, 0)), CPU)
    assert made.entries.tolist() == [4, 0] and made.lengths is None


@pytest.mark.parametrize(
    ("kind", "condition", "found"),
    [
        ("text", TextCondition((), ()), "condition: it has no image"),
        ("text", TextCondition(features(0), ("",)), "condition: .* neither features nor codes"),
        ("text", TextCondition(features(8), ("",)), "condition: .* 8 tokens, .* 7"),
        ("text", TextCondition(features(3, width=5), ("",)), "condition: .* width of 5, .* width of 6"),
        ("text", FeatureCondition(features(3), ("",)), "condition: .* semantic features"),
        ("features", CodeCondition((torch.tensor([1]),), ("",)), "condition: .* semantic codes"),
        ("features", FeatureCondition(features(3, 4), ("", "")), "condition: .* codes, 3 to 4;"),
        ("features", FeatureCondition(features(50), ("",)), "condition: 50 codes are too many for tiny .* at most 49"),
        ("class", ClassCondition((9,), ("nine",)), "label 9 "),
    ],
)
def test_what_does_not_fit_is_refused(kind, condition, found):
    with pytest.raises(UserError, match=found):
        prepare(tiny_gpt(kind), condition, CPU)


def test_as_many_rows_as_the_model_reads_fit():
    assert prepare(tiny_gpt("text"), TextCondition(features(7), ("",)), CPU).entries.shape == (1, 7, 6)
    # 49 condition rows and 15 tokens (the last one is never fed) take the 64 positions.
    assert prepare(tiny_gpt("features"), FeatureCondition(features(49), ("",)), CPU).entries.shape == (1, 49, 6)


def test_a_grid_that_leaves_no_room_for_any_code_is_blamed_itself():
    model = dataclasses.replace(tiny_gpt("features"), grid=9)
    with pytest.raises(UserError, match="^grid: a condition of 3 codes, .* 9 x 9 image tokens, needs 83 positions"):
        prepare(model, FeatureCondition(features(3), ("",)), CPU)


def test_labels_of_another_list_are_refused():
    model = dataclasses.replace(tiny_gpt(), label_set="picture-book")
    with pytest.raises(UserError, match="labels are from the list imagenet-1k, .* picture-book"):
        prepare(model, ClassCondition((1,), ("tench",), "imagenet-1k"), CPU)
