"""Count the operations of one run of each sampler, and the minimum time for them on this CPU.

Every operation that computes or copies counts as one kernel launch on a GPU; views are not counted. The floor is the
minimum time: for every matrix product and attention, the larger of the times for arithmetic and for memory traffic at
the rates measured here. All counts are of what runs on this device: a CPU may compute two rows of a product as four,
which evaluate's measure tflop counts as two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...cli.bench import conditions_of
from ...cli.options import whole
from ...cli.running import draw, warm_up
from ...networks import ops
from ...reports.table import markdown
from ...runs.limits import MOST_IMAGES
from .random_options import planned_for, shared_options

# Operations after which the host waits for values of a device.
_WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero")
# The two matrices of a product among its arguments.
PRODUCTS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "linear", "_linear_pointwise"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
}


@dataclass
class Work:
    """Counts of a run."""

    operations: int
    waits: int
    products: list[tuple[int, int]]  # multiplications, and bytes read and written
    attention: int = 0  # multiplications in attention

    @property
    def flops(self) -> int:
        """Floating-point operations of the products, 2 a multiply-add."""
        return 2 * sum(multiplications for multiplications, _ in self.products)

    @property
    def attention_share(self) -> float:
        """Attention's share of :attr:`flops`: scores, and sums of values."""
        return 2 * self.attention / self.flops

    def floor(self, speed: Speed) -> float:
        """Least seconds for the products: each takes at least its arithmetic and at least its memory traffic."""
        seconds = 0.0
        for multiplications, traffic in self.products:
            seconds += max(2 * multiplications / speed.arithmetic, traffic / speed.memory)

        return seconds


@dataclass(frozen=True)
class Speed:
    """Rates of a CPU with the present number of threads."""

    arithmetic: float  # floating-point operations a second
    memory: float  # bytes a second


def measure_speed(clock: Callable[[], float] = time.perf_counter) -> Speed:
    """The better of PyTorch's two matrix products, and the sum of 256 MB; the best of several runs each."""

    def best(call: Callable[[], Any], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            began = clock()
            call()
            times.append(clock() - began)

        return min(times)

    with torch.inference_mode():
        a = torch.ones(1024, 1024)
        b = torch.ones(1024, 1024)
        calls: list[Callable[[], Any]] = [lambda: a @ b.T]
        if torch.backends.mkldnn.is_available():
            calls.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
        product = min(best(call, 6) for call in calls)

        long = torch.ones(1 << 26)
        return Speed(2 * 1024**3 / product, long.nbytes / best(long.sum, 4))


def _share_storage(out: Any, args: Sequence[Any]) -> bool:
    """Whether the result of an operation, or its first one, is in the memory of an argument."""
    first = out[0] if isinstance(out, (list, tuple)) else out
    place = first.untyped_storage()._cdata
    return any(isinstance(arg, Tensor) and arg.untyped_storage()._cdata == place for arg in args)


class _Counter(TorchDispatchMode):
    def __init__(self, work: Work):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))

        # Some operations return a view or a copy, as needed: "to", "reshape", "contiguous".
        may_be_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not may_be_view or not _share_storage(out, args):
            self.work.operations += 1

        name = func._schema.name.split("::")[1].removesuffix("_")  # in place or not
        if name in _WAITS:
            self.work.waits += 1

        if name in PRODUCTS:
            first, second = PRODUCTS[name]
            a = args[first]
            b = args[second]
            self._product(out.numel() * a.shape[-1], a, b, out)
        elif "scaled_dot_product" in name:
            q, k, v = args[:3]
            multiplications = 2 * q.numel() * k.shape[-2]
            self._product(multiplications, q, k, v)
            self.work.attention += multiplications

        return out

    def _product(self, multiplications: int, *tensors: Tensor) -> None:
        """Record a product with the bytes of the tensors that it reads and writes."""
        traffic = sum(t.numel() * t.element_size() for t in tensors)
        self.work.products.append((multiplications, traffic))


@contextmanager
def counted() -> Iterator[Work]:
    """Count the operations of a block."""
    work = Work(0, 0, [])

    with _Counter(work):
        yield work


@contextmanager
def countable(device: torch.device | str = "cpu") -> Iterator[None]:
    """Use operations that can be counted: no packed copies or halves of weights, and masks that are plain tensors.

    ``device``: of the model that runs in this block.
    """
    from torch.nn.attention import bias  # imports PyTorch's compiler

    def lower_right(queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)

    with mock.patch.object(ops, "LARGE_WEIGHT", 1 << 62), mock.patch.object(bias, "causal_lower_right", lower_right):
        yield


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    shared_options(parser)
    parser.add_argument("--batch", default="1", metavar="N", help="images; default 1")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    batch = whole(options.batch, "batch", 1, MOST_IMAGES)

    planned, asked = planned_for(options)
    speed = measure_speed() if planned[0].on.device.type == "cpu" else None

    rows = [["sampler", "operations", "waits", "floor, s", "TFLOP", "attention %"]]
    for p, condition in zip(planned, conditions_of(planned, batch, options, asked), strict=True):
        warm_up(p, condition)
        with counted() as work:
            draw(p, condition, 0)

        row = [
            p.label,
            f"{work.operations:,}",
            str(work.waits),
            f"{work.floor(speed):.3f}" if speed else "",
            f"{work.flops / 1e12:.3g}",
            f"{100 * work.attention_share:.1f}",
        ]
        rows.append(row)

    print(markdown(rows, empty=False))
    return 0
