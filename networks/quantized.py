"""Formats of quantised weights: which format each dtype gives the blocks of a transformer, how a weight is rounded, and
PyTorch's products with weights of 4 bits.

- int8 has one scale for every output channel, fp8 (float8_e4m3fn) one scale for the whole matrix. These are ComfyUI's
  layouts ``int8_tensorwise`` and ``float8_e4m3fn``.
- int4 has a scale and a zero for every group of a row. A number is ``(code - 8) * scale + zero``, with a code of 0 to
  15. This is the form of ``aten._weight_int4pack_mm`` on every device.
- An int8 weight can be stored as two *planes* of 4 bits: if q is its number, s its scale and q + 128 = 16 h + l, then
  ``q s = (h - 8) 16 s + (l - 8) s + 8 s``. Both planes are one 4-bit weight with twice as many outputs; the two halves
  of the outputs are added. The reason is that on CUDA devices PyTorch has a fast product of few rows with 4 bits, but
  none with 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

INT8 = "int8"
FP8 = "fp8"
INT4 = "int4"
# int4 in groups of 64 in all layers, including attention: this takes the least memory.
INT4_SMALL = "int4-g64"


class Format(NamedTuple):
    """How a weight is stored."""

    kind: str  # INT8, FP8 or INT4; "": as the rest of the network
    group: int = 0  # for int4, and int8 as planes: how many numbers of a row share a scale and a zero; else 0

    @property
    def planes(self) -> int:
        """Number of 4-bit weights that it consists of; 0 if it is not stored in 4 bits."""
        return (2 if self.kind == INT8 else 1) if self.group else 0

    @property
    def bits(self) -> float:
        """Bits of a number, with its share of scales and zeros of 16 bits."""
        return self.planes * (4 + 32 / self.group) if self.group else 8.0

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a weight of ``shape`` [N, K] can have this format."""
        n, k = shape
        return not self.group or (k % self.group == 0 and n % OUTPUTS == 0)


class Formats(NamedTuple):
    """The formats that a dtype gives the linear layers of a block."""

    feed_forward: Format
    attention: Format


# PyTorch's products take groups of these sizes, and a multiple of this many outputs.
GROUPS = (256, 128, 64, 32)
OUTPUTS = 16
# The dtypes that quantise the blocks of a model. All other parts of the model are as with "auto".
QUANTISED = {
    INT8: Formats(Format(INT8), Format(INT8)),
    FP8: Formats(Format(FP8), Format(FP8)),
    INT4: Formats(Format(INT4, 32), Format(INT8, GROUPS[0])),
    INT4_SMALL: Formats(Format(INT4, 64), Format(INT4, 64)),
}
# The dtypes that take 8 bits, and those that take fewer.
EIGHT_BITS = (INT8, FP8)
FEWER_BITS = (INT4, INT4_SMALL)
# Parts of the names of layers of attention, in the networks and in official files.
_ATTENTION = frozenset(("attention", "self_attn", "attn"))

# The kind of a quantised weight, by the dtype in which it is stored. A file may also have the second form of fp8.
STORED = {torch.int8: INT8, torch.float8_e4m3fn: FP8, torch.float8_e5m2: FP8, torch.uint8: INT4}
# ComfyUI's formats of 8 bits, and how they are stored.
FORMATS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8_tensorwise": torch.int8,
}
_FORMAT_OF = {dtype: name for name, dtype in FORMATS.items()}

_LARGEST = {INT8: 127.0, FP8: torch.finfo(torch.float8_e4m3fn).max}  # magnitude of a rounded number
_MIDDLE = 8  # code of the zero
_MOST = 15  # largest code
# Bits after the first bit of a scale of planes. A code of 4 bits times such a scale has at most 8 significant bits, so
# it is exact in bf16.
_MANTISSA = 3


