"""Weights of 8 bits in a file: each is gathered with its scale into one :class:`.eight_bits.Quantized`.

Read are ComfyUI's formats float8_e4m3fn, float8_e5m2 and int8_tensorwise, whether a tensor beside the weight
(``comfy_quant``) or the file's metadata (``_quantization_metadata``) states them, the older form of scaled fp8 (the key
``scaled_fp8``), and any int8 or fp8 weight with its scale beside it, as other tools write them. The number that a
weight stands for is the stored one times the scale: one scale for a tensor, or one for each of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...networks.eight_bits import EXACT_INPUT, FORMATS, INT8, STORED, Quantized
from .formats import INSTEAD

# In the metadata: {"layers": {name of a layer: {"format": ...}}}.
METADATA = "_quantization_metadata"
_STATEMENT = ".comfy_quant"
_MARK = "scaled_fp8"
_WEIGHT = ".weight"
# What stands behind the name of a layer, or of a tensor, for its scale.
_SCALES = (".weight_scale", ".scale_weight", ".scale")
_SCALES_OF_TENSOR = ("_scale", ".scale")
_INPUT_SCALES = (".input_scale", ".scale_input")
_BESIDE = (*_SCALES, ".weight.scale", *_INPUT_SCALES, _STATEMENT)
# Bytes of a statement beside a weight, at most.
_LONGEST_STATEMENT = 4096

# From a JSON text and where it stands to a dictionary.
Parse = Callable[[str, str], dict[str, Any]]


class Unreadable(Exception):
    """What a file holds that cannot be read, which completes the sentence "<file> ...", and what to do."""

    def __init__(self, found: str, remedy: str = INSTEAD):
        super().__init__(found)
        self.remedy = remedy


def weight_of(name: str) -> str:
    """The weight beside which a tensor of this name stands; the name itself if it is no scale or statement."""
    for ending in _BESIDE:
        if name.endswith(ending):
            return name.removesuffix(ending).removesuffix(_WEIGHT) + _WEIGHT

    return name


def is_mark(name: str) -> bool:
    """Whether a tensor only says that there are scaled fp8 weights. It is often empty."""
    return name == _MARK or name.endswith(f".{_MARK}")


def gather(
    state: Mapping[str, Tensor], tables: Iterable[str], parse: Parse, skip: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """The weights of a file, with a :class:`.Quantized` in the place of each weight and its scale.

    Args:
        state: tensors by name.
        tables: the entries :data:`METADATA` of the file, or of its shards.
        parse: reads a JSON text, with where it stands for its error.
        skip: whether a weight of this name was left out.

    Raises:
        Unreadable: another format; a statement or a scale that does not fit its weight.
    """
    weights = dict(state)
    marks = [name for name in weights if is_mark(name)]
    exact = any(weights.pop(name).numel() == 2 for name in marks)
    stated = _statements(weights, tables, parse)

    for layer, about in stated.items():
        if skip is None or not skip(layer + _WEIGHT):
            _expect_readable(layer, about)

    for name in [name for name, tensor in weights.items() if tensor.dtype in STORED]:
        if name not in weights:  # it was the scale of another one
            continue

        layer = name.removesuffix(_WEIGHT)
        scale = _take_scale(weights, name)
        about = stated.pop(layer, {}) if name.endswith(_WEIGHT) else {}
        if scale is None and not about:
            continue  # fp8 without a scale, or integers that are no weights

        weights[name] = _quantized(name, weights[name], scale, about, _take_input_scale(weights, layer), exact)

    for layer, about in stated.items():
        name = layer + _WEIGHT
        if name in weights:
            kind = str(weights[name].dtype).removeprefix("torch.")
            raise Unreadable(f"states {about['format']} of {name[:80]}, which is {kind}", "get the file again")

    return weights


def _statements(weights: dict[str, Tensor], tables: Iterable[str], parse: Parse) -> dict[str, dict[str, Any]]:
    """What is stated about layers, by their names; statements beside weights are taken out of ``weights``."""
    found: dict[str, dict[str, Any]] = {}
    for name in [name for name in weights if name.endswith(_STATEMENT)]:
        text = weights.pop(name)
        if text.dtype != torch.uint8 or text.ndim != 1 or len(text) > _LONGEST_STATEMENT:
            raise Unreadable(f"holds an entry that is not a short text ({name[:80]})", "get the file again")

        characters = text.numpy().tobytes().decode(errors="replace")
        found[name.removesuffix(_STATEMENT)] = parse(characters, name[:80])

    for table in tables:
        layers = parse(table, METADATA).get("layers")
        if not isinstance(layers, dict) or not all(isinstance(about, dict) for about in layers.values()):
            raise Unreadable(f"has no table of layers in its {METADATA}", "get the file again")
        found.update(layers)

    return found


def _expect_readable(layer: str, about: Mapping[str, Any]) -> None:
    """Raise Unreadable if a layer has another format than those of 8 bits that are read here."""
    kind = about.get("format")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise Unreadable(f"holds weights in ComfyUI's format {str(kind)[:40]}, which FastAR cannot read ({layer[:80]})")

    further = about.get("params")
    rotated = about.get("convrot") or isinstance(further, dict) and further.get("convrot")
    if rotated:
        raise Unreadable(f"holds rotated weights (ConvRot, {kind}), which FastAR cannot read ({layer[:80]})")


def _take_scale(weights: dict[str, Tensor], name: str) -> Tensor | None:
    """The scale beside a weight, taken out of ``weights``; None without one. A second one is refused later."""
    names = [name + ending for ending in _SCALES_OF_TENSOR]
    if name.endswith(_WEIGHT):
        names += [name.removesuffix(_WEIGHT) + ending for ending in _SCALES]

    held = [beside for beside in names if beside in weights]
    return weights.pop(held[0]) if held else None


def _take_input_scale(weights: dict[str, Tensor], layer: str) -> Tensor | None:
    """The scale of the input of a layer, taken out of ``weights``; None without one."""
    for name in [layer + ending for ending in _INPUT_SCALES]:
        if name in weights and weights[name].numel() == 1:
            return weights.pop(name).float().reshape(())

    return None


def _quantized(
    name: str, stored: Tensor, scale: Tensor | None, about: Mapping[str, Any], measured: Tensor | None, exact: bool
) -> Quantized:
    """A weight with its scale. Without a measured scale of the input the input is not rounded."""
    if about and FORMATS[about["format"]] != stored.dtype:
        kind = str(stored.dtype).removeprefix("torch.")
        raise Unreadable(f"states {about['format']} of {name[:80]}, which is {kind}", "get the file again")

    if scale is None:
        if STORED[stored.dtype] == INT8:
            raise Unreadable(f"holds no scale of {name[:80]}", "get the file again")
        scale = torch.ones(())

    kind = STORED[stored.dtype]
    if not scale.is_floating_point() or scale.dtype == torch.float8_e8m0fnu:
        found = str(scale.dtype).removeprefix("torch.")
        raise Unreadable(f"holds a scale that is {found}, as of MXFP8, which FastAR cannot read ({name[:80]})")

    outputs = stored.shape[:1]
    single = scale.numel() == 1
    if not single and scale.shape not in (outputs, torch.Size([*outputs, *(1,) * (stored.ndim - 1)])):
        shape = "x".join(map(str, scale.shape))
        raise Unreadable(
            f"holds {kind} weights with a scale for every block, which FastAR cannot read ({name[:80]}: {shape})"
        )

    scale = scale.float().reshape(() if single else (*outputs, *(1,) * (stored.ndim - 1)))
    exact = exact or kind == INT8 or measured is None or bool(about.get(EXACT_INPUT))
    return Quantized(stored, scale, measured, exact)
