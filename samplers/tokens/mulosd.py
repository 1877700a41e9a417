"""MuLo-SD: draft at low resolution, verify at high resolution in one pass, repair locally.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). A cycle:

1. the draft model M_q generates some rows of an image of 1/r the side, in ZipAR's order;
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

Shapes: B images, R = B or, with guidance, 2 B batch rows, G the target's side, h rows of a block.

The host waits for the device once per cycle for the map of rejections, which determines the number of passes that
follow, and where pixels of the tokenizer are checked (``upsampling.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from ...model_loaders.networks.llama import TokenModel
from ...model_loaders.networks.torch_state import in_own_state
from ...reports.record import ACCEPTED, EXPANDED, REJECTED
from ..conditioning import AnyCondition
from ..device import to_device
from ..engine import Sampler, Step, remark_draft
from . import islands as geometry
from .cache_slots import table_of
from .canvas import token_canvas
from .defaults import resolve
from .draws import PairedDraws, tempered
from .jacobi import iterate
from .llamagen import decode_schedule
from .looks import CachedTransformer, DeviceTable, FedRows, chosen_rows
from .mulosd_checks import check_grids, check_neighbours, check_pair
from .mulosd_state import Block, Reader, State, blocks_of, draft_reader
from .sampling import TokenDraw, guidance_applies, guided_passes
from .schedule import raster
from .settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings, rows_at_once
from .upsampling import UpSampling

# Logits of the target that are computed at once, of all images and branches: 64 MB in fp32.
_PIECE = 1 << 24


@in_own_state
@torch.inference_mode()
def mulosd(
    target: TokenModel,
    condition: AnyCondition,
    settings: MuLoSDSettings,
    noise: PairedDraws,
    *,
    draft: TokenModel,
    up_sampler: UpSampling,
) -> Sampler:
    """MuLo-SD on a LlamaGen or on Tar's de-tokenizer.

    Args:
        target, condition, noise: as :func:`samplers.tokens.llamagen.llamagen`; both models get the condition.
        settings: see :class:`MuLoSDSettings`.
        draft: a model of the same codes on a grid of 1/r the side, r an integer above 1.
        up_sampler: from draft to target and back, with the tokenizer of both; see ``upsampling.py``.

    Yields :class:`Step` after every pass of either model. While drafting, codes are the draft's, repeated over the
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

    canvas, prepared = token_canvas("mulosd", target, condition, settings, noise)
    canvas.report.settings = {**asdict(settings), "up_sampler": up_sampler.name}
    if settings.exact(target.grid) and rows_at_once(settings, draft.grid) == draft.grid:
        # The tokens are those of serial decoding, whatever the draft.
        result = yield from decode_schedule(canvas, prepared, raster(target.grid))
        step = result.report.maps["step"]
        result.report.maps.update(islands=np.zeros_like(step), waves=np.full_like(step, -1))
        return result

    neighbours = geometry.codebook_neighbours(up_sampler.vq.quantize, nearest, canvas.device)
    state = State(
        target=Reader(canvas, CachedTransformer(canvas, prepared), TokenDraw(canvas)),
        draft=draft_reader(canvas, draft, condition, noise, ratio),
        settings=settings,
        up_sampler=up_sampler,
        ratio=ratio,
        neighbours=neighbours,
        blocks=blocks_of(settings, draft.grid, ratio),
    )
    canvas.total = 2 * canvas.cells  # see Block
    for net in (target.net, draft.net):
        if net.records:
            net.runs_plain("draws of MuLo-SD")

    for block in state.blocks:
        # 1. The draft model generates the rows of the block.
        yield from draft_block(state, block)

        # 2. The draft is enlarged.
        enlarge(state, block)

        # 3. One pass of the target judges every token: R_T.
        hidden, rejections = judge_block(state, block)

        # 4. Rejections are expanded to R_X, and divided into islands and waves.
        wave = plan_repair(state, block, rejections)

        # 5. All islands are resampled in parallel, one wave per pass.
        yield from resample_islands(state, block, hidden, wave)

        # 6. The block is final. It is reduced for the draft model.
        reduce(state, block)

    canvas.report.similarity = torch.cat(state.pools).cpu().numpy()
    canvas.report.maps |= state.maps
    state.draft.canvas.expect_finite("draft")
    result = canvas.finish()
    remark_draft(result.report, draft)
    return result


