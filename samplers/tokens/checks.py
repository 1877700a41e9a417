"""Checks that a token model and settings fit a sampler. They run before anything is loaded or computed."""

from __future__ import annotations

from ...errors import UserError
from ...networks.llama import TokenModel
from .defaults import sampling_of
from .settings import TokenSettings


def check_raster(name: str, model: TokenModel, settings: TokenSettings) -> None:
    """Check a model and the settings of a sampler that decides tokens in raster order, or nearly so. ``name`` is the
    sampler's title.

    Raises:
        UserError: a PAR model, settings that do not fit the model's grid, or guidance with a model that was trained
            without a null class.
    """
    expect_raster(name, model)
    settings.schedule(model)
    sampling_of(settings, model)


def expect_raster(name: str, *models: TokenModel, why_no_janus: str = "") -> None:
    """Check that models were trained in raster order, and that a sampler can run them.

    Args:
        name: the sampler's title, for the message.
        why_no_janus: a clause for the message that says why the sampler cannot run a Janus; "" if it can.

    Raises:
        UserError: a PAR model, whose order follows its regions; or a Janus that the sampler cannot run.
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
