"""BitDance: generate an image block by block. A block is a square of binary tokens, which diffusion samples together.

Source: "BitDance" (arXiv 2602.14041) and its published code.

Shapes: B images, L tokens of c bits each, K tokens in a block, transformer width D. The transformer runs on R batch
rows. Without guidance, R is B, one row for each image. With guidance, R is 2 B: the last B rows are the null branch,
which reads the null condition.

In each block, the diffusion samples N of these R rows, the first ones. Guidance mixes P branches, and R is P N. At
guidance scale 1, the branches are not mixed, so the null branch samples tokens of its own
(:meth:`BlockCanvas.samples_null`)::

    block                                        R      N      P
    without guidance                             B      B      1
    with guidance, the block's scale is not 1    2 B    B      2
    with guidance, the block's scale is 1        2 B    2 B    1

The diffusion of a block has S diffusion steps with noise, and then a last step without noise, which replaces the state
by the head's prediction. Each of the S + 1 steps needs the head's output for its state. So ``chain.py``, where S is the
number of all steps, takes S + 1 steps for a block.

The order in which BitDance generates the tokens is the *token order*. A *cell* is a square of the image's grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...networks.bitdance import BlockModel
from ...networks.torch_state import in_own_state, to_device
from ..annealing import annealed_steps
from ..chain import MODULATION_BUDGET, DiffusionBatch, FixedTokens, HeadSampler, noise_for_steps
from ..conditioning import ClassOrPrompt
from ..diffusion_steps import StepTable, step_table
from ..editing import Edit
from ..engine import Sampler
from ..noise import CounterRNG, PairedNoise, StreamNoise, row_keys, stream_noise
from ..speculation import take_steps
from .canvas import BlockCanvas, Inputs, block_canvas
from .diffusion import head_calls
from .settings import BlockSettings


def check(model: BlockModel, settings: BlockSettings) -> None:
    """Check settings against a model, before a run loads or computes anything.

    Raises:
        UserError: the model does not generate images of the size in the settings.
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
        model: the network and the metadata of its files.
        condition: what the B images show: class labels for a class model, prompts for a prompt model.
        settings: see :class:`BlockSettings`.
        noise: noise of the B images.
        edit: the part of each image to regenerate; None for whole new images. A new token depends on
            the fixed tokens of earlier blocks and of its own block, but not on the fixed tokens of later blocks.

    Yields:
        :class:`Step` after every call of the diffusion head or, with speculation, after every window of drafted
        diffusion steps. Returns :class:`Sampled`.

    Raises:
        UserError: the model cannot read the condition, or cannot generate images of the chosen size; the edit does not
            fit the model or this size; the model is too large for a CPU; or predictions are not finite.
    """
    canvas, inputs = block_canvas(model, condition, settings, noise, edit)
    look = BlockLook(canvas, inputs)
    diffusion = BlockDiffusion(canvas)

    canvas.total = sum(diffusion.steps_of[block] for block in canvas.sampled_blocks)
    done = 0  # steps in the earlier blocks
    for block in canvas.sampled_blocks:
        # 1. The transformer computes the conditions for the block from the blocks before it.
        with canvas.clock.phase("transformer"):
            z = look(block)

        # 2. The diffusion of the block, in many calls of the head.
        for steps_done, state in canvas.clock.timed("head", diffusion.denoise(block, z)):
            # 3. The last step decides the block: the state is now the head's prediction, and the signs of the state are
            # the tokens. The transformer reads these tokens before the next block.
            if steps_done == diffusion.steps_of[block]:
                canvas.watch(torch.linalg.vector_norm(state, torch.inf))
                canvas.decide_block(block, torch.where(state >= 0, 1.0, -1.0))
            yield from canvas.yield_step(done + steps_done)
        done += diffusion.steps_of[block]
    return canvas.finish()


class BlockLook:
    """The transformer with its KV cache. ``look(block)`` returns the conditions for the tokens of a block, fp32
    [R, K, D]. The transformer computes them from all blocks before this block.
    """

    def __init__(self, canvas: BlockCanvas, inputs: Inputs):
        self.canvas = canvas
        self.inputs = inputs
        self.net = canvas.model.net
        self.position_embeddings = self.net.places(canvas.grid)  # position embeddings, fp32 [L, D]
        self.cache: Any = None  # the network's KV cache; None before the first pass
        self.hidden: Tensor | None = None  # the network's output for the newest block in the cache, [R, K, D]
        self.fed = 0  # number of image tokens in the cache

    def __call__(self, block: int) -> Tensor:
        report = self.canvas.report
        at = self.canvas.span(block)

        # 1. In the first call, feed the condition, and then as many embeddings as a block has. Block 0 needs them,
        # because no block of tokens comes before it.
        if self.hidden is None:
            prefix, lengths, first = self.inputs
            self.hidden, self.cache = self.net.begin(prefix, lengths, first, self.canvas.grid)
            # One pass reads the condition, and the other one reads the embeddings.
            report.add(transformer_passes=2, cache_bytes=self.cache.bytes)
            report.add(transformer_tokens=prefix.shape[0] * (prefix.shape[1] + first.shape[1]))

        # 2. Feed the earlier blocks that are not in the cache yet. Both branches of guidance are in one batch.
        if at.start > self.fed:
            new = slice(self.fed, at.start)
            embeddings = self.net.embed(self.canvas.branch_tokens[:, new], self.position_embeddings[new])
            # The K start embeddings come before the image tokens in the cache.
            before = self.canvas.block_size + self.fed
            hidden = self.net.advance(embeddings, before, self.cache)
            self.hidden = hidden[:, -self.canvas.block_size :]
            self.fed = at.start
            report.add(transformer_passes=1, transformer_tokens=embeddings.shape[:2].numel())

        return self.hidden + self.position_embeddings[at]


class BlockDiffusion:
    """Samples blocks by diffusion.

    Attributes:
        noisy_steps_of: for each block, S: its diffusion steps with noise.
        steps_of: for each block, S + 1: also with the last step. Without speculation, each of these steps is one call
            of the head.
    """

    def __init__(self, canvas: BlockCanvas):
        settings = canvas.settings
        net = canvas.model.net
        self.canvas = canvas
        self.heads = HeadSampler(net, net.denoiser, canvas.report, MODULATION_BUDGET)
        self.dtype = net.denoiser.cond_embed.weight.dtype
        self.noisy_steps_of = annealed_steps(settings.diffusion_steps, settings.diffusion_steps_end, canvas.blocks)
        self.steps_of = [count + 1 for count in self.noisy_steps_of]
        self.noise = noise_in_order(canvas)
        # Keys of the random numbers that verify drafts, int64 [2 B, blocks]; None without speculation.
        self.keys = verification_keys(canvas) if settings.speculation_window > 1 else None

        # By S: the table of the S + 1 steps, and their times t, fp32 [S + 1].
        self.tables: dict[int, tuple[StepTable, Tensor]] = {}
        for count in set(self.noisy_steps_of):
            calls = head_calls(count, canvas.model.time_shift)
            times = to_device(torch.tensor(calls.times), canvas.device)
            self.tables[count] = step_table(calls.steps, net.denoiser.times(times)), times

    def denoise(self, block: int, conditions: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Denoise a block from its ``conditions``, fp32 [R, K, D]. After every call of the head (with speculation,
        after every window), yields two values: how many of the ``steps_of[block]`` steps every row has done, and the
        states, fp32 [N, K, c]. With speculation, the rows may have done different numbers of steps; the slowest row
        counts.
        """
        batch = self._batch(block, conditions)
        # The first N keys: the keys of the images and, if N is R, of their null branches.
        rng = None if self.keys is None else CounterRNG(self.keys[: len(batch.x), block])
        yield from take_steps(self.heads, batch, self.canvas.settings.speculation_window, rng)

    def _batch(self, block: int, conditions: Tensor) -> DiffusionBatch:
        """The batch with the N rows of a block, before the diffusion of the block."""
        canvas = self.canvas
        at = canvas.span(block)
        rows = canvas.sampled_rows(block)  # N
        # If P is 2, the null branch is branch 1. If the null branch samples its own tokens, P is 1, and the null branch
        # is the last B of the N = R rows.
        branches = canvas.branches_in(block)  # P
        noise = StreamNoise(self.noise.start[:, at], self.noise.steps[:, :, at])
        if canvas.samples_null(block):
            noise = with_null_noise(canvas, noise)

        count = self.noisy_steps_of[block]  # S
        table, times = self.tables[count]
        sampled = canvas.sampled_mask(block)
        fixed_tokens = None
        if sampled is not None:
            fixed_tokens = FixedTokens(times, noise.start, canvas.branch_tokens[:rows, at].clone(), sampled)
        return DiffusionBatch(
            z=conditions.unflatten(0, (branches, rows)).to(self.dtype),
            cfg=torch.full((rows, 1, 1), canvas.cfg(block), device=canvas.device),
            x=noise.start,
            # S entries for S + 1 steps: the last step adds no noise.
            noise=noise_for_steps(noise.steps, count),
            table=table,
            fixed_tokens=fixed_tokens,
        )


