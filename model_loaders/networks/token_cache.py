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
        rows: of a cache for serial decoding on a GPU: [blocks, R, 1 + slots, 2 kv heads, D]. Row 0 takes the newest token, which joins its
            slot after all blocks; the others are ``pairs``.
        storage: the memory of ``rows``, [blocks, R, ...]. Before row 0 is space for queries, so that one product writes queries, keys
            and values of the newest token.
        shifted: ``bias`` with an entry for row 0 before it.
        lasting: if the tensors outlive the run, because captured functions read them: another cache with the same tensors.
    """

    pairs: list[Tensor]
    prefix: int
    bias: Tensor | None
    positions: PositionTable
    rows: Tensor | None = None
    storage: Tensor | None = None
    shifted: Tensor | None = None
    lasting: Cache | None = None

    @staticmethod
    def of(pairs: list[Tensor], prefix: int, positions: PositionTable) -> Cache:
        """A cache whose keys and values are views of ``pairs``."""
        keys, values = zip(*(pair.chunk(2, dim=1) for pair in pairs), strict=True)
        return Cache(list(keys), list(values), pairs, prefix, None, positions)

    @staticmethod
    def serial(
        shape: tuple[int, int, int, int, int], queries: int, like: Tensor, prefix: int, positions: PositionTable
    ) -> Cache:
        """A cache with ``rows``.

        Args:
            shape: blocks, R, 2 kv heads, slots, D.
            queries: numbers of a token's queries.
            like: a tensor of the cache's type and device.
            prefix, positions: see above.
        """
        blocks, batch, heads, slots, width = shape
        storage = like.new_zeros(blocks, batch, queries + (1 + slots) * heads * width)
        rows = storage[:, :, queries:].unflatten(2, (1 + slots, heads, width))
        cache = Cache.of([row[:, 1:].transpose(1, 2) for row in rows], prefix, positions)
        cache.rows, cache.storage = rows, storage
        return cache

    def keep(self, index: Tensor) -> None:
        self.rows = self.storage = self.shifted = None
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
