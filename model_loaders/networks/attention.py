"""Attention with grouped key and value heads, and the KV cache; shared by the GPT and the language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# (block index, queries, keys, values) of one block to its attention output [R, n, C]; may read and write a cache.
AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Attention output [R, n, C].

    Args:
        q: queries [R, heads, n, D].
        k, v: [R, kv heads, S, D].
        mask: bool (True: visible) or fp32 (added to the scores), [n, S] or [R, 1, n, S]; None: every key is visible.
        causal: query i attends to keys 0 to i; only without a mask.
    """
    rows, heads, n, d = q.shape
    group = heads // k.shape[1]
    if group > 1:  # the queries of a group become further rows of its key head, so that no key is copied
        q = q.reshape(rows, heads // group, group * n, d)
        if causal:
            mask, causal = torch.ones(n, k.shape[2], dtype=torch.bool, device=q.device).tril(), False
        if mask is not None:
            mask = mask.repeat(*(1,) * (mask.ndim - 2), group, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return out.reshape(rows, heads, n, d).transpose(1, 2).flatten(2)


@dataclass(eq=False)
class KVCache:
    """Keys and values of one run, allocated once and written by slot.

    Attributes:
        keys, values: one tensor per block, [R, kv heads, slots, D]; zero where nothing has been written.
    """

    keys: list[Tensor]
    values: list[Tensor]

    def keep(self, index: Tensor) -> None:
        """Reduce the cache to the batch rows ``index`` int64, one tensor at a time."""
        for tensors in (self.keys, self.values):
            for i, tensor in enumerate(tensors):
                tensors[i] = tensor[index]

    @property
    def bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(t.numel() * t.element_size() for t in self.keys + self.values)
