"""Products with a transposed weight matrix. On a CPU the fastest of a few methods is chosen by measurement.

A decode step multiplies large matrices by a handful of rows, and its time goes into reading the weights. Which library call
reads them well depends on the processor, on the number of rows and on their length, so that no fixed rule is good everywhere:

- ``linear``: ``F.linear``. The only method on other devices, for other types than fp32, for small weights and in training;
- ``columns``: W x^T, transposed; for one or two rows;
- ``halves``: one row as a batch of two half matrices;
- ``onednn``: oneDNN's product with the weight as it is stored;
- ``packed``: oneDNN's product with a copy of the weight in its own layout. All copies together take at most
  :data:`PACKED_BYTES`; further weights are multiplied by ``onednn`` with many rows, else by ``linear``.

On the first product of a kind (row length, class of row counts, threads) the methods that can be fastest there are timed on parts of
the weights that are in memory, and the fastest is used for this kind until the process ends. After :data:`BUDGET` seconds of timing
in all, a new row length takes the choice of the nearest one with as many rows. The first of each class of row counts is always timed:
with 8 rows, the fastest method for 2 can take three times as long as the slowest other one.

The methods differ by rounding. Within a process the choice of a kind never changes, so that equal calls give equal results. Two
processes may choose differently; :func:`configure` fixes the choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .streaming import Streamed

MEASURED = "measured"
METHODS = ("linear", "columns", "halves", "onednn", "packed")
# Fewest elements of a weight that exceeds the inner caches; smaller ones always take F.linear.
LARGE_WEIGHT = 1 << 18
# Row counts that are timed, by the largest count of their class. Beyond the last class products are bound by arithmetic and
# not by memory: they are one kind, whatever the row length, timed with MANY_ROWS.
CLASSES, MANY_ROWS = {1: 1, 2: 2, 4: 4, 8: 8, 32: 16, 128: 64}, 160
# Elements of a timed part of a weight, for two rows at most and for more; timed rounds, and those of many rows, whose products
# take long; packed parts; seconds of timing, after which only new row counts are timed. In all it is less than 0.05 s.
PARTS, ROUNDS, MANY_ROUNDS, PACKED_PARTS, BUDGET = (1 << 19, 1 << 18), 3, 2, 2, 0.015
# Longest rows for ``halves``: with longer ones it can take 1.3 times as long as F.linear, which parts of the weight do not show.
HALVES_WIDTH = 2048
# Heights of timed parts are multiples of this: oneDNN packs others slowly.
ALIGNED = 64
# Another method than F.linear, packing, and both with many rows must take at most this share of the seconds. With many rows the timed
# parts show less of a gain than whole weights have.
GAIN, PACKED_GAIN, MANY_GAIN = 0.97, 0.93, 1.0
PACKED_BYTES = 1 << 30


class Kind(NamedTuple):
    """Products that share a choice: row length and largest row count of the class, both 0 for many rows, and threads."""

    width: int
    rows: int
    threads: int


class _State:
    """The choices of this process."""

    def __init__(self) -> None:
        self.method = MEASURED
        self.chosen: dict[Kind, str] = {}
        self.spent = 0.0
        self.modules: WeakSet[Linear] = WeakSet()
        self.parts: dict[tuple[int, ...], list[Tensor]] = {}
        # Address and version of a module's weight, and its packed copy or, beyond PACKED_BYTES, the weight itself.
        self.packed: WeakKeyDictionary[Linear, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def configure(method: str = MEASURED) -> None:
    """Choose by measurement, or fix one of :data:`METHODS` for all products from now on; forget earlier measurements.

    A product that the method does not cover takes ``F.linear``. With a fixed method, results are the same in every process
    on the same machine with the same number of threads.

    Raises:
        ValueError: an unknown method.
    """
    if method not in (MEASURED, *METHODS):
        raise ValueError(f"matmul: {method} is none of {', '.join((MEASURED, *METHODS))}")
    _state.method, _state.spent = method, 0.0
    _state.chosen.clear()
    _state.parts.clear()


def choices() -> dict[Kind, str]:
    """The method of every kind that has been measured in this process."""
    return dict(_state.chosen)


# ------------------------------------------------------------------------------------------------ methods


def _columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = weight @ x.T if bias is None else torch.addmm(bias[:, None], weight, x.T)
    return out.T.contiguous()  # strided rows would slow down what follows


def _halves(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    halves, columns = weight.view(2, -1, weight.shape[1]), x.T.expand(2, -1, -1)
    if bias is None:
        return torch.bmm(halves, columns).view(1, -1)
    return torch.baddbmm(bias.view(2, -1, 1), halves, columns).view(1, -1)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    activation, algorithm = ("gelu", "none") if gelu else ("none", "")  # none of GELU's approximations
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], algorithm)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)


_CALLS: dict[str, Callable[..., Tensor]] = {
    "linear": F.linear,
    "columns": _columns,
    "halves": _halves,
    "onednn": _onednn,
    "packed": _onednn,  # with the packed weight
}


def _usable(method: str, rows: int, weight: Tensor) -> bool:
    """Whether a method covers a product of ``rows`` rows (0: many) with this weight."""
    if method == "halves":
        return rows == 1 and not len(weight) % 2 and weight.shape[1] <= HALVES_WIDTH
    if method == "columns":
        return 0 < rows <= 2
    return method not in ("onednn", "packed") or _has_onednn()


def _timed(method: str, rows: int, weight: Tensor) -> bool:
    """Whether a method is a candidate.

    ``onednn`` is none, because ``packed`` is the same product on a better layout. One or two rows are bound by reading the weight,
    which packing does not shorten.
    """
    return _usable(method, rows, weight) and method != "onednn" and (method != "packed" or not 0 < rows <= 2)


# ------------------------------------------------------------------------------------------------ the choice


# The class of every row count up to the largest one.
_CLASS_OF = [min(n for n in CLASSES if rows <= n) for rows in range(max(CLASSES) + 1)]


def _kind(rows: int, width: int) -> Kind:
    """The kind of a product."""
    largest = _CLASS_OF[rows] if rows < len(_CLASS_OF) else 0
    return Kind(width if largest else 0, largest, torch.get_num_threads())


def _choose(kind: Kind, weight: Tensor) -> str:
    """Choose the method of a new kind: measured, or beyond the time budget that of the nearest row length."""
    same = [k for k in _state.chosen if k.rows == kind.rows and k.threads == kind.threads]
    if _state.spent < BUDGET or not same:
        clock = _clock(kind.threads)
        began = clock()
        chosen = _measure(kind, weight)
        _state.spent += clock() - began
    else:
        chosen = _state.chosen[min(same, key=lambda k: abs(k.width - kind.width))]
    _state.chosen[kind] = chosen
    return chosen


def _clock(threads: int) -> Callable[[], float]:
    """Seconds of this thread, without those of other processes; where they are coarse or there are more threads, wall time."""
    fine = hasattr(time, "thread_time") and time.get_clock_info("thread_time").resolution < 1e-5
    return time.thread_time if fine and threads == 1 else time.perf_counter


def _measure(kind: Kind, weight: Tensor) -> str:
    """Time the methods. Every trial reads another part of the loaded weights, so that it is cached as in a real run."""
    width = weight.shape[1]
    rows = CLASSES.get(kind.rows, MANY_ROWS)
    height, rounds = PARTS[rows > 2] * kind.threads // width, ROUNDS if kind.rows else MANY_ROUNDS
    height = min(max(height // ALIGNED * ALIGNED, 2), len(weight))
    methods = [m for m in METHODS if _timed(m, kind.rows, weight[:height])]
    # Packed copies come last, because they are in the caches at first.
    stored = [m for m in methods if m != "packed"]
    parts = _parts(weight, height, 1 + rounds * len(stored))
    packed = _packed_parts(parts) if "packed" in methods else []
    x = weight.new_ones(rows, width)
    for method in methods:  # the first call includes the creation of a kernel
        _CALLS[method](x, packed[0] if method == "packed" else parts[0], None)
    best, turn, clock = dict.fromkeys(methods, float("inf")), 0, _clock(kind.threads)
    for method in [*stored * rounds, *["packed"] * rounds * bool(packed)]:
        turn += 1
        part = packed[turn % PACKED_PARTS] if method == "packed" else parts[turn % len(parts)]
        began = clock()
        _CALLS[method](x, part, None)
        best[method] = min(best[method], clock() - began)
    fastest = min(stored, key=lambda m: best[m] * (GAIN if m == "linear" else 1))
    gain = PACKED_GAIN if kind.rows else MANY_GAIN
    return "packed" if packed and best["packed"] < gain * best[fastest] else fastest


def _parts(weight: Tensor, height: int, count: int) -> list[Tensor]:
    """At least ``count`` parts of ``height`` rows, or as many as there are, of loaded weights with this row length."""
    parts = [weight.detach()[:height]]
    for module in _state.modules:
        other = module.weight.detach()
        if len(parts) >= count:
            break
        if other.shape[1] == weight.shape[1] and len(other) >= height and _large(other):
            parts += [part for part in other.split(height)[: count - 1] if len(part) == height]
    return parts


def _packed_parts(parts: list[Tensor]) -> list[Tensor]:
    """The first parts packed; kept for other row counts, because packing takes longer than a product."""
    key = tuple(parts[0].shape)
    if key not in _state.parts:
        _state.parts[key] = [_pack(parts[i % len(parts)]) for i in range(PACKED_PARTS)]
    return _state.parts[key]


def _large(weight: Tensor) -> bool:
    """Whether methods other than F.linear apply to a weight."""
    return weight.is_cpu and weight.numel() >= LARGE_WEIGHT and weight.dtype is torch.float32


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, module: Linear | None = None, gelu: bool = False
) -> Tensor:
    """x [..., in] times the transposed weight [out, in], plus the bias [out]; to [..., out].

    Args:
        module: owner of the weight, which keeps its packed copy; None: without packing.
        gelu: whether to return GELU (with the error function) of it. oneDNN computes it within the product.
    """
    method = _method(x, weight)
    if method == "packed":
        held = weight if module is None else module.packed()
        if not held.is_mkldnn:  # without packing, oneDNN is faster with many rows only
            method = "linear" if x.numel() // x.shape[-1] <= max(CLASSES) else "onednn"
        weight = held if method == "packed" else weight
    if method == "linear":
        out = F.linear(x, weight, bias)
    else:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if method in ("onednn", "packed"):
            return _CALLS[method](flat, weight, bias, gelu).view(*x.shape[:-1], -1)
        out = _CALLS[method](flat, weight, bias).view(*x.shape[:-1], -1)
    return F.gelu(out) if gelu else out


def _method(x: Tensor, weight: Tensor) -> str:
    """The method of a product. It runs before every product, so it is kept short."""
    if x.dtype is not torch.float32 or torch.is_grad_enabled() or not _large(weight):
        return "linear"
    if type(x) is not Tensor or torch.compiler.is_compiling():  # fake and traced tensors
        return "linear"
    width = x.shape[-1]
    rows = x.numel() // width
    if not rows:
        return "linear"
    kind = _kind(rows, width)
    if _state.method == MEASURED:
        method = _state.chosen.get(kind) or _choose(kind, weight)
    else:
        method = _state.method
    return method if method == "linear" or _usable(method, kind.rows, weight) else "linear"


def gelu(layer: nn.Module, x: Tensor) -> Tensor:
    """GELU (with the error function) of a linear layer's output [..., out] for x [..., in]."""
    if isinstance(layer, Linear) and not layer.away():
        return linear(x, layer.weight, layer.bias, layer, gelu=True)
    return F.gelu(layer(x))


class Linear(Streamed, nn.Linear):  # type: ignore[misc]
    """``nn.Linear``, computed by :func:`linear`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)
        _state.modules.add(self)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        if self.away():
            with self.lend(x) as (weight, bias):
                return linear(x, weight, bias)
        return linear(x, self.weight, self.bias, self)

    def packed(self) -> Tensor:
        """The weight in oneDNN's layout, or the weight itself where the copies would exceed :data:`PACKED_BYTES`."""
        weight = self.weight
        version = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        held = _state.packed.get(self)
        if held is None or held[0] != version:
            _state.packed.pop(self, None)
            used = sum(m.weight.nbytes for m, (_, copy) in _state.packed.items() if copy.is_mkldnn)
            held = version, _pack(weight) if used + weight.nbytes <= PACKED_BYTES else weight
            _state.packed[self] = held
        return held[1]


_state = _State()
