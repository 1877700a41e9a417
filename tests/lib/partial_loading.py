"""Run by test_partial_loading.py in ComfyUI: samplers whose
networks ComfyUI loads partially, on a card or on a CPU that passes for one.

Arguments: ComfyUI's folder, the pack's folder. Prints a JSON object.
"""

import json

# ComfyUI must not be imported before it.
from pack_in_core import module, run_without_previews  # isort: skip

import comfy.model_management as mm
import comfy.ops
import torch

host, loaders = (module(f"nodes.{name}") for name in ("host", "loaders"))
conditioning, samplers = (module(f"nodes.{name}") for name in ("conditioning", "samplers"))
ops = module("networks.ops")
host.folders.register_folders()
run_without_previews()

share, load, casts = 1.0, mm.load_models_gpu, 0
operations = host.operations.suited


def pass_for_a_card():
    """ComfyUI does not load partially on a CPU."""
    mm.is_device_cpu, mm.MIN_WEIGHT_MEMORY_RATIO, mm.lowvram_available = (lambda device: False), 0, True


cast = comfy.ops.cast_bias_weight


def counted(*args, **about):
    global casts
    casts += 1
    return cast(*args, **about)


comfy.ops.cast_bias_weight = counted


def low(models, memory_required=0, **about):
    """Free memory for a share of the weights, beside the working memory."""
    room = max(mm.minimum_inference_memory(), memory_required + mm.extra_reserved_memory())
    room += share * sum(m.model_size() for m in models)

    def free(device=None, torch_free_too=False):
        left = room - sum(m.loaded_size() for m in models)
        return (left, 0) if torch_free_too else left

    mm.get_free_memory = free
    mm.vram_state = mm.VRAMState.NO_VRAM if share == 0 else mm.VRAMState.NORMAL_VRAM
    load(models, memory_required=memory_required, **about)


mm.load_models_gpu = low


def words():
    model = loaders.LoadTar.execute("demo-tar", "fp32", False).result[0]

    def run():
        condition = conditioning.TarPrompt.execute(tar=model, text="a red boat", seed=3, preset="custom").result[0]
        return torch.stack(condition.codes), ""

    return model, run


def sampled(node, model, condition, **changes):
    def run():
        latent, report = node.execute(model=model, condition=condition, seed=3, preset="custom", **changes).result
        return latent["samples"], report.note

    return model, run


def harmon():
    model = loaders.LoadHybrid.execute("demo-hybrid", "auto", "fp32", False, "plain").result[0]
    condition = conditioning.Prompt.execute("a red boat at sunset").result[0]
    return sampled(samplers.FastHybridSampler, model, condition, steps=8, diffusion_steps=8)


def llamagen():
    model = loaders.LoadLlamaGen.execute("demo-llamagen", "auto", "fp32", False, "plain").result[0]
    return sampled(samplers.LlamaGenSampler, model, module("samplers.conditioning").from_ids([1]), cfg=2.0, top_k=0)


def own_layers(net):
    """The layers of core's operations."""
    return [layer for layer in net.modules() if hasattr(layer, "comfy_cast_weights")]


def offloaded(nets):
    return sum(ops.offloaded_bytes(net, **host.operations.suited(CARD)) for net in nets)


CARD = torch.device("cuda")
found = {}
with torch.inference_mode():
    for make in (words, harmon, llamagen):
        host.operations.suited = lambda device: {}
        model, run = make()
        assert not any(own_layers(p.model) for p in (model.patcher, *model.further))
        expected, _ = run()  # of our own operations
        mm.unload_all_models()

        host.operations.suited = operations
        pass_for_a_card()
        model, run = make()
        nets = [p.model for p in (model.patcher, *model.further)]
        whole = expected
        for share in (10.0, 0.5, 0, 10.0):
            mm.unload_all_models()
            casts = 0
            out, note = run()
            found.setdefault(make.__name__, []).append(
                {
                    "share": share,
                    "equal": torch.equal(out, whole),
                    "offloaded": offloaded(nets),
                    "may": sum(t.nbytes for net in nets for layer in own_layers(net) for t in layer.parameters()),
                    "loaded": sum(p.loaded_size() for p in (model.patcher, *model.further)),
                    "bytes": sum(p.nbytes for net in nets for p in net.parameters()),
                    "casts": casts,
                    "note": note,
                }
            )
        model.patcher.partially_unload(model.patcher.offload_device, 1 << 19)  # another node needs memory
        taken = offloaded(nets)
        share = 0.9
        found[make.__name__].append({"equal": torch.equal(run()[0], whole), "taken": taken})
print(json.dumps(found))
