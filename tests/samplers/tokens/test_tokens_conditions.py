"""Conditions of token models: packed for the network, or refused in a sentence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.samplers.conditioning import CodeCondition, Condition, FeatureCondition, TextCondition, from_ids
from fastar_nodes.samplers.settings import knobs, make
from fastar_nodes.samplers.tokens.conditioning import _check_codes, prepare
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings, PARSettings, TokenSettings, ZipARSettings
from tokens_reference import tiny_gpt

CPU = torch.device("cpu")


def features(*counts: int, width: int = 6) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((n, width), float(i + 1)) for i, n in enumerate(counts))


def test_texts_of_unlike_length_stand_from_the_left():
    made = prepare(tiny_gpt("text"), TextCondition(features(2, 5), ("a", "b")), CPU)
    assert made.condition.shape == (2, 5, 6) and made.lengths.tolist() == [2, 5]
    assert made.condition[0, :2].eq(1).all() and not made.condition[0, 2:].any() and made.condition[1].eq(2).all()
    assert prepare(tiny_gpt("text"), TextCondition(features(3, 3), ("a", "b")), CPU).lengths is None


def test_labels_pass_as_they_are():
    made = prepare(tiny_gpt(), from_ids((4, 0)), CPU)
    assert made.condition.tolist() == [4, 0] and made.lengths is None


@pytest.mark.parametrize(
    ("kind", "condition", "sentence"),
    [
        ("text", TextCondition((), ()), "condition: it is empty"),
        ("text", TextCondition(features(0), ("",)), "condition: an image has no rows at all"),
        ("text", TextCondition(features(8), ("",)), "condition: a text has 8 tokens, tiny reads 7; shorten it"),
        ("text", TextCondition(features(3, width=5), ("",)), "condition: its rows hold 5 numbers, tiny reads 6"),
        (
            "text",
            FeatureCondition(features(3), ("",)),
            "condition: it holds semantic features, tiny is conditioned on text",
        ),
        (
            "features",
            CodeCondition((torch.tensor([1]),), ("",)),
            "it holds semantic codes, tiny is conditioned on semantic features",
        ),
        ("features", FeatureCondition(features(3, 4), ("", "")), "condition: images have 3 to 4 codes"),
        (
            "features",
            FeatureCondition(features(50), ("",)),
            "grid: 4 x 4 tokens behind 50 condition rows need 65 positions, tiny has 64",
        ),
        ("class", Condition((9,), ("nine",)), "label 9 is outside the model's 0 to 4"),
    ],
)
def test_what_does_not_fit_is_refused(kind, condition, sentence):
    with pytest.raises(UserError, match=sentence):
        prepare(tiny_gpt(kind), condition, CPU)


def test_labels_of_another_list_are_refused():
    model = dataclasses.replace(tiny_gpt(), label_set="picture-book")
    with pytest.raises(UserError, match="labels are from imagenet-1k, the model was trained on picture-book"):
        prepare(model, Condition((1,), ("tench",), "imagenet-1k"), CPU)


@pytest.mark.parametrize("kind", [LlamaGenSettings, PARSettings, ZipARSettings])
def test_settings_begin_alike_and_every_default_is_allowed(kind):
    names = [f.name for f in dataclasses.fields(kind)]
    assert (
        names[:5]
        == [f.name for f in dataclasses.fields(TokenSettings)]
        == ["cfg", "temperature", "top_k", "top_p", "cfg_interval"]
    )
    defaults = {name: default for name, (default, _) in knobs(kind).items()}
    assert make(kind, defaults) == kind()
    for name, value in {"cfg": -0.1, "top_p": 1.1, "temperature": -1, "top_k": -2, "cfg_interval": -2}.items():
        with pytest.raises(UserError, match=f"^{name}: .* outside"):
            make(kind, {name: value})


@pytest.mark.parametrize("entries", [(), (torch.zeros(0, dtype=torch.int64),)])
def test_codes_that_are_none_are_refused(entries):
    with pytest.raises(UserError, match="^condition: (it is empty|an image has no rows)"):
        _check_codes(CodeCondition(entries, ("",) * len(entries)), 10, "tiny")


@pytest.mark.parametrize(
    ("codes", "found"), [(([1], [10]), 10), (([10], [1]), 10), (([-1], [3]), -1), (([3], [-1]), -1)]
)
def test_a_code_out_of_range_is_refused_in_any_image(codes, found):
    with pytest.raises(UserError, match=f"^condition: code {found} is outside tiny's 0 to 9"):
        _check_codes(CodeCondition(tuple(map(torch.tensor, codes)), ("", "")), 10, "tiny")
    _check_codes(CodeCondition((torch.tensor([0]), torch.tensor([9])), ("", "")), 10, "tiny")
