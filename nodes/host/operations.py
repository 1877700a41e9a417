"""ComfyUI's layers, of which networks are built whose weights it moves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import comfy.model_management as mm
import comfy.ops
import comfy.utils
import torch
from comfy.cli_args import args
from torch import Tensor, nn

from ...errors import UserError
from ...networks import graphs
from ...networks.ops import Operations, PackedLinear, replace_layer
from ...networks.quantized import FORMATS, INT4, INT8, Format, FourBits, Quantized, statement
from .devices import get_compute_device


class _CoreOperations(Operations):
    """ComfyUI's operations: it casts and copies the weights of their layers, and decides which stay on the device.

    ComfyUI sets ``comfy_cast_weights`` on a layer whose weight it leaves on the offload device. DynamicVRAM sets it on
    every layer, and gives it a place on the device, ``_v``, in which a copy stays as long as there is room.
    """

    Linear = comfy.ops.disable_weight_init.Linear
    Embedding = comfy.ops.disable_weight_init.Embedding
    Conv2d = comfy.ops.disable_weight_init.Conv2d
    plain = (comfy.ops.disable_weight_init.Linear,)  # others may have quantised weights

    @contextmanager
    def weight(self, layer: Any, x: Tensor) -> Iterator[Tensor]:
        if not layer.comfy_cast_weights and not layer.weight_function:  # as ComfyUI's layers decide
            yield layer.weight
            return

        weight, bias, stream = comfy.ops.cast_bias_weight(layer, x, offloadable=True)
        try:
            yield weight
        except BaseException:
            with suppress(RuntimeError):  # comfy-aimdo's of the place on the device, which would hide the cause
                comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
            raise
        comfy.ops.uncast_bias_weight(layer, weight, bias, stream)

    def offloaded(self, net: nn.Module) -> list[nn.Module]:
        found = []
        for layer in net.modules():
            if getattr(layer, "comfy_cast_weights", False) and not hasattr(layer, "_v"):
                found.append(layer)

        return found

    def moves(self, net: nn.Module) -> bool:
        for layer in net.modules():
            if getattr(layer, "comfy_cast_weights", False) or getattr(layer, "weight_function", None):
                return True

        return False

    def quantised(self, dtype: torch.dtype, weights: int) -> Operations:
        return _QuantisedOperations(dtype, weights)


class _QuantisedOperations(_CoreOperations):
    """ComfyUI's operations for networks with quantised weights.

    ComfyUI multiplies int8 weights by an input that it rounds row by row, and fp8 weights by an input that is not
    rounded, unless the file has a measured scale for it and the device a product of fp8 matrices.

    Layers of 4 bits are the network's own, whose weights stay on the device. If they do not fit, they are ComfyUI's in
    its own format of 4 bits, which it streams.
    """

    def __init__(self, dtype: torch.dtype, weights: int) -> None:
        self.device = get_compute_device()
        self.dtype = dtype
        self.weights = weights
        self.Linear = comfy.ops.mixed_precision_ops({}, dtype, disabled=_without_products(self.device)).Linear

    def format(self, wanted: Format, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Format:
        if not wanted.group or self.weights + _working_memory() <= mm.get_total_memory(self.device):
            return wanted
        if wanted.kind == INT4 and _w4a8_layout() and shape[1] % _ROTATED == 0:
            return Format(INT4)
        return Format(INT8)

    def make_room(self, net: nn.Module, formats: Mapping[str, Format]) -> None:
        for name, format in formats.items():
            if format.group:  # ComfyUI's layers take weights of any other form
                make = partial(PackedLinear, format=format, compute=self.dtype, device=torch.device("meta"))
                replace_layer(net, name, make)

    def round(self, weight: Tensor, format: Format) -> Quantized | FourBits:
        if format == Format(INT4):
            return _CoreWeight.rounded(weight)
        return super().round(weight, format)

    def entries(self, name: str, weight: Quantized | FourBits) -> Mapping[str, Tensor]:
        if isinstance(weight, FourBits):
            return super().entries(name, weight)
        if weight.kind == INT8:
            _expect_int8(self.device)

        beside = weight.beside or {"weight_scale": weight.scale, "comfy_quant": statement(weight)}
        layer = name.removesuffix("weight")
        return {name: weight.stored} | {f"{layer}{part}": tensor for part, tensor in beside.items()}


# ComfyUI's format of 4 bits, since 0.31, and the columns that it rotates together.
W4A8 = "asym_w4a8_int8"
_ROTATED = 256


def _w4a8_layout() -> str:
    """ComfyUI's name of how it stores :data:`W4A8`; "" of a version without it."""
    known: Mapping[str, Any] = getattr(comfy.ops, "QUANT_ALGOS", {})
    return str(known[W4A8]["comfy_tensor_layout"]) if W4A8 in known else ""


