"""BitDance: blocks of binary tokens one after another, each by diffusion.

Source: "BitDance" (arXiv 2602.14041) and its published code.

Shapes: B images, L tokens of C bits, K tokens of a block, S diffusion steps, width D. The transformer runs on R batch
rows: one for each image, and with guidance B more for the null condition. The diffusion samples N of these R rows: B
or, in blocks where the null branch samples its own tokens, all R (:meth:`BlockCanvas.samples_null`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...networks.bitdance import BlockModel
from ...networks.torch_state import in_own_state, to_device
from ..annealing import annealed_steps
from ..chain import DiffusionBatch, FixedTokens, Head, HeadAtStates, StepTable, run_chain, spread, step_table
from ..conditioning import ClassOrPrompt
from ..editing import Edit
from ..engine import Sampler
from ..noise import CounterRNG, PairedNoise, row_keys
from ..speculation import Speculation
from .canvas import BlockCanvas, Inputs, block_canvas
from .diffusion import BUDGET, evaluations
from .settings import BlockSettings


def check(model: BlockModel, settings: BlockSettings) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: a size that the model does not generate.
    """
    model.grid(settings.height, settings.width)


@in_own_state
@torch.no_grad()
def bitdance(
    model: BlockModel,
    condition: ClassOrPrompt,
    settings: BlockSettings,
    noise: PairedNoise,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images block by block.

    Args:
        model: network and the metadata of its files.
        condition: what B images show, of the kind that the model reads.
        settings: see :class:`BlockSettings`.
        noise: noise of B images.
        edit: part of an image to sample again; None for a whole new image. New tokens do not see later blocks.

    Yields:
        :class:`Step` after every evaluation of the diffusion head, or, with speculation, after every window of
        evaluations. Returns :class:`Sampled`.

    Raises:
        UserError: a condition that the model cannot read, a size that it does not generate, an edit that does not fit,
            a large model on a CPU, or predictions that are not finite.
    """
    canvas, inputs = block_canvas(model, condition, settings, noise, edit)
    plan = {block: canvas.order[canvas.span(block)] for block in canvas.sampled_blocks}
    look = BlockLook(canvas, inputs)
    draw = BlockDiffusion(canvas)

    canvas.total = sum(draw.calls_of[block] for block in plan)
    done = 0
    for block, cells in plan.items():
        # 1. The condition of the block, given the blocks before it.
        with canvas.clock.phase("transformer"):
            z = look(block)

        # 2. The diffusion of the block, in many evaluations of the head. The last evaluation decides the block.
        for count in canvas.clock.timed("head", draw.denoise(block, z)):
            if count < draw.calls_of[block]:
                yield from canvas.show(done + count)

        # 3. The signs of the last prediction are the tokens, which the next block reads.
        tokens = canvas.set_tokens(block, draw.signs())
        canvas.decide(cells, tokens, block)
        done += draw.calls_of[block]
        yield from canvas.show(done)
    return canvas.finish()


class BlockLook:
    """The transformer with its KV cache. A call returns the conditions of a block, fp32 [R, K, D], given all blocks
    before this block.
    """

    def __init__(self, canvas: BlockCanvas, inputs: Inputs):
        self.canvas = canvas
        self.inputs = inputs
        self.net = canvas.model.net
        self.places = self.net.places(canvas.grid)  # position rows [L, D]
        self.cache: Any = None  # the network's KV cache; None before the first pass
        self.hidden: Tensor | None = None  # hidden rows of the newest block that was fed, [R, K, D]
        self.fed = 0  # tokens in the cache

    def __call__(self, block: int) -> Tensor:
        report = self.canvas.report
        at = self.canvas.span(block)

        # 1. Prefill the condition, and the first block of rows.
        if self.hidden is None:
            prefix, lengths, first = self.inputs
            self.hidden, self.cache = self.net.begin(prefix, lengths, first, self.canvas.grid)
            report.add(transformer_passes=2, cache_bytes=self.cache.bytes)
            report.add(transformer_tokens=prefix.shape[0] * (prefix.shape[1] + first.shape[1]))

        # 2. Feed the blocks since the previous pass, both branches together.
        if at.start > self.fed:
            new = slice(self.fed, at.start)
            rows = self.net.embed(self.canvas.read[:, new], self.places[new])
            first_rows = self.canvas.block_size  # the rows in front of the first block
            hidden = self.net.advance(rows, first_rows + self.fed, self.cache)
            self.hidden = hidden[:, -self.canvas.block_size :]
            self.fed = at.start
            report.add(transformer_passes=1, transformer_tokens=rows.shape[0] * rows.shape[1])

        return self.hidden + self.places[at]


class BlockDiffusion:
    """Samples blocks by diffusion. The signs of the result are the tokens."""

    calls_of: dict[int, int]  # number of evaluations of the head for each block
    prediction: Tensor  # the head's last prediction for the newest block, fp32 [N, K, C]

    def __init__(self, canvas: BlockCanvas):
        settings = canvas.settings
        self.canvas = canvas
        self.dtype = canvas.model.net.denoiser.cond_embed.weight.dtype
        first = settings.diffusion_steps
        self.counts = annealed_steps(first, settings.diffusion_steps_end, canvas.blocks)
        self.calls_of = {block: count + 1 for block, count in enumerate(self.counts)}
        # Noise for the tokens in their order: the start, fp32 [B, L, C], and for the steps, fp32 [S, B, L, C].
        self.start, self.noise = noise_in_order(canvas)
        if settings.window > 1:
            self.keys = verification_keys(canvas)

        # For each number of steps S: the table, and the times t of the evaluations, fp32 [S + 1].
        self.tables: dict[int, tuple[StepTable, Tensor]] = {}
        for count in set(self.counts):
            made = evaluations(count, canvas.model.time_shift)
            times = to_device(torch.tensor(made.times), canvas.device)
            self.tables[count] = step_table(made.steps, canvas.model.net.denoiser.times(times)), times

    def signs(self) -> Tensor:
        """The tokens of the block that was denoised, -1 or 1, fp32 [N, K, C]."""
        self.canvas.watch(torch.linalg.vector_norm(self.prediction, torch.inf))
        return torch.where(self.prediction >= 0, 1.0, -1.0)

    def denoise(self, block: int, conditions: Tensor) -> Iterator[int]:
        """Denoise a block: set ``prediction``. Yields, after every evaluation of the head, how many there were."""
        canvas = self.canvas
        net = canvas.model.net
        batch = self._batch(block, conditions)
        if canvas.settings.window > 1:
            random = CounterRNG(self.keys[: len(batch.x), block])
            head = HeadAtStates(net, net.denoiser, batch, canvas.report, BUDGET)
            speculation = Speculation(net, head, batch, random, canvas.report)
            for _ in speculation.windows(np.arange(len(batch.x)), canvas.settings.window):
                yield int(speculation.done.min())
            self.prediction = speculation.data
        else:
            whole = Head(net, net.denoiser, batch, canvas.report, BUDGET)
            for count, result in enumerate(run_chain(batch, whole), 1):
                self.prediction = result.x  # after the last step, the state is the prediction
                yield count

    def _batch(self, block: int, conditions: Tensor) -> DiffusionBatch:
        """The N rows of a block before its diffusion."""
        canvas = self.canvas
        at = canvas.span(block)
        rows = canvas.sampled_rows(block)
        start = self.start[:, at]
        noise = self.noise[:, :, at]
        if canvas.samples_null(block):
            start, noise = with_null_noise(canvas, start, noise)

        steps, times = self.tables[self.counts[block]]
        free = canvas.free(block)
        return DiffusionBatch(
            z=conditions.unflatten(0, (-1, rows)).to(self.dtype),
            cfg=torch.full((rows, 1, 1), canvas.cfg(block), device=start.device),
            x=start,
            noise=spread(noise, self.counts[block]),
            table=steps,
            given=None if free is None else FixedTokens(times, start, canvas.read[:rows, at].clone(), free),
        )


def noise_in_order(canvas: BlockCanvas) -> tuple[Tensor, Tensor]:
    """Noise for the tokens in their order, on the device: start [B, L, C], and steps [S, B, L, C].

    The noise belongs to the cells of the grid, so models with blocks of a different size sample from the same noise.
    """
    channels = canvas.model.net.channels
    start = canvas.noise.first("full", canvas.cells, channels)
    steps = canvas.noise.steps("full", canvas.settings.diffusion_steps, canvas.cells, channels)
    order = canvas.order
    start = to_device(start, order.device)[:, order]
    steps = to_device(steps, order.device)[:, :, order]
    return start, steps.transpose(0, 1)


def with_null_noise(canvas: BlockCanvas, start: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Add noise for the null branch to the noise of a block: start [2 B, K, C] and steps [S, 2 B, K, C]."""
    channels = canvas.model.net.channels
    null_start = to_device(canvas.noise.first("null", canvas.block_size, channels), start.device)
    null_steps = to_device(canvas.noise.steps("null", len(steps), canvas.block_size, channels), start.device)
    return torch.cat([start, null_start]), torch.cat([steps, null_steps.transpose(0, 1)], 1)


def verification_keys(canvas: BlockCanvas) -> Tensor:
    """Keys of the random numbers with which speculation verifies, int64 [2 B, blocks]: one row for each image, then one
    for each null branch.
    """
    keys = [row_keys(canvas.noise, stream, canvas.blocks) for stream in ("verify", "null/verify")]
    return to_device(torch.cat(keys), canvas.device)
