"""Whether a token model and settings fit a sampler, before anything is loaded or computed."""

from __future__ import annotations

from ...errors import UserError
from ...networks.llama import TokenModel
from .defaults import sampling_of
from .settings import TokenSettings


def check_raster(name: str, model: TokenModel, settings: TokenSettings) -> None:
    """Check a model and the settings of a sampler that decodes in raster order. ``name`` is the sampler's title.

    Raises:
        UserError: a PAR, a schedule that does not fit the model, or guidance of a model that was trained without a null
            class.
    """
    raster_only(name, model)
    settings.schedule(model)
    sampling_of(settings, model)


def raster_only(name: str, *models: TokenModel, why_no_janus: str = "") -> None:
    """Check that models generate their tokens in raster order, and are of a kind that a sampler decodes.

    Args:
        name: the sampler's title, for the message.
        models: the models.
        why_no_janus: why the sampler cannot decode a Janus, a clause for the message; "" if it can.

    Raises:
        UserError: a PAR, or a Janus that the sampler cannot decode.
    """
    for model in models:
        if model.regions > 1:
            raise UserError(
                f"model: {model.name} was trained in PAR's order, which {name} does not follow; use the PAR Sampler."
            )
        if why_no_janus and model.reads_images:
            raise UserError(
                f"model: {model.name} is a Janus, but {why_no_janus}; use the LlamaGen Sampler or the ZipAR Sampler."
            )
