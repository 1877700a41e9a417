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
from . import islands as geometry
from .draws import PairedDraws, tempered
from .jacobi import iterate
from .llamagen import decode
from .loop import (
    TokenRun,
    TokenSampler,
    TokenStep,
    begin,
    decide,
    feed,
    guide,
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
    noise: PairedDraws,
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

    Yields :class:`TokenStep` after every pass of either model. While drafting, codes are the draft's, repeated over the cells they cover.
    The report counts all passes (``transformer_passes``), of which the draft's (``draft_passes``); accepted and rejected drafts; accepted
    ones that were resampled beside a rejected one (expanded); islands; and waves, which all images share. ``similarity``: pooled
    probabilities.

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
    codes = target.net.config.vocab
    k = neighbours_of(settings, codes)
    if k >= codes - 1:
        what = f"{k} is all of the {codes} codes, so that nothing could be rejected"
        raise UserError(f"neighbours: {what}; choose fewer, or -1.")
    run = begin("mulosd", target, condition, settings, noise, seed)
    run.report.settings = {**asdict(settings), "up_sampler": up_sampler.name}
    if settings.exact(target.grid) and (settings.draft_rows or draft.grid) >= draft.grid:
        # The tokens are those of serial decoding, whatever the draft.
        result = yield from decode(run, raster(target.grid))
        step = result.report.maps["step"]
        result.report.maps.update(islands=np.zeros_like(step), waves=np.full_like(step, -1))
        return result
    # Guidance covers the same part of the draft as of the target.
    until = replace(settings, cfg_interval=settings.cfg_interval // factor**2)
    drafter = begin("mulosd", draft, condition, until, noise, seed)
    drafter.report, drafter.clock, drafter.stream, drafter.phases = run.report, run.clock, "draft", ("draft", "draft")
    with torch.inference_mode():
        neighbours = geometry.codebook_neighbours(up_sampler.vq.quantize, k, run.device)
    return (yield from _cycles(run, drafter, settings, up_sampler, factor, neighbours))


def check_pair(target: TokenModel, draft: TokenModel, codes: int, sampler: str) -> None:
    """Raises UserError unless both models generate the ``codes`` codes of one tokenizer, in raster order."""
    raster_only(sampler, target, draft, janus="needs a model of a smaller picture, which no Janus draws")
    a, b = target.net.config.vocab, draft.net.config.vocab
    if a != b:
        what = f"{draft.name} writes {b} codes, {target.name} {a}"
        raise UserError(f"draft: {what}; choose two models of one VQ tokenizer.")
    if a != codes:
        what = f"it has {codes} codes, {target.name} writes {a}"
        raise UserError(f"decoder: {what}; choose the VQ tokenizer that it was trained with.")


# ------------------------------------------------------------------------------------------------ the cycles


def _cycles(
    run: TokenRun, drafter: TokenRun, s: MuLoSDSettings, up_sampler: UpSampling, r: int, neighbours: Tensor
) -> TokenSampler:
    """All cycles, numbered as in the module's description: ``run`` is of M_p, ``drafter`` of M_q, with one report; r is the target's side
    over the draft's."""
    report, clock, device, null = run.report, run.clock, run.device, s.cfg > 1
    grid, small, images = run.grid, drafter.grid, len(run.tokens)
    each = min(s.draft_rows or small, small)
    starts = range(0, small, each)
    plans = [draft_schedule(small, s.draft_window, row, min(each, small - row), each if row else 0) for row in starts]
    # Passes so far, and the number known to be needed.
    done, total = 0, sum(sum(bool(p.cells) for p in plan.passes) + 1 for plan in plans)
    draft_slots = max(plan.ahead.slots for plan in plans) if s.draft_parallel > 1 else small**2 - 1
    cache: Cache | None = None
    draft_cache: Cache | None = None
    pools, refresh = [], 0
    maps = {name: np.zeros((images, grid, grid), np.int32) for name in ("step", "outcome", "islands", "waves")}

    def shown(drafted_from: int = small) -> TokenStep:
        """The partial result; the draft's rows from ``drafted_from`` on are repeated over the cells that they cover."""
        out, draft = run.step(done, max(done, total)), drafter.step(0, 0)
        codes, drafted = (x.repeat_interleave(r, 1).repeat_interleave(r, 2) for x in (draft.codes, draft.decided))
        drafted[:, : drafted_from * r] = False
        return replace(out, codes=torch.where(drafted, codes, out.codes), decided=out.decided | drafted)

    for row, plan in zip(starts, plans, strict=True):
        # The block: rows ``row`` to ``end`` - 1 of the draft's grid, cells ``first`` to ``last`` - 1 of the target's.
        end = min(row + each, small)
        first, last = row * r * grid, end * r * grid

        # 1. Draft the rows with M_q, pass by pass or in windows (``jacobi.py``).
        guided = drafter.guided(plan)
        with torch.inference_mode(), clock.phase("draft"):
            if draft_cache is None:
                hidden, draft_cache = prefill(drafter, null, draft_slots)
            passes = on_device(plan, draft_cache.prefix, device)
        for k, p in enumerate(passes[:1] if s.draft_parallel > 1 else passes):
            if len(p.cells):  # the first pass of further rows is empty
                with torch.inference_mode(), clock.phase("draft"):
                    if k:
                        hidden = feed(drafter, draft_cache, p.fed, p.position, p.slot, null, p.end, p.mask)
                    decide(drafter, p.cells, hidden[:, p.rows], guided[k])
                done += 1
                report.add(draft_passes=1)
                with run.clock.paused():
                    yield shown(row)
        if s.draft_parallel > 1:
            calls = 0
            # The cache of further rows belongs to all images.
            for _ in iterate(drafter, plan, s.draft_parallel, draft_cache, shrink=not s.draft_rows):
                calls += 1
                done += 1
                report.add(draft_passes=1)
                with run.clock.paused():
                    yield shown(row)
            total -= len(passes) - 1 - calls  # calls that were not needed

        with torch.inference_mode():
            # 2. Enlarge them, U_r. Rows above are enlarged with them, as context.
            with clock.phase("up-sampling"):
                codes = drafter.tokens[:, :-1].view(-1, small, small)[:, :end]
                run.tokens[:, first:last] = up_sampler.up(codes, r)[:, row * r :].flatten(1)
            # 3. One causal pass of M_p over the block, and over the last one to update its keys and values. Reject.
            done += 1
            with clock.phase("transformer"):
                if cache is None:
                    # A single image has no padding, and needs no slot for the last cell.
                    hidden, cache = prefill(run, null, run.count - (images == 1), run.tokens[:, : last - 1])
                else:
                    fed, stop = torch.arange(refresh, last - 1, device=device), cache.prefix + last - 1
                    slot = fed + cache.prefix
                    mask = torch.arange(stop, device=device) <= slot[:, None]
                    hidden = feed(run, cache, fed, fed, slot, null, stop, mask)[:, first - 1 - refresh :]
            with clock.phase("verification"):
                pool, down = verify(run, s, hidden, first, neighbours)
            pools.append(pool.flatten())
            # 4. Expand the rejections and number the islands.
            rejected = down.cpu().numpy().reshape(images, -1, grid)  # the host waits here
            region = geometry.suffix(rejected) if s.repair == SUFFIX else geometry.expand(rejected, s.expansion)
            islands = geometry.islands(region)
            joined = region.astype(np.int32) if s.resample_order == ONE_BY_ONE else islands
            wave = geometry.waves(joined, s.resample_window or None)
            run.decided[:, first:last] = torch.from_numpy(~region.reshape(images, -1)).to(device)
        report.add(
            accepted=(~rejected).sum(),
            rejected=rejected.sum(),
            expanded=(region & ~rejected).sum(),
            islands=islands.max(axis=(1, 2)).sum(),
            waves=wave.max() + 1,
        )
        rows = np.s_[:, row * r : end * r]
        maps["step"][rows] = done - 1 + np.maximum(wave, 0)
        maps["outcome"][rows] = np.where(rejected, REJECTED, np.where(region, EXPANDED, ACCEPTED))
        # Island numbers continue from one cycle to the next.
        before = maps["islands"].max(axis=(1, 2), keepdims=True)
        maps["islands"][rows] = np.where(islands > 0, islands + before, 0)
        maps["waves"][rows] = wave

        # 5. Resample the islands, one wave per pass. The verification predicts the cells of the first wave.
        waves = resampled(wave.reshape(images, -1), first, run.count)
        total += max(0, len(waves) - 1)
        with torch.inference_mode():
            moved = [[torch.from_numpy(a).to(device) for a in w[:3]] for w in waves]
        for k, (cells, fed, index) in enumerate(moved):
            if k:
                with run.clock.paused():
                    yield shown()
            with torch.inference_mode():
                if k:
                    done += 1
                    with clock.phase("transformer"):
                        # Nothing is fed at the last cell, which is padding; the table of positions has no entry for it.
                        position, stop = fed.clamp(max=run.count - 2), cache.prefix + waves[k].end
                        mask = torch.arange(stop, device=device) <= cache.prefix + position[..., None]
                        hidden = feed(run, cache, fed, position, fed + cache.prefix, null, stop, mask)
                else:
                    index = (cells - first).clamp(max=hidden.shape[1] - 1)
                with clock.phase("sampling"):
                    index = (torch.cat([index, index]) if null else index)[..., None]
                    chosen = hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))
                    run.tokens.scatter_(1, cells, sample(run, guide(run, chosen, _guided(s, cells)), cells))
                    run.decided.scatter_(1, cells, True)
        with run.clock.paused():
            yield shown()

        # 6. The block is final. Reduce it for the draft model, D_r.
        refresh = first
        if last < run.count:
            with torch.inference_mode(), clock.phase("up-sampling"):
                codes = run.tokens[:, :last].view(-1, end * r, grid)
                drafter.tokens[:, row * small : end * small] = up_sampler.down(codes, r)[:, row:].flatten(1)

    report.similarity = torch.cat(pools).cpu().numpy()
    report.maps |= maps
    return run.finish(maps["step"], maps["outcome"].astype(np.uint8))


