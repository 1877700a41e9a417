"""PAR: the image is divided into M x M regions, and the same cell of all regions is decided in one pass.

Source: Wang et al. 2025, "Parallelized Autoregressive Visual Generation" (CVPR 2025, arXiv 2412.15119). Distant tokens
depend weakly on each other and can be drawn independently. The first tokens of the regions are decided one after another,
because they fix the global structure. Learned transition tokens then switch to parallel decoding: every group of n tokens
predicts the next group, region by region, with attention to the whole group.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ...errors import UserError
from ...model_loaders.networks.llama import TokenModel
from ..conditioning import AnyCondition
from ..editing import Edit
from .draws import PairedDraws
from .llamagen import decode
from .loop import TokenSampler, begin, raster_only
from .schedule import Pass, Schedule, group_clocks, next_token_passes
from .settings import ADJACENT, NON_LOCAL, TRAINED, PARSettings


def par_groups(grid: int, n: int) -> list[list[int]]:
    """Groups of cells in PAR's order: for each cell of a region in raster order, that cell of all n regions.

    Raises:
        UserError: the regions do not tile the grid.
    """
    m = math.isqrt(n)
    if m * m != n or grid % m:
        what = f"{n} regions do not tile a grid of {grid} x {grid}"
        raise UserError(f"group: {what}; choose a square whose root divides {grid}.")
    cells = np.arange(grid * grid).reshape(m, grid // m, m, grid // m)
    return cells.transpose(1, 3, 0, 2).reshape(-1, n).tolist()


@lru_cache(maxsize=16)
def par_schedule(grid: int, n: int, start: bool = True) -> Schedule:
    """Schedule of a network trained for PAR: n + (G * G - n) / n passes; without a sequential ``start`` 1 + (G * G - n) / n.

    The sequence is: condition, the n initial tokens, n - 1 transition tokens, the other groups. Initial tokens attend to
    what precedes them. The last initial token together with the transition tokens, and then every group, attend up to their
    own end.
    """
    groups = par_groups(grid, n)
    first, rest = groups[0], groups[1:]
    clocks = group_clocks([[c] for c in first] + rest if start else groups, n if start else 1)
    # Step 1: the initial tokens, one after another (or all from the prefill).
    passes = [Pass((first[0],), (0,))] if start else [Pass(tuple(first), (0,) * n)]
    for k in range(1, n if start else 1):
        passes.append(Pass((first[k],), (0,), (first[k - 1],), 0, (first[k - 1],), (k - 1,), (k - 1,), clocks[k]))
    for j, group in enumerate(rest):
        clock = clocks[len(passes)]
        end = 2 * n - 2 + j * n
        if j:
            # Step 3: every group predicts the next one.
            position, slot = tuple(rest[j - 1]), tuple(range(end - n + 1, end + 1))
            passes.append(Pass(tuple(group), tuple(range(n)), position, 0, position, slot, (end,) * n, clock))
            continue
        # Step 2: the last initial token (without a sequential start, all of them) and the transition tokens predict group 1.
        fed = tuple(first[-1:] if start else first)
        slot = tuple(range(end - n + 2 - len(fed), end + 1))
        last_visible = (*slot[: len(fed) - 1], *(end,) * n)
        rows = tuple(range(len(fed) - 1, len(fed) - 1 + n))
        position = (*fed, *(-1,) * (n - 1))
        passes.append(Pass(tuple(group), rows, fed, n - 1, position, slot, last_visible, clock))
    return Schedule(grid, tuple(passes))


@lru_cache(maxsize=16)
def ablation_schedule(grid: int, n: int, adjacent: bool, start: bool) -> Schedule:
    """The paper's ablations on a network that predicts the next cell; as many passes as :func:`par_schedule`."""
    cells = list(range(grid * grid))
    groups = [cells[c : c + n] for c in range(0, len(cells), n)] if adjacent else par_groups(grid, n)
    if start:
        groups = [*([c] for c in groups[0]), *groups[1:]]
    return Schedule(grid, next_token_passes(groups, grid, group_clocks(groups, n if start else 1)))


def par(
    model: TokenModel,
    condition: AnyCondition,
    settings: PARSettings,
    noise: PairedDraws,
    seed: int | None = None,
    edit: Edit | None = None,
) -> TokenSampler:
    """PAR and its ablations; arguments and errors as :func:`samplers.tokens.llamagen.llamagen`.

    Raises:
        UserError: a grouping that the network was not trained for, or regions that do not tile its grid.
    """
    trained = model.regions > 1
    if not trained:
        raster_only("PAR", model, janus="needs a model that was trained in its order")
    if trained and settings.grouping != TRAINED:
        raise UserError(
            f"grouping: {model.name} was trained for its own groups; choose {TRAINED!r}, or load a plain LlamaGen for the ablations."
        )
    if not trained and settings.grouping == TRAINED:
        raise UserError(
            f"grouping: {model.name} is a plain LlamaGen, which was trained for no groups; load a PAR, or choose "
            f"{NON_LOCAL!r} or {ADJACENT!r}."
        )
    start, adjacent = settings.sequential_start, settings.grouping == ADJACENT
    if trained:
        schedule = par_schedule(model.grid, model.regions, start)
    elif settings.group > model.tokens:
        raise UserError(f"group: {settings.group} is more than the picture's {model.tokens} tokens.")
    else:
        schedule = ablation_schedule(model.grid, settings.group, adjacent, start)
    run = begin("par", model, condition, settings, noise, seed, edit)
    return (yield from decode(run, schedule, settings.parallel))
