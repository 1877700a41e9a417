"""GtR's stages: which cells each stage decides, and how a stage divides its tokens among its AR steps.

Source: Yan et al. (ICLR 2026, arXiv 2510.17171); ``__init__.py`` describes the method. Shapes: B images of L = grid x
grid cells. The stages are numbered from 0, and the last stage is the reconstruction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Values of the setting ``stages``. QUARTERS was our misreading of the paper; workflows that were saved before this
# setting existed need it.
PAPER = "paper"
QUARTERS = "quarters"


def stages_of_cells(grid: int, stages: str) -> Tensor:
    """GtR's stage of every cell of a ``grid`` x ``grid`` image, int64 [L]; the last stage is the reconstruction.

    The paper halves the structure (half of all cells), and then halves one half again. So the first three stages are an
    eighth, an eighth and a quarter of all cells. QUARTERS joins the first two stages. These are the stages of an 8 x 8
    grid, PAPER on the left and QUARTERS on the right::

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

    # All cells start in stage 3, the reconstruction. Then the cells of the structure move to stage 2. The
    # structure's cells in even rows move on to stage 0 or 1.
    stage = torch.full_like(cell, 3)
    stage[diagonal % 2 == 0] = 2
    in_even_row = (diagonal % 2 == 0) & (row % 2 == 0)
    alternating = diagonal % 4 // 2  # 0 and 1 in turn on the even diagonals
    stage[in_even_row] = alternating[in_even_row]
    return stage if stages == PAPER else (stage - 1).clamp(min=0)


def staged_after(sizes: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Number of masked tokens after each AR step of GtR's stages.

    Stage i divides its ``sizes[i]`` tokens evenly among its ``steps[i]`` AR steps. In some edits, a stage has fewer
    tokens than AR steps. It then takes one AR step for each token.
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
