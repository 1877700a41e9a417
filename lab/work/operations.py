"""Count the operations of one run of each sampler.

Every operation that computes or copies counts as one kernel launch on a GPU; views are not counted. All counts are of
what runs on this device: a CPU may compute two rows of a product as four.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...cli.bench import conditions_of
from ...cli.running import draw, warm_up
from ...networks import ops
from ...reports.table import markdown
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

    operations: int = 0
    waits: int = 0
    multiplications: int = 0  # in matrix products and attention
    attention: int = 0  # in attention alone

    @property
    def flops(self) -> int:
        """Floating-point operations, 2 a multiply-add."""
        return 2 * self.multiplications

    @property
    def attention_share(self) -> float:
        """Attention's share of :attr:`flops`: scores, and sums of values."""
        return self.attention / self.multiplications


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
            first, _ = PRODUCTS[name]
            self.work.multiplications += out.numel() * args[first].shape[-1]
        elif "scaled_dot_product" in name:
            q, k = args[:2]
            multiplications = 2 * q.numel() * k.shape[-2]
            self.work.multiplications += multiplications
            self.work.attention += multiplications

        return out


@contextmanager
def counted() -> Iterator[Work]:
    """Count the operations of a block."""
    work = Work()

    with _Counter(work):
        yield work


@contextmanager
def countable() -> Iterator[None]:
    """Use operations that can be counted: no packed copies or halves of weights, and masks that are plain tensors."""
    from torch.nn.attention import bias  # imports PyTorch's compiler

    def lower_right(queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    with mock.patch.object(ops, "LARGE_WEIGHT", 1 << 62), mock.patch.object(bias, "causal_lower_right", lower_right):
        yield


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    shared_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    planned, asked = planned_for(options)

    rows = [["sampler", "operations", "waits", "TFLOP", "attention %"]]
    for p, condition in zip(planned, conditions_of(planned, 1, options, asked), strict=True):
        warm_up(p, condition)
        with counted() as work:
            draw(p, condition, 0)

        row = [
            p.label,
            f"{work.operations:,}",
            str(work.waits),
            f"{work.flops / 1e12:.3g}",
            f"{100 * work.attention_share:.1f}",
        ]
        rows.append(row)

    print(markdown(rows, empty=False))
    return 0
