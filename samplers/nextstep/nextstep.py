"""NextStep: sample continuous tokens one after another in raster order, each token by flow matching.

A pass of the language model returns the *conditions* of a token. From these conditions, the flow-matching head samples
the token. Guidance mixes the head's predictions for several *branches*. Each branch reads a different prompt, see
:func:`.branches_for_texts`.

Source: NextStep-1 (arXiv 2508.10711) and its published code.

Shapes: B images, L tokens per image, c numbers per token, P branches of guidance, R = P B batch rows in a pass of the
language model, branch by branch, and D numbers per condition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.nextstep import NextStepModel, normed
from ...networks.torch_state import in_own_state, to_device
from ..annealing import annealed_steps
from ..chain import MODULATION_BUDGET, DiffusionBatch, HeadSampler, noise_for_steps
from ..diffusion_steps import StepTable, step_table
from ..editing import Edit
from ..engine import Sampler, run_passes
from ..noise import CounterRNG, PairedNoise, row_keys, stream_noise
from ..speculation import take_steps
from .canvas import NextStepCanvas, NextStepCondition, nextstep_canvas
from .flow import EM, flow
from .settings import NextStepSettings


def check(model: NextStepModel, settings: NextStepSettings) -> None:
    """Check settings against a model, before a run loads or computes anything.

    Raises:
        UserError: the model does not generate images of the size in the settings, or the solver em has a single
            diffusion step.
    """
    model.grid(settings.height, settings.width)
    expect_enough_steps(settings)


@in_own_state
@torch.no_grad()
def nextstep(
    model: NextStepModel,
    condition: NextStepCondition,
    settings: NextStepSettings,
    noise: PairedNoise,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images token by token.

    Args:
        model: the network and the metadata of its files.
        condition: B prompts; or B images that the model has read, each with a prompt that says what to change.
        settings: see :class:`NextStepSettings`.
        noise: noise of the B images.
        edit: the part of each image to regenerate; None for whole new images. A new token does not depend on the tokens
            after it.

    Yields:
        :class:`Step` after every token. Returns :class:`Sampled`.

    Raises:
        UserError: the model cannot read the condition, or cannot generate images of the chosen size; condition and
            noise have different numbers of images; the edit does not fit the model or this size; the solver em has a
            single diffusion step; the model is too large for a CPU; or tokens are not finite.
    """
    expect_enough_steps(settings)
    return (yield from tokens_one_by_one(nextstep_canvas(model, condition, settings, noise, edit)))


def expect_enough_steps(settings: NextStepSettings) -> None:
    """Raise a UserError if the solver em has a single diffusion step, because the token would be almost pure noise."""
    stated = {"diffusion_steps": settings.diffusion_steps, "diffusion_steps_end": settings.diffusion_steps_end}
    for name, steps in stated.items():
        if settings.solver == EM and steps == 1:
            raise UserError(
                f"{name}: with a single step, the solver em returns noise; use at least 2 steps, or the solver em0."
            )


def tokens_one_by_one(canvas: NextStepCanvas) -> Sampler:
    """Sample the tokens of a canvas in raster order."""
    cells = torch.arange(canvas.cells, device=canvas.device)
    plan = {cell: cells[cell : cell + 1] for cell in canvas.sampled_cells}
    canvas.total = len(plan)
    yield from run_passes(canvas, plan, TokenLook(canvas), TokenFlow(canvas))
    return canvas.finish()