def noise_in_order(canvas: BlockCanvas) -> StreamNoise:
    """The noise of all tokens in token order, on the device.

    Each cell has its own noise, so models with different block sizes use the same noise at a cell.
    """
    steps = canvas.settings.diffusion_steps
    noise = stream_noise(canvas.noise, "full", steps, canvas.cells, canvas.model.net.channels, canvas.device)
    return StreamNoise(noise.start[:, canvas.order], noise.steps[:, :, canvas.order])


def with_null_noise(canvas: BlockCanvas, noise: StreamNoise) -> StreamNoise:
    """Append the null branch's noise to the noise of a block: start [2 B, K, c] and steps [S, 2 B, K, c]."""
    channels = canvas.model.net.channels
    null = stream_noise(canvas.noise, "null", len(noise.steps), canvas.block_size, channels, canvas.device)
    return StreamNoise(torch.cat([noise.start, null.start]), torch.cat([noise.steps, null.steps], 1))


def verification_keys(canvas: BlockCanvas) -> Tensor:
    """Keys of the random numbers that verify drafts, int64 [2 B, blocks]: first the keys of the B images, then the keys
    of their null branches.
    """
    keys = [row_keys(canvas.noise, stream, canvas.blocks) for stream in ("verify", "null/verify")]
    return to_device(torch.cat(keys), canvas.device)
