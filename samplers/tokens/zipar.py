"""ZipAR: a row of tokens starts when the row above is a *window* of tokens ahead, so several rows are decoded in
parallel.

Source: He et al. 2025, "ZipAR: Parallel Autoregressive Image Generation through Spatial Locality" (ICML 2025, arXiv
2412.04062). In raster order, the transformer predicts the first token of a row from the last token of the row above. In
ZipAR, that last token is not decided yet. The transformer then gets a decided token near it instead, as in the
published code; see :func:`next_token_passes`.

FastAR does not implement the paper's adaptive window. Its constants are not in the published code, and the images of a
batch would start their rows at different times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from ...networks.llama import TokenModel
from ...reports.record import Report
from ..conditioning import AnyCondition
from ..editing import Edit
from ..engine import Sampler
from ..settings import knob
from .checks import check_raster
from .llamagen import decode_settings
from .schedule import Schedule, guidance_steps, next_token_passes, raster
from .settings import (
    PARALLEL_PASSES,
    USUAL_PARALLEL,
    TokenSettings,
    entropy_temperature_knob,
    parallel_knob,
    why_only_one_per_pass,
)
from .token_noise import TokenNoise


def row_groups(grid: int, window: int, rows: int) -> list[list[int]]:
    """The cells (numbers of tokens in raster order) that each pass decides, in the first ``rows`` rows of ``grid``
    cells: the first row cell by cell, and then one cell of every active row.

    For r > 0, row r + 1 becomes active when ``window`` cells of row r are decided (the paper's s). For a grid of side
    G, all G rows take G + (G - 2) s + G passes. ``window`` is from 1 to ``grid`` - 1.
    """
    groups = []
    filled = [0] * rows  # number of decided cells of every row
    active = [0]  # rows that have started and are not complete

    while active:
        groups.append([row * grid + filled[row] for row in active])
        for row in list(active):
            filled[row] += 1

            # The second row starts only when the first one is complete.
            needed = window if row else grid
            if filled[row] == needed and row + 1 < rows:
                active.append(row + 1)

            if filled[row] == grid:
                active.remove(row)
    return groups


@lru_cache(maxsize=16)
def zipar_schedule(grid: int, window: int) -> Schedule:
    """The schedule for a window, for a grid of side ``grid``. If the window is as long as a row or longer, it is raster
    order.

    The transformer does not attend to undecided cells. In the published code, it attends to them as blanks, which takes
    attention from the decided cells (:attr:`Schedule.unwritten_visible`).
    """
    if window >= grid:
        return raster(grid)

    groups = row_groups(grid, window, grid)
    return Schedule(grid, next_token_passes(groups, grid, guidance_steps(groups, grid)))


# In each field: first the default and the tooltip, then the range.
# fmt: off
@dataclass(frozen=True)
class ZipARSettings(TokenSettings):
    """Settings of ZipAR (ICML 2025): a row starts when the row above is a window ahead."""

    removed: ClassVar[Mapping[str, Any]] = {"mask_undecoded": True}

    window: int = knob(8,
        "Number of tokens of a row that must be decided before the next row starts; a smaller number is faster, and "
        "the image is less coherent. Usual: 8 for images of 256 and 384 pixels, 16 for larger images; a window as "
        "long as the row gives the image of the unaccelerated sampler.",
        low=1, high=256, step=1, symbol="s")
    parallel: int = parallel_knob("passes", USUAL_PARALLEL,
        more=f"{PARALLEL_PASSES} On the demo with a window of 8, *parallel* 16 reduces the passes from 144 to 42.")
    entropy_temperature: float = entropy_temperature_knob("token")

    # fmt: on
    def exact(self, side: int) -> bool:
        return self.window >= side

    def no_gain(self, report: Report) -> str:
        return why_only_one_per_pass(report)

    def schedule(self, model: TokenModel) -> Schedule:
        return zipar_schedule(model.grid, self.window)


def check(model: TokenModel, settings: ZipARSettings) -> None:
    """Raise the UserError that the sampler would raise, before anything is loaded or computed."""
    check_raster("ZipAR", model, settings)


def zipar(
    model: TokenModel,
    condition: AnyCondition,
    settings: ZipARSettings,
    noise: TokenNoise,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images with ZipAR. If the window is as long as a row or longer, the tokens are identical to LlamaGen's.

    The arguments, steps and errors are those of :func:`.llamagen`, but the settings are :class:`ZipARSettings`.
    """
    check(model, settings)
    return decode_settings("zipar", model, condition, settings, noise, edit)
