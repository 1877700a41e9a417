"""What a token model brings along: published settings, and the order of its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from ...errors import UserError
from ...networks.llama import TokenModel
from .settings import TokenSettings

S = TypeVar("S", bound=TokenSettings)

# Published guidance and top-k by kind of condition: LlamaGen's for classes and text, Tar's for features, Janus' for
# prompts.
_PUBLISHED = {"class": (4.0, 2000), "text": (7.5, 1000), "features": (4.0, 0), "prompt": (5.0, 0)}
# PAR's guidance by width and regions (XL-4x, XXL-4x, 3B-4x, 3B-16x); it samples from all values.
_PUBLISHED_PAR = {(1280, 4): 1.5, (1536, 4): 1.435, (3200, 4): 1.345, (3200, 16): 1.5}


def published(model: TokenModel) -> dict[str, Any]:
    """Published sampling settings of a model: "cfg" and "top_k"."""
    c = model.net.config
    found = published_for(c.condition, c.dim, c.regions)

    if not c.null:
        found["cfg"] = 1.0
    return found


def published_for(condition: str, width: int, regions: int) -> dict[str, Any]:
    """Published sampling settings, "cfg" and "top_k": of a PAR by its width and regions, else by kind of condition."""
    cfg, top_k = _PUBLISHED[condition]

    par = _PUBLISHED_PAR.get((width, regions))
    if par is not None:
        cfg = par
        top_k = 0

    return {"cfg": cfg, "top_k": top_k}


def resolve(settings: S, model: TokenModel) -> S:
    """The settings with the model's published values for ``cfg`` and ``top_k`` where they are None."""
    if settings.cfg is not None and settings.cfg > 1 and not model.net.config.null:
        raise UserError(f"cfg: {model.name} was trained without a null class, so guidance is impossible; set cfg to 1.")

    missing = {name: value for name, value in published(model).items() if getattr(settings, name) is None}
    return replace(settings, **missing)


def check_raster(name: str, model: TokenModel, settings: TokenSettings) -> None:
    """Check settings of a sampler that decodes in raster order, before anything is loaded or computed.

    Raises:
        UserError: a PAR, a schedule that does not fit the model, or guidance of a model that was trained without a null
            class. ``name`` is the sampler's title.
    """
    raster_only(name, model)
    settings.schedule(model)
    resolve(settings, model)


def raster_only(name: str, *models: TokenModel, janus: str = "") -> None:
    """Check that a sampler can decode models whose tokens are in raster order.

    Args:
        name: the sampler's title, for the message.
        models: the models.
        janus: why the sampler cannot decode a Janus, as the end of "NAME ..."; "" if it can.
    """
    for model in models:
        if model.regions > 1:
            raise UserError(
                f"model: {model.name} was trained in PAR's order, which {name} does not follow; use the PAR Sampler."
            )
        if janus and model.reads_images:
            raise UserError(
                f"model: {model.name} is a Janus, but {name} {janus}; use the LlamaGen Sampler or the ZipAR Sampler."
            )
