"""Run by test_eight_bits_in_core.py in ComfyUI, on a card or on a CPU
that passes for one: files in core's formats of 8 bits, made by core,
and the dtypes int8 and fp8.

Arguments: ComfyUI's folder, the pack's folder, a folder for files. Prints a JSON object.
"""

import json
from pathlib import Path

# ComfyUI must not be imported before it.
from pack_in_core import MORE, PACK, module, run_without_previews  # isort: skip

import comfy.model_management as mm
import comfy.ops
import comfy.utils
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from safetensors import safe_open
from safetensors.torch import load_file, save_file

(FOLDER,) = MORE


host, loaders, samplers = (module(f"nodes.{name}") for name in ("host", "loaders", "samplers"))
host.folders.register_folders()
run_without_previews()
ops = module("networks.ops")
eight_bits = module("networks.quantized")
kinds = module("model_loaders.kinds")
record = module("reports.record")
LOADERS = {
    "llamagen-low": module("model_loaders.llamagen.loader").load_llamagen,
    "tar": module("model_loaders.tar.loader").load_tar,
    "mar": module("model_loaders.mar.loader").load_mar,
}
DEMO = Path(PACK) / "demo" / "checkpoints"
CARD = torch.device("cuda")
CPU = torch.device("cpu")
DEVICE = mm.get_torch_device()
BLOCKS = ("layers.", "encoder_blocks.", "decoder_blocks.")


def in_block(name, tensor):
    return tensor.ndim == 2 and name.removeprefix("model.").startswith(BLOCKS)


# 1. Files, by core's own layers and layouts.


def layer_of_core(weight, format_name, **options):
    """What core saves of a linear layer that it quantised."""
    layout = QUANT_ALGOS[format_name]["comfy_tensor_layout"]
    layer = comfy.ops.mixed_precision_ops({}, torch.float32).Linear(*reversed(weight.shape), bias=False)
    layer.quant_format = format_name
    layer.layout_type = layout
    quantised = QuantizedTensor.from_float(weight, layout, **options)
    layer.weight = torch.nn.Parameter(quantised, requires_grad=False)
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def made(file, format_name, **options):
    state, out = load_file(DEMO / f"{file}.safetensors"), {}
    for name, tensor in state.items():
        if not in_block(name, tensor):
            out[name] = tensor
            continue
        for part, value in layer_of_core(tensor.float(), format_name, **options).items():
            out[name.removesuffix("weight") + part] = value
    return out


def with_metadata(state):
    """Statements in the file's metadata in place of tensors beside the weights."""
    layers, out = {}, {}
    for name, tensor in state.items():
        if name.endswith(".comfy_quant"):
            layers[name.removesuffix(".comfy_quant")] = json.loads(tensor.numpy().tobytes())
        else:
            out[name] = tensor
    return out, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def before_comfy_quant(state):
    """The older form: scale_weight beside the weights, and one mark in the file."""
    out = {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for name, tensor in state.items():
        if not name.endswith(".comfy_quant"):
            out[name.replace(".weight_scale", ".scale_weight")] = tensor
    converted, _ = comfy.utils.convert_old_quants(dict(out))
    assert converted.keys() - state.keys() == set(), "core takes it for the same file"
    return out


def with_input_scales(state):
    out = dict(state)
    for name in state:
        if name.endswith(".weight_scale"):
            out[name.replace("weight_scale", "input_scale")] = torch.tensor(0.02)
    return out


FP8 = {"format_name": "float8_e4m3fn", "scale": "recalculate"}
CASES = {
    "fp8": lambda file: (made(file, **FP8), {}),
    "fp8, e5m2": lambda file: (made(file, "float8_e5m2", scale="recalculate"), {}),
    "fp8, metadata": lambda file: with_metadata(made(file, **FP8)),
    "fp8, older": lambda file: (before_comfy_quant(made(file, **FP8)), {}),
    "fp8, input scales": lambda file: (with_input_scales(made(file, **FP8)), {}),
    "int8": lambda file: (made(file, "int8_tensorwise"), {}),
    "int8, channels": lambda file: (made(file, "int8_tensorwise", per_channel=True), {}),
}


def stating(**about):
    """The statement of one layer replaced."""
    text = torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)
    return lambda state: state | {"layers.0.attention.wo.comfy_quant": text}


def without_scale(state):
    return {name: tensor for name, tensor in state.items() if name != "layers.0.attention.wo.weight_scale"}


