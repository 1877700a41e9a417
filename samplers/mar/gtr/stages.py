"""GtR's stages: which cells each stage decides, how many AR steps each stage has, and how a stage divides its tokens
among its AR steps.

Source: Yan et al. (ICLR 2026, arXiv 2510.17171); ``__init__.py`` describes the method. Shapes: B images of L = grid x
grid cells. The stages are numbered from 0, and the last stage is the reconstruction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....errors import UserError

# Values of the setting ``stages``. QUARTERS was our misreading of the paper; workflows that were saved before this
# setting existed need it.
PAPER = "paper"
QUARTERS = "quarters"


def stages_of_cells(grid: int, stages: str) -> Tensor:
    """GtR's stage of every cell of a ``grid`` x ``grid`` image, int64 [L]; the last stage is the reconstruction.

    The structure is half of all cells. The paper divides the structure into two halves, and one of these halves into
    two halves again. So the first three stages have an eighth, an eighth and a quarter of all cells. QUARTERS joins the
    first two stages into one.

    These are the stages of an 8 x 8 grid, PAPER on the left and QUARTERS on the right::

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

    # Put all cells in stage 3, the reconstruction. Then move the cells of the structure to stage 2. Then move the
    # structure's cells in even rows to stage 0 or 1.
    stage = torch.full_like(cell, 3)
    stage[diagonal % 2 == 0] = 2
    in_even_row = (diagonal % 2 == 0) & (row % 2 == 0)
    alternating = diagonal % 4 // 2  # 0 and 1 in turn on the even diagonals
    stage[in_even_row] = alternating[in_even_row]
    return stage if stages == PAPER else (stage - 1).clamp(min=0)  # QUARTERS numbers 0, 1, 2, 3 as 0, 0, 1, 2


def stage_count(stages: str) -> int:
    """Number of stages, including the reconstruction. ``stages``: PAPER or QUARTERS."""
    return 4 if stages == PAPER else 3


# --- the AR steps of each stage


def steps_of_paper(share: float, steps: int) -> tuple[int, int, int]:
    """Divide ``steps`` AR steps among the three stages before the reconstruction, as in the paper; ``steps`` must be at
    least 3.

    The first stage takes ``share`` of all these AR steps, and the second stage takes ``share`` of the rest. For
    example, 16 AR steps and a share of 0.75 give 12, 3 and 1.
    """
    first = _share_of(steps, share, at_most=steps - 2)
    rest = steps - first
    second = _share_of(rest, share, at_most=rest - 1)
    return first, second, rest - second


def steps_of_quarters(share: float, all_steps: int, steps: int) -> tuple[int, int]:
    """Divide ``steps`` AR steps among the two stages before the reconstruction, with QUARTERS; ``steps`` must be at
    least 2.

    The first stage takes ``share`` of ``all_steps``, the number of AR steps including the reconstruction.
    """
    first = _share_of(all_steps, share, at_most=steps - 1)
    return first, steps - first


def _share_of(steps: int, share: float, at_most: int) -> int:
    """``share`` of ``steps`` AR steps, rounded, at least 1 and at most ``at_most``."""
    return min(max(1, round(share * steps)), at_most)


# --- the tokens of each stage


def stage_sizes(grid: int, stages: str, regenerated: Tensor | None = None) -> tuple[int, ...]:
    """Number of tokens of each stage, the reconstruction last.

    Args:
        grid: number of tokens along one side of the image.
        stages: PAPER or QUARTERS.
        regenerated: in an edit, the tokens to decide, bool [B, L].

    Raises:
        UserError: in an edit, a stage does not have the same number of tokens in every image.
    """
    stage = stages_of_cells(grid, stages)
    count = stage_count(stages)
    if regenerated is None:
        return tuple(stage.bincount(minlength=count).tolist())

    sizes = [stage[mask].bincount(minlength=count).tolist() for mask in regenerated.cpu()]  # one list for each image
    if any(image_sizes != sizes[0] for image_sizes in sizes):
        raise UserError(
            "mask: in one of GtR's stages, the masks of the batch cover different numbers of tokens; use one mask "
            "for all images of the batch, or run the images separately."
        )
    return tuple(sizes[0])


def expect_enough_tokens(sizes: Sequence[int], steps: Sequence[int]) -> None:
    """Raise a UserError if a stage has more AR steps than tokens. This is for whole images, not for an edit.

    ``sizes``, ``steps``: the number of tokens and of AR steps of each stage.
    """
    *before, (last_size, last_steps) = zip(sizes, steps, strict=True)
    names = ("first", "second", "third")  # QUARTERS has no third stage before the last
    for name, (size, stage_step_count) in zip(names, before, strict=False):
        if stage_step_count > size:
            raise UserError(
                f"steps: GtR's {name} stage has only {size} tokens for {stage_step_count} AR steps; use fewer, "
                "or change first_share."
            )
    if last_steps > last_size:
        raise UserError(
            f"reconstruction_steps: GtR's last stage has only {last_size} tokens for {last_steps} AR steps; "
            "lower reconstruction_steps."
        )


# --- the plan


def staged_after(sizes: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Number of masked tokens after each AR step of GtR's stages.

    Stage i divides its ``sizes[i]`` tokens evenly among its ``steps[i]`` AR steps. In some edits, a stage has fewer
    tokens than AR steps. Such a stage takes one AR step for each token.
    """
    masked = sum(sizes)  # number of masked tokens before the first AR step of the present stage
    masked_after: list[int] = []
    for size, stage_step_count in zip(sizes, steps, strict=True):
        count = min(size, stage_step_count)
        masked_after += [masked - size * (s + 1) // count for s in range(count)]
        masked -= size
    return masked_after


def in_stages(orders: Tensor, stages: Tensor) -> Tensor:
    """Orders, int64 [B, L], that decide one stage after another. ``stages``: int64 [L] from :func:`stages_of_cells`.

    Within a stage, the cells keep their order in ``orders``.
    """
    stages_in_order = stages[orders]  # the stage of each entry of ``orders``, [B, L]
    return orders.gather(1, stages_in_order.argsort(dim=1, stable=True))
