"""Run by test_partial_loading.py in ComfyUI: networks under
the patcher of DynamicVRAM, on a card or on a CPU that passes for one.

Its memory on the card and pinned memory need one and are left out on a CPU; core then casts every weight from where it
is.
Arguments: ComfyUI's folder, the pack's folder. Prints a JSON object.
"""

import json
from pathlib import Path

import comfy_aimdo.control
from comfy_device import ON_CARD

if ON_CARD:  # as main.py does before it imports torch
    comfy_aimdo.control.init()

# ComfyUI must not be imported before it.
from pack_in_core import PACK, module  # isort: skip

import comfy.memory_management
import comfy.model_management as mm
import comfy.model_patcher
import comfy_aimdo.host_buffer
import comfy_execution.caching
import torch
from comfy.cli_args import args


class HostBuffer:
    """Pinned memory, of which nothing is used."""

    size = 0

    def __init__(self, *sizes):
        pass

    def truncate(self, *about, **more):
        pass


# What main.py does where comfy-aimdo works.
if ON_CARD:
    headroom = int(args.vram_headroom * 1024**3)
    devices = [(device.index, headroom) for device in mm.get_all_torch_devices()]
    assert comfy_aimdo.control.init_devices(devices), "comfy-aimdo does not work on this card"
else:
    comfy_aimdo.host_buffer.HostBuffer = HostBuffer
    mm.is_device_cpu = lambda device: False
comfy.memory_management.aimdo_enabled = True
comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic

DEVICE = mm.get_torch_device()
CPU = torch.device("cpu")
DEMO = Path(PACK) / "demo" / "checkpoints"
host = module("nodes.host")
loaders = module("model_loaders.llamagen.loader")
tar = module("model_loaders.tar.loader")
mar = module("model_loaders.mar.loader")
autoencoders = module("model_loaders.autoencoders.loader")
hybrids = module("model_loaders.hybrid.loader")
vaes = module("nodes.vae")
conditioning = module("samplers.conditioning")
samplers = module("samplers.mar.mar")
settings = module("samplers.mar.settings")
noise = module("samplers.noise")
engine = module("samplers.engine")


def logits(model):
    """Of a prompt, or of the first token of a class."""
    net = model.net
    if net.config.condition == "prompt":
        ids = torch.tensor([[3, 1, 2]], device=DEVICE)
        hidden, _ = net.prefill(net.prefix(ids), 2, 4)
        return net.logits(hidden, (2, 90))

    hidden, _ = net.prefill(net.prefix(torch.tensor([1], device=DEVICE)), 8, 64)
    return net.logits(hidden)


def latents(model):
    """Of a short run."""
    chosen = settings.MARSettings(steps=3, diffusion_steps=4)
    condition = conditioning.from_ids([1])
    return engine.finish(samplers.mar(model, condition, chosen, noise.PairedNoise(3, range(1)))).latents


def image(model):
    return model.net.decode(torch.linspace(-1, 1, 16 * model.net.config.z_channels, device=DEVICE).view(1, -1, 4, 4))


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
        own = load(path, dtype)
        own.net.to(DEVICE)
        expected = run(own)

        model = load(path, dtype, **host.operations.suited(torch.device("cuda")))
        patcher = host.memory.make_patcher(model.net, DEVICE, CPU)
        host.memory.load_weights([patcher], 0)
        layers = [layer for layer in model.net.modules() if hasattr(layer, "comfy_cast_weights")]
        found[name] = {
            "dynamic": patcher.is_dynamic(),
            "equal": equal(run(model), expected, dtype),
            "cast": sum(layer.comfy_cast_weights for layer in layers),
            "layers": len(layers),
        }
        again = load(path, dtype, **host.operations.suited(torch.device("cuda")))
        compiled = host.memory.make_patcher(again.net, DEVICE, CPU, "compile")
        found[name]["compiled"] = compiled.is_dynamic()


# What core's tracker and cache make of the outputs of a loader: a model of three parts, one without a decoder.
def outputs(speed):
    model = hybrids.load_hybrid(DEMO / "hybrid.safetensors", "fp32", **host.operations.suited(torch.device("cuda")))
    decoder = autoencoders.load_kl(DEMO / "kl.safetensors", "fp32", **host.operations.suited(torch.device("cuda")))
    vae = vaes.FastARVAE(decoder.net, "kl", 8, decoder.net.config.z_channels, 8, [(64, 64)], vaes.KL)
    return host.loaded.Loaded.of(model, vae, speed=speed), vae


streamed = outputs("plain")
tracker = comfy.model_patcher.PromptModelTracker()
tracker.add(streamed)
found["in use"] = {
    "dynamic": [patcher.is_dynamic() for patcher in (*streamed[0].patchers, streamed[1].patcher)],
    "tracked": len(tracker.models),
    "kept": comfy_execution.caching.all_outputs_dynamic([[one] for one in streamed]),
    "kept, compiled": comfy_execution.caching.all_outputs_dynamic([[one] for one in outputs("compile")]),
}
tracker.end()

print(json.dumps(found))
