"""ComfyUI's memory management: what moves a network to its device, and with how much memory free."""

from __future__ import annotations

import comfy.model_management as mm
import comfy.model_patcher
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...memory import enough_memory
from ...networks import graphs
from ...networks.speed import AUTO, COMPILE, PLAIN


def free_memory(patcher: ModelPatcher) -> float:
    """Free bytes of the device on which a network computes, with those that DynamicVRAM would give back for it."""
    return patcher.get_free_memory(patcher.load_device)


def empty_cache() -> None:
    """Give unused memory of the allocator back to the device."""
    mm.soft_empty_cache()


def make_patcher(net: nn.Module, device: torch.device, offload: torch.device, speed: str = PLAIN) -> ModelPatcher:
    """What moves a network between the device on which it computes and ``offload``.

    ComfyUI uses the same patcher for its own models. On GPUs it copies weights to the device when a layer first needs
    them (DynamicVRAM). Two kinds of networks take the one that loads weights before the run: those that are recorded or
    compiled, whose weights must be in place, and those without layers of ComfyUI's operations, which it would load one
    by one.
    """
    stays = speed == COMPILE or speed == AUTO and graphs.available(device)
    if stays or not _may_stream(net):
        return ModelPatcher(net, device, offload)

    return comfy.model_patcher.CoreModelPatcher(net, device, offload, **_storage())


def _storage() -> dict[str, bool]:
    """Where newer versions of ComfyUI keep the weights that DynamicVRAM leaves off the device, for its patcher.

    ``fast_disk``: nowhere but in the file, which its own loader reads again. Weights that this pack has mapped are
    copied to pinned memory like weights on a slow disk, unless the user starts ComfyUI with --fast-disk.
    """
    try:
        import comfy.storage
    except ImportError:  # an older ComfyUI
        return {}

    return {"fast_disk": comfy.storage.model_fast_disk([])}


def load_weights(patchers: list[ModelPatcher], memory: float) -> None:
    """Load networks with ``memory`` bytes free to work in.

    Large layers may stay on the offload device where memory is insufficient, see :func:`.operations.suited`.
    """
    streaming = [patcher for patcher in patchers if _may_stream(patcher.model)]
    complete = [patcher for patcher in patchers if patcher not in streaming]

    for patcher in streaming:
        memory += sum(weight.nbytes for weight in always_loaded(patcher.model))

    ordered = [*streaming, *complete]  # ComfyUI loads the last one first
    with enough_memory("dtype: the weights do not fit into memory; choose int8, bf16 or fp16, or a smaller model."):
        mm.load_models_gpu(ordered, memory_required=memory, force_full_load=not streaming)

        for patcher in ordered:
            place(patcher.model, patcher.load_device)


def _can_stay(layer: nn.Module) -> bool:
    """Whether the weight of a layer may stay on the offload device: whether it is one of ComfyUI's operations."""
    return hasattr(layer, "comfy_cast_weights")


def _may_stream(net: nn.Module) -> bool:
    """Whether layers of a network may stay on the offload device."""
    return any(map(_can_stay, net.modules()))


def always_loaded(net: nn.Module) -> list[Tensor]:
    """Parameters and buffers that cannot be left out."""
    found: list[Tensor] = []
    for module in net.modules():
        if not _can_stay(module):
            found += module.parameters(recurse=False)
            found += module.buffers(recurse=False)

    return found


def place(net: nn.Module, device: torch.device) -> None:
    """Move to the device what cannot be left out.

    ComfyUI's partial loading skips parameters of modules that have children.
    """

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == device.type else tensor.to(device)

    for module in net.modules():
        if not _can_stay(module):
            module._apply(moved, recurse=False)
