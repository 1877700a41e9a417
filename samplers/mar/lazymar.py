"""LazyMAR: features are kept from one AR step to the next, and only new or changed rows are computed.

Source: Yan et al. 2025, "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching" (ICCV 2025, arXiv
2503.12450). Every tau-th AR step is a *refresh*: encoder and decoder compute all rows, of both branches of guidance,
and their features are stored. A call at AR step k between two refreshes computes less, by three caches that can be
switched off one by one (:class:`CacheSettings`):

1. *encoder cache*: the encoder computes the class rows and the tokens decided since the last call, with the stored keys
   and values of earlier tokens. It is in the published code, not in the paper.
2. *token cache* (section 3.2.1): the decoder computes all rows up to a chosen block, whose values V tell how similar
   row i is to what it was at the last call, and from there on only some rows:

   - similarity: s_i = cos(V_i^k, V_i^k'), the mean of the heads, where k' is the AR step of the last call;
   - (8): the computed rows are those of the wanted tokens, which the call returns, those of the tokens decided since
     k', and others of lowest s_i (the paper prints argmax; by its text and its code the least similar rows are
     computed). How many is in ``refresh.py``. The paper's Table 3 compares other choices, see :class:`.RowChoice`;
   - (9): the blocks behind the chosen one see the computed rows together with the stored keys and values of the others.

   The paper takes its 3rd layer, the published code the 4th block.
3. *condition cache* (section 3.2.2): only the conditional branch is computed. After the last block, with both branches
   of the last refresh r:

   - (10): residual = null^r - conditional^r;
   - null^k = conditional^k + residual.

A fourth cache is that of the diffusion head, in ``cached_head.py``.

All are a way to evaluate the transformer and the head, so they combine with plain MAR, FastHybrid and CSpD.
Differences from the published code: rows that must be computed always are (there, rows of negative similarity can
displace them); AR steps behind the 64th have its share, where the published code fails; the decoder's keys and values
are stored only behind the chosen block, since the blocks before it compute all rows.

Shapes: B images, P branches of guidance, L tokens, N = buffer + L rows of the decoder, C width. An entry of a batch of
E entries is one branch of one image; those of the conditional branch come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ...model_loaders.networks.mar import MAR, Block, MARModel, pick
from ..conditioning import MaskedCondition
from ..editing import Edit
from ..engine import Sampler
from ..memory import FEATURES
from ..noise import PairedNoise
from .cached_head import CachedHeads
from .canvas import MARCanvas
from .feature_cache import FeatureCache, Store, own_copy
from .mar import check as check_mar
from .mar import expect_whole_head, mar
from .memory import feature_bytes
from .refresh import chosen_block, next_refreshes
from .row_choice import RowChoice
from .settings import CacheSettings, LazyMARSettings, MARBase
from .transformer import FullTransformer, Transformer


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
    return mar(model, condition, settings, noise, partial(LazyTransformer, settings=settings), edit)


def with_caches(sampler: Callable[..., Sampler], *models: str) -> Callable[..., Sampler]:
    """A MAR sampler whose models are evaluated with LazyMAR's caches; ``models`` are its arguments that say how they
    are evaluated.
    """

    def run(model: Any, condition: Any, settings: Any, noise: Any, **more: Any) -> Sampler:
        lazy = {name: partial(LazyTransformer, settings=settings) for name in models}
        return sampler(model, condition, settings, noise, **lazy, **more)

    return run


def check(model: MARModel, settings: MARBase, cache: CacheSettings | None = None) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Args:
        cache: those of the caches; None if ``settings`` hold them too.

    Raises:
        UserError: more AR steps than tokens, a block that the decoder does not have, or speculation with a cached head.
    """
    check_mar(model, settings)
    caches = cast(CacheSettings, settings) if cache is None else cache
    chosen_block(caches, model.net.config.decoder_depth, model.name)
    expect_whole_head(settings, CachedHeads(caches))


