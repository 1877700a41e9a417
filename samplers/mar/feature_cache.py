"""What LazyMAR (``lazymar.py``) keeps of the transformer from one refresh to the next.

An entry is one branch of guidance of one image; the conditional branch's entries come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Store:
    """Keys and values of one block, kept from one call to the next."""

    keys: Tensor  # [entries, heads, room, d], since the last refresh
    values: Tensor

    def __init__(self, entries: int, room: int, skipped: int = 0):
        """Of the first ``entries`` of a batch, and at most ``room`` rows; ``skipped`` rows in front of all rows are not
        stored."""
        self.entries = entries
        self.room = room
        self.skipped = skipped

    def update(self, k: Tensor, v: Tensor, rows: slice | Tensor | None) -> tuple[Tensor, Tensor]:
        """Store keys and values [E, heads, n, d] of the computed rows; returns those of all rows of the sequence.

        ``rows`` are the places of the computed rows:

        - int64 [E, n];
        - a slice that ends with the sequence;
        - None for all rows, also of entries that are not stored.
        """
        if rows is None:
            self.keys = self._copy(k)
            self.values = self._copy(v)
            return k, v

        if isinstance(rows, slice):
            self.keys[:, :, rows] = k
            self.values[:, :, rows] = v
            return self.keys[:, :, : rows.stop], self.values[:, :, : rows.stop]

        at = rows[:, None, :, None].expand_as(k)
        self.keys.scatter_(2, at, k)
        self.values.scatter_(2, at, v)
        return self.keys, self.values

    def _copy(self, x: Tensor) -> Tensor:
        kept = x[: self.entries, :, self.skipped :]
        out = x.new_empty(self.entries, x.shape[1], self.room, x.shape[3])
        out[:, :, : kept.shape[2]] = kept
        return out


@dataclass(eq=False)
class FeatureCache:
    """What is kept from one refresh to the next, all on storage of its own."""

    next_refresh: int  # its AR step
    decoder_entries: int  # entries that the decoder computes until then: B without the null branch, else P B
    encoder_entries: int  # those that the encoder computes: as many, or B where both branches share the encoder
    conditional_only: bool  # condition cache: whether the null branch is left out
    # Encoder cache: a store of each block, for decided tokens and, behind them, the class rows; [] without it.
    encoder: list[Store]
    # Token cache: a store of each block after the chosen one; [] if all rows are computed.
    decoder: list[Store]

    # Of the last call: the AR step, -1 before the refresh, and the number of tokens decided before it.
    step: int = -1
    known: int = 0
    # With the encoder cache: what the condition keeps between encoder and decoder (a language model's keys and values,
    # None for class labels), and the decoder's input [decoder entries, N, C].
    fused: Any = None
    decoder_input: Tensor | None = None
    chosen_values: Tensor | None = (
        None  # token cache: V of the chosen block at the last call, [decoder entries, heads, N, d]
    )
    residual: Tensor | None = None  # condition cache: null minus conditional branch at the refresh, [B, L, C]

    @property
    def empty(self) -> bool:
        """Whether the next call is a refresh."""
        return self.step < 0

    @property
    def bytes(self) -> int:
        """Bytes of all stored tensors."""
        tensors = [self.decoder_input, self.chosen_values, self.residual]
        for store in (*self.encoder, *self.decoder):
            tensors += [store.keys, store.values]
        if self.fused is not None:
            tensors += self.fused.tensors
        return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


def own_copy(x: Tensor, entries: int) -> Tensor:
    """A copy of the first ``entries``; a view would keep the whole projection in memory."""
    return x[:entries].clone(memory_format=torch.contiguous_format)
