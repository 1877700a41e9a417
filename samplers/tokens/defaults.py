"""Published sampling settings of a token model. They replace the settings that a user leaves at None."""

from __future__ import annotations

import math
from typing import Any

from ...errors import UserError
from ...networks.llama import TokenModel
from .settings import TokenSampling, TokenSettings

# Published cfg and top_k for each kind of condition: LlamaGen's values for classes and text, Tar's for features, and
# Janus' for prompts. A top_k of 0 allows all values of a token.
_PUBLISHED = {"class": (4.0, 2000), "text": (7.5, 1000), "features": (4.0, 0), "prompt": (5.0, 0)}
# PAR's published cfg for each network width and number of regions (XL-4x, XXL-4x, 3B-4x, 3B-16x). PAR's top_k is 0.
_PUBLISHED_PAR = {(1280, 4): 1.5, (1536, 4): 1.435, (3200, 4): 1.345, (3200, 16): 1.5}


def published(model: TokenModel) -> dict[str, Any]:
    """Published "cfg" and "top_k" of a model. The values of a published PAR model depend on its width and its number of
    regions. The values of any other model depend on its kind of condition. If the model was trained without a null
    class, "cfg" is 1, so guidance is off.
    """
    c = model.net.config
    cfg, top_k = _PUBLISHED[c.condition]
    if (c.dim, c.regions) in _PUBLISHED_PAR:
        cfg = _PUBLISHED_PAR[c.dim, c.regions]
        top_k = 0
    if not c.null:
        cfg = 1.0
    return {"cfg": cfg, "top_k": top_k}


def sampling_of(settings: TokenSettings, model: TokenModel) -> TokenSampling:
    """How a model's tokens are sampled with these settings. The model's published values replace None.

    Raises:
        UserError: the settings need guidance, but the model was trained without a null class.
    """
    published_values = published(model)
    cfg = published_values["cfg"] if settings.cfg is None else settings.cfg
    if cfg > 1 and not model.net.config.null:
        raise UserError(f"cfg: {model.name} was trained without a null class, so guidance is impossible; set cfg to 1.")

    return TokenSampling(
        cfg=cfg,
        temperature=settings.temperature,
        top_k=published_values["top_k"] if settings.top_k is None else settings.top_k,
        top_p=settings.top_p,
        cfg_interval=math.inf if settings.cfg_interval is None else settings.cfg_interval,
        entropy_temperature=settings.entropy_temperature,
    )
