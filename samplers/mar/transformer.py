"""How the transformer of a MAR-like model is evaluated: here in full at every AR step. ``lazymar.py`` keeps features.

Shapes: B images, C transformer width, and P branches of guidance: 2, the condition's and the null one, or 1 without
guidance.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..device import to_device
from .canvas import MARCanvas
from .heads import Heads


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
        """Discard features of tokens that were decided again since."""

    def each_step(self, step: int, count: int) -> Iterator[list[Tensor]]:
        """z of ``count`` AR steps from ``step`` on, each given the tokens of all steps before it, drafts included.
        Yields a list for every pass: z of the AR steps that it evaluated.

        Here step by step, as features of final tokens only may be cached; the caller stops at the first rejected draft.
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
            vectors: [R or 2 R, C], those of the encoder's buffer rows.
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
        tokens = canvas.values.repeat(len(vectors) // canvas.images, 1, 1)
        encoded = net.encode(tokens, encoder_known, vectors, encoder_mask)

        # 2. The decoder, of both branches.
        fused = conditioning.fuse(encoded, encoder_known, canvas.guided, encoder_mask)
        decoder_mask = None if mask is None else mask.repeat(branches, 1)
        z = net.decode(fused, known.repeat(branches, 1), wanted.repeat(branches, 1), decoder_mask)

        encoder_rows = encoded.shape[0] * encoded.shape[1]
        decoder_rows = len(z) * (net.config.buffer + net.config.tokens)
        canvas.report.add(**conditioning.counts(encoder_rows, decoder_rows))
        return z.unflatten(0, (branches, -1))
