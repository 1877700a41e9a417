"""LazyMAR: features are kept from one AR step to the next, and only new or changed rows are computed.

Source: Yan et al. 2025, "LazyMAR: Accelerating Masked Autoregressive Models via Feature Caching" (ICCV 2025, arXiv
2503.12450). Every tau-th AR step is a *refresh*: encoder and decoder compute all rows, of both branches of guidance,
and their features are stored. A pass at AR step k between two refreshes computes less, by three caches that can be
switched off one by one (:class:`CacheSettings`):

1. *encoder cache*: the encoder computes the class rows and the tokens decided since the last pass, with the stored keys
   and values of earlier tokens. It is in the published code, not in the paper.
2. *token cache* (section 3.2.1): the decoder computes all rows up to a chosen block, whose values V tell how similar
   row i is to what it was at the last pass, and from there on only some rows:

   - similarity: s_i = cos(V_i^k, V_i^k'), the mean of the heads, where k' is the AR step of the last pass;
   - (8): the pass computes the rows of the wanted tokens, which are asked for, of the tokens decided since k', and
     others of lowest s_i (the paper prints argmax; by its text and its code the least similar rows are
     computed). How many and which is in ``plan.py``, with the other choices of the paper's Table 3;
   - (9): the blocks after the chosen one see the computed rows together with the stored keys and values of the others.

   The paper takes its 3rd layer, the published code the 4th block.
3. *condition cache* (section 3.2.2): only the conditional branch is computed. After the last block, with both branches
   of the last refresh r:

   - (10): residual = null^r - conditional^r;
   - null^k = conditional^k + residual.

The diffusion head has a fourth cache, in ``head.py``.

All are a way to evaluate the transformer and the head, so they combine with plain MAR, FastHybrid and CSpD.
Differences from the published code: rows that must be computed always are (there, rows of negative similarity can
displace them); AR steps after the 64th have its share, where the published code fails; the decoder's keys and values
are stored only after the chosen block, since the blocks before it compute all rows.

Shapes: B images, P branches of guidance, L tokens, N = buffer + L rows of the decoder, C width. A batch has E entries,
each of one branch of one image, those of the conditional branch first: P B, or B where the null branch is left out and
in an encoder that does not read the condition (Harmon's and UniPic's), whose output both branches share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ....networks.feature_cache import FeatureCache
from ....networks.graphs import State
from ....networks.mar import NONE_KEPT, DecoderCache, MARModel, pick, run_decoder
from ...conditioning import MaskedCondition
from ...editing import Edit
from ...engine import Sampler
from ...noise import PairedNoise
from ..canvas import MARCanvas
from ..mar import check as check_mar
from ..mar import expect_whole_head, mar
from ..network import FullTransformer, Transformer
from ..settings import CacheSettings, LazyMARSettings, MARBase
from .head import CachedHeads
from .plan import Plan


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
        cache: settings of the caches; None if ``settings`` hold them too.

    Raises:
        UserError: more AR steps than tokens, or speculation with a cached head.
    """
    check_mar(model, settings)
    caches = cast(CacheSettings, settings) if cache is None else cache
    expect_whole_head(settings, CachedHeads(caches))


@dataclass(eq=False)
class Kept:
    """What a refresh keeps for the passes until the next one, and what each pass keeps for the one after it."""

    until: int  # AR step of the next refresh
    encoder: State = NONE_KEPT  # encoder cache: a store of every block
    decoder: DecoderCache | None = None  # token cache; None if all these passes compute all rows
    fused: Any = None  # encoder cache: what a prompt's language model keeps between encoder and decoder

    # The last pass: its AR step, -1 before the refresh, and how many tokens were decided before it.
    step: int = -1
    known: int = 0
    rows: Tensor | None = None  # encoder cache: the decoder's rows of the last pass [E, N, C], see MAR.canvas
    residual: Tensor | None = None  # condition cache: null minus conditional branch at the refresh, [B, L, C]

    @property
    def empty(self) -> bool:
        """Whether the next pass is the refresh."""
        return self.step < 0

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        found = [*self.encoder]
        if self.decoder is not None:
            found += [*self.decoder.stores, *self.decoder.measured]
        if self.fused is not None:
            found += self.fused.tensors
        return found + [tensor for tensor in (self.rows, self.residual) if tensor is not None]


