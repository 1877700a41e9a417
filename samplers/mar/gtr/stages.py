"""GtR's stages: which cells each stage decides, and how the tokens of a stage are divided among its AR steps.

Source: Yan et al. (ICLR 2026, arXiv 2510.17171); ``__init__.py`` describes the method. Shapes: B images of L = grid x
grid cells. The stages are numbered from 0; the last stage is the reconstruction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# How GtR divides the cells into stages: as in the paper, or in quarters, for workflows from FastAR's first months.
PAPER = "paper"
QUARTERS = "quarters"


def stages_of_cells(grid: int, stages: str) -> Tensor:
    """GtR's stage of every cell of a ``grid`` x ``grid`` image, int64 [L]; the last stage is the reconstruction.

    The paper halves the structure, and then halves one half again. So the first three stages are an eighth, an eighth
    and a quarter of all cells. QUARTERS joins the first two stages. Stages of an 8 x 8 grid, PAPER on the left and
    QUARTERS on the right::

        0 3 1 3 0 3 1 3      0 2 0 2 0 2 0 2
        3 2 3 2 3 2 3 2      2 1 2 1 2 1 2 1
        1 3 0 3 1 3 0 3      0 2 0 2 0 2 0 2
        3 2 3 2 3 2 3 2      2 1 2 1 2 1 2 1
        0 3 1 3 0 3 1 3      0 2 0 2 0 2 0 2
        3 2 3 2 3 2 3 2      2 1 2 1 2 1 2 1
        1 3 0 3 1 3 0 3      0 2 0 2 0 2 0 2
        3 2 3 2 3 2 3 2      2 1 2 1 2 1 2 1
    """
    cell = torch.arange(grid * grid)
    row = cell // grid
    diagonal = row + cell % grid

    # All cells start as reconstruction. Then the structure becomes stage 2, and its cells in even rows stage 0 or 1.
    stage = torch.full_like(cell, 3)
    stage[diagonal % 2 == 0] = 2
    in_even_row = (diagonal % 2 == 0) & (row % 2 == 0)
    alternating = diagonal % 4 // 2  # on even diagonals: 0 and 1 by turns
    stage[in_even_row] = alternating[in_even_row]
    return stage if stages == PAPER else (stage - 1).clamp(min=0)


def staged_after(sizes: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Number of masked tokens after each AR step of GtR's stages.

    Stage i divides its ``sizes[i]`` tokens evenly among its ``steps[i]`` AR steps. If it has fewer tokens than AR
    steps, as in some edits, it takes one AR step for each token.
    """
    left = sum(sizes)
    out: list[int] = []
    for size, stage_step_count in zip(sizes, steps, strict=True):
        count = min(size, stage_step_count)
        out += [left - size * (s + 1) // count for s in range(count)]
        left -= size
    return out


def in_stages(orders: Tensor, stages: Tensor) -> Tensor:
    """Orders, int64 [B, L], that decide one stage after another. ``stages``: int64 [L] from :func:`stages_of_cells`.

    Within a stage, the cells keep their order in ``orders``.
    """
    return orders.gather(1, stages[orders].argsort(dim=1, stable=True))
