"""MuLo-SD: drafted small, verified large in one pass, repaired locally.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). A cycle:

1. the draft model M_q writes rows of a picture of 1/r the side (all of it by default, in ZipAR's order);
2. the draft is enlarged to the target's grid (U_r, ``upsampling.py``);
3. one pass of the target M_p over it gives p_i at every token; a draft whose probability, pooled over its code's nearest
   neighbours, is below tau is rejected (R_T);
4. each rejection reaches out by a radius l, but never in front of the first one (R_X), and R_X falls into islands;
5. all islands are drawn again at the same time, in waves (``islands.py``);
6. what results is committed. If rows are left, it is made small again (D_r) for the draft to go on from.

No public code exists and the text leaves much open. Ours are these choices:

- p is the distribution that the target would draw from: after guidance, temperature, top-k and top-p.
- A later wave feeds, at their own positions, what stands before its cells and what was drawn and not fed yet. A query sees
  every position before it, drafts of other islands included: there are no holes in the context.
- Keys and values of kept tokens behind a change stay as they are until the next cycle: that is the locality the method
  rests on, and why it is *lossy*.
- The pass that brings the last block's keys and values up to date is the one that verifies the next block.
- Of the reduced picture the draft takes the new rows only; what it has read before stays.
- The draft's random numbers are its own; the target's belong to its cells, as in ``llamagen.py``. With tau above 1 in raster
  order the pictures are therefore those of serial decoding, token for token.

The host waits for the device once a cycle, for the map of rejections, which decides how many passes follow.
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
from ...model_loaders.networks.gpt import Cache, TokenModel
from ...reports.record import ACCEPTED, EXPANDED, REJECTED
from ..conditioning import AnyCondition
from ..driver import PauseClock
from . import islands as geometry
from .draws import Draws, allowed, draw
from .llamagen import raster
from .loop import TokenRun, TokenSampled, TokenSampler, TokenStep, begin, lay_out, raster_only
from .schedule import Schedule, next_token_passes
from .settings import ONE_BY_ONE, SUFFIX, LanternSettings, MuLoSDSettings, neighbours_of
from .upsampling import UpSampling
from .zipar import row_groups

# Logits of one piece of the verification: 64 MB in fp32.
_BLOCK = 1 << 24


# ------------------------------------------------------------------------------------------------ what belongs together


def same_codes(target: TokenModel, draft: TokenModel, codes: int, name: str) -> None:
    """Nothing if both write codes of the tokenizer ``name``, which has ``codes``, in raster order.

    Raises:
        UserError: they do not.
    """
    for model in (target, draft):
        raster_only(name, model)
    a, b = target.net.config.vocab, draft.net.config.vocab
    if a != b:
        raise UserError(
            f"draft: {draft.name} writes {b} codes, {target.name} {a}; choose two models of one VQ tokenizer."
        )
    if a != codes:
        raise UserError(
            f"decoder: it has {codes} codes, {target.name} writes {a}; choose the VQ tokenizer that it was trained with."
        )


def pooling(settings: MuLoSDSettings | LanternSettings, codes: int) -> int:
    """How many neighbours a code has.

    Raises:
        UserError: all codes would be neighbours.
    """
    k = neighbours_of(settings, codes)
    if k >= max(1, codes - 1):
        raise UserError(
            f"neighbours: {k} is all of the {codes} codes, so that nothing could be rejected; choose fewer, or -1."
        )
    return k


def _factor(target: TokenModel, draft: TokenModel, up_sampler: UpSampling) -> int:
    same_codes(target, draft, up_sampler.vq.config.codes, "MuLo-SD")
    factor, rest = divmod(target.grid, draft.grid)
    if rest or factor < 2:
        raise UserError(
            f"draft: {draft.name} draws {draft.grid} x {draft.grid} tokens, {target.name} {target.grid} x {target.grid}, which is no "
            "whole multiple above 1; choose a draft of half, a third or a quarter of the side."
        )
    up_sampler.fits(factor)
    return factor


class _OwnStream:
    """Draws under another name, so that the draft's do not meet the target's."""

    def __init__(self, draws: Draws, stream: str):
        self._draws, self._stream = draws, stream

    def __len__(self) -> int:
        return len(self._draws)

    def gumbel(self, stream: str, cells: Tensor, values: int) -> Tensor:
        return self._draws.gumbel(self._stream, cells, values)


# ------------------------------------------------------------------------------------------------ schedules


@lru_cache(maxsize=64)
def draft_schedule(grid: int, window: int, first: int = 0, rows: int | None = None, again: int = 0) -> Schedule:
    """Passes in which the draft model writes some rows.

    Args:
        grid: its side.
        window: ZipAR's; 0, or a whole row, is raster order.
        first: rows that are there already.
        rows: how many are written; None for the rest.
        again: so many of the rows that are there, the last, are read once more.

    Returns:
        The schedule. Its clocks count tokens, as those of plain decoding do.
    """
    rows, known = grid - first if rows is None else rows, first * grid
    plain = not 0 < window < grid
    groups = [[c] for c in range(rows * grid)] if plain else row_groups(grid, window, rows)
    groups = [[known + c for c in group] for group in groups]
    clocks = np.cumsum([known - 1, *map(len, groups)])[:-1].tolist()
    return Schedule(grid, next_token_passes(groups, grid, clocks, known, again * grid), known=known)


class Redraw(NamedTuple):
    """A wave: arrays int64 [B, .], an image's numbers from the left.

    Attributes:
        cells: what is drawn; the grid's number of cells where an image has less to draw.
        fed: what is fed before; the last cell, which nobody ever looks at, where an image has less to feed. Empty in the
            first wave, whose predictions are the verification's.
        by: for each of ``cells`` the one of ``fed`` that predicts it.
        end: cells below this one are looked at.
    """

    cells: np.ndarray
    fed: np.ndarray
    by: np.ndarray
    end: int


def _stack(parts: list[np.ndarray], blank: int) -> np.ndarray:
    out = np.full((len(parts), max(map(len, parts))), blank, np.int64)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return out


def redraws(wave: np.ndarray, first: int, count: int) -> list[Redraw]:
    """What each wave feeds and draws.

    Args:
        wave: int32 [B, n], of the cells from ``first`` on; -1 where nothing is drawn.
        first: number of the block's first cell.
        count: cells of the grid.
    """
    last, out = first + wave.shape[1], []
    parts = []
    for row in wave:
        order = np.argsort(row, kind="stable")[np.count_nonzero(row < 0) :]
        parts.append(np.split(first + order, np.cumsum(np.bincount(row[order]))[:-1]) if len(order) else [])
    none = np.zeros(0, np.int64)
    for k in range(int(wave.max(initial=-1)) + 1):
        cells = [part[k] if k < len(part) else none for part in parts]
        # The block's last cell is fed to nobody: what it predicts is not in the block.
        before = [part[k - 1][part[k - 1] < last - 1] if 0 < k < len(part) else none for part in parts]
        fed = [np.union1d(c - 1, b) if k else none for c, b in zip(cells, before, strict=True)]
        by = [np.searchsorted(f, c - 1) for f, c in zip(fed, cells, strict=True)]
        end = max(int(f[-1]) + 1 if len(f) else 0 for f in fed)
        out.append(Redraw(_stack(cells, count), _stack(fed, count - 1), _stack(by, 0), end))
    return out


def _uploaded(plan: list[Redraw], device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Waves on a device, in one copy."""
    if not plan:
        return
    flat = torch.from_numpy(np.concatenate([a.ravel() for p in plan for a in p[:3]])).to(device)
    parts = iter(flat.split([a.size for p in plan for a in p[:3]]))
    for p in plan:
        cells, fed, by = (next(parts).view(a.shape) for a in p[:3])
        yield cells, fed, by, p.end


