"""An image of a batch is drawn alone by its number, over HTTP."""

import uuid
from typing import Any

import pytest
import torch
from comfy_host import Comfy, defaults
from safetensors.torch import load_file

CASES = {
    "FastARMARSampler": ("FastARLoadMAR", "demo", {"steps": 8, "diffusion_steps": 8}),
    "FastARLlamaGenSampler": ("FastARLoadLlamaGen", "demo-llamagen-low", {}),
}


@pytest.mark.parametrize("node", CASES)
def test_an_image_of_a_batch_is_drawn_alone(comfy: Comfy, info: dict[str, Any], node: str) -> None:
    loader, checkpoint, few = CASES[node]

    def latents(labels: str, **changes: Any) -> torch.Tensor:
        sampler = defaults(info[node], model=["load", 0], condition=["label", 0], seed=7, **few)
        prompt = {
            "load": {"class_type": loader, "inputs": defaults(info[loader], checkpoint=checkpoint)},
            "label": {"class_type": "FastARClassLabel", "inputs": defaults(info["FastARClassLabel"], labels=labels)},
            "draw": {"class_type": node, "inputs": {**sampler, **changes}},
            "save": {
                "class_type": "SaveLatent",
                "inputs": {"samples": ["draw", 0], "filename_prefix": uuid.uuid4().hex},
            },
        }
        (saved,) = comfy.run(prompt)["save"]["latents"]
        return load_file(comfy.base / "output" / saved["filename"])["latent_tensor"]

    whole = latents("cat, boat, cat")
    assert float((whole[0] - whole[2]).abs().max()) > 0.1, "two images of one label"
    alone = latents("cat", first_image=2)
    # A batch rounds differently, and eight AR steps of a MAR add it up.
    torch.testing.assert_close(alone, whole[2:], rtol=0.02, atol=0.5 if "MAR" in node else 0)
    assert not torch.allclose(latents("cat"), whole[2:], rtol=0.02, atol=0.5)
