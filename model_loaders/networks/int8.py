"""Linear layers with int8 weights on a CPU. Lossy.

A weight is rounded to 8 bits with one scale per output channel; a row of activations is rounded when the layer is called, with
a scale of its own, so that rows do not influence each other and image i of a batch equals image i alone. The product is
PyTorch's ``torch._int_mm``, whose sums are exact in int32.

Only the blocks of a transformer and of a diffusion head are replaced (:data:`BLOCKS`): most of the weights are there. Embeddings,
time embedding, input and output layers keep their dtype, because their errors are visible first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Containers whose linear layers are replaced.
BLOCKS = frozenset(("encoder_blocks", "decoder_blocks", "res_blocks", "layers"))
_LARGEST = 127.0

N = TypeVar("N", bound=nn.Module)


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8.

    Attributes:
        weight: int8 [out, in].
        scale: fp32 [out]; a weight is ``scale * weight``.
        bias: fp32 [out] or None.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = weight.shape

    @classmethod
    def of(cls, layer: nn.Linear) -> Int8Linear:
        """The rounded layer: largest magnitude of an output channel to 127."""
        w = layer.weight.detach().float()
        scale = w.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
        bias = None if layer.bias is None else layer.bias.detach().float()
        return cls((w / scale[:, None]).round_().to(torch.int8), scale, bias)

    def outputs(self, start: int, stop: int) -> Int8Linear:
        """The layer of outputs ``start`` to ``stop``; it shares the weight."""
        bias = None if self.bias is None else self.bias[start:stop]
        return Int8Linear(self.weight[start:stop], self.scale[start:stop], bias)

    def forward(self, x: Tensor) -> Tensor:
        """x fp32 [..., in] to fp32 [..., out]."""
        rows = x.reshape(-1, self.in_features)
        if not len(rows):
            return x.new_empty(*x.shape[:-1], self.out_features)
        largest = rows.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
        rounded = (rows * (_LARGEST / largest)).round_().to(torch.int8)
        out = torch._int_mm(rounded, self.weight.t()).float().mul_(largest * (1 / _LARGEST))
        out = out.mul_(self.scale) if self.bias is None else torch.addcmul(self.bias, out, self.scale)
        return out.view(*x.shape[:-1], self.out_features)


def quantize(net: N) -> N:
    """Replace the linear layers within :data:`BLOCKS`, in place; return ``net``."""
    for name, module in list(net.named_modules()):
        if BLOCKS.isdisjoint(name.split(".")):
            continue
        for child, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, child, Int8Linear.of(layer))
    return net


def outputs(layer: nn.Linear | Int8Linear, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    """The layer of outputs ``start`` to ``stop`` alone."""
    if isinstance(layer, Int8Linear):
        return layer.outputs(start, stop)
    return partial(
        F.linear, weight=layer.weight[start:stop], bias=None if layer.bias is None else layer.bias[start:stop]
    )


def remark(net: nn.Module) -> str:
    """What a report says about a network with int8 weights; "" for others."""
    if not any(isinstance(module, Int8Linear) for module in net.modules()):
        return ""
    return "int8 weights: the pictures differ from those of fp32, see docs/benchmarks/speed.md"
