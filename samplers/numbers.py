"""The numbers that a model puts in the place of settings that are None, for widgets and for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_loaders.networks.bitdance import BlockModel
from ..model_loaders.networks.llama import TokenModel
from ..model_loaders.networks.mar import MARModel
from ..model_loaders.networks.tar import TarModel
from .mar.lazymar import usual_block
from .mar.mar import CLIPPED, clips
from .mar.settings import DiSASettings, MARBase
from .settings import knobs
from .tokens.loop import published
from .tokens.settings import MuLoSDSettings, neighbours_of


def own_values(model: Any, settings: Any) -> dict[str, Any]:
    """What a model takes where a setting is None, by name.

    Args:
        model: a MAR, a BitDance, a token model or Tar's language model.
        settings: of the run; some values depend on the number of diffusion steps.
    """
    if isinstance(model, MARModel):
        own = {"block": usual_block(model.net.config.decoder_depth)}
        if isinstance(settings, MARBase):
            own["t_max"] = _first_timestep(model, settings)
        return own

    if isinstance(model, BlockModel):
        height, width = model.usual_size
        return {"width": width, "height": height}

    if isinstance(model, TokenModel):
        neighbours = neighbours_of(MuLoSDSettings(), model.net.config.vocab)
        of_grid = {"cfg_interval": model.tokens, "draft_rows": model.grid}
        return {**published(model), **of_grid, "neighbours": neighbours}

    if isinstance(model, TarModel):
        return {"repetition_penalty": model.repetition_penalty}
    return {}


def _first_timestep(model: MARModel, settings: MARBase) -> int:
    """The highest diffusion timestep of a run that chooses none."""
    first = model.first_timestep(settings.diffusion_steps)
    if isinstance(settings, DiSASettings) and clips(settings):
        return min(first, CLIPPED)
    return first


def numbers(settings: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by name, each None replaced: by the value of ``own``, else by that of a full-size model."""
    found: dict[str, Any] = {}
    for name, (_, about) in knobs(settings).items():
        value = getattr(settings, name)
        if value is None and name == "diffusion_steps_end":
            value = settings.diffusion_steps
        if value is None:
            value = own.get(name, about.paper)
        found[name] = value
    return found
