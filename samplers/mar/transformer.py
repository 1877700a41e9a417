"""The transformer without caches: encoder and decoder from scratch at every AR step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...model_loaders.networks.rows import Work
from ..noise import copied
from .denoiser import Denoiser
from .diffusion import Tables
from .loop import Conditions, Run


def copies(x: Tensor, rows: int) -> Tensor:
    """The batch repeated until it has ``rows`` rows."""
    return x if len(x) == rows else torch.cat([x] * (rows // len(x)))


def count_pass(run: Run, work: Work) -> None:
    """Add a transformer pass to the report."""
    extra = run.rows.work(work)
    rows = work.encoder + work.decoder + extra.get("llm_rows", 0)
    run.report.add(transformer_passes=1, transformer_tokens=rows, **extra)


def _pass(
    run: Run, tokens: Tensor, known: Tensor, wanted: Tensor, count: int, padding_mask: Tensor | None = None
) -> Tensor:
    """z [D, M, C], both branches of guidance, for ``count`` copies of the batch.

    Args:
        tokens: [N, L, channels], N = ``count`` B; the encoder computes one branch or both, see :class:`Rows`.
        known, wanted: int64 [N, K] and [N, M].
        padding_mask: bool [N, K], see ``MAR.encode``.
    """
    net, vectors = run.model.net, run.rows.vectors(run.guided, count)
    rows = len(tokens) * (1 + run.guided)
    e_mask = d_mask = padding_mask
    if padding_mask is not None:
        e_mask, d_mask = copies(padding_mask, len(vectors)), copies(padding_mask, rows)
    e_known = copies(known, len(vectors))
    encoded = net.encode(copies(tokens, len(vectors)), e_known, vectors, e_mask)
    fused = run.rows.fuse(encoded, e_known, run.guided, e_mask)
    wanted = copies(wanted, rows)
    z = net.decode(fused, copies(known, rows), wanted, d_mask)
    keys, total = encoded.shape[1], net.config.buffer + net.config.tokens
    count_pass(run, Work(len(vectors) * keys, keys, rows * total, total, wanted.numel()))
    return z


class FullTransformer:
    """Encoder and decoder from scratch at every step, both guidance branches in one batch."""

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Conditions:
        """z at positions ``wanted`` [B, M], given the tokens decided before ``step``."""
        return Conditions.of(_pass(run, run.tokens, run.plan.known(step), wanted, 1), run.guided)

    def verify(self, run: Run, step: int, count: int) -> Iterator[list[Conditions]]:
        """z of ``count`` AR steps, each given the tokens of all steps before it, in one pass.

        Equal to :meth:`__call__` step by step, up to the rounding of padded attention.
        """
        if count == 1:
            yield [self(run, step, run.plan.ahead(step))]
            return
        plan, batch = run.plan, len(run.tokens)
        starts, sizes = plan.starts[step : step + count], plan.sizes[step : step + count]
        # Batch entries: AR steps, images within. Shorter prefixes are padded.
        known = torch.cat([plan.reveal[:, : starts[-1]]] * count)
        lengths = copied(torch.tensor(starts), known.device).repeat_interleave(batch)[:, None]
        padding_mask = torch.arange(starts[-1], device=known.device) < lengths
        asked = [plan.ahead(s) for s in range(step, step + count)]
        most = max(sizes)
        wanted = torch.cat([torch.cat([a, a[:, :1].expand(-1, most - a.shape[1])], 1) for a in asked])
        z = _pass(run, torch.cat([run.tokens] * count), known, wanted, count, padding_mask)
        parts = Conditions.of(z, run.guided).split(batch)
        yield [part.columns(n) for part, n in zip(parts, sizes, strict=True)]

    def denoiser(self, run: Run, table: Tables) -> Denoiser:
        """The uncached denoiser."""
        return Denoiser(run, table)

    def forget(self) -> None:
        """Nothing is cached."""
