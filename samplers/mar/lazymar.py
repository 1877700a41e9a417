"""LazyMAR: features are kept from one AR step to the next, and only new or changed rows are computed.

Source: Yan et al. 2025, "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching" (ICCV 2025, arXiv
2503.12450). Four caches, each with its own switch (:class:`CacheSettings`):

* token cache (section 3.2.1): decoder rows whose values changed least since the last call reuse cached keys and values
  from that block on (equations 8 and 9; the paper writes argmax there, but the least similar rows are computed);
* condition cache (section 3.2.2): the null branch is the conditional branch plus the difference at the last refresh
  (eq. 10);
* encoder cache: keys and values of tokens decided earlier. In the published code, not in the paper;
* head cache (:class:`CachedHead`): reuse within the diffusion head. In the published code and in the paper's
  speed-ups, but not in its text.

All are a way to evaluate the transformer and the head, so they combine with plain MAR, FastHybrid and CSpD.
Differences from the published code: rows that must be computed always are (there, rows of negative similarity can
displace them); the share of computed rows follows progress instead of 64 fixed steps; the decoder's keys and values
are stored only from the chosen block on, since the blocks before it compute all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UserError
from ...model_loaders.networks.mar import (
    BUDGET,
    MAR,
    Block,
    DiffusionHead,
    HeadBlock,
    MARModel,
    modulated,
    pick,
)
from ...model_loaders.networks.ops import outputs
from ..conditioning import MaskedCondition
from ..driver import to_device
from ..editing import Edit
from ..noise import PairedNoise
from .diffusion import Generation, HeadBatch, ancestral_steps, denoise
from .loop import FullTransformer, Run, Sampler, Transformer, begin
from .loop import check as check_steps
from .mar import annealed_tables, expect_whole_head, plain_steps
from .memory import FEATURES, feature_bytes
from .settings import CacheSettings, LazyMARSettings, MARBase

# The reference's share of computed decoder rows at AR steps 0..63 of 64.
REFERENCE_RATIOS = (*(1.0,) * 20, 0.6, *(0.5,) * 4, *(0.4,) * 5, *(0.15,) * 5, *(0.12,) * 5, *(0.05,) * 24)
# The reference computes at least 15 of 320 rows beyond the mandatory ones, however low the ratio.
_SPARE = 15
_SPARE_OF = 320


def lazymar(
    model: MARModel,
    condition: MaskedCondition,
    settings: LazyMARSettings,
    noise: PairedNoise,
    edit: Edit | None = None,
) -> Sampler:
    """LazyMAR on plain MAR; arguments and errors as :func:`samplers.mar.mar.mar`. With ``refresh_period`` 1 it is plain
    MAR bit for bit.
    """
    transformer = LazyTransformer(settings)
    run = begin("mar", model, condition, settings, noise, edit, transformer)
    yield from plain_steps(run, transformer, annealed_tables(run, settings), settings.speculation)
    return run.finish()


def check(model: MARModel, settings: MARBase, cache: CacheSettings | None = None) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Args:
        cache: those of the caches; None if ``settings`` hold them too.

    Raises:
        UserError: more AR steps than tokens, a block that the decoder does not have, or speculation with a cached head.
    """
    check_steps(model, settings)
    caches = cast(CacheSettings, settings) if cache is None else cache
    chosen_block(caches, model.net.config.decoder_depth)
    expect_whole_head(settings, LazyTransformer(caches))


def chosen_block(settings: CacheSettings, depth: int) -> int:
    """The decoder block, of ``depth`` and counted from 1, that measures how much a token changed.

    Raises:
        UserError: the decoder has no such block.
    """
    block = usual_block(depth) if settings.block is None else settings.block
    if block > depth:
        raise UserError(
            f"block: {block} is outside 1 to {depth}, the blocks of the decoder; lower it, or leave it out."
        )
    return block


def computed_ratio(progress: float, end: float) -> float:
    """Share of decoder rows to compute at ``progress`` 0..1 of the AR steps: the reference's curve stretched to the
    share ``end``, 0..1.

    At 0.05 and 64 AR steps this is the reference's table, exactly.
    """
    at = progress * len(REFERENCE_RATIOS)
    last = len(REFERENCE_RATIOS) - 1
    low = min(int(at), last)
    ratio = REFERENCE_RATIOS[low] + (at - low) * (REFERENCE_RATIOS[min(low + 1, last)] - REFERENCE_RATIOS[low])
    # Rounded: the row count is floored, and 0.15 must not become 0.1499...
    return round(1 - (1 - end) * (1 - ratio) / (1 - REFERENCE_RATIOS[-1]), 9)


