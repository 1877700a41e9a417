"""*auto* beside *plain* in a real ComfyUI: every sampler draws the same images, for prompts of changing sizes, behind
an interrupt and after all models have been unloaded.

On a CPU *auto* is *plain* and one prompt a sampler is enough. COMFYUI_DEVICE=cuda runs it on a graphics card, where
*auto* records CUDA graphs at the second prompt of a size; COMFYUI_OPTIONS chooses the memory management, for example
``--novram``.
"""

import time
from typing import NamedTuple

import numpy as np
import pytest
from comfy_device import ON_CARD
from comfy_host import widgets

ROUNDS = 5 if ON_CARD else 1


class Case(NamedTuple):
    """A loader with its checkpoint, and a sampler with settings that make it short."""

    loader: str
    checkpoint: str
    sampler: str
    settings: dict[str, object] = {}
    draft: str = ""  # the draft model's checkpoint


SHORT = {"steps": 12, "diffusion_steps": 12}
MAR = ("FastARLoadMAR", "demo")
LLAMAGEN = ("FastARLoadLlamaGen", "demo-llamagen")
CASES = {
    "mar": Case(*MAR, "FastARMARSampler", SHORT),
    "lazymar": Case(*MAR, "FastARLazyMARSampler", SHORT),
    "fasthybrid": Case(*MAR, "FastARFastHybridSampler", SHORT),
    "gtr": Case(*MAR, "FastARGtRSampler", SHORT),
    "cspd": Case(*MAR, "FastARCSpDSampler", SHORT, draft="demo-draft"),
    "harmon": Case("FastARLoadHarmon", "demo-hybrid", "FastARMARSampler", SHORT),
    "llamagen": Case(*LLAMAGEN, "FastARLlamaGenSampler"),
    "parallel": Case(*LLAMAGEN, "FastARLlamaGenSampler", {"parallel": 16}),
    "zipar": Case(*LLAMAGEN, "FastARZipARSampler"),
    "par": Case("FastARLoadLlamaGen", "demo-par", "FastARPARSampler"),
    "bitdance": Case("FastARLoadBitDance", "demo-bitdance", "FastARBitDanceSampler", {"width": 64, "height": 64}),
}


def prompt(case, seed, images=1):
    """An API prompt that draws images plain and with auto."""
    nodes = {"condition": condition(case, images)}
    for speed in ("plain", "auto"):
        load = {**widgets(case.loader), "checkpoint": case.checkpoint, "decoder": "auto", "speed": speed}
        nodes[f"load {speed}"] = (case.loader, load)

        sampler = {**widgets(case.sampler), **case.settings, "seed": seed, "condition": ["condition", 0]}
        sampler["target" if case.draft else "model"] = [f"load {speed}", 0]
        if case.draft:
            nodes[f"draft {speed}"] = (case.loader, {**load, "checkpoint": case.draft})
            sampler["draft"] = [f"draft {speed}", 0]
        nodes[f"draw {speed}"] = (case.sampler, sampler)

        nodes[f"decode {speed}"] = ("VAEDecode", {"samples": [f"draw {speed}", 0], "vae": [f"load {speed}", 1]})
        nodes[f"see {speed}"] = ("PreviewImage", {"images": [f"decode {speed}", 0]})
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


def condition(case, images):
    """What a case draws: a label, or for Harmon a prompt."""
    if case.loader == "FastARLoadHarmon":
        return "FastARPrompt", {**widgets("FastARPrompt"), "prompts": "\n".join(["a yellow house at night"] * images)}

    label = {"labels": "cat", "label_set": "picture-book", "images_per_label": images, "add_label": "none"}
    return "FastARClassLabel", label


def expect_equal(comfy, name, seed, images=1):
    """Draw with both speeds and compare every image."""
    outputs = comfy.run(prompt(CASES[name], seed, images))
    plain, auto = (
        [np.asarray(comfy.picture(shown)) for shown in outputs[f"see {speed}"]["images"]] for speed in ("plain", "auto")
    )
    assert len(plain) == len(auto) == images
    assert all(image.std() > 5 for image in plain)
    for one, other in zip(plain, auto, strict=True):
        assert np.array_equal(one, other), f"{name}, seed {seed}, {images} images"


@pytest.mark.parametrize("round", range(ROUNDS))
@pytest.mark.parametrize("name", CASES)
def test_auto_draws_the_images_of_plain(comfy, name, round):
    expect_equal(comfy, name, 100 + round // 3, 1 + round % 2)


@pytest.mark.parametrize("name", ["mar", "llamagen"])
def test_an_interrupt_changes_nothing(comfy, name):
    begun = comfy.queue(prompt(CASES[name], 999, 4))
    while comfy.get("/queue")["queue_pending"]:
        time.sleep(0.05)
    time.sleep(0.5)
    comfy.post("/interrupt", {})
    assert comfy.failure(comfy.wait(begun)) == "interrupted"

    expect_equal(comfy, name, 1000)


def test_unloading_changes_nothing(comfy):
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(1.5)
    for seed in range(3 if ON_CARD else 1):
        for name in ("mar", "llamagen", "bitdance"):
            expect_equal(comfy, name, seed)
