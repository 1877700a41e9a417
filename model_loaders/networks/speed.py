"""How the repeated parts of a network run: as written, compiled, or as CUDA graphs. Results differ by rounding only.

Compilation is regional: one function that runs many times (a transformer block, a diffusion step) is compiled and reused for every
block and step. Row counts and key lengths are symbolic, so that a run needs a few compilations, in the seconds after its start.
"kernels" is "compile" with the Triton kernels of ``head_kernels.py`` in place of the compiled diffusion head. "graphs" captures the
diffusion loop and the decoding step instead (``graphs.py``), the former with these kernels where Triton is installed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from ...errors import UserError
from . import graphs
from .ops import Streamed, streamed_layers

PLAIN, COMPILE, KERNELS, GRAPHS = "plain", "compile", "kernels", "graphs"
SPEEDS = (PLAIN, COMPILE, KERNELS, GRAPHS)

P = ParamSpec("P")
R = TypeVar("R")


class Regional(nn.Module):
    """A network of which some functions may be compiled.

    Attributes:
        speed: one of :data:`SPEEDS`, set by :func:`choose`.
        graphs: the captured functions if ``speed`` is "graphs"; else None.
        kernels: whether the diffusion head's Triton kernels are used.
        diffusion_head: whether the network has one, of the class of :mod:`.diffusion_head`.
    """

    diffusion_head = False

    def __init__(self) -> None:
        super().__init__()
        self.speed, self.kernels = PLAIN, False
        self.graphs: graphs.Graphs | None = None
        self._regions: dict[Any, Any] = {}
        self._streamed: list[Streamed] = []

    @property
    def remark(self) -> str:
        """What a report says about the speed, or ""."""
        if self.graphs is not None:
            return self.graphs.remark
        return "" if self.speed == PLAIN else f"speed: {self.speed}"

    def begin(self) -> None:
        """To be called before every sampling run."""
        if self.graphs is not None:
            self.graphs.begin()

    def release(self) -> None:
        """Give up the memory of captured functions: to be called when weights leave the device."""
        if self.graphs is not None:
            self.graphs.clear()

    def captured(self) -> graphs.Graphs | None:
        """Where functions are captured; None if they run as written."""
        return self.graphs if self.graphs is not None and not self.graphs.problem and self.on_device() else None

    def region(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, compiled if this network is and all its weights are on the device."""
        if not self.compiles or not self.on_device():
            return function
        return shared(function, self._regions)

    @property
    def compiles(self) -> bool:
        """Whether regions are compiled."""
        return self.speed in (COMPILE, KERNELS)

    def on_device(self) -> bool:
        """Whether all weights are on the device."""
        return not any(layer.away() for layer in self._streamed)


def shared(function: Callable[P, R], kept: dict[Any, Any] | None = None) -> Callable[P, R]:
    """``function`` compiled, for one network's ``kept`` or, if it reads no weights, for all networks."""
    kept = _shared if kept is None else kept
    if (function, _backend) not in kept:
        kept[function, _backend] = _Compiled(function)
    return kept[function, _backend]


class _Compiled:
    """A compiled function with compilations of its own.

    The compiler keeps its results by code object and at most a few of each; a copy of the code gives every network its own.
    """

    def __init__(self, function: Any):
        code = function.__code__.replace()
        own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        own.__kwdefaults__ = function.__kwdefaults__
        self.plain = function
        self.compiled: Any = torch.compile(own, fullgraph=True, dynamic=True, backend=_backend)

    def __call__(self, *args: Any) -> Any:
        if self.compiled is not None:
            try:
                with _OwnSizes():
                    return self.compiled(*args)
            except torch._dynamo.exc.FailOnRecompileLimitHit:  # before anything was computed
                self.compiled = None
                logging.getLogger(__name__).warning(
                    "FastAR: %s was compiled for as many shapes as the compiler keeps; it runs plain from now on.",
                    self.plain.__qualname__,
                )
        return self.plain(*args)


class _OwnSizes:
    """While a region is compiled, sizes that happen to be equal are symbols of their own."""

    def __enter__(self) -> None:
        self.before = getattr(_sizes(), _DUCK)
        setattr(_sizes(), _DUCK, False)

    def __exit__(self, *problem: object) -> None:
        setattr(_sizes(), _DUCK, self.before)


_DUCK = "use_duck_shape"


def _sizes() -> Any:
    """The compiler's configuration of symbolic sizes; loaded with the compiler."""
    return sys.modules["torch.fx.experimental._config"]


_shared: dict[Any, Any] = {}
# Compiler of the regions. Tests count compilations with one that needs no C++ compiler.
_backend = "inductor"


def set_backend(name: str) -> str:
    """Choose PyTorch's compiler backend for regions that are compiled from now on; returns the previous one."""
    global _backend
    previous, _backend = _backend, name
    return previous


def choose(net: Regional, speed: str, device: torch.device) -> None:
    """Set how a network runs.

    Args:
        net: the network.
        speed: one of :data:`SPEEDS`.
        device: where the network will compute.

    Raises:
        UserError: an unknown ``speed``; "compile" or "kernels" where there is no compiler; "kernels" or "graphs" without CUDA;
            "kernels" without a diffusion head.
    """
    if speed not in SPEEDS:
        raise UserError(f"speed: {speed!r} is none of {', '.join(SPEEDS)}; choose one of them.")
    if speed == KERNELS and not (net.diffusion_head and device.type == "cuda"):
        lacks = "a CUDA GPU" if net.diffusion_head else "a model with a diffusion head (MAR, Harmon, UniPic)"
        raise UserError(f"speed: kernels needs {lacks}; choose compile or plain.")
    if speed == GRAPHS and device.type != "cuda" and graphs.needs_cuda():
        raise UserError("speed: graphs needs a CUDA GPU; choose compile or plain.")
    if speed in (COMPILE, KERNELS):
        _expect_compiler(device)
    net._streamed = streamed_layers(net)
    if speed != GRAPHS:
        net.graphs = None
    elif net.graphs is None or net.graphs.problem:
        net.graphs = graphs.Graphs(net)
    net.speed, net.kernels = speed, speed == KERNELS
    if speed == GRAPHS and net.diffusion_head and device.type == "cuda":
        from torch.utils._triton import has_triton

        net.kernels = has_triton()


def _expect_compiler(device: torch.device) -> None:
    """Raise a UserError if ``torch.compile`` lacks a compiler for the device."""
    lacks = ""
    if not torch._dynamo.is_dynamo_supported():
        lacks = "torch.compile does not support this version of Python"
    elif _backend == "inductor" and device.type == "cuda":
        from torch.utils._triton import has_triton

        lacks = "" if has_triton() else "Triton, which torch.compile needs on CUDA, is not installed"
    elif _backend == "inductor" and device.type == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            lacks = "torch.compile needs a C++ compiler (g++, clang or MSVC) and finds none"
    if lacks:
        raise UserError(f"speed: {lacks}; choose plain.")
