"""The demo hybrid in a real ComfyUI: a prompt under every MAR sampler."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from comfy_host import defaults

# Sampler node to its name in reports.
SAMPLERS = {
    "FastARMARSampler": "mar",
    "FastARFastHybridSampler": "fasthybrid",
    "FastARLazyMARSampler": "lazymar",
}


def prompt(info: dict[str, Any], sampler: str, text: str = "a red boat at sunset") -> dict[str, Any]:
    """A graph with one sampler: loader 1, prompt 2, sampler 3, decoder 4, picture 5, report 6 and 7."""

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        values = defaults(info[kind]) if kind.startswith("FastAR") else {}
        return {"class_type": kind, "inputs": values | inputs}

    return {
        "1": node("FastARLoadHybrid", checkpoint="demo-hybrid"),
        "2": node("FastARPrompt", text=text, images=2),
        "3": node(sampler, model=["1", 0], condition=["2", 0], seed=11),
        "4": node("VAEDecode", samples=["3", 0], vae=["1", 1]),
        "5": node("SaveImage", images=["4", 0], filename_prefix="hybrid"),
        "6": node("FastARReport", report=["3", 1], format="json"),
        "7": node("PreviewAny", source=["6", 0]),
    }


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_red_boat_is_red(comfy, info, sampler):
    outputs = comfy.run(prompt(info, sampler))
    (report,) = json.loads(outputs["7"]["text"][0])["runs"]
    assert report["sampler"] == SAMPLERS[sampler] and report["counts"]["prompt_rows"] > 0
    for image in outputs["5"]["images"]:
        rgb = np.asarray(comfy.picture(image), int)
        assert rgb.shape == (64, 64, 3)
        red = (rgb[..., 0] > 150) & (rgb[..., 1] < 90) & (rgb[..., 2] < 90)
        assert red.mean() > 0.02, "no red hull"


def test_a_label_on_a_model_of_prompts_is_refused(comfy, info):
    graph = prompt(info, "FastARMARSampler")
    graph["2"] = {"class_type": "FastARClassLabel", "inputs": defaults(info["FastARClassLabel"])}
    assert comfy.complaint(graph).startswith("condition: ") and "connect the output of Prompt" in comfy.complaint(graph)
