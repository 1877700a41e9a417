"""The layers that networks are built of, :class:`Operations`: fast products on a CPU, and int8 weights.

On a CPU a step multiplies large matrices by a handful of rows, and its time goes into reading the weights. The library
call that reads them best follows from the number of rows and the processor's vendor, see :func:`linear`, and never from
timing: equal calls give equal bits in every process on one machine with the same number of threads.

A host with memory management of its own (ComfyUI) passes its own operations to the networks. Their layers may keep a
weight off the device, or in another form, and make a copy for every call.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Containers whose linear layers may be int8. Embeddings, norms, input and output layers keep their dtype, because their
# errors are visible first.
_INT8_BLOCKS = frozenset(("encoder_blocks", "decoder_blocks", "res_blocks", "layers"))
_LARGEST = 127.0  # magnitude of an int8 number

N = TypeVar("N", bound=nn.Module)

# Fewest elements of a weight that exceeds the inner caches; smaller ones take F.linear.
LARGE_WEIGHT = 1 << 18
# Longest rows for halves: with longer ones it can take 1.3 times as long as F.linear.
HALVES_WIDTH = 2048
# Bytes of packed copies of a network's weights.
PACKED_BYTES = 1 << 30


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, layer: Linear | None = None) -> Tensor:
    """x [..., in] times the transposed weight [out, in], plus the bias [out]; to [..., out].

    On a CPU in fp32, oneDNN multiplies a large weight by three and more rows, in its own layout ("packed") where
    ``layer``, which owns the weight, keeps a packed copy. One and two rows take F.linear, but on AMD's processors,
    where MKL is slow, two rows are oneDNN's as well and one row is a batch of two half matrices.
    """
    if weight.numel() < LARGE_WEIGHT or not weight.is_contiguous() or not weight.is_cpu or not x.numel():
        return F.linear(x, weight, bias)

    fp32 = x.dtype is torch.float32 and weight.dtype is torch.float32
    # Fake and traced tensors are left to the compiler.
    if not fp32 or torch.is_grad_enabled() or type(x) is not Tensor or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)

    rows = x.numel() // x.shape[-1]
    flat = x.reshape(rows, -1)
    shape = (*x.shape[:-1], len(weight))
    if rows > (1 if _is_amd() else 2) and _has_onednn():
        held = weight if layer is None else layer.packed()
        if held is not weight and rows == 2:  # four rows read the packed layout up to 1.7 times as fast as two
            out = torch.ops.mkldnn._linear_pointwise(torch.cat([flat, flat]), held, bias, "none", [], "")[:2]
        else:
            out = torch.ops.mkldnn._linear_pointwise(flat.contiguous(), held, bias, "none", [], "")
        return out.view(shape)

    if rows == 1 and _is_amd() and flat.shape[1] <= HALVES_WIDTH and not len(weight) % 2:
        halves = weight.view(2, -1, weight.shape[1])
        columns = flat.T.expand(2, -1, -1)
        if bias is None:
            out = torch.bmm(halves, columns)
        else:
            out = torch.baddbmm(bias.view(2, -1, 1), halves, columns)
        return out.view(shape)

    return F.linear(x, weight, bias)


@lru_cache(maxsize=1)
def _has_onednn() -> bool:
    """Whether oneDNN is there, with the product of a linear layer."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@lru_cache(maxsize=1)
def _is_amd() -> bool:
    """Whether the processor is AMD's."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:  # no Linux
        return "AuthenticAMD" in platform.processor()


# Address and version of a layer's weight, and its packed copy.
_PACKED: WeakKeyDictionary[Linear, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()


class Linear(nn.Linear):
    """``nn.Linear``, computed by :func:`linear`."""

    packs = True  # whether a packed copy of the weight may be kept, see limit_packing

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return linear(x, self.weight, self.bias, self)

    def packed(self) -> Tensor:
        """The weight in oneDNN's layout, or the weight itself if it may not be packed."""
        weight = self.weight
        if not self.packs:
            return weight

        version = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        held = _PACKED.get(self)
        if held is None or held[0] != version:
            held = version, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
            _PACKED[self] = held

        return held[1]