# ------------------------------------------------------------------------------------------------ the run


@dataclass(eq=False)
class _Maps:
    """What became of every token, arrays [B, G, G] on the host."""

    step: np.ndarray
    outcome: np.ndarray
    islands: np.ndarray
    waves: np.ndarray

    @staticmethod
    def of(shape: tuple[int, int, int]) -> _Maps:
        return _Maps(*(np.zeros(shape, kind) for kind in (np.int32, np.uint8, np.int32, np.int32)))


@dataclass(eq=False)
class _Work:
    """State of one generation.

    Attributes:
        run, drafter: of the target and of the draft model, into one report.
        up: see ``upsampling.py``.
        factor: the paper's r.
        table: neighbours of every code.
        decided: bool of the shape of the target's tokens.
        cache, draft_cache: keys and values.
        done, total: passes, as far as they are known.
        pools: pooled probabilities of all drafts verified so far.
    """

    run: TokenRun
    drafter: TokenRun
    settings: MuLoSDSettings
    up: UpSampling
    factor: int
    table: Tensor
    decided: Tensor
    maps: _Maps
    cache: Cache | None = None
    draft_cache: Cache | None = None
    done: int = 0
    total: int = 0
    pools: list[Tensor] = field(default_factory=list)

    # -------------------------------------------------------------------------------------------- how far it is

    @property
    def tokens(self) -> Tensor:
        """int64 [B, N + 1]; the last column takes what images with less to draw are given."""
        return self.run.tokens

    @property
    def grid(self) -> int:
        return self.run.model.grid

    @property
    def count(self) -> int:
        return self.run.model.tokens

    def step(self, drafted_from: int | None = None) -> TokenStep:
        """The picture so far. Drafts from that row on, of the draft's grid, are shown repeated, until they are enlarged."""
        codes, decided = self.tokens[:, :-1].clone(), self.decided[:, :-1].clone()
        if drafted_from is not None:
            small = self.drafter.model.grid

            def repeated(x: Tensor) -> Tensor:
                x = x.view(-1, small, small)
                return x.repeat_interleave(self.factor, 1).repeat_interleave(self.factor, 2).flatten(1)

            fresh = repeated(self.drafter.decided.clone()[None])
            fresh[:, : drafted_from * self.factor * self.grid] = False
            codes, decided = torch.where(fresh, repeated(self.drafter.tokens), codes), decided | fresh
        codes = codes.masked_fill(~decided, 0)
        shape = (-1, self.grid, self.grid)
        return TokenStep(self.done, max(self.done, self.total), codes.view(shape), decided.view(shape), self.run.report)

    def cycles(self) -> Iterator[TokenStep]:
        """The whole generation."""
        small = self.drafter.model.grid
        each = min(self.settings.draft_rows or small, small)
        plans = [
            draft_schedule(small, self.settings.draft_window, row, min(each, small - row), each if row else 0)
            for row in range(0, small, each)
        ]
        self.total = sum(sum(bool(p.cells) for p in plan.passes) + 1 for plan in plans)
        refresh = 0
        for k, plan in enumerate(plans):
            row, rows = k * each, min(each, small - k * each)
            first, last = (row * self.factor * self.grid, (row + rows) * self.factor * self.grid)
            yield from self.draft(plan, row)
            self.enlarge(row, rows)
            hidden = self.read(refresh, first, last)
            yield from self.repair(hidden, first, last)
            refresh = first
            if last < self.count:
                self.reduce(row, rows)

    # -------------------------------------------------------------------------------------------- 1 draft, 2 enlarge

    def draft(self, plan: Schedule, row: int) -> Iterator[TokenStep]:
        """The draft model writes its rows from ``row`` on."""
        run, clock = self.drafter, self.run.clock
        both = any(run.guided)
        until, device = run.settings.cfg_interval, self.tokens.device
        with torch.inference_mode(), clock.phase("draft"):
            logits = None
            if self.draft_cache is None:
                logits, self.draft_cache = run.prefill(both, run.model.tokens - 1)
                run.report.add(cache_bytes=self.draft_cache.bytes)
            laid = lay_out(plan, self.draft_cache.prefix, device)
        for at, what in zip(laid, plan.passes, strict=True):
            if not what.cells:
                continue
            with torch.inference_mode(), clock.phase("draft"):
                if logits is None:
                    logits = run.feed(at, self.draft_cache, both)
                else:
                    logits = logits[:, None]
                run.take(at, logits, run.settings.cfg > 1 and (until < 0 or what.clock <= until))
                logits = None
            run.report.add(draft_passes=1)
            self.done += 1
            yield self.step(row)

    @torch.inference_mode()
    def enlarge(self, row: int, rows: int) -> None:
        """The target's grid takes the draft's rows, enlarged together with all rows above them."""
        small, f, width = self.drafter.model.grid, self.factor, self.grid
        with self.run.clock.phase("up-sampling"):
            drawn = self.drafter.tokens.view(-1, small, small)[:, : row + rows]
            block = self.up.up(drawn, f)[:, row * f :]
            self.tokens[:, row * f * width : (row + rows) * f * width] = block.flatten(1)

    @torch.inference_mode()
    def reduce(self, row: int, rows: int) -> None:
        """The draft's grid takes the committed rows back."""
        small, f, width = self.drafter.model.grid, self.factor, self.grid
        with self.run.clock.phase("up-sampling"):
            end = (row + rows) * f
            fine = self.tokens[:, : end * width].view(-1, end, width)
            self.drafter.tokens[:, row * small : (row + rows) * small] = self.up.down(fine, f)[:, row:].flatten(1)

    # -------------------------------------------------------------------------------------------- 3 verify

    @property
    def both(self) -> bool:
        return any(self.run.guided)

    def guided(self, cells: Tensor | slice) -> bool | Tensor:
        """Whether the target is guided at these cells, counted as plain decoding counts."""
        if self.settings.cfg_interval < 0 or not self.both:
            return self.both
        device = self.tokens.device
        at = torch.arange(self.count + 1, device=device)[cells] if isinstance(cells, slice) else cells
        return at - 1 <= self.settings.cfg_interval

    @torch.inference_mode()
    def read(self, refresh: int, first: int, last: int) -> Tensor:
        """One pass of the target over the cells ``refresh`` to ``last - 2``: hidden rows [R, last - first, C] that predict the cells
        from ``first`` on. It leaves the keys and values of the block before exact."""
        run, net = self.run, self.run.model.net
        with run.clock.phase("transformer"):
            x = net.embed(self.tokens[:, refresh : last - 1])
            x = torch.cat([x, x]) if self.both else x
            self.done += 1
            if self.cache is None:
                rows, lengths = run.prefix(self.both)
                # One image alone has nothing to fill up, and needs no slot for the last cell.
                slots = self.count - (len(self.tokens) == 1)
                hidden, self.cache = net.start(rows, self.grid, slots, lengths, x)
                run.report.add(
                    transformer_passes=1,
                    transformer_tokens=len(x) * (rows.shape[1] + x.shape[1]),
                    cache_bytes=self.cache.bytes,
                )
                return hidden
            run.report.add(transformer_passes=1, transformer_tokens=len(x) * x.shape[1])
            place = torch.arange(refresh, last - 1, device=x.device)
            slot, end = place + self.cache.prefix, self.cache.prefix + last - 1
            mask = torch.arange(end, device=x.device) <= slot[:, None]
            return net.advance(x, place, slot, self.cache, end, mask)[:, first - 1 - refresh :]

    @torch.inference_mode()
    def judge(self, hidden: Tensor, first: int, last: int) -> np.ndarray:
        """bool [B, n]: which of the block's drafts are rejected."""
        run, s = self.run, self.settings
        with run.clock.phase("verification"):
            piece = max(1, _BLOCK // (len(hidden) * self.run.model.net.config.vocab))
            pools = []
            for a in range(first, last, piece):
                b = min(last, a + piece)
                logits = run.mix(run.model.net.logits(hidden[:, a - first : b - first]), self.guided(slice(a, b)))
                p = allowed(logits / max(s.temperature, 1e-5), s.top_k, s.top_p).softmax(-1)
                pools.append(geometry.pooled(p, self.tokens[:, a:b], self.table))
            pool = torch.cat(pools, dim=1)
            self.pools.append(pool.flatten())
            return geometry.rejected(pool, s.tau, s.acceptance_target).cpu().numpy()  # the host waits here

    # -------------------------------------------------------------------------------------------- 4 expand, 5 draw again

    def repair(self, hidden: Tensor, first: int, last: int) -> Iterator[TokenStep]:
        """Reject, expand, and draw again in waves."""
        s, batch, device = self.settings, len(self.tokens), self.tokens.device
        down = self.judge(hidden, first, last).reshape(batch, -1, self.grid)
        region = geometry.suffix(down) if s.repair == SUFFIX else geometry.expand(down, s.expansion)
        numbered = geometry.islands(region)
        together = region.astype(np.int32) if s.resample_order == ONE_BY_ONE else numbered
        wave = geometry.waves(together, s.resample_window or None)
        self.note(down, region, numbered, wave, first)
        with torch.inference_mode():
            self.decided[:, first:last] = torch.from_numpy(~region.reshape(batch, -1)).to(device)
        plan = redraws(wave.reshape(batch, -1), first, self.count)
        self.total += max(0, len(plan) - 1)
        for k, (cells, fed, by, end) in enumerate(_uploaded(plan, device)):
            if k:
                yield self.step()
            self.redraw(hidden if not k else None, cells, fed, by, end, first)
        yield self.step()

    def note(self, down: np.ndarray, region: np.ndarray, numbered: np.ndarray, wave: np.ndarray, first: int) -> None:
        """Counts and maps of a cycle."""
        rows = np.s_[:, first // self.grid : first // self.grid + down.shape[1]]
        self.run.report.add(
            accepted=int((~down).sum()),
            rejected=int(down.sum()),
            expanded=int((region & ~down).sum()),
            islands=int(numbered.max(axis=(1, 2)).sum()),
            waves=int(wave.max()) + 1,
        )
        maps = self.maps
        maps.step[rows] = self.done - 1 + np.maximum(wave, 0)
        maps.outcome[rows] = np.where(down, REJECTED, np.where(region, EXPANDED, ACCEPTED))
        # Numbers go on from one cycle to the next.
        before = maps.islands.max(axis=(1, 2), keepdims=True)
        maps.islands[rows] = np.where(numbered > 0, numbered + before, 0)
        maps.waves[rows] = wave

    @torch.inference_mode()
    def redraw(self, hidden: Tensor | None, cells: Tensor, fed: Tensor, by: Tensor, end: int, first: int) -> None:
        """One wave: from the verification's hidden rows, or with a pass of its own."""
        run, net = self.run, self.run.model.net

        def chosen(x: Tensor, rows: Tensor) -> Tensor:
            if len(rows) == 1:
                return x[:, rows[0]]
            return x.gather(1, (torch.cat([rows, rows]) if self.both else rows)[..., None].expand(-1, -1, x.shape[-1]))

        if hidden is None:
            assert self.cache is not None
            with run.clock.phase("transformer"):
                picked = chosen(run.feed_each(fed, self.cache, self.both, end), by)
            self.done += 1
        else:
            picked = chosen(hidden, (cells - first).clamp(max=hidden.shape[1] - 1))
        with run.clock.phase("sampling"):
            logits = run.mix(net.logits(picked), self.guided(cells))
            new = draw(logits, self.settings, run.draws.gumbel("token", cells, logits.shape[-1]))
            self.tokens.scatter_(1, cells, new)
            self.decided.scatter_(1, cells, True)


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
        target, condition, noise, seed: as :func:`samplers.tokens.llamagen.llamagen`; the condition is both models'.
        settings: see :class:`MuLoSDSettings`.
        draft: a model of the same codes on a grid of 1/r the side, r a whole number above 1.
        up_sampler: from draft to target and back, with the tokenizer of both; see ``upsampling.py``.

    Yields:
        :class:`TokenStep` after every pass of either model. While drafting, codes are the draft's, repeated over the cells they
        stand for; tokens to be drawn again are undecided. ``total`` grows when it turns out how many waves there are.

    Returns:
        :class:`TokenSampled`. The report counts all passes (``transformer_passes``), the draft's among them (``draft_passes``), and
        tokens over the batch: accepted and rejected drafts, accepted ones that were drawn again beside a rejected one
        (expanded), islands; and waves, which all images share. Maps: "step", "outcome", "islands" int32 (number from 1, 0
        elsewhere), "waves" int32 (from 0 in each cycle, -1 elsewhere). ``similarity`` holds the pooled probabilities.

    Raises:
        UserError: a condition that does not fit either model, models or a tokenizer that do not belong together, a PAR, a
            grid that is no whole multiple, neighbours that leave nothing to be rejected.
    """
    factor, k = _factor(target, draft, up_sampler), pooling(settings, target.net.config.vocab)
    run = begin("mulosd", target, condition, settings, noise, seed, raster(target.grid))
    run.report.settings = {**asdict(settings), "up_sampler": up_sampler.name}
    # As much of the picture is guided in the draft as in the target.
    until = settings.cfg_interval // factor**2 if settings.cfg_interval >= 0 else -1
    plan = draft_schedule(draft.grid, settings.draft_window)
    drafter = begin(
        "mulosd", draft, condition, replace(settings, cfg_interval=until), _OwnStream(noise, "draft"), seed, plan
    )
    drafter.report, report, device = run.report, run.report, run.tokens.device
    with torch.inference_mode():
        table = geometry.codebook_neighbours(up_sampler.vq.quantize, k, device)
    shape = (len(run.tokens), target.grid, target.grid)
    run.tokens = torch.zeros(shape[0], target.tokens + 1, dtype=torch.int64, device=device)
    work = _Work(
        run,
        drafter,
        settings,
        up_sampler,
        factor,
        table,
        torch.zeros_like(run.tokens, dtype=torch.bool),
        _Maps.of(shape),
    )
    pause = PauseClock()
    for step in work.cycles():
        pause.start()
        pause.stop((yield step))
    run.clock.stop(report, pause.seconds)
    if device.type == "cuda":
        report.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
    report.maps.update(step=work.maps.step, outcome=work.maps.outcome, islands=work.maps.islands, waves=work.maps.waves)
    report.similarity = torch.cat(work.pools).cpu().numpy()
    return TokenSampled(run.tokens[:, :-1].clone().view(shape), report)
