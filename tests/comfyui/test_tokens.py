"""The LlamaGen family in a real ComfyUI, on tiny random weights in the server's own model folder."""

from __future__ import annotations

import io
import json
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfy_host import Events, defaults
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig
from fastar_nodes.model_loaders.networks.llama import Llama, LlamaConfig
from PIL import Image
from safetensors.torch import save_file

GRID, SIDE = 16, 64
SIZE: dict[str, Any] = dict(
    dim=32, depth=2, heads=2, kv_heads=2, hidden=48, vocab=64, condition="class", condition_size=10
)


@pytest.fixture(scope="module", autouse=True)
def files(comfy) -> Path:
    """A LlamaGen, a PAR and their tokenizer in the model folders."""
    folder = comfy.base / "models" / "fastar"
    folder.mkdir(parents=True, exist_ok=True)
    vq = VQConfig(ch=8, ch_mult=(1, 1, 1), blocks=1, z_channels=8, codes=64, code_channels=8, groups=4)
    models = {
        "tiny-llamagen": (Llama(LlamaConfig(**SIZE)), {"heads": "2", "grid": str(GRID)}),
        "tiny-par": (Llama(LlamaConfig(**SIZE, special=3)), {"heads": "2", "grid": str(GRID)}),
        "tiny-vq": (VQAutoencoder(vq), {"groups": "4"}),
    }
    g = torch.Generator().manual_seed(0)
    for name, (net, metadata) in models.items():
        state = {}
        for key, p in net.state_dict().items():
            scale = 1.0 if "embed" in key else 1.0 / max(1, p[0].numel()) ** 0.5 if p.ndim > 1 else 0.1
            state[key] = torch.randn(p.shape, generator=g) * scale + (
                1.0 if p.ndim == 1 and key.endswith("weight") else 0.0
            )
        save_file(state, folder / f"{name}.safetensors", {**metadata, "label_set": "picture-book"})
    return folder


def prompt(info: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    """Both loaders, all three samplers, pictures and their comparison."""

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": defaults(info[kind], **inputs) if kind.startswith("FastAR") else inputs}

    graph = {
        "plain": node("FastARLoadLlamaGen", checkpoint="tiny-llamagen.safetensors", decoder="tiny-vq.safetensors"),
        "trained": node("FastARLoadLlamaGen", checkpoint="tiny-par.safetensors", decoder="tiny-vq.safetensors"),
        "label": node("FastARClassLabel", labels="boat, cat"),
        "map": node("FastARTokenMap", report=["zipar", 1], image=["see zipar", 0], what="tokens per step"),
        "show map": node("PreviewImage", images=["map", 0]),
        "record": node("FastARReport", report=["par", 1], format="json"),
        "show record": node("PreviewAny", source=["record", 0]),
    }
    kinds = {"llamagen": "FastARLlamaGenSampler", "zipar": "FastARZipARSampler", "par": "FastARPAR"}
    pairs: dict[str, Any] = {}
    for i, (name, kind) in enumerate(kinds.items(), 1):
        model = ["trained" if name == "par" else "plain", 0]
        graph[name] = node(kind, model=model, condition=["label", 0], seed=5)
        graph[f"see {name}"] = node("VAEDecode", samples=[name, 0], vae=[model[0], 1])
        graph[f"show {name}"] = node("PreviewImage", images=[f"see {name}", 0])
        pairs |= {f"image_{i}": [f"see {name}", 0], f"report_{i}": [name, 1]}
    graph["compare"] = node("FastARCompare", **pairs)
    graph["show table"] = node("PreviewAny", source=["compare", 1])
    graph["show grid"] = node("PreviewImage", images=["compare", 0])
    for name, inputs in changes.items():
        graph[name]["inputs"].update(inputs)
    return graph


def pictures(comfy, outputs: dict[str, Any], name: str) -> np.ndarray:
    return np.stack([np.asarray(comfy.picture(image)) for image in outputs[f"show {name}"]["images"]])


def test_pictures_numbers_and_maps_of_all_three(comfy, info):
    outputs = comfy.run(prompt(info, zipar={"window": 4}))
    made = {name: pictures(comfy, outputs, name) for name in ("llamagen", "zipar", "par")}
    for name, batch in made.items():
        assert batch.shape == (2, SIDE, SIDE, 3) and batch.std() > 5, name
    assert not np.array_equal(made["llamagen"], made["zipar"])
    rows = [
        line.split("|")[1].strip() for line in outputs["show table"]["text"][0].partition("\n\n")[0].splitlines()[2:]
    ]
    assert rows == ["LlamaGen", "ZipAR", "PAR"]
    numbers = json.loads(outputs["show record"]["text"][0])["runs"][0]
    assert numbers["counts"]["transformer_passes"] == 4 + (GRID**2 - 4) // 4 and numbers["counts"]["cache_bytes"] > 0
    assert len(outputs["show map"]["images"]) == 2


def test_a_full_window_is_llamagen_after_unloading_too(comfy, info):
    first = comfy.run(prompt(info, zipar={"preset": "exact"}, llamagen={"seed": 6}, par={"seed": 6}))
    again = comfy.run(prompt(info, zipar={"window": GRID, "seed": 6}, llamagen={"seed": 6}))
    assert np.array_equal(pictures(comfy, again, "zipar"), pictures(comfy, again, "llamagen"))
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(1.5)
    fresh = comfy.run(prompt(info, zipar={"preset": "exact"}, llamagen={"seed": 6}, par={"seed": 6}))
    for name in ("llamagen", "zipar", "par"):
        assert np.array_equal(pictures(comfy, first, name), pictures(comfy, fresh, name)), name


def test_previews_arrive_and_a_cancel_stops(comfy, info):
    client = uuid.uuid4().hex
    events = Events(comfy, client)
    seen: list[Any] = []
    try:
        # Large enough to last: 256 passes over many pictures.
        wanted = prompt(info, llamagen={"seed": 77}, label={"labels": "boat", "images_per_label": 200})
        queued = comfy.queue(
            {key: wanted[key] for key in ("plain", "label", "llamagen", "see llamagen", "show llamagen")}, client
        )
        for kind, data in events:
            if kind == "preview" and data[0]["node_id"] == "llamagen":
                seen.append(np.asarray(Image.open(io.BytesIO(data[1])).convert("RGB"), int))
                comfy.post("/interrupt", {})
            if kind in ("execution_interrupted", "execution_success") and data["prompt_id"] == queued:
                assert kind == "execution_interrupted"
                break
    finally:
        events.close()
    assert seen and (np.abs(seen[0] - 128) < 12).all(-1).mean() > 0.02, "nothing was grey: the picture was done"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"llamagen": {"model": ["trained", 0]}}, "use the PAR Sampler"),
        ({"par": {"model": ["plain", 0]}}, "plain LlamaGen"),
        ({"plain": {"grid": "8"}}, "is for 16x16 tokens, not 8x8"),
        ({"plain": {"decoder": "tiny-llamagen.safetensors"}}, "holds a LlamaGen, not a VQ autoencoder"),
        ({"label": {"label_set": "imagenet-1k", "labels": "1"}}, "picture-book"),
    ],
)
def test_mistakes_are_one_sentence(comfy, info, changes, words):
    message = comfy.complaint(prompt(info, **changes))
    assert words in message and "Traceback" not in message
