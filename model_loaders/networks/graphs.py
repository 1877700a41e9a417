"""Captured functions: CUDA graphs that are replayed with other inputs, without a launch for every kernel.

Source: "Constraints" in PyTorch's notes on CUDA graphs. A captured function reads its inputs from buffers that stay where they are, has
fixed shapes and never makes the host wait for the device. Row counts and key lengths are therefore rounded up to a few sizes; the rows
of padding are computed and thrown away.

What is captured: the diffusion loop of an AR step (``samplers/mar/denoiser.py``) and a decoding step of the token transformer
(``gpt.py``). A function is run once before it is captured, so that libraries are initialised and kernels compiled.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...memory import out_of_memory

# Captured functions of a network; beyond, the one whose last use is longest ago is given up.
MOST = 96
# Values that they may read beside their inputs: caches of different sizes.
HELD = 2

Function = Callable[..., tuple[Tensor, ...]]
# Runs a function once and captures it: how to replay it, and its outputs, which every replay writes again.
Capture = Callable[[Callable[[], tuple[Tensor, ...]], Any], tuple[Callable[[], None], tuple[Tensor, ...]]]


class Input(NamedTuple):
    """An input of a captured function.

    Attributes:
        value: the tensor.
        axis: axis that may be shorter than in the buffer.
        size: the buffer's size along it; None: the tensor's. What a shorter tensor leaves of the buffer keeps earlier values.
    """

    value: Tensor
    axis: int = 0
    size: int | None = None


class _Captured(NamedTuple):
    buffers: list[Tensor]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


def rounded(rows: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 ... that is at least ``rows``; fewer than a third of the rows are padding."""
    power = 1 << max(0, (rows - 1).bit_length() - 1)
    return rows if rows <= 2 else next(n for n in (power, power * 3 // 2, 2 * power) if n >= rows)


def capture_cuda(
    function: Callable[[], tuple[Tensor, ...]], pool: Any
) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Capture a function as a CUDA graph; see :data:`Capture`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Only this thread may not synchronise: a preview or another program's node may, meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = function()
    return graph.replay, outputs


class Graphs:
    """The captured functions of a network.

    Attributes:
        problem: why functions are not captured any more, or "".
        replays: number of calls of :meth:`run` that succeeded, since :meth:`begin`.
        held: what captured functions read beside their inputs, by a key of the caller's.
    """

    def __init__(self, net: nn.Module):
        self.problem, self.replays = "", 0
        self.held: dict[Hashable, Any] = {}
        self._net = net
        self._made: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._weights: tuple[int, ...] = ()
        self._pool: Any = None

    def begin(self) -> None:
        """Before every sampling run: give up all captured functions if weights were moved since, for they read the old ones."""
        self.replays = 0
        weights = tuple(p.data_ptr() for p in self._net.parameters())
        if weights != self._weights:
            self.clear()
            self._weights = weights

    @property
    def remark(self) -> str:
        """What the report of the last run says."""
        return self.problem or ("speed: graphs" if self.replays else "speed: graphs; nothing in this run was captured")

    def clear(self) -> None:
        """Give up all captured functions and their memory."""
        self._made.clear()
        self.held.clear()
        self._pool = None

    def hold(self, key: Hashable, value: Any) -> None:
        """Put a value into :attr:`held`; beyond :data:`HELD` of them everything captured so far is given up."""
        if key not in self.held and len(self.held) >= HELD:
            self.clear()
        self.held[key] = value

    def run(self, key: Hashable, function: Function, inputs: Sequence[Input]) -> tuple[Tensor, ...] | None:
        """``function`` of the inputs' buffers, captured at its first call with this key.

        Args:
            key: what the function depends on beside the values of the inputs; their shapes are added here.
            function: takes the buffers. It is kept with all that it refers to.
            inputs: its inputs.

        Returns:
            Copies of its outputs; None if it could not be captured, now or earlier (see :attr:`problem`).
        """
        if self.problem:
            return None
        key = (key, *(_shape(x) for x in inputs))
        made = self._made.get(key)
        if made is None:
            made = self._captured(function, inputs)
            if made is None:
                return None
            self._made[key] = made
            if len(self._made) > MOST:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        _fill(made.buffers, inputs)
        made.replay()
        self.replays += 1
        return tuple(x.clone() for x in made.outputs)

    def _captured(self, function: Function, inputs: Sequence[Input]) -> _Captured | None:
        device = inputs[0].value.device
        try:
            with torch.inference_mode(False), torch.no_grad():  # buffers that any mode may write to
                buffers = [x.value.new_zeros(_shape(x)[0]) for x in inputs]
            _fill(buffers, inputs)
            if self._pool is None and device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            replay, outputs = _capture(lambda: function(*buffers), self._pool)
        except RuntimeError as error:
            self.clear()
            if out_of_memory(error):  # the sampler goes on with a part of the batch
                raise
            first = (str(error).splitlines() or [""])[0][:200]
            self.problem = f"speed: graphs could not be captured ({first}); the run was plain"
            logging.getLogger(__name__).warning("FastAR: %s.", self.problem)
            return None
        return _Captured(buffers, outputs, replay)


def _shape(x: Input) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of an input's buffer."""
    shape = list(x.value.shape)
    if x.size is not None:
        shape[x.axis] = x.size
    return tuple(shape), x.value.dtype


def _fill(buffers: Sequence[Tensor], inputs: Sequence[Input]) -> None:
    for buffer, x in zip(buffers, inputs, strict=True):
        buffer.narrow(x.axis, 0, x.value.shape[x.axis]).copy_(x.value)


_capture: Capture = capture_cuda


def needs_cuda() -> bool:
    """Whether functions can be captured on a CUDA device only."""
    return _capture is capture_cuda


def set_capture(capture: Capture) -> Capture:
    """Choose how functions are captured from now on; returns the previous way. Tests record a function's operations on a CPU."""
    global _capture
    previous, _capture = _capture, capture
    return previous
