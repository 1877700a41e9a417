"""Values at nodes of others in a real ComfyUI: ours at core's nodes behind a switch without types, and those of another
pack at ours. Every run ends in a sentence.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from comfy_host import Comfy, Missing, Rejected, graph, widgets

USER_ERROR = "fastar.UserError"
# A pack with values of its own, which it makes of Python's words for their attributes.
PACK = """
from types import SimpleNamespace
import numpy, torch

class Foreign:
    CATEGORY, FUNCTION, RETURN_TYPES = "example", "make", ("*",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"attributes": ("STRING", {})}}

    def make(self, attributes):
        names = {"numpy": numpy, "torch": torch, "dict": dict}
        return (SimpleNamespace(**eval(attributes, names)),)

NODE_CLASS_MAPPINGS = {"ExampleForeign": Foreign}
"""


class WithPack(Comfy):
    """A server with that pack."""

    def _copy_example(self) -> None:
        super()._copy_example()
        folder = self.base / "custom_nodes" / "example-pack"
        folder.mkdir()
        (folder / "__init__.py").write_text(PACK, encoding="utf-8")


@pytest.fixture(scope="module")
def comfy() -> Iterator[Comfy]:
    try:
        server = WithPack()
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    with server:
        yield server


Prompt = dict[str, dict[str, Any]]


def refused(comfy: Comfy, prompt: Prompt) -> str:
    """The sentence with which a run ends."""
    entry = comfy.wait(comfy.queue(prompt))
    assert comfy.exception_type(entry) == USER_ERROR, comfy.failure(entry)
    return comfy.failure(entry)


LOADER = graph()["1"]["inputs"]
MODEL = ("FastARLoadMAR", 0, LOADER)
VAE = ("FastARLoadMAR", 1, LOADER)
LABELS = ("FastARClassLabel", 0, {})
CACHE = ("FastARLazyMARCache", 0, {})
SIZE = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}


def behind_a_switch(value: tuple[str, int, dict[str, Any]], kind: str, inputs: dict[str, Any], shows: str) -> Prompt:
    """A value of ours behind core's switch, at a node of core, whose output goes to one that shows it."""
    maker, output, own = value
    shown: Prompt = {
        "LATENT": {"class_type": "SaveLatent", "inputs": {"samples": ["core", 0], "filename_prefix": "x"}},
        "IMAGE": {"class_type": "PreviewImage", "inputs": {"images": ["core", 0]}},
        "ANY": {"class_type": "PreviewAny", "inputs": {"source": ["core", 0]}},
    }
    return {
        "made": {"class_type": maker, "inputs": {**widgets(maker), **own}},
        "switch": {
            "class_type": "ComfySwitchNode",
            "inputs": {"switch": True, "on_true": ["made", output], "on_false": ["made", output]},
        },
        "size": SIZE,
        "core": {"class_type": kind, "inputs": inputs},
        "shown": shown[shows],
    }


KSAMPLER = {
    "model": ["switch", 0],
    "positive": ["switch", 0],
    "negative": ["switch", 0],
    "latent_image": ["size", 0],
    "seed": 1,
    "steps": 1,
    "cfg": 1.0,
    "sampler_name": "euler",
    "scheduler": "normal",
    "denoise": 1.0,
}
IN_SWITCH = ["switch", 0]
OURS_AT_CORE = {
    "a model at KSampler": (MODEL, "KSampler", KSAMPLER, "LATENT", "model: this node cannot read a model of FastAR"),
    "a model at CLIP Text Encode": (MODEL, "CLIPTextEncode", {"clip": IN_SWITCH, "text": "x"}, "ANY", "model: "),
    "a model at VAE Decode": (MODEL, "VAEDecode", {"vae": IN_SWITCH, "samples": ["size", 0]}, "IMAGE", "model: "),
    "a VAE at KSampler": (VAE, "KSampler", KSAMPLER, "LATENT", "vae: this node cannot read a vae of FastAR"),
    "labels at KSampler": (LABELS, "KSampler", KSAMPLER, "LATENT", "condition: this node cannot read a condition"),
    "labels at a node of conditionings": (
        LABELS,
        "ConditioningCombine",
        {"conditioning_1": IN_SWITCH, "conditioning_2": IN_SWITCH},
        "ANY",
        "condition: ",
    ),
    "labels at another": (LABELS, "ConditioningZeroOut", {"conditioning": IN_SWITCH}, "ANY", "condition: "),
    "labels as an image": (LABELS, "ImageInvert", {"image": IN_SWITCH}, "IMAGE", "condition: "),
    "labels as a latent": (LABELS, "LatentUpscale", None, "LATENT", "condition: "),
    "caches at KSampler": (CACHE, "KSampler", KSAMPLER, "LATENT", "cache: this node cannot read a cache of FastAR"),
}
UPSCALE = {"samples": IN_SWITCH, "upscale_method": "bilinear", "width": 64, "height": 64, "crop": "disabled"}


