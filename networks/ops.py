"""The layers that networks are built of, :class:`Operations`: fast products on a CPU, and quantised weights.

On a CPU a step multiplies large matrices by a handful of rows, and its time goes into reading the weights. The library
call that reads them best follows from the number of rows and the processor's vendor, see :func:`linear`, and never from
timing: equal calls give equal bits in every process on one machine with the same number of threads.

A host with memory management of its own (ComfyUI) passes its own operations to the networks. Their layers may keep a
weight off the device, or in another form, and make a copy for every call.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import UserError
from .quantized import (
    INT4,
    INT8,
    QUANTISED,
    UNPACKED,
    Format,
    FourBits,
    Quantized,
    arranged,
    format_of,
    four_bit_product,
    from_tiles,
    has_product,
    kind_of,
    pays_as_planes,
    planes,
    round_to,
    round_to_four,
    takes,
    unpacked_product,
)

# Containers whose linear layers may have quantised weights: the blocks of the transformers, nearly all of a model's
# weights. Embeddings, norms, input and output layers keep their dtype, because their errors are visible first, and so
# does MAR's diffusion head: few weights, which run for every diffusion step.
_BLOCKS = frozenset(("encoder_blocks", "decoder_blocks", "layers"))

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
    # Fake and traced tensors are left to the compiler.
    plain = torch.is_grad_enabled() or type(x) is not Tensor or torch.compiler.is_compiling()
    is_large = weight.numel() >= LARGE_WEIGHT and weight.is_contiguous()
    if plain or not is_large or not _in_fp32_on_cpu(x, weight) or not x.numel():
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


def _in_fp32_on_cpu(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a product for which, with a large weight, a call of a library is chosen."""
    return x.dtype is torch.float32 and weight.dtype is torch.float32 and x.is_cpu


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


class SmallLinear(nn.Linear):
    """``nn.Linear`` with a weight that fits into the inner caches: F.linear is its fastest product."""


class Linear(nn.Linear):
    """``nn.Linear`` with a large weight, computed by :func:`linear`."""

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


# The functions that draw the initial weights of PyTorch's layers.
_DRAW = frozenset((nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_))


