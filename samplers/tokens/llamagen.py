"""LlamaGen: one token per pass in raster order.

Source: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (arXiv 2406.06525).
``decode.py`` runs the passes.
"""

from __future__ import annotations

from ...networks.llama import FEATURES, TokenModel
from ..conditioning import AnyCondition
from ..editing import Edit
from ..engine import Sampler
from .checks import check_raster
from .decode import decode_settings
from .settings import LlamaGenSettings
from .token_noise import TokenNoise


def check(model: TokenModel, settings: LlamaGenSettings) -> None:
    """Check that LlamaGen can run a model with these settings, before anything is loaded or computed.

    Raises the errors of :func:`.check_raster`.
    """
    check_raster("LlamaGen", model, settings)


def llamagen(
    model: TokenModel,
    condition: AnyCondition,
    settings: LlamaGenSettings,
    noise: TokenNoise,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images with a LlamaGen, a Janus, or Tar's de-tokenizer, which generates an image from semantic codes.

    Args:
        model: the network with its metadata.
        condition: the condition of B images. The model must read this kind of condition.
        settings: see :class:`LlamaGenSettings`.
        noise: the noise of B images.
        edit: the image to edit and the part to regenerate; None to generate whole new images.

    Yields:
        :class:`Step` after every pass; returns :class:`Sampled`. See :func:`.decode_schedule`.

    Raises:
        UserError: the model is a PAR; the condition, the edit or the guidance does not fit the model; or the logits are
            not finite.
    """
    check(model, settings)
    # A de-tokenizer has its own name in reports, because its reports are compared only with a de-tokenizer's reports.
    name = "tar" if model.condition == FEATURES else "llamagen"
    return decode_settings(name, model, condition, settings, noise, edit)
