"""Evaluate the network of a MAR-like model, transformer and diffusion head: here in full at every step. ``lazy`` keeps
features.

Shapes: B images, C transformer width, N tokens, and P branches of guidance: 2, the condition's and the null one, or 1
without guidance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...networks.mar import BUDGET, MAR
from ...reports.record import Report
from ..chain import ChainHead, DiffusionBatch, Head, MeanAdjustment, StepTable, run_chain
from ..device import to_device
from .canvas import MARCanvas


class Heads:
    """How the diffusion head is evaluated: here in full; with LazyMAR's cache in ``lazy/head.py``."""

    def whole(self, steps: int) -> bool:
        """Whether the head is evaluated in full at every one of ``steps`` diffusion steps."""
        return True

    def head(self, net: MAR, rows: DiffusionBatch, report: Report) -> ChainHead:
        """The head for rows, see :func:`..chain.run_chain`."""
        return full_head(net, rows, report)

    def sample(self, net: MAR, rows: DiffusionBatch, report: Report) -> Tensor:
        """Sample the tokens of rows, fp32 [N, channels]. Without rows or steps the head is not called."""
        x = rows.x
        if len(rows.x) and len(rows.table):
            for advanced in run_chain(net, rows, self.head(net, rows, report)):
                x = advanced.x
        return x

    def sample_both(
        self, net: MAR, full: DiffusionBatch, guided: DiffusionBatch, report: Report
    ) -> tuple[Tensor, Tensor]:
        """Sample the tokens of two batches of rows, fp32 [N, channels] each, in one loop.

        The batch with more steps starts alone, and the other one joins it for the last steps. So there are only as many
        sequential head calls as the longer one has steps. With 5 steps of ``full`` and 3 of ``guided``::

            head call       0  1  2  3  4
            step of full    0  1  2  3  4
            step of guided        0  1  2

        A cache of the head serves one diffusion only: with a cache they run one after the other.
        """
        together = min(len(full.table), len(guided.table)) if len(full.x) and len(guided.x) else 0
        if not together or not (self.whole(len(full.table)) and self.whole(len(guided.table))):
            return self.sample(net, full, report), self.sample(net, guided, report)

        # 1. The first steps of the longer one, alone.
        alone = []
        for rows in (full, guided):
            first = len(rows.table) - together
            x = self.sample(net, rows.part(0, first), report)
            alone.append(replace(rows.part(first, len(rows.table)), x=x))

        # 2. The steps of both.
        x = self.sample(net, joined(*alone), report)
        return x[: len(full.x)], x[len(full.x) :]


def joined(full: DiffusionBatch, guided: DiffusionBatch) -> DiffusionBatch:
    """The rows of both in one batch. They have equally many steps, and each row keeps its own numbers.

    The means of ``full`` stay as they are: gamma = 0.
    """
    parts = (full, guided)
    columns = [rows.table.numbers[:, :, None, None].expand(-1, -1, len(rows.x), -1) for rows in parts]
    times = [rows.table.times[:, None].expand(-1, len(rows.x), -1) for rows in parts]

    change = None
    if guided.change is not None:
        draft, _ = guided.change.of_steps[0]
        drafts = torch.cat([torch.zeros_like(full.x), draft])
        gamma = torch.zeros(len(full.table), len(drafts), 1, device=drafts.device)
        for k, (_, weight) in enumerate(guided.change.of_steps):
            gamma[k, len(full.x) :] = weight
        change = MeanAdjustment([(drafts, weight) for weight in gamma])

    return DiffusionBatch(
        z=torch.cat([rows.z for rows in parts], 1),
        cfg=torch.cat([rows.cfg for rows in parts]),
        x=torch.cat([rows.x for rows in parts]),
        noise=torch.cat([rows.noise for rows in parts], 1),
        table=StepTable(torch.cat(columns, 2), torch.cat(times, 1), full.table.learned),
        temperature=full.temperature,
        change=change,
    )


def full_head(net: MAR, rows: DiffusionBatch, report: Report) -> Head:
    """The head in full for rows."""
    return Head(net, net.head, rows, report, BUDGET)