class RefreshPlan:
    """Which AR steps are computed in full, and how many decoder rows the others compute."""

    def __init__(self, settings: CacheSettings, steps: int, prunes: bool):
        """Of ``steps`` AR steps; ``prunes``: whether decoder rows may be left out."""
        period = settings.refresh_period
        start = settings.start_step
        # Of each AR step: that of the next refresh after it, or the number of AR steps. Skipping AR steps cannot skip a
        # refresh.
        self.until: list[int] = []
        for k in range(steps):
            if k < start:
                self.until.append(k + 1)
            else:
                periods = (k - start) // period + 1
                self.until.append(min(start + periods * period, steps))

        # Of each AR step: the share of decoder rows that are computed from the chosen block on.
        self.share = [1.0] * steps
        if prunes:
            self.share = [computed_ratio(k / steps, settings.computed_ratio) for k in range(steps)]

    def leaves_rows_out(self, step: int) -> bool:
        """Whether an AR step between a refresh at ``step`` and the next one may leave decoder rows out."""
        return any(share < 1 for share in self.share[step + 1 : self.until[step]])


@dataclass(eq=False)
class FeatureCache:
    """Features of one refresh, all on storage of their own."""

    live: int  # decoder rows: images, or images times two branches without the condition cache
    encoded: int  # encoder rows: as many, or images where the branches of guidance do not differ in the encoder
    # Keys and values of every encoder block, [encoded, heads, room, d]: decided tokens, then the class rows of the last
    # call.
    encoder: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    # With the encoder cache: what the condition keeps between encoder and decoder (a language model's keys and values,
    # None for class labels), and the decoder's input [live, N, C].
    fused: Any = None
    canvas: Tensor | None = None
    # Values of the chosen decoder block at the last call, [live, heads, N, d]; None if all rows are computed.
    values: Tensor | None = None
    decoder: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values of the decoder blocks after it
    residual: Tensor | None = None  # null minus conditional branch after the last decoder block, [B, L, C]

    @property
    def bytes(self) -> int:
        """Bytes of all stored tensors."""
        tensors = [self.canvas, self.values, self.residual]
        for keys, values in (*self.encoder, *self.decoder):
            tensors += [keys, values]
        if self.fused is not None:
            tensors += self.fused.tensors
        return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


