"""How the repeated parts of a network run: as written, or compiled. Results differ by rounding only.

Compilation is regional: one function that runs many times (a transformer block, a diffusion step, a decode step) is
compiled and reused for every block and step. Row counts and key lengths are symbolic, so that a run needs a few
compilations, in the seconds after its start.

Token models can also be compiled for fixed sizes: a decode step then attends to all slots of the KV cache, with a mask
by position, and is one function of one shape for each number of rows. PyTorch records it once as a CUDA graph and
launches it as a whole (mode "reduce-overhead"), as gpt-fast does (https://github.com/meta-pytorch/gpt-fast).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.fx.experimental import _config

from ...errors import UserError
from .ops import FAST, Operations, without_cudnn_attention

PLAIN = "plain"
COMPILE = "compile"
STATIC = "compile-static"
SPEEDS = (PLAIN, COMPILE)
TOKEN_SPEEDS = (*SPEEDS, STATIC)
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

    speeds: ClassVar[tuple[str, ...]] = SPEEDS  # what it can be set to

    def __init__(self, operations: Operations = FAST) -> None:
        super().__init__()
        self.operations = operations  # of which it is built
        self.speed = PLAIN  # one of speeds, set by choose
        self._regions: dict[Any, Any] = {}
        # Repeated parts that ran plain since the run began although the network is compiled, in the order of their
        # first calls; the values are not used.
        self._ran_plain: dict[str, None] = {}

    def begin_run(self) -> None:
        """Forget what earlier runs recorded for :attr:`remark`."""
        self._ran_plain.clear()

    @property
    def remark(self) -> str:
        """What the report of a run says about the speed at its end, or ""."""
        if self.speed == PLAIN:
            return ""
        if not self._ran_plain:
            return f"speed: {self.speed}"
        return f"speed: {self.speed}, but plain: {', '.join(self._ran_plain)}"

    def runs_plain(self, part: str) -> None:
        """Record for :attr:`remark` that a repeated ``part`` runs plain, whatever the speed."""
        self._ran_plain[part] = None

    def region(self, function: Callable[P, R], part: str) -> Callable[P, R]:
        """``function``, compiled if this network is and all its weights are on the device.

        ``part``: what it computes, for :attr:`remark`.
        """
        if self.speed == PLAIN:
            return function
        if self.operations.offloaded(self):
            self.runs_plain(f"{part} (weights are in main memory)")
            return function

        if function not in self._regions:
            self._regions[function] = _Compiled(function, self.speed == STATIC, partial(self.runs_plain, part))

        return cast(Callable[P, R], self._regions[function])


class _Compiled:
    """A compiled function.

    The compiler keeps at most a few results of a code object; every network has its own copy of the code.
    """

    def __init__(self, function: Any, static: bool, record_plain: Callable[[], None]):
        """``static``: for the sizes of a call and no others; ``record_plain`` is called when it runs plain."""
        code = function.__code__.replace()
        own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        own.__kwdefaults__ = function.__kwdefaults__
        self.plain = function
        self.record_plain = record_plain
        if static and BACKEND == "inductor":
            self.compiled: Any = torch.compile(own, fullgraph=True, dynamic=False, mode="reduce-overhead")
        else:
            self.compiled = torch.compile(own, fullgraph=True, dynamic=not static, backend=BACKEND)
        # Sizes that happen to be equal are symbols of their own.
        self.own_sizes = _config.patch(use_duck_shape=False)  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> Any:
        if self.compiled is not None:
            try:
                with self.own_sizes, without_cudnn_attention():
                    return self.compiled(*args)
            except torch._dynamo.exc.FailOnRecompileLimitHit:  # before anything was computed
                self.compiled = None
                logging.getLogger(__name__).warning(
                    "FastAR: %s was compiled for as many shapes as the compiler keeps; it runs plain from now on.",
                    self.plain.__qualname__,
                )

        self.record_plain()
        return self.plain(*args)


def choose(net: Regional, speed: str, device: torch.device) -> None:
    """Set how a network runs, which will compute on ``device``.

    Raises:
        UserError: for an unknown ``speed`` or one that the network does not have, and without a compiler.
    """
    if speed == STATIC and speed not in net.speeds:
        raise UserError(f"speed: {speed} is only for token models; choose compile.")
    if speed not in net.speeds:
        raise UserError(f"speed: {speed!r} is not one of {', '.join(net.speeds)}.")
    if speed != PLAIN:
        _expect_compiler(device)

    if speed != net.speed:
        net._regions.clear()  # compiled in another way
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
