"""ZipAR: a row starts when the row above is a window ahead, so several rows are decoded in parallel.

Source: He et al. 2025, "ZipAR: Parallel Autoregressive Image Generation through Spatial Locality" (ICML 2025, arXiv
2412.04062). The first token of a row is predicted from the last cell of the row above, which is not decided yet; as in
the published code, a decided token near it is fed in its place (see :func:`next_token_passes`).

The paper's adaptive window is not implemented: its constants are not in the published code, and the start of a row
would depend on the tokens of each image.
"""

from __future__ import annotations

from functools import lru_cache, partial

from ...networks.llama import TokenModel
from ...networks.torch_state import in_own_state
from ..conditioning import AnyCondition
from ..editing import Edit
from ..engine import Sampler
from .canvas import token_canvas
from .defaults import check_raster
from .draws import PairedDraws
from .llamagen import decode_schedule
from .schedule import Schedule, guidance_steps, next_token_passes, raster
from .settings import ZipARSettings


def row_groups(grid: int, window: int, rows: int) -> list[list[int]]:
    """Cells of every pass: the first row cell by cell, then one cell of every active row.

    Row r + 1 becomes active when row r holds ``window`` tokens (the paper's s, 1 <= s < G). All G rows take G + (G - 2)
    s + G passes.
    """
    groups = []
    filled = [0] * rows  # cells of every row so far
    active = [0]  # rows that have begun and are not full

    while active:
        groups.append([row * grid + filled[row] for row in active])
        for row in list(active):
            filled[row] += 1

            # The first row is completed before the second one starts.
            needed = window if row else grid
            if filled[row] == needed and row + 1 < rows:
                active.append(row + 1)

            if filled[row] == grid:
                active.remove(row)
    return groups


@lru_cache(maxsize=16)
def windowed(grid: int, window: int, unwritten_visible: bool = False) -> Schedule:
    """Schedule for a window; raster order if the window is a row or wider."""
    if window >= grid:
        return raster(grid)

    groups = row_groups(grid, window, grid)
    passes = next_token_passes(groups, grid, guidance_steps(groups, grid))
    return Schedule(grid, passes, unwritten_visible)


# check(model, settings) raises what the sampler would, before anything is loaded or computed.
check = partial(check_raster, "ZipAR")


@in_own_state
def zipar(
    model: TokenModel,
    condition: AnyCondition,
    settings: ZipARSettings,
    noise: PairedDraws,
    edit: Edit | None = None,
) -> Sampler:
    """ZipAR; with a window of a row or wider it draws the tokens of :func:`samplers.tokens.llamagen.llamagen`.

    Arguments, steps and errors are those of that function.
    """
    check(model, settings)
    schedule = windowed(model.grid, settings.window, not settings.mask_undecoded)
    canvas, prepared = token_canvas("zipar", model, condition, settings, noise, edit)
    return (yield from decode_schedule(canvas, prepared, schedule, settings.parallel))
