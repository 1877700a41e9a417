"""Torch's state while FastAR computes.

Other packs and scripts leave things in torch that change what the same code computes: a default dtype (a
``from_pretrained`` that failed), autocast, a default device, products in fewer bits. FastAR computes in its own
state, and everyone else in the state that they set: :func:`own_state` for a block, :func:`in_own_state` for a function
or a generator, which has restored the state whenever it yields.

What a run of ours does not depend on stays as it is: the mode of gradients, the random state, deterministic algorithms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

# Kinds of devices that models of this pack run on, and that have an autocast.
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_CPU = torch.device("cpu")
# Products and convolutions whose fp32 numbers torch can round; cuDNN's are left, which round in torch's own state too.
# torch before 2.9 has no names for them.
_ROUNDING = [
    part
    for part in (
        torch.backends.cuda.matmul,
        getattr(torch.backends.mkldnn, "matmul", None),
        getattr(torch.backends.mkldnn, "conv", None),
    )
    if hasattr(part, "fp32_precision")
]

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def own_state() -> Iterator[None]:
    """Run a block with fp32 as the default dtype and in products, without autocast, and with tensors on the CPU unless
    their device is named; restore the state afterwards.
    """
    with ExitStack() as found:
        dtype = torch.get_default_dtype()
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            found.callback(torch.set_default_dtype, dtype)

        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                found.enter_context(torch.autocast(device, enabled=False))

        # torch 2.7's get_default_device knows no ``with torch.device(...)`` block, and fails after one was reset.
        if torch.empty(0).device != _CPU:
            found.enter_context(_CPU)

        # Products or convolutions of fp32 numbers may be computed in fewer bits.
        try:
            rounds = torch.get_float32_matmul_precision() != "highest"
        except RuntimeError:  # set by the newer names, which this one does not speak for
            rounds = True
        if rounds or any(part.fp32_precision not in ("none", "ieee") for part in _ROUNDING):
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

    # The older name first, with which the newer ones must agree.
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
    """A function that runs in :func:`own_state`; of a generator every part between two yields does."""
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