class LazyTransformer(Transformer):
    """The transformer with LazyMAR's caches, for one generation; its head is :class:`.CachedHeads`.

    Passes may skip AR steps, ask for any positions ahead, and start from given tokens. Decided tokens must not change;
    a caller that changes some calls :meth:`forget`.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        """The report takes the name lazymar, or SAMPLER+lazymar, and the settings of the caches."""
        super().__init__(canvas)
        self.settings = settings
        self.heads = CachedHeads(settings)
        self.plan = Plan(canvas, settings)
        self.full = FullTransformer(canvas)
        self.vectors = self.full.vectors  # of the encoder's class rows, [E, C]; null ones last, if it has any

        # Condition cache: between two refreshes the null branch is left out.
        self.drops_null = canvas.guided and settings.condition_cache
        self.entries = canvas.images if self.drops_null or not canvas.guided else 2 * canvas.images
        self.memory = self._memory()
        self.kept: Kept | None = None

        report = canvas.report
        report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
        report.settings |= {f.name: getattr(settings, f.name) for f in fields(CacheSettings)}
        self.reported_bytes = 0
        if settings.refresh_period > 1 and settings.token_cache:
            canvas.cached = torch.zeros(canvas.images, canvas.cells, dtype=torch.int32, device=canvas.device)

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """z [P, B, M, C] at positions ``wanted`` [B, M], from what is kept unless a refresh is due."""
        if self.kept is None or not self.kept.step <= step < self.kept.until:
            self.kept = None  # freed before more is kept
            self.kept = self.refresh(step)

        return self.full(step, wanted) if self.kept is None else self._pass(self.kept, step, wanted)

    def forget(self) -> None:
        """The next pass is a refresh."""
        self.kept = None

    def refresh(self, step: int) -> Kept | None:
        """What a refresh at ``step`` keeps, still empty; None if no later pass may use it."""
        plan = self.plan
        prunes = plan.prunes(step)
        if not plan.refreshes(step) or not (self.settings.encoder_cache or prunes or self.drops_null):
            return None

        kept = Kept(plan.next_refresh[step])
        if prunes:
            kept.decoder = self.memory.decoder
        if self.settings.encoder_cache:
            room = self._room(step)
            kept.encoder = State(store[:, :, :, :room] for store in self.memory.encoder)
            kept.fused = self.canvas.conditioning.feature_cache(self.entries, room)
        return kept

    def _room(self, step: int) -> int:
        """Class rows and tokens that the encoder reads at most until the next refresh after ``step``."""
        return self.canvas.model.net.config.buffer + self.canvas.order.starts[self.plan.next_refresh[step] - 1]

    def _memory(self) -> FeatureCache:
        """Memory for the stores of all refreshes."""
        refreshes = [step for step in range(self.canvas.order.steps) if self.plan.refreshes(step)]
        room = max(map(self._room, refreshes), default=0) if self.settings.encoder_cache else 0
        block = self.plan.block if any(map(self.plan.prunes, refreshes)) else None
        entries = min(self.entries, len(self.vectors))
        return FeatureCache(self.canvas.model.net, self.canvas.device, self.entries, entries, room, block)

    def _pass(self, kept: Kept, step: int, wanted: Tensor) -> Tensor:
        """One pass, a refresh if nothing is kept yet: z [P, B, M, C] at positions ``wanted`` int64 [B, M]."""
        canvas = self.canvas
        net = canvas.model.net
        c = net.config
        all_branches = 1 + canvas.guided
        branches = 1 if self.drops_null and not kept.empty else all_branches

        # 1. The encoder reads the decided tokens: all of them, or with its cache the new ones.
        new = canvas.order.reveal[:, kept.known : canvas.order.starts[step]]  # decided since the last pass
        rows, encoder_rows = self._encode(kept, step, new, branches)

        # 2. The decoder computes the chosen rows; its last block computes the wanted ones only. (8), (9)
        choose = None
        if kept.decoder is not None and not kept.empty:
            must = torch.cat([wanted, new], dim=1) + c.buffer
            choose = self.plan.rows(step, kept.known, must.repeat(branches, 1))
        positions = wanted
        if self.drops_null and kept.empty:  # later passes may need the residual of any token
            positions = torch.arange(c.tokens, device=wanted.device).expand(canvas.images, -1)
        x = rows + net.decoder_pos_embed_learned
        features, chosen = run_decoder(net, x, positions.repeat(branches, 1), kept.decoder, choose)

        # 3. The null branch, if it was left out, is the conditional one plus their difference at the refresh. (10)
        here = wanted.repeat(all_branches, 1)
        if self.drops_null and kept.empty:
            conditional, null = features.chunk(2)
            kept.residual = null - conditional
            features = pick(features, here)
        elif self.drops_null:
            assert kept.residual is not None
            features = torch.cat([features, features + pick(kept.residual, wanted)])

        # 4. What the report and the next pass read.
        self._count(kept, encoder_rows, rows, chosen)
        kept.step = step
        kept.known = canvas.order.starts[step]
        return net.conditions(features, here).unflatten(0, (all_branches, -1))

    def _encode(self, kept: Kept, step: int, new: Tensor, branches: int) -> tuple[Tensor, int]:
        """The decoder's rows [E, N, C] of so many branches, see :meth:`MAR.canvas`, and how many rows the encoder
        computed. ``new``: positions decided since the last pass, int64 [B, n].
        """
        canvas = self.canvas
        net = canvas.model.net
        conditioning = canvas.conditioning
        vectors = self.vectors if branches > 1 else self.vectors[: canvas.images]
        copies = len(vectors) // canvas.images  # of an image in the encoder, which may read no condition
        tokens = canvas.values.repeat(copies, 1, 1)

        # 1. All decided tokens.
        if kept.rows is None:
            known = canvas.order.known(step)
            x = net.encode(tokens, known.repeat(copies, 1), vectors, None, kept.encoder)
            fused = conditioning.fuse(x, known.repeat(copies, 1), branches > 1, cache=kept.fused)
            rows = net.canvas(fused, known.repeat(branches, 1))
            if kept.encoder:
                kept.rows = rows[: self.entries].clone()
            return rows, len(x) * x.shape[1]

        # 2. Or the new ones: the other rows of the decoder stay as they are.
        x = net.encode_more(tokens, new.repeat(copies, 1), vectors, kept.encoder, kept.known)
        fused = conditioning.extend(x, kept.fused, kept.known)
        in_front = fused.roll(net.config.buffer, 1)  # the class rows
        return net.canvas(in_front, new.repeat(branches, 1), rows=kept.rows), len(x) * x.shape[1]

    def _count(self, kept: Kept, encoder_rows: int, rows: Tensor, chosen: Tensor | None) -> None:
        """Add a pass to the report.

        Args:
            kept: of the refresh, before it has the step of this pass.
            encoder_rows: rows that the encoder computed.
            rows: the decoder's, [E, N, C].
            chosen: the rows that the blocks after the chosen one computed, int64 [E, n]; None for all.
        """
        canvas = self.canvas
        entries, total, _ = rows.shape
        computed = total
        if chosen is not None:
            assert canvas.cached is not None
            computed = chosen.shape[1]
            left_out = torch.ones(canvas.images, total, dtype=torch.int32, device=rows.device)
            left_out.scatter_(1, chosen[: canvas.images], 0)  # of the conditional branch
            canvas.cached += left_out[:, total - canvas.cells :]

        depth = canvas.model.net.config.decoder_depth
        later = depth - self.plan.block - 1
        decoder_rows = round(entries * (total * (depth - later) + computed * later) / depth)  # of an average block
        canvas.report.add(**canvas.conditioning.counts(encoder_rows, decoder_rows))

        # Counts of a report are sums: only what is more than at earlier refreshes is added.
        if kept.empty:
            most = max(self.reported_bytes, sum(tensor.nbytes for tensor in kept.tensors))
            canvas.report.add(cache_bytes=most - self.reported_bytes)
            self.reported_bytes = most