@pytest.mark.parametrize("case", OURS_AT_CORE)
def test_a_value_of_ours_at_a_node_of_core_is_a_sentence(comfy, case):
    value, kind, inputs, shows, words = OURS_AT_CORE[case]
    sentence = refused(comfy, behind_a_switch(value, kind, inputs or UPSCALE, shows))
    assert sentence.startswith(words) and "connect the" in sentence


FOREIGN = {
    "a tensor of labels": (
        "dict(kind='class', fastar_version=1, labels=torch.tensor([1]), names=['x'])",
        "condition: the attribute 'labels' must be a list of whole numbers from 0, but is a tensor [1]",
    ),
    "no names": (
        "dict(kind='class', fastar_version=1, labels=[1])",
        "condition: this FastAR class lacks the attribute 'names'",
    ),
    "a text that is a number": (
        "dict(kind='label text', fastar_version=1, text=3, repeat=1)",
        "condition: the attribute 'text' must be a text of at most 20000 characters, but is the number 3",
    ),
    "no version": (
        "dict(kind='class', labels=[1], names=['x'])",
        "condition: this object says that it is a FastAR class, but its attribute 'fastar_version' is not a",
    ),
    "a prompt with a negative": (
        "dict(kind='prompt', fastar_version=1, texts=['a cat'], unconditional='Draw nothing.')",
        "condition: demo MAR reads class labels, but the condition holds prompts; connect the node Class Label.",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_value_of_another_pack_at_a_node_of_ours_is_a_sentence(comfy, case):
    attributes, words = FOREIGN[case]
    sampler = {**widgets("FastARMARSampler"), "model": ["load", 0], "condition": ["made", 0]}
    prompt = {
        "load": {"class_type": "FastARLoadMAR", "inputs": LOADER},
        "made": {"class_type": "ExampleForeign", "inputs": {"attributes": attributes}},
        "draw": {"class_type": "FastARMARSampler", "inputs": sampler},
        "told": {"class_type": "FastARReport", "inputs": {"report": ["draw", 1], "format": "text"}},
        "see": {"class_type": "PreviewAny", "inputs": {"source": ["told", 0]}},
    }
    assert refused(comfy, prompt).startswith(words)


def test_a_report_of_another_pack_is_read_or_refused_in_a_sentence(comfy):
    def told(seconds: str) -> Prompt:
        made = "dict(kind='report', fastar_version=1, sampler='mar', model='x', settings={}, seed=1, images=1, "
        made += f"device='cpu', seconds={seconds}, maps=dict(step=numpy.zeros((1, 4, 4), int)))"
        return {
            "made": {"class_type": "ExampleForeign", "inputs": {"attributes": made}},
            "told": {"class_type": "FastARReport", "inputs": {"report": ["made", 0], "format": "text"}},
            "see": {"class_type": "PreviewAny", "inputs": {"source": ["told", 0]}},
        }

    assert "mar" in comfy.run(told("1.0"))["see"]["text"][0]
    sentence = refused(comfy, told("'1'"))
    assert sentence.startswith("report: the attribute 'seconds' must be a number from 0, but is the text '1'")


def test_a_missing_language_model_is_refused_before_anything_runs(comfy):
    with pytest.raises(Rejected, match="Required input is missing.*tar"):
        comfy.run(
            {
                "codes": {"class_type": "FastARTarPrompt", "inputs": widgets("FastARTarPrompt")},
                "see": {"class_type": "PreviewAny", "inputs": {"source": ["codes", 0]}},
            }
        )
