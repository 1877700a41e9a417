"""Run by test_partial_loading.py in ComfyUI: what of core, and
of torch, our partial loading needs, and whether it is there.

Argument: ComfyUI's folder. Prints a JSON object of sentences and booleans.
"""

import inspect
import json
import sys

CORE = sys.argv[1]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, CORE)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_management as mm  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from torch import nn  # noqa: E402

CPU = torch.device("cpu")


def layer() -> nn.Linear:
    """A layer that core may leave out, as nodes/host.py marks it."""
    made = nn.Linear(512, 512)
    vars(made).update(comfy_cast_weights=False, weight_function=[], bias_function=[])
    return made


net = nn.Sequential(layer(), layer(), nn.Linear(512, 512))
patcher = ModelPatcher(net, CPU, CPU)
mm.is_device_cpu = lambda device: False
patcher.load(CPU, lowvram_model_memory=1)

x = torch.ones(1, 512)
weight, bias, stream = comfy.ops.cast_bias_weight(net[0], x, offloadable=True)
comfy.ops.uncast_bias_weight(net[0], weight, bias, stream)

print(
    json.dumps(
        {
            "core sets comfy_cast_weights on a layer that it leaves out": net[0].comfy_cast_weights is True,
            "core loads a layer without comfy_cast_weights": not hasattr(net[2], "comfy_cast_weights"),
            "cast_bias_weight gives the weight and the bias": torch.equal(weight, net[0].weight)
            and torch.equal(bias, net[0].bias),
            "load_models_gpu takes memory_required and force_full_load": {"memory_required", "force_full_load"}
            <= {*inspect.signature(mm.load_models_gpu).parameters},
            "Module._apply takes a function and recurse": [*inspect.signature(nn.Module._apply).parameters]
            == ["self", "fn", "recurse"],
            "a patcher calls detach when it is unloaded": "detach" in inspect.getsource(mm.LoadedModel.model_unload),
        }
    )
)
