"""ComfyUI's options for attention, with which people start it for other models, change no image."""

from pathlib import Path

import pytest
from comfy_host import Comfy, Missing, graph
from safetensors.torch import load_file

OPTIONS = {
    "--use-split-cross-attention": "Using split optimization for attention",
    "--use-quad-cross-attention": "Using sub quadratic optimization for attention",
    "--use-pytorch-cross-attention": "Using pytorch attention",
}


def latents_with(option: str, line: str) -> list[list[float]]:
    """Latents of MAR and of FastHybrid, from a server that was started with ``option`` and logs ``line``."""
    save = {
        "n9": {"class_type": "SaveLatent", "samples": ["3", 0], "filename_prefix": "mar"},
        "n10": {"class_type": "SaveLatent", "samples": ["4", 0], "filename_prefix": "fasthybrid"},
    }
    prompt = graph(**save)

    try:
        server = Comfy(options=[option])
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")

    with server:
        outputs = server.run({key: prompt[key] for key in ("1", "2", "3", "4", "9", "10")})
        assert line in server.log
        files = [Path(server.base) / "output" / outputs[key]["latents"][0]["filename"] for key in ("9", "10")]
        return [load_file(file)["latent_tensor"].flatten().tolist() for file in files]


def test_images_are_identical_with_every_option():
    found = [latents_with(option, line) for option, line in OPTIONS.items()]
    assert found[0] == found[1] == found[2]
