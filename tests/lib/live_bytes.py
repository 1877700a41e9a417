"""Peak of the bytes that tensors hold at once, counted on the meta device, where full-size networks cost nothing."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live:
    """Bytes of storages from their making to their end: at present, and the most there were."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._known: set[int] = set()

    def add(self, storage: torch.UntypedStorage, count: int) -> None:
        """Count ``count`` bytes for a storage, if it is not known already."""
        if id(storage) not in self._known:
            self._known.add(id(storage))
            weakref.finalize(storage, self._end, id(storage), count)
            self.live += count
            self.peak = max(self.peak, self.live)

    def _end(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.live -= count


class LiveBytes(Live, TorchDispatchMode):
    """Counts storages that are made within the mode."""

    def __init__(self) -> None:
        Live.__init__(self)
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensors, made in (((args, kwargs), False), (out, True)):  # storages from outside are not counted
            for t in tree_leaves(tensors):
                if isinstance(t, Tensor):
                    self.add(t.untyped_storage(), made * t.untyped_storage().nbytes())
        return out


@contextmanager
def counted(monkeypatch: Any) -> Iterator[LiveBytes]:
    """Count the block's tensors; attention is the fused kernel's, which keeps no scores."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, *_, **__: torch.empty_like(q))
    monkeypatch.setattr(bias, "causal_lower_right", lambda *_: None)
    with LiveBytes() as mode:
        yield mode
