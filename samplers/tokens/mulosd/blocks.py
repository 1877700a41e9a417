"""MuLo-SD's blocks of rows, and the draft model, which generates them at low resolution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ....networks.llama import TokenModel
from ...conditioning import AnyCondition
from ...engine import Step, decode
from ..cache_slots import slots_of, table_of
from ..canvas import TokenCanvas, blank
from ..defaults import resolve
from ..jacobi import iterate
from ..looks import ScheduleLook, plan_of
from ..prepare import prepare
from ..sampling import TokenDraw, guided_passes
from ..schedule import Schedule, next_token_passes
from ..settings import MuLoSDSettings, rows_at_once
from ..zipar import row_groups
from .upsampling import UpSampling


@dataclass(frozen=True)
class Block:
    """Some rows of the draft's grid, and the cells of the target's grid that they cover. For example, the second of
    three blocks of 2 rows, for a draft of 6 x 6 tokens and r = 2::

        draft: 6 rows of 6         target: 12 rows of 12
        rows 0, 1   decided        cells   0 to  47   decided, and read again with the block
        rows 2, 3   row 2, end 4   cells  48 to  95   before 0, first 48, last 96
        rows 4, 5   later          cells  96 to 143   later

    Progress counts each cell of the target twice: when it is drafted, and when it is final. Passes cannot be counted,
    because the number of passes for a block's islands is known only after the verification of the block.
    """

    row: int  # first row of the draft's grid
    end: int  # the row after the last one
    first: int  # first cell of the target's grid
    last: int  # the cell after the last one
    before: int  # first cell of the block before, which the target reads again with this one
    schedule: Schedule  # passes of the draft model; except in the first block, the first pass is empty

    @property
    def is_first(self) -> bool:
        return self.row == 0

    @property
    def cells(self) -> int:
        """Number of its cells in the target's grid."""
        return self.last - self.first

    @property
    def begin(self) -> int:
        """The progress before its first pass."""
        return 2 * self.first

    def drafted(self, passes: int) -> int:
        """The progress after ``passes`` passes of the draft model in the block."""
        planned = sum(bool(p.cells) for p in self.schedule.passes)
        return self.begin + self.cells * passes // planned

    def repaired(self, passes: int, planned: int) -> int:
        """The progress after ``passes`` of the target's ``planned`` passes in the block."""
        return self.begin + self.cells + self.cells * passes // planned


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


@lru_cache(maxsize=64)
def draft_schedule(grid: int, window: int, first: int, rows: int, fed_again: int) -> Schedule:
    """Passes in which the draft model generates some rows of its grid. Guidance counts tokens, as in serial decoding.

    Args:
        grid: side of the draft's grid.
        window: ZipAR's window; 0, or a window as wide as a row, gives raster order.
        first: number of rows that are known.
        rows: number of rows to generate after the known rows.
        fed_again: how many of the known rows, counted back from the last, are fed once more.
    """
    known = first * grid
    if 0 < window < grid:
        groups = row_groups(grid, window, rows)
    else:
        groups = [[cell] for cell in range(rows * grid)]

    decided = known
    shifted = []
    cfg_steps = []
    for group in groups:
        shifted.append([known + cell for cell in group])
        cfg_steps.append(decided - 1)
        decided += len(group)
    return Schedule(grid, next_token_passes(shifted, grid, cfg_steps, known, fed_again * grid), known=known)