def format_of(formats: Formats, layer: str, shape: Sequence[int]) -> Format:
    """How a layer with this name stores a weight [N, K]. If the 4-bit products do not take the shape, it is int8."""
    wanted = formats.feed_forward if _ATTENTION.isdisjoint(layer.split(".")) else formats.attention
    for group in (wanted.group, *GROUPS):
        if group <= wanted.group and wanted._replace(group=group).fits(shape):
            return wanted._replace(group=group)

    return Format(INT8)


class Quantized(Tensor):
    """A weight of 8 bits and its scale, as the tensor of the numbers that they stand for.

    Every operation gets these numbers in fp32, so code that knows nothing of quantised weights can read them like any
    other weight.
    """

    stored: Tensor  # int8 or float8 [out, ...]
    scale: Tensor  # fp32: one number [], or one for every output [out, 1, ...]
    beside: Mapping[str, Tensor] | None  # further tensors of this weight in a file for ComfyUI, by their names' endings

    @staticmethod
    def __new__(cls, stored: Tensor, scale: Tensor, beside: Mapping[str, Tensor] | None = None) -> Quantized:
        made = Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.float32, device=stored.device)
        made.stored = stored
        made.scale = scale
        made.beside = beside
        return made

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of the stored numbers."""
        return self.stored.dtype

    @property
    def kind(self) -> str:
        """INT8 or FP8."""
        return STORED[self.stored.dtype]

    def numbers(self) -> Tensor:
        """The weight, fp32."""
        return self.stored.float() * self.scale.to(self.stored.device)

    def placed(self, device: str | torch.device) -> Quantized:
        """A copy on a device."""
        stored = self.stored.to(device, copy=True).contiguous()
        beside = self.beside and {name: tensor.clone() for name, tensor in self.beside.items()}
        return Quantized(stored, self.scale.to(device, copy=True), beside)

    def __repr__(self, **about: Any) -> str:  # type: ignore[override]
        return f"Quantized({self.kind}, {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        from torch.utils._pytree import tree_map  # a private module, which may move: only 8-bit weights need it

        def plain(value: Any) -> Any:
            return value.numbers() if isinstance(value, Quantized) else value

        return function(*tree_map(plain, args), **tree_map(plain, dict(kwargs or {})))


def round_to(weight: Tensor, kind: str) -> Quantized:
    """Round a weight [out, in] to INT8 or FP8. The scale turns the largest magnitude (for INT8 of each output, for FP8
    of the whole weight) into the largest number of the kind.
    """
    weight = weight.float()
    largest = weight.abs().amax(1, keepdim=True) if kind == INT8 else weight.abs().amax()
    scale = largest.clamp_min(torch.finfo(torch.float32).tiny * _LARGEST[kind]) / _LARGEST[kind]

    numbers = (weight / scale).clamp_(-_LARGEST[kind], _LARGEST[kind])
    stored = numbers.round_().to(torch.int8) if kind == INT8 else numbers.to(torch.float8_e4m3fn)
    return Quantized(stored, scale)


def kind_of(weight: Tensor) -> str:
    """INT8, FP8 or INT4 for a quantised weight, even if it is in a host's form; "" for any other weight."""
    if hasattr(weight, "storage_dtype") and weight.nbytes < weight.numel():
        return INT4
    return STORED.get(getattr(weight, "storage_dtype", weight.dtype), "")


def statement(weight: Quantized) -> Tensor:
    """The entry ``comfy_quant`` that ComfyUI reads together with a weight of ours, uint8 [n]. For fp8 it says that
    ComfyUI must not round the input.
    """
    stated: dict[str, Any] = {"format": _FORMAT_OF[weight.stored.dtype]}
    if weight.kind == FP8:
        stated["full_precision_matrix_mult"] = True

    return torch.tensor([*json.dumps(stated).encode()], dtype=torch.uint8)


# ------------------------------------------------------------------------------------------------ 4 bits


