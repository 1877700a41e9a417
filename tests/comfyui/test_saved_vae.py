"""A decoder of ours that core's Save VAE wrote."""

import shutil

import numpy as np
import torch
from comfy_host import Comfy, graph
from safetensors import safe_open


def test_it_decodes_as_before(comfy: Comfy) -> None:
    saved = {"class_type": "VAESave", "vae": ["1", 1], "filename_prefix": "vae/demo"}
    before = comfy.picture(comfy.run(graph(n8={"images": ["5", 0]}, n9=saved))["8"]["images"][0])

    (file,) = (comfy.base / "output" / "vae").glob("demo*.safetensors")
    with safe_open(file, "pt") as opened:
        assert "groups" not in (opened.metadata() or {})
        assert torch.equal(opened.get_tensor("fastar_groups"), torch.tensor(8))

    folder = comfy.base / "models" / "vae"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, folder / "saved by core.safetensors")
    after = comfy.picture(
        comfy.run(graph(n1={"decoder": "saved by core.safetensors"}, n8={"images": ["5", 0]}))["8"]["images"][0]
    )
    assert np.array_equal(np.asarray(before), np.asarray(after))