def usual_block(depth: int) -> int:
    """The block whose values tell how much a row changed, from 1, of a decoder of ``depth`` blocks.

    Three blocks precede the paper's 4th: a quarter of the smallest MAR's decoder.
    """
    return min(3, depth // 4) + 1


class LazyTransformer(Transformer):
    """Transformer and diffusion head with LazyMAR's caches, for one generation.

    Calls may skip AR steps, ask for any positions ahead, and start from given tokens: the new tokens are those decided
    since the last call. Decided tokens must not change; a caller that changes some calls :meth:`forget`. The report of
    a run with this transformer has its name and settings.
    """

    def __init__(self, settings: CacheSettings):
        self.settings = settings
        self.full = FullTransformer()
        self.cache: FeatureCache | None = None
        # of the last call: the AR step, tokens decided before it
        self.step = -1
        self.known = 0
        self._head_plans: dict[int, HeadPlan] = {}  # by number of diffusion steps
        self.held = 0  # most bytes held so far
        self.reported = 0  # cached tokens reported so far

    def begin(self, run: Run) -> None:
        """Choose the block, and plan refreshes and rows.

        Raises:
            UserError: the decoder has no such block.
        """
        s = self.settings
        c = run.model.net.config
        self.block = chosen_block(s, c.decoder_depth) - 1
        # The last block saves nothing: it computes the wanted rows only, in plain MAR too.
        prunes = s.token_cache and self.block < c.decoder_depth - 1
        self.plan = RefreshPlan(s, run.plan.steps, prunes)
        self.spare = max(1, round((c.buffer + c.tokens) * _SPARE / _SPARE_OF))

        self.full.begin(run)
        self.vectors = self.full.vectors
        self.feed_forward = run.model.net.region(feed_forward, "transformer blocks")
        # int32 [B, L], how often each token's decoder rows came from the cache; None where they never do.
        self.cached: Tensor | None = None
        if s.refresh_period > 1 and s.token_cache:
            self.cached = torch.zeros(len(run.tokens), c.tokens, dtype=torch.int32, device=run.tokens.device)
        self._name_report(run)

    def _name_report(self, run: Run) -> None:
        """The report is of the combination, with the settings of both."""
        report = run.report
        report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
        report.settings |= {f.name: getattr(self.settings, f.name) for f in fields(CacheSettings)}
        report.memory[FEATURES] = feature_bytes(run.model, len(run.tokens), run.settings, self.settings)

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Tensor:
        """z [P, B, M, C] at positions ``wanted`` [B, M], from caches where no refresh is due."""
        fresh = self.settings.start_step <= step and self.step <= step < self.plan.until[self.step]
        if self.cache is not None and fresh:
            z = self._reuse(run, self.cache, step, wanted)
        else:
            z = self._refresh(run, step, wanted)
        self.step = step
        self.known = run.plan.starts[step]

        # A call for all remaining tokens may be the last one.
        if self.cached is not None and self.known + wanted.shape[1] >= run.plan.tokens:
            run.report.maps["cached"] = self.cached.unflatten(1, run.grid).cpu().numpy().copy()
            total = int(run.report.maps["cached"].sum())
            run.report.add(cached_tokens=total - self.reported)
            self.reported = total
        return z

    def forget(self) -> None:
        """The next call is a refresh."""
        self.cache = None

    # --- the diffusion head

    def head_period(self, diffusion_steps: int) -> int:
        """Diffusion steps from one full evaluation of the head to the next: a share of them all, on which the error
        depends.
        """
        s = self.settings
        if s.refresh_period == 1 or not s.head_cache:
            return 1
        return math.ceil(s.head_period * diffusion_steps / 100)

    def caches_head(self, diffusion_steps: int) -> bool:
        return self.head_period(diffusion_steps) > 1

    def denoise(self, run: Generation, batch: HeadBatch) -> Tensor:  # type: ignore[override]
        """As :func:`.diffusion.denoise`, with the cached head where one is used."""
        count = len(batch.table.steps)
        period = self.head_period(count)
        if period == 1:
            return denoise(run, batch)

        if count not in self._head_plans:
            self._head_plans[count] = head_plan(count, period, batch.x.device)
        head = CachedHead(run.model.net, batch, self._head_plans[count])
        x = batch.x
        for k, step in enumerate(ancestral_steps(run, batch)):
            x, _, _ = step(x, head(k, x))
        run.report.add(head_calls=count, head_rows=head.rows)
        return x

    # --- an AR step in full

    def _refresh(self, run: Run, step: int, wanted: Tensor) -> Tensor:
        """Everything in full; features are stored if a later call may use them."""
        self.cache = None  # freed first
        s = self.settings
        net = run.model.net
        c = run.model.net.config
        until = self.plan.until[step]
        prunes = self.plan.leaves_rows_out(step)
        halves = run.guided and s.condition_cache  # whether the null branch is left out
        if step + 1 >= until or not (s.encoder_cache or prunes or halves):
            return self.full(run, step, wanted)

        net.runs_plain("attention with LazyMAR's caches")
        batch = len(run.tokens)
        branches = 1 + run.guided
        live = batch if halves else batch * branches
        cache = FeatureCache(live, min(live, len(self.vectors)))
        room = c.buffer + run.plan.starts[until - 1]
        known = run.plan.known(step)
        encoder_known = known.repeat(len(self.vectors) // batch, 1)
        known = known.repeat(branches, 1)
        wanted = wanted.repeat(branches, 1)

        # 1. The encoder.
        x = self._encode_all(run, cache, encoder_known, room)

        # 2. What is between encoder and decoder.
        if s.encoder_cache:
            cache.fused = run.rows.feature_cache(live, room)
        x = run.rows.fuse(net.encoder_norm(x), encoder_known, run.guided, cache=cache.fused)
        x = net.canvas(x, known)
        if s.encoder_cache:
            cache.canvas = own_copy(x, live)

        # 3. The decoder. The condition cache needs every token's output, otherwise the wanted ones are enough.
        for j, block in enumerate(net.decoder_blocks):
            q, k, v = block.attn.project(block.norm1(x))
            if j == c.decoder_depth - 1:
                if halves:
                    x = x[:, c.buffer :]
                    q = q[:, :, c.buffer :]
                else:
                    x = pick(x, wanted + c.buffer)
                    q = pick(q, wanted + c.buffer)
            x = self.feed_forward(block, block.attend(x, q, k, v))
            if prunes and j == self.block:
                cache.values = own_copy(v, live)
            elif prunes and j > self.block:
                cache.decoder.append((own_copy(k, live), own_copy(v, live)))
        if halves:
            cache.residual = x[batch:] - x[:batch]  # (10)
            x = pick(x, wanted)

        self.cache = cache
        held = cache.bytes
        if held > self.held:
            run.report.add(cache_bytes=held - self.held)
            self.held = held
        encoder_rows = len(self.vectors) * (c.buffer + encoder_known.shape[1])
        decoder_rows = batch * branches * (c.buffer + c.tokens)
        run.report.add(**run.rows.counts(encoder_rows, decoder_rows))
        return self._conditions(run, x, wanted)

    def _encode_all(self, run: Run, cache: FeatureCache, known: Tensor, room: int) -> Tensor:
        """The encoder's rows of all decided tokens ``known`` int64 [E, K], before its norm, [E, buffer + K, C].

        Class rows are computed at every call and follow the tokens, so only the tokens are stored, in ``room`` rows.
        """
        net = run.model.net
        buffer = net.config.buffer
        decided = known.shape[1]
        tokens = run.tokens.repeat(len(known) // len(run.tokens), 1, 1)
        x = net.embed_known(tokens, known, self.vectors)
        for block in net.encoder_blocks:
            q, k, v = block.attn.project(block.norm1(x))
            x = self.feed_forward(block, block.attend(x, q, k, v))
            if not self.settings.encoder_cache:
                continue

            keys = k.new_empty(cache.encoded, k.shape[1], room, k.shape[3])
            values = torch.empty_like(keys)
            keys[:, :, :decided] = k[: cache.encoded, :, buffer:]
            values[:, :, :decided] = v[: cache.encoded, :, buffer:]
            cache.encoder.append((keys, values))
        return x

    # --- an AR step from the cache

    def _reuse(self, run: Run, cache: FeatureCache, step: int, wanted: Tensor) -> Tensor:
        """New tokens through the encoder, changed rows through the decoder; one branch if the other is cached."""
        times = cache.live // len(run.tokens)
        new = run.plan.reveal[:, self.known : run.plan.starts[step]]
        asked = wanted.repeat(times, 1)
        x, encoder_rows = self._encode(run, cache, step, new)
        x, decoder_rows = self._decode(run, cache, step, x, asked, new.repeat(times, 1))
        run.report.add(**run.rows.counts(cache.encoded * encoder_rows, round(cache.live * decoder_rows)))

        if cache.residual is not None:
            x = torch.cat([x, x + pick(cache.residual, wanted)])  # (10)
            asked = torch.cat([wanted, wanted])
        return self._conditions(run, x, asked)

    def _encode(self, run: Run, cache: FeatureCache, step: int, new: Tensor) -> tuple[Tensor, int]:
        """The decoder's input [live, N, C] and how many rows per entry the encoder computed for it."""
        net = run.model.net
        rows = run.rows
        buffer = net.config.buffer
        batch = len(run.tokens)
        times = cache.encoded // batch
        vectors = self.vectors[: cache.encoded]
        tokens = run.tokens.repeat(times, 1, 1)
        if cache.canvas is None:
            known = run.plan.known(step)
            encoder_known = known.repeat(times, 1)
            x = rows.fuse(net.encode(tokens, encoder_known, vectors), encoder_known, cache.live > batch)
            return net.canvas(x, known.repeat(cache.live // batch, 1)), buffer + known.shape[1]

        # 1. New tokens and class rows. These come last: a call then writes one slice, and the next call's tokens
        # overwrite them.
        x = net.embed_known(tokens, new.repeat(times, 1), vectors)
        x = torch.cat([x[:, buffer:], x[:, :buffer]], dim=1)
        count = x.shape[1]
        first = self.known
        end = self.known + count
        for block, (keys, values) in zip(net.encoder_blocks, cache.encoder, strict=True):
            q, k, v = block.attn.project(block.norm1(x))
            keys[:, :, first:end] = k
            values[:, :, first:end] = v
            x = self.feed_forward(block, block.attend(x, q, keys[:, :, :end], values[:, :, :end]))

        # 2. Their rows of the decoder's input.
        x = rows.extend(net.encoder_norm(x), cache.fused, self.known)
        buffer_rows = torch.arange(buffer, device=new.device).expand(len(x), -1)
        places = torch.cat([new.repeat(len(x) // batch, 1) + buffer, buffer_rows], dim=1)
        x = net.decoder_embed(x) + net.decoder_pos_embed_learned[0][places]
        cache.canvas.scatter_(1, places[..., None].expand(-1, -1, x.shape[2]), x)
        return cache.canvas, count

    def _decode(
        self, run: Run, cache: FeatureCache, step: int, x: Tensor, wanted: Tensor, new: Tensor
    ) -> tuple[Tensor, float]:
        """The last block's rows at ``wanted`` [live, M, C], and how many rows an average block computed."""
        net = run.model.net
        total = x.shape[1]
        blocks = net.decoder_blocks
        rows = wanted + net.config.buffer
        if cache.values is None:
            for block in blocks[:-1]:
                x = block(x)
            return blocks[-1](x, rows=rows), float(total)

        # 1. The blocks before the chosen one compute all rows.
        for block in blocks[: self.block]:
            x = block(x)

        # 2. The chosen block's values tell which rows changed.
        block = blocks[self.block]
        behind = blocks[self.block + 1 :]
        q, k, v = block.attn.project(block.norm1(x))
        keep = self.choose(run, step, v, wanted, new)
        cache.values.copy_(v)

        # 3. From there on only these rows are computed; the others' keys and values are the cached ones.
        if keep is not None:
            x = pick(x, keep)
            q = pick(q, keep)
            at = keep[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
        x = self.feed_forward(block, block.attend(x, q, k, v))
        for block, (keys, values) in zip(behind, cache.decoder, strict=True):
            q, k, v = block.attn.project(block.norm1(x))
            if keep is None:
                keys.copy_(k)
                values.copy_(v)
            else:
                keys.scatter_(2, at, k)
                values.scatter_(2, at, v)
            if block is blocks[-1]:
                # Of all rows the wanted ones are picked; of the chosen ones they stand in front.
                x = pick(x, rows) if keep is None else x[:, : rows.shape[1]]
                q = pick(q, rows) if keep is None else q[:, :, : rows.shape[1]]
            x = self.feed_forward(block, block.attend(x, q, keys, values))
        if keep is None:
            return x, float(total)
        before = len(blocks) - len(behind)
        return x, (total * before + keep.shape[1] * len(behind)) / len(blocks)

    def similarity(self, values: Tensor) -> Tensor:
        """Cosine of the chosen block's values [live, heads, N, d] and those of the last call, mean of the heads, [live,
        N]; (8).
        """
        assert self.cache is not None and self.cache.values is not None
        return F.cosine_similarity(values.float(), self.cache.values.float(), dim=-1).mean(dim=1)

    def choose(self, run: Run, step: int, values: Tensor, wanted: Tensor, new: Tensor) -> Tensor | None:
        """Decoder rows to compute from the chosen block on, int64 [live, n]: (9); None for all.

        First those of positions ``wanted`` int64 [live, M], then ``new`` ones, decided since the last call, int64
        [live, K], then the least similar by the block's ``values`` [live, heads, N, d].
        """
        c = run.model.net.config
        total = c.buffer + c.tokens
        must = torch.cat([wanted, new], dim=1) + c.buffer
        n = max(must.shape[1] + self.spare, int(total * self.plan.share[step]))
        if n >= total:
            return None

        # Unchanged rows differ by rounding only, which must not order them.
        score = (self.similarity(values) * 2**17).round() / 2**17
        # Mandatory rows come first. At equal scores the lower row comes first.
        rest = score.scatter_(1, must, torch.inf).argsort(dim=1, stable=True)[:, : n - must.shape[1]]
        keep = torch.cat([must, rest], dim=1)
        if self.cached is not None:
            images = len(self.cached)
            left = torch.ones_like(score[:images], dtype=torch.int32)
            self.cached += left.scatter_(1, keep[:images], 0)[:, c.buffer :]
        return keep

    def _conditions(self, run: Run, x: Tensor, wanted: Tensor) -> Tensor:
        """z [P, B, M, C] of the last decoder block's rows [P B, M, C] at ``wanted`` (as many)."""
        net = run.model.net
        z = net.decoder_norm(x) + pick(net.diffusion_pos_embed_learned.expand(len(wanted), -1, -1), wanted)
        return z.unflatten(0, (1 + run.guided, -1))


def feed_forward(block: Block, x: Tensor) -> Tensor:
    """A block after its attention, as a function for the compiler.

    The attention is not compiled: its queries, keys and values are projections, chosen rows or slices of a cache, and
    every combination of their strides would be a graph of its own.
    """
    return x + block.mlp(block.norm2(x))


def own_copy(x: Tensor, live: int) -> Tensor:
    """A copy of the first ``live`` entries; a view would keep the whole projection in memory."""
    return x[:live].clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------------------ the head's cache

FULL = "full"
EDGE = "edge"
REUSED = "reused"

# The head's blocks whose outputs are reused as one sum; of the others, each block's MLP output is reused by itself.
MIDDLE = range(1, 5)


class HeadPlan(NamedTuple):
    """How the head is evaluated at every diffusion step, highest timestep first."""

    kinds: list[str]
    of_kind: dict[str, Tensor]  # the steps of each kind, int64 on the device


def head_plan(steps: int, period: int, device: torch.device) -> HeadPlan:
    """Diffusion steps are counted down to 0: the first one and every multiple of the period are evaluated in full.

    Of the others, those in the first tenth of the diffusion are "edge", the rest "reused"; see :class:`CachedHead`.
    """
    full = {steps - 1, *range(0, steps, period)}
    kinds = []
    for left in range(steps - 1, -1, -1):
        if left in full:
            kinds.append(FULL)
        else:
            kinds.append(EDGE if left > 0.9 * steps else REUSED)

    of_kind = {}
    for kind in (FULL, EDGE, REUSED):
        which = [k for k in range(steps) if kinds[k] == kind]
        of_kind[kind] = to_device(torch.tensor(which, dtype=torch.int64), device)
    return HeadPlan(kinds, of_kind)


class CachedHead:
    """The diffusion head with LazyMAR's cache: ``out = head(k, x)`` at every diffusion step k, in their order.

    The cache is in the published code and in the paper's speed-ups, but not in its text. A reused step evaluates the
    conditional rows only, and takes from the last full step: the sum of what blocks 1 to 4 added; the MLP outputs of
    the other blocks (``own``), with the current gate; and the difference between the conditional and the null branch's
    noise. An edge step computes the MLPs of the own blocks.
    """

    def __init__(self, net: MAR, batch: HeadBatch, plan: HeadPlan):
        head = self.head = net.head
        self.cfg = batch.cfg
        self.kinds = plan.kinds
        self.branches, self.tokens = batch.z.shape[:2]
        self.own = [j for j in range(len(head.res_blocks)) if j not in MIDDLE]
        self.rows = 0  # evaluated so far
        self._evaluate = net.region(evaluated, "diffusion head")
        self._reuse = net.region(reused, "diffusion head")

        # The modulations of each kind of step; a reused step needs gates and the last layer's only.
        own = [cast(HeadBlock, head.res_blocks[j]) for j in self.own]
        width = head.input_proj.out_features
        gates = []
        for block in own:
            modulation = cast(nn.Linear, block.adaLN_modulation[1])
            gates.append(outputs(modulation, 2 * width, 3 * width))

        def of_edge(embedding: Tensor) -> list[Tensor]:
            return head.modulations(embedding, own)

        def of_reused(embedding: Tensor) -> list[Tensor]:
            active = F.silu(embedding)
            return [*(gate(active) for gate in gates), *head.modulations(embedding, ())]

        times = head.time_embed(batch.table.timestep_map.flip(0))
        condition = head.cond_embed(batch.z.flatten(0, 1))
        conditional = condition[: self.tokens]
        at = {kind: times[which] for kind, which in plan.of_kind.items()}
        self.modulations = {
            FULL: step_modulations(head.modulations, at[FULL], condition, 3 * len(head.res_blocks) + 2),
            EDGE: step_modulations(of_edge, at[EDGE], conditional, 3 * len(own) + 2),
            REUSED: step_modulations(of_reused, at[REUSED], conditional, len(own) + 2),
        }

        # Of the last full step; it is the first one.
        self._kept: Kept | None = None

    def __call__(self, k: int, x: Tensor) -> Tensor:
        """Noise and variance logits of the states x fp32 [N, channels]: [P, N, 2 channels] at a full step, else [1, N,
        2 channels] with the guidance in it."""
        kind = self.kinds[k]
        modulations = next(self.modulations[kind])
        if kind == FULL:
            out, self._kept = self._evaluate(self.head, self.cfg, torch.cat([x] * self.branches), modulations)
        else:
            assert self._kept is not None
            out, self._kept = self._reuse(self.head, self.own, self._kept, kind == EDGE, x, modulations)
        self.rows += len(out)
        return out.view(-1, self.tokens, out.shape[1])


class Kept(NamedTuple):
    """What the steps after a full one reuse, of N tokens."""

    mlps: list[Tensor]  # outputs of the own blocks' MLPs, [N, w] each
    middle: Tensor  # what blocks 1 to 4 added, [N, w]
    bias: Tensor  # of the last layer, plus the guidance, fp32 [N, 2 channels]


def evaluated(head: DiffusionHead, cfg: Tensor, x: Tensor, modulations: Sequence[Tensor]) -> tuple[Tensor, Kept]:
    """The head in full: noise and variance logits [P N, 2 channels], and what the next steps reuse.

    ``cfg`` [N, 1] is the guidance scale, x fp32 [P N, channels] are the states of all branches of guidance.
    """
    n = len(cfg)
    blocks = cast(Sequence[HeadBlock], head.res_blocks)
    h = head.input_proj(x.to(head.input_proj.weight.dtype))
    before = h[:n]
    middle = torch.zeros_like(before)
    mlps = []
    for j, block in enumerate(blocks):
        shift, scale, gate = modulations[3 * j : 3 * j + 3]
        out = block.mlp(modulated(h, block.in_ln, shift, scale))
        if j == MIDDLE[0]:
            before = h[:n]
        h = torch.addcmul(h, gate, out)
        if j not in MIDDLE:
            mlps.append(out[:n])
        elif j == MIDDLE[-1] or j + 1 == len(blocks):
            middle = h[:n] - before

    last = head.final_layer.linear
    out = last(modulated(h, head.final_layer.norm_final, *modulations[-2:]).to(last.weight.dtype))

    # The conditional branch's rows come first, the null one's last. Without guidance they are the same.
    guidance = (cfg - 1) * (out[:n] - out[-n:])[:, : head.channels]
    bias = last.bias + F.pad(guidance, (0, head.channels))
    return out, Kept(mlps, middle, bias)


def reused(
    head: DiffusionHead, own: Sequence[int], kept: Kept, edge: bool, x: Tensor, modulations: Sequence[Tensor]
) -> tuple[Tensor, Kept]:
    """The head from what was kept: noise and variance logits fp32 [N, 2 channels], and what the next steps reuse.

    x fp32 [N, channels] are the states of the conditional branch. At an edge step the own blocks' MLPs are computed.
    """
    h = head.input_proj(x.to(head.input_proj.weight.dtype))
    mlps = []
    for i, j in enumerate(own):
        block = cast(HeadBlock, head.res_blocks[j])
        if edge:
            shift, scale, gate = modulations[3 * i : 3 * i + 3]
            mlps.append(block.mlp(modulated(h, block.in_ln, shift, scale)))
        else:
            gate = modulations[i]
            mlps.append(kept.mlps[i])
        h = torch.addcmul(h, gate, mlps[i])
        if j == 0:
            h = h + kept.middle

    h = modulated(h, head.final_layer.norm_final, *modulations[-2:])
    out = torch.addmm(kept.bias, h.to(kept.bias.dtype), head.final_layer.linear.weight.t())
    return out, kept._replace(mlps=mlps)


def step_modulations(
    modulations: Callable[[Tensor], list[Tensor]], times: Tensor, condition: Tensor, size: int
) -> Iterator[tuple[Tensor, ...]]:
    """The head's modulations at every diffusion step, of time embeddings [S, w] and condition embeddings [R, w].

    Those of many steps are one product, which reads the weights once. ``modulations`` makes ``size`` tensors [..., w]
    of embeddings.
    """
    at_once = max(1, BUDGET // max(1, condition.numel() * size))
    for some in times[:, None].split(at_once):
        yield from zip(*modulations(some + condition), strict=True)