# ------------------------------------------------------------ the six parts of a cycle


def draft_block(state: State, block: Block) -> Iterator[Step]:
    """1. Draft the rows of a block with M_q, pass by pass or in windows (``jacobi.py``)."""
    canvas, look, draw = state.draft
    schedule = block.schedule
    in_windows = state.settings.draft_parallel > 1
    draw.guided_by_pass = guided_passes(canvas.settings, schedule)
    ended = 0  # passes in this block

    # 1. The first pass of the first block is the prefill, whose last row predicts its cells.
    if block.is_first:
        with canvas.clock.phase("draft"):
            cells = to_device(np.array(schedule.passes[0].cells), canvas.device)
            hidden = _prefill_draft(state, in_windows).expand(-1, len(cells), -1)
            _draw_draft(state, hidden, cells, 0)
        ended += 1
        yield from state.end_draft_pass(block, ended)

    # 2. The other passes, in windows.
    if in_windows:
        # Finished images leave the batch only if no further block needs their keys and values.
        only_block = len(state.blocks) == 1
        for _ in iterate(canvas, look, draw, schedule, state.settings.draft_parallel, shrink=only_block):
            ended += 1
            yield from state.end_draft_pass(block, ended)
        return

    # 3. Or one by one.
    table = DeviceTable(table_of(schedule, one_by_one=True), look.cache.prefix, canvas.device)
    for k in range(1, len(schedule.passes)):
        with canvas.clock.phase("draft"):
            p = table.at(k)
            hidden = look.feed(canvas.values, p.fed, state.null)[:, p.predicted_by]
            _draw_draft(state, hidden, p.cells, k)
        ended += 1
        yield from state.end_draft_pass(block, ended)


def _prefill_draft(state: State, in_windows: bool) -> Tensor:
    """Have the draft model read the condition, into a cache for all blocks; returns hidden rows [R, 1, C]."""
    _, look, _ = state.draft

    # In windows every block has stand-ins with slots of their own, and padding.
    if in_windows:
        return look.prefill(state.null, max(table_of(b.schedule).slots for b in state.blocks))
    slots = max(table_of(b.schedule, one_by_one=True).slots for b in state.blocks)
    return look.prefill(state.null, slots - 1)  # without that of padding


def _draw_draft(state: State, hidden: Tensor, cells: Tensor, k: int) -> None:
    """Draw the cells int64 [n] of pass k of a block, which hidden rows [R, n, C] predict."""
    canvas, _, draw = state.draft
    logits = draw.logits(hidden, draw.guided_by_pass[k])
    canvas.decide(cells, draw.sample(logits, cells, canvas.values), k)


def enlarge(state: State, block: Block) -> None:
    """2. U_r: the draft of a block as tokens of the target. It is enlarged within a whole image: see
    :func:`whole_image`.
    """
    canvas = state.target.canvas
    draft = state.draft.canvas
    with canvas.clock.phase("up-sampling"):
        codes = draft.values[:, :-1].unflatten(1, draft.grid)[:, : block.end]
        large = state.up_sampler.up(whole_image(codes), state.ratio)
        own = large[:, block.row * state.ratio : block.end * state.ratio]
        canvas.values[:, block.first : block.last] = own.flatten(1)


def whole_image(codes: Tensor) -> Tensor:
    """The first rows of an image, int64 [B, h, w] with h up to w, as a square: what is below repeats the last row.

    The tokenizer normalises over all positions, attends to all of them, and pads at the borders. Codes of the first
    rows alone would therefore be other codes than those of the same rows in an image, which the target rejects. The
    up-sampler that the paper trains needs no rows below, because its convolutions are causal over rows.
    """
    _, height, width = codes.shape
    below = codes[:, -1:].expand(-1, width - height, -1)
    return torch.cat([codes, below], dim=1)