@dataclass(frozen=True)
class FourBits:
    """A weight of 4 bits, or a weight of 8 bits as planes."""

    codes: Tensor  # uint8 [P N, K / 2] of P planes: two codes in a byte, the even column's in the upper half
    scales: Tensor  # bf16 [K / G, P N, 2]: scale and zero of every group
    format: Format

    def numbers(self) -> Tensor:
        """The weight, fp32 [N, K]."""
        w = _numbers(unpaired(self.codes), self.scales)
        return w if self.format.planes == 1 else w[: len(w) // 2] + w[len(w) // 2 :]


def _numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers, fp32 [N, K], that codes uint8 [N, K] with scales [K / G, N, 2] stand for."""
    scale, zero = scales.float().permute(2, 1, 0)[..., None]  # [N, K / G, 1] each
    w = (codes.unflatten(1, (scale.shape[1], -1)).float() - _MIDDLE).mul_(scale).add_(zero)
    return w.flatten(1)


def paired(codes: Tensor) -> Tensor:
    """Pack codes uint8 [N, K], two in a byte: uint8 [N, K / 2]."""
    return codes[:, ::2] << 4 | codes[:, 1::2]


def unpaired(pairs: Tensor) -> Tensor:
    """The inverse of :func:`paired`: codes uint8 [N, K] from pairs uint8 [N, K / 2]."""
    return torch.stack([pairs >> 4, pairs & _MOST], -1).flatten(1)


def round_to_four(weight: Tensor, group: int) -> FourBits:
    """Round a weight [N, K] to 4 bits: each number to the nearest of 16 evenly spaced numbers between the least and the
    greatest number of its group.

    Scales and zeros are rounded to bf16 before the codes are chosen.
    """
    w = weight.float().unflatten(1, (-1, group))
    low, high = w.aminmax(dim=-1)
    scale = ((high - low) / _MOST).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
    zero = (low + _MIDDLE * scale.float()).bfloat16()

    steps = (w - zero.float()[..., None]) / scale.float()[..., None]
    codes = (steps + _MIDDLE).round_().clamp_(0, _MOST).to(torch.uint8).flatten(1)
    scales = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()
    return FourBits(paired(codes), scales, Format(INT4, group))


def planes(weight: Tensor, group: int) -> FourBits:
    """Round a weight [N, K] to int8 with a scale for every output, as two planes of 4 bits.

    A scale has 4 significant bits, so the numbers of both planes are exact in bf16, to which the product on CUDA
    devices rounds them.
    """
    w = weight.float()
    scale = w.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * 2**16) / _LARGEST[INT8]
    unit = torch.exp2(scale.log2().floor() - _MANTISSA)
    scale = (scale / unit).ceil_() * unit

    q = (w / scale).round_().clamp_(-_LARGEST[INT8], _LARGEST[INT8]).to(torch.int16) + 128
    codes = torch.cat([q >> 4, q & _MOST]).to(torch.uint8)
    upper = torch.cat([16 * scale, torch.zeros_like(scale)], 1)
    lower = torch.cat([scale, _MIDDLE * scale], 1)
    of_a_group = torch.cat([upper, lower]).bfloat16()  # [2 N, 2]
    scales = of_a_group.expand(w.shape[1] // group, -1, -1).contiguous()
    return FourBits(paired(codes), scales, Format(INT8, group))


# ------------------------------------------------------------------------------------------------ products of 4 bits

# The most rows that take the product with 4 bits. For more rows, unpacking the weight is faster.
FEW = 32
# How many numbers are unpacked at once.
UNPACKED = 1 << 23
# How many tiles of 16 columns the products on CUDA and MPS may read together.
_INNER_TILES = (8, 4, 2)


def has_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies weights of 4 bits on a device in a dtype.

    On AMD's GPUs the codes have a different order, and most of these GPUs have no such product.
    """
    if device.type == "cuda":
        is_nvidia = torch.version.hip is None
        return is_nvidia and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)

    return device.type in ("cpu", "mps") and dtype is not torch.float16


