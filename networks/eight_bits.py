"""Weights of 8 bits: :class:`Quantized`, a weight with its scale, and how a weight is rounded to one.

int8 has one scale for every output channel, fp8 (float8_e4m3fn) one for the whole matrix: ComfyUI's layouts
``int8_tensorwise`` and ``float8_e4m3fn``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

INT8 = "int8"
FP8 = "fp8"
# How a weight of 8 bits is stored, by the names of its kind. A file may also have the second form of fp8.
STORED = {torch.int8: INT8, torch.float8_e4m3fn: FP8, torch.float8_e5m2: FP8}
# ComfyUI's formats of 8 bits, and how they are stored.
FORMATS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8_tensorwise": torch.int8,
}
_FORMAT_OF = {dtype: name for name, dtype in FORMATS.items()}

_LARGEST = {INT8: 127.0, FP8: torch.finfo(torch.float8_e4m3fn).max}  # magnitude of a rounded number


class Quantized(Tensor):
    """A weight of 8 bits and its scale, as the tensor of the numbers that they stand for.

    Every operation gets these numbers in fp32, so what does not know of quantised weights reads them as any others.
    """

    stored: Tensor  # int8 or float8 [out, ...]
    scale: Tensor  # fp32: one number [], or one for every output [out, 1, ...]
    beside: Mapping[str, Tensor] | None  # what a file for ComfyUI holds beside it, by the end of its name

    @staticmethod
    def __new__(cls, stored: Tensor, scale: Tensor, beside: Mapping[str, Tensor] | None = None) -> Quantized:
        made = Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.float32, device=stored.device)
        made.stored = stored
        made.scale = scale
        made.beside = beside
        return made

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of the stored numbers."""
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
    """Round a weight [out, in] to INT8 or FP8: the largest magnitude, of an output or of all, becomes the largest
    number of the kind.
    """
    weight = weight.float()
    largest = weight.abs().amax(1, keepdim=True) if kind == INT8 else weight.abs().amax()
    scale = largest.clamp_min(torch.finfo(torch.float32).tiny * _LARGEST[kind]) / _LARGEST[kind]

    numbers = (weight / scale).clamp_(-_LARGEST[kind], _LARGEST[kind])
    stored = numbers.round_().to(torch.int8) if kind == INT8 else numbers.to(torch.float8_e4m3fn)
    return Quantized(stored, scale)


def kind_of(weight: Tensor) -> str:
    """INT8 or FP8 for a weight of 8 bits, also for one in a host's form; "" for any other."""
    return STORED.get(getattr(weight, "storage_dtype", weight.dtype), "")


def statement(weight: Quantized) -> Tensor:
    """What ComfyUI reads beside a weight of ours as ``comfy_quant``, uint8 [n]: it must not round an input of fp8."""
    stated: dict[str, Any] = {"format": _FORMAT_OF[weight.stored.dtype]}
    if weight.kind == FP8:
        stated["full_precision_matrix_mult"] = True

    return torch.tensor([*json.dumps(stated).encode()], dtype=torch.uint8)