class Transformer:
    """The look of a MAR: ``z = transformer(step, wanted)`` are the conditions of the diffusion head, [P, B, M, C], at
    positions ``wanted`` int64 [B, M], given the tokens decided before AR step ``step``.
    """

    heads = Heads()  # how the diffusion head is evaluated beside it

    def __init__(self, canvas: MARCanvas):
        self.canvas = canvas

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """See above."""
        raise NotImplementedError

    def forget(self) -> None:
        """Discard features of tokens that were resampled since they were computed."""

    def each_step(self, step: int, count: int) -> Iterator[list[Tensor]]:
        """z of ``count`` AR steps from ``step`` on, each given the tokens of all steps before it, drafts included.
        Yields a list for every pass: z of each AR step that the pass evaluated.

        Here every pass evaluates one AR step, because only features of final tokens may be cached. The caller stops at
        the first rejected draft.
        """
        for s in range(step, step + count):
            yield [self(s, self.canvas.order.ahead(s))]


class FullTransformer(Transformer):
    """Encoder and decoder from scratch at every AR step, both branches of guidance in one batch."""

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)
        self.vectors = canvas.conditioning.vectors(canvas.guided)  # of the encoder's buffer rows, [E, C]

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        return self._pass(self.canvas.order.known(step), wanted, self.vectors)

    def each_step(self, step: int, count: int) -> Iterator[list[Tensor]]:
        """All ``count`` AR steps in one pass; equal to :meth:`__call__` step by step, up to the rounding of padded
        attention.
        """
        canvas = self.canvas
        order = canvas.order
        if count == 1:
            yield [self(step, order.ahead(step))]
            return

        # 1. The batch holds every AR step with all images. Steps know different numbers of tokens: the shorter rows are
        # padded.
        starts = order.starts[step : step + count]
        longest = starts[-1]
        known = order.reveal[:, :longest].repeat(count, 1)
        lengths = to_device(torch.tensor(starts), known.device).repeat_interleave(canvas.images)
        mask = torch.arange(longest, device=known.device) < lengths[:, None]  # False for padding

        # 2. The positions that each step decides, padded with the first of them.
        sizes = order.sizes[step : step + count]
        wanted = []
        for s in range(step, step + count):
            here = order.ahead(s)
            padding = here[:, :1].expand(-1, max(sizes) - here.shape[1])
            wanted.append(torch.cat([here, padding], 1))

        # 3. One pass, whose batch rows are in the order AR step, image.
        vectors = canvas.conditioning.vectors(canvas.guided, count)
        z = self._pass(known, torch.cat(wanted), vectors, mask)

        # 4. The conditions of each step, without the padding.
        yield [part[:, :, :n] for part, n in zip(z.split(canvas.images, 1), sizes, strict=True)]

    def _pass(self, known: Tensor, wanted: Tensor, vectors: Tensor, mask: Tensor | None = None) -> Tensor:
        """z [P, R, M, C] of R batch rows, each of which is an image at one AR step.

        Args:
            known: int64 [R, K], the positions that are read.
            wanted: int64 [R, M], the positions whose z is returned.
            vectors: [R or 2 R, C], which the encoder's buffer rows hold.
            mask: bool [R, K], False for padding in ``known``; None if there is none.
        """
        canvas = self.canvas
        net = canvas.model.net
        conditioning = canvas.conditioning
        branches = 1 + canvas.guided

        # 1. The encoder, of both branches where they differ in it: 2 copies of the rows, else 1.
        copies = len(vectors) // len(known)
        encoder_known = known.repeat(copies, 1)
        encoder_mask = None if mask is None else mask.repeat(copies, 1)
        tokens = canvas.values.repeat(len(vectors) // len(canvas.values), 1, 1)
        encoded = net.encode(tokens, encoder_known, vectors, encoder_mask)

        # 2. The decoder, of both branches.
        fused = conditioning.fuse(encoded, encoder_known, canvas.guided, encoder_mask)
        decoder_mask = None if mask is None else mask.repeat(branches, 1)
        z = net.decode(fused, known.repeat(branches, 1), wanted.repeat(branches, 1), decoder_mask)

        encoder_rows = encoded.shape[0] * encoded.shape[1]
        decoder_rows = len(z) * (net.config.buffer + net.config.tokens)
        canvas.report.add(**conditioning.counts(encoder_rows, decoder_rows))
        return z.unflatten(0, (branches, -1))