REFUSED = {
    "another format": stating(format="nvfp4"),
    "rotated": stating(format="float8_e4m3fn", convrot=True),
    "another dtype": stating(format="int8_tensorwise"),
    "a list": stating(format=[]),
    "without a scale": without_scale,
    "no JSON": lambda state: state | {"layers.0.attention.wo.comfy_quant": torch.ones(3, dtype=torch.uint8)},
    "a scale for every block": lambda state: state | {"layers.0.attention.wo.weight_scale": torch.ones(8, 4)},
}


# All forms for one model, and the usual ones for the others.
FORMS = {"llamagen-low": [*CASES], "tar": ["fp8", "int8, channels"], "mar": ["fp8", "int8, channels"]}


def written(file, case):
    state, more = CASES[case](file)
    with safe_open(DEMO / f"{file}.safetensors", "pt") as opened:
        metadata = opened.metadata() | more
    path = Path(FOLDER) / f"{file}-{case.replace(', ', '-')}.safetensors"
    save_file(state, path, metadata=metadata)
    return path


# 2. Networks on the device, with more or less memory.

operations = host.operations.suited
share, load_models = 1.0, mm.load_models_gpu


def low(models, memory_required=0, **about):
    """Free memory for a share of the weights, beside the working memory."""
    room = max(mm.minimum_inference_memory(), memory_required + mm.extra_reserved_memory())
    room += share * sum(m.model_size() for m in models)

    def free(device=None, torch_free_too=False):
        left = room - sum(m.loaded_size() for m in models)
        return (left, 0) if torch_free_too else left

    mm.get_free_memory = free
    mm.vram_state = mm.VRAMState.NO_VRAM if share == 0 else mm.VRAMState.NORMAL_VRAM
    load_models(models, memory_required=memory_required, **about)


def pass_for_a_card():
    mm.is_device_cpu, mm.MIN_WEIGHT_MEMORY_RATIO, mm.lowvram_available = (lambda device: False), 0, True
    mm.load_models_gpu = low


def hidden(model):
    """Numbers that all blocks had a part in."""
    net = model.net
    if hasattr(net, "diffloss"):
        tokens = torch.linspace(-1, 1, net.config.tokens * net.config.channels, device=DEVICE).view(
            1, -1, net.config.channels
        )
        known = torch.arange(4, device=DEVICE)[None]
        return net.decode(net.encode(tokens, known, net.class_rows(torch.tensor([1], device=DEVICE), 1)), known)
    if net.config.condition == "prompt":
        return net.logits(net.prefill(net.prefix(torch.tensor([[3, 1, 2]], device=DEVICE)), 2, 4)[0], (2, 90))
    return net.logits(net.prefill(net.prefix(torch.tensor([1], device=DEVICE)), 8, 64)[0])


def relative(a, b):
    return float((a - b).norm() / b.norm())


def stored_kinds(net):
    return sorted({eight_bits.kind_of(p) for p in net.parameters()})


def sizes(net):
    return sum(p.nbytes for p in net.parameters())


def run(file, path, bits, compute=torch.float32):
    global share
    load = LOADERS[file]
    plain = load(DEMO / f"{file}.safetensors", "fp32")
    numbers = load(path, "fp32") if bits == "auto" else load(path, bits)
    for model in (plain, numbers):
        model.net.to(DEVICE)
    expected = hidden(numbers)

    model = load(path, kinds.Precision(compute, bits), **host.operations.suited(CARD))
    patcher = host.memory.make_patcher(model.net, DEVICE, CPU)
    runs = []
    for part in (10.0, 0.5, 0, 10.0):
        share = part
        mm.unload_all_models()
        host.memory.load_weights([patcher], 0)
        offloaded = ops.offloaded_bytes(model.net, model.net.operations)
        runs.append({"offloaded": offloaded, "values": hidden(model)})
    patcher.partially_unload(CPU, 1 << 16)
    taken = ops.offloaded_bytes(model.net, model.net.operations)
    # As before every run; layers that are not ComfyUI's compute on the card only.
    host.memory.load_weights([patcher], 0)
    runs.append({"offloaded": taken, "values": hidden(model)})

    first = runs[0]["values"]
    return {
        "kinds": stored_kinds(model.net),
        "dtype": record.dtype_of(model.net),
        "size": sizes(model.net),
        "plain size": sizes(plain.net),
        "patcher": patcher.model_size(),
        "error": relative(first, expected),
        "loss": relative(first, hidden(plain)),
        "equal": [torch.equal(run["values"], first) for run in runs],
        "offloaded": [run["offloaded"] for run in runs],
        "note": ops.remark(model.net, operations=model.net.operations),
    }