class Operations:
    """The layers that a network is built of, and how it reads their weights.

    Every network takes an object of this class or of a host's subclass, and passes it on to its parts. ``Linear``,
    ``Embedding`` and ``Conv2d`` take the arguments of the layers of :mod:`torch.nn`, and their parameters have the same
    names. A weight of such a layer may be off the device, so a network reads it by :meth:`weight` or calls the layer;
    the shape and the dtype of ``layer.weight`` are always right.

    Norms, small tables and small projections are layers of :mod:`torch.nn` in every network, and those of MAR's
    diffusion head are :data:`FAST` in every case: they are always on the device. The former have few weights, and the
    head runs once for every diffusion step.
    """

    Linear: Any = nn.Linear
    Embedding: Any = nn.Embedding
    Conv2d: Any = nn.Conv2d

    def weight(self, layer: nn.Module, x: Tensor) -> AbstractContextManager[Tensor]:
        """The weight of a layer, on the device and in the dtype of ``x``, as long as the context lasts."""
        return nullcontext(layer.weight)  # type: ignore[arg-type]

    def offloaded(self, net: nn.Module) -> list[nn.Module]:
        """The layers of a network whose weights are off the device now; every call copies them."""
        return []


class _FastOperations(Operations):
    """Of networks that run for every token: a CPU takes the fastest product for a few rows."""

    Linear = Linear


TORCH = Operations()
FAST = _FastOperations()


def limit_packing(net: nn.Module) -> None:
    """Let only the first layers of a network keep packed copies, of :data:`PACKED_BYTES` together.

    The layers of a network that pack do not depend on other networks, and so neither do its results.
    """
    used = 0
    for layer in net.modules():
        if isinstance(layer, Linear):
            used += layer.weight.nbytes
            layer.packs = used <= PACKED_BYTES


def offloaded_bytes(net: nn.Module, operations: Operations = FAST) -> int:
    """Bytes of the weights of a network, or of a part of it, that are off the device now."""
    count = 0
    for layer in operations.offloaded(net):
        count += sum(parameter.nbytes for parameter in layer.parameters(recurse=False))

    return count


def remark(*nets: nn.Module, operations: Operations = FAST) -> str:
    """What a report says about networks with int8 weights, or with weights off the device; "" for others.

    ``operations``: of which they are built.
    """
    together = nn.ModuleList(nets)
    if any(isinstance(module, Int8Linear) for module in together.modules()):
        return "int8 weights: the images differ from those of fp32, see docs/weights.md"

    offloaded = offloaded_bytes(together, operations)
    if not offloaded:
        return ""

    total = sum(parameter.nbytes for parameter in together.parameters())
    return f"{offloaded / 1e9:.2g} of {total / 1e9:.2g} GB of weights streamed from main memory, which is slower"


class Int8Linear(nn.Module):
    """A linear layer on a CPU whose weight is int8, one scale per output. Lossy.

    Each row of activations is rounded with its own scale. The product is ``torch._int_mm``, whose sums are exact in
    int32.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)  # int8 [out, in]
        self.scale = nn.Parameter(scale, requires_grad=False)  # fp32 [out]; a weight is scale * weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # fp32 [out]
        self.out_features, self.in_features = weight.shape

    @classmethod
    def of(cls, layer: nn.Linear) -> Int8Linear:
        """The rounded layer: largest magnitude of an output channel to 127."""
        weight = layer.weight.detach().float()
        scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
        rounded = (weight / scale[:, None]).round_().to(torch.int8)

        bias = None if layer.bias is None else layer.bias.detach().float()
        return cls(rounded, scale, bias)

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
    """Replace the linear layers within the blocks by int8 ones, in place; return ``net``."""
    for name, module in list(net.named_modules()):
        if _INT8_BLOCKS.isdisjoint(name.split(".")):
            continue

        for child, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, child, Int8Linear.of(layer))

    return net


def outputs(layer: nn.Linear | Int8Linear, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    """The layer of outputs ``start`` to ``stop`` alone; it shares the weight."""
    bias = None if layer.bias is None else layer.bias[start:stop]
    if isinstance(layer, Int8Linear):
        return Int8Linear(layer.weight[start:stop], layer.scale[start:stop], bias)

    return partial(F.linear, weight=layer.weight[start:stop], bias=bias)
