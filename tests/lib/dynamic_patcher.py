"""Run by test_partial_loading.py in ComfyUI: networks under
the patcher of DynamicVRAM, on a CPU that passes for a card.

Its memory on the card and pinned memory need one and are left out; core then casts every weight from where it is.
Arguments: ComfyUI's folder, the pack's folder. Prints a JSON object.
"""

import json
from pathlib import Path

# ComfyUI must not be imported before it.
from pack_in_core import PACK, module  # isort: skip

import comfy.memory_management
import comfy.model_management as mm
import comfy.model_patcher
import comfy_aimdo.host_buffer
import torch


class HostBuffer:
    """Pinned memory, of which nothing is used."""

    size = 0

    def __init__(self, *sizes):
        pass

    def truncate(self, *about, **more):
        pass


# What main.py does where comfy-aimdo works.
comfy_aimdo.host_buffer.HostBuffer = HostBuffer
comfy.memory_management.aimdo_enabled = True
comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
mm.is_device_cpu = lambda device: False

CPU = torch.device("cpu")
DEMO = Path(PACK) / "demo" / "checkpoints"
host = module("nodes.host")
loaders = module("model_loaders.llamagen")
tar = module("model_loaders.tar")
mar = module("model_loaders.mar")
autoencoders = module("model_loaders.autoencoders")
conditioning = module("samplers.conditioning")
samplers = module("samplers.mar.mar")
settings = module("samplers.mar.settings")
noise = module("samplers.noise")
driver = module("samplers.driver")


def logits(model):
    """Of a prompt, or of the first token of a class."""
    net = model.net
    if net.config.condition == "prompt":
        ids = torch.tensor([[3, 1, 2]])
        hidden, _ = net.prefill(net.prefix(ids), 2, 4)
        return net.logits(hidden, (2, 90))

    hidden, _ = net.prefill(net.prefix(torch.tensor([1])), 8, 64)
    return net.logits(hidden)


def latents(model):
    """Of a short run."""
    chosen = settings.MARSettings(steps=3, diffusion_steps=4)
    condition = conditioning.from_ids([1])
    return driver.finish(samplers.mar(model, condition, chosen, noise.PairedNoise(3, range(1)))).latents


def image(model):
    return model.net.decode(torch.linspace(-1, 1, 16 * model.net.config.z_channels).view(1, -1, 4, 4))


def equal(found, expected, dtype):
    """Whether results are equal; ComfyUI multiplies by the scales of 8 bits before a product, and FastAR after it."""
    return torch.allclose(found, expected, 1e-5, 1e-5) if dtype == "fp8" else torch.equal(found, expected)


CASES = {
    "llamagen": (loaders.load_llamagen, "llamagen-low", logits, "fp32"),
    "llamagen in fp8": (loaders.load_llamagen, "llamagen-low", logits, "fp8"),
    "tar": (tar.load_tar, "tar", logits, "fp32"),
    "tar in fp8": (tar.load_tar, "tar", logits, "fp8"),
    "mar": (mar.load_mar, "mar", latents, "fp32"),
    "kl": (autoencoders.load_kl, "kl", image, "fp32"),
}
found = {}
with torch.inference_mode():
    for name, (load, file, run, dtype) in CASES.items():
        path = DEMO / f"{file}.safetensors"
        expected = run(load(path, dtype))

        model = load(path, dtype, operations=host.operations(torch.device("cuda")))
        patcher = host.make_patcher(model.net, CPU, CPU)
        host.load_weights([patcher], 0)
        own = [layer for layer in model.net.modules() if hasattr(layer, "comfy_cast_weights")]
        found[name] = {
            "dynamic": patcher.is_dynamic(),
            "equal": equal(run(model), expected, dtype),
            "cast": sum(layer.comfy_cast_weights for layer in own),
            "layers": len(own),
        }
        again = load(path, dtype, operations=host.operations(torch.device("cuda")))
        compiled = host.make_patcher(again.net, CPU, CPU, "compile")
        found[name]["compiled"] = compiled.is_dynamic()

print(json.dumps(found))
