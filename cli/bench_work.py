"""What a run computes, and the least time that it could take on this machine: ``bench --ops`` and ``bench --against``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations after which the host waits for values of a device.
_WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero")
# The two matrices of a product among its arguments.
_PRODUCTS: Mapping[str, tuple[int, int]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "matmul": (0, 1),  # in inference mode it is not decomposed
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "linear": (0, 1),
    "_linear_pointwise": (0, 1),
}


@dataclass
class Work:
    """Counts of a run.

    Attributes:
        operations: operations that compute or copy; views are not counted.
        waits: operations that need a value on the host.
        products: (multiply-adds, bytes of both factors and the result) of every matrix product and attention.
    """

    operations: int
    waits: int
    products: list[tuple[int, int]]

    def floor(self, speed: Speed) -> float:
        """Least seconds for the products: each takes at least its arithmetic and at least its memory traffic."""
        return sum(max(2 * n / speed.arithmetic, b / speed.memory) for n, b in self.products)


@dataclass(frozen=True)
class Speed:
    """Rates of a CPU with the present number of threads.

    Attributes:
        arithmetic: operations a second of a large matrix product, fp32.
        memory: bytes a second of reading an array larger than the caches.
    """

    arithmetic: float
    memory: float


def measure_speed(seconds: Callable[[], float] = time.perf_counter) -> Speed:
    """The better of PyTorch's two matrix products, and the sum of 256 MB; the best of several runs each."""

    def best(call: Callable[[], Any], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            began = seconds()
            call()
            times.append(seconds() - began)
        return min(times)

    with torch.inference_mode():
        a, b, long = torch.ones(1024, 1024), torch.ones(1024, 1024), torch.ones(1 << 26)
        calls: list[Callable[[], Any]] = [lambda: a @ b.T]
        if torch.backends.mkldnn.is_available():
            calls.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
        product = min(best(call, 6) for call in calls)
        return Speed(2 * 1024**3 / product, long.nbytes / best(long.sum, 4))


class _Counter(TorchDispatchMode):
    def __init__(self, work: Work):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            self.work.operations += 1
        name = func._schema.name.split("::")[1]
        self.work.waits += name in _WAITS
        if name in _PRODUCTS:
            a, b = (args[i] for i in _PRODUCTS[name])
            self._product(out.numel() * a.shape[-1], a, b, out)
        elif "scaled_dot_product" in name:
            q, k, v = args[:3]
            self._product(2 * q.numel() * k.shape[-2], q, k, v)
        return out

    def _product(self, multiplications: int, *tensors: Tensor) -> None:
        self.work.products.append((multiplications, sum(t.numel() * t.element_size() for t in tensors)))


@contextmanager
def counted() -> Iterator[Work]:
    """Count the operations of a block."""
    work = Work(0, 0, [])
    with _Counter(work):
        yield work
