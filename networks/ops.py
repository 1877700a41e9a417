"""The layers that networks are built of, :class:`Operations`: fast products on a CPU, and quantised weights.

On a CPU a step multiplies large matrices by a handful of rows, and most of its time goes into reading the weights. The
number of rows and the processor's vendor decide which library call reads the weights, see :func:`linear`; timing never
does. So equal calls give equal bits in every process on one machine with the same number of threads.

A host with its own memory management (ComfyUI) passes its own operations to the networks. The host's layers may keep a
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

# Containers whose linear layers may have quantised weights: the blocks of the transformers, which hold nearly all of a
# model's weights. Embeddings, norms, input and output layers keep their dtype, because their errors are visible first.
# MAR's diffusion head keeps its dtype because it has few weights and runs for every diffusion step.
_BLOCKS = frozenset(("encoder_blocks", "decoder_blocks", "layers"))

N = TypeVar("N", bound=nn.Module)

# Number of elements from which on a weight counts as large, because it exceeds the inner caches. Smaller weights take
# F.linear.
LARGE_WEIGHT = 1 << 18
# Longest rows for the product of two half matrices: with longer rows it can take 1.3 times as long as F.linear.
HALVES_WIDTH = 2048
# Most bytes of packed copies of a network's weights.
PACKED_BYTES = 1 << 30


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, layer: Linear | None = None) -> Tensor:
    """x [..., in] times the transposed weight [out, in], plus the bias [out]: [..., out].

    On a CPU in fp32, oneDNN multiplies a large weight by three or more rows. It reads a packed copy of the weight, in
    its own layout, if ``layer``, which owns the weight, keeps one. One and two rows take F.linear. On AMD's processors,
    where MKL is slow, oneDNN multiplies two rows too, and one row is multiplied by a batch of two half matrices.
    """
    # Fake and traced tensors are left to the compiler.
    is_plain = torch.is_grad_enabled() or type(x) is not Tensor or torch.compiler.is_compiling()
    is_large = weight.numel() >= LARGE_WEIGHT and weight.is_contiguous()
    if is_plain or not is_large or not _in_fp32_on_cpu(x, weight) or not x.numel():
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
    """Whether a product is in fp32 on a CPU, where :func:`linear` chooses the library call for a large weight."""
    return x.dtype is torch.float32 and weight.dtype is torch.float32 and x.is_cpu


@lru_cache(maxsize=1)
def _has_onednn() -> bool:
    """Whether PyTorch has oneDNN and its product for linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@lru_cache(maxsize=1)
