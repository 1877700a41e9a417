"""Torch while FastAR computes: its state, its threads, its attention, and its copies to a device.

Other packs and scripts leave things in torch that change what the same code computes: a default dtype (a
``from_pretrained`` that failed), autocast, a default device, products in fewer bits. FastAR computes in its own state,
and restores the state that others set: :func:`own_state` does so for a block, :func:`in_own_state` for a function or
a generator. A generator restores the state whenever it yields.

FastAR does not change what its results do not depend on: the mode of gradients, the random state, and deterministic
algorithms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Kinds of devices that models of this pack run on, and that have an autocast.
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_CPU = torch.device("cpu")
# Products and convolutions in which torch can round fp32 numbers. Those of cuDNN stay as they are, because they round
# by default too. torch before 2.9 has no names for these settings.
_ROUNDING = [
    part
    for part in (
        torch.backends.cuda.matmul,
        getattr(torch.backends.mkldnn, "matmul", None),
        getattr(torch.backends.mkldnn, "conv", None),
    )
    if hasattr(part, "fp32_precision")
]

# Networks with fewer weights take one thread on a CPU. Their products are so small that more threads mostly wait for
# each other, and they wait long when other programs use the cores. The smallest official file, LlamaGen-B, has 111
# million weights.
FEW_WEIGHTS = 30_000_000

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def own_state() -> Iterator[None]:
    """Run a block in FastAR's state, and restore the previous state afterwards. In FastAR's state, fp32 is the default
    dtype, products keep all bits of fp32, autocast is off, and the CPU is the default device.
    """
    with ExitStack() as found:
        dtype = torch.get_default_dtype()
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            found.callback(torch.set_default_dtype, dtype)

        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                found.enter_context(torch.autocast(device, enabled=False))

        # torch 2.7's get_default_device ignores a ``with torch.device(...)`` block, and fails after such a block.
        if torch.empty(0).device != _CPU:
            found.enter_context(_CPU)

        # Products or convolutions of fp32 numbers may be computed in fewer bits.
        try:
            rounds = torch.get_float32_matmul_precision() != "highest"
        except RuntimeError:  # it was set under the newer names, which this function does not read
            rounds = True
        for part in _ROUNDING:
            rounds |= part.fp32_precision not in ("none", "ieee")
        if rounds:
            found.enter_context(_whole_products())

        yield


@contextmanager
def _whole_products() -> Iterator[None]:
    """Run a block with all bits of fp32 in products."""
    parts = [part.fp32_precision for part in _ROUNDING]
    try:
        level = torch.get_float32_matmul_precision()
    except RuntimeError:
        level = "highest"

    # Set the older name first, because the newer names must agree with it.
    torch.set_float32_matmul_precision("highest")
    for part in _ROUNDING:
        part.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(level)
        for part, precision in zip(_ROUNDING, parts, strict=True):
            part.fp32_precision = precision


def in_own_state(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs in :func:`own_state`. A generator runs in it too, except while it yields."""
    if inspect.isgeneratorfunction(function):
        return cast(Callable[P, R], _generating(function))

    @wraps(function)
    def run(*args: P.args, **more: P.kwargs) -> R:
        with own_state():
            return function(*args, **more)

    return run


def _generating(function: Callable[P, Generator[Any, None, R]]) -> Callable[P, Generator[Any, None, R]]:
    """A generator function as :func:`in_own_state` makes it."""

    @wraps(function)
    def run(*args: P.args, **more: P.kwargs) -> Generator[Any, None, R]:
        steps = function(*args, **more)
        try:
            while True:
                with own_state():
                    try:
                        step = next(steps)
                    except StopIteration as end:
                        return cast(R, end.value)

                yield step
        finally:
            with own_state():
                steps.close()

    return run


# ------------------------------------------------------------------------------------------ threads, attention, copies


def suited_threads(net: nn.Module) -> int | None:
    """How many threads of PyTorch suit a network: 1 for a small network on a CPU, else None, which means any number."""
    first = next(net.parameters())
    weights = sum(weight.numel() for weight in net.parameters())
    return 1 if first.device.type == "cpu" and weights < FEW_WEIGHTS else None


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run a block with ``count`` threads of PyTorch; None: with the present number."""
    before = torch.get_num_threads()
    if count in (None, before):
        yield
        return

    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Attention output [R, heads, n, D] for queries q [R, heads, n, D], and keys k and values v [R, heads, S, D] each.

    ``mask``, broadcast to [R, heads, n, S]: bool, True where a query attends to a key, or numbers that are added to the
    scores. ``causal``: query i attends to the keys 0 to i.

    ComfyUI's options for attention, such as ``--use-sage-attention``, change nothing here; docs/precision.md says why.
    Besides, some of ComfyUI's functions would break the rules above: they add a mask of bools to the scores as 0 and 1,
    split a product by the amount of free memory, or call PyTorch's function after an error.
    """
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)

    with without_cudnn_attention():
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Let attention use any library but cuDNN in this block.

    cuDNN, PyTorch's first choice on recent GPUs, plans for about 50 ms each time it meets a new number of keys or
    queries, and these numbers change with every AR step.
    """
    # A compiled function as a whole is called in such a block, see speed.py.
    if torch.compiler.is_compiling() or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return

    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def to_device(x: Any, device: torch.device) -> Tensor:
    """Copy a tensor or NumPy array of the host to a device. A GPU copies it from pinned memory, so the host does not
    wait.
    """
    x = torch.as_tensor(x)
    if device.type != "cuda":
        return x.to(device)

    return x.pin_memory().to(device, non_blocking=True)
