"""Plain MAR: every token by a full diffusion pass. Source: Li et al. 2024 (arXiv 2406.11838), section 3.

Two options keep or approximate the result with less work: fewer diffusion steps for later tokens (DiSA, Zhao et al.
2025, arXiv 2505.20297, section 3.2, and its code), and speculation in the diffusion head (``speculation.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ...errors import UserError
from ...networks.mar import MARModel
from ...networks.torch_state import in_own_state
from ..annealing import annealed_steps
from ..chain import StepTable
from ..conditioning import MaskedCondition
from ..device import to_device
from ..editing import Edit
from ..engine import Sampler, decode
from ..noise import CounterRNG, PairedNoise, row_keys
from ..speculation import Speculation
from .canvas import MARCanvas, Tokens, mar_canvas
from .network import FullTransformer, Heads, Transformer, full_head
from .settings import DiSASettings, LazyMARSettings, MARBase, MARSettings


def check(model: MARModel, settings: MARBase) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: more AR steps than tokens, or of GtR than its stages have.
    """
    settings.left(model.net.config.tokens)


@in_own_state
def mar(
    model: MARModel,
    condition: MaskedCondition,
    settings: MARSettings | LazyMARSettings,
    noise: PairedNoise,
    make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
    edit: Edit | None = None,
) -> Sampler:
    """Plain MAR.

    Args:
        model: network and the metadata of its file.
        condition: what B images show, of the kind that the model reads.
        settings: see :class:`MARSettings`; with LazyMAR's caches they may be among them.
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
    draw = Diffusion(canvas, transformer.heads, annealed_tables(canvas, settings))
    return (yield from decode(canvas, canvas.order.plan, transformer, draw))


class Diffusion:
    """The draw of MAR: every token of an AR step by diffusion, of T steps, or fewer for later tokens (DiSA).

    Args:
        canvas: the images.
        heads: how the diffusion head is evaluated.
        tables: diffusion steps of every AR step.
        counted: whether the report counts the diffusion steps that speculation drafts.
    """

    def __init__(self, canvas: MARCanvas, heads: Heads, tables: Sequence[StepTable], counted: bool = True):
        expect_whole_head(canvas.settings, heads)
        self.canvas = canvas
        self.heads = heads
        self.tables = tables
        self.counts = canvas.report if counted else None
        self.window = canvas.settings.window
        self.noise = canvas.draws("full")
        if self.window > 1:
            self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    def __call__(self, step: int, here: Tensor, z: Tensor) -> Tensor:
        """Sample the tokens fp32 [B, n, c] at positions ``here`` [B, n], from their conditions z [P, B, n, C]."""
        canvas = self.canvas
        net = canvas.model.net
        tokens = Tokens.all(here)
        rows = canvas.chains(self.tables[step], tokens, tokens.conditions(z), self.noise)
        if self.window > 1:
            head = full_head(net, rows, canvas.report)
            paths = Speculation(net, head, rows, CounterRNG(tokens.of(self.keys)), self.counts)
            values = paths.finish(np.arange(len(tokens)), self.window)
        else:
            values = self.heads.sample(net, rows, canvas.report)
        return values.view(*here.shape, -1)


def expect_whole_head(settings: MARBase, heads: Heads) -> None:
    """Check that speculation, which evaluates the head at many diffusion steps at once, does not meet a cached head."""
    if settings.window > 1 and not heads.whole(settings.diffusion_steps):
        raise UserError(
            "speculation: it cannot be combined with head_cache; switch head_cache off, or set speculation to 0."
        )


def annealed_tables(canvas: MARCanvas, settings: DiSASettings, level: int = 1) -> list[StepTable]:
    """Diffusion tables of every AR step. The diffusion steps fall, and the last ``level`` AR steps have the fewest."""
    first = canvas.settings.diffusion_steps
    last = settings.diffusion_steps_end
    counts = annealed_steps(first, last, canvas.order.steps - level + 1)
    counts += counts[-1:] * (level - 1)
    made = {count: canvas.table(count) for count in set(counts)}
    return [made[count] for count in counts]