class Drafter:
    """The draft model M_q, with its image and the keys and values of all blocks so far.

    Args:
        target: the canvas of the target; both models share its report and clock.
        model: the draft model.
        condition: the condition of the images.
        blocks: all blocks of the image.
    """

    def __init__(self, target: TokenCanvas, model: TokenModel, condition: AnyCondition, blocks: Sequence[Block]):
        self.target = target
        self.ratio = target.grid[0] // model.grid

        # Guidance covers the same part of the draft's image as of the target's image.
        settings = target.settings
        if settings.cfg_interval is not None:
            settings = replace(settings, cfg_interval=settings.cfg_interval // self.ratio**2)

        prepared = prepare(model, condition, model.device)
        settings = resolve(settings, model)
        self.canvas = blank(model, model.grid, settings, target.noise, target.report, clock=target.clock)
        self.canvas.phases = ("draft", "draft")
        self.draw = TokenDraw(self.canvas, stream="draft")

        self.parallel = settings.draft_parallel
        self.in_windows = self.parallel > 1
        # In windows, finished images leave the batch if no later block needs their keys and values.
        self.shrink = len(blocks) == 1

        # The cache has slots for the passes of every block. In windows, stand-ins and padding have slots of their own.
        # The null condition is read to the end, so that one cache has the branches for all blocks.
        slots = max(slots_of(block.schedule, one_by_one=not self.in_windows) for block in blocks)
        last_guided = math.inf if settings.guides else -1
        self.block = blocks[0]  # the present one
        self.look = ScheduleLook(self.canvas, prepared, self.block.schedule, last_guided, slots=slots)

    def generate(self, block: Block) -> Iterator[Step]:
        """1. Generate the rows of a block, pass by pass or in windows (``jacobi.py``)."""
        self.block = block
        self.draw.guided_by_pass = guided_passes(self.canvas.settings, block.schedule)
        if not (block.is_first or self.in_windows):
            self.look.follow(block.schedule)

        t = table_of(block.schedule, one_by_one=not self.in_windows)
        plan = {k: cells for k, cells in plan_of(t, self.canvas.device).items() if len(cells)}
        if not self.in_windows:
            yield from decode(self.canvas, plan, self.look, self.draw, self.show)
            return

        # The first pass of the first block is the prefill, which is no part of a window.
        if block.is_first:
            yield from decode(self.canvas, {0: plan[0]}, self.look, self.draw, self.show)
        calls = iterate(self.canvas, self.look, self.draw, block.schedule, self.parallel, self.shrink)
        for done, _ in enumerate(calls, 1 + block.is_first):
            yield from self.show(done)

    def show(self, done: int) -> Iterator[Step]:
        """Count pass number ``done`` of the present block, and yield the partial result."""
        self.canvas.report.add(draft_passes=1)
        return self.target.show(self.block.drafted(done), self.view)

    @torch.inference_mode(False)
    def view(self) -> tuple[Tensor, Tensor]:
        """The target's view, on which the draft's tokens of the present block are repeated over the cells that they
        cover.
        """
        of_target, decided = self.target.view()
        codes, drafted = (
            values.repeat_interleave(self.ratio, 1).repeat_interleave(self.ratio, 2) for values in self.canvas.view()
        )
        drafted[:, : self.block.row * self.ratio] = False
        return torch.where(drafted, codes, of_target), decided | drafted


def enlarge(block: Block, draft: TokenCanvas, target: TokenCanvas, up_sampler: UpSampling) -> None:
    """2. U_r: enlarge the draft of a block, together with the rows above it, and write it to the target's canvas."""
    ratio = target.grid[0] // draft.grid[0]
    with target.clock.phase("up-sampling"):
        codes = draft.values[:, :-1].unflatten(1, draft.grid)[:, : block.end]
        large = up_sampler.up(codes, ratio)
        target.values[:, block.first : block.last] = large[:, block.row * ratio : block.end * ratio].flatten(1)


def reduce(block: Block, target: TokenCanvas, draft: TokenCanvas, up_sampler: UpSampling) -> None:
    """6. D_r: reduce the final tokens of a block and write them to the draft's canvas, from which the draft model
    continues. The last block is not reduced.
    """
    if block.last == target.cells:
        return

    ratio = target.grid[0] // draft.grid[0]
    side = draft.grid[1]
    with target.clock.phase("up-sampling"):
        codes = target.values[:, :-1].unflatten(1, target.grid)[:, : block.end * ratio]
        small = up_sampler.down(codes, ratio)
        draft.values[:, block.row * side : block.end * side] = small[:, block.row : block.end].flatten(1)
