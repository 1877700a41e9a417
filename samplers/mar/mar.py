"""MAR: at every AR step the transformer gives a condition for every token of the step, and a diffusion head samples the
tokens from these conditions.

Source: Li et al. 2024, "Autoregressive Image Generation without Vector Quantization" (arXiv 2406.11838), section 3.

Two options save work. DiSA takes fewer diffusion steps for later tokens, which approximates the image (Zhao et al.
2025, arXiv 2505.20297, section 3.2, and its code). Speculation verifies several diffusion steps in one call of the
head, which keeps the distribution of the images (``speculation.py``).

The look is a :class:`Transformer` and the draw a :class:`Diffusion`. A :class:`HeadEvaluation` says how the draw
evaluates the head: in full, or with a cache. The other MAR samplers use or replace these three.

Shapes: B images, C transformer width, N tokens, and P branches of guidance: 2 (the condition's and the null one), or 1
without guidance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...networks.mar import BUDGET, MAR, Conditioning, MARModel
from ...networks.torch_state import in_own_state, to_device
from ...reports.record import Report
from ..annealing import annealed_steps
from ..chain import ChainHead, DiffusionBatch, Head, HeadAtStates, StepTable, joined, run_chain
from ..conditioning import ClassOrPrompt
from ..editing import Edit
from ..engine import Sampler, decode
from ..noise import CounterRNG, PairedNoise, row_keys
from ..speculation import Speculation
from .canvas import MARCanvas, Tokens, mar_canvas
from .settings import DiSASettings, MARBase


def check(model: MARModel, settings: MARBase) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: more AR steps than tokens, or, for GtR, more AR steps than tokens in one of its stages.
    """
    settings.left(model.net.config.grid**2)


# ------------------------------------------------------------------------------------------------ the look


class Transformer:
    """The look of a MAR. ``transformer(step, wanted)`` returns z [P, B, M, C], the conditions of the diffusion head, at
    the positions ``wanted``, int64 [B, M], given the tokens decided before AR step ``step``.
    """

    # How the draw evaluates the diffusion head. ``make_transformer`` of a sampler chooses it together with the
    # transformer, because LazyMAR has caches for both.
    head: HeadEvaluation
    # Whether the images of a pass may be at different AR steps.
    own_pace = False

    def __init__(self, canvas: MARCanvas):
        self.canvas = canvas
        self.head = HeadEvaluation(canvas.model.net, canvas.report)

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """See above."""
        raise NotImplementedError

    def forget(self) -> None:
        """Discard cached features that were computed from tokens which have been resampled since."""

    def for_rows(self, images: Sequence[int], steps: Sequence[int], wanted: Tensor) -> Tensor:
        """z [P, R, M, C] of R rows at the positions ``wanted``, int64 [R, M]. A row is an image at an AR step, given
        the tokens decided before this AR step.

        Without :attr:`own_pace`, the rows must be all images, at the same AR step.
        """
        assert len(images) == self.canvas.images and len(set(steps)) == 1
        return self(steps[0], wanted)

    def each_step(self, step: int, count: int) -> Iterator[list[Tensor]]:
        """Evaluate ``count`` AR steps from ``step`` on, each given the tokens of all AR steps before it, including
        drafts. Yields a list for every pass: z of each AR step that the pass evaluated.

        With this method every pass evaluates one AR step, because only features of final tokens may be cached. The
        caller stops at the first rejected draft.
        """
        for s in range(step, step + count):
            yield [self(s, self.canvas.order.ahead(s))]


