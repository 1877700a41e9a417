"""MAR decides some tokens of the images in every AR step. The transformer computes a condition z for each of these
tokens, and a diffusion head samples the tokens from their conditions.

Source: Li et al. 2024, "Autoregressive Image Generation without Vector Quantization" (arXiv 2406.11838), section 3.

``engine.py`` calls the function that computes z the *look*, and the function that samples tokens from z the *draw*.
Here the look is a :class:`.Transformer` (``transformer.py``), and the draw is a :class:`.Diffusion` (``diffusion.py``).
The other MAR samplers use these classes, or replace them.
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
        UserError: there are more AR steps than tokens; or, in GtR, a stage has more AR steps than tokens, or there are
            too few AR steps for the stages.
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
        condition: the classes of B images, or their prompts if the model reads prompts.
        settings: :class:`MARSettings`, or the settings of LazyMAR, which include the same fields.
        noise: the noise of B images.
        make_transformer: makes the :class:`Transformer`, with its :class:`.HeadFactory`. The default has no
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
    draw = Diffusion(canvas, transformer.head, annealed_tables(canvas))
    yield from run_passes(canvas, canvas.order.plan, transformer, draw)
    return canvas.finish()
