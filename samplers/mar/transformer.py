"""The transformer in full: encoder and decoder from scratch at every AR step."""

from __future__ import annotations

import torch
from torch import Tensor

from .denoiser import Denoiser
from .diffusion import Tables
from .loop import Conditions, Run


class FullTransformer:
    """Encoder and decoder from scratch at every step, both guidance branches in one batch."""

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Conditions:
        net, batch = run.model.net, len(run.tokens)
        known, tokens, rows = run.plan.known(step), run.tokens, net.class_rows(run.labels, batch)
        if run.guided:
            known, tokens, wanted = (torch.cat([x, x]) for x in (known, tokens, wanted))
            rows = torch.cat([rows, net.class_rows(None, batch)])
        z = net.decode(net.encode(tokens, known, rows), known, wanted)
        c = net.config
        run.report.add(transformer_passes=1, transformer_tokens=len(rows) * (2 * c.buffer + known.shape[1] + c.tokens))
        return Conditions(*z.chunk(2)) if run.guided else Conditions(z, None)

    def several(self, run: Run, step: int, count: int) -> list[Conditions]:
        """z of AR steps ``step .. step + count - 1``, each given the tokens of all steps before it, in one pass.

        The tokens of all but the last of them must be on the canvas already, as drafts. Step by step
        :meth:`__call__` gives the same.
        """
        net, plan, (batch, length) = run.model.net, run.plan, run.tokens.shape[:2]
        starts, sizes = plan.starts[step : step + count], plan.sizes[step : step + count]
        # Entries of the batch: the steps one after the other, images inside. Shorter prefixes are padded.
        known = torch.cat([plan.reveal[:, : starts[-1]]] * count)
        there = (
            torch.arange(starts[-1], device=known.device)
            < torch.tensor(starts, device=known.device).repeat_interleave(batch)[:, None]
        )
        asked = [plan.ahead(s) for s in range(step, step + count)]
        most = max(sizes)
        wanted = torch.cat([torch.cat([a, a[:, :1].expand(-1, most - a.shape[1])], 1) for a in asked])
        tokens, rows = torch.cat([run.tokens] * count), torch.cat([net.class_rows(run.labels, batch)] * count)
        if run.guided:
            known, there, wanted, tokens = (torch.cat([x, x]) for x in (known, there, wanted, tokens))
            rows = torch.cat([rows, net.class_rows(None, len(rows))])
        z = net.decode(net.encode(tokens, known, rows, there), known, wanted, there)
        run.report.add(
            transformer_passes=1, transformer_tokens=len(rows) * (2 * net.config.buffer + known.shape[1] + length)
        )
        cond, null = z.chunk(2) if run.guided else (z, None)
        parts = zip(cond.split(batch), sizes, [None] * count if null is None else null.split(batch), strict=True)
        return [Conditions(c[:, :n], None if u is None else u[:, :n]) for c, n, u in parts]

    def denoiser(self, run: Run, table: Tables) -> Denoiser:
        return Denoiser(run, table)

    def forget(self) -> None:
        pass
