"""NextStep in a real ComfyUI, on the tiny network: a prompt, an image that is changed, an area that is regenerated."""

import io
import urllib.parse
from typing import Any

import numpy as np
from PIL import Image

LOAD = {"class_type": "FastARLoadNextStep", "inputs": {"checkpoint": "NextStep-1-Large-Edit tiny"}}
SMALL = {"seed": 7, "preset": "custom", "diffusion_steps": 3, "cfg": 2.0, "cfg_img": 1.5, "width": 32, "height": 24}


def graph(condition: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A loader, a condition, the sampler, VAE Decode and Save Image."""
    sockets = {"model": ["load", 0], "condition": ["condition", 0]}
    return {
        "load": LOAD,
        "condition": condition,
        "draw": {"class_type": "FastARNextStepSampler", "inputs": {**SMALL, **sockets, **more}},
        "see": {"class_type": "VAEDecode", "inputs": {"samples": ["draw", 0], "vae": ["load", 1]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["see", 0], "filename_prefix": "nextstep"}},
    }


def images(comfy: Any, prompt: dict[str, Any]) -> np.ndarray:
    """The images that a prompt saves, uint8 [B, H, W, 3]."""
    found = []
    for file in comfy.run(prompt)["save"]["images"]:
        with Image.open(io.BytesIO(comfy.bytes(f"/view?{urllib.parse.urlencode(file)}"))) as image:
            found.append(np.asarray(image.convert("RGB")))
    return np.stack(found)


TEXT = {"class_type": "FastARPrompt", "inputs": {"text": "a red house", "negative": "blurry", "images": 2}}


def test_a_prompt_draws_images_of_the_size_that_was_asked_for(comfy):
    found = images(comfy, graph(TEXT))
    assert found.shape == (2, 24, 32, 3) and not np.array_equal(found[0], found[1])
    one = images(comfy, graph({**TEXT, "inputs": {**TEXT["inputs"], "images": 1}}, first_image=1))
    assert np.abs(one[0].astype(int) - found[1]).max() <= 1


def test_an_image_is_changed_by_a_prompt(comfy):
    change = {"class_type": "FastARImageAndPrompt", "inputs": {"image": ["picture", 0], "text": "make it blue"}}
    prompt = graph(change) | {"picture": {"class_type": "LoadImage", "inputs": {"image": "example.png"}}}
    found = images(comfy, prompt)
    plain = images(comfy, graph({**TEXT, "inputs": {"text": "make it blue"}}))
    assert found.shape == (1, 24, 32, 3) and not np.array_equal(found, plain)


def test_an_area_is_regenerated(comfy):
    prompt = graph(TEXT)
    prompt["start"] = {**prompt["draw"]}
    prompt["area"] = {"class_type": "SolidMask", "inputs": {"value": 0.0, "width": 32, "height": 24}}
    prompt["part"] = {"class_type": "SolidMask", "inputs": {"value": 1.0, "width": 32, "height": 8}}
    prompt["mask"] = {
        "class_type": "MaskComposite",
        "inputs": {"destination": ["area", 0], "source": ["part", 0], "x": 0, "y": 16, "operation": "add"},
    }
    edited = {"latent_image": ["start", 0], "mask": ["mask", 0], "seed": 8}
    prompt["draw"] = {**prompt["draw"], "inputs": {**prompt["draw"]["inputs"], **edited}}
    before, after = images(comfy, graph(TEXT)), images(comfy, prompt)
    assert not np.array_equal(before[:, 16:], after[:, 16:])