class _WithoutDraws(TorchFunctionMode):
    """Leaves initial weights as they are allocated."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAW:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Networks made within are on the device "meta": their weights have shapes and dtypes, but no numbers.

    No initial weights are drawn either. On "meta" that takes half of the time, and at first PyTorch imports its
    compiler for it, which takes two seconds.
    """
    with torch.device("meta"), _WithoutDraws():
        yield


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
    # Types of layers that compute F.linear of their input, of what :meth:`weight` gives, and of their bias.
    plain: tuple[type, ...] = (nn.Linear,)

    def weight(self, layer: nn.Module, x: Tensor) -> AbstractContextManager[Tensor]:
        """The weight of a layer, on the device and in the dtype of ``x``, as long as the context lasts."""
        return nullcontext(layer.weight)  # type: ignore[arg-type]

    def add_product(self, x: Tensor, layer: Any, inner: Tensor) -> Tensor:
        """x + layer(inner) of x [..., out] and inner [..., in]; x may be overwritten.

        One library call does both for a plain layer without bias. Its result replaces x, which it would copy otherwise.
        It is the same call wherever a host keeps the weight, so that this does not change the result.
        """
        # Training needs x as it was, and a compiler fuses the sum itself.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return x + layer(inner)

        in_one = type(layer) in self.plain and layer.bias is None and x.dtype is inner.dtype and x.is_contiguous()
        if not in_one or layer.weight.numel() >= LARGE_WEIGHT and _in_fp32_on_cpu(inner, layer.weight):
            return x + layer(inner)

        with self.weight(layer, inner) as weight:
            x.flatten(0, -2).addmm_(inner.flatten(0, -2), weight.T)
        return x

    def offloaded(self, net: nn.Module) -> list[nn.Module]:
        """The layers of a network whose weights are off the device now; every call copies them."""
        return []

    def moves(self, net: nn.Module) -> bool:
        """Whether weights of a network may be moved or replaced between two of its calls."""
        return False

    def quantised(self, dtype: torch.dtype, weights: int) -> Operations:
        """The operations of a network with quantised layers that computes in ``dtype``; ``weights``: bytes of all."""
        return self

    def format(self, wanted: Format, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Format:
        """How a layer stores a weight [N, K] for products on a device: int8 as planes where these are faster."""
        if wanted == Format(INT8) and pays_as_planes(device, dtype):
            return format_of(QUANTISED[INT4], "attention", shape)

        return wanted

    def make_room(self, net: nn.Module, formats: Mapping[str, Format]) -> None:
        """Prepare the linear layers of these names for their weights, before the weights are loaded."""
        for name, format in formats.items():
            replace_layer(net, name, partial(layer_for, format=format))

    def round(self, weight: Tensor, format: Format) -> Quantized | FourBits:
        """A weight [N, K] in a format of :meth:`format`."""
        return rounded(weight, format)

    def entries(self, name: str, weight: Quantized | FourBits) -> Mapping[str, Tensor]:
        """What such a layer loads in the place of its weight ``name``."""
        if isinstance(weight, FourBits):
            return {name: _as_kind(weight.codes, weight.format), f"{name}_scale": weight.scales}

        return {name: weight.stored, f"{name}_scale": weight.scale}


class _FastOperations(Operations):
    """Of networks that run for every token: a CPU takes the fastest product for a few rows."""

    plain = (SmallLinear, Linear)

    @staticmethod
    def Linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
        """A layer whose product suits its size."""
        kind = SmallLinear if in_features * out_features < LARGE_WEIGHT else Linear
        return kind(in_features, out_features, bias)


TORCH = Operations()
FAST = _FastOperations()


def limit_packing(net: nn.Module) -> None:
    """Let only the first layers of a network keep packed copies, of :data:`PACKED_BYTES` together.

    The layers of a network that pack do not depend on other networks, and so neither do its results.
    """
    used = 0
    for layer in net.modules():
        if isinstance(layer, (SmallLinear, Linear)):
            used += layer.weight.nbytes
        if isinstance(layer, Linear):
            layer.packs = used <= PACKED_BYTES


def packed_bytes(net: nn.Module) -> int:
    """Bytes that the products of a network on a CPU take for packed copies of its weights, at most, also of 4 bits.

    A weight that may not be packed for good is packed for every product.
    """
    kept = 0
    largest = 0
    for layer in net.modules():
        if isinstance(layer, PackedLinear) and layer.weight.is_cpu:
            kept += layer.weight.nbytes
        if not isinstance(layer, Linear) or not layer.weight.is_cpu or layer.weight.dtype is not torch.float32:
            continue

        if layer.packs:
            kept += layer.weight.nbytes
        else:
            largest = max(largest, layer.weight.nbytes)

    return kept + largest


def offloaded_bytes(net: nn.Module, operations: Operations = FAST) -> int:
    """Bytes of the weights of a network, or of a part of it, that are off the device now."""
    count = 0
    for layer in operations.offloaded(net):
        count += sum(parameter.nbytes for parameter in layer.parameters(recurse=False))

    return count


def remark(*nets: nn.Module, operations: Operations = FAST) -> str:
    """What a report says about networks with quantised weights, or with weights off the device; "" for others.

    ``operations``: of which they are built.
    """
    together = nn.ModuleList(nets)
    remarks = []

    kinds = sorted({kind_of(parameter) for parameter in together.parameters()} - {""})
    if kinds:
        remarks.append(f"{' and '.join(kinds)} weights: the images differ, see docs/precision.md")
    if lacking := _without_product(together):
        remarks.append(f"{lacking} cannot multiply 4-bit weights: every pass unpacks them, which is slower")

    offloaded = offloaded_bytes(together, operations)
    if offloaded:
        total = sum(parameter.nbytes for parameter in together.parameters())
        remarks.append(
            f"{offloaded / 1e9:.2g} of {total / 1e9:.2g} GB of weights streamed from system memory, which is slower"
        )

    return "; ".join(remarks)


def _without_product(net: nn.Module) -> str:
    """Device and dtype of layers of 4 bits that are unpacked for every product, for example "cuda:0 in fp16"; or ""."""
    for layer in net.modules():
        if isinstance(layer, PackedLinear) and not has_product(layer.weight.device, layer.compute):
            return f"{layer.weight.device} in {str(layer.compute).removeprefix('torch.')}"

    return ""


def unpacking_bytes(net: nn.Module) -> int:
    """Most working memory in which a quantised weight is converted for a product: twice in fp32, and of 4 bits a part
    at a time.
    """
    largest = 0
    for layer in net.modules():
        if isinstance(layer, PackedLinear):
            largest = max(largest, min(layer.in_features * layer.out_features, UNPACKED))
        else:
            own = (weight.numel() for weight in layer.parameters(recurse=False) if kind_of(weight))
            largest = max(largest, *own, 0)

    return 2 * torch.float32.itemsize * largest


class EightBitLinear(nn.Module):
    """A linear layer whose weight has 8 bits. Its input is not rounded."""

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None, device: torch.device):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        stored = torch.empty(out_features, in_features, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(stored, requires_grad=False)  # int8 or float8 [out, in]
        scale = torch.empty(out_features, 1, device=device)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)  # fp32 [out, 1], or one number []
        self.register_parameter("bias", bias)  # [out], in the dtype of the computation

    @classmethod
    def like(cls, layer: nn.Linear) -> EightBitLinear:
        """A layer of the same shape and with the same bias, for a weight that is loaded later."""
        return cls(layer.in_features, layer.out_features, layer.bias, layer.weight.device)

    @classmethod
    def of(cls, layer: nn.Linear, kind: str) -> EightBitLinear:
        """The rounded layer."""
        made = cls.like(layer)
        weight = round_to(layer.weight.detach(), kind)
        made.hold(weight)
        return made

    def hold(self, weight: Quantized) -> None:
        """Take a weight."""
        self.weight = nn.Parameter(weight.stored, requires_grad=False)
        self.weight_scale = nn.Parameter(weight.scale, requires_grad=False)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *about: Any) -> None:
        # The shape of the scale, and the dtypes, are those of the weight that is loaded.
        stored = state.get(f"{prefix}weight")
        scale = state.get(f"{prefix}weight_scale")
        if stored is not None and scale is not None:
            self.hold(Quantized(stored, scale))

        super()._load_from_state_dict(state, prefix, *about)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        if x.dtype is torch.float16:
            # A product with the stored numbers alone could exceed fp16.
            weight = (self.weight.float() * self.weight_scale).to(x.dtype)
            return F.linear(x, weight, self.bias)

        # In other dtypes the stored numbers are exact, and one multiplication an output is less work than one a weight.
        out = linear(x, self.weight.to(x.dtype)) * self.weight_scale.flatten()
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype)


