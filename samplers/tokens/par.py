"""PAR: the picture is cut into M x M regions, and the same cell of all of them is decided in one pass.

Source: Wang et al. 2025, "Parallelized Autoregressive Visual Generation" (CVPR 2025, arXiv 2412.15119). Distant tokens
depend little on each other, so drawing them apart costs little. The first token of every region is decided one after
another, for they settle the picture; then learned transition tokens switch the network over, and from there a group of n
tokens predicts the next group, region by region, each token seeing its whole group.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ...errors import UserError
from ...model_loaders.networks.gpt import TokenModel
from ..conditioning import AnyCondition
from .draws import Draws
from .loop import TokenSampler, begin, decode
from .schedule import Pass, Schedule, group_clocks, next_token_passes, sequential_start
from .settings import ADJACENT, NON_LOCAL, TRAINED, PARSettings


def par_groups(grid: int, n: int) -> list[list[int]]:
    """Groups of cells in PAR's order: for every cell of a region in raster order, that cell of all n regions.

    Raises:
        UserError: the regions do not tile the grid.
    """
    m = math.isqrt(n)
    if m * m != n or grid % m:
        raise UserError(
            f"group: {n} regions do not tile a grid of {grid} x {grid}; choose a square whose root divides {grid}."
        )
    cells = np.arange(grid * grid).reshape(m, grid // m, m, grid // m)
    return cells.transpose(1, 3, 0, 2).reshape(-1, n).tolist()


def adjacent_groups(grid: int, n: int) -> list[list[int]]:
    """Groups of n cells next to each other in raster order; the last may be smaller."""
    return [list(range(c, min(c + n, grid * grid))) for c in range(0, grid * grid, n)]


@lru_cache(maxsize=16)
def par_schedule(grid: int, n: int, start: bool = True) -> Schedule:
    """Schedule of a network trained for PAR: n + (G * G - n) / n passes, or one for the start instead of n.

    The sequence is: condition, the n initial tokens, n - 1 transition tokens, the other groups. Initial tokens see what is
    before them; the last of them together with the transition tokens, and then every group, sees to its own end.
    """
    groups = par_groups(grid, n)
    first, rest = groups[0], groups[1:]
    clocks = group_clocks([[c] for c in first] + rest if start else groups, n if start else 1)
    passes = [Pass((c,), (0,)) for c in first[:1]] if start else [Pass(tuple(first), (0,) * n)]
    if start:
        for k in range(1, n):
            passes.append(Pass((first[k],), (0,), (first[k - 1],), 0, (first[k - 1],), (k - 1,), (k - 1,), clocks[k]))
    for j, group in enumerate(rest):
        clock = clocks[len(passes)]
        end = 2 * n - 2 + j * n
        if j:
            place, slot = tuple(rest[j - 1]), tuple(range(end - n + 1, end + 1))
            passes.append(Pass(tuple(group), tuple(range(n)), place, 0, place, slot, (end,) * n, clock))
            continue
        # The last initial token and the transition tokens; without a sequential start, the other initial tokens too.
        fed = tuple(first[-1:] if start else first)
        slot = tuple(range(end - n + 2 - len(fed), end + 1))
        sees = (*slot[: len(fed) - 1], *(end,) * n)
        by = tuple(range(len(fed) - 1, len(fed) - 1 + n))
        passes.append(Pass(tuple(group), by, fed, n - 1, (*fed, *(-1,) * (n - 1)), slot, sees, clock))
    return Schedule(grid, tuple(passes))


@lru_cache(maxsize=16)
def ablation_schedule(grid: int, n: int, adjacent: bool, start: bool) -> Schedule:
    """The groups of an ablation on a network that predicts the next cell; as many passes as :func:`par_schedule`."""
    groups = adjacent_groups(grid, n) if adjacent else par_groups(grid, n)
    if start:
        groups = sequential_start(groups)
    return Schedule(grid, next_token_passes(groups, grid, group_clocks(groups, n if start else 1)))


def par(
    model: TokenModel, condition: AnyCondition, settings: PARSettings, noise: Draws, seed: int | None = None
) -> TokenSampler:
    """PAR, and its ablations.

    Args:
        model, condition, noise, seed: as :func:`samplers.tokens.llamagen.llamagen`.
        settings: see :class:`PARSettings`.

    Raises:
        UserError: a grouping the network was not made for, or regions that do not tile its grid.
    """
    trained = model.regions > 1
    if trained and settings.grouping != TRAINED:
        raise UserError(
            f"grouping: {model.name} was trained for its own groups; choose {TRAINED!r}, or load a plain LlamaGen for the ablations."
        )
    if not trained and settings.grouping == TRAINED:
        raise UserError(
            f"grouping: {model.name} is a plain LlamaGen, which was trained for no groups; load a PAR, or choose "
            f"{NON_LOCAL!r} or {ADJACENT!r}."
        )
    if trained:
        schedule = par_schedule(model.grid, model.regions, settings.sequential_start)
    elif settings.group > model.tokens:
        raise UserError(f"group: {settings.group} is more than the picture's {model.tokens} tokens.")
    else:
        schedule = ablation_schedule(
            model.grid, settings.group, settings.grouping == ADJACENT, settings.sequential_start
        )
    return (yield from decode(begin("par", model, condition, settings, noise, seed, schedule)))
