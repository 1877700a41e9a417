"""The two models of a MuLo-SD generation (``mulosd.py``), its blocks of rows, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...model_loaders.networks.llama import TokenModel
from ..conditioning import AnyCondition
from ..engine import Step
from .canvas import TokenCanvas, blank
from .defaults import resolve
from .draws import PairedDraws
from .looks import CachedTransformer
from .prepare import prepare
from .sampling import TokenDraw
from .schedule import Schedule, next_token_passes
from .settings import MuLoSDSettings, guides, rows_at_once
from .upsampling import UpSampling
from .zipar import row_groups


@dataclass(frozen=True)
class Block:
    """Rows ``row`` to ``end`` - 1 of the draft's grid, which cover the cells ``first`` to ``last`` - 1 of the
    target's.
    """

    row: int
    end: int
    first: int
    last: int
    before: int  # first cell of the block before, which the target reads again with this one
    schedule: Schedule  # passes of the draft model; the first one is empty but in the first block

    @property
    def is_first(self) -> bool:
        return self.row == 0

    @property
    def cells(self) -> int:
        """Cells of the target in it."""
        return self.last - self.first

    # Progress counts the cells of the target twice: when they are drafted, and when they are final. How many passes the
    # islands of a block take is known only after its verification, so passes have no total that stays.

    def drafted(self, passes: int) -> int:
        """The progress after so many passes of the draft model in the block."""
        planned = sum(bool(p.cells) for p in self.schedule.passes)
        return 2 * self.first + self.cells * passes // planned

    def repaired(self, passes: int, planned: int) -> int:
        """The progress after so many of the target's planned passes in the block."""
        return 2 * self.first + self.cells + self.cells * passes // planned


def blocks_of(settings: MuLoSDSettings, small: int, ratio: int) -> list[Block]:
    """The blocks of a draft of ``small`` x ``small`` tokens on a grid of ``ratio`` times the side."""
    rows = rows_at_once(settings, small)
    covered = ratio * ratio * small  # cells of the target that a row of the draft covers
    blocks = []
    for row in range(0, small, rows):
        end = min(row + rows, small)
        before = max(0, row - rows)
        schedule = draft_schedule(small, settings.draft_window, row, end - row, fed_again=row - before)
        blocks.append(Block(row, end, row * covered, end * covered, before * covered, schedule))
    return blocks


class Reader(NamedTuple):
    """One of the two models in a generation."""

    canvas: TokenCanvas  # its image; both share report and clock
    look: CachedTransformer
    draw: TokenDraw


def draft_reader(
    canvas: TokenCanvas, draft: TokenModel, condition: AnyCondition, noise: PairedDraws, ratio: int
) -> Reader:
    """The draft model M_q in the generation of ``canvas``."""
    # Guidance covers the same part of the draft as of the target.
    own = canvas.settings
    if own.cfg_interval is not None:
        own = replace(own, cfg_interval=own.cfg_interval // ratio**2)

    prepared = prepare(draft, condition, draft.device)
    drafted = blank(draft, draft.grid, resolve(own, draft), noise, canvas.report, clock=canvas.clock)
    drafted.phases = ("draft", "draft")
    return Reader(drafted, CachedTransformer(drafted, prepared), TokenDraw(drafted, stream="draft"))


@dataclass(eq=False)
class State:
    """A generation with two models, and how far it is."""

    target: Reader  # M_p
    draft: Reader  # M_q
    settings: MuLoSDSettings
    up_sampler: UpSampling
    ratio: int  # r
    neighbours: Tensor  # int32 [V, 1 + k], see islands.py
    blocks: list[Block]
    done: int = 0  # passes of both models that have ended; the number of the present one
    pools: list[Tensor] = field(default_factory=list)  # pooled probabilities fp32 [B * n] of every block
    maps: dict[str, np.ndarray] = field(default_factory=dict)  # "islands" and "waves", int32 [B, G, G]

    def __post_init__(self) -> None:
        canvas = self.target.canvas
        for name in ("islands", "waves"):
            self.maps[name] = np.zeros((canvas.images, *canvas.grid), np.int32)

    @property
    def null(self) -> bool:
        """Whether the rows of the null condition are evaluated."""
        return guides(self.settings)

    def end_pass(self, progress: int) -> Iterator[Step]:
        """End a pass of the target; yields the partial result."""
        self.done += 1
        return self.target.canvas.show(progress)

    def end_draft_pass(self, block: Block, passes: int) -> Iterator[Step]:
        """End a pass of the draft model, number ``passes`` of the block; yields the partial result, in which the
        draft's tokens of the block are repeated over the cells that they cover.
        """
        canvas = self.target.canvas
        canvas.report.add(draft_passes=1)
        self.done += 1

        @torch.inference_mode(False)
        def view() -> tuple[Tensor, Tensor]:
            of_target, decided = canvas.view()
            codes, drafted = (
                values.repeat_interleave(self.ratio, 1).repeat_interleave(self.ratio, 2)
                for values in self.draft.canvas.view()
            )
            drafted[:, : block.row * self.ratio] = False
            return torch.where(drafted, codes, of_target), decided | drafted

        return canvas.show(block.drafted(passes), view)


@lru_cache(maxsize=64)
def draft_schedule(grid: int, window: int, first: int, rows: int, fed_again: int) -> Schedule:
    """Passes in which the draft model generates ``rows`` of its grid behind the ``first`` ones, of which the last
    ``fed_again`` are fed once more.

    ``window``: ZipAR's; 0, or a row or wider, is raster order. Guidance counts tokens, as in serial decoding.
    """
    known = first * grid
    if 0 < window < grid:
        groups = row_groups(grid, window, rows)
    else:
        groups = [[cell] for cell in range(rows * grid)]

    decided = known
    behind = []
    cfg_steps = []
    for group in groups:
        behind.append([known + cell for cell in group])
        cfg_steps.append(decided - 1)
        decided += len(group)
    return Schedule(grid, next_token_passes(behind, grid, cfg_steps, known, fed_again * grid), known=known)
