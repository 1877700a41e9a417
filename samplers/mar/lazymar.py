"""LazyMAR: features are kept from one AR step to the next, and only new or changed rows are computed.

Source: Yan et al. 2025, "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching" (ICCV 2025, arXiv
2503.12450). Four caches, each with its own switch (:class:`CacheSettings`):

* token cache (section 3.2.1): decoder rows whose values changed least since the last call reuse cached keys and values from
  that block on (equations 8 and 9; the paper writes argmax there, but the least similar rows are computed);
* condition cache (section 3.2.2): the null branch is the conditional branch plus the difference at the last refresh (eq. 10);
* encoder cache: keys and values of tokens decided earlier. In the published code, not in the paper;
* head cache (:class:`CachedHead`): reuse within the diffusion head. In the published code and in the paper's speed-ups, but not in its
  text.

All are a way to evaluate the transformer and the head, so they combine with plain MAR, FastHybrid and CSpD.
Differences from the published code: rows that must be computed always are (there, rows of negative similarity can displace
them); the share of computed rows follows progress instead of 64 fixed steps; the decoder's keys and values are stored only
from the chosen block on, since the blocks before it compute all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.mar import BUDGET, Block, DiffusionHead, HeadBlock, Kept, MARModel, modulated, pick
from ...model_loaders.networks.ops import outputs
from ..conditioning import MaskedCondition
from ..driver import to_device
from ..editing import Edit
from ..noise import PairedNoise
from .diffusion import Generation, HeadBatch, ancestral_steps, denoise
from .loop import FullTransformer, Run, Sampler, Transformer, begin
from .mar import annealed_tables, plain_steps
from .memory import FEATURES, feature_bytes
from .settings import CacheSettings, LazyMARSettings

# The reference's share of computed decoder rows at AR steps 0..63 of 64.
REFERENCE_RATIOS = (*(1.0,) * 20, 0.6, *(0.5,) * 4, *(0.4,) * 5, *(0.15,) * 5, *(0.12,) * 5, *(0.05,) * 24)
# The reference computes at least 15 of 320 rows beyond the mandatory ones, however low the ratio.
_SPARE, _SPARE_OF = 15, 320


def lazymar(
    model: MARModel,
    condition: MaskedCondition,
    settings: LazyMARSettings,
    noise: PairedNoise,
    seed: int | None = None,
    edit: Edit | None = None,
) -> Sampler:
    """LazyMAR on plain MAR; arguments and errors as :func:`samplers.mar.mar.mar`. With ``refresh_period`` 1 it is plain MAR bit for bit."""
    transformer = LazyTransformer(settings)
    run = begin("mar", model, condition, settings, noise, seed, edit, transformer)
    yield from plain_steps(run, transformer, annealed_tables(run, settings))
    return run.finish()


def computed_ratio(progress: float, end: float) -> float:
    """Share of decoder rows to compute at ``progress`` 0..1 of the AR steps: the reference's curve stretched to the share ``end``, 0..1.

    At 0.05 and 64 AR steps this is the reference's table, exactly.
    """
    at, last = progress * len(REFERENCE_RATIOS), len(REFERENCE_RATIOS) - 1
    low = min(int(at), last)
    ratio = REFERENCE_RATIOS[low] + (at - low) * (REFERENCE_RATIOS[min(low + 1, last)] - REFERENCE_RATIOS[low])
    # Rounded: the row count is floored, and 0.15 must not become 0.1499...
    return round(1 - (1 - end) * (1 - ratio) / (1 - REFERENCE_RATIOS[-1]), 9)


@dataclass(eq=False)
class FeatureCache:
    """Features of one refresh, all on storage of their own."""

    live: int  # decoder rows: images, or images times two branches without the condition cache
    encoded: int  # encoder rows: as many, or images where the branches of guidance do not differ in the encoder
    between: Kept | None = None  # with the encoder cache, what is kept between encoder and decoder
    canvas: Tensor | None = None  # and the decoder's input [live, N, C]
    # Keys and values of every encoder block, [encoded, heads, room, d]: decided tokens, then the class rows of the last call.
    encoder: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    # Values of the chosen decoder block at the last call, [live, heads, N, d]; None if all rows are computed.
    values: Tensor | None = None
    decoder: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values of the decoder blocks after it
    residual: Tensor | None = None  # null minus conditional branch after the last decoder block, [B, L, C]

    @property
    def bytes(self) -> int:
        """Bytes of all stored tensors."""
        tensors = [t for pair in (*self.encoder, *self.decoder) for t in pair]
        tensors += self.between.tensors if self.between else []
        tensors += [t for t in (self.canvas, self.values, self.residual) if t is not None]
        return sum(t.untyped_storage().nbytes() for t in tensors)


class LazyTransformer(Transformer):
    """The transformer with LazyMAR's caches, for one generation.

    Calls may skip AR steps, ask for any positions ahead, and start from given tokens: the new tokens are those decided since
    the last call. Decided tokens must not change; a caller that changes some calls :meth:`forget`. The report of a run with
    this transformer has its name and settings.
    """

    def __init__(self, settings: CacheSettings):
        self.settings = settings
        self.full = FullTransformer()
        self.cache: FeatureCache | None = None
        self.step, self.known = -1, 0  # of the last call: the AR step, tokens decided before it
        self._head_plans: dict[int, HeadPlan] = {}  # by number of diffusion steps
        self.held = 0  # most bytes held so far
        self.reported = 0  # cached tokens reported so far

    def begin(self, run: Run) -> None:
        """Choose the block, the AR steps of refreshes and the shares of computed rows. Raises UserError: no such block."""
        s, c, batch, steps, report = self.settings, run.model.net.config, len(run.tokens), run.plan.steps, run.report
        report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
        report.settings |= {f.name: getattr(s, f.name) for f in fields(CacheSettings)}
        report.memory[FEATURES] = feature_bytes(run.model, batch, run.settings, s)
        if s.block > c.decoder_depth:
            what = f"{s.block} is outside 1 to {c.decoder_depth}, the decoder's blocks"
            raise UserError(f"block: {what}; lower it, or use 0.")
        # Three blocks precede the paper's 4th: a quarter of the smallest MAR's decoder.
        self.block = s.block - 1 if s.block else min(3, c.decoder_depth // 4)
        # The last block saves nothing: it computes the wanted rows only, in plain MAR too.
        prunes = s.token_cache and self.block < c.decoder_depth - 1
        self.share = [computed_ratio(k / steps, s.computed_ratio) if prunes else 1.0 for k in range(steps)]
        self.spare = max(1, round((c.buffer + c.tokens) * _SPARE / _SPARE_OF))
        # The AR step of the next refresh. Skipping AR steps cannot skip a refresh.
        period, start = s.refresh_period, s.start_step
        self.until = [k + 1 if k < start else start + ((k - start) // period + 1) * period for k in range(steps)]
        self.full.begin(run)
        self.vectors = self.full.vectors
        self.mlp = run.model.net.region(block_mlp)
        self.cached: Tensor | None = None  # int32 [B, L], how often each token's decoder rows came from the cache
        if period > 1 and s.token_cache:
            self.cached = torch.zeros(batch, c.tokens, dtype=torch.int32, device=run.tokens.device)

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Tensor:
        """z [P, B, M, C] at positions ``wanted`` [B, M], from caches where no refresh is due."""
        fresh = self.settings.start_step <= step and self.step <= step < self.until[self.step]
        reuses = self.cache is not None and fresh
        z = self._reuse(run, step, wanted) if reuses else self._refresh(run, step, wanted)
        self.step, self.known = step, run.plan.starts[step]
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

    def head_period(self, diffusion_steps: int) -> int:
        """Diffusion steps from one full evaluation of the head to the next: a share of them all, on which the error depends."""
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
        head = CachedHead(run.model.net.head, batch, self._head_plans[count])
        x = batch.x
        for k, step in enumerate(ancestral_steps(run, batch)):
            x, _, _ = step(x, head(k, x))
        run.report.add(head_calls=count, head_rows=head.rows)
        return x

    def _refresh(self, run: Run, step: int, wanted: Tensor) -> Tensor:
        """Everything in full; features are stored if a later call may use them."""
        self.cache = None  # freed first
        s, until = self.settings, min(self.until[step], run.plan.steps)
        # Whether the token cache may skip rows before the next refresh, and whether the null branch is not computed.
        prunes, halves = any(share < 1 for share in self.share[step + 1 : until]), run.guided and s.condition_cache
        if step + 1 >= until or not (s.encoder_cache or prunes or halves):
            return self.full(run, step, wanted)
        net, c, batch, known = run.model.net, run.model.net.config, len(run.tokens), run.plan.known(step)
        encoded, branches = len(self.vectors), 1 + run.guided
        times = encoded // batch  # branches of guidance in the encoder
        e_known, known, wanted = known.repeat(times, 1), known.repeat(branches, 1), wanted.repeat(branches, 1)
        live = batch if halves else batch * branches
        cache = FeatureCache(live, min(live, encoded))
        decided, room = known.shape[1], c.buffer + run.plan.starts[until - 1]
        # 1. The encoder. Class rows are computed at every call and follow the tokens, so only the tokens are stored.
        x = net.embed_known(run.tokens.repeat(times, 1, 1), e_known, self.vectors)
        for block in net.encoder_blocks:
            x, k, v = self._pass(block, x)
            if s.encoder_cache:
                keys, values = (t.new_empty(cache.encoded, t.shape[1], room, t.shape[3]) for t in (k, v))
                keys[:, :, :decided], values[:, :, :decided] = (t[: cache.encoded, :, c.buffer :] for t in (k, v))
                cache.encoder.append((keys, values))
        x = net.encoder_norm(x)
        # 2. What is between encoder and decoder.
        if s.encoder_cache:
            x, cache.between = run.rows.keep(x, e_known, run.guided, live, room)
        else:
            x = run.rows.fuse(x, e_known, run.guided)
        x = net.canvas(x, known)
        if s.encoder_cache:
            cache.canvas = own_copy(x, live)
        # 3. The decoder. The condition cache needs every token's output, otherwise the wanted ones are enough.
        out: slice | Tensor = slice(c.buffer, None) if halves else wanted + c.buffer
        for j, block in enumerate(net.decoder_blocks):
            x, k, v = self._pass(block, x, out if j == c.decoder_depth - 1 else None)
            if prunes and j == self.block:
                cache.values = own_copy(v, live)
            elif prunes and j > self.block:
                cache.decoder.append((own_copy(k, live), own_copy(v, live)))
        if halves:
            cache.residual = x[batch:] - x[:batch]  # (10)
            x = pick(x, wanted)
        self.cache = cache
        if cache.bytes > self.held:
            run.report.add(cache_bytes=cache.bytes - self.held)
            self.held = cache.bytes
        run.report.add(**run.rows.counts(encoded * (c.buffer + decided), batch * branches * (c.buffer + c.tokens)))
        return self._conditions(run, x, wanted)

    def _reuse(self, run: Run, step: int, wanted: Tensor) -> Tensor:
        """New tokens through the encoder, changed rows through the decoder; one branch if the other is cached."""
        assert self.cache is not None
        cache, times = self.cache, self.cache.live // len(run.tokens)
        new, asked = run.plan.reveal[:, self.known : run.plan.starts[step]], wanted.repeat(times, 1)
        x, encoder_rows = self._encode(run, step, new)
        x, decoder_rows = self._decode(run, step, x, asked, new.repeat(times, 1))
        run.report.add(**run.rows.counts(cache.encoded * encoder_rows, round(cache.live * decoder_rows)))
        if cache.residual is not None:
            x = torch.cat([x, x + pick(cache.residual, wanted)])  # (10)
            asked = torch.cat([wanted, wanted])
        return self._conditions(run, x, asked)

    def _encode(self, run: Run, step: int, new: Tensor) -> tuple[Tensor, int]:
        """The decoder's input [live, N, C] and how many rows per entry the encoder computed for it."""
        assert self.cache is not None
        net, cache, buffer, batch = run.model.net, self.cache, run.model.net.config.buffer, len(run.tokens)
        times = cache.encoded // batch
        vectors, tokens = self.vectors[: cache.encoded], run.tokens.repeat(times, 1, 1)
        if cache.canvas is None or cache.between is None:
            known = run.plan.known(step)
            e_known = known.repeat(times, 1)
            x = run.rows.fuse(net.encode(tokens, e_known, vectors), e_known, cache.live > batch)
            return net.canvas(x, known.repeat(cache.live // batch, 1)), buffer + known.shape[1]
        x = net.embed_known(tokens, new.repeat(times, 1), vectors)
        # Class rows last: a call then writes one slice, and the next call's tokens overwrite the class rows.
        x = torch.cat([x[:, buffer:], x[:, :buffer]], dim=1)
        at, count = self.known, x.shape[1]
        end = at + count
        for block, (keys, values) in zip(net.encoder_blocks, cache.encoder, strict=True):
            q, k, v = block.attn.project(block.norm1(x))
            keys[:, :, at:end], values[:, :, at:end] = k, v
            x = self._rest(block, x, q, keys[:, :, :end], values[:, :, :end])
        x, places = cache.between.extend(net.encoder_norm(x), new, at)
        x = net.decoder_embed(x) + net.decoder_pos_embed_learned[0][places]
        cache.canvas.scatter_(1, places[..., None].expand(-1, -1, x.shape[2]), x)
        return cache.canvas, count

    def _decode(self, run: Run, step: int, x: Tensor, wanted: Tensor, new: Tensor) -> tuple[Tensor, float]:
        """The last block's rows at ``wanted`` [live, M, C], and how many rows an average block computed."""
        assert self.cache is not None
        net, cache, total = run.model.net, self.cache, x.shape[1]
        blocks, rows = net.decoder_blocks, wanted + net.config.buffer
        if cache.values is None:
            for block in blocks[:-1]:
                x = block(x)
            return blocks[-1](x, rows=rows), float(total)
        # 1. The blocks before the chosen one compute all rows.
        for block in blocks[: self.block]:
            x = block(x)
        # 2. The chosen block's values tell which rows changed.
        block, behind = blocks[self.block], blocks[self.block + 1 :]
        q, k, v = block.attn.project(block.norm1(x))
        keep = self.choose(run, step, v, wanted, new)
        cache.values.copy_(v)
        if keep is None:
            x = self._rest(block, x, q, k, v)
            for block, (keys, values) in zip(behind, cache.decoder, strict=True):
                x, k, v = self._pass(block, x, rows if block is blocks[-1] else None)
                keys.copy_(k), values.copy_(v)
            return x, float(total)
        # 3. From there on only these rows are computed; the others' keys and values are the cached ones.
        at = keep[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3])
        x = self._rest(block, pick(x, keep), q.gather(2, at), k, v)
        for block, (keys, values) in zip(behind, cache.decoder, strict=True):
            q, k, v = block.attn.project(block.norm1(x))
            keys.scatter_(2, at, k), values.scatter_(2, at, v)
            if block is blocks[-1]:  # the wanted rows stand in front
                x, q = x[:, : rows.shape[1]], q[:, :, : rows.shape[1]]
            x = self._rest(block, x, q, keys, values)
        return x, (total * (len(blocks) - len(behind)) + keep.shape[1] * len(behind)) / len(blocks)

    def similarity(self, values: Tensor) -> Tensor:
        """Cosine of the chosen block's values [live, heads, N, d] and those of the last call, mean of the heads, [live, N]; (8)."""
        assert self.cache is not None and self.cache.values is not None
        return F.cosine_similarity(values.float(), self.cache.values.float(), dim=-1).mean(dim=1)

    def choose(self, run: Run, step: int, values: Tensor, wanted: Tensor, new: Tensor) -> Tensor | None:
        """Decoder rows to compute from the chosen block on, int64 [live, n]: (9); None for all.

        First those of positions ``wanted`` int64 [live, M], then ``new`` ones, decided since the last call, int64 [live, K], then the least
        similar by the block's ``values`` [live, heads, N, d].
        """
        c = run.model.net.config
        total, must = c.buffer + c.tokens, torch.cat([wanted, new], dim=1) + c.buffer
        n = max(must.shape[1] + self.spare, int(total * self.share[step]))
        if n >= total:
            return None
        # Unchanged rows differ by rounding only, which must not order them.
        score = (self.similarity(values) * 2**17).round() / 2**17
        # Mandatory rows come first. At equal scores the lower row comes first.
        rest = score.scatter_(1, must, torch.inf).argsort(dim=1, stable=True)[:, : n - must.shape[1]]
        keep = torch.cat([must, rest], dim=1)
        if self.cached is not None:
            left = torch.ones_like(score[: len(self.cached)], dtype=torch.int32)
            self.cached += left.scatter_(1, keep[: len(self.cached)], 0)[:, c.buffer :]
        return keep

    def _conditions(self, run: Run, x: Tensor, wanted: Tensor) -> Tensor:
        """z [P, B, M, C] of the last decoder block's rows [P B, M, C] at ``wanted`` (as many)."""
        net = run.model.net
        z = net.decoder_norm(x) + pick(net.diffusion_pos_embed_learned.expand(len(wanted), -1, -1), wanted)
        return z.unflatten(0, (1 + run.guided, -1))

    def _pass(self, block: Block, x: Tensor, rows: slice | Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """A block's output, at some ``rows`` only if given (a slice, or int64 [B, M]), and keys and values of all rows of x."""
        q, k, v = block.attn.project(block.norm1(x))
        if isinstance(rows, slice):
            q, x = q[:, :, rows], x[:, rows]
        elif rows is not None:
            q, x = q.gather(2, rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])), pick(x, rows)
        return self._rest(block, x, q, k, v), k, v

    def _rest(self, block: Block, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The block after its projection: rows x [B, N, C] whose queries are q, over keys k and values v."""
        return self.mlp(block, x + block.attn.attend(q, k, v))


FULL, EDGE, REUSED = "full", "edge", "reused"


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

    The cache is in the published code and in the paper's speed-ups, but not in its text. A reused step evaluates the conditional rows
    only, and takes from the last full step: the sum of what blocks 1 to 4 added; the MLP outputs of the other blocks (``own``), with the
    current gate; and the difference between the conditional and the null branch's noise. An edge step computes the MLPs of the own blocks.
    """

    def __init__(self, head: DiffusionHead, batch: HeadBatch, plan: HeadPlan):
        self.head, self.cfg, self.kinds = head, batch.cfg, plan.kinds
        self.branches, self.tokens = batch.z.shape[:2]
        self.blocks = cast(list[HeadBlock], list(head.res_blocks))
        self.own = [0, *range(5, len(self.blocks))]
        self.rows = 0  # evaluated so far

        # The modulations of each kind of step; a reused step needs gates and the last layer's only.
        width = head.input_proj.out_features
        gates = [outputs(self.blocks[j].adaLN_modulation[1], 2 * width, 3 * width) for j in self.own]

        def of_edge(embedding: Tensor) -> list[Tensor]:
            return head.modulations(embedding, (self.blocks[j] for j in self.own))

        def of_reused(embedding: Tensor) -> list[Tensor]:
            active = F.silu(embedding)
            return [*(gate(active) for gate in gates), *head.modulations(embedding, ())]

        times = head.time_embed(batch.table.timestep_map.flip(0))
        condition = head.cond_embed(batch.z.flatten(0, 1))
        conditional = condition[: self.tokens]
        at = {kind: times[which] for kind, which in plan.of_kind.items()}
        self.modulations = {
            FULL: step_modulations(head.modulations, at[FULL], condition, 3 * len(self.blocks) + 2),
            EDGE: step_modulations(of_edge, at[EDGE], conditional, 3 * len(self.own) + 2),
            REUSED: step_modulations(of_reused, at[REUSED], conditional, len(self.own) + 2),
        }

        # Of the last full step: outputs of the own blocks' MLPs, what blocks 1 to 4 added, and the last layer's bias plus the guidance.
        self.mlps: list[Tensor] = []
        self.middle: Tensor | float = 0.0
        self.bias = head.final_layer.linear.bias.expand(self.tokens, -1).clone()

    def __call__(self, k: int, x: Tensor) -> Tensor:
        """Noise and variance logits of the states x fp32 [N, channels]: [P, N, 2 channels] at a full step, else [1, N, 2 channels] with
        the guidance in it."""
        kind = self.kinds[k]
        modulations = next(self.modulations[kind])
        out = self._full(x, modulations) if kind == FULL else self._conditional(x, modulations, kind == EDGE)
        self.rows += out.shape[0] * out.shape[1]
        return out

    def _full(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """All branches in full; keeps what the next steps reuse."""
        head, n = self.head, self.tokens
        final, last, channels = head.final_layer, head.final_layer.linear, head.channels
        self.mlps = []
        h = before = head.input_proj(torch.cat([x] * self.branches).to(head.input_proj.weight.dtype))
        for j, block in enumerate(self.blocks):
            shift, scale, gate = modulations[3 * j : 3 * j + 3]
            out = block.mlp(modulated(h, block.in_ln, shift, scale))
            if j == 1:
                before = h[:n]
            h = torch.addcmul(h, gate, out)
            if j in self.own:
                self.mlps.append(out[:n])
            elif j == 4 or j + 1 == len(self.blocks):
                self.middle = h[:n] - before

        out = last(modulated(h, final.norm_final, *modulations[-2:]).to(last.weight.dtype))
        out = out.view(self.branches, n, -1)
        if self.branches == 2:
            self.bias[:, :channels] = last.bias[:channels] + (self.cfg - 1) * (out[0] - out[1])[:, :channels]
        return out

    def _conditional(self, x: Tensor, modulations: Sequence[Tensor], edge: bool) -> Tensor:
        """The conditional rows, from the cache; at an edge step the own blocks' MLPs are computed."""
        head = self.head
        final, last = head.final_layer, head.final_layer.linear
        h = head.input_proj(x.to(head.input_proj.weight.dtype))
        for i, j in enumerate(self.own):
            block = self.blocks[j]
            if edge:
                shift, scale, gate = modulations[3 * i : 3 * i + 3]
                self.mlps[i] = block.mlp(modulated(h, block.in_ln, shift, scale))
            else:
                gate = modulations[i]
            h = torch.addcmul(h, gate, self.mlps[i])
            if j == 0:
                h = h + self.middle
        h = modulated(h, final.norm_final, *modulations[-2:])
        return torch.addmm(self.bias, h.to(self.bias.dtype), last.weight.t())[None]


def step_modulations(
    modulations: Callable[[Tensor], list[Tensor]], times: Tensor, condition: Tensor, size: int
) -> Iterator[tuple[Tensor, ...]]:
    """The head's modulations at every diffusion step, of time embeddings [S, w] and condition embeddings [R, w].

    Those of many steps are one product, which reads the weights once. ``modulations`` makes ``size`` tensors [..., w] of embeddings.
    """
    at_once = max(1, BUDGET // max(1, condition.numel() * size))
    for some in times[:, None].split(at_once):
        yield from zip(*modulations(some + condition), strict=True)


def block_mlp(block: Block, x: Tensor) -> Tensor:
    """The block after its attention, as a function for the compiler."""
    return x + block.mlp(block.norm2(x))


def own_copy(x: Tensor, live: int) -> Tensor:
    """A copy of the first ``live`` entries; a view would keep the whole projection in memory."""
    return x[:live].clone(memory_format=torch.contiguous_format)