def judge_block(state: State, block: Block) -> tuple[Tensor, np.ndarray]:
    """3. One causal pass of M_p over a block, and over the one before it to update its keys and values.

    Returns hidden rows [R, n, C], which predict the cells of the block, and R_T, the rejected drafts, bool [B, h, G].
    The host waits for the device here.
    """
    canvas, look, draw = state.target
    with canvas.clock.phase("transformer"):
        # A row predicts the cell behind its own, so that the last cell of the block need not be fed.
        if block.is_first:
            # In a batch the last cell is fed as padding, see WavePass.
            slots = canvas.cells if canvas.images > 1 else canvas.cells - 1
            hidden = look.prefill(state.null, slots, canvas.values[:, : block.last - 1])
        else:
            # The cells of the block before may have changed since they were fed.
            fed = torch.arange(block.before, block.last - 1, device=canvas.device)
            rows = causal_rows(fed, fed, look.cache.prefix, block.last - 1)
            hidden = look.feed(canvas.values, rows, state.null)

        hidden = hidden[:, -block.cells :]  # the last rows predict the cells of the block

    with canvas.clock.phase("verification"):
        pool, rejections = judge_drafts(state.target, state.settings, hidden, block.first, state.neighbours)
    state.pools.append(pool.flatten())
    return hidden, rejections.cpu().numpy().reshape(canvas.images, -1, canvas.grid[1])


def causal_rows(cells: Tensor, position: Tensor, prefix: int, end: int) -> FedRows:
    """Rows of cells int64 [...] at a position each, which attend to the condition of ``prefix`` slots and to all cells
    up to their own; to cells below ``end`` at most.
    """
    mask = torch.arange(prefix + end, device=cells.device) <= prefix + position[..., None]
    return FedRows(cell=cells, position=position, slot=cells + prefix, end=prefix + end, mask=mask)


def judge_drafts(
    target: Reader, s: MuLoSDSettings, hidden: Tensor, first: int, neighbours: Tensor
) -> tuple[Tensor, Tensor]:
    """Pooled probabilities fp32 [B, n] of the drafts from cell ``first`` on, and R_T, the rejected ones, bool [B, n].

    ``hidden`` [R, n, C] predicts these cells.
    """
    size = cells_at_once(len(hidden), target.canvas.model.net.config.vocab)
    cells = torch.arange(first, first + hidden.shape[1], device=hidden.device)
    pools = []
    own = []
    for part, rows in zip(cells.split(size), hidden.split(size, dim=1), strict=True):
        logits = target.draw.logits(rows, guidance_applies(s, part - 1))
        p = tempered(logits, s).softmax(-1)
        drafts = target.canvas.values[:, part]
        pools.append(geometry.pooled(p, drafts, neighbours))
        own.append(p.gather(-1, drafts[..., None])[..., 0])

    pool = torch.cat(pools, dim=1)
    if s.acceptance_target:
        return pool, geometry.all_but_share(pool, s.acceptance_target, torch.cat(own, dim=1), first)
    return pool, pool < s.tau


