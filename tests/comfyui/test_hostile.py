"""Invalid prompts that pass the checks of ComfyUI: each must fail with one sentence that names the field."""

from __future__ import annotations

import pytest
from comfy_host import defaults, graph

INT = {"class_type": "PrimitiveInt"}
FLOAT = {"class_type": "PrimitiveFloat"}
MASK = {"class_type": "SolidMask", "width": 64, "height": 64, "value": 1.0}
# Four channels where the demo has eight.
LATENT = {"class_type": "EmptyLatentImage", "width": 64, "height": 64, "batch_size": 1}

CASES = {
    "NaN": (graph(n3={"cfg": float("nan")}), "cfg: ", "finite"),
    "huge temperature": (
        graph(n4={"temperature": ["9", 0]}, n9={**FLOAT, "value": 1e18}),
        "temperature: ",
        "outside 0 to 2",
    ),
    "linked number out of range": (
        graph(n3={"ar_steps": ["9", 0]}, n9={**INT, "value": 999999}),
        "ar_steps: ",
        "outside 1 to 4096",
    ),
    "more steps than tokens": (graph(n3={"ar_steps": 65}), "ar_steps: ", "1 to 64"),
    "negative seed": (graph(n3={"seed": ["9", 0]}, n9={**INT, "value": -1}), "seed: ", "outside"),
    "lookahead over a link": (graph(n4={"lookahead": ["9", 0]}, n9={**INT, "value": -5}), "lookahead: ", "outside"),
    "text for a model": (graph(n3={"model": "mar"}), "model: ", "Load MAR"),
    "a number for a condition": (graph(n3={"condition": 5}), "condition: ", "Class Label"),
    "a dictionary for a report": (graph(n7={"report_1": {"a": 1}}), "report_1: ", "report"),
    "text for an image": (graph(n7={"image_1": "cat.png"}), "image_1: ", "IMAGE"),
    "unknown label": (graph(n2={"labels": "catt"}), "label", "cat"),
    "no label": (graph(n2={"labels": "  ,\n"}), "label", "named"),
    "id outside the label set": (graph(n2={"labels": "10"}), "label", "0 to 9"),
    "labels of another set": (graph(n2={"labels": "1", "label_set": "imagenet-1k"}), "condition: ", "picture-book"),
    "picked label of another set": (graph(n2={"add_label": "goldfish (imagenet-1k)"}), "add_label: ", "label_set"),
    "too many images": (graph(n2={"labels": "cat,boat", "images_per_label": 200}), "labels: ", "256"),
    "images per label over a link": (
        graph(n2={"images_per_label": ["9", 0]}, n9={**INT, "value": 0}),
        "images_per_label: ",
        "outside",
    ),
    "baseline beyond the cells": (graph(n7={"baseline": 5}), "baseline: ", "only 2"),
    "baseline without report": (graph(n7={"report_1": None, "baseline": 1}), "baseline: ", "no report"),
    "report without image": (graph(n7={"image_2": None}), "report_2: ", "image_2"),
    "a mask without a picture": (graph(n4={"mask": ["9", 0]}, n9=MASK), "latent: ", "no picture to change"),
    "a picture without a mask": (
        graph(n3={"latent": ["9", 0]}, n9=LATENT),
        "mask: ",
        "nothing of the latent would be kept",
    ),
    "another model's picture": (
        graph(n3={"latent": ["9", 0], "mask": ["10", 0]}, n9=LATENT, n10=MASK),
        "latent: ",
        "VAE Encode",
    ),
    "a number for a latent": (graph(n3={"latent": 5, "mask": ["9", 0]}, n9=MASK), "latent: ", "VAE Encode"),
    "an empty mask": (graph(n4={"latent": ["3", 0], "mask": ["9", 0]}, n9={**MASK, "value": 0.0}), "mask: ", "empty"),
    "a number for a cache": (graph(n4={"cache": 5}), "cache: ", "LazyMAR Cache"),
    "more diffusion steps at the end": (graph(n3={"diffusion_steps_end": 9}), "diffusion_steps_end: ", "more than"),
    "speculation over a link": (
        graph(n3={"speculation": ["9", 0]}, n9={**INT, "value": 65}),
        "speculation: ",
        "outside 0 to 64",
    ),
    "latents of another model": (
        graph(
            n5={"samples": ["9", 0]}, n9={"class_type": "EmptyLatentImage", "width": 64, "height": 64, "batch_size": 1}
        ),
        "samples: ",
        "channels",
    ),
}


def is_sentence(message: str, begins: str, holds: str) -> bool:
    message = message.strip()
    return message.startswith(begins) and holds in message and "Traceback" not in message and len(message) < 400


def test_models_that_are_none(comfy, info):
    about = info["FastARCSpDSampler"]
    node = {
        "class_type": "FastARCSpDSampler",
        **defaults(about, ar_steps=8, diffusion_steps=8),
        "target": ["1", 0],
        "condition": ["2", 0],
    }
    message = comfy.complaint(graph(n5={"samples": ["9", 0]}, n9={**node, "draft": "demo-draft"}))
    assert is_sentence(message, "draft: ", "Load MAR"), message
    message = comfy.complaint(graph(n5={"samples": ["9", 0]}, n9={**node, "draft": ["1", 0], "target": 3}))
    assert is_sentence(message, "target: ", "Load MAR"), message


def test_cache_settings_over_a_link(comfy, info):
    node = {
        "class_type": "FastARLazyMARFeatureCache",
        **defaults(info["FastARLazyMARFeatureCache"], refresh_period=["10", 0]),
    }
    message = comfy.complaint(graph(n4={"cache": ["9", 0]}, n9=node, n10={**INT, "value": -5}))
    assert is_sentence(message, "refresh_period: ", "outside 1 to"), message


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_that_names_the_field(comfy, name):
    prompt, begins, holds = CASES[name]
    message = comfy.complaint(prompt)
    assert is_sentence(message, begins, holds), message


FILES = ["../../etc/passwd", "/etc/passwd", "..\\x.safetensors", "nothing.safetensors", ""]


@pytest.mark.parametrize(
    "field, name",
    [*((f, n) for f in ("checkpoint", "decoder") for n in FILES), ("checkpoint", "demo-kl"), ("decoder", "demo")],
)
def test_no_way_out_of_the_model_folders(comfy, field, name):
    message = comfy.complaint(graph(n1={field: name}))
    assert f"{field}: " in message and "Traceback" not in message and "root:" not in message, message


def test_a_token_map_of_other_pictures(comfy):
    other = {"class_type": "EmptyImage", "width": 64, "height": 64, "batch_size": 3, "color": 0}
    node = {"class_type": "FastARTokenMap", "report": ["4", 1], "image": ["9", 0], "what": "outcome", "opacity": 0.5}
    message = comfy.complaint(graph(n9=other, n10=node, n11={"class_type": "PreviewImage", "images": ["10", 0]}))
    assert is_sentence(message, "image: ", "3 pictures"), message


def test_the_server_lives_on(comfy):
    comfy.run(graph())
