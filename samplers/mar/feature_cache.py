"""What LazyMAR (``lazymar.py``) keeps of the transformer from one refresh to the next, and what the report says of it.

An entry is one branch of guidance of one image; the conditional branch's entries come first.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .canvas import MARCanvas
from .settings import CacheSettings


class Store:
    """Keys and values of one block, kept from one call to the next."""

    keys: Tensor  # [E, heads, room, d], since the last refresh
    values: Tensor

    def __init__(self, entries: int, room: int, skipped: int = 0):
        """Of the first ``entries`` of a batch, or of all if there are fewer, and of at most ``room`` rows. Of a refresh
        the first ``skipped`` rows are not stored.
        """
        self.entries = entries
        self.room = room
        self.skipped = skipped

    def update(self, k: Tensor, v: Tensor, rows: slice | Tensor | None) -> tuple[Tensor, Tensor]:
        """Store keys and values [E, heads, n, d] of the computed rows; returns those of all rows of the sequence.

        ``rows`` are the places of the computed rows:

        - None for all rows;
        - int64 [E, n];
        - a slice: the sequence ends where it ends; what is stored behind it is ignored.
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
        out = x.new_empty(len(kept), x.shape[1], self.room, x.shape[3])
        out[:, :, : kept.shape[2]] = kept
        return out


@dataclass(eq=False)
class FeatureCache:
    """What is kept from one refresh to the next, all on storage of its own."""

    next_refresh: int  # its AR step
    entries: int  # of the decoder's batch until then: B without the null branch, else P B
    conditional_only: bool  # condition cache: whether the null branch is left out
    # Encoder cache: a store of each block, for decided tokens and, behind them, the class rows; [] without it.
    encoder: list[Store]
    # Token cache: a store of each block after the chosen one; [] if all rows are computed.
    decoder: list[Store]

    # Of the last call: the AR step, -1 before the refresh, and the number of tokens decided before it.
    step: int = -1
    known: int = 0
    # With the encoder cache: what the condition keeps between encoder and decoder (a language model's keys and values,
    # None for class labels), and the decoder's input [entries, N, C].
    fused: Any = None
    decoder_input: Tensor | None = None
    chosen_values: Tensor | None = None  # token cache: V of the chosen block at the last call, [entries, heads, N, d]
    residual: Tensor | None = None  # condition cache: null minus conditional branch at the refresh, [B, L, C]

    @property
    def empty(self) -> bool:
        """Whether the next call is a refresh."""
        return self.step < 0


def own_copy(x: Tensor, entries: int) -> Tensor:
    """A copy of the first ``entries``; a view would keep the whole projection in memory."""
    return x[:entries].clone(memory_format=torch.contiguous_format)


class CacheReport:
    """The name and the settings of the combination; bytes that are kept, and how often a token came from the cache.

    Counts of a report are sums, so that only what was not reported yet is added.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        self.canvas = canvas
        report = canvas.report
        report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
        report.settings |= {f.name: getattr(settings, f.name) for f in fields(CacheSettings)}

        self.reported_bytes = 0
        self.reported_tokens = 0
        # int32 [B, L], how often each token's decoder rows came from the cache; None where they never do.
        self.cached: Tensor | None = None
        if settings.refresh_period > 1 and settings.token_cache:
            self.cached = torch.zeros(canvas.images, canvas.cells, dtype=torch.int32, device=canvas.device)

    def add_bytes(self, cache: FeatureCache) -> None:
        """Report the bytes of all stored tensors, if they are more than those of the refreshes before."""
        tensors = [cache.decoder_input, cache.chosen_values, cache.residual]
        for store in (*cache.encoder, *cache.decoder):
            tensors += [store.keys, store.values]
        if cache.fused is not None:
            tensors += cache.fused.tensors

        found = sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
        most = max(self.reported_bytes, found)
        self.canvas.report.add(cache_bytes=most - self.reported_bytes)
        self.reported_bytes = most

    def count(self, rows: Tensor, total: int) -> None:
        """Count the tokens that are not among the ``rows`` of ``total`` to compute, in the conditional branch."""
        assert self.cached is not None
        images, tokens = self.cached.shape
        left_out = torch.ones(images, total, dtype=torch.int32, device=rows.device).scatter_(1, rows[:images], 0)
        self.cached += left_out[:, total - tokens :]

    def add_tokens(self, decided: int) -> None:
        """Report the map if ``decided`` tokens are all of them: the call may be the last one."""
        canvas = self.canvas
        if self.cached is None or decided < canvas.cells:
            return

        canvas.report.maps["cached"] = self.cached.unflatten(1, canvas.grid).cpu().numpy().copy()
        total = int(canvas.report.maps["cached"].sum())
        canvas.report.add(cached_tokens=total - self.reported_tokens)
        self.reported_tokens = total