class PackedLinear(nn.Module):
    """A linear layer with a weight of 4 bits, or of 8 as planes, see :mod:`.quantized`. Its input is not rounded.

    The first product on a graphics card arranges the codes for it, in place; a CPU keeps a copy that is arranged.
    """

    def __init__(self, layer: Any, format: Format, compute: torch.dtype, device: torch.device):
        """A layer like another, for a weight that is loaded later; ``compute``: dtype of the input."""
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.format = format
        self.compute = compute
        self.arranged = ""  # the type of device in whose order the codes are; "": as FourBits has them
        self.copy: Tensor | None = None  # the codes in a CPU's order

        rows = format.planes * self.out_features
        codes = torch.empty(rows, self.in_features // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(self.in_features // format.group, rows, 2, dtype=torch.bfloat16, device=device)
        # Two codes in a byte, [P N, K / 2] of P planes: uint8 of one, int8 of two, which tells them apart.
        self.weight = nn.Parameter(_as_kind(codes, format), requires_grad=False)
        self.weight_scale = nn.Parameter(scales, requires_grad=False)  # bf16 [K / G, P N, 2]: scale and zero
        self.register_parameter("bias", layer.bias)  # [N], in the dtype of the computation

    def hold(self, weight: FourBits) -> None:
        """Take a weight."""
        self.weight = nn.Parameter(_as_kind(weight.codes, self.format), requires_grad=False)
        self.weight_scale = nn.Parameter(weight.scales, requires_grad=False)
        self.arranged = ""
        self.copy = None

    def _apply(self, *args: Any, **more: Any) -> Any:
        self.copy = None  # the weight may move
        return super()._apply(*args, **more)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        flat = x.flatten(0, -2)
        if takes(x.device, x.dtype, len(flat)):
            out = self._product(flat.contiguous())
        else:
            out = unpacked_product(flat, self._plain_codes(), self.weight_scale, self.format.planes)

        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor) -> Tensor:
        """x [R, K] times the packed weight, to [R, N]."""
        codes = self._arranged_codes(x.device.type)
        out = four_bit_product(x, codes, self.format.group, self.weight_scale.to(x.dtype))
        if self.format.planes == 1:
            return out
        return out[:, : self.out_features] + out[:, self.out_features :]

    def _arranged_codes(self, device_type: str) -> Tensor:
        """The codes in the order of the product on a type of device."""
        if device_type == "cpu":
            if self.copy is None:
                self.copy = arranged(self._plain_codes())
            return self.copy

        if self.arranged != device_type:
            codes = arranged(self._plain_codes())
            with torch.inference_mode():  # which may write tensors that were made in it, and all others
                self.weight.copy_(codes.view(self.weight.dtype))
            self.arranged = device_type
        return self.weight.view(torch.uint8)

    def _plain_codes(self) -> Tensor:
        """The codes in the order of FourBits."""
        codes = self.weight.view(torch.uint8)
        if not self.arranged:
            return codes
        if self.arranged == "cuda":
            return from_tiles(codes)

        raise UserError(
            f"device: an earlier run on {self.arranged} rearranged these int4 weights for that device; load the model "
            f"again for {self.weight.device}."
        )


