"""ZipAR: a grid row starts when the first s tokens of the grid row above are decided; s is the *window*. One pass can
therefore decide tokens of several grid rows. As an exception, row 1 starts when the whole of row 0 is decided.

Source: He et al. 2025, "ZipAR: Parallel Autoregressive Image Generation through Spatial Locality" (ICML 2025, arXiv
2412.04062). In raster order, the transformer predicts the first token of a grid row from the last token of the grid row
above. In ZipAR, that last token may not be decided yet. As in the published code, the transformer then gets a nearby
decided token instead; see :func:`next_token_passes`.

FastAR does not implement the paper's adaptive window, for two reasons: the constants of that window are not in the
published code, and the images of a batch would start their grid rows in different passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from ...networks.llama import TokenModel
from ...reports.record import Report
from ..conditioning import AnyCondition
from ..editing import Edit
from ..engine import Sampler
from ..settings import Removed, knob
from .checks import check_raster
from .decode import decode_settings
from .schedule import Schedule, guidance_steps, next_token_passes, raster
from .settings import (
    PARALLEL_SAME,
    USUAL_PARALLEL,
    TokenSettings,
    entropy_temperature_knob,
    parallel_knob,
    why_only_one_per_pass,
)
from .token_noise import TokenNoise


def row_groups(grid: int, window: int, rows: int) -> list[list[int]]:
    """The cells that each pass decides, on a grid of ``grid`` x ``grid`` cells. Only the first ``rows`` rows are
    decided. The passes first decide row 0 cell by cell. After that, each pass decides one cell of every active row.

    Row 1 becomes active when row 0 is complete. For r > 0, row r + 1 becomes active when ``window`` cells of row r are
    decided. ``window`` is from 1 to ``grid`` - 1.

    On a grid of side G with the window s, all G rows take G + (G - 2) s + G passes: row 0 takes G passes; then row 1
    starts; the last row starts (G - 2) s passes later, and takes G passes.
    """
    groups = []
    filled = [0] * rows  # number of decided cells of every row
    active = [0]  # rows that have started and are not complete

    while active:
        groups.append([row * grid + filled[row] for row in active])
        for row in list(active):
            filled[row] += 1

            needed = window if row else grid
            if filled[row] == needed and row + 1 < rows:
                active.append(row + 1)

            if filled[row] == grid:
                active.remove(row)
    return groups


@lru_cache(maxsize=16)
def zipar_schedule(grid: int, window: int) -> Schedule:
    """The schedule of ZipAR for a grid of side ``grid``. If the window is as long as a grid row or longer, the cells
    are decided in raster order.

    The transformer does not attend to undecided cells. In the published code, the transformer attends to a blank token
    at each undecided cell, and the blank tokens take attention from the decided cells.
    """
    if window >= grid:
        return raster(grid)

    groups = row_groups(grid, window, grid)
    return Schedule(grid, next_token_passes(groups, grid, guidance_steps(groups, grid)))


# In each field: first the default and the tooltip, then the range.
# fmt: off
@dataclass(frozen=True)
class ZipARSettings(TokenSettings):
    """Settings of ZipAR (ICML 2025): a row starts when the first ``window`` tokens of the row above are decided."""

    removed: ClassVar[Mapping[str, Removed]] = {"mask_undecoded": Removed(True)}

    window: int = knob(8,
        "Number of tokens of a row that must be decided before the next row starts; a smaller number is faster, and "
        "the image is less coherent. Usual: 8 for images of 256 and 384 pixels, 16 for larger images; if the "
        "window has the length of a row, the image is the same as the unaccelerated sampler's.",
        low=1, high=256, step=1, symbol="s")
    parallel: int = parallel_knob("passes whose tokens are guessed ahead", USUAL_PARALLEL,
        more=PARALLEL_SAME)
    entropy_temperature: float = entropy_temperature_knob("token")

    # fmt: on
    def exact(self, side: int) -> bool:
        return self.window >= side

    def no_gain(self, report: Report) -> str:
        return why_only_one_per_pass(report)

    def schedule(self, model: TokenModel) -> Schedule:
        return zipar_schedule(model.grid, self.window)


def check(model: TokenModel, settings: ZipARSettings) -> None:
    """Check that ZipAR can run a model with these settings, before anything is loaded or computed.

    Raises the errors of :func:`.check_raster`.
    """
    check_raster("ZipAR", model, settings)


def zipar(
    model: TokenModel,
    condition: AnyCondition,
    settings: ZipARSettings,
    noise: TokenNoise,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images with ZipAR. If the window is as long as a grid row or longer, the tokens are identical to
    LlamaGen's.

    The arguments, steps and errors are the same as for :func:`.llamagen`, but the settings are :class:`ZipARSettings`.
    """
    check(model, settings)
    return decode_settings("zipar", model, condition, settings, noise, edit)
