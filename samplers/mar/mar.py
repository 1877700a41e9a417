"""MAR decides some tokens of the images in every AR step. The transformer computes a condition z for each of these
tokens, and a diffusion head samples the tokens from their conditions.

Source: Li et al. 2024, "Autoregressive Image Generation without Vector Quantization" (arXiv 2406.11838), section 3.

``engine.py`` calls the function that computes z the *look*, and the function that samples tokens from z the *draw*.
Here the look is a :class:`.Transformer` (``transformer.py``), and the draw is a :class:`Diffusion`. The other MAR
samplers use these classes, or replace them. Two options save diffusion steps or calls of the head:

- DiSA takes fewer diffusion steps for later tokens (:func:`annealed_tables`). The image approximates the unaccelerated
  image (Zhao et al. 2025, arXiv 2505.20297, section 3.2, and the published code).
- Speculation drafts several diffusion steps and verifies them in one call of the head. The images differ from the
  unaccelerated images, but have the same distribution (``samplers/speculation.py``).

Shapes: B images, c channels of a token, D transformer width, and P branches (2 with guidance, 1 without).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...networks.mar import MARModel
from ...networks.torch_state import in_own_state, to_device
from ..annealing import annealed_steps
from ..chain import HeadSampler
from ..conditioning import ClassOrPrompt
from ..diffusion_steps import StepTable
from ..editing import Edit
from ..engine import Sampler, run_passes
from ..noise import CounterRNG, PairedNoise, row_keys
from ..speculation import Speculation
from .canvas import MARCanvas, TokenIndex
from .prepare import mar_canvas
from .settings import DiSASettings, MARBase
from .transformer import FullTransformer, Transformer


def check(model: MARModel, settings: MARBase) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: there are more AR steps than tokens; or, in GtR, a stage has more AR steps than tokens, or there are
            too few AR steps for the stages.
    """
    settings.masked_after_steps(model.net.config.grid**2)  # the result does not matter, only the errors


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
        condition: the classes of B images, or their prompts if the model reads prompts.
        settings: :class:`MARSettings`, or the settings of LazyMAR, which include the same fields.
        noise: the noise of B images.
        make_transformer: makes the :class:`Transformer`, with its :class:`.HeadSampler`. The default has no
            caches; :class:`.LazyTransformer` uses LazyMAR's caches.
        edit: an image, and the part of it to regenerate; None to generate whole images.

    Yields:
        :class:`Step` after every AR step; returns :class:`Sampled`.

    Raises:
        UserError: the condition or the edit does not fit the model, there are more AR steps than tokens, or speculation
            is combined with a cache of the head.
    """
    canvas = mar_canvas("mar", model, condition, settings, noise, edit)
    transformer = make_transformer(canvas)
    draw = Diffusion(canvas, transformer.heads, annealed_tables(canvas))
    yield from run_passes(canvas, canvas.order.plan, transformer, draw)
    return canvas.finish()


class Diffusion:
    """Samples the tokens of an AR step by diffusion.

    Args:
        canvas: the images.
        heads: samples batches with the diffusion head.
        tables: a table of diffusion steps for every AR step; with DiSA, later tables have fewer steps.
        counted: whether the report counts the diffusion steps that speculation drafts.
    """

    def __init__(self, canvas: MARCanvas, heads: HeadSampler, tables: Sequence[StepTable], counted: bool = True):
        settings: MARBase = canvas.settings
        expect_full_head(settings, heads.is_full(settings.diffusion_steps))
        self.canvas = canvas
        self.heads = heads
        self.tables = tables
        self.report = canvas.report if counted else None
        self.speculation_window = settings.speculation_window
        self.noise = canvas.noise_of("full")
        if self.speculation_window > 1:
            # The keys of the random numbers with which speculation verifies drafts, int64 [B, L].
            self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    def __call__(self, ar_step: int, positions: Tensor, z: Tensor) -> Tensor:
        """Sample the tokens at ``positions``, int64 [B, n], from conditions z [P, B, n, D]. Returns fp32 [B, n, c]."""
        tokens = TokenIndex.all(positions)
        batch = self.canvas.batch(self.tables[ar_step], tokens, z, self.noise)
        if self.speculation_window > 1:
            rng = CounterRNG(self.keys[tokens.index])
            speculation = Speculation(self.heads.net, self.heads.for_speculation(batch), batch, rng, self.report)
            values = speculation.finish(np.arange(len(tokens)), self.speculation_window)
        else:
            values = self.heads.sample(batch)
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
    """A table of diffusion steps for each AR step. Later tables have fewer diffusion steps, see :func:`annealed_steps`.

    Let ``steps`` be the number of AR steps. The counts of diffusion steps fall from AR step 0 to AR step
    ``steps - equal_at_end``, and stay at that value. If these are the same AR step, nothing falls. AR steps with the
    same count share one table object.
    """
    settings: DiSASettings = canvas.settings

    falling = canvas.order.steps - equal_at_end + 1  # AR steps 0 to steps - equal_at_end
    counts = annealed_steps(settings.diffusion_steps, settings.diffusion_steps_end, falling)
    counts += counts[-1:] * (equal_at_end - 1)

    table_for = {count: canvas.step_table(count) for count in set(counts)}
    return [table_for[count] for count in counts]