class FullTransformer(Transformer):
    """Computes encoder and decoder in full at every AR step, with both branches of guidance in one batch."""

    own_pace = True

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)
        self.vectors = canvas.conditioning.vectors(canvas.guided)  # for the encoder's buffer rows, [B or 2 B, C]

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        canvas = self.canvas
        known = canvas.order.decided_before(step)
        return self._pass(canvas.conditioning, self.vectors, canvas.values, wanted, known)

    def for_rows(self, images: Sequence[int], steps: Sequence[int], wanted: Tensor) -> Tensor:
        """One pass for any rows; equal to :meth:`__call__` row by row, up to the rounding of padded attention."""
        canvas = self.canvas
        order = canvas.order
        if len(set(steps)) == 1 and len(images) == len(canvas.values):
            return self(steps[0], wanted)

        rows = to_device(torch.tensor(images), canvas.device)
        known, mask = order.decided_before_each(rows, steps)
        conditioning = canvas.conditioning.of(images)
        vectors = conditioning.vectors(canvas.guided)
        return self._pass(conditioning, vectors, canvas.values[rows], wanted, known, mask)

    def each_step(self, step: int, count: int) -> Iterator[list[Tensor]]:
        """All ``count`` AR steps in one pass."""
        images = self.canvas.images
        order = self.canvas.order

        # 1. The rows, in the order AR step, image.
        steps = range(step, step + count)
        row_images = [*range(images)] * count
        row_steps = [s for s in steps for _ in range(images)]

        # 2. The positions that each step decides, padded with the first of them.
        sizes = order.sizes[step : step + count]
        wanted = []
        for s in steps:
            here = order.ahead(s)
            padding = here[:, :1].expand(-1, max(sizes) - here.shape[1])
            wanted.append(torch.cat([here, padding], 1))

        # 3. One pass, and the conditions of each step without the padding.
        z = self.for_rows(row_images, row_steps, torch.cat(wanted))
        yield [part[:, :, :n] for part, n in zip(z.split(images, 1), sizes, strict=True)]

    def _pass(
        self,
        conditioning: Conditioning,
        vectors: Tensor,
        tokens: Tensor,
        wanted: Tensor,
        known: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """z [P, R, M, C] of R batch rows, each of which is an image at one AR step.

        Args:
            conditioning: the condition of the rows.
            vectors: [R or 2 R, C], which the encoder's buffer rows hold.
            tokens: [R, L, channels].
            wanted: int64 [R, M], the positions whose z is returned.
            known: int64 [R, K], the positions whose tokens are read, ascending.
            mask: bool [R, K], False on the padding of ``known``; None if there is none.
        """
        canvas = self.canvas
        net = canvas.model.net
        branches = 1 + canvas.guided
        at = known.repeat(branches, 1)
        mask = None if mask is None else mask.repeat(branches, 1)

        # 1. The encoder. If it reads the condition, each branch has its own copy of the rows, else both share one.
        entries = len(vectors)
        copies = entries // len(tokens)
        encoder_mask = None if mask is None else mask[:entries]
        encoded = net.encode(tokens.repeat(copies, 1, 1), at[:entries], vectors, encoder_mask)

        # 2. The decoder, for both branches.
        fused = conditioning.fuse(encoded, at[:entries], canvas.guided, encoder_mask)
        z = net.decode(fused, at, wanted.repeat(branches, 1), mask)

        encoder_rows = encoded.shape[0] * encoded.shape[1]
        decoder_rows = len(z) * (net.config.buffer + net.config.tokens)
        canvas.report.add(**conditioning.counts(encoder_rows, decoder_rows))
        return z.unflatten(0, (branches, -1))


# ------------------------------------------------------------------------------------------------ the draw


class HeadEvaluation:
    """How the diffusion head of a network is evaluated: here in full at every diffusion step, in ``lazy/head.py`` with
    LazyMAR's cache. The report counts the work of the head.
    """

    def __init__(self, net: MAR, report: Report):
        self.net = net
        self.denoiser = net.head
        self.report = report

    def is_full(self, steps: int) -> bool:
        """Whether the head is evaluated in full at every one of ``steps`` diffusion steps."""
        return True

    def for_chain(self, batch: DiffusionBatch) -> ChainHead:
        """The head for a batch whose rows take every step together, see :func:`..chain.run_chain`."""
        return Head(self.net, self.denoiser, batch, self.report, BUDGET)

    def for_speculation(self, batch: DiffusionBatch) -> HeadAtStates:
        """The head for speculation on a batch; it is always evaluated in full."""
        return HeadAtStates(self.net, self.denoiser, batch, self.report, BUDGET)

    def sample(self, batch: DiffusionBatch) -> Tensor:
        """Sample the tokens of a batch, fp32 [N, channels]. Without rows or steps the head is not called."""
        x = batch.x
        if len(batch.x) and len(batch.table.times):
            for result in run_chain(batch, self.for_chain(batch)):
                x = result.x
        return x

    def sample_both(self, one: DiffusionBatch, other: DiffusionBatch) -> tuple[Tensor, Tensor]:
        """Sample the tokens of two batches, fp32 [N, channels] each, in one loop.

        The batch with more steps starts alone, and the other one joins it for the last steps. So the number of
        sequential head calls is the number of steps of the longer diffusion. With 5 steps of one and 3 of the other::

            head call       0  1  2  3  4
            step of one     0  1  2  3  4
            step of other         0  1  2

        A cache of the head serves one diffusion only, so with a cache the two diffusions run one after the other.
        """
        # How many steps both batches take together.
        together = min(len(one.table), len(other.table)) if len(one.x) and len(other.x) else 0
        if not together or not (self.is_full(len(one.table)) and self.is_full(len(other.table))):
            return self.sample(one), self.sample(other)

        # 1. The first steps of the longer diffusion, alone. The shorter one has none of these.
        remaining = []
        for batch in (one, other):
            alone = len(batch.table) - together
            x = self.sample(batch.some_steps(0, alone))
            remaining.append(replace(batch.some_steps(alone, len(batch.table)), x=x))

        # 2. The remaining steps, of both diffusions together.
        x = self.sample(joined(*remaining))
        return x[: len(one.x)], x[len(one.x) :]


class Diffusion:
    """The draw of MAR: samples every token of an AR step by diffusion, in T steps, or in fewer for later tokens (DiSA).

    Args:
        canvas: the images.
        head: how the diffusion head is evaluated.
        tables: diffusion steps of every AR step.
        counted: whether the report counts the diffusion steps that speculation drafts.
    """

    def __init__(self, canvas: MARCanvas, head: HeadEvaluation, tables: Sequence[StepTable], counted: bool = True):
        expect_full_head(canvas.settings, head.is_full(canvas.settings.diffusion_steps))
        self.canvas = canvas
        self.head = head
        self.tables = tables
        self.report = canvas.report if counted else None
        self.window = canvas.settings.window
        self.noise = canvas.noise_of("full")
        if self.window > 1:
            self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    def __call__(self, step: int, here: Tensor, z: Tensor) -> Tensor:
        """Sample the tokens at positions ``here``, int64 [B, n], from conditions z [P, B, n, C]: fp32 [B, n, c]."""
        tokens = Tokens.all(here)
        batch = self.canvas.batch(self.tables[step], tokens, z, self.noise)
        if self.window > 1:
            rng = CounterRNG(self.keys[tokens.index])
            speculation = Speculation(self.head.net, self.head.for_speculation(batch), batch, rng, self.report)
            values = speculation.finish(np.arange(len(tokens)), self.window)
        else:
            values = self.head.sample(batch)
        return values.view(*here.shape, -1)


def expect_full_head(settings: MARBase, is_full: bool) -> None:
    """Check that speculation is not combined with a cached head: it evaluates the head at many diffusion steps at once.

    ``is_full``: whether the head is evaluated in full at every diffusion step.
    """
    if settings.window > 1 and not is_full:
        raise UserError(
            "speculation: you cannot combine speculation with head_cache; switch head_cache off, or set speculation to "
            "0."
        )


def annealed_tables(canvas: MARCanvas, level: int = 1) -> list[StepTable]:
    """The diffusion steps of each AR step. Their number falls until the last ``level`` AR steps, which all have the
    smallest number; if there are no AR steps before these, all have the largest number.
    """
    first = canvas.settings.diffusion_steps
    last = canvas.settings.diffusion_steps_end
    counts = annealed_steps(first, last, canvas.order.steps - level + 1)
    counts += counts[-1:] * (level - 1)
    of_count = {count: canvas.step_table(count) for count in set(counts)}
    return [of_count[count] for count in counts]


# ------------------------------------------------------------------------------------------------ the sampler


@in_own_state
@torch.no_grad()
def mar(
    model: MARModel,
    condition: ClassOrPrompt,
    settings: DiSASettings,
    noise: PairedNoise,
    make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
    edit: Edit | None = None,
) -> Sampler:
    """Plain MAR.

    Args:
        model: network and the metadata of its file.
        condition: what B images show, of the kind that the model reads.
        settings: :class:`MARSettings`, or LazyMAR's, which have the same fields and more.
        noise: noise of B images.
        make_transformer: how the transformer is evaluated: in full, or with LazyMAR's caches.
        edit: part of an image to sample again; None for a whole new one.

    Yields:
        :class:`Step` after every AR step; returns :class:`Sampled`.

    Raises:
        UserError: labels outside the model's, more AR steps than tokens, speculation together with a cached head, an
            edit that does not fit the model.
    """
    canvas = mar_canvas("mar", model, condition, settings, noise, edit)
    transformer = make_transformer(canvas)
    draw = Diffusion(canvas, transformer.head, annealed_tables(canvas))
    yield from decode(canvas, canvas.order.plan, transformer, draw)
    return canvas.finish()
