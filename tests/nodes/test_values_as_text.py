"""Core's Preview as Text writes str() of a value: each of ours is a sentence, or a report, and not a network."""

import fake_comfy  # noqa: F401  before the nodes
import pytest
import torch
from fastar_nodes.nodes import caches, conditioning, loaders, samplers
from fastar_nodes.samplers.conditioning import CodeCondition, FeatureCondition, PromptCondition, TextCondition, from_ids
from tiny import a_drawer, a_gpt, a_mar, a_prompt, dropped


def loaded(node, checkpoint: str):
    return node.execute(**dropped(node, checkpoint=checkpoint, dtype="fp32")).result


def label(**about):
    node = conditioning.ClassLabel
    return node.execute(**dropped(node, **about)).result[0]


ROWS = (torch.zeros(2, 3),)
VALUES = {
    "a MAR": (lambda: loaded(loaders.LoadMAR, "demo")[0], "The model demo MAR, with "),
    "its decoder": (
        lambda: loaded(loaders.LoadMAR, "demo")[1],
        "The autoencoder demo KL, stride 8, enlarges 4 x; it decodes latents to images of 256 x 256 pixels.",
    ),
    "a language model": (lambda: loaded(loaders.LoadTar, "demo-tar")[0], "The model demo Tar, with "),
    "a token model": (a_gpt, "The model tiny, with "),
    "a de-tokenizer": (a_drawer, "The model tiny large, with "),
    "labels of any model": (
        lambda: label(labels="cat,boat", images_per_label=2),
        "Class labels, 2 images of each: cat, boat.",
    ),
    "labels of a set": (
        lambda: label(labels="cat, boat", label_set="picture-book"),
        "Class labels for 2 images: cat, boat.",
    ),
    "ids": (lambda: from_ids(range(12)), "Class labels for 12 images: 0, 1, 2, 3, 4, 5, 6, 7 and 4 more."),
    "a prompt": (lambda: PromptCondition(("a red boat",)), "Prompts for 1 image: a red boat."),
    "a text": (lambda: TextCondition(ROWS, ("a red boat",)), "Text for 1 image: a red boat."),
    "features": (lambda: FeatureCondition(ROWS, ("image 1",)), "Semantic features for 1 image: image 1."),
    "codes": (lambda: CodeCondition((torch.zeros(2),), ("a cat",)), "Semantic codes for 1 image: a cat."),
    "Tar's codes": (a_prompt, "Semantic codes for 2 images: a red boat, a red boat."),
    "caches": (
        lambda: samplers.LazyMARCache.execute(**dropped(samplers.LazyMARCache, preset="fast")).result[0],
        "LazyMAR's caches, preset fast: ",
    ),
    "caches without numbers": (lambda: caches.CachePlan("exact", {}), "LazyMAR's caches, preset exact: its own "),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_on_a_socket_is_a_sentence(name):
    make, begins = VALUES[name]
    text = str(make())
    assert text.startswith(begins) and text.endswith(".") and len(text) < 300 and "\n" not in text, text
    assert "(" not in text, "no repr of an object"


def test_a_name_of_a_stranger_stays_on_its_line():
    model = a_mar()
    model.model = type(model.model)(model.model.net, "a\nb" * 500)
    assert "\n" not in str(model) and len(str(model)) < 300
    assert len(str(PromptCondition(("long " * 4000,)))) < 300
