"""An image and a prompt in, and a question about an image, in a real ComfyUI with the recorded tiny Janus."""

import shutil

import fastar_nodes
import janus_images
import numpy as np
import pytest
from comfy_host import widgets
from safetensors.torch import load_file

FILE = "Janus-4o-tiny.safetensors"
PICTURE = janus_images.FOLDER / "edit/input_0.png"


@pytest.fixture(scope="module")
def model(comfy):
    """The model in the server's folder, and images in its input folder."""
    path = comfy.base / "models" / "fastar" / FILE
    janus_images.one_file(path)
    for i in range(2):
        shutil.copyfile(janus_images.FOLDER / f"edit/input_{i}.png", comfy.base / "input" / f"in_{i}.png")
    yield path
    path.unlink()


def node(kind, **inputs):
    return {"class_type": kind, "inputs": {**widgets(kind), **inputs}}


def prompt_of(picture, **further):
    """A graph that loads model 1 and image 2."""
    nodes = {
        "1": node("FastARLoadJanus", checkpoint=FILE, dtype="fp32", speed="plain"),
        "2": {"class_type": "LoadImage", "inputs": {"image": picture}},
    }
    return nodes | further


def edit(sampler="FastARLlamaGenSampler", **inputs):
    """The graph of an edit, saved by node 6."""
    sampled = {"model": ["1", 0], "condition": ["3", 0], "seed": 7, "cfg": 5.0, "top_k": 0, **inputs}
    return prompt_of(
        "in_0.png",
        **{
            "3": node("FastARImageAndPrompt", image=["2", 0], text="make it night", images=2, freedom=1.0),
            "4": node(sampler, **sampled),
            "5": {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0], "vae": ["1", 1]}},
            "6": {"class_type": "SaveImage", "inputs": {"images": ["5", 0], "filename_prefix": "edit"}},
        },
    )


def test_an_image_is_edited_as_in_python(comfy, model):
    images = comfy.run(edit())["6"]["images"]
    pipe = fastar_nodes.load(model, dtype="fp32", device="cpu")
    expected, _ = pipe("make it night", image=PICTURE, images=2, freedom=1.0, seed=7)
    assert len(images) == 2
    for shown, image in zip(images, expected, strict=True):
        assert np.abs(np.asarray(comfy.picture(shown)).astype(int) - np.asarray(image)).max() <= 1

    windows = comfy.run(edit(parallel=4))["6"]["images"]
    for shown, same in zip(images, windows, strict=True):
        assert np.array_equal(np.asarray(comfy.picture(shown)), np.asarray(comfy.picture(same)))
    assert len(comfy.run(edit("FastARZipARSampler"))["6"]["images"]) == 2


def test_a_question_is_answered(comfy, model):
    asked = node("FastARAskAboutImage", model=["1", 0], image=["2", 0], question="What is on the table?", seed=0)
    shown = {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}}
    outputs = comfy.run(prompt_of("in_1.png", **{"3": asked, "4": shown}))
    tokens = load_file(janus_images.FOLDER / "understand/io.safetensors")["u2.tokens"]
    assert outputs["4"]["text"][0] == janus_images.tiny_editor().detokenize(tokens.tolist()).strip()


def test_a_janus_pro_is_refused(comfy, model):
    pro = model.with_name("Janus-Pro-7B.safetensors")
    janus_images.one_file(pro, "Janus-Pro-7B")
    prompt = edit()
    prompt["1"]["inputs"]["checkpoint"] = pro.name
    assert "was not trained to edit" in comfy.complaint(prompt)
    pro.unlink()
