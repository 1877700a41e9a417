"""The draw of MAR: a diffusion head samples tokens from their conditions z.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. :class:`Diffusion` samples the tokens of an AR step, and
:class:`HeadFactory` makes the heads for it. A step is a diffusion step unless the text says AR step. Two options save
work:

- DiSA takes fewer diffusion steps for later tokens (:func:`annealed_tables`). The image approximates the unaccelerated
  image (Zhao et al. 2025, arXiv 2505.20297, section 3.2, and the published code).
- Speculation drafts several diffusion steps and verifies them in one call of the head. The images differ from the
  unaccelerated images, but have the same distribution (``samplers/speculation.py``).

Shapes: B images, c channels of a token, C transformer width, N tokens of a batch, and P branches (2 with guidance, 1
without).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from ...errors import UserError
from ...networks.mar import BUDGET, MAR
from ...networks.torch_state import to_device
from ...reports.record import Report
from ..annealing import annealed_steps
from ..chain import ChainHead, DiffusionBatch, joined, run_chain
from ..diffusion_steps import StepTable
from ..heads import FullChainHead, SpeculationHead
from ..noise import CounterRNG, row_keys
from ..speculation import Speculation
from .canvas import MARCanvas
from .settings import MARBase
from .tokens import TokenIndex


class HeadFactory:
    """For each batch of tokens, makes an object that calls the network's diffusion head, and samples the tokens with
    this object. The objects compute the diffusion head *in full*: every step computes all layers in all branches. The
    report counts the calls. The derived class in ``lazy/head.py`` makes objects that reuse results, with LazyMAR's
    cache.
    """

    def __init__(self, net: MAR, report: Report):
        self.net = net
        self.denoiser = net.head
        self.report = report

    def is_full(self, steps: int) -> bool:
        """Whether a diffusion of ``steps`` steps computes the head in full at every step."""
        return True

    def for_chain(self, batch: DiffusionBatch) -> ChainHead:
        """The object for a batch whose tokens all take each step together; see :func:`..chain.run_chain`."""
        return FullChainHead(self.net, self.denoiser, batch, self.report, BUDGET)

    def for_speculation(self, batch: DiffusionBatch) -> SpeculationHead:
        """The object for a batch with speculation. This object always computes the diffusion head in full."""
        return SpeculationHead(self.net, self.denoiser, batch, self.report, BUDGET)

    def sample(self, batch: DiffusionBatch) -> Tensor:
        """Sample the N tokens of a batch: fp32 [N, c]. Without tokens or steps, the result is ``batch.x``."""
        x = batch.x
        if len(batch.x) and len(batch.table.times):
            for result in run_chain(batch, self.for_chain(batch)):
                x = result.x
        return x

    def sample_both(self, first: DiffusionBatch, second: DiffusionBatch) -> tuple[Tensor, Tensor]:
        """Sample the tokens of two batches, fp32 [N, c] for each batch, in one loop.

        The batch with more steps starts alone, and the other batch joins for the last steps. So the number of calls
        of the head is the number of steps of the longer diffusion. In this example, ``first`` has 5 steps, and
        ``second`` has 3 steps::

            head call        0  1  2  3  4
            step of first    0  1  2  3  4
            step of second         0  1  2

        A cache of the head can serve only one diffusion at a time, so with a cache the diffusions run one after the
        other.
        """
        # Number of steps that both batches take together.
        together = min(len(first.table), len(second.table)) if len(first.x) and len(second.x) else 0
        if not together or not (self.is_full(len(first.table)) and self.is_full(len(second.table))):
            return self.sample(first), self.sample(second)

        # 1. The first ``alone`` steps of the longer diffusion. For the shorter diffusion, ``alone`` is 0.
        remaining = []
        for batch in (first, second):
            alone = len(batch.table) - together
            x = self.sample(batch.some_steps(0, alone))
            remaining.append(replace(batch.some_steps(alone, len(batch.table)), x=x))

        # 2. The remaining steps, of both diffusions together.
        x = self.sample(joined(*remaining))
        return x[: len(first.x)], x[len(first.x) :]


class Diffusion:
    """Samples the tokens of an AR step by diffusion.

    Args:
        canvas: the images.
        head: calls the diffusion head.
        tables: a table of diffusion steps for every AR step; with DiSA, later tables have fewer steps.
        counted: whether the report counts the diffusion steps that speculation drafts.
    """

    def __init__(self, canvas: MARCanvas, head: HeadFactory, tables: Sequence[StepTable], counted: bool = True):
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
        """Sample the tokens at ``positions``, int64 [B, n], from conditions z [P, B, n, C]. Returns fp32 [B, n, c]."""
        tokens = TokenIndex.all(positions)
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

    The cache needs one diffusion step after another, but speculation calls the head for many diffusion steps at once.
    ``is_full``: whether every diffusion step computes the head in full, so there is no cache.
    """
    if settings.speculation_window > 1 and not is_full:
        raise UserError(
            "speculation: this setting cannot be combined with head_cache; switch head_cache off, or set speculation "
            "to 0."
        )


def annealed_tables(canvas: MARCanvas, equal_at_end: int = 1) -> list[StepTable]:
    """A table of diffusion steps for each AR step. Later tables have fewer steps, see :func:`annealed_steps`.

    The tables of the last ``equal_at_end`` AR steps all have the smallest number of diffusion steps. But if the run has
    only these AR steps, all tables have the largest number.
    """
    first = canvas.settings.diffusion_steps
    last = canvas.settings.diffusion_steps_end
    counts = annealed_steps(first, last, canvas.order.steps - equal_at_end + 1)
    counts += counts[-1:] * (equal_at_end - 1)
    table_for = {count: canvas.step_table(count) for count in set(counts)}
    return [table_for[count] for count in counts]
