"""How the repeated parts of a network run: as written, or compiled. Results differ by rounding only.

Compilation is regional: one function that runs many times (a transformer block, a diffusion step, a decode step) is
compiled and reused for every block and step. Row counts and key lengths are symbolic, so that a run needs a few
compilations, in the seconds after its start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.fx.experimental import _config

from ...errors import UserError
from .ops import FAST, Operations

PLAIN = "plain"
COMPILE = "compile"
SPEEDS = (PLAIN, COMPILE)
# PyTorch's compiler of the regions. Tests count compilations with one that needs no C++ compiler.
BACKEND = "inductor"

# Networks with fewer weights take one thread on a CPU: their products are so small that further threads mostly wait,
# and wait long when other programs use the cores. The smallest official file, LlamaGen-B, has 111 million.
FEW_WEIGHTS = 30_000_000

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def suited_threads(net: nn.Module) -> Iterator[None]:
    """Run a block with one thread of PyTorch if ``net`` is a small network on a CPU."""
    before = torch.get_num_threads()
    first = next(net.parameters())
    weights = sum(weight.numel() for weight in net.parameters())
    if first.device.type != "cpu" or weights >= FEW_WEIGHTS or before == 1:
        yield
        return

    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Regional(nn.Module):
    """A network of which some functions may be compiled."""

    def __init__(self, operations: Operations = FAST) -> None:
        super().__init__()
        self.operations = operations  # of which it is built
        self.speed = PLAIN  # one of SPEEDS, set by choose
        self._regions: dict[Any, Any] = {}

    @property
    def remark(self) -> str:
        """What a report says about the speed, or ""."""
        return "" if self.speed == PLAIN else f"speed: {self.speed}"

    def region(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, compiled if this network is and all its weights are on the device."""
        if self.speed != COMPILE or self.operations.offloaded(self):
            return function

        if function not in self._regions:
            self._regions[function] = _Compiled(function)

        return cast(Callable[P, R], self._regions[function])


class _Compiled:
    """A compiled function.

    The compiler keeps at most a few results of a code object; every network has its own copy of the code.
    """

    def __init__(self, function: Any):
        code = function.__code__.replace()
        own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        own.__kwdefaults__ = function.__kwdefaults__
        self.plain = function
        self.compiled: Any = torch.compile(own, fullgraph=True, dynamic=True, backend=BACKEND)
        # Sizes that happen to be equal are symbols of their own.
        self.own_sizes = _config.patch(use_duck_shape=False)  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> Any:
        if self.compiled is not None:
            try:
                with self.own_sizes:
                    return self.compiled(*args)
            except torch._dynamo.exc.FailOnRecompileLimitHit:  # before anything was computed
                self.compiled = None
                logging.getLogger(__name__).warning(
                    "FastAR: %s was compiled for as many shapes as the compiler keeps; it runs plain from now on.",
                    self.plain.__qualname__,
                )

        return self.plain(*args)


def choose(net: Regional, speed: str, device: torch.device) -> None:
    """Set how a network runs, which will compute on ``device``.

    Raises:
        UserError: for an unknown ``speed``, and "compile" without a compiler.
    """
    if speed not in SPEEDS:
        raise UserError(f"speed: {speed!r} is none of {', '.join(SPEEDS)}; choose one of them.")
    if speed == COMPILE:
        _expect_compiler(device)

    net.speed = speed


def _expect_compiler(device: torch.device) -> None:
    """Raise a UserError if ``torch.compile`` lacks a compiler for the device."""
    lacks = ""
    if not torch._dynamo.is_dynamo_supported():
        lacks = "torch.compile does not support this version of Python"
    elif BACKEND == "inductor" and device.type == "cuda":
        from torch.utils._triton import has_triton

        lacks = "" if has_triton() else "Triton, which torch.compile needs on CUDA, is not installed"
    elif BACKEND == "inductor" and device.type == "cpu":
        from torch._inductor import cpp_builder, exc

        if " " in torch.__file__:  # the compiler's command has PyTorch's folder without quotes
            lacks = "torch.compile builds nothing on a CPU while PyTorch is in a folder with a blank in its name"
        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            lacks = "torch.compile needs a C++ compiler (g++, clang or MSVC) and finds none"

    if lacks:
        raise UserError(f"speed: {lacks}; choose plain.")
