"""MAR: at every AR step, the transformer computes a condition z for each token that the step decides, and a diffusion
head samples the tokens from their conditions.

Source: Li et al. 2024, "Autoregressive Image Generation without Vector Quantization" (arXiv 2406.11838), section 3.

Two options save work. DiSA takes fewer diffusion steps for later tokens; the result approximates the unaccelerated
image (Zhao et al. 2025, arXiv 2505.20297, section 3.2, and its code). Speculation drafts several diffusion steps and
verifies them in one call of the head. It keeps the distribution of the images (``speculation.py``).

``engine.py`` calls the function that computes z the *look*, and the function that samples tokens from z the *draw*.
Here the look is a :class:`Transformer`, and the draw is a :class:`Diffusion`. A :class:`HeadEvaluation` evaluates the
head for the draw: in full, or with a cache. The other MAR samplers use or replace these three classes.

Shapes: B images of L tokens, c channels of a token, C transformer width, and P branches of guidance. P is 2 with
guidance: first the conditional branch, which reads the class or prompt, then the null branch, which does not. P is 1
without guidance. *Buffer rows* stand in front of an image's tokens in the encoder and the decoder; in class models,
they hold the class.
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
from ..chain import ChainedHead, ChainHead, DiffusionBatch, HeadAtStates, StepTable, joined, run_chain
from ..conditioning import ClassOrPrompt
from ..editing import Edit
from ..engine import Sampler, run_passes
from ..noise import CounterRNG, PairedNoise, row_keys
from ..speculation import Speculation
from .canvas import MARCanvas, Tokens, mar_canvas
from .settings import DiSASettings, MARBase


def check(model: MARModel, settings: MARBase) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: more AR steps than tokens; for GtR also a stage with more AR steps than tokens, or without AR steps.
    """
    settings.masked_after_steps(model.net.config.grid**2)


# ------------------------------------------------------------------------------------------------ the look


class Transformer:
    """The look of a MAR: computes the conditions z from the decided tokens."""

    # The evaluation of the diffusion head. It belongs to the transformer, because LazyMAR has caches for both, and the
    # argument ``make_transformer`` of a sampler chooses both at once.
    head: HeadEvaluation
    # Whether the images of one pass may be at different AR steps.
    allows_different_steps = False

    def __init__(self, canvas: MARCanvas):
        self.canvas = canvas
        self.head = HeadEvaluation(canvas.model.net, canvas.report)

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """z [P, B, M, C] at the positions ``wanted``, int64 [B, M]. The transformer reads the tokens that were decided
        before AR step ``step``.
        """
        raise NotImplementedError

    def discard_features(self) -> None:
        """Discard all cached features; here there are none. Call this after decided tokens have been resampled."""

    def for_rows(self, images: Sequence[int], steps: Sequence[int], wanted: Tensor) -> Tensor:
        """z [P, R, M, C] of R batch rows at the positions ``wanted``, int64 [R, M].

        Row i is image ``images[i]`` at AR step ``steps[i]``: the transformer reads the tokens of this image that were
        decided before this AR step. If :attr:`allows_different_steps` is False, the rows must be all images, at the
        same AR step.
        """
        assert len(images) == self.canvas.images and len(set(steps)) == 1
        return self(steps[0], wanted)

    def each_step(self, step: int, count: int) -> Iterator[list[Tensor]]:
        """Evaluate ``count`` AR steps from ``step`` on, each with the tokens and drafts of all AR steps before it.

        Yields a list for every pass: z [P, B, n, C] of each AR step that the pass evaluated, at the n positions of that
        AR step. Here every pass evaluates one AR step. The caller verifies the drafts of that AR step before it asks
        for the next pass, and stops at the first rejected draft. So a cache holds only features of final tokens.
        """
        for s in range(step, step + count):
            yield [self(s, self.canvas.order.positions_from(s))]


