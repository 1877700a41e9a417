"""The transformer without caches: encoder and decoder from scratch at every AR step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .denoiser import Denoiser
from .diffusion import Tables
from .loop import Conditions, Run


class FullTransformer:
    """Encoder and decoder from scratch at every step, both guidance branches in one batch."""

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Conditions:
        """z at positions ``wanted`` [B, M], given the tokens decided before ``step``."""
        net, batch = run.model.net, len(run.tokens)
        known, tokens, rows = run.plan.known(step), run.tokens, net.class_rows(run.labels, batch)
        if run.guided:
            known, tokens, wanted = (torch.cat([x, x]) for x in (known, tokens, wanted))
            rows = torch.cat([rows, net.class_rows(None, batch)])
        z = net.decode(net.encode(tokens, known, rows), known, wanted)
        c = net.config
        run.report.add(transformer_passes=1, transformer_tokens=len(rows) * (2 * c.buffer + known.shape[1] + c.tokens))
        return Conditions.of(z, run.guided)

    def verify(self, run: Run, step: int, count: int) -> Iterator[list[Conditions]]:
        """z of ``count`` AR steps, each given the tokens of all steps before it, in one pass.

        Equal to :meth:`__call__` step by step, up to the rounding of padded attention.
        """
        if count == 1:
            yield [self(run, step, run.plan.ahead(step))]
            return
        net, plan, (batch, length) = run.model.net, run.plan, run.tokens.shape[:2]
        starts, sizes = plan.starts[step : step + count], plan.sizes[step : step + count]
        # Batch entries: AR steps, images within. Shorter prefixes are padded.
        known = torch.cat([plan.reveal[:, : starts[-1]]] * count)
        lengths = torch.tensor(starts, device=known.device).repeat_interleave(batch)[:, None]
        padding_mask = torch.arange(starts[-1], device=known.device) < lengths
        asked = [plan.ahead(s) for s in range(step, step + count)]
        most = max(sizes)
        wanted = torch.cat([torch.cat([a, a[:, :1].expand(-1, most - a.shape[1])], 1) for a in asked])
        tokens, rows = torch.cat([run.tokens] * count), torch.cat([net.class_rows(run.labels, batch)] * count)
        if run.guided:
            known, padding_mask, wanted, tokens = (torch.cat([x, x]) for x in (known, padding_mask, wanted, tokens))
            rows = torch.cat([rows, net.class_rows(None, len(rows))])
        z = net.decode(net.encode(tokens, known, rows, padding_mask), known, wanted, padding_mask)
        run.report.add(
            transformer_passes=1, transformer_tokens=len(rows) * (2 * net.config.buffer + known.shape[1] + length)
        )
        parts = Conditions.of(z, run.guided).split(batch)
        yield [part.columns(n) for part, n in zip(parts, sizes, strict=True)]

    def denoiser(self, run: Run, table: Tables) -> Denoiser:
        """The uncached denoiser."""
        return Denoiser(run, table)

    def forget(self) -> None:
        """Nothing is cached."""