def takes(device: torch.device, dtype: torch.dtype, rows: int) -> bool:
    """Whether an input of this many ``rows`` takes the product with 4 bits; else the weight is unpacked."""
    return has_product(device, dtype) and (rows <= FEW or device.type == "mps")


def pays_as_planes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of few rows with an int8 weight are faster as planes than by converting the weight each time."""
    return device.type == "cuda" and has_product(device, dtype)


def arranged(codes: Tensor) -> Tensor:
    """Codes uint8 [N, K / 2] in the order in which the product of their device reads them, in the same shape."""
    if codes.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpaired(codes).int(), 1)

    tiles = _inner_tiles(2 * codes.shape[1])
    return torch.ops.aten._convert_weight_to_int4pack(codes, tiles).view(torch.uint8).view(codes.shape)


def four_bit_product(x: Tensor, codes: Tensor, group: int, scales: Tensor) -> Tensor:
    """x [R, K] times a transposed weight [N, K]: [R, N].

    ``codes``: uint8 [N, K / 2] from :func:`arranged`; ``scales``: [K / G, N, 2] in the dtype of x.
    """
    if x.device.type == "cpu":
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, group, scales)

    tiles = _inner_tiles(x.shape[1])
    words = codes.view(-1).view(torch.int32).view(len(codes) // 8, x.shape[1] // (16 * tiles), 32, tiles // 2)
    return torch.ops.aten._weight_int4pack_mm(x, words, group, scales)


def _inner_tiles(columns: int) -> int:
    return next(tiles for tiles in _INNER_TILES if columns % (16 * tiles) == 0)


def from_tiles(codes: Tensor) -> Tensor:
    """The inverse of :func:`arranged` on a CUDA device, uint8 [N, K / 2].

    On CUDA (``int4mm.cu``) a tile has 8 rows and 16 columns. A word of 32 bits has 8 codes of one row, from two tiles.
    """
    rows, half = codes.shape
    words = _inner_tiles(2 * half) // 2
    # Dimensions: groups of 8 rows, groups of tiles, rows of a tile, lanes of a row, words of a lane, and the bytes of a
    # word: first 2 bytes with codes of even columns, then 2 bytes with codes of odd columns.
    tiles = codes.view(rows // 8, -1, 8, 4, words, 2, 2)
    halves = torch.stack([tiles & _MOST, tiles >> 4], -1).flatten(-2)  # [..., words, even or odd, 4]
    even, odd = halves.unbind(-2)
    pairs = even << 4 | odd
    return pairs.permute(0, 2, 1, 4, 5, 3).reshape(rows, half)


def unpacked_product(x: Tensor, codes: Tensor, scales: Tensor, planes: int) -> Tensor:
    """x [R, K] times the transposed weight that pairs of codes stand for: [R, N]. Unpacks some outputs at a time."""
    outputs = len(codes) // planes
    step = max(1, UNPACKED // (2 * codes.shape[1]))
    products = []
    for first in range(0, outputs, step):
        part = slice(first, min(first + step, outputs))
        products.append(_part_product(x, codes, scales, part, outputs if planes == 2 else 0))
    return torch.cat(products, 1)


def _part_product(x: Tensor, codes: Tensor, scales: Tensor, part: slice, lower: int) -> Tensor:
    """The product for the outputs ``part``. ``lower``: the row at which the lower plane begins; 0 without planes."""
    if not lower:
        return F.linear(x, _numbers(unpaired(codes[part]), scales[:, part]).to(x.dtype))

    below = slice(part.start + lower, part.stop + lower)
    q = unpaired(codes[part]).float().mul_(16).add_(unpaired(codes[below])).sub_(128)
    scale = scales[0, below, 0].float()
    if x.dtype is torch.float16:  # a product with q alone could exceed fp16
        return F.linear(x, (q * scale[:, None]).to(x.dtype))
    return (F.linear(x, q.to(x.dtype)) * scale).to(x.dtype)
