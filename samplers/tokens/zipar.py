"""ZipAR: a row starts when the row above is a window ahead, so several rows are decoded in parallel.

Source: He et al. 2025, "ZipAR: Parallel Autoregressive Image Generation through Spatial Locality" (ICML 2025, arXiv
2412.04062). The first token of a row is predicted from the last cell of the row above, which is not decided yet; as in
the published code, a decided token near it is fed in its place (see :func:`next_token_passes`).

The paper's adaptive window is not implemented: its constants are not in the published code, and the start of a row
would depend on the tokens of each image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

from ...networks.llama import TokenModel
from ...reports.record import Report
from ..settings import knob
from .checks import check_raster
from .llamagen import scheduled
from .schedule import Schedule, guidance_steps, next_token_passes, raster
from .settings import (
    PARALLEL_PASSES,
    USUAL_PARALLEL,
    TokenSettings,
    entropy_temperature_knob,
    one_a_pass,
    parallel_knob,
)


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
def windowed(grid: int, window: int) -> Schedule:
    """The schedule for a window; raster order if the window is a row or wider.

    Undecided cells are hidden. The published code shows them as blanks, which take attention from the decided cells
    (:attr:`Schedule.unwritten_visible`).
    """
    if window >= grid:
        return raster(grid)

    groups = row_groups(grid, window, grid)
    return Schedule(grid, next_token_passes(groups, grid, guidance_steps(groups, grid)))


# In each field: first the default and the help sentence, then the range.
# fmt: off
@dataclass(frozen=True)
class ZipARSettings(TokenSettings):
    """ZipAR (ICML 2025): a row starts when the row above is a window ahead."""

    removed: ClassVar[Mapping[str, Any]] = {"mask_undecoded": True}

    window: int = knob(8,
        "Number of tokens of a row that must be decided before the next row starts; a smaller number is faster, and "
        "the image is less coherent. Usual: 8 for images of 256 and 384 pixels, 16 for larger images; a window as "
        "long as the row gives the image of the unaccelerated sampler.",
        low=1, high=256, step=1, symbol="s")
    parallel: int = parallel_knob("passes", USUAL_PARALLEL,
        more=f"{PARALLEL_PASSES} On the demo with a window of 8, *parallel* 16 reduces the passes from 144 to 44.")
    entropy_temperature: float = entropy_temperature_knob("token")

    # fmt: on
    def exact(self, side: int) -> bool:
        return self.window >= side

    def no_gain(self, report: Report) -> str:
        return one_a_pass(report)

    def schedule(self, model: TokenModel) -> Schedule:
        return windowed(model.grid, self.window)


# check(model, settings) raises what the sampler would, before anything is loaded or computed.
check = partial(check_raster, "ZipAR")
# If the window is a row or wider, the tokens are those of LlamaGen.
zipar = scheduled("zipar", check)
