"""LlamaGen: one token per pass in raster order.

Source: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (arXiv 2406.06525).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...model_loaders.networks.gpt import TokenModel
from ..conditioning import AnyCondition
from .draws import Draws
from .jacobi import decode
from .loop import TokenSampler, begin, raster_only
from .schedule import Schedule, next_token_passes
from .settings import JacobiSettings, LlamaGenSettings


@lru_cache(maxsize=4)
def raster(grid: int) -> Schedule:
    """One cell per pass: G * G passes."""
    return Schedule(grid, next_token_passes([[c] for c in range(grid * grid)], grid))


def llamagen(
    model: TokenModel, condition: AnyCondition, settings: LlamaGenSettings, noise: Draws, seed: int | None = None
) -> TokenSampler:
    """Serial decoding of a LlamaGen or of Tar's de-tokenizer.

    Args:
        model: the network with its metadata.
        condition: labels, text, semantic features or codes of B images.
        settings: see :class:`LlamaGenSettings`.
        noise: draws of B images.
        seed: only recorded in the report.

    Yields:
        :class:`TokenStep` after every pass; returns :class:`TokenSampled`. See :func:`samplers.tokens.jacobi.decode`.

    Raises:
        UserError: a condition that does not fit the model, or a PAR.
    """
    raster_only("LlamaGen", model)
    # Reports of a de-tokenizer are compared with each other, not with those of a LlamaGen.
    name = "tar" if model.net.config.condition in ("features", "codes") else "llamagen"
    return (
        yield from decode(begin(name, model, condition, settings, noise, seed, raster(model.grid)), settings.parallel)
    )


def jacobi(
    model: TokenModel, condition: AnyCondition, settings: JacobiSettings, noise: Draws, seed: int | None = None
) -> TokenSampler:
    """The tokens of :func:`llamagen` by Jacobi iteration; the arguments are the same.

    Args:
        settings: with ``parallel`` 0 the window is the side of the grid.
    """
    raster_only("Jacobi", model)
    settings = replace(settings, parallel=settings.parallel or model.grid)
    run = begin("jacobi", model, condition, settings, noise, seed, raster(model.grid))
    return (yield from decode(run, settings.parallel))
