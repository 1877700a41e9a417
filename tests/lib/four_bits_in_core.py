"""Run by test_four_bits_in_core.py in ComfyUI: its own format of 4 bits, and this pack's layers in a network of its
operations.

    python four_bits_in_core.py COMFYUI PACK
"""

import json
from pathlib import Path

# ComfyUI must not be imported before it.
from pack_in_core import PACK, module  # isort: skip

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor
from torch import nn

formats = module("model_loaders.files.formats")
host = module("nodes.host")
kinds = module("model_loaders.kinds")
loader = module("model_loaders.llamagen.loader")
ops = module("networks.ops")
quantized = module("networks.quantized")

DEMO = Path(PACK) / "demo" / "checkpoints" / "llamagen-low.safetensors"
LAYER = "layers.0.feed_forward.w1."
operations = host.operations
CPU = torch.device("cpu")
torch.manual_seed(0)
weight = torch.randn(64, 256) / 16
x = torch.randn(5, 256)
plain = x @ weight.T


def relative(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def core_layer(entries, name="weight"):
    """A layer of ComfyUI's that loads what this pack gives it."""
    layer = comfy.ops.mixed_precision_ops({}, torch.bfloat16).Linear(256, 64, bias=False, dtype=torch.bfloat16)
    state = {key.removeprefix(name.removesuffix("weight")): tensor for key, tensor in entries.items()}
    layer.load_state_dict(state, strict=False, assign=True)
    return layer


def in_file(format_name):
    """What ComfyUI saves of a layer."""
    layout = comfy.ops.QUANT_ALGOS[format_name]["comfy_tensor_layout"]
    rounded = QuantizedTensor.from_float(weight.bfloat16(), layout)
    text = torch.tensor([*json.dumps({"format": format_name}).encode()], dtype=torch.uint8)
    return {**{f"{LAYER}{key}": t for key, t in rounded.state_dict("weight").items()}, f"{LAYER}comfy_quant": text}


found = {}
with torch.inference_mode():
    # 1. A file in ComfyUI's format.
    state = in_file(operations.W4A8)
    core = operations._QuantisedOperations(torch.bfloat16, 0)
    held = operations.gather_quantised(state, {})
    read = held[f"{LAYER}weight"]
    theirs = core_layer({key.removeprefix(LAYER): tensor for key, tensor in state.items()})(x.bfloat16())
    ours = core_layer(core.entries(f"{LAYER}weight", read.placed("cpu")), f"{LAYER}weight")(x.bfloat16())
    found["file"] = {
        "names": sorted(held),
        "kind": quantized.kind_of(read),
        "shape": list(read.shape),
        "numbers": relative(read, weight),
        "equal product": torch.equal(theirs, ours),
        "product": relative(ours, plain),
    }

    # 2. What does not fit is ComfyUI's, which it streams.
    full = operations._QuantisedOperations(torch.bfloat16, 10**15)
    wanted = quantized.Format("int4", 32)
    chosen = [full.format(wanted, shape, CPU, torch.bfloat16) for shape in ((64, 256), (64, 128))]
    rounded = full.round(weight, chosen[0])
    layer = core_layer(full.entries("weight", rounded))
    found["streamed"] = {
        "formats": [list(format) for format in chosen],
        "planes": list(full.format(quantized.Format("int8", 256), (64, 256), CPU, torch.bfloat16)),
        "fits": list(core.format(wanted, (64, 256), CPU, torch.bfloat16)),
        "kind": quantized.kind_of(layer.weight),
        "product": relative(layer(x.bfloat16()), plain),
        "bits": 8
        * sum(t.nbytes for key, t in full.entries("weight", rounded).items() if key != "comfy_quant")
        / 64
        / 256,
    }

    # 3. A network of ComfyUI's operations with layers of 4 bits.
    own = loader.load_llamagen(DEMO, kinds.Precision(torch.float32, "int4")).net
    on_card = loader.load_llamagen(
        DEMO, kinds.Precision(torch.float32, "int4"), operations=operations._CORE_OPERATIONS
    ).net
    a, b = (net.layers[0].feed_forward.w1 for net in (own, on_card))
    y = torch.randn(3, 128)
    patcher = host.memory.make_patcher(on_card, CPU, CPU)
    host.memory.load_weights([patcher], 0)
    found["network"] = {
        "layers": [type(layer).__name__ for layer in (a, b, on_card.layers[0].attention.wo)],
        "equal product": torch.equal(a(y), b(y)),
        "core's": type(on_card.layers[0].feed_forward.w2).__module__,
        "is a layer": isinstance(on_card.layers[0].feed_forward.w2, nn.Linear),
        "bytes": [sum(p.nbytes for p in net.parameters()) for net in (own, on_card)],
    }

    # 4. What is refused.
    state = in_file("convrot_w4a4")
    found["refused"] = formats.packed_format(operations.gather_quantised(state, {}), {})[0]

print(json.dumps(found))
