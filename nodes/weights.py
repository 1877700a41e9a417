"""Networks under ComfyUI's partial loading: weights that exceed the free memory stay on the offload device and are copied for every call.

ComfyUI recognises layers that can do without their weight by attributes (``comfy_cast_weights`` and the functions of patches), and sets
``comfy_cast_weights`` on those that it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model_loaders.networks.ops import streamed_layers


class HostWeights:
    """The source of weights that ComfyUI left on the offload device; see ``networks/ops.py``.

    Args:
        cast: ``comfy.ops.cast_bias_weight``: (layer, x) to weight, bias and the stream of the copy.
        release: ``comfy.ops.uncast_bias_weight``; called when a layer has been computed.
    """

    def __init__(self, cast: Callable[..., Any], release: Callable[..., Any]):
        self._cast, self._release = cast, release

    def is_offloaded(self, layer: Any) -> bool:
        return bool(layer.comfy_cast_weights)

    @contextmanager
    def stream_weight(
        self, layer: Any, x: Tensor, rows: tuple[int, int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        if rows is not None:  # ComfyUI would copy all rows, of an embedding ten times as many
            yield layer.weight[slice(*rows)].to(x.device, x.dtype), None
            return
        weight, bias, stream = self._cast(layer, x, offloadable=True)
        try:
            yield weight, bias
        finally:
            self._release(layer, weight, bias, stream)

    def look_up(self, layer: Any, ids: Tensor) -> Tensor:
        return F.embedding(ids.to(layer.weight.device), layer.weight).to(ids.device)


def manage(net: nn.Module, source: HostWeights, device: torch.device) -> nn.Module:
    """Allow ComfyUI to load a network partially, unless it computes on a CPU; returns ``net``."""
    if device.type != "cpu":
        for layer in streamed_layers(net):
            about = {"source": source, "comfy_cast_weights": False, "weight_function": [], "bias_function": []}
            vars(layer).update(about)
    return net


def may_stream(net: nn.Module) -> bool:
    """Whether ComfyUI may load a network partially."""
    return any(layer.source is not None for layer in streamed_layers(net))


def always_loaded(net: nn.Module) -> list[Tensor]:
    """Parameters and buffers that cannot be left out."""
    left = {id(t) for layer in streamed_layers(net) if layer.source is not None for t in layer.tensors()}
    return [t for t in (*net.parameters(), *net.buffers()) if id(t) not in left]


def place(net: nn.Module, device: torch.device) -> None:
    """Move to the device what cannot be left out. ComfyUI's partial loading skips parameters of modules that have children."""
    for module in net.modules():
        if getattr(module, "source", None) is None:
            module._apply(lambda t: t if t.device.type == device.type else t.to(device), recurse=False)
