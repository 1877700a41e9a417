"""CUDA graphs: the kernels that a function of tensors launches are recorded once, and from then on launched as a whole.

A pass that decides one token launches hundreds of kernels of a few microseconds each. The host needs longer to launch
them one by one than the GPU needs to run them. A CUDA graph launches all of them in one call. The kernels are the same
as without a graph, so the results are bit-identical.

A graph is fixed: it reads and writes the same addresses at every launch. :class:`Graphs` therefore

- records a function anew for every shape of its arguments, the second time that it meets this shape, and copies the
  arguments of later calls to the tensors that were recorded;
- identifies tensors that a function writes (:class:`State`, for example a KV cache) by their addresses, and keeps the
  tensors of a KV cache from one run to the next;
- forgets everything when weights have moved, or when memory is short.

A function that is recorded must not read a value on the host, copy from the host, or use PyTorch's own random numbers.
It makes decisions in Python only once, when it is recorded. ``tests/lib/recording.py`` records on a CPU, and refuses
functions that break these rules.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

# The most recordings of a network that are kept. The recording that was not used for the longest time is freed first.
MOST = 512
# The most bytes of a KV cache that is kept for the next run. A larger cache belongs to a batch that keeps a GPU busy
# anyway.
KEPT_BYTES = 1 << 30
# The most bytes of the arguments of a call that is recorded. Larger arguments belong to a batch whose kernels take
# longer than their launch.
LARGEST = 64 << 20
# Addresses of arguments and results are multiples of this number of bytes, as the addresses of an allocator are.
ALIGNED = 512
# Whether the host allows CUDA graphs; ComfyUI's --disable-cuda-graphs forbids them.
allowed = True


def available(device: torch.device) -> bool:
    """Whether functions can be recorded on a device."""
    return allowed and device.type == "cuda"


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Run a block on the stream on which functions are recorded. The block's kernels run after all kernels that were
    launched before the block, and before all kernels that are launched after it.

    A function is called once on this stream before it is recorded there, so that cuBLAS allocates its memory for the
    stream outside of a graph.
    """
    current = torch.cuda.current_stream(device)
    stream = _stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all recordings: cuBLAS has a workspace of 32 MB for each."""
    return torch.cuda.Stream(device)


def record(function: Callable[[], None], pool: Any, device: torch.device) -> Callable[[], None]:
    """Record the kernels that ``function`` launches on a device. Returns a function that launches them again. ``pool``:
    memory that recordings share.
    """
    graph = torch.cuda.CUDAGraph()
    # If memory is allocated during the recording, ComfyUI's DynamicVRAM may unmap weights of other models, and cannot
    # wait for kernels that read these weights. So wait for all kernels first.
    torch.cuda.synchronize(device)
    # A garbage collection could free another graph, which is an error while a graph is recorded.
    collects = gc.isenabled()
    gc.disable()
    try:
        with aside(device):
            # Other threads of the host may use the GPU.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()

    return graph.replay


def new_pool() -> Any:
    """Memory for the intermediate results of all recordings, which may share it because only one runs at a time."""
    return torch.cuda.graph_pool_handle()


class State(tuple[Tensor, ...]):
    """Tensors that a recorded function writes, or that are too large to be copied at every call. A recording is valid
    for their addresses only.
    """


class Graphs:
    """The recordings of a network."""

    problem = ""  # why the last recording failed, in PyTorch's words; "" if none failed

    def __init__(self) -> None:
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._called: set[Hashable] = set()  # keys of functions and shapes that were called; the next call records them
        self._pool: Any = None
        self._room = _Room()
        self._addresses: tuple[int, ...] = ()  # addresses of the weights
        self._kept = _Kept()
        _ALL.add(self)

    def __deepcopy__(self, memo: Any) -> Graphs:
        return Graphs()  # a copied network has weights at other addresses

    def forget(self) -> None:
        """Free all recordings and what they keep."""
        self.problem = ""
        self._recordings.clear()
        self._called.clear()
        self._pool = None
        self._room = _Room()
        self._kept = _Kept()

    def follow(self, net: nn.Module) -> None:
        """Forget what was recorded if the weights of the network are elsewhere now."""
        addresses = tuple(weight.data_ptr() for weight in (*net.parameters(), *net.buffers()))
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses

    def zeros(self, shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
        """Tensors of zeros. They are the tensors of the last call, if these have the same form and nothing uses them
        any more.

        :meth:`use` says what uses them::

            stores = graphs.zeros(shapes, x)  # of the first run
            graphs.use(stores, cache)
            del cache                         # the first run has ended
            stores = graphs.zeros(shapes, x)  # of the second run: the same tensors
        """
        form = (tuple(map(tuple, shapes)), like.dtype, like.device)
        if self._kept.free and self._kept.form == form:
            for tensor in self._kept.tensors:
                tensor.zero_()
            return list(self._kept.tensors)

        if self._kept.free:
            self._kept = _Kept()  # frees the memory before more is allocated
        with torch.inference_mode(False):
            made = [like.new_zeros(shape) for shape in shapes]
        if self._kept.free and sum(tensor.nbytes for tensor in made) <= KEPT_BYTES:
            self._kept = _Kept(form, tuple(made))
        return made

    def use(self, tensors: Sequence[Tensor], user: Any) -> None:
        """Reserve tensors from :meth:`zeros`: no other run gets them as long as ``user`` exists."""
        if self._kept.tensors and tensors[0] is self._kept.tensors[0]:
            self._kept.user = weakref.ref(user)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call ``function(*args)``. The second call with the same shapes records it, and later calls replay the
        recording. If it cannot be recorded, :attr:`problem` says why.

        Args:
            function: its result is a tensor, or a sequence of tensors, Nones and such sequences.
            args: tensors, sequences of tensors, :class:`State`, None, and other values, which are fixed in a recording
                and must be hashable.
        """
        # 1. Replay the recording if there is one.
        tensors: list[Tensor] = []
        key = (function, _described(args, tensors))
        recording = self._recordings.get(key)
        if recording is not None:
            self._recordings.move_to_end(key)
            return recording.replay(tensors)

        # 2. At the first call, or with large arguments, only call the function.
        if key not in self._called or sum(tensor.nbytes for tensor in tensors) > LARGEST:
            if len(self._called) > 8 * MOST:
                self._called.clear()
            self._called.add(key)
            return function(*args)

        # 3. Call the function on the stream of recordings, and then record it. It gets copies, because it may write its
        #    arguments: a block adds to its input in place.
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        with aside(tensors[0].device):
            out = function(*_filled(args, iter(copies)))

        if self._pool is None:
            self._pool = new_pool()
        try:
            self._recordings[key] = _Recording(function, args, tensors, out, self._room, self._pool)
        except torch.OutOfMemoryError:
            self.problem = "memory is short"
        except RuntimeError as problem:
            self.problem = str(problem).partition("\n")[0]
        if len(self._recordings) > MOST:
            self._recordings.popitem(last=False)
        return out


