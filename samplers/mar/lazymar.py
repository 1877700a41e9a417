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

Shapes: B images, P branches of guidance, L tokens, N = buffer + L rows of the decoder, C width. A batch has E entries,
each of one branch of one image, those of the conditional branch first: P B, or B where the null branch is left out and
in an encoder that does not read the condition (Harmon's and UniPic's), whose output both branches share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ...model_loaders.networks.mar import Block, MARModel, pick
from ..conditioning import MaskedCondition
from ..editing import Edit
from ..engine import Sampler
from ..noise import PairedNoise
from .cached_head import CachedHeads
from .canvas import MARCanvas
from .feature_cache import CacheReport, FeatureCache, Store, own_copy
from .mar import check as check_mar
from .mar import expect_whole_head, mar
from .network import FullTransformer, Transformer
from .refresh import chosen_block, next_refreshes
from .row_choice import RowChoice
from .settings import CacheSettings, LazyMARSettings, MARBase


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
    since the last call. Decided tokens must not change; a caller that changes some calls :meth:`forget`. The report
    takes the name lazymar, or SAMPLER+lazymar, and the cache settings.

    A call names five sets of tokens or of their rows in the decoder:

    - ``wanted``: tokens whose z the call returns;
    - ``new``: tokens decided since the last call;
    - ``needed``: tokens whose rows the last block computes: the wanted ones, or all at a refresh of the condition
      cache. ``needed_rows`` are their rows;
    - ``must``: the rows of ``needed`` and ``new``, which the token cache always computes, in this order;
    - ``needed_among``: the places of the needed rows among those that are computed.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        """Choose the block, and plan refreshes and rows."""
        super().__init__(canvas)
        net = canvas.model.net
        self.settings = settings
        self.cache_report = CacheReport(canvas, settings)
        self.heads = CachedHeads(settings)
        self.full = FullTransformer(canvas)
        self.vectors = self.full.vectors  # of the encoder's class rows, [E, C]; null ones last, if it has any
        self.feed_forward = net.compiled(feed_forward, "transformer blocks")
        self.cache: FeatureCache | None = None

        block = chosen_block(settings, net.config.decoder_depth, canvas.model.name)
        self.block = block - 1  # from 0; ``block`` counts from 1
        self.next_refresh = next_refreshes(settings, canvas.order.steps)  # of each AR step
        self.choice = RowChoice(canvas, settings, block)

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """z [P, B, M, C] at positions ``wanted`` [B, M], from the cache unless a refresh is due."""
        if self.cache is None or not self.cache.step <= step < self.cache.next_refresh:
            self.cache = None  # freed before the next one is made
            self.cache = self.new_cache(step)

        if self.cache is None:
            z = self.full(step, wanted)
        else:
            z = self._look(self.cache, step, wanted)
        self.cache_report.add_tokens(self.canvas.order.starts[step] + wanted.shape[1])
        return z

    def forget(self) -> None:
        """The next call is a refresh."""
        self.cache = None

    def _look(self, cache: FeatureCache, step: int, wanted: Tensor) -> Tensor:
        """One pass, a refresh if the cache is empty: z [P, B, M, C] at positions ``wanted`` int64 [B, M]."""
        canvas = self.canvas
        order = canvas.order
        net = canvas.model.net
        new = order.reveal[:, cache.known : order.starts[step]]  # decided since the last call

        # With the condition cache only a refresh computes the null branch.
        all_branches = 1 + canvas.guided
        branches = 1 if cache.conditional_only and not cache.empty else all_branches

        # 1. The encoder reads the decided tokens: all of them, or with its cache the new ones.
        if cache.encoder and not cache.empty:
            decoder_input, encoder_rows = self._encode_new(cache, new, branches)
        else:
            decoder_input, encoder_rows = self._encode_all(cache, order.known(step), branches)

        # 2. The decoder computes the rows that changed; its last block computes only the wanted ones. A refresh of the
        # condition cache needs all tokens: a later call may want any.
        fills_residual = cache.empty and cache.conditional_only
        needed = wanted
        if fills_residual:
            needed = torch.arange(net.config.tokens, device=wanted.device).expand(canvas.images, -1)
        features, decoder_rows = self._decode(cache, step, decoder_input, needed, new, branches)

        # 3. Condition cache: a refresh keeps the difference of the branches; later calls make their null one from it.
        positions = wanted.repeat(all_branches, 1)
        if fills_residual:
            conditional, null = features.chunk(2)
            cache.residual = null - conditional  # (10)
            features = pick(features, positions)
        elif cache.residual is not None:
            null = features + pick(cache.residual, wanted)
            features = torch.cat([features, null])

        # 4. What the report and the next call read.
        if cache.empty:
            self.cache_report.add_bytes(cache)
        canvas.report.add(**canvas.conditioning.counts(encoder_rows, decoder_rows))
        cache.step = step
        cache.known = order.starts[step]

        embedding = net.diffusion_pos_embed_learned.expand(len(positions), -1, -1)
        z = net.decoder_norm(features) + pick(embedding, positions)
        return z.unflatten(0, (all_branches, -1))

    def _encode_all(self, cache: FeatureCache, known: Tensor, branches: int) -> tuple[Tensor, int]:
        """The encoder with all decided tokens, at positions ``known`` int64 [B, K].

        Returns the decoder's input of so many branches, [E, N, C], and how many rows the encoder computed. At a refresh
        the encoder cache keeps both.
        """
        canvas = self.canvas
        net = canvas.model.net

        # 1. The blocks of the encoder.
        vectors = self.vectors if branches > 1 else self.vectors[: canvas.images]
        copies = len(vectors) // canvas.images  # entries of an image in the encoder
        known_of_encoder = known.repeat(copies, 1)
        x = net.embed_known(canvas.values.repeat(copies, 1, 1), known_of_encoder, vectors)
        x = net.encoder_norm(self.walk(net.encoder_blocks, x, cache.encoder))
        computed = len(x) * x.shape[1]

        # 2. The decoder's input, after a model of prompts has read the condition. From here on an entry is one branch
        # of one image, also where the encoder shared its output.
        x = canvas.conditioning.fuse(x, known_of_encoder, branches > 1, cache=cache.fused)
        x = net.canvas(x, known.repeat(branches, 1))
        if cache.encoder:
            cache.decoder_input = own_copy(x, cache.entries)
        return x, computed

    def _encode_new(self, cache: FeatureCache, new: Tensor, branches: int) -> tuple[Tensor, int]:
        """The encoder with its cache: it computes the ``new`` tokens, int64 [B, K], and the class rows, which attend to
        all tokens and so change at every call. Returns what :meth:`_encode_all` does.

        The stores have no place of their own for class rows: they stand behind the tokens, where the next call's tokens
        overwrite them. With 2 class rows (c), after a refresh with 4 tokens (t), a call with 3 new ones (n)::

            place           0 1 2 3 4 5 6 7 8
            stored before   t t t t
            computed                n n n c c
            stored after    t t t t n n n c c

        """
        canvas = self.canvas
        net = canvas.model.net
        buffer = net.config.buffer

        # 1. The blocks of the encoder.
        vectors = self.vectors if branches > 1 else self.vectors[: canvas.images]
        copies = len(vectors) // canvas.images
        x = net.embed_known(canvas.values.repeat(copies, 1, 1), new.repeat(copies, 1), vectors)
        x = x.roll(-buffer, 1)  # from [class rows, tokens] to [tokens, class rows]
        places = slice(cache.known, cache.known + x.shape[1])
        x = net.encoder_norm(self.walk(net.encoder_blocks, x, cache.encoder, places))
        computed = len(x) * x.shape[1]

        # 2. The decoder's input: the last call's, in which these rows are replaced. From here on an entry is one branch
        # of one image, also where the encoder shared its output.
        x = canvas.conditioning.extend(x, cache.fused, cache.known)
        class_rows = torch.arange(buffer, device=x.device).expand(len(x), -1)
        at = torch.cat([new.repeat(branches, 1) + buffer, class_rows], dim=1)
        x = net.decoder_embed(x) + net.decoder_pos_embed_learned[0][at]

        assert cache.decoder_input is not None
        cache.decoder_input.scatter_(1, at[..., None].expand_as(x), x)
        return cache.decoder_input, computed

    def _decode(
        self, cache: FeatureCache, step: int, x: Tensor, needed: Tensor, new: Tensor, branches: int
    ) -> tuple[Tensor, int]:
        """The decoder of so many branches, of its input x [E, N, C].

        Returns the rows [E, M, C] of the last block at positions ``needed`` int64 [B, M], and how many rows an average
        block computed. ``new`` int64 [B, K] are the tokens decided since the last call.
        """
        net = self.canvas.model.net
        blocks = list(net.decoder_blocks)
        entries, total, _ = x.shape
        needed_rows = needed.repeat(branches, 1) + net.config.buffer
        if not cache.decoder:  # [] if no later call leaves rows out
            return self.walk(blocks, x, out=needed_rows), entries * total

        # 1. Token cache: the blocks before the chosen one compute all rows.
        x = self.walk(blocks[: self.block], x)

        # 2. The chosen block's values tell which rows to compute from here on (None: all, as at a refresh).
        block = blocks[self.block]
        q, k, v = block.attn.project(block.norm1(x))
        rows = None
        if cache.chosen_values is not None:
            must = torch.cat([needed_rows, new.repeat(branches, 1) + net.config.buffer], dim=1)
            rows = self.choice.rows(step, cache.known, v, cache.chosen_values, must)  # (8)
        cache.chosen_values = own_copy(v, cache.entries)

        # If all rows are computed, their places among these are their own. Else the computed rows begin with ``must``,
        # which begins with the needed ones.
        needed_among = needed_rows
        if rows is not None:
            x = pick(x, rows)
            q = pick(q, rows)
            needed_among = torch.arange(needed.shape[1], device=x.device).expand(entries, -1)
            self.cache_report.count(rows, total)
        x = self.feed_forward(block, block.attend(x, q, k, v))
        count = x.shape[1]

        # 3. The blocks after it compute these rows; keys and values of the others are the stored ones (9).
        after = blocks[self.block + 1 :]
        x = self.walk(after, x, cache.decoder, rows, needed_among)
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
            stores: of each block, with the keys and values of the rows that x lacks; () to keep none.
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
        entries = canvas.images if conditional_only else canvas.images * (1 + canvas.guided)
        cache = FeatureCache(until, entries, conditional_only, encoder=[], decoder=[])
        if s.encoder_cache:
            room = c.buffer + canvas.order.starts[until - 1]
            cache.encoder = [Store(entries, room, skipped=c.buffer) for _ in net.encoder_blocks]
            cache.fused = canvas.conditioning.feature_cache(entries, room)
        if prunes:
            cache.decoder = [Store(entries, c.buffer + c.tokens) for _ in net.decoder_blocks[self.block + 1 :]]
        return cache


def feed_forward(block: Block, x: Tensor) -> Tensor:
    """A block after its attention, as a function for the compiler.

    The attention is not compiled: its queries, keys and values are projections, chosen rows or slices of a cache, and
    every combination of their strides would be a graph of its own.
    """
    return x + block.mlp(block.norm2(x))