class FullTransformer(Transformer):
    """Computes encoder and decoder in full in every pass. One batch holds both branches of guidance."""

    allows_different_steps = True

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)
        self.buffer_vectors = canvas.conditioning.vectors(canvas.guided)  # in the encoder's buffer rows, [B or 2 B, C]

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        canvas = self.canvas
        known = canvas.order.decided_before(step)
        return self._pass(canvas.conditioning, self.buffer_vectors, canvas.values, wanted, known)

    def for_rows(self, images: Sequence[int], steps: Sequence[int], wanted: Tensor) -> Tensor:
        """One pass for any rows. Each row's z equals the z of :meth:`__call__`, up to rounding in padded attention."""
        canvas = self.canvas
        order = canvas.order
        if len(set(steps)) == 1 and len(images) == len(canvas.values):
            return self(steps[0], wanted)

        rows = to_device(torch.tensor(images), canvas.device)
        known, mask = order.decided_before_each(rows, steps)
        conditioning = canvas.conditioning.of(images)
        buffer_vectors = conditioning.vectors(canvas.guided)
        return self._pass(conditioning, buffer_vectors, canvas.values[rows], wanted, known, mask)

    def each_step(self, step: int, count: int) -> Iterator[list[Tensor]]:
        """See :meth:`Transformer.each_step`; here one pass evaluates all ``count`` AR steps."""
        images = self.canvas.images
        order = self.canvas.order

        # 1. The batch rows: all images at the first AR step, then all images at the second, and so on.
        steps = range(step, step + count)
        row_images = [*range(images)] * count
        row_steps = [s for s in steps for _ in range(images)]

        # 2. The positions that each AR step decides. Their first position serves as padding.
        sizes = order.sizes[step : step + count]
        wanted = []
        for s in steps:
            positions = order.positions_from(s)
            padding = positions[:, :1].expand(-1, max(sizes) - positions.shape[1])
            wanted.append(torch.cat([positions, padding], 1))

        # 3. One pass; then z of each AR step, without the padding.
        z = self.for_rows(row_images, row_steps, torch.cat(wanted))
        yield [part[:, :, :n] for part, n in zip(z.split(images, 1), sizes, strict=True)]

    def _pass(
        self,
        conditioning: Conditioning,
        buffer_vectors: Tensor,
        tokens: Tensor,
        wanted: Tensor,
        known: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """z [P, R, M, C] of R batch rows, each of which is an image at one AR step.

        Args:
            conditioning: the classes or prompts of the batch rows.
            buffer_vectors: [R or 2 R, C], the vectors in the encoder's buffer rows.
            tokens: [R, L, c].
            wanted: int64 [R, M], the positions whose z is returned.
            known: int64 [R, K], the positions whose tokens the encoder reads, ascending.
            mask: bool [R, K], False on the padding of ``known``; None if ``known`` has no padding.
        """
        canvas = self.canvas
        net = canvas.model.net
        branches = 1 + canvas.guided
        known_of_branches = known.repeat(branches, 1)
        mask = None if mask is None else mask.repeat(branches, 1)

        # 1. The encoder. If it reads the class, each branch has its own copy of the batch rows. Else there is one copy.
        encoder_entries = len(buffer_vectors)
        encoder_branches = encoder_entries // len(tokens)
        encoder_mask = None if mask is None else mask[:encoder_entries]
        known_of_encoder = known_of_branches[:encoder_entries]
        encoded = net.encode(tokens.repeat(encoder_branches, 1, 1), known_of_encoder, buffer_vectors, encoder_mask)

        # 2. The decoder, for both branches.
        fused = conditioning.fuse(encoded, known_of_encoder, canvas.guided, encoder_mask)
        z = net.decode(fused, known_of_branches, wanted.repeat(branches, 1), mask)

        encoder_rows = encoded.shape[0] * encoded.shape[1]
        decoder_rows = len(z) * (net.config.buffer + net.config.tokens)
        canvas.report.add(**conditioning.counts(encoder_rows, decoder_rows))
        return z.unflatten(0, (branches, -1))


# ------------------------------------------------------------------------------------------------ the draw


class HeadEvaluation:
    """Evaluates the diffusion head of a network, in full at every diffusion step. The derived class in ``lazy/head.py``
    has LazyMAR's cache. The report counts the calls of the head.
    """

    def __init__(self, net: MAR, report: Report):
        self.net = net
        self.denoiser = net.head
        self.report = report

    def is_full(self, steps: int) -> bool:
        """Whether a diffusion of ``steps`` steps evaluates the head in full at every step."""
        return True

    def for_chain(self, batch: DiffusionBatch) -> ChainHead:
        """The head for a batch whose tokens take every diffusion step together, see :func:`..chain.run_chain`."""
        return ChainedHead(self.net, self.denoiser, batch, self.report, BUDGET)

    def for_speculation(self, batch: DiffusionBatch) -> HeadAtStates:
        """The head for a batch with speculation, always evaluated in full."""
        return HeadAtStates(self.net, self.denoiser, batch, self.report, BUDGET)

    def sample(self, batch: DiffusionBatch) -> Tensor:
        """Sample the N tokens of a batch: fp32 [N, c]. A batch without tokens or steps needs no call of the head."""
        x = batch.x
        if len(batch.x) and len(batch.table.times):
            for result in run_chain(batch, self.for_chain(batch)):
                x = result.x
        return x

    def sample_both(self, first: DiffusionBatch, second: DiffusionBatch) -> tuple[Tensor, Tensor]:
        """Sample the tokens of two batches, fp32 [N, c] for each batch, in one loop.

        The batch with more steps starts alone, and the other batch joins it for the last steps. So the number of head
        calls is the number of steps of the longer diffusion. For example, if ``first`` has 5 steps and ``second`` 3::

            head call        0  1  2  3  4
            step of first    0  1  2  3  4
            step of second         0  1  2

        A cache of the head serves only one diffusion. With a cache, the two diffusions run one after the other.
        """
        # The number of steps that both batches take together.
        together = min(len(first.table), len(second.table)) if len(first.x) and len(second.x) else 0
        if not together or not (self.is_full(len(first.table)) and self.is_full(len(second.table))):
            return self.sample(first), self.sample(second)

        # 1. The first steps of the longer diffusion, alone. For the shorter diffusion, ``alone`` is 0.
        remaining = []
        for batch in (first, second):
            alone = len(batch.table) - together
            x = self.sample(batch.some_steps(0, alone))
            remaining.append(replace(batch.some_steps(alone, len(batch.table)), x=x))

        # 2. The remaining steps, of both diffusions together.
        x = self.sample(joined(*remaining))
        return x[: len(first.x)], x[len(first.x) :]


class Diffusion:
    """The draw of MAR: samples the tokens of an AR step by diffusion.

    Args:
        canvas: the images.
        head: evaluates the diffusion head.
        tables: the diffusion steps of every AR step; with DiSA, later AR steps have fewer.
        counted: whether the report counts the diffusion steps that speculation drafts.
    """

    def __init__(self, canvas: MARCanvas, head: HeadEvaluation, tables: Sequence[StepTable], counted: bool = True):
        expect_full_head(canvas.settings, head.is_full(canvas.settings.diffusion_steps))
        self.canvas = canvas
        self.head = head
        self.tables = tables
        self.report = canvas.report if counted else None
        self.speculation_window = canvas.settings.speculation_window
        self.noise = canvas.noise_of("full")
        if self.speculation_window > 1:
            self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    def __call__(self, step: int, positions: Tensor, z: Tensor) -> Tensor:
        """Sample the tokens at ``positions``, int64 [B, n], from conditions z [P, B, n, C]: fp32 [B, n, c]."""
        tokens = Tokens.all(positions)
        batch = self.canvas.batch(self.tables[step], tokens, z, self.noise)
        if self.speculation_window > 1:
            rng = CounterRNG(self.keys[tokens.index])
            speculation = Speculation(self.head.net, self.head.for_speculation(batch), batch, rng, self.report)
            values = speculation.finish(np.arange(len(tokens)), self.speculation_window)
        else:
            values = self.head.sample(batch)
        return values.view(*positions.shape, -1)


def expect_full_head(settings: MARBase, is_full: bool) -> None:
    """Raise a UserError if speculation is combined with a cache of the head.

    The cache needs one diffusion step after another, but speculation evaluates the head at many diffusion steps at
    once. ``is_full``: whether the head is evaluated in full at every diffusion step.
    """
    if settings.speculation_window > 1 and not is_full:
        raise UserError(
            "speculation: you cannot combine speculation with head_cache; switch head_cache off, or set speculation to "
            "0."
        )


def annealed_tables(canvas: MARCanvas, equal_at_end: int = 1) -> list[StepTable]:
    """The diffusion steps of each AR step. Their number falls from the first AR step on, see :func:`annealed_steps`.

    The last ``equal_at_end`` AR steps all have the smallest number. But if the run has no other AR steps, all have the
    largest number.
    """
    first = canvas.settings.diffusion_steps
    last = canvas.settings.diffusion_steps_end
    counts = annealed_steps(first, last, canvas.order.steps - equal_at_end + 1)
    counts += counts[-1:] * (equal_at_end - 1)
    table_for = {count: canvas.step_table(count) for count in set(counts)}
    return [table_for[count] for count in counts]


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
    """Generate images with MAR.

    Args:
        model: the network and the metadata of its file.
        condition: the classes or prompts of B images, whichever the model reads.
        settings: :class:`MARSettings`, or LazyMAR's settings, which have the same fields and more.
        noise: the noise of B images.
        make_transformer: makes the transformer and its head, which compute everything or use LazyMAR's caches.
        edit: an image, and the part of it to regenerate; None to generate whole images.

    Yields:
        :class:`Step` after every AR step; returns :class:`Sampled`.

    Raises:
        UserError: labels that the model does not have, more AR steps than tokens, speculation together with a cache of
            the head, or an edit that does not fit the model.
    """
    canvas = mar_canvas("mar", model, condition, settings, noise, edit)
    transformer = make_transformer(canvas)
    draw = Diffusion(canvas, transformer.head, annealed_tables(canvas))
    yield from run_passes(canvas, canvas.order.plan, transformer, draw)
    return canvas.finish()
