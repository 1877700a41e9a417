"""Captured functions on a CPU: their operations are recorded and replayed on the same memory, which is what a CUDA graph does.

A replay runs no Python of the function, so results that depend on values read while it was recorded are wrong afterwards. What a graph
cannot hold raises when it is recorded: reading a value on the host, shapes that depend on values, and new tensors from host data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSED = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "_unique2",
    "unique_dim",
    "lift_fresh",
    "item",
)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        indices = args[1] if name in ("index", "index_put_", "index_put") else ()
        if name in REFUSED or any(i is not None and i.dtype == torch.bool for i in indices):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        """Run the recorded operations again, each with its results where they were."""
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and _address(old) != _address(new):
                        old.copy_(new)


def _address(x: Tensor) -> int:
    """Also of a tensor of a pretended device (``pretended_cuda.py``)."""
    return getattr(x, "host", x).data_ptr()


def capture(function: Callable[[], tuple[Tensor, ...]], pool: Any) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Record a function; see :data:`fastar_nodes.model_loaders.networks.graphs.Capture`."""
    function()
    recorder = _Recorder()
    with recorder:
        out = function()
    return recorder.replay, out