# The recordings of all networks.
_ALL: WeakSet[Graphs] = WeakSet()


def forget_all() -> None:
    """Free the recordings of all networks, when memory is short."""
    for recorded in list(_ALL):
        recorded.forget()


@dataclass
class _Kept:
    """Tensors that are kept for the next run, and what uses them now."""

    form: Hashable = None  # shapes, dtype and device of the tensors
    tensors: tuple[Tensor, ...] = ()
    user: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        """Whether nothing uses the tensors."""
        return self.user is None or self.user() is None


class _Room:
    """Memory that the arguments and results of all recordings share, because each needs it only around its launch."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def place(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous tensors in this memory, with the shapes and dtypes of ``like``."""
        starts = [0]
        for tensor in like:
            starts.append(starts[-1] + math.ceil(tensor.nbytes / ALIGNED) * ALIGNED)

        # If this allocates new memory, earlier recordings keep the memory that they have.
        if self._bytes is None or len(self._bytes) < starts[-1]:
            with torch.inference_mode(False):  # tensors of inference mode could not be written outside of it
                self._bytes = torch.empty(starts[-1], dtype=torch.uint8, device=like[0].device)

        placed = []
        with torch.inference_mode(False):
            for start, tensor in zip(starts, like, strict=False):
                own = self._bytes[start : start + tensor.nbytes]
                placed.append(own.view(tensor.dtype).view(tensor.shape))
        return placed


class _Recording:
    """The recording of a function for the shapes of one call."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        tensors: Sequence[Tensor],
        out: Any,
        room: _Room,
        pool: Any,
    ):
        """Record ``function(*args)``. ``tensors``: the tensors in ``args``; ``out``: the result of a call."""
        made: list[Tensor] = []
        _described(out, made)
        self._form = _filled(out, repeat(_TENSOR))

        placed = room.place((*tensors, *made))
        self.inputs = placed[: len(tensors)]
        self.outputs = placed[len(tensors) :]
        self._copy_inputs = _copier(self.inputs)
        self._copy_outputs = _copier(self.outputs)
        self._copy_inputs(self.inputs, tensors)
        fixed = _filled(args, iter(self.inputs))

        # Results are copied to tensors outside of the pool, so that nothing in it outlives a launch.
        def run() -> None:
            results: list[Tensor] = []
            _described(function(*fixed), results)
            self._copy_outputs(self.outputs, results)

        self._launch = record(run, pool, placed[0].device)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """The result for other tensors of the same shapes, as new tensors."""
        self._copy_inputs(self.inputs, tensors)
        self._launch()

        results = [torch.empty_like(t) for t in self.outputs]
        self._copy_outputs(results, self.outputs)
        return _filled(self._form, iter(results))


# Stands for a tensor in the form of a result.
_TENSOR = object()


def _described(value: Any, tensors: list[Tensor]) -> Hashable:
    """The part of a value that is fixed in a recording. For a tensor, it is its shape and dtype. All tensors of the
    value are appended to ``tensors``.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    if isinstance(value, State):
        return tuple((tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()) for tensor in value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_described(item, tensors) for item in value)
    return cast(Hashable, value)


def _filled(value: Any, tensors: Iterator[Any]) -> Any:
    """The value with other tensors, in the order in which :func:`_described` lists the value's tensors."""
    if isinstance(value, Tensor) or value is _TENSOR:
        return next(tensors)
    if isinstance(value, State) or not isinstance(value, (list, tuple)):
        return value

    items = [_filled(item, tensors) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _copier(like: Sequence[Tensor]) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """A function that copies tensors like ``like`` to other tensors, with one launch for each dtype."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(like):
        groups.setdefault(tensor.dtype, []).append(i)

    def copy(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        for group in groups.values():
            torch._foreach_copy_([to[i] for i in group], [tensors[i] for i in group])

    return copy