def _as_kind(codes: Tensor, format: Format) -> Tensor:
    """Codes in the dtype that tells their kind: int8 of planes."""
    return codes.view(torch.int8) if format.kind == INT8 else codes


def blocks_layers(net: nn.Module) -> list[str]:
    """Names of the linear layers in a network's blocks, whose weights may have 8 bits."""
    found = []
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear) and not _BLOCKS.isdisjoint(name.split(".")):
            found.append(name)

    return found


def replace_layer(net: nn.Module, name: str, make: Callable[[Any], nn.Module]) -> None:
    """Replace the layer of that name by what ``make`` makes of it."""
    put_layer(net, name, make(net.get_submodule(name)))


def put_layer(net: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of that name."""
    above, _, last = name.rpartition(".")
    setattr(net.get_submodule(above), last, layer)


def quantize(net: N, dtype: str) -> N:
    """Quantise the blocks of a network, in place; return ``net``. ``dtype``: a key of :data:`.quantized.QUANTISED`."""
    for name in blocks_layers(net):
        layer: Any = net.get_submodule(name)
        shape = layer.weight.shape
        wanted = format_of(QUANTISED[dtype], name, shape)
        format = FAST.format(wanted, shape, layer.weight.device, layer.weight.dtype)
        made = layer_for(layer, format)
        made.hold(rounded(layer.weight.detach(), format))
        put_layer(net, name, made)

    return net


def rounded(weight: Tensor, format: Format) -> Quantized | FourBits:
    """A weight [N, K] in a format."""
    if not format.group:
        return round_to(weight, format.kind)
    return planes(weight, format.group) if format.kind == INT8 else round_to_four(weight, format.group)


def layer_for(layer: nn.Linear, format: Format) -> EightBitLinear | PackedLinear:
    """A layer of the same shape and with the same bias, for a weight in a format that is loaded later."""
    if not format.group:
        return EightBitLinear.like(layer)
    return PackedLinear(layer, format, layer.weight.dtype, layer.weight.device)
