"""Checks that a token model and settings fit a sampler. They run before anything is loaded or computed.

A function whose name begins with ``check`` makes all checks of a sampler or of a kind of sampler. A function whose name
begins with ``expect`` checks one requirement.
"""

from __future__ import annotations

from ...errors import UserError
from ...networks.llama import TokenModel
from .settings import TokenSettings, sampling_of


def check_raster(name: str, model: TokenModel, settings: TokenSettings) -> None:
    """Check a model and settings for LlamaGen or ZipAR, which need a model that was trained in raster order. ``name``:
    the sampler's title.

    Raises:
        UserError: the model is a PAR model; the settings do not fit the model's grid; or the settings need guidance,
            but the model was trained without a null class.
    """
    expect_raster(name, model)
    settings.schedule(model)  # raises if the settings do not fit the model's grid
    sampling_of(settings, model)  # raises if the settings need guidance, but the model has no null class


def expect_raster(name: str, *models: TokenModel, why_no_janus: str = "") -> None:
    """Check that models were trained in raster order. If ``why_no_janus`` is not "", also check that none is a Janus.

    Args:
        name: the sampler's title, for the message.
        why_no_janus: a clause for the message: why the sampler cannot run a Janus; "" if it can run one.

    Raises:
        UserError: a model is a PAR model (trained in PAR's order), or a Janus that the sampler cannot run.
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