def _guided(s: MuLoSDSettings, cells: Tensor) -> bool | Tensor:
    """Where guidance is applied at cells int64 [...]: everywhere, nowhere, or bool [...], as serial decoding counts."""
    return s.cfg > 1 and (s.cfg_interval < 0 or cells - 1 <= s.cfg_interval)


def verify(run: TokenRun, s: MuLoSDSettings, hidden: Tensor, first: int, neighbours: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled probabilities fp32 [B, n] of the drafts from cell ``first`` on, and R_T, the rejected ones, bool [B, n].

    ``hidden`` [R, n, C] predicts these cells.
    """
    size = max(1, _BLOCK // (len(hidden) * run.net.config.vocab))
    cells = torch.arange(first, first + hidden.shape[1], device=hidden.device)
    pools, own = [], []
    for part, rows in zip(cells.split(size), hidden.split(size, dim=1), strict=True):
        p = tempered(guide(run, rows, _guided(s, part)), s).softmax(-1)
        pools.append(geometry.pooled(p, run.tokens[:, part], neighbours))
        own.append(p.gather(-1, run.tokens[:, part, None])[..., 0])
    pool = torch.cat(pools, dim=1)
    return pool, geometry.rejected(pool, s.tau, s.acceptance_target, torch.cat(own, dim=1))


# ------------------------------------------------------------------------------------------------ schedules


@lru_cache(maxsize=64)
def draft_schedule(grid: int, window: int, first: int, rows: int, again: int) -> Schedule:
    """Passes in which the draft model generates ``rows`` of its grid behind the ``first`` ones, of which the last ``again`` are fed again.

    ``window``: ZipAR's; 0, or a row or wider, is raster order. The clocks count tokens, as in serial decoding.
    """
    known = first * grid
    groups = row_groups(grid, window, rows) if 0 < window < grid else [[c] for c in range(rows * grid)]
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
    """What each wave feeds (the cells before its own, and those that the last wave drew) and draws; ``count`` cells are in the grid.

    ``wave`` int32 [B, n] is that of the cells from ``first`` on, -1 where not drawn.
    """
    last, out = first + wave.shape[1], []
    of_cell = np.full((len(wave), count), -1)
    of_cell[:, first:last] = wave
    for k in range(int(wave.max(initial=-1)) + 1):
        drawn = of_cell == k
        fed = np.zeros_like(drawn)
        if k:
            # The block's last cell is not fed: the cell it predicts is not in the block.
            fed[:, : last - 1] = drawn[:, 1:last] | (of_cell == k - 1)[:, : last - 1]
            fed[~drawn.any(1)] = False
        cells, row_of = _listed(drawn, count), fed.cumsum(1) - 1
        rows = np.where(cells < count, np.take_along_axis(row_of, (cells - 1).clip(min=0), axis=1), 0).clip(min=0)
        end = int(fed.any(0).nonzero()[0].max(initial=-1)) + 1
        out.append(Wave(cells, _listed(fed, count - 1), rows, end))
    return out


def _listed(chosen: np.ndarray, padding: int) -> np.ndarray:
    """The columns where bool [B, N] is True, int64 [B, most of a row], left-aligned and padded."""
    counts = chosen.sum(1, keepdims=True)
    columns = np.argsort(~chosen, axis=1, kind="stable")[:, : counts.max()]
    return np.where(np.arange(columns.shape[1]) < counts, columns, padding)
