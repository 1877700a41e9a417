"""ZipAR: a row starts as soon as the row above is a window ahead, so that several rows grow at once.

Source: He et al. 2025, "ZipAR: Parallel Autoregressive Image Generation through Spatial Locality" (ICML 2025, arXiv
2412.04062). What predicts a row's first token is the last cell of the row above, which is not there yet; as in the
published code the newest token of the row above *that* cell stands in for it until it is.

The paper's adaptive window is not here: its constants are in no published code, and when a row may start would depend on
the tokens drawn, image by image.
"""

from __future__ import annotations

from functools import lru_cache

from ...model_loaders.networks.gpt import TokenModel
from ..conditioning import AnyCondition
from .draws import Draws
from .llamagen import raster
from .loop import TokenSampler, begin, decode, raster_only
from .schedule import Schedule, group_clocks, next_token_passes
from .settings import ZipARSettings


def row_groups(grid: int, window: int, rows: int | None = None) -> list[list[int]]:
    """Cells of every pass: the first row alone, then one cell of every row under way.

    Row r + 1 comes in once row r holds ``window`` tokens, 1 <= window < grid. These are G + (G - 2) window + G passes.
    ``rows`` is the number of rows where it is not G.
    """
    rows = grid if rows is None else rows
    groups = [[c] for c in range(grid)]
    filled, active = [grid] + [0] * (rows - 1), [1] if rows > 1 else []
    while active:
        groups.append([row * grid + filled[row] for row in active])
        for row in list(active):
            filled[row] += 1
            if filled[row] == window and row + 1 < rows:
                active.append(row + 1)
            if filled[row] == grid:
                active.remove(row)
    return groups


@lru_cache(maxsize=16)
def windowed(grid: int, window: int, blanks: bool = False) -> Schedule:
    """Schedule for a window; from the row's width on it is the raster."""
    if window >= grid:
        return raster(grid)
    groups = row_groups(grid, window)
    return Schedule(grid, next_token_passes(groups, grid, group_clocks(groups, grid)), blanks)


def zipar(
    model: TokenModel, condition: AnyCondition, settings: ZipARSettings, noise: Draws, seed: int | None = None
) -> TokenSampler:
    """ZipAR on a LlamaGen or on Tar's de-tokenizer.

    With ``window`` as wide as a row or wider this is plain LlamaGen, token for token.

    Args:
        model, condition, noise, seed: as :func:`samplers.tokens.llamagen.llamagen`.
        settings: see :class:`ZipARSettings`.
    """
    raster_only("ZipAR", model)
    schedule = windowed(model.grid, settings.window, not settings.mask_undecoded)
    return (yield from decode(begin("zipar", model, condition, settings, noise, seed, schedule)))