class TokenLook:
    """The look of ``engine.py``: runs the language model, with a KV cache. The look returns the conditions of a token,
    [R, 1, D]. The model computes them from the prompts and all tokens before this token.
    """

    def __init__(self, canvas: NextStepCanvas):
        self.canvas = canvas
        self.net = canvas.model.net
        self.cache: Any = None  # the network's KV cache; None before the first pass
        # Conditions of the token whose index is ``fed``, [R, 1, D]; None before the first pass.
        self.conditions: Tensor | None = None
        self.fed = 0  # number of image tokens in the cache

    # The plan has one cell per pass, so ``cells`` holds only ``cell``. The loop of the engine requires both arguments.
    def __call__(self, cell: int, cells: Tensor) -> Tensor:
        canvas = self.canvas
        report = canvas.report

        # 1. In the first pass, read the prompts of all branches. The output for the last token of each prompt gives the
        # conditions of token 0.
        if self.conditions is None:
            prefix, lengths = canvas.model.prefix(canvas.branches.rows, canvas.cells)
            self.conditions, self.cache = self.net.begin(prefix, lengths, canvas.cells)
            report.add(transformer_passes=1, transformer_tokens=prefix.shape[:2].numel(), cache_bytes=self.cache.bytes)

        # 2. Feed the tokens that are not in the cache yet: the newest sampled token, and in an edit also the fixed
        # tokens after it.
        if cell > self.fed:
            tokens = canvas.values[:, self.fed : cell].repeat(canvas.branches.number, 1, 1)
            self.conditions = self.net.advance(tokens, self.fed, self.cache)
            report.add(transformer_passes=1, transformer_tokens=tokens.shape[:2].numel())
            self.fed = cell
        return self.conditions


class TokenFlow:
    """The draw of ``engine.py``: samples tokens by flow matching."""

    def __init__(self, canvas: NextStepCanvas):
        settings = canvas.settings
        net = canvas.model.net
        self.canvas = canvas
        self.heads = HeadSampler(net, net.head, canvas.report, MODULATION_BUDGET)
        self.dtype = net.head.cond_embed.weight.dtype
        self.counts = annealed_steps(settings.diffusion_steps, settings.diffusion_steps_end, canvas.cells)

        self.noise = stream_noise(
            canvas.noise, "full", settings.diffusion_steps, canvas.cells, net.channels, canvas.device
        )
        # Keys of the random numbers that verify drafts, int64 [B, L]; None without speculation.
        self.keys: Tensor | None = None
        if settings.speculation_window > 1:
            self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

        # The table for each number of diffusion steps, because later tokens may take fewer steps (DiSA).
        self.tables: dict[int, StepTable] = {}
        for count in set(self.counts):
            solver_flow = flow(settings.solver, count, settings.time_shift)
            times = to_device(torch.tensor(solver_flow.times), canvas.device)
            self.tables[count] = step_table(solver_flow.steps, net.head.times(times))

    def __call__(self, cell: int, cells: Tensor, z: Tensor) -> Tensor:
        """Sample the token at ``cell`` in all images, fp32 [B, 1, c], from its conditions z, [R, 1, D]."""
        values = self.run_batch(cell, self.batch(cell, z))
        if self.canvas.settings.use_norm:
            values = normed(values)
        return self.canvas.with_fixed_tokens(cell, values[:, None])

    def batch(self, cell: int, z: Tensor) -> DiffusionBatch:
        """The diffusion batch of the token at ``cell``, before its first step: one row for each image."""
        count = self.counts[cell]
        return DiffusionBatch(
            z=z[:, 0].unflatten(0, (self.canvas.branches.number, -1)).to(self.dtype),  # [P, B, D]
            cfg=self.canvas.scales[cell].expand(self.canvas.images, -1),  # [B, 1], or [B, 2] if P = 3
            x=self.noise.start[:, cell],
            noise=noise_for_steps(self.noise.steps[:, :, cell], count),
            table=self.tables[count],
        )

    def run_batch(self, cell: int, batch: DiffusionBatch) -> Tensor:
        """Take all diffusion steps of the token's batch, with speculation if it is on. Returns fp32 [B, c]."""
        rng = None if self.keys is None else CounterRNG(self.keys[:, cell])
        x = batch.x
        for _, states in take_steps(self.heads, batch, self.canvas.settings.speculation_window, rng):
            x = states
        return x
