"""MuLo-SD: draft at low resolution, verify at high resolution in one pass, repair locally.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). A cycle:

1. the draft model M_q generates rows of an image of 1/r the side (all rows by default, in ZipAR's order);
2. the draft is enlarged to the target's grid (U_r, ``upsampling.py``);
3. one pass of the target M_p gives p_i at every token i. A draft token is rejected if its probability, pooled over its
   code's nearest neighbours, is below tau (R_T);
4. every rejection is expanded by a radius l, but not before the first one (R_X), and R_X is divided into islands;
5. all islands are resampled in parallel, in waves (``islands.py``);
6. the result is committed. If rows are left, it is reduced (D_r) and the draft model continues from it.

There is no public code. Where the paper leaves a choice open:

- p is the sampling distribution of the target: after guidance, temperature, top-k and top-p.
- A later wave feeds the cells before its own and the cells drawn since, at their own positions. A query attends to every
  position before it, including drafts of other islands: the context has no holes.
- Keys and values of accepted tokens behind a change are not updated until the next cycle. This is the locality that the
  method relies on, and the reason why it is *lossy*.
- The pass that updates the keys and values of the last block is the one that verifies the next block.
- The draft model reads the new rows of the reduced image only; its cache of earlier rows is kept.
- The draft model has its own random numbers; the target's are those of the cells, as in ``llamagen.py``. With tau above 1 in
  raster order the tokens are therefore those of serial decoding. A whole image is then decoded serially, without a draft.

The host waits for the device once per cycle, for the map of rejections, which determines the number of passes that follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.llama import Cache, TokenModel
from ...reports.record import ACCEPTED, EXPANDED, REJECTED
from ..conditioning import AnyCondition
from ..driver import timed
from . import islands as geometry
from .draws import Draws, tempered
from .jacobi import History, iterate
from .llamagen import advance, decode
from .loop import (
    TokenRun,
    TokenSampled,
    TokenSampler,
    TokenStep,
    TokenSteps,
    begin,
    feed,
    guide,
    not_janus,
    prefill,
    raster_only,
    resolve,
    sample,
)
from .schedule import Schedule, next_token_passes, on_device, raster
from .settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings, neighbours_of
from .upsampling import UpSampling
from .zipar import row_groups

# Logits of one piece of the verification: 64 MB in fp32.
_BLOCK = 1 << 24


def mulosd(
    target: TokenModel,
    condition: AnyCondition,
    settings: MuLoSDSettings,
    noise: Draws,
    seed: int | None = None,
    *,
    draft: TokenModel,
    up_sampler: UpSampling,
) -> TokenSampler:
    """MuLo-SD on a LlamaGen or on Tar's de-tokenizer.

    Args:
        target, condition, noise, seed: as :func:`samplers.tokens.llamagen.llamagen`; both models get the condition.
        settings: see :class:`MuLoSDSettings`.
        draft: a model of the same codes on a grid of 1/r the side, r an integer above 1.
        up_sampler: from draft to target and back, with the tokenizer of both; see ``upsampling.py``.

    Yields:
        :class:`TokenStep` after every pass of either model. While drafting, codes are the draft's, repeated over the cells
        that they cover; tokens to be resampled are undecided. ``total`` grows when the number of waves becomes
        known, and falls by the passes that a window saves.

    Returns:
        :class:`TokenSampled`. The report counts all passes (``transformer_passes``), of which the draft's
        (``draft_passes``); tokens of the batch: accepted and rejected drafts, accepted ones that were resampled beside a
        rejected one (expanded), islands; and waves, which all images share. Maps: "step", "outcome", "islands" int32 (number
        from 1, 0 elsewhere), "waves" int32 (from 0 in each cycle, -1 elsewhere). ``similarity``: pooled probabilities.

    Raises:
        UserError: a condition that does not fit either model, models or a tokenizer that do not belong together, a PAR, a
            grid that is no integer multiple, or so many neighbours that nothing can be rejected.
    """
    check_pair(target, draft, up_sampler.vq.config.codes, "MuLo-SD")
    settings = resolve(settings, target)
    factor, rest = divmod(target.grid, draft.grid)
    if rest or factor < 2:
        raise UserError(
            f"draft: {draft.name} draws {draft.grid} x {draft.grid} tokens, {target.name} {target.grid} x {target.grid}, which is no "
            "whole multiple above 1; choose a draft of half, a third or a quarter of the side."
        )
    k = neighbour_count(settings, target.net.config.vocab)
    run = begin("mulosd", target, condition, settings, noise, seed)
    run.report.settings = {**asdict(settings), "up_sampler": up_sampler.name}
    if settings.exact(target.grid) and (settings.draft_rows or draft.grid) >= draft.grid:
        # The tokens are those of serial decoding, whatever the draft.
        result = yield from decode(run, raster(target.grid))
        step = result.report.maps["step"]
        result.report.maps.update(islands=np.zeros_like(step), waves=np.full_like(step, -1))
        return result
    # Guidance covers the same part of the draft as of the target.
    until = settings.cfg_interval // factor**2 if settings.cfg_interval >= 0 else -1
    drafter = begin("mulosd", draft, condition, replace(settings, cfg_interval=until), noise, seed)
    drafter.report, drafter.clock, drafter.stream, drafter.phases = run.report, run.clock, "draft", ("draft", "draft")
    with torch.inference_mode():
        neighbours = geometry.codebook_neighbours(up_sampler.vq.quantize, k, run.device)
    steps = _Generation(run, drafter, settings, up_sampler, factor, neighbours).cycles()
    return (yield from timed(steps, run.clock, run.report, run.device))


def check_pair(target: TokenModel, draft: TokenModel, codes: int, sampler: str) -> None:
    """Raises UserError unless both models generate the ``codes`` codes of one tokenizer, in raster order."""
    raster_only(sampler, target, draft)
    not_janus(sampler, "needs a model of a smaller picture, which no Janus draws", target, draft)
    a, b = target.net.config.vocab, draft.net.config.vocab
    if a != b:
        raise UserError(
            f"draft: {draft.name} writes {b} codes, {target.name} {a}; choose two models of one VQ tokenizer."
        )
    if a != codes:
        raise UserError(
            f"decoder: it has {codes} codes, {target.name} writes {a}; choose the VQ tokenizer that it was trained with."
        )


def neighbour_count(settings: MuLoSDSettings, codes: int) -> int:
    """Number of neighbours k of a code, of a codebook of ``codes``. Raises UserError if all codes would be neighbours."""
    k = neighbours_of(settings, codes)
    if k >= max(1, codes - 1):
        raise UserError(
            f"neighbours: {k} is all of the {codes} codes, so that nothing could be rejected; choose fewer, or -1."
        )
    return k


# ------------------------------------------------------------------------------------------------ the cycles


class Block(NamedTuple):
    """The rows of one cycle."""

    # row, rows: first row and number of rows on the draft's grid
    row: int
    rows: int
    # first, last: first cell, and the cell after the last one, on the target's grid
    first: int
    last: int


class _Generation:
    """State of one generation.

    Attributes:
        run, drafter: of the target M_p and of the draft model M_q, with one report.
        up_sampler: U_r and D_r, see ``upsampling.py``.
        factor: the paper's r.
        neighbours: table of every code's neighbours, see :func:`islands.neighbours`.
        cache, draft_cache: allocated by the first pass of each model.
        done, total: passes so far, and the number known to be needed.
        pools: pooled probabilities of all verified draft tokens.
    """

    def __init__(self, run: TokenRun, drafter: TokenRun, s: MuLoSDSettings, up: UpSampling, r: int, neighbours: Tensor):
        self.run, self.drafter, self.settings, self.up_sampler = run, drafter, s, up
        self.factor, self.neighbours, self.grid = r, neighbours, run.grid
        self.null = any(run.guided(raster(run.grid)))
        self.null_draft = any(drafter.guided(draft_schedule(drafter.grid, s.draft_window)))
        self.cache: Cache | None = None
        self.draft_cache: Cache | None = None
        self.draft_slots = self.done = self.total = 0
        self.pools: list[Tensor] = []
        shape, kinds = (len(run.tokens), run.grid, run.grid), {"outcome": np.uint8}
        self.maps = {n: np.zeros(shape, kinds.get(n, np.int32)) for n in ("step", "outcome", "islands", "waves")}

    def cycles(self) -> TokenSteps:
        """All cycles; the numbers are those of the module's description."""
        s, small = self.settings, self.drafter.grid
        each = min(s.draft_rows or small, small)
        starts = range(0, small, each)
        plans = [draft_schedule(small, s.draft_window, r, min(each, small - r), each if r else 0) for r in starts]
        self.total = sum(sum(bool(p.cells) for p in plan.passes) + 1 for plan in plans)
        self.draft_slots = max(plan.ahead.slots for plan in plans) if s.draft_parallel > 1 else small**2 - 1
        refresh = 0
        for row, plan in zip(starts, plans, strict=True):
            rows, width = min(each, small - row), self.factor * self.grid
            block = Block(row, rows, row * width, (row + rows) * width)
            # Step 1: draft the rows with M_q.
            yield from self.draft(plan, row)
            # Step 2: enlarge them, U_r.
            self.enlarge(block)
            # Step 3: one pass of M_p over the block (and over the last one, to update its keys and values); reject.
            hidden = self.read(refresh, block)
            rejected = self.verify(hidden, block).reshape(len(self.run.tokens), -1, self.grid)
            # Step 4: expand the rejections and number the islands.
            wave = self.plan_waves(rejected, block)
            # Step 5: resample the islands, one wave per pass; the first wave uses the verification's predictions.
            yield from self.resample(wave, hidden, block)
            # Step 6: commit. Reduce the block for the draft model, D_r.
            refresh = block.first
            if block.last < self.run.count:
                self.reduce(block)
        self.run.report.maps.update(self.maps)
        self.run.report.similarity = torch.cat(self.pools).cpu().numpy()
        return TokenSampled(self.run.codes(), self.run.report)

    def step(self, drafted_from: int | None = None) -> TokenStep:
        """The partial result. ``drafted_from``: first row of a draft in progress, which is shown repeated over its cells."""
        out = self.run.step(self.done, max(self.done, self.total))
        if drafted_from is None:
            return out

        def repeated(x: Tensor) -> Tensor:
            return x.repeat_interleave(self.factor, 1).repeat_interleave(self.factor, 2)

        draft = self.drafter.step(0, 0)
        drafted = repeated(draft.decided)
        drafted[:, : drafted_from * self.factor] = False
        codes = torch.where(drafted, repeated(draft.codes), out.codes)
        return replace(out, codes=codes, decided=out.decided | drafted)

    # -------------------------------------------------------------------------------------------- 1 draft

    def draft(self, schedule: Schedule, row: int) -> Iterator[TokenStep]:
        """Generate the draft's rows from ``row`` on, pass by pass or in windows (``jacobi.py``)."""
        run, clock, window, hidden = self.drafter, self.run.clock, self.settings.draft_parallel, None
        guided, before = run.guided(schedule), run.decided
        with torch.inference_mode(), clock.phase("draft"):
            if self.draft_cache is None:
                hidden, self.draft_cache = prefill(run, self.null_draft, self.draft_slots)
            passes = on_device(schedule, self.draft_cache.prefix, run.device)
        for k, p in enumerate(passes[:1] if window > 1 else passes):
            if schedule.passes[k].cells:
                with torch.inference_mode():
                    advance(run, p, self.draft_cache, self.null_draft, guided[k], hidden)
                hidden = None
                yield self._drafted(row)
        if window > 1:
            history = History(schedule, window, len(run.tokens))
            # The cache of further rows belongs to all images.
            for _ in iterate(run, history, self.draft_cache, shrink=not self.settings.draft_rows):
                with torch.inference_mode():
                    run.decided = before | torch.from_numpy(history.decided()).to(run.device)
                yield self._drafted(row)
            self.total -= len(passes) - len(history.at)  # calls that were not needed

    def _drafted(self, row: int) -> TokenStep:
        self.run.report.add(draft_passes=1)
        self.done += 1
        return self.step(row)

    # -------------------------------------------------------------------------------------------- 2 enlarge, 6 reduce

    @torch.inference_mode()
    def enlarge(self, block: Block) -> None:
        """U_r: write the enlarged rows into the target's tokens. Rows above are enlarged with them, as context."""
        small = self.drafter.grid
        with self.run.clock.phase("up-sampling"):
            draft = self.drafter.tokens[:, :-1].view(-1, small, small)[:, : block.row + block.rows]
            large = self.up_sampler.up(draft, self.factor)[:, block.row * self.factor :]
            self.run.tokens[:, block.first : block.last] = large.flatten(1)

    @torch.inference_mode()
    def reduce(self, block: Block) -> None:
        """D_r: write the reduced rows into the draft's tokens."""
        small, end = self.drafter.grid, block.row + block.rows
        with self.run.clock.phase("up-sampling"):
            large = self.run.tokens[:, : block.last].view(-1, end * self.factor, self.grid)
            reduced = self.up_sampler.down(large, self.factor)[:, block.row :]
            self.drafter.tokens[:, block.row * small : end * small] = reduced.flatten(1)

    # -------------------------------------------------------------------------------------------- 3 verify

    def guided(self, cells: Tensor) -> bool | Tensor:
        """Where guidance is applied at cells int64 [...]: everywhere, nowhere, or bool [...], as serial decoding counts."""
        if self.settings.cfg_interval < 0 or not self.null:
            return self.null
        return cells - 1 <= self.settings.cfg_interval

    @torch.inference_mode()
    def read(self, refresh: int, block: Block) -> Tensor:
        """One causal pass of the target over the cells ``refresh`` to ``last - 2``, which also updates their keys and values.

        Returns:
            Hidden rows [R, last - first, C] that predict the cells of the block.
        """
        run = self.run
        with run.clock.phase("transformer"):
            self.done += 1
            if self.cache is None:
                # A single image has no padding, and needs no slot for the last cell.
                slots = run.count - (len(run.tokens) == 1)
                hidden, self.cache = prefill(run, self.null, slots, run.tokens[:, : block.last - 1])
                return hidden
            cells = torch.arange(refresh, block.last - 1, device=run.device)
            slot, end = cells + self.cache.prefix, self.cache.prefix + block.last - 1
            mask = torch.arange(end, device=run.device) <= slot[:, None]
            return feed(run, self.cache, cells, cells, slot, self.null, end, mask)[:, block.first - 1 - refresh :]

    @torch.inference_mode()
    def verify(self, hidden: Tensor, block: Block) -> np.ndarray:
        """R_T: rejected draft tokens of the block, bool [B, last - first]."""
        run, s, (_, _, first, last) = self.run, self.settings, block
        with run.clock.phase("verification"):
            size = max(1, _BLOCK // (len(hidden) * run.net.config.vocab))
            cells = torch.arange(first, last, device=hidden.device)
            pools, own = [], []
            for part, rows in zip(cells.split(size), hidden.split(size, dim=1), strict=True):
                p = tempered(guide(run, rows, self.guided(part)), s).softmax(-1)
                pools.append(geometry.pooled(p, run.tokens[:, part], self.neighbours))
                own.append(p.gather(-1, run.tokens[:, part, None])[..., 0])
            pool = torch.cat(pools, dim=1)
            self.pools.append(pool.flatten())
            rejected = geometry.rejected(pool, s.tau, s.acceptance_target, torch.cat(own, dim=1))
            return rejected.cpu().numpy()  # the host waits here

    # -------------------------------------------------------------------------------------------- 4 expand

    def plan_waves(self, rejected: np.ndarray, block: Block) -> np.ndarray:
        """Expand the rejections bool [B, h, G]; the wave of every cell, int32 [B, h, G], -1 for accepted ones."""
        s = self.settings
        region = geometry.suffix(rejected) if s.repair == SUFFIX else geometry.expand(rejected, s.expansion)
        islands = geometry.islands(region)
        joined = region.astype(np.int32) if s.resample_order == ONE_BY_ONE else islands
        wave = geometry.waves(joined, s.resample_window or None)
        self.run.report.add(
            accepted=int((~rejected).sum()),
            rejected=int(rejected.sum()),
            expanded=int((region & ~rejected).sum()),
            islands=int(islands.max(axis=(1, 2)).sum()),
            waves=int(wave.max()) + 1,
        )
        maps, rows = self.maps, np.s_[:, block.first // self.grid : block.last // self.grid]
        maps["step"][rows] = self.done - 1 + np.maximum(wave, 0)
        maps["outcome"][rows] = np.where(rejected, REJECTED, np.where(region, EXPANDED, ACCEPTED))
        # Island numbers continue from one cycle to the next.
        before = maps["islands"].max(axis=(1, 2), keepdims=True)
        maps["islands"][rows] = np.where(islands > 0, islands + before, 0)
        maps["waves"][rows] = wave
        with torch.inference_mode():
            accepted = torch.from_numpy(~region.reshape(len(region), -1))
            self.run.decided[:, block.first : block.last] = accepted.to(self.run.device)
        return wave

    # -------------------------------------------------------------------------------------------- 5 resample

    def resample(self, wave: np.ndarray, hidden: Tensor, block: Block) -> Iterator[TokenStep]:
        """Resample the cells of every wave, whose rows are hidden rows of the verification at first."""
        run, prefix = self.run, self.cache.prefix  # type: ignore[union-attr]
        plan = resampled(wave.reshape(len(wave), -1), block.first, run.count)
        self.total += max(0, len(plan) - 1)
        with torch.inference_mode():
            moved = [[torch.from_numpy(a).to(run.device) for a in w[:3]] for w in plan]
        for k, ((cells, fed, rows), w) in enumerate(zip(moved, plan, strict=True)):
            if k:
                yield self.step()
            with torch.inference_mode():
                if k:
                    with run.clock.phase("transformer"):
                        self.done += 1
                        end, slot = prefix + w.end, fed + prefix
                        # Nothing is fed at the last cell, which is padding; the table of positions has no entry for it.
                        position, mask = fed.clamp(max=run.count - 2), None
                        if fed.numel() > 1:
                            mask = torch.arange(end, device=run.device) <= prefix + position[..., None]
                        hidden = feed(run, self.cache, fed, position, slot, self.null, end, mask)  # type: ignore[arg-type]
                else:
                    rows = (cells - block.first).clamp(max=hidden.shape[1] - 1)
                with run.clock.phase("sampling"):
                    index = (torch.cat([rows, rows]) if self.null else rows)[..., None]
                    logits = guide(run, hidden.gather(1, index.expand(-1, -1, hidden.shape[-1])), self.guided(cells))
                    run.tokens.scatter_(1, cells, sample(run, logits, cells))
                    run.decided.scatter_(1, cells, True)
        yield self.step()


# ------------------------------------------------------------------------------------------------ schedules


@lru_cache(maxsize=64)
def draft_schedule(grid: int, window: int, first: int = 0, rows: int | None = None, again: int = 0) -> Schedule:
    """Passes in which the draft model generates rows of its grid. The clocks count tokens, as in serial decoding.

    Args:
        window: ZipAR's window; 0, or a row or wider, is raster order.
        first, rows: number of rows that are decided already, and of rows to generate; None: all remaining.
        again: number of decided rows, the last ones, that are fed again.
    """
    rows, known = grid - first if rows is None else rows, first * grid
    serial = not 0 < window < grid
    groups = [[c] for c in range(rows * grid)] if serial else row_groups(grid, window, rows)
    groups = [[known + c for c in group] for group in groups]
    clocks = np.cumsum([known - 1, *map(len, groups)])[:-1].tolist()
    return Schedule(grid, next_token_passes(groups, grid, clocks, known, again * grid), known=known)


class Wave(NamedTuple):
    """Cells that are resampled in one pass: int64 arrays [B, .], each image's entries left-aligned."""

    cells: np.ndarray  # cells to draw; padded with the number of cells of the grid
    # cells fed before; padded with the last cell, which no row attends to. Empty in the first wave, whose predictions
    # come from the verification.
    fed: np.ndarray
    rows: np.ndarray  # for each of cells the index in fed of the cell that predicts it
    end: int  # cells below this one are attended to


def resampled(wave: np.ndarray, first: int, count: int) -> list[Wave]:
    """The cells that each wave feeds (those before its own, and those that the last wave drew) and draws.

    ``wave`` int32 [B, n] is that of the cells from ``first`` on, -1 where not drawn; ``count`` are the cells of the grid.
    """
    last, out = first + wave.shape[1], []
    parts = []  # of each image, the cells of its waves
    for row in wave:
        order = np.argsort(row, kind="stable")[np.count_nonzero(row < 0) :]
        parts.append(np.split(first + order, np.cumsum(np.bincount(row[order]))[:-1]) if len(order) else [])
    none = np.zeros(0, np.int64)
    for k in range(int(wave.max(initial=-1)) + 1):
        cells = [part[k] if k < len(part) else none for part in parts]
        # The block's last cell is not fed: the cell it predicts is not in the block.
        drawn = [part[k - 1][part[k - 1] < last - 1] if 0 < k < len(part) else none for part in parts]
        fed = [np.union1d(c - 1, d) if k else none for c, d in zip(cells, drawn, strict=True)]
        rows = [np.searchsorted(f, c - 1) for f, c in zip(fed, cells, strict=True)]
        end = max(int(f[-1]) + 1 if len(f) else 0 for f in fed)
        out.append(Wave(_stack(cells, count), _stack(fed, count - 1), _stack(rows, 0), end))
    return out


def _stack(parts: list[np.ndarray], padding: int) -> np.ndarray:
    out = np.full((len(parts), max(map(len, parts))), padding, np.int64)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return out
