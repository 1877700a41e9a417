"""CUDA graphs on a CPU: the operations of a call are recorded, and then executed again on the same tensors.

As in a CUDA graph, everything that is no tensor is fixed, and so is all that Python decided. What a CUDA graph must not
contain is an error while recording: a value that the host reads, random numbers of the global generator, tensors that
the host makes of its own numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from fastar_nodes.networks import graphs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that send a value to the host, or whose result has a shape that depends on one.
READS = frozenset(("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"))
# Operations that copy from the host: torch.tensor([...]) is lift_fresh of a tensor of the host.
FROM_THE_HOST = frozenset(("lift_fresh", "lift_fresh_copy", "_pin_memory"))


class NotRecordable(Exception):
    """An operation that a CUDA graph must not contain."""


class Operations(TorchDispatchMode):
    """The operations of a block, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors that were written, and what they held

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in READS:
            raise NotRecordable(f"{name}: the host would wait for the device")
        if name.startswith(("index", "_index_put")) and any(_is_mask(t) for t in tree_leaves(args[1:])):
            raise NotRecordable(f"{name}: the shape depends on how many values of a mask are True")
        if name in FROM_THE_HOST:
            raise NotRecordable(f"{name}: a copy from the host")
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        if is_random and "attention" not in name:  # attention without dropout draws nothing
            raise NotRecordable(f"{name}: random numbers of the global generator")

        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(t, t.clone()) for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out


class Recorded:
    """A call that was recorded; calling it executes its operations again.

    As a CUDA graph, it computes nothing while it is recorded: what was written then is as before.
    """

    def __init__(self, function: Callable[[], None]):
        with Operations() as operations:
            function()
        for tensor, held in reversed(operations.before):
            tensor.copy_(held)
        self.calls = [call for call in operations.calls if not _is_view(*call)]

    def __call__(self) -> None:
        for function, args, kwargs, out in self.calls:
            new = function(*args, **kwargs)
            if _writes(function):
                continue
            for old, fresh in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != fresh.data_ptr():
                    old.copy_(fresh)


def _writes(function: Any) -> bool:
    """Whether an operation writes one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments)


def _is_view(function: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an operation made views of its arguments, which need not be made again. ``reshape`` sometimes does."""
    if _writes(function):
        return False

    arguments = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    return all(_storage(t) in arguments for t in tree_leaves(out) if isinstance(t, torch.Tensor))


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """In this block networks on a CPU record functions as on a CUDA device; yields the recordings made so far."""
    made: list[Recorded] = []

    def record(function: Callable[[], None], pool: Any, device: torch.device) -> Recorded:
        made.append(Recorded(function))
        return made[-1]

    with (
        patch.object(graphs, "available", lambda device: graphs.allowed),
        patch.object(graphs, "aside", lambda device: nullcontext()),
        patch.object(graphs, "record", record),
        patch.object(graphs, "new_pool", lambda: None),
    ):
        yield made
