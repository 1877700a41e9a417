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

- p is the sampling distribution of the target: after guidance, temperature, top-k, top-p and ``entropy_temperature``.
- A later wave feeds the cells before its own and the cells drawn since, at their own positions. A query attends to
  every position before it, including drafts of other islands: the context has no holes.
- Keys and values of accepted tokens behind a change are not updated until the next cycle. This is the locality that the
  method relies on, and the reason why it is *lossy*.
- The pass that updates the keys and values of the last block is the one that verifies the next block.
- The draft model reads the new rows of the reduced image only; its cache of earlier rows is kept.
- The draft model has its own random numbers; the target's are those of the cells, as in ``llamagen.py``. With tau above
  1 in raster order the tokens are therefore those of serial decoding. A whole image is then decoded serially, without a
  draft.

The host waits for the device once per cycle for the map of rejections, which determines the number of passes that
follow, and where pixels of the tokenizer are checked (``upsampling.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.llama import Cache, TokenModel
from ...reports.record import ACCEPTED, EXPANDED, REJECTED
from ..conditioning import AnyCondition
from ..driver import to_device
from . import islands as geometry
from .draws import PairedDraws, tempered
from .jacobi import chosen_rows, iterate
from .llamagen import decode
from .loop import (
    TokenRun,
    TokenSampler,
    TokenStep,
    begin,
    decide,
    feed_tokens,
    guidance_applies,
    guided_logits,
    prefill,
    raster_only,
    resolve,
    sample,
)
from .schedule import DeviceTable, Schedule, next_token_passes, raster
from .settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings, guides, neighbours_of, rows_at_once
from .upsampling import UpSampling
from .zipar import row_groups

# Logits of one piece of the verification: 64 MB in fp32.
_BLOCK = 1 << 24


def mulosd(
    target: TokenModel,
    condition: AnyCondition,
    settings: MuLoSDSettings,
    noise: PairedDraws,
    *,
    draft: TokenModel,
    up_sampler: UpSampling,
) -> TokenSampler:
    """MuLo-SD on a LlamaGen or on Tar's de-tokenizer.

    Args:
        target, condition, noise: as :func:`samplers.tokens.llamagen.llamagen`; both models get the condition.
        settings: see :class:`MuLoSDSettings`.
        draft: a model of the same codes on a grid of 1/r the side, r an integer above 1.
        up_sampler: from draft to target and back, with the tokenizer of both; see ``upsampling.py``.

    Yields :class:`TokenStep` after every pass of either model. While drafting, codes are the draft's, repeated over the
    cells they cover. The report counts all passes (``transformer_passes``), of which the draft's (``draft_passes``);
    accepted and rejected drafts; accepted ones that were resampled beside a rejected one (expanded); islands; and
    waves, which all images share. ``similarity``: pooled probabilities.

    Raises:
        UserError: a condition that does not fit either model, models or a tokenizer that do not belong together, a PAR,
            a grid that is no integer multiple, so many neighbours that nothing can be rejected, or logits or pixels
            that are not finite.
    """
    check_pair(target, draft, up_sampler.vq.config.codes, "MuLo-SD")
    ratio = check_grids(target, draft)
    settings = resolve(settings, target)
    nearest = check_neighbours(settings, target.net.config.vocab)

    run = begin("mulosd", target, condition, settings, noise)
    run.report.settings = {**asdict(settings), "up_sampler": up_sampler.name}
    if settings.exact(target.grid) and rows_at_once(settings, draft.grid) == draft.grid:
        # The tokens are those of serial decoding, whatever the draft.
        result = yield from decode(run, raster(target.grid))
        step = result.report.maps["step"]
        result.report.maps.update(islands=np.zeros_like(step), waves=np.full_like(step, -1))
        return result

    drafter = drafting_run(run, draft, condition, noise, ratio)
    with torch.inference_mode():
        neighbours = geometry.codebook_neighbours(up_sampler.vq.quantize, nearest, run.device)
    state = State(run, drafter, settings, up_sampler, ratio, neighbours)
    blocks = blocks_of(settings, draft.grid, ratio)
    state.total = sum(block.draft_passes + 1 for block in blocks)
    for block in blocks:
        # 1. The draft model generates the rows of the block.
        yield from draft_rows(state, block)

        # 2. The draft is enlarged.
        enlarge(state, block)

        # 3. One pass of the target judges every token: R_T.
        hidden, rejections = verify_block(state, block)

        # 4. Rejections are expanded to R_X, and divided into islands and waves.
        wave = plan_repair(state, block, rejections)

        # 5. All islands are resampled in parallel, one wave per pass.
        yield from resample_islands(state, block, hidden, wave)

        # 6. The block is final. It is reduced for the draft model.
        reduce(state, block)

    run.report.similarity = torch.cat(state.pools).cpu().numpy()
    run.report.maps |= state.maps
    drafter.check_logits("draft", draft.name)
    return run.finish(state.maps["step"], state.maps["outcome"].astype(np.uint8))


def drafting_run(run: TokenRun, draft: TokenModel, condition: AnyCondition, noise: PairedDraws, ratio: int) -> TokenRun:
    """The run of the draft model, which shares report and clock of the target's."""
    # Guidance covers the same part of the draft as of the target.
    own = run.settings
    if own.cfg_interval is not None:
        own = replace(own, cfg_interval=own.cfg_interval // ratio**2)

    drafter = begin("mulosd", draft, condition, own, noise)

    drafter.report = run.report
    drafter.clock = run.clock
    drafter.stream = "draft"
    drafter.phases = ("draft", "draft")
    return drafter


def check(target: TokenModel, settings: MuLoSDSettings) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: so many neighbours that nothing can be rejected, or guidance of a model that was trained without a
            null class.
    """
    resolve(settings, target)
    check_neighbours(settings, target.net.config.vocab)


def check_pair(target: TokenModel, draft: TokenModel, codes: int, sampler: str) -> None:
    """Check that two models generate the ``codes`` codes of one tokenizer in raster order. ``sampler``: its title, for
    the message.

    Raises:
        UserError: they do not.
    """
    raster_only(sampler, target, draft, janus="needs a model of a smaller image, which no Janus draws")
    of_target = target.net.config.vocab
    of_draft = draft.net.config.vocab
    if of_draft != of_target:
        raise UserError(
            f"draft: {draft.name} has {of_draft} codes, and {target.name} has {of_target}; choose two models that use "
            "the same VQ tokenizer."
        )

    if of_target != codes:
        raise UserError(
            f"decoder: it has {codes} codes, and {target.name} has {of_target}; choose the VQ tokenizer that the model "
            "was trained with."
        )


def check_grids(target: TokenModel, draft: TokenModel) -> int:
    """The ratio r of the sides of two grids.

    Raises:
        UserError: it is not an integer above 1.
    """
    ratio, rest = divmod(target.grid, draft.grid)
    if rest or ratio < 2:
        raise UserError(
            f"draft: {draft.name} draws {draft.grid} x {draft.grid} tokens, and {target.name} draws {target.grid} x "
            f"{target.grid}; choose a draft of half, a third or a quarter of the side."
        )
    return ratio


def check_neighbours(settings: MuLoSDSettings, codes: int) -> int:
    """The number of neighbours in a codebook of ``codes``.

    Raises:
        UserError: they are all codes.
    """
    nearest = neighbours_of(settings, codes)
    if nearest >= codes - 1:
        raise UserError(
            f"neighbours: {nearest} is all of the {codes} codes, so that nothing could be rejected; choose fewer."
        )
    return nearest


# ------------------------------------------------------------ the state of a generation


@dataclass(frozen=True)
class Block:
    """Rows ``row`` to ``end`` - 1 of the draft's grid, which cover the cells ``first`` to ``last`` - 1 of the
    target's.
    """

    row: int
    end: int
    first: int
    last: int
    schedule: Schedule  # passes of the draft model; the first one is empty but in the first block

    @property
    def draft_passes(self) -> int:
        return sum(bool(p.cells) for p in self.schedule.passes)


def blocks_of(settings: MuLoSDSettings, small: int, ratio: int) -> list[Block]:
    """The blocks of a draft of ``small`` x ``small`` tokens on a grid of ``ratio`` times the side."""
    rows = rows_at_once(settings, small)
    width = small * ratio
    blocks = []
    for row in range(0, small, rows):
        end = min(row + rows, small)
        again = rows if row else 0
        schedule = draft_schedule(small, settings.draft_window, row, end - row, again)
        blocks.append(Block(row, end, row * ratio * width, end * ratio * width, schedule))
    return blocks


@dataclass(eq=False)
class State:
    """State of a generation with two models, which share one report and clock."""

    run: TokenRun  # of the target M_p
    drafter: TokenRun  # of the draft model M_q
    settings: MuLoSDSettings
    up_sampler: UpSampling
    ratio: int  # r
    neighbours: Tensor  # int32 [V, 1 + k], see islands.py
    cache: Cache | None = None
    draft_cache: Cache | None = None
    fed: int = 0  # the first cells of the target's grid whose keys and values are final
    done: int = 0  # passes so far
    total: int = 0  # passes that are known to be needed
    pools: list[Tensor] = field(default_factory=list)  # pooled probabilities fp32 [B * n] of every block
    maps: dict[str, np.ndarray] = field(default_factory=dict)  # int32 [B, G, G]

    def __post_init__(self) -> None:
        shape = (len(self.run.tokens), self.run.grid, self.run.grid)
        for name in ("step", "outcome", "islands", "waves"):
            self.maps[name] = np.zeros(shape, np.int32)

    @property
    def null(self) -> bool:
        """Whether the rows of the null condition are evaluated."""
        return guides(self.settings)

    def count_draft_pass(self) -> None:
        self.done += 1
        self.run.report.add(draft_passes=1)

    def step(self, drafted_from: int | None = None) -> TokenStep:
        """The partial result. The draft's rows from ``drafted_from`` on are repeated over the cells that they cover;
        None: no rows.
        """
        out = self.run.step(self.done, max(self.done, self.total))
        if drafted_from is None:
            return out

        draft = self.drafter.step(0, 0)
        codes = draft.codes.repeat_interleave(self.ratio, 1).repeat_interleave(self.ratio, 2)
        drafted = draft.decided.repeat_interleave(self.ratio, 1).repeat_interleave(self.ratio, 2)
        drafted[:, : drafted_from * self.ratio] = False
        return replace(out, codes=torch.where(drafted, codes, out.codes), decided=out.decided | drafted)


# ------------------------------------------------------------ the six parts of a cycle


def draft_rows(state: State, block: Block) -> Iterator[TokenStep]:
    """1. Draft the rows of a block with M_q, pass by pass or in windows (``jacobi.py``)."""
    run = state.drafter
    settings = state.settings
    schedule = block.schedule
    guided = run.guided(schedule)
    in_windows = settings.draft_parallel > 1
    with torch.inference_mode(), run.clock.phase("draft"):
        if state.draft_cache is None:
            # Every block has its own stand-ins, and with draft_parallel a slot for each of them.
            slots = run.count - 1
            if in_windows:
                slots = max(b.schedule.ahead.slots for b in blocks_of(settings, run.grid, state.ratio))
            hidden, state.draft_cache = prefill(run, state.null, slots)
        cache = state.draft_cache
        table = DeviceTable(schedule.table, cache.prefix, run.device)

    for k, plan in enumerate(schedule.passes[:1] if in_windows else schedule.passes):
        if not plan.cells:  # the first pass of further rows
            continue
        with torch.inference_mode(), run.clock.phase("draft"):
            p = table.at(k)
            if k:
                hidden = feed_tokens(run, cache, p.fed, p.position, p.slot, state.null, p.end, p.mask)
            decide(run, p.cells, hidden[:, p.rows], guided[k])
        state.count_draft_pass()
        with run.clock.paused():
            yield state.step(drafted_from=block.row)

    if in_windows:
        calls = 0
        # The cache of further rows belongs to all images.
        whole = rows_at_once(settings, run.grid) == run.grid
        for _ in iterate(run, schedule, settings.draft_parallel, cache, shrink=whole):
            calls += 1
            state.count_draft_pass()
            with run.clock.paused():
                yield state.step(drafted_from=block.row)
        state.total -= len(schedule.passes) - 1 - calls  # calls that were not needed


def enlarge(state: State, block: Block) -> None:
    """2. U_r: the draft of a block as tokens of the target. Rows above are enlarged with it, as context."""
    small = state.drafter.grid
    with torch.inference_mode(), state.run.clock.phase("up-sampling"):
        codes = state.drafter.tokens[:, :-1].view(-1, small, small)[:, : block.end]
        large = state.up_sampler.up(codes, state.ratio)
        state.run.tokens[:, block.first : block.last] = large[:, block.row * state.ratio :].flatten(1)


def verify_block(state: State, block: Block) -> tuple[Tensor, np.ndarray]:
    """3. One causal pass of M_p over a block, and over the last one to update its keys and values.

    Returns hidden rows [R, n, C], which predict the cells of the block, and R_T, the rejected drafts, bool [B, h, G].
    The host waits for the device here.
    """
    run = state.run
    state.done += 1
    with torch.inference_mode():
        with run.clock.phase("transformer"):
            if state.cache is None:
                # A single image has no padding, and needs no slot for the last cell.
                slots = run.count - (len(run.tokens) == 1)
                hidden, state.cache = prefill(run, state.null, slots, run.tokens[:, : block.last - 1])
            else:
                fed = torch.arange(state.fed, block.last - 1, device=run.device)
                slot = fed + state.cache.prefix
                end = state.cache.prefix + block.last - 1
                mask = torch.arange(end, device=run.device) <= slot[:, None]
                hidden = feed_tokens(run, state.cache, fed, fed, slot, state.null, end, mask)
                hidden = hidden[:, block.first - 1 - state.fed :]

        with run.clock.phase("verification"):
            pool, rejections = verify(run, state.settings, hidden, block.first, state.neighbours)
        state.pools.append(pool.flatten())

    state.fed = block.first
    return hidden, rejections.cpu().numpy().reshape(len(run.tokens), -1, run.grid)


def verify(run: TokenRun, s: MuLoSDSettings, hidden: Tensor, first: int, neighbours: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled probabilities fp32 [B, n] of the drafts from cell ``first`` on, and R_T, the rejected ones, bool [B, n].

    ``hidden`` [R, n, C] predicts these cells. They are computed in pieces, so that memory is bounded.
    """
    size = max(1, _BLOCK // (len(hidden) * run.net.config.vocab))
    cells = torch.arange(first, first + hidden.shape[1], device=hidden.device)
    pools = []
    own = []
    for part, rows in zip(cells.split(size), hidden.split(size, dim=1), strict=True):
        logits = guided_logits(run, rows, guidance_applies(s, part - 1))
        p = tempered(logits, s).softmax(-1)
        drafts = run.tokens[:, part]
        pools.append(geometry.pooled(p, drafts, neighbours))
        own.append(p.gather(-1, drafts[..., None])[..., 0])

    pool = torch.cat(pools, dim=1)
    return pool, geometry.rejected(pool, s.tau, s.acceptance_target, torch.cat(own, dim=1), first)


def plan_repair(state: State, block: Block, rejections: np.ndarray) -> np.ndarray:
    """4. R_X and its islands, of R_T bool [B, h, G]; returns the wave in which each cell is resampled, int32 [B, h,
    G], -1 for none.
    """
    run = state.run
    s = state.settings
    region = geometry.suffix(rejections) if s.repair == SUFFIX else geometry.expand(rejections, s.expansion)
    islands = geometry.islands(region)

    together = region.astype(np.int32) if s.resample_order == ONE_BY_ONE else islands
    wave = geometry.waves(together, s.resample_window or None)
    with torch.inference_mode():
        run.decided[:, block.first : block.last] = to_device(~region.reshape(len(region), -1), run.device)

    run.report.add(
        accepted=(~rejections).sum(),
        rejected=rejections.sum(),
        expanded=(region & ~rejections).sum(),
        islands=islands.max(axis=(1, 2)).sum(),
        waves=wave.max() + 1,
    )

    rows = np.s_[:, block.row * state.ratio : block.end * state.ratio]
    state.maps["step"][rows] = state.done - 1 + np.maximum(wave, 0)
    state.maps["outcome"][rows] = np.where(rejections, REJECTED, np.where(region, EXPANDED, ACCEPTED))
    state.maps["waves"][rows] = wave

    # Island numbers continue from one cycle to the next.
    before = state.maps["islands"].max(axis=(1, 2), keepdims=True)
    state.maps["islands"][rows] = np.where(islands > 0, islands + before, 0)
    return wave


def resample_islands(state: State, block: Block, hidden: Tensor, wave: np.ndarray) -> Iterator[TokenStep]:
    """5. Resample the islands of a block, one wave per pass. ``hidden`` of the verification predicts the cells of
    the first wave.
    """
    run = state.run
    cache = state.cache
    assert cache is not None  # the verification filled it
    waves = resampled(wave.reshape(len(wave), -1), block.first, run.count)
    state.total += max(0, len(waves) - 1)

    for k, w in enumerate(waves):
        with torch.inference_mode():
            cells = to_device(w.cells, run.device)

            # The first wave is predicted by the verification, the others by a pass over what the wave before has drawn.
            if k == 0:
                index = (cells - block.first).clamp(max=hidden.shape[1] - 1)
            else:
                state.done += 1
                fed = to_device(w.fed, run.device)
                index = to_device(w.rows, run.device)
                with run.clock.phase("transformer"):
                    # Nothing is fed at the last cell, which is padding; the table of positions has no entry for it.
                    position = fed.clamp(max=run.count - 2)
                    end = cache.prefix + w.end
                    mask = torch.arange(end, device=run.device) <= cache.prefix + position[..., None]
                    hidden = feed_tokens(run, cache, fed, position, fed + cache.prefix, state.null, end, mask)

            with run.clock.phase("sampling"):
                guided = guidance_applies(state.settings, cells - 1)
                logits = guided_logits(run, chosen_rows(hidden, index), guided)
                run.tokens.scatter_(1, cells, sample(run, logits, cells))
                run.decided.scatter_(1, cells, True)
        if k < len(waves) - 1:
            with run.clock.paused():
                yield state.step()
    with run.clock.paused():
        yield state.step()


def reduce(state: State, block: Block) -> None:
    """6. D_r: what is final as tokens of the draft model, from which it continues. The last block needs none."""
    run = state.run
    if block.last == run.count:
        return
    small = state.drafter.grid
    with torch.inference_mode(), run.clock.phase("up-sampling"):
        codes = run.tokens[:, : block.last].view(-1, block.end * state.ratio, run.grid)
        reduced = state.up_sampler.down(codes, state.ratio)
        state.drafter.tokens[:, block.row * small : block.end * small] = reduced[:, block.row :].flatten(1)


# ------------------------------------------------------------ schedules


@lru_cache(maxsize=64)
def draft_schedule(grid: int, window: int, first: int, rows: int, again: int) -> Schedule:
    """Passes in which the draft model generates ``rows`` of its grid behind the ``first`` ones, of which the last
    ``again`` are fed again.

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
    return Schedule(grid, next_token_passes(behind, grid, cfg_steps, known, again * grid), known=known)


class Wave(NamedTuple):
    """Cells that are resampled in one pass: int64 arrays [B, .], each image's entries left-aligned."""

    cells: np.ndarray  # cells to draw; padded with the number of cells of the grid
    # cells fed before; padded with the last cell, which no row attends to. Empty in the first wave, whose predictions
    # come from the verification.
    fed: np.ndarray
    rows: np.ndarray  # for each of cells the index in fed of the cell that predicts it
    end: int  # cells below this one are attended to


def resampled(wave: np.ndarray, first: int, count: int) -> list[Wave]:
    """What each wave feeds (the cells before its own, and those that the last wave drew) and draws; ``count`` cells are
    in the grid.

    ``wave`` int32 [B, n] is that of the cells from ``first`` on, -1 where not drawn.
    """
    last = first + wave.shape[1]
    of_cell = np.full((len(wave), count), -1)
    of_cell[:, first:last] = wave

    out = []
    for k in range(int(wave.max(initial=-1)) + 1):
        drawn = of_cell == k
        fed = np.zeros_like(drawn)
        if k:
            # The block's last cell is not fed: the cell it predicts is not in the block.
            before = drawn[:, 1:last]
            drawn_since = of_cell[:, : last - 1] == k - 1
            fed[:, : last - 1] = before | drawn_since
            fed[~drawn.any(1)] = False

        cells = _listed(drawn, count)
        row_of = fed.cumsum(1) - 1
        predicted_by = np.take_along_axis(row_of, (cells - 1).clip(min=0), axis=1)
        rows = np.where(cells < count, predicted_by, 0).clip(min=0)
        end = int(fed.any(0).nonzero()[0].max(initial=-1)) + 1
        out.append(Wave(cells, _listed(fed, count - 1), rows, end))
    return out


def _listed(chosen: np.ndarray, padding: int) -> np.ndarray:
    """The columns where bool [B, N] is True, int64 [B, most of a row], left-aligned and padded."""
    counts = chosen.sum(1, keepdims=True)

    columns = np.argsort(~chosen, axis=1, kind="stable")[:, : counts.max()]
    return np.where(np.arange(columns.shape[1]) < counts, columns, padding)