class _CoreWeight(Quantized):
    """A weight in :data:`W4A8`, which ComfyUI alone unpacks, with all that a file holds beside it."""

    @staticmethod
    def __new__(cls, stored: Tensor, beside: Mapping[str, Tensor]) -> _CoreWeight:
        shape = (len(stored), 2 * stored.shape[1])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=stored.device)
        made.stored = stored
        made.beside = beside
        return made

    @classmethod
    def rounded(cls, weight: Tensor) -> _CoreWeight:
        """The nearest of its numbers to a weight [N, K]."""
        made = comfy.ops.QuantizedTensor.from_float(weight.float(), _w4a8_layout())
        held = made.state_dict("weight")
        text = torch.tensor([*json.dumps({"format": W4A8}).encode()], dtype=torch.uint8)
        return cls(held.pop("weight"), {**held, "comfy_quant": text})

    @property
    def storage_dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def kind(self) -> str:
        return INT4

    def numbers(self) -> Tensor:
        n, k = self.shape
        layer = comfy.ops.mixed_precision_ops({}, torch.float32).Linear(k, n, bias=False)
        layer.load_state_dict({"weight": self.stored, **(self.beside or {})}, strict=False, assign=True)
        return layer.weight.dequantize()

    def placed(self, device: str | torch.device) -> _CoreWeight:
        beside = {name: tensor.clone() for name, tensor in (self.beside or {}).items()}
        return _CoreWeight(self.stored.to(device, copy=True).contiguous(), beside)


def _working_memory() -> float:
    """Bytes that ComfyUI keeps free for a run, at least."""
    return mm.minimum_inference_memory() + mm.extra_reserved_memory()


# Devices without a product of int8 matrices: Apple's, Intel's and DirectML's.
_WITHOUT_INT8 = ("mps", "xpu", "privateuseone")


def _without_products(device: torch.device) -> set[str]:
    """ComfyUI's names of the formats that a device cannot multiply, of which it converts a weight for every product."""
    if hasattr(comfy.ops, "get_disabled_quant_formats"):
        return set(comfy.ops.get_disabled_quant_formats(device))

    if mm.supports_fp8_compute(device):
        return set()
    return {"float8_e4m3fn", "float8_e5m2"}


def _expect_int8(device: torch.device) -> None:
    """Raise a UserError if this ComfyUI would multiply int8 matrices on a device that cannot.

    Newer versions say what a device cannot multiply, see :func:`_without_products`.
    """
    if device.type in _WITHOUT_INT8 and not hasattr(comfy.ops, "get_disabled_quant_formats"):
        raise UserError(
            f"dtype: this version of ComfyUI cannot compute with int8 weights on {device}; update ComfyUI, or choose "
            "fp16, bf16 or fp32."
        )


def gather_quantised(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights of a file, with a Quantized in the place of each in a format of ComfyUI of 8 bits, or in its W4A8.

    ComfyUI brings older forms to the newest, and its layers read what this leaves beside each weight. Weights in
    ComfyUI's other formats stay as they are in the file, and FastAR refuses them like weights of other programs.
    """
    marks = [name for name in state if name.endswith("scaled_fp8")]
    if (
        not marks
        and "_quantization_metadata" not in metadata
        and not any(name.endswith(".comfy_quant") for name in state)
    ):
        return dict(state)

    prefix = marks[0].removesuffix("scaled_fp8") if marks else ""
    weights, _ = comfy.utils.convert_old_quants(dict(state), prefix, dict(metadata))

    for name in [name for name in weights if name.endswith(".comfy_quant")]:
        layer = name.removesuffix("comfy_quant")
        parts = [part for part in _BESIDE if layer + part in weights]
        beside = {part: weights[layer + part] for part in parts}
        about = json.loads(beside["comfy_quant"].numpy().tobytes())

        weight, scale = weights.get(f"{layer}weight"), beside.get("weight_scale")
        if weight is not None and about.get("format") == W4A8 and _w4a8_layout():
            made = _CoreWeight(weight, beside)
            made.numbers()  # raises what ComfyUI would
            weights[f"{layer}weight"] = made
        elif weight is not None:
            is_rotated = about.get("convrot") or about.get("params")
            if scale is None or is_rotated or FORMATS.get(about.get("format")) != weight.dtype:
                continue

            # A layer of fp8 rounds its input only by a measured scale.
            is_measured = weight.dtype != torch.int8 and "input_scale" in beside
            one_each = weight.dtype == torch.int8 and scale.numel() > 1
            scale = scale.float().reshape((len(weight), 1) if one_each else ())
            weights[f"{layer}weight"] = Quantized(weight, scale, beside if is_measured else None)

        for part in parts:
            del weights[layer + part]

    return weights


# What ComfyUI's layers read beside a weight.
_BESIDE = ("weight_scale", "weight_s_rel", "weight_s_channel", "weight_codebook", "comfy_quant", "input_scale")

_CORE_OPERATIONS = _CoreOperations()
graphs.allowed = not getattr(args, "disable_cuda_graphs", False)


def suited(device: torch.device) -> dict[str, Any]:
    """The arguments of loaders for networks that compute on a device: ComfyUI's operations.

    Empty on a CPU, where all weights stay in place: there the networks' own operations are faster.
    """
    return {} if mm.is_device_cpu(device) else {"operations": _CORE_OPERATIONS}
