"""Products with quantised weights, alone: whether they are right on this device, and how long they take.

The shapes are those of Janus-Pro-7B's blocks. Whoever reads the table sets :data:`.quantized.FEW` by it, and removes
the planes of int8 if they are slower than bf16. No run chooses by its own timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ...networks.ops import EightBitLinear, PackedLinear, rounded
from ...networks.quantized import INT4, INT8, Format, arranged, from_tiles, has_product, unpacked_product

# Outputs and columns.
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008))
TINY_SHAPES = ((64, 128), (128, 64))
ROWS = (2, 16, 32, 48, 128)
# Products in a measurement, which read other copies of the weight in turn: it is not to be in a cache.
REPEATS = 50
CACHE_BYTES = 200_000_000


@torch.no_grad()
def measured(device: torch.device, rehearse: bool) -> dict[str, Any]:
    """Microseconds of products by shape, rows and form of the weight, and what is right of them."""
    dtype = torch.float32 if rehearse else torch.bfloat16
    checks: dict[str, bool] = {}
    lines = []
    for n, k in TINY_SHAPES if rehearse else SHAPES:
        made = torch.Generator(device=device).manual_seed(n + k)
        weight = torch.randn(n, k, generator=made, device=device) / k**0.5
        layer = nn.Linear(k, n, bias=False, device=device, dtype=dtype)
        layer.weight.copy_(weight)
        x = torch.randn(max(ROWS), k, generator=made, device=device).to(dtype)

        forms = _forms(layer)
        _check(forms, x, checks, device)
        for rows in ROWS:
            line: dict[str, Any] = {"shape": f"{n} x {k}", "rows": rows}
            for name, form in forms.items():
                line[name] = _microseconds(form, x[:rows], device, 2 if rehearse else REPEATS)
            lines.append(line)
    return {"right": checks, "microseconds": lines}


def _forms(layer: nn.Linear) -> dict[str, nn.Module]:
    """The layer with its weight in every form."""
    forms: dict[str, nn.Module] = {str(layer.weight.dtype).removeprefix("torch."): layer}
    group = next(group for group in (256, 128, 64, 32) if layer.in_features % group == 0)
    for name, format in (("int4", Format(INT4, 32)), ("int8 as planes", Format(INT8, group))):
        made = PackedLinear(layer, format, layer.weight.dtype, layer.weight.device)
        made.hold(rounded(layer.weight.detach(), format))
        forms[name] = made

    forms["int8"] = EightBitLinear.of(layer, INT8)
    return forms


def _check(forms: dict[str, nn.Module], x: Tensor, checks: dict[str, bool], device: torch.device) -> None:
    """Whether packed products are those of the numbers, rows alike, and the inverse of the packing right."""

    def note(name: str, right: bool) -> None:
        checks[name] = checks.get(name, True) and bool(right)

    note("there is a product of 4 bits", has_product(device, x.dtype))
    for name, form in forms.items():
        if not isinstance(form, PackedLinear):
            continue
        pairs = form.weight.view(torch.uint8).clone()
        if device.type == "cuda":
            note("packing and its inverse", torch.equal(from_tiles(arranged(pairs)), pairs))

        few = deepcopy(form)(x[:16])
        plain = unpacked_product(x[:16].float(), pairs, form.weight_scale, form.format.planes)
        note(f"{name} is the product of its numbers", float((few - plain).norm() / plain.norm()) < 0.01)
        alone = torch.cat([deepcopy(form)(x[i : i + 1]) for i in range(16)])
        note(f"{name}: a row alone equals the row among 16", torch.equal(alone, few))


def _microseconds(form: nn.Module, x: Tensor, device: torch.device, repeats: int) -> float:
    """A product's microseconds, with weights that are in no cache."""
    size = sum(parameter.nbytes for parameter in form.parameters())
    copies = [deepcopy(form) for _ in range(max(1, min(repeats, CACHE_BYTES // size)))]
    calls: list[Callable[[Tensor], Tensor]] = [copies[i % len(copies)] for i in range(repeats)]
    for copied in copies:
        copied(x)  # arranges the codes

    if device.type == "cuda":
        return _recorded(calls, x, repeats)
    began = time.perf_counter()
    for call in calls:
        call(x)
    return 1e6 * (time.perf_counter() - began) / repeats


def _recorded(calls: list[Callable[[Tensor], Tensor]], x: Tensor, repeats: int) -> float:
    """Of calls that are recorded as one CUDA graph, which the host does not slow down."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call(x)

    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeats


def table(found: dict[str, Any]) -> list[list[str]]:
    """The microseconds as rows of a table."""
    lines = found["microseconds"]
    head = list(lines[0])
    return [head, *([_cell(line[name]) for name in head] for line in lines)]


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