def cells_at_once(rows: int, codes: int) -> int:
    """Cells whose logits are computed at once, so that memory is bounded: of ``rows`` batch rows of a codebook."""
    return max(1, _PIECE // (rows * codes))


def plan_repair(state: State, block: Block, rejections: np.ndarray) -> np.ndarray:
    """4. R_X and its islands, of R_T bool [B, h, G]; returns the wave in which each cell is resampled, int32 [B, h,
    G], -1 for none.
    """
    s = state.settings
    region = geometry.suffix(rejections) if s.repair == SUFFIX else geometry.expand(rejections, s.expansion)
    islands = geometry.islands(region)
    if s.resample_order == ONE_BY_ONE:
        wave = geometry.waves(region.astype(np.int32))  # one island in raster order
    else:
        wave = geometry.waves(islands, s.resample_window or None)

    _record_plan(state, block, rejections, islands, wave)
    return wave


def _record_plan(state: State, block: Block, rejections: np.ndarray, islands: np.ndarray, wave: np.ndarray) -> None:
    """Record what is accepted, which the present pass decides, and what is resampled; arrays as in
    :func:`plan_repair`.
    """
    canvas = state.target.canvas
    region = islands > 0
    outcome = np.where(rejections, REJECTED, np.where(region, EXPANDED, ACCEPTED)).astype(np.uint8)
    decided = np.where(region, -1, state.done).astype(np.int32)
    canvas.outcome[:, block.first : block.last] = to_device(outcome.reshape(len(outcome), -1), canvas.device)
    canvas.fixed_at[:, block.first : block.last] = to_device(decided.reshape(len(decided), -1), canvas.device)
    canvas.report.add(
        accepted=(~rejections).sum(),
        rejected=rejections.sum(),
        expanded=(region & ~rejections).sum(),
        islands=islands.max(axis=(1, 2)).sum(),
        waves=wave.max() + 1,
    )

    # Island numbers continue from one cycle to the next.
    rows = np.s_[:, block.row * state.ratio : block.end * state.ratio]
    before = state.maps["islands"].max(axis=(1, 2), keepdims=True)
    state.maps["islands"][rows] = np.where(region, islands + before, 0)
    state.maps["waves"][rows] = wave


def resample_islands(state: State, block: Block, hidden: Tensor, wave: np.ndarray) -> Iterator[Step]:
    """5. Resample the islands of a block, one wave per pass.

    The first wave belongs to the pass of the verification, whose ``hidden`` rows [R, n, C] predict the cells of the
    block.
    """
    canvas = state.target.canvas
    waves = geometry.wave_passes(wave.reshape(len(wave), -1), block.first, canvas.cells)
    planned = max(1, len(waves))

    for k, w in enumerate(waves):
        cells = to_device(w.cells, canvas.device)
        if k == 0:
            predicted_by = (cells - block.first).clamp(max=hidden.shape[1] - 1)  # any row for padding
        else:
            yield from state.end_pass(block.repaired(k, planned))
            hidden, predicted_by = _feed_wave(state, w)
        _draw_wave(state, hidden, cells, predicted_by)

    yield from state.end_pass(block.repaired(planned, planned))


def _feed_wave(state: State, w: geometry.WavePass) -> tuple[Tensor, Tensor]:
    """A pass over what the wave before has drawn: hidden rows [R, m, C], and which of them predicts each cell of the
    wave, int64 [B, n].
    """
    canvas, look, _ = state.target
    fed = to_device(w.fed, canvas.device)
    predicted_by = to_device(w.predicted_by, canvas.device)
    with canvas.clock.phase("transformer"):
        # The last cell is padding and has no position, see WavePass.
        position = fed.clamp(max=canvas.cells - 2)
        rows = causal_rows(fed, position, look.cache.prefix, w.end)
        return look.feed(canvas.values, rows, state.null), predicted_by


def _draw_wave(state: State, hidden: Tensor, cells: Tensor, predicted_by: Tensor) -> None:
    """Draw cells int64 [B, n], each predicted by one of the hidden rows [R, m, C], ``predicted_by`` int64 [B, n]."""
    canvas, _, draw = state.target
    size = cells_at_once(len(hidden), draw.net.config.vocab)
    with canvas.clock.phase("sampling"):
        for part, rows in zip(cells.split(size, dim=1), predicted_by.split(size, dim=1), strict=True):
            logits = draw.logits(chosen_rows(hidden, rows), guidance_applies(state.settings, part - 1))
            canvas.decide(part, draw.sample(logits, part, canvas.values), state.done)


def reduce(state: State, block: Block) -> None:
    """6. D_r: what is final as tokens of the draft model, from which it continues. The last block needs none."""
    canvas = state.target.canvas
    if block.last == canvas.cells:
        return
    small = state.draft.canvas.grid[1]
    with canvas.clock.phase("up-sampling"):
        codes = canvas.values[:, : block.last].view(-1, block.end * state.ratio, canvas.grid[1])
        reduced = state.up_sampler.down(whole_image(codes), state.ratio)
        own = reduced[:, block.row : block.end]
        state.draft.canvas.values[:, block.row * small : block.end * small] = own.flatten(1)
