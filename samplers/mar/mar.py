"""MAR: at every AR step, the transformer computes a condition z for each token that the step decides, and a diffusion
head samples the tokens from their conditions.

Source: Li et al. 2024, "Autoregressive Image Generation without Vector Quantization" (arXiv 2406.11838), section 3.

``engine.py`` calls the function that computes z the *look*, and the function that samples tokens from z the *draw*.
Here the look is a :class:`.Transformer` (``transformer.py``), and the draw is a :class:`.Diffusion` (``diffusion.py``).
The other MAR samplers use or replace these classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...networks.mar import MARModel
from ...networks.torch_state import in_own_state
from ..conditioning import ClassOrPrompt
from ..editing import Edit
from ..engine import Sampler, run_passes
from ..noise import PairedNoise
from .canvas import MARCanvas, mar_canvas
from .diffusion import Diffusion, annealed_tables
from .settings import DiSASettings, MARBase
from .transformer import FullTransformer, Transformer


def check(model: MARModel, settings: MARBase) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: more AR steps than tokens; for GtR also a stage with more AR steps than tokens, or without AR steps.
    """
    settings.masked_after_steps(model.net.config.grid**2)


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
