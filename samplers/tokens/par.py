"""PAR: the image is divided into n = M x M regions. One pass decides one cell in every region, at the same row and
column of each region.

Source: Wang et al. 2025, "Parallelized Autoregressive Visual Generation" (CVPR 2025, arXiv 2412.15119). Distant tokens
depend only weakly on each other, so they can be sampled independently. The first tokens of the regions, the *initial
tokens*, determine the global structure, so they are decided one after another (the *sequential start*). Learned
*transition tokens* then switch the network to parallel decoding. From then on, every group of n tokens, one from each
region, predicts the next group. Each token of a group attends to the whole group, and predicts the next token of its
own region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from ...errors import UserError
from ...networks.llama import FEATURES, TokenModel
from ...reports.record import Report
from ..conditioning import AnyCondition
from ..editing import Edit
from ..engine import Sampler
from ..settings import Removed, knob
from .checks import expect_raster
from .decode import decode_settings
from .schedule import FedRow, Pass, Schedule, guidance_steps, next_token_passes
from .settings import (
    PARALLEL_SAME,
    USUAL_PARALLEL,
    TokenSettings,
    cfg_knob,
    entropy_temperature_knob,
    parallel_knob,
    sampling_of,
    top_k_knob,
    why_only_one_per_pass,
)
from .token_noise import TokenNoise

# Choices of the setting "grouping".
TRAINED = "from checkpoint"
NON_LOCAL = "ablation: non-local"
ADJACENT = "ablation: adjacent"
# Number of tokens that an ablation decides in one pass, as in the paper's PAR-4x.
ABLATION_GROUP = 4


def par_groups(grid: int, regions: int) -> list[list[int]]:
    """Groups of cells in PAR's order. Group i holds cell i of every region, counted in raster order in the region.

    Raises:
        UserError: the regions do not tile the grid.
    """
    m = math.isqrt(regions)
    if m * m != regions or grid % m:
        raise UserError(
            f"grouping: {regions} regions do not fit into a grid of {grid} x {grid}; choose {ADJACENT!r}, or a model "
            f"whose grid is divisible by {m}."
        )

    # The axes region_row and region_column say in which region a cell is. The axes row and column say where it is in
    # this region.
    side = grid // m
    cells = np.arange(grid * grid).reshape(m, side, m, side)  # [region_row, row, region_column, column]
    groups = cells.transpose(1, 3, 0, 2)  # [row, column, region_row, region_column]
    return groups.reshape(-1, regions).tolist()


@lru_cache(maxsize=16)
def par_schedule(grid: int, regions: int, sequential_start: bool = True) -> Schedule:
    """Schedule of a network that was trained for PAR with n ``regions``, on a grid of G x G cells. The schedule has
    n + (G * G - n) / n passes, or 1 + (G * G - n) / n passes without a sequential start.

    The model reads the condition, the n initial tokens (i), n - 1 transition tokens (t), and then the later groups. For
    n = 4, where a and b are the tokens of the first two later groups::

        place   0  1  2  3  4  5  6  7  8  9  10 ...
        token   i  i  i  i  t  t  t  a  a  a  a  ...
                         predict a   predict b

    Each initial token except the last attends to itself and to everything before it. The last initial token and the
    transition tokens form one group. In this group and in every later group, each token attends to the whole group and
    to everything before the group.
    """
    initial, *later_groups = par_groups(grid, regions)
    passes = []

    # 1. The initial tokens, at places 0 to n - 1, are decided one after another. Without a sequential start, the
    #    prefill predicts all initial tokens.
    if sequential_start:
        first_groups = [[cell] for cell in initial]
    else:
        first_groups = [initial]
    first_count = len(first_groups)
    cfg_steps = guidance_steps([*first_groups, *later_groups], first_count)
    passes.append(Pass(cells=tuple(first_groups[0]), predicted_by=(0,) * len(first_groups[0])))
    for k in range(1, first_count):
        passes.append(group_pass(first_groups[k - 1], first_groups[k], k - 1, cfg_steps[k]))

    # 2. One pass feeds the initial tokens that were not fed yet and the transition tokens. This pass decides the first
    #    of the later groups.
    if later_groups:
        passes.append(transition_pass(first_groups[-1], later_groups[0], cfg_steps[first_count]))

    # 3. Each later group predicts the next group. The places of these groups come after the n initial tokens and the
    #    n - 1 transition tokens. For n = 4, group a is at places 7 to 10, and group b is at places 11 to 14.
    place = regions + (regions - 1)
    for k in range(1, len(later_groups)):
        passes.append(group_pass(later_groups[k - 1], later_groups[k], place, cfg_steps[first_count + k]))
        place += regions

    return Schedule(grid, tuple(passes))


def transition_pass(fed: Sequence[int], cells: Sequence[int], cfg_step: int) -> Pass:
    """The pass that feeds the n - 1 transition tokens, and decides the n cells of the first later group.

    It also feeds the initial tokens that were not fed yet. The last initial token and the transition tokens attend to
    each other, and predict the n cells. For n = 4::

        sequential start    fed             place           last_visible    predicted_by
        with                i t t t         3 4 5 6         6 6 6 6         0 1 2 3
        without             i i i i t t t   0 1 2 3 4 5 6   0 1 2 6 6 6 6   3 4 5 6

    Args:
        fed: cells of the initial tokens that were not fed yet: only the last, or all n without a sequential start.
        cells: cells of the first later group.
        cfg_step: see :class:`.Pass`.
    """
    n = len(cells)
    last_place = 2 * n - 2  # place of the last transition token
    *earlier, last_initial = fed

    # With a sequential start, ``earlier`` is empty.
    rows = [FedRow(position=cell, place=place, last_visible=place, cell=cell) for place, cell in enumerate(earlier)]
    rows.append(FedRow(position=last_initial, place=n - 1, last_visible=last_place, cell=last_initial))
    rows += [FedRow(position=-1, place=n + i, last_visible=last_place, transition_token=i) for i in range(n - 1)]
    return Pass(
        cells=tuple(cells),
        predicted_by=tuple(range(len(earlier), len(rows))),
        fed_rows=tuple(rows),
        cfg_step=cfg_step,
    )


def group_pass(fed: Sequence[int], cells: Sequence[int], first_place: int, cfg_step: int) -> Pass:
    """The pass that feeds the tokens of one group and decides the cells of the next group.

    Fed token i predicts cell i of the next group. Each fed token attends to its whole group and to everything before
    the group. If the group has 4 tokens and ``first_place`` is 7, the fed tokens are at places 7 to 10, and all of them
    attend to places up to 10.

    Args:
        fed: cells whose tokens are fed: a group of n cells, or the cell of one initial token.
        cells: cells of the next group, one for each fed token.
        first_place: place of the first fed token.
        cfg_step: see :class:`.Pass`.
    """
    last_place = first_place + len(fed) - 1
    rows = [
        FedRow(position=cell, place=place, last_visible=last_place, cell=cell)
        for place, cell in enumerate(fed, first_place)
    ]
    return Pass(
        cells=tuple(cells),
        predicted_by=tuple(range(len(cells))),
        fed_rows=tuple(rows),
        cfg_step=cfg_step,
    )


@lru_cache(maxsize=16)
def ablation_schedule(grid: int, group_size: int, adjacent: bool, sequential_start: bool) -> Schedule:
    """Schedule of the paper's ablations, for a network that predicts the next cell. The schedule has the same number of
    passes as :func:`par_schedule` with ``group_size`` regions.

    Args:
        grid: side of the grid.
        group_size: number of cells in a group.
        adjacent: if True, a group holds successive cells in raster order; if False, see :func:`par_groups`.
        sequential_start: whether the cells of the first group are decided one after another.
    """
    cells = list(range(grid * grid))
    if adjacent:
        groups = [cells[c : c + group_size] for c in range(0, len(cells), group_size)]
    else:
        groups = par_groups(grid, group_size)

    sequential_groups = 1
    if sequential_start:
        sequential_groups = len(groups[0])
        groups = [*([c] for c in groups[0]), *groups[1:]]

    return Schedule(grid, next_token_passes(groups, grid, guidance_steps(groups, sequential_groups)))


# In each field: first the default and the tooltip, then the range.
# fmt: off
@dataclass(frozen=True)
class PARSettings(TokenSettings):
    """PAR (CVPR 2025): after the first tokens, each pass decides one token of every region of the image."""

    removed: ClassVar[Mapping[str, Removed]] = {"group": Removed(ABLATION_GROUP)}

    cfg: float | None = cfg_knob("1.3 to 1.5 for a PAR model",
        "For the demo, use 1.5.")
    top_k: int | None = top_k_knob("0 for a PAR model", "")
    grouping: str = knob(TRAINED,
        "Which tokens are decided in the same pass. Usual: from checkpoint, the groups with which the PAR model was "
        "trained. The other two choices repeat the paper's experiments with a LlamaGen: a group of 'ablation: "
        "non-local' has one token of every region, and a group of 'ablation: adjacent' has neighbouring tokens of one "
        "row.",
        choices=(TRAINED, NON_LOCAL, ADJACENT))
    sequential_start: bool = knob(True,
        "Decides the first tokens of the regions one after another, so that the regions fit together. When this is "
        "off, one pass decides the first tokens of all regions, as in an experiment of the paper; this saves a few "
        "passes, but the regions fit together less well.",
        advanced=True)
    parallel: int = parallel_knob("passes whose tokens are guessed ahead", USUAL_PARALLEL, more=PARALLEL_SAME)
    entropy_temperature: float = entropy_temperature_knob("token")

    # fmt: on
    def exact(self, side: int) -> bool:
        return False

    def no_gain(self, report: Report) -> str:
        return why_only_one_per_pass(report)

    def schedule(self, model: TokenModel) -> Schedule:
        """The passes of PAR or of an ablation.

        Raises:
            UserError: the model is a Janus; the network was not trained for the grouping; or the regions do not tile
                the grid.
        """
        if model.regions > 1:  # a network that was trained for PAR
            if self.grouping != TRAINED:
                raise UserError(
                    f"grouping: {model.name} is a PAR model, which was trained for its own groups; choose {TRAINED!r}, "
                    f"or load a LlamaGen instead of the PAR model to use {NON_LOCAL!r} or {ADJACENT!r}."
                )
            return par_schedule(model.grid, model.regions, self.sequential_start)

        expect_raster("PAR", model, why_no_janus="PAR needs a model that was trained in PAR's order")
        if self.grouping == TRAINED:
            raise UserError(
                f"grouping: {model.name} is a LlamaGen, which was not trained for groups; load a PAR model, or choose "
                f"{NON_LOCAL!r} or {ADJACENT!r}."
            )
        return ablation_schedule(model.grid, ABLATION_GROUP, self.grouping == ADJACENT, self.sequential_start)


def check(model: TokenModel, settings: PARSettings) -> None:
    """Check that PAR can run a model with these settings, before anything is loaded or computed.

    Raises:
        UserError: the model is a Tar de-tokenizer or a Janus; the network was not trained for the grouping; the regions
            do not tile the grid; or the settings need guidance, but the model was trained without a null class.
    """
    if model.condition == FEATURES:
        raise UserError(
            f"model: {model.name} is a Tar de-tokenizer, which decides its tokens row by row; choose a PAR model, or "
            "use the LlamaGen Sampler or the ZipAR Sampler."
        )
    settings.schedule(model)  # raises for a Janus, and if the grouping does not fit the network or the grid
    sampling_of(settings, model)  # raises if the settings need guidance, but the model has no null class


def par(
    model: TokenModel,
    condition: AnyCondition,
    settings: PARSettings,
    noise: TokenNoise,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images with PAR, or with one of the paper's ablations.

    The arguments, steps and errors are the same as for :func:`.llamagen`, but the settings are :class:`PARSettings`.
    :func:`check` states which models fit.
    """
    check(model, settings)
    return decode_settings("par", model, condition, settings, noise, edit)
