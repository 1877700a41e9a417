"""MuLo-SD: draft at low resolution, verify at high resolution in one pass, repair locally.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). A cycle:

1. the draft model M_q generates rows of an image of 1/r the side (all rows by default, in ZipAR's order);
2. the draft is enlarged to the target's grid (U_r, ``upsampling.py``);
3. one pass of the target M_p gives p_i at every token i. A draft token is rejected if its probability, pooled over its
   code's nearest neighbours, is below tau (R_T);
4. every rejection is expanded by a radius l, but not before the first one (R_X), and R_X is divided into islands;
5. all islands are drawn again in parallel, in waves (``islands.py``, ``redraw.py``);
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
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...model_loaders.networks.gpt import Cache, TokenModel
from ...reports.record import ACCEPTED, EXPANDED, REJECTED
from ..conditioning import AnyCondition
from ..driver import timed
from . import islands as geometry
from .drafting import DraftDraws, check_pair, neighbour_count, redraws_all, scale_factor
from .draws import Draws, draw, tempered
from .jacobi import start
from .llamagen import raster
from .loop import TokenRun, TokenSampled, TokenSampler, TokenStep, TokenSteps, begin, decode, resolve, to_device
from .redraw import draft_schedule, redraws, redraws_to_device
from .schedule import Schedule
from .settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings
from .upsampling import UpSampling

# Logits of one piece of the verification: 64 MB in fp32.
_BLOCK = 1 << 24


class Block(NamedTuple):
    """The rows of one cycle.

    Attributes:
        row, rows: first row and number of rows on the draft's grid.
        first, last: first cell, and the cell after the last one, on the target's grid.
    """

    row: int
    rows: int
    first: int
    last: int


@dataclass(eq=False)
class _Maps:
    """Report maps [B, G, G], on the host."""

    step: np.ndarray
    outcome: np.ndarray
    islands: np.ndarray
    waves: np.ndarray

    @staticmethod
    def empty(shape: tuple[int, int, int]) -> _Maps:
        return _Maps(*(np.zeros(shape, dtype) for dtype in (np.int32, np.uint8, np.int32, np.int32)))


@dataclass(eq=False)
class _Generation:
    """State of one generation.

    Attributes:
        run, drafter: of the target M_p and of the draft model M_q, with one report.
        up_sampler: U_r and D_r, see ``upsampling.py``.
        factor: the paper's r.
        neighbours: table of every code's neighbours, see :func:`islands.neighbours`.
        decided: bool of the shape of the target's tokens.
        cache, draft_cache: allocated by the first pass of each model.
        draft_slots: image slots of the draft model's cache.
        done, total: passes so far, and the number known to be needed.
        pools: pooled probabilities of all verified draft tokens.
    """

    run: TokenRun
    drafter: TokenRun
    settings: MuLoSDSettings
    up_sampler: UpSampling
    factor: int
    neighbours: Tensor
    decided: Tensor
    maps: _Maps
    cache: Cache | None = None
    draft_cache: Cache | None = None
    draft_slots: int = 0
    done: int = 0
    total: int = 0
    pools: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> Tensor:
        """int64 [B, N + 1]; the last column receives the padding of ragged waves."""
        return self.run.tokens

    @property
    def grid(self) -> int:
        return self.run.model.grid

    @property
    def count(self) -> int:
        return self.run.model.tokens

    @property
    def null(self) -> bool:
        """Whether the target's null condition is run."""
        return any(self.run.guided)

    def cycles(self) -> Iterator[TokenStep]:
        """All cycles; the numbers are those of the module's description."""
        small, self.draft_slots = self.drafter.model.grid, self.drafter.model.tokens - 1
        each = min(self.settings.draft_rows or small, small)
        starts = range(0, small, each)
        plans = [
            draft_schedule(small, self.settings.draft_window, row, min(each, small - row), each if row else 0)
            for row in starts
        ]
        self.total = sum(sum(bool(p.cells) for p in plan.passes) + 1 for plan in plans)
        if self.settings.draft_parallel > 1:
            self.draft_slots = max(plan.table.slots for plan in plans)
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
            rejected = self.verify(hidden, block).reshape(len(self.tokens), -1, self.grid)
            # Step 4: expand the rejections and number the islands.
            wave = self.plan_waves(rejected, block)
            # Step 5: draw the islands again, one wave per pass; the first wave uses the verification's predictions.
            yield from self.redraw_waves(wave, hidden, block)
            # Step 6: commit. Reduce the block for the draft model, D_r.
            refresh = block.first
            if block.last < self.count:
                self.reduce(block)

    def step(self, drafted_from: int | None = None) -> TokenStep:
        """The partial result. ``drafted_from``: first row of a draft in progress, which is shown repeated over its cells."""
        codes, decided = self.tokens[:, :-1].clone(), self.decided[:, :-1].clone()
        if drafted_from is not None:
            small = self.drafter.model.grid

            def repeated(x: Tensor) -> Tensor:
                x = x.view(-1, small, small)
                return x.repeat_interleave(self.factor, 1).repeat_interleave(self.factor, 2).flatten(1)

            drafted = repeated(self.drafter.decided.clone())
            drafted[:, : drafted_from * self.factor * self.grid] = False
            codes, decided = torch.where(drafted, repeated(self.drafter.tokens), codes), decided | drafted
        codes = codes.masked_fill(~decided, 0)
        shape = (-1, self.grid, self.grid)
        return TokenStep(self.done, max(self.done, self.total), codes.view(shape), decided.view(shape), self.run.report)

    # -------------------------------------------------------------------------------------------- 1 draft

    def draft(self, schedule: Schedule, row: int) -> Iterator[TokenStep]:
        """Generate the draft's rows from ``row`` on."""
        run, clock, window = self.drafter, self.run.clock, self.settings.draft_parallel
        null, until = any(run.guided), run.settings.cfg_interval
        guided = [run.settings.cfg > 1 and (until < 0 or p.clock <= until) for p in schedule.passes]
        with torch.inference_mode(), clock.phase("draft"):
            logits = None
            if self.draft_cache is None:
                logits, self.draft_cache = run.prefill(null, self.draft_slots)
                run.report.add(cache_bytes=self.draft_cache.bytes)
            passes = to_device(schedule, self.draft_cache.prefix, run.device)
        for k, at in enumerate(passes[:1] if window > 1 else passes):
            if not schedule.passes[k].cells:
                continue
            with torch.inference_mode(), clock.phase("draft"):
                logits = run.feed(at, self.draft_cache, null) if logits is None else logits[:, None]
                run.decide(at, logits, guided[k])
                logits = None
            run.report.add(draft_passes=1)
            self.done += 1
            yield self.step(row)
        if window > 1:
            yield from self.draft_windows(schedule, guided, row)

    def draft_windows(self, schedule: Schedule, guided: list[bool], row: int) -> Iterator[TokenStep]:
        """The passes after the first by Jacobi iteration, see ``jacobi.py``."""
        run, clock = self.drafter, self.run.clock
        assert self.draft_cache is not None
        before = run.decided
        with torch.inference_mode(), clock.phase("draft"):
            # The cache of further rows belongs to all images.
            whole = not self.settings.draft_rows
            state = start(run, schedule, self.draft_cache, guided, self.settings.draft_parallel, whole)
        while not state.finished:
            with torch.inference_mode(), clock.phase("draft"):
                state.call()
                run.tokens, decided = state.state()
                run.decided = before | decided
            run.report.add(draft_passes=1)
            self.done += 1
            yield self.step(row)
        self.total -= len(schedule.passes) - len(state.history)  # calls that were not needed

    # -------------------------------------------------------------------------------------------- 2 enlarge, 6 reduce

    @torch.inference_mode()
    def enlarge(self, block: Block) -> None:
        """U_r: write the enlarged rows into the target's tokens. Rows above are enlarged with them, as context."""
        small = self.drafter.model.grid
        with self.run.clock.phase("up-sampling"):
            draft = self.drafter.tokens.view(-1, small, small)[:, : block.row + block.rows]
            large = self.up_sampler.up(draft, self.factor)[:, block.row * self.factor :]
            self.tokens[:, block.first : block.last] = large.flatten(1)

    @torch.inference_mode()
    def reduce(self, block: Block) -> None:
        """D_r: write the reduced rows into the draft's tokens."""
        small, end = self.drafter.model.grid, block.row + block.rows
        with self.run.clock.phase("up-sampling"):
            large = self.tokens[:, : block.last].view(-1, end * self.factor, self.grid)
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
        run, net = self.run, self.run.model.net
        with run.clock.phase("transformer"):
            x = net.embed(self.tokens[:, refresh : block.last - 1])
            x = torch.cat([x, x]) if self.null else x
            self.done += 1
            if self.cache is None:
                rows, lengths = run.prefix(self.null)
                # A single image has no padding, and needs no slot for the last cell.
                slots = self.count - (len(self.tokens) == 1)
                hidden, self.cache = net.start(rows, self.grid, slots, lengths, x)
                run.report.add(
                    transformer_passes=1,
                    transformer_tokens=len(x) * (rows.shape[1] + x.shape[1]),
                    cache_bytes=self.cache.bytes,
                )
                return hidden
            run.report.add(transformer_passes=1, transformer_tokens=len(x) * x.shape[1])
            position = torch.arange(refresh, block.last - 1, device=x.device)
            slot, end = position + self.cache.prefix, self.cache.prefix + block.last - 1
            mask = torch.arange(end, device=x.device) <= slot[:, None]
            return net.advance(x, position, slot, self.cache, end, mask)[:, block.first - 1 - refresh :]

    @torch.inference_mode()
    def verify(self, hidden: Tensor, block: Block) -> np.ndarray:
        """R_T: rejected draft tokens of the block, bool [B, last - first]."""
        run, (_, _, first, last) = self.run, block
        with run.clock.phase("verification"):
            size = max(1, _BLOCK // (len(hidden) * run.model.net.config.vocab))
            cells = torch.arange(first, last, device=hidden.device)
            pools, own = [], []
            for part, rows in zip(cells.split(size), hidden.split(size, dim=1), strict=True):
                logits = run.guide(run.model.net.logits(rows), self.guided(part))
                p = tempered(logits, self.settings).softmax(-1)
                pools.append(geometry.pooled(p, self.tokens[:, part], self.neighbours))
                own.append(p.gather(-1, self.tokens[:, part, None])[..., 0])
            pool = torch.cat(pools, dim=1)
            self.pools.append(pool.flatten())
            s = self.settings
            rejected = geometry.rejected(pool, s.tau, s.acceptance_target, torch.cat(own, dim=1))
            return rejected.cpu().numpy()  # the host waits here

    # -------------------------------------------------------------------------------------------- 4 expand

    def plan_waves(self, rejected: np.ndarray, block: Block) -> np.ndarray:
        """Expand the rejections bool [B, h, G]; the wave of every cell, int32 [B, h, G], -1 for accepted ones."""
        s = self.settings
        region = geometry.suffix(rejected) if s.repair == SUFFIX else geometry.expand(rejected, s.expansion)
        islands = geometry.islands(region)
        together = region.astype(np.int32) if s.resample_order == ONE_BY_ONE else islands
        wave = geometry.waves(together, s.resample_window or None)
        self.record(rejected, region, islands, wave, block)
        with torch.inference_mode():
            accepted = torch.from_numpy(~region.reshape(len(region), -1))
            self.decided[:, block.first : block.last] = accepted.to(self.run.device)
        return wave

    def record(
        self, rejected: np.ndarray, region: np.ndarray, islands: np.ndarray, wave: np.ndarray, block: Block
    ) -> None:
        """Counts and maps of a cycle."""
        self.run.report.add(
            accepted=int((~rejected).sum()),
            rejected=int(rejected.sum()),
            expanded=int((region & ~rejected).sum()),
            islands=int(islands.max(axis=(1, 2)).sum()),
            waves=int(wave.max()) + 1,
        )
        maps, rows = self.maps, np.s_[:, block.first // self.grid : block.last // self.grid]
        maps.step[rows] = self.done - 1 + np.maximum(wave, 0)
        maps.outcome[rows] = np.where(rejected, REJECTED, np.where(region, EXPANDED, ACCEPTED))
        # Island numbers continue from one cycle to the next.
        before = maps.islands.max(axis=(1, 2), keepdims=True)
        maps.islands[rows] = np.where(islands > 0, islands + before, 0)
        maps.waves[rows] = wave

    # -------------------------------------------------------------------------------------------- 5 draw again

    def redraw_waves(self, wave: np.ndarray, hidden: Tensor, block: Block) -> Iterator[TokenStep]:
        """Draw the cells of every wave again."""
        plan = redraws(wave.reshape(len(wave), -1), block.first, self.count)
        self.total += max(0, len(plan) - 1)
        for k, (cells, fed, rows, end) in enumerate(redraws_to_device(plan, self.run.device)):
            if k:
                yield self.step()
                hidden = self.feed_wave(fed, end)
            else:
                rows = (cells - block.first).clamp(max=hidden.shape[1] - 1)
            self.draw_wave(hidden, cells, rows)
        yield self.step()

    @torch.inference_mode()
    def feed_wave(self, fed: Tensor, end: int) -> Tensor:
        """Hidden rows [R, m, C] of the fed cells int64 [B, m]."""
        assert self.cache is not None
        with self.run.clock.phase("transformer"):
            self.done += 1
            return self.run.feed_ragged(fed, self.cache, self.null, end)

    @torch.inference_mode()
    def draw_wave(self, hidden: Tensor, cells: Tensor, rows: Tensor) -> None:
        """Draw cells int64 [B, n] from the hidden rows [R, m, C] with indices ``rows`` int64 [B, n]."""
        run = self.run
        with run.clock.phase("sampling"):
            if len(rows) == 1:
                hidden = hidden[:, rows[0]]
            else:
                index = (torch.cat([rows, rows]) if self.null else rows)[..., None]
                hidden = hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))
            logits = run.guide(run.model.net.logits(hidden), self.guided(cells))
            new = draw(logits, self.settings, run.draws.gumbel("token", cells, logits.shape[-1]))
            self.tokens.scatter_(1, cells, new)
            self.decided.scatter_(1, cells, True)