class LazyTransformer(Transformer):
    """The transformer with LazyMAR's caches, for one generation; its head is :class:`.CachedHeads`.

    Calls may skip AR steps, ask for any positions ahead, and start from given tokens: the new tokens are those decided
    since the last call. Decided tokens must not change; a caller that changes some calls :meth:`forget`. The report of
    a run with this transformer has its name and settings.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        """Choose the block, and plan refreshes and rows."""
        super().__init__(canvas)
        self.settings = settings
        self.heads = CachedHeads(settings)
        self.full = FullTransformer(canvas)
        self.cache: FeatureCache | None = None
        self.most_held = 0  # most bytes held so far
        self.reported = 0  # cached tokens reported so far

        s = settings
        c = canvas.model.net.config
        block = chosen_block(s, c.decoder_depth, canvas.model.name)
        self.block = block - 1  # from 0; ``block`` counts from 1

        self.next_refresh = next_refreshes(s, canvas.order.steps)  # of each AR step
        self.choice = RowChoice(canvas, s, block)

        self.vectors = (
            self.full.vectors
        )  # [E, C], of the class rows; E = B if both branches share the encoder, else P B
        self.feed_forward = canvas.model.net.region(feed_forward, "transformer blocks")
        # int32 [B, L], how often each token's decoder rows came from the cache; None where they never do.
        self.cached: Tensor | None = None
        if s.refresh_period > 1 and s.token_cache:
            self.cached = torch.zeros(canvas.images, c.tokens, dtype=torch.int32, device=canvas.device)
        self._name_report()

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """z [P, B, M, C] at positions ``wanted`` [B, M], from the cache unless a refresh is due."""
        if self.cache is None or not self.cache.step <= step < self.cache.next_refresh:
            self.cache = None  # freed before the next one is made
            self.cache = self.new_cache(step)

        if self.cache is None:
            z = self.full(step, wanted)
        else:
            z = self._look(self.cache, step, wanted)
        self._report_cached(self.canvas.order.starts[step] + wanted.shape[1])
        return z

    def forget(self) -> None:
        """The next call is a refresh."""
        self.cache = None

    def _look(self, cache: FeatureCache, step: int, wanted: Tensor) -> Tensor:
        """One pass, a refresh if the cache is empty: z [P, B, M, C] at positions ``wanted`` int64 [B, M]."""
        canvas = self.canvas
        order = canvas.order
        net = canvas.model.net
        images = canvas.images
        if cache.empty:
            branches = 1 + canvas.guided
        else:
            branches = cache.decoder_entries // images  # those that are computed
        new = order.reveal[:, cache.known : order.starts[step]]  # decided since the last call

        # 1. The encoder reads the new tokens.
        x, encoder_rows = self._encode(cache, step, new, branches)

        # 2. The decoder computes the rows that changed, and its last block of these the wanted ones. A refresh that
        # keeps the difference of the branches wants all tokens.
        keeps_difference = cache.empty and cache.conditional_only
        decoder_wanted = wanted
        if keeps_difference:
            decoder_wanted = torch.arange(net.config.tokens, device=wanted.device).expand(images, -1)
        x, decoder_rows = self._decode(net, cache, step, x, decoder_wanted.repeat(branches, 1), new.repeat(branches, 1))

        # 3. The null branch of a refresh gives the residual (10), from which later calls make their null branch.
        wanted_of_branches = wanted.repeat(1 + canvas.guided, 1)
        if keeps_difference:
            conditional, null = x.chunk(2)
            cache.residual = null - conditional  # (10)
            x = pick(x, wanted_of_branches)
        elif cache.residual is not None:
            null = x + pick(cache.residual, wanted)
            x = torch.cat([x, null])

        # 4. What the report and the next call read.
        if cache.empty:
            # add() sums: only the growth over earlier refreshes is added.
            most_held = max(self.most_held, cache.bytes)
            canvas.report.add(cache_bytes=most_held - self.most_held)
            self.most_held = most_held
        canvas.report.add(**canvas.conditioning.counts(encoder_rows, decoder_rows))
        cache.step = step
        cache.known = order.starts[step]

        z = net.decoder_norm(x) + pick(
            net.diffusion_pos_embed_learned.expand(len(wanted_of_branches), -1, -1), wanted_of_branches
        )
        return z.unflatten(0, (1 + canvas.guided, -1))

    def _encode(self, cache: FeatureCache, step: int, new: Tensor, branches: int) -> tuple[Tensor, int]:
        """The decoder's input [branches B, N, C], and how many rows the encoder computed.

        ``new`` int64 [B, K] are the tokens decided since the last call.
        """
        canvas = self.canvas
        net = canvas.model.net
        buffer = net.config.buffer
        reuses = bool(cache.encoder) and not cache.empty
        tokens = new if reuses else canvas.order.known(step)

        # 1. The encoder's input: class rows and tokens. Class rows are computed at every call. They are stored behind
        # the tokens, where the next call's tokens overwrite them.
        vectors = self.vectors if cache.empty else self.vectors[: cache.encoder_entries]
        copies = len(vectors) // len(tokens)  # 1 or P entries of an image
        x = net.embed_known(canvas.values.repeat(copies, 1, 1), tokens.repeat(copies, 1), vectors)
        rows = None
        if reuses:
            rows = slice(cache.known, cache.known + x.shape[1])
            x = x.roll(-buffer, 1)  # from [class rows, tokens] to [tokens, class rows], the order of the stores

        # 2. Its blocks.
        x = net.encoder_norm(self.walk(net.encoder_blocks, x, cache.encoder, rows))
        computed = len(x) * x.shape[1]

        # 3. The decoder's input: made anew, or the last call's with the computed rows replaced. fuse makes rows for the
        # decoder and fills cache.fused; extend takes the computed rows behind those, tokens first, then class rows.
        if not reuses:
            x = canvas.conditioning.fuse(x, tokens.repeat(copies, 1), branches > 1, cache=cache.fused)
            x = net.canvas(x, tokens.repeat(branches, 1))
            if cache.encoder:
                cache.decoder_input = own_copy(x, cache.decoder_entries)
            return x, computed

        assert cache.decoder_input is not None
        x = canvas.conditioning.extend(x, cache.fused, cache.known)
        class_rows = torch.arange(buffer, device=x.device).expand(len(x), -1)
        at = torch.cat([tokens.repeat(branches, 1) + buffer, class_rows], dim=1)
        x = net.decoder_embed(x) + net.decoder_pos_embed_learned[0][at]
        cache.decoder_input.scatter_(1, at[..., None].expand_as(x), x)
        return cache.decoder_input, computed

    def _decode(
        self, net: MAR, cache: FeatureCache, step: int, x: Tensor, wanted: Tensor, new: Tensor
    ) -> tuple[Tensor, int]:
        """The last block's rows of x [E, N, C] at ``wanted`` positions, and how many rows an average block computed.

        ``wanted`` int64 [E, M]; ``new`` int64 [E, K] are the tokens decided since the last call.
        """
        blocks = list(net.decoder_blocks)
        entries, total, _ = x.shape
        out = wanted + net.config.buffer
        if not cache.decoder:
            return self.walk(blocks, x, out=out), entries * total

        # 1. The blocks before the chosen one compute all rows.
        x = self.walk(blocks[: self.block], x)

        # 2. The chosen block's values tell which rows to compute from here on; a refresh computes all.
        block = blocks[self.block]
        q, k, v = block.attn.project(block.norm1(x))
        rows = None
        if cache.chosen_values is not None:
            must = torch.cat([out, new + net.config.buffer], dim=1)
            rows = self.choice.rows(step, cache.known, v, cache.chosen_values, must)  # (8)
        cache.chosen_values = own_copy(v, cache.decoder_entries)
        if rows is not None:
            x = pick(x, rows)
            q = pick(q, rows)
            out = torch.arange(wanted.shape[1], device=x.device).expand(entries, -1)  # the wanted rows come first
            self._count_cached(rows, total)
        x = self.feed_forward(block, block.attend(x, q, k, v))
        count = x.shape[1]

        # 3. The blocks after it compute these rows; keys and values of the others are the stored ones (9).
        after = blocks[self.block + 1 :]
        x = self.walk(after, x, cache.decoder, rows, out)
        of_a_block = (total * (self.block + 1) + count * len(after)) / len(blocks)
        return x, round(entries * of_a_block)

    def walk(
        self,
        blocks: Sequence[Block],
        x: Tensor,
        stores: Sequence[Store] = (),
        rows: slice | Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rows x [E, n, C] through ``blocks``, in which they attend to all rows of the sequence.

        Args:
            stores: of each block, with the keys and values of the rows that x lacks; () if it lacks none.
            rows: places of x in the sequence, as in :meth:`Store.update`; None for all rows.
            out: int64 [E, M], the rows of x that the last block computes; None for all.
        """
        for j, block in enumerate(blocks):
            q, k, v = block.attn.project(block.norm1(x))
            if stores:
                k, v = stores[j].update(k, v, rows)
            if out is not None and j + 1 == len(blocks):
                x = pick(x, out)
                q = pick(q, out)
            x = self.feed_forward(block, block.attend(x, q, k, v))
        return x

    def new_cache(self, step: int) -> FeatureCache | None:
        """An empty cache for a refresh at ``step``; None if no later call may use one."""
        s = self.settings
        canvas = self.canvas
        net = canvas.model.net
        c = net.config
        until = self.next_refresh[step]
        later = self.choice.share[step + 1 : until]  # of the AR steps that would use the cache
        prunes = any(share < 1 for share in later)  # whether some of them leave rows out
        conditional_only = canvas.guided and s.condition_cache
        if not later or not (s.encoder_cache or prunes or conditional_only):
            return None

        net.runs_plain("attention with LazyMAR's caches")
        images = canvas.images
        decoder_entries = images if conditional_only else images * (1 + canvas.guided)
        encoder_entries = min(decoder_entries, len(self.vectors))
        cache = FeatureCache(until, decoder_entries, encoder_entries, conditional_only, encoder=[], decoder=[])
        if s.encoder_cache:
            room = c.buffer + canvas.order.starts[until - 1]
            cache.encoder = [Store(encoder_entries, room, skipped=c.buffer) for _ in net.encoder_blocks]
            cache.fused = canvas.conditioning.feature_cache(decoder_entries, room)
        if prunes:
            cache.decoder = [Store(decoder_entries, c.buffer + c.tokens) for _ in net.decoder_blocks[self.block + 1 :]]
        return cache

    # --- the report

    def _name_report(self) -> None:
        """The report is of the combination, with the settings of both."""
        canvas = self.canvas
        report = canvas.report
        report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
        report.settings |= {f.name: getattr(self.settings, f.name) for f in fields(CacheSettings)}
        report.memory[FEATURES] = feature_bytes(canvas.model, canvas.images, canvas.settings, self.settings)

    def _count_cached(self, rows: Tensor, total: int) -> None:
        """Count the tokens that are not among the ``rows`` of ``total`` to compute, in the conditional branch."""
        assert self.cached is not None
        images, tokens = self.cached.shape
        left_out = torch.ones(images, total, dtype=torch.int32, device=rows.device).scatter_(1, rows[:images], 0)
        self.cached += left_out[:, total - tokens :]

    def _report_cached(self, decided: int) -> None:
        """Report the map if ``decided`` tokens are all of them: the call may be the last one."""
        canvas = self.canvas
        if self.cached is None or decided < canvas.cells:
            return
        canvas.report.maps["cached"] = self.cached.unflatten(1, canvas.grid).cpu().numpy().copy()
        total = int(canvas.report.maps["cached"].sum())
        canvas.report.add(cached_tokens=total - self.reported)
        self.reported = total


def feed_forward(block: Block, x: Tensor) -> Tensor:
    """A block after its attention, as a function for the compiler.

    The attention is not compiled: its queries, keys and values are projections, chosen rows or slices of a cache, and
    every combination of their strides would be a graph of its own.
    """
    return x + block.mlp(block.norm2(x))