def _is_amd() -> bool:
    """Whether the processor is AMD's."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:  # no Linux
        return "AuthenticAMD" in platform.processor()


# For each layer: address and version of its weight, and the packed copy of the weight.
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
    """Make networks on the device "meta" in this block: their weights have shapes and dtypes, but no numbers.

    The block also skips drawing initial weights. On "meta", this would take half of the time, and the first time
    PyTorch would import its compiler, which takes two seconds.
    """
    with torch.device("meta"), _WithoutDraws():
        yield


class Operations:
    """The layers that a network is built of, and how it reads their weights.

    Every network takes an object of this class or of a host's subclass, and passes it on to its parts. ``Linear``,
    ``Embedding`` and ``Conv2d`` take the arguments of the layers of :mod:`torch.nn`, and their parameters have the same
    names. A weight of such a layer may be off the device, so a network reads it by :meth:`weight` or calls the layer;
    the shape and the dtype of ``layer.weight`` are always right.

    Some layers are always on the device. Norms, small tables and small projections are layers of :mod:`torch.nn` in
    every network, because they have few weights. The layers of MAR's diffusion head are always :data:`FAST`, because
    the head runs once for every diffusion step.
    """

    Linear: Any = nn.Linear
    Embedding: Any = nn.Embedding
    Conv2d: Any = nn.Conv2d
    # Types of layers that compute F.linear(input, weight, bias), with the weight that :meth:`weight` gives.
    plain: tuple[type, ...] = (nn.Linear,)

    def weight(self, layer: nn.Module, x: Tensor) -> AbstractContextManager[Tensor]:
        """The weight of a layer, on the device and in the dtype of ``x``, as long as the context lasts."""
        return nullcontext(layer.weight)  # type: ignore[arg-type]

    def add_product(self, x: Tensor, layer: Any, inner: Tensor) -> Tensor:
        """x + layer(inner), for x [..., out] and inner [..., in]; x may be overwritten.

        For a plain layer without bias, one library call computes product and sum. Its result replaces x, because it
        would copy x otherwise. The call is the same wherever a host keeps the weight, so the place does not change the
        result.
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
        """The layers of a network whose weights are off the device now. Every call of such a layer copies them."""
        return []

    def moves(self, net: nn.Module) -> bool:
        """Whether weights of a network may be moved or replaced between two of its calls."""
        return False

    def quantised(self, dtype: torch.dtype, weights: int) -> Operations:
        """The operations for a network with quantised layers that computes in ``dtype``. ``weights``: bytes of all its
        weights.
        """
        return self

    def format(self, wanted: Format, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Format:
        """How a layer stores a weight [N, K] for products on a device: as ``wanted``, but int8 as two planes of 4 bits
        if these are faster.
        """
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
        """The entries of a state dict that a layer with this quantised weight loads instead of its weight ``name``."""
        if isinstance(weight, FourBits):
            return {name: _as_kind(weight.codes, weight.format), f"{name}_scale": weight.scales}

        return {name: weight.stored, f"{name}_scale": weight.scale}


class _FastOperations(Operations):
    """The layers of networks that run for every token: a CPU takes the fastest product for a few rows."""

    plain = (SmallLinear, Linear)

    @staticmethod
    def Linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
        """A layer whose product suits its size."""
        kind = SmallLinear if in_features * out_features < LARGE_WEIGHT else Linear
        return kind(in_features, out_features, bias)


TORCH = Operations()
FAST = _FastOperations()


def limit_packing(net: nn.Module) -> None:
    """Let only the first layers of a network keep packed copies, up to :data:`PACKED_BYTES` together.

    Which layers keep packed copies does not depend on other networks, so the results of a network do not, either.
    """
    used = 0
    for layer in net.modules():
        if isinstance(layer, (SmallLinear, Linear)):
            used += layer.weight.nbytes
        if isinstance(layer, Linear):
            layer.packs = used <= PACKED_BYTES


def packed_bytes(net: nn.Module) -> int:
    """The most bytes that the products of a network on a CPU take for packed copies of its weights, including weights
    of 4 bits.

    A weight of which no packed copy may be kept is packed for every product.
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

    ``operations``: the operations of which the networks are built.
    """
    together = nn.ModuleList(nets)
    remarks = []

    kinds = sorted({kind_of(parameter) for parameter in together.parameters()} - {""})
    if kinds:
        remarks.append(f"{' and '.join(kinds)} weights change the images (see docs/precision.md)")
    if lacking := _without_product(together):
        remarks.append(f"{lacking} cannot multiply 4-bit weights, so every pass unpacks them, which is slower")

    offloaded = offloaded_bytes(together, operations)
    if offloaded:
        total = sum(parameter.nbytes for parameter in together.parameters())
        remarks.append(
            f"{offloaded / 1e9:.2g} of {total / 1e9:.2g} GB of weights are in system memory and are copied for every "
            "pass, which is slower"
        )

    return "; ".join(remarks)


def _without_product(net: nn.Module) -> str:
    """Device and dtype of 4-bit layers whose weights are unpacked for every product, for example "cuda:0 in fp16"; ""
    if there are none.
    """
    for layer in net.modules():
        if isinstance(layer, PackedLinear) and not has_product(layer.weight.device, layer.compute):
            return f"{layer.weight.device} in {str(layer.compute).removeprefix('torch.')}"

    return ""


def unpacking_bytes(net: nn.Module) -> int:
    """The most working memory in bytes that the conversion of a quantised weight for a product takes: two copies in
    fp32, of the whole weight, or of a part at a time if it has 4 bits.
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
        """A layer like ``layer``, with its weight rounded to ``kind``."""
        made = cls.like(layer)
        weight = round_to(layer.weight.detach(), kind)
        made.hold(weight)
        return made

    def hold(self, weight: Quantized) -> None:
        """Take a weight."""
        self.weight = nn.Parameter(weight.stored, requires_grad=False)
        self.weight_scale = nn.Parameter(weight.scale, requires_grad=False)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *about: Any) -> None:
        # The loaded weight decides the dtypes and the shape of the scale.
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

        # In other dtypes the stored numbers are exact, and multiplying each output by its scale is less work than
        # multiplying each weight.
        out = linear(x, self.weight.to(x.dtype)) * self.weight_scale.flatten()
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype)


class PackedLinear(nn.Module):
    """A linear layer with a weight of 4 bits, or of 8 bits as planes, see :mod:`.quantized`. Its input is not rounded.

    The first product on a GPU arranges the codes in the order that the GPU reads, in place. A CPU keeps an arranged
    copy.
    """

    def __init__(self, layer: Any, format: Format, compute: torch.dtype, device: torch.device):
        """A layer like another, for a weight that is loaded later; ``compute``: dtype of the input."""
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.format = format
        self.compute = compute
        self.arranged = ""  # the type of device for which the codes are arranged; "": they are as FourBits has them
        self.copy: Tensor | None = None  # the codes in a CPU's order

        rows = format.planes * self.out_features
        codes = torch.empty(rows, self.in_features // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(self.in_features // format.group, rows, 2, dtype=torch.bfloat16, device=device)
        # Two codes in a byte, [P N, K / 2] of P planes. The dtype tells the number of planes: uint8 for one, int8 for
        # two.
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
    """Codes in the dtype that tells their kind: int8 for two planes, else uint8."""
    return codes.view(torch.int8) if format.kind == INT8 else codes


def blocks_layers(net: nn.Module) -> list[str]:
    """Names of the linear layers in a network's blocks, whose weights may have 8 bits."""
    found = []
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear) and not _BLOCKS.isdisjoint(name.split(".")):
            found.append(name)

    return found


def replace_layer(net: nn.Module, name: str, make: Callable[[Any], nn.Module]) -> None:
    """Replace the layer ``name`` by ``make(layer)``."""
    put_layer(net, name, make(net.get_submodule(name)))


def put_layer(net: nn.Module, name: str, layer: nn.Module) -> None:
    """Set the layer ``name`` of a network."""
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