# ------------------------------------------------------------------------------------------------ the sampler


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
        that they cover; tokens to be drawn again are undecided. ``total`` grows when the number of waves becomes
        known, and falls by the passes that a window saves.

    Returns:
        :class:`TokenSampled`. The report counts all passes (``transformer_passes``), of which the draft's
        (``draft_passes``); tokens of the batch: accepted and rejected drafts, accepted ones that were drawn again beside a
        rejected one (expanded), islands; and waves, which all images share. Maps: "step", "outcome", "islands" int32 (number
        from 1, 0 elsewhere), "waves" int32 (from 0 in each cycle, -1 elsewhere). ``similarity``: pooled probabilities.

    Raises:
        UserError: a condition that does not fit either model, models or a tokenizer that do not belong together, a PAR, a
            grid that is no integer multiple, or so many neighbours that nothing can be rejected.
    """
    check_pair(target, draft, up_sampler.vq.config.codes, "MuLo-SD")
    settings = resolve(settings, target)
    factor = scale_factor(target, draft)
    up_sampler.fits(factor)
    k = neighbour_count(settings, target.net.config.vocab)
    run = begin("mulosd", target, condition, settings, noise, seed, raster(target.grid))
    run.report.settings = {**asdict(settings), "up_sampler": up_sampler.name}
    if redraws_all(settings, draft):
        result = yield from decode(run)
        step = result.report.maps["step"]
        result.report.maps.update(islands=np.zeros_like(step), waves=np.full_like(step, -1))
        return result
    # Guidance covers the same part of the draft as of the target.
    until = settings.cfg_interval // factor**2 if settings.cfg_interval >= 0 else -1
    draft_settings = replace(settings, cfg_interval=until)
    plan = draft_schedule(draft.grid, settings.draft_window)
    drafter = begin("mulosd", draft, condition, draft_settings, DraftDraws(noise), seed, plan)
    drafter.report = run.report
    with torch.inference_mode():
        neighbours = geometry.codebook_neighbours(up_sampler.vq.quantize, k, run.device)
    shape = (len(run.tokens), target.grid, target.grid)
    run.tokens = torch.zeros(shape[0], target.tokens + 1, dtype=torch.int64, device=run.device)
    decided = torch.zeros_like(run.tokens, dtype=torch.bool)
    state = _Generation(run, drafter, settings, up_sampler, factor, neighbours, decided, _Maps.empty(shape))

    def steps() -> TokenSteps:
        yield from state.cycles()
        maps = state.maps
        run.report.maps.update(step=maps.step, outcome=maps.outcome, islands=maps.islands, waves=maps.waves)
        run.report.similarity = torch.cat(state.pools).cpu().numpy()
        return TokenSampled(run.tokens[:, :-1].clone().view(shape), run.report)

    return (yield from timed(steps(), run.clock, run.report, run.device))
