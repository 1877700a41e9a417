"""Messages name what is on a socket in the user's words, not by Python's classes."""

import copy
import pickle
import re

import pytest
import tiny
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import compare, conditioning, editing, running, samplers
from fastar_nodes.nodes.caches import CachePlan
from fastar_nodes.samplers.conditioning import (
    PromptCondition,
    expect_kind,
    from_ids,
)

ROWS = (torch.zeros(2, 4),)
PROMPT = PromptCondition(("a cat",))


WRONG = {
    "a prompt at a MAR of labels": lambda: tiny.sample(samplers.MARSampler, condition=PROMPT),
    "a report in the model's place": lambda: running.expect_loaded(tiny.a_report("mar"), "model", "masked"),
    "a token model at a MAR sampler": lambda: running.expect_loaded(tiny.a_gpt(), "model", "masked"),
    "a BitDance at a MAR sampler": lambda: running.expect_loaded(tiny.a_block(), "model", "masked"),
    "a MAR at BitDance Sampler": lambda: running.expect_loaded(tiny.a_mar(), "model", "blocks"),
    "labels at Token Map": lambda: compare.TokenMap.execute(from_ids([1])),
    "labels at Tar Prompt": lambda: conditioning.TarPrompt.execute(from_ids([1]), "a", 1),
    "labels as the image": lambda: conditioning.ImageToCodes.execute(from_ids([1]), ta_tok="demo-ta-tok"),
    "a prompt at a model of labels": lambda: expect_kind(PROMPT, "class", "demo"),
}


@pytest.mark.parametrize("case", WRONG)
def test_no_message_about_a_wrong_wire_names_a_class(case):
    with pytest.raises(UserError) as told:
        WRONG[case]()
    sentence = str(told.value)
    assert not re.search(
        r"\b[A-Z][a-z]+(Condition|Model|Text|Report|Plan|Settings)\b|\bLoaded\b|\bReport\b", sentence
    ), sentence
    assert "connect" in sentence


OURS = {
    "model": lambda: tiny.a_mar(),
    "vae": lambda: tiny.a_vae(),
    "report": lambda: tiny.a_report("mar"),
    "cache": lambda: CachePlan("fast", {}),
    "crop": lambda: editing.Cropped(ROWS[0], ROWS[0], None),
    "condition": lambda: PROMPT,
}
# What nodes of core do with a MODEL, a CLIP or a VAE; a CONDITIONING; a LATENT; an IMAGE.
USES = {
    "get_model_object": lambda value: value.get_model_object("latent_format"),
    "tokenize": lambda value: value.tokenize("a cat"),
    "movedim": lambda value: value.movedim(-1, 1),
    "iteration": lambda value: [entry for entry in value],
    "an entry": lambda value: value["samples"],
    "a sum": lambda value: [] + value,
    "a difference": lambda value: 1.0 - value,
}


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("use", USES)
def test_a_value_of_ours_at_a_node_of_others_is_a_sentence(kind, use):
    if kind == "vae" and use not in ("get_model_object", "tokenize", "movedim"):
        pytest.skip("a VAE of core's class")
    with pytest.raises(UserError, match=f"^{kind}: this node cannot read a {kind} of FastAR .*; connect"):
        USES[use](OURS[kind]())


@pytest.mark.parametrize("kind", OURS)
def test_a_value_of_ours_answers_what_python_asks(kind):
    value = OURS[kind]()
    assert not hasattr(value, "get_model_object") and getattr(value, "tokenize", 3) == 3
    assert not hasattr(value, "__array__") and bool(value)
    if kind not in ("model", "vae", "crop"):
        assert pickle.loads(pickle.dumps(value)) == value and copy.deepcopy(value).kind == value.kind
    with pytest.raises(TypeError):
        iter(value)
