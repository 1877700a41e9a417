"""Run by test_partial_loading.py in ComfyUI: what nodes/host/ needs of core's
operations and memory management, and of torch, and whether it is there.

Argument: ComfyUI's folder. Prints a JSON object of sentences and booleans.
"""

import inspect
import json
import sys
import weakref

from comfy_device import OPTIONS

CORE = sys.argv[1]
sys.argv = ["main.py", *OPTIONS]
sys.path.insert(0, CORE)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_management as mm  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402
from comfy.model_patcher import ModelPatcher, ModelPatcherDynamic  # noqa: E402
from comfy.patcher_extension import CallbacksMP  # noqa: E402
from torch import nn  # noqa: E402

CPU = torch.device("cpu")
DEVICE = mm.get_torch_device()
OPS = comfy.ops.disable_weight_init


def filled(layer: nn.Module) -> nn.Module:
    """A layer with weights; core's have none at first."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter.requires_grad_(False))
    return layer


net = nn.Sequential(filled(OPS.Linear(512, 512)), filled(OPS.Linear(512, 512)), nn.Linear(512, 512))
detached = []
patcher = ModelPatcher(net, DEVICE, CPU)
patcher.add_callback(CallbacksMP.ON_DETACH, lambda patcher, unpatch_all: detached.append(patcher))
on_a_cpu = type(ModelPatcherDynamic(nn.Linear(2, 2), CPU, CPU))
mm.is_device_cpu = lambda device: False
patcher.load(DEVICE, lowvram_model_memory=1)
cast = net[0].comfy_cast_weights

x = torch.ones(1, 512, device=DEVICE)
expected = [net[0].weight.to(DEVICE), net[0].bias.to(DEVICE)]
weight, bias, stream = comfy.ops.cast_bias_weight(net[0], x, offloadable=True)
given = torch.equal(weight, expected[0]) and torch.equal(bias, expected[1])
comfy.ops.uncast_bias_weight(net[0], weight, bias, stream)
patcher.detach()


class Kept:
    """What ModelCache puts on core's record of a model whose weights are unloaded."""


last = ModelPatcher(nn.Linear(2, 2), CPU, CPU)
mm.load_models_gpu([last])
kept = Kept()
mm.current_loaded_models[0].fastar_unloaded = kept
until = weakref.ref(kept)
del kept
mm.unload_all_models()

print(
    json.dumps(
        {
            "core sets comfy_cast_weights on a layer that it leaves out": cast is True,
            "core's layers have their weights in place at first": not any(
                layer.comfy_cast_weights or layer.weight_function
                for layer in (OPS.Linear(2, 2), OPS.Embedding(2, 2), OPS.Conv2d(2, 2, 1))
            ),
            "DynamicVRAM's patcher is the other one on a CPU": on_a_cpu is ModelPatcher,
            "core loads a layer without comfy_cast_weights": not hasattr(net[2], "comfy_cast_weights"),
            "cast_bias_weight gives the weight and the bias": given,
            "load_models_gpu takes memory_required and force_full_load": {"memory_required", "force_full_load"}
            <= {*inspect.signature(mm.load_models_gpu).parameters},
            "Module._apply takes a function and recurse": [*inspect.signature(nn.Module._apply).parameters]
            == ["self", "fn", "recurse"],
            "a patcher calls detach when it is unloaded": "detach" in inspect.getsource(mm.LoadedModel.model_unload),
            "detach calls ON_DETACH": detached == [patcher],
            "core lets go of its record of a model that it unloaded": until() is None,
            "a patcher knows the free memory of a device": patcher.get_free_memory(DEVICE) > 0,
            "only the patcher of DynamicVRAM is dynamic": not patcher.is_dynamic(),
        }
    )
)
