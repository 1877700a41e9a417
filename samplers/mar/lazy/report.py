"""What the report says of LazyMAR: its settings, the bytes that it keeps, and how often it left a token out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import torch
from torch import Tensor

from ...memory import FEATURES
from ..canvas import MARCanvas
from ..memory import feature_bytes
from ..settings import CacheSettings


class CacheReport:
    """The entries of a generation.

    Counts of a report are sums, so only what was not reported yet is added.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        """The sampler takes the name lazymar, or SAMPLER+lazymar."""
        self.canvas = canvas
        report = canvas.report
        report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
        report.settings |= {f.name: getattr(settings, f.name) for f in fields(CacheSettings)}
        report.memory[FEATURES] = feature_bytes(canvas.model, canvas.images, canvas.settings, settings)

        self.reported_bytes = 0
        if settings.refresh_period > 1 and settings.token_cache:
            canvas.cached = torch.zeros(canvas.images, canvas.cells, dtype=torch.int32, device=canvas.device)

    def add_bytes(self, tensors: Iterable[Tensor]) -> None:
        """Report the bytes of all tensors that a refresh keeps, if they are more than those of earlier refreshes."""
        most = max(self.reported_bytes, sum(tensor.nbytes for tensor in tensors))
        self.canvas.report.add(cache_bytes=most - self.reported_bytes)
        self.reported_bytes = most

    def add_pass(self, encoder_rows: int, rows: Tensor, chosen: Tensor | None, block: int) -> None:
        """Count a pass, and the tokens whose rows its decoder left out in the conditional branch.

        Args:
            encoder_rows: rows that the encoder computed.
            rows: the decoder's, [E, N, C].
            chosen: those of them that the blocks after ``block``, counted from 0, computed, int64 [E, n]; None: all.
        """
        canvas = self.canvas
        entries, total, _ = rows.shape
        count = total
        if chosen is not None:
            count = chosen.shape[1]
            assert canvas.cached is not None
            left_out = torch.ones(canvas.images, total, dtype=torch.int32, device=rows.device)
            left_out.scatter_(1, chosen[: canvas.images], 0)
            canvas.cached += left_out[:, total - canvas.cells :]

        # The rows of an average block.
        depth = canvas.model.net.config.decoder_depth
        decoder_rows = round(entries * (total * (block + 1) + count * (depth - block - 1)) / depth)
        canvas.report.add(**canvas.conditioning.counts(encoder_rows, decoder_rows))