OTHERS = {
    "janus": ("janus", "load_janus", Path(PACK) / "tests" / "parity" / "janus" / "original"),
    "bitdance": ("bitdance", "load_bitdance", Path(PACK) / "tests" / "parity" / "bitdance" / "native"),
    "hybrid": ("hybrid", "load_hybrid", DEMO / "hybrid.safetensors"),
    "dtok-low": ("tar", "load_detokenizer", DEMO / "dtok-low.safetensors"),
    "par": ("llamagen", "load_llamagen", DEMO / "par.safetensors"),
}


def other(family, bits):
    """The quantised layers of a further family by core's operations and by the network's own, and a product of each."""
    folder, name, path = OTHERS[family]
    load = getattr(module(f"model_loaders.{folder}.loader"), name)
    own, on_card = (
        load(path, kinds.Precision(torch.float32, bits), **more) for more in ({}, host.operations.suited(CARD))
    )
    nets = [getattr(model, "hybrid", None) or model.net for model in (own, on_card)]
    for net in nets:
        net.to(DEVICE)
    worst, count = 0.0, 0
    for name, layer in nets[0].named_modules():
        if isinstance(layer, ops.EightBitLinear):
            x = torch.linspace(-1, 1, 2 * layer.in_features, device=DEVICE).view(2, -1)
            worst = max(worst, relative(nets[1].get_submodule(name)(x), layer(x)))
            count += 1
    dtypes = [record.dtype_of(net) for net in nets]
    return {"layers": count, "worst": worst, "dtypes": dtypes, "sizes": [sizes(net) for net in nets]}


def sampled(bits):
    """The codes that nodes make with core's operations, beside those of the network's own."""
    condition = module("samplers.conditioning").from_ids([1, 3])
    codes = []
    for chosen in (lambda device: {}, operations):
        host.operations.suited = chosen
        model = loaders.LoadLlamaGen.execute("demo-llamagen-low", "auto", bits, False, "plain").result[0]
        latent, report = samplers.LlamaGenSampler.execute(
            model=model, condition=condition, seed=3, preset="custom", cfg=2.0, top_k=0
        ).result
        codes.append(latent["samples"])
    return {
        "dtype": report.dtype,
        "note": report.note,
        "equal codes": float((codes[0] == codes[1]).all(1).float().mean()),
    }


found = {}
with torch.inference_mode():
    paths = {(file, case): written(file, case) for file in LOADERS for case in FORMS[file]}
    pass_for_a_card()
    for (file, case), path in paths.items():
        found[f"{file}: {case}"] = run(file, path, "auto")
    for file in LOADERS:
        for bits in ("int8", "fp8"):
            found[f"{file}: dtype {bits}"] = run(file, DEMO / f"{file}.safetensors", bits)

    share = 10.0
    for bits in ("int8", "fp8"):
        for family in OTHERS:
            found[f"{family}: dtype {bits}"] = other(family, bits)
        found[f"nodes: {bits}"] = sampled(bits)

    for case, change in REFUSED.items():
        state = change(made("llamagen-low", **FP8))
        save_file(state, Path(FOLDER) / "refused.safetensors", metadata={"heads": "2", "grid": "8"})
        try:
            found[f"refused: {case}"] = str(LOADERS["llamagen-low"](Path(FOLDER) / "refused.safetensors"))
        except ValueError as e:
            found[f"refused: {case}"] = str(e)

    weight = torch.linspace(-3, 2, 96).view(8, 12) ** 3
    for kind, format_name, options in (
        ("int8", "int8_tensorwise", {"per_channel": True}),
        ("fp8", "float8_e4m3fn", {"scale": "recalculate"}),
    ):
        theirs = layer_of_core(weight, format_name, **options)
        ours = eight_bits.round_to(weight, kind)
        found[f"rounding to {kind}"] = {
            "numbers": float((ours.stored.float() - theirs["weight"].float()).abs().max()),
            "scales": relative(ours.scale.flatten(), theirs["weight_scale"].flatten()),
        }

print(json.dumps(found))
