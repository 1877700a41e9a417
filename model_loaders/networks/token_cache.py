"""The KV cache of the token transformer, and caches that captured functions read."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from weakref import ref

import torch
from torch import Tensor

from .attention import KVCache
from .graphs import Graphs
from .rope import PositionTable

# Key lengths of captured functions are multiples of this; most batch rows of a cache that they read: beyond, a pass takes longer than
# its launches.
SLOTS, CAPTURED = 128, 64


@dataclass(eq=False)
class Cache(KVCache):
    """KV cache of one decoding run.

    Attributes:
        pairs: keys followed by values of each block, [R, 2 kv heads, slots, D], so that one operation writes both; ``keys`` and
            ``values`` are views of them.
        prefix: slots of the condition; the slot of cell 0 follows.
        bias: fp32 [R, 1, 1, slots] added to the attention scores, or None. Where a text of n rows is collapsed into one slot
            it holds log n in that slot.
        positions: see :class:`PositionTable`.
        lasting: if the tensors outlive the run, because captured functions read them: another cache with the same tensors.
    """

    pairs: list[Tensor]
    prefix: int
    bias: Tensor | None
    positions: PositionTable
    lasting: Cache | None = None

    @staticmethod
    def of(pairs: list[Tensor], prefix: int, positions: PositionTable) -> Cache:
        """A cache whose keys and values are views of ``pairs``."""
        keys, values = zip(*(pair.chunk(2, dim=1) for pair in pairs), strict=True)
        return Cache(list(keys), list(values), pairs, prefix, None, positions)

    def keep(self, index: Tensor) -> None:
        for i, pair in enumerate(self.pairs):
            self.pairs[i], self.lasting = pair[index], None
            self.keys[i], self.values[i] = self.pairs[i].chunk(2, dim=1)


def lend(graphs: Graphs | None, key: Hashable, make: Callable[[], Cache]) -> Cache:
    """A cache for one run, zero everywhere.

    Args:
        graphs: the network's captured functions, or None.
        key: what :meth:`make` depends on.
        make: makes a cache.

    Returns:
        A new cache; or, with captured functions, one whose tensors they read, if no other run is using these.
    """
    if graphs is None:
        return make()
    held, user = graphs.held.get(key, (None, None))
    if user is not None and user() is not None:
        return make()
    if held is None:
        with torch.inference_mode(False), torch.no_grad():
            held = make()
        if held.pairs[0].shape[0] > CAPTURED:
            return held
    for pair in held.pairs:
        pair.zero_()
    out = replace(held, keys=list(held.keys), values=list(held.values), pairs=list(held.pairs), lasting=held)
    graphs.hold(key, (held, ref(out)))
    return out
