"""How the repeated parts of a network run: as written, recorded as CUDA graphs, or compiled.

- *plain*: as written.
- *auto*: on a CUDA device functions are recorded (:mod:`.graphs`), with the results of *plain*; elsewhere as written.
- *compile*: torch.compile compiles each function that runs many times (a transformer block, a diffusion step) once, and
  the result is reused for every block and step. Row counts and key lengths are symbolic, so a run needs only a few
  compilations, in the seconds after its start. On a CUDA device, compiled functions are recorded too. Results differ
  by rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

from ..errors import UserError
from . import graphs
from .ops import FAST, Operations
from .torch_state import without_cudnn_attention

AUTO = "auto"
PLAIN = "plain"
COMPILE = "compile"
SPEEDS = (AUTO, PLAIN, COMPILE)
# The backend of torch.compile. Tests count compilations with a backend that needs no C++ compiler.
BACKEND = "inductor"

P = ParamSpec("P")
R = TypeVar("R")


class Recordable(nn.Module):
    """A network with functions that may be recorded or compiled."""

    def __init__(self, operations: Operations = FAST) -> None:
        super().__init__()
        self.operations = operations  # the layers of which the network is built
        self.speed = PLAIN  # one of SPEEDS, set by choose
        self.records = False  # whether this run records functions
        self.graphs = graphs.Graphs()
        self._regions: dict[Any, Any] = {}
        # Repeated parts that ran plain since the run began, although the speed is not plain, in the order of their
        # first calls. The values are not used.
        self._ran_plain: dict[str, None] = {}

    def begin_run(self) -> None:
        """Choose whether the run that begins records functions, and forget what earlier runs noted for
        :attr:`remark`.
        """
        self._ran_plain.clear()
        self.records = False
        if self.speed == PLAIN:
            return

        devices = {weight.device for weight in self.parameters()}
        if any(graphs.available(device) for device in devices):
            self.records = not self.operations.moves(self)
            if self.records:
                self.graphs.follow(self)
            else:
                self._ran_plain["launches of operations (ComfyUI moves the weights)"] = None

    @property
    def remark(self) -> str:
        """What the report says about the speed at the end of a run, or ""."""
        if self._ran_plain:
            return f"speed: {self.speed} was chosen, but these parts ran with speed plain: {', '.join(self._ran_plain)}"
        return f"speed: {self.speed}" if self.records or self.speed == COMPILE else ""

    def note_plain(self, part: str) -> None:
        """Record for :attr:`remark` that a repeated ``part`` runs plain, whatever the speed."""
        if self.speed == COMPILE or self.records:
            self._ran_plain[part] = None

    def launch(self, function: Callable[..., R], args: tuple[Any, ...]) -> R:
        """``function(*args)`` in a run that records; see :meth:`.Graphs.call`."""
        try:
            out = cast(R, self.graphs.call(function, args))
        except torch.OutOfMemoryError:
            self.graphs.forget()  # frees the recordings' memory for the next run
            raise

        if self.graphs.problem:
            self.note_plain(f"launches of operations ({self.graphs.problem})")
            self.records = False
            self.graphs.forget()
        return out

    def compiled(self, function: Callable[P, R], part: str) -> Callable[P, R]:
        """``function``, compiled if the speed is *compile* and all weights are on the device.

        ``part``: what it computes, for :attr:`remark`.
        """
        if self.speed != COMPILE:
            return function
        if self.operations.offloaded(self):
            self.note_plain(f"{part} (weights are in system memory)")
            return function

        if function not in self._regions:
            self._regions[function] = _Compiled(function, partial(self.note_plain, part))

        return cast(Callable[P, R], self._regions[function])

    def _apply(self, *args: Any, **more: Any) -> Any:
        self.graphs.forget()  # the weights move
        return super()._apply(*args, **more)


def recorded(function: Callable[..., R]) -> Callable[..., R]:
    """A decorator: ``function(net, ...)`` is recorded if the run of the network records.

    The arguments must suit :meth:`.Graphs.call`. The function itself is not compiled, but the small parts that it calls
    may be (:meth:`Recordable.compiled`).
    """

    @wraps(function)
    def call(net: Recordable, *args: Any) -> R:
        if net.records:
            return net.launch(function, (net, *args))
        return function(net, *args)

    return call


class _Compiled:
    """A compiled function.

    The compiler keeps only a few results for each code object, so every network has its own copy of the code.
    """

    def __init__(self, function: Any, record_plain: Callable[[], None]):
        """``record_plain`` is called whenever the function runs plain."""
        code = function.__code__.replace()
        own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        own.__kwdefaults__ = function.__kwdefaults__
        self.plain = function
        self.record_plain = record_plain
        self.compiled: Any = torch.compile(own, fullgraph=True, dynamic=True, backend=BACKEND)
        from torch.fx.experimental import _config  # a private module, which may move: only compiling needs it

        # Each size has its own symbol, even if two sizes happen to be equal.
        self.own_sizes = _config.patch(use_duck_shape=False)  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> Any:
        if self.compiled is not None:
            try:
                with self.own_sizes, without_cudnn_attention():
                    return self.compiled(*args)
            except torch._dynamo.exc.FailOnRecompileLimitHit:  # before anything was computed
                self.compiled = None
                logging.getLogger(__name__).warning(
                    "FastAR: %s has been compiled for as many shapes as the compiler keeps; from now on it runs "
                    "without compilation.",
                    self.plain.__qualname__,
                )

        self.record_plain()
        return self.plain(*args)


def choose(net: Recordable, speed: str, device: torch.device) -> None:
    """Set how a network runs that will compute on ``device``.

    Raises:
        UserError: an unknown ``speed``, or *compile* without a compiler.
    """
    if speed not in SPEEDS:
        raise UserError(f"speed: {speed!r} is not one of {', '.join(SPEEDS)}.")
    if speed == COMPILE:
        _expect_compiler(device)

    if speed != net.speed:  # recordings may be of compiled functions
        net._regions.clear()
        net.graphs.forget()
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
            lacks = "torch.compile cannot build for a CPU while the folder of PyTorch has a space in its name"
        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            lacks = "torch.compile needs a C++ compiler (g++, clang or MSVC), but finds none"

    if lacks:
        raise UserError(f"speed: {lacks}; choose plain.")
