"""The transformer with LazyMAR's caches; ``__init__.py`` has the method and the numbers of its equations.

Shapes: B images, P branches of guidance, L tokens, N = buffer + L rows of the decoder, C width. A batch has E entries,
each of one branch of one image, the conditional branch first: P B, or B where the null branch is left out and
in an encoder that does not read the condition (Harmon's and UniPic's), whose output both branches share.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ....networks.feature_cache import FeatureCache
from ....networks.graphs import State
from ....networks.mar import NONE_KEPT, DecoderCache, pick, run_decoder
from ..canvas import MARCanvas
from ..mar import FullTransformer, Transformer
from ..settings import CacheSettings
from .head import CachedHeads
from .plan import Plan


@dataclass(eq=False)
class Kept:
    """What a refresh keeps for the passes until the next one, and what each pass keeps for the one after it."""

    until: int  # AR step of the next refresh
    step: int  # AR step of the previous pass
    known: int  # number of tokens that were decided before the previous pass
    encoder: State  # encoder cache: a store of every block; empty without the cache
    decoder: DecoderCache | None  # token cache; None if all these passes compute all rows
    fused: Any = None  # encoder cache: what a prompt's language model keeps between encoder and decoder
    rows: Tensor | None = None  # encoder cache: the decoder's rows of the previous pass, [E, N, C], see MAR.canvas
    residual: Tensor | None = None  # condition cache: null minus conditional branch at the refresh, [B, L, C]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are kept."""
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
        c = canvas.model.net.config
        self.images = canvas.images
        self.settings = settings
        self.heads = CachedHeads(canvas.model.net, canvas.report, settings)
        self.plan = Plan(canvas, settings)
        self.full = FullTransformer(canvas)
        self.vectors = self.full.vectors  # of the encoder's class rows, [E, C]; null ones last, if it has any
        self.branches = 1 + canvas.guided

        # Condition cache: between two refreshes the null branch is left out.
        self.drops_null = canvas.guided and settings.condition_cache
        self.kept_branches = 1 if self.drops_null else self.branches
        self.entries = self.kept_branches * self.images
        self.kept_vectors = self.vectors[: self.entries]

        # For each AR step of a refresh: whether later passes leave decoder rows out, and whether they use any of it.
        steps = range(canvas.order.steps)
        uses_any = settings.encoder_cache or self.drops_null
        self.prunes = [self.plan.prunes(step) for step in steps]
        self.keeps = [self.plan.refreshes(step) and (uses_any or self.prunes[step]) for step in steps]
        # Encoder cache: class rows and tokens that the encoder reads at most until the next refresh.
        self.room = [c.buffer + canvas.order.starts[self.plan.next_refresh[step] - 1] for step in steps]

        # Memory for the stores of all refreshes.
        refreshes = [step for step in steps if self.plan.refreshes(step)]
        room = max((self.room[step] for step in refreshes), default=0) if settings.encoder_cache else 0
        block = self.plan.block if any(self.prunes[step] for step in refreshes) else None
        entries = len(self.kept_vectors)
        self.memory = FeatureCache(canvas.model.net, canvas.device, self.entries, entries, room, block)
        self.kept: Kept | None = None

        report = canvas.report
        report.sampler = "lazymar" if report.sampler == "mar" else f"{report.sampler}+lazymar"
        report.settings |= {f.name: getattr(settings, f.name) for f in fields(CacheSettings)}
        self.reported_bytes = 0
        if settings.refresh_period > 1 and settings.token_cache:
            canvas.cached = torch.zeros(canvas.images, canvas.cells, dtype=torch.int32, device=canvas.device)

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """z [P, B, M, C] at positions ``wanted`` [B, M], from what is kept unless a refresh is due."""
        kept = self.kept
        if kept is not None and kept.step <= step < kept.until:
            return self.reuse(kept, step, wanted)

        self.kept = None  # freed before more is kept
        return self.refresh(step, wanted)

    def forget(self) -> None:
        """The next pass is a refresh."""
        self.kept = None

    def refresh(self, step: int, wanted: Tensor) -> Tensor:
        """A pass that computes all rows of both branches, and keeps what later passes use."""
        if not self.keeps[step]:
            return self.full(step, wanted)

        canvas = self.canvas
        net = canvas.model.net
        known = canvas.order.starts[step]
        kept = Kept(until=self.plan.next_refresh[step], step=step, known=known, encoder=NONE_KEPT, decoder=None)
        if self.prunes[step]:
            kept.decoder = self.memory.decoder
        if self.settings.encoder_cache:
            room = self.room[step]
            kept.encoder = State(store[:, :, :, :room] for store in self.memory.encoder)
            kept.fused = canvas.conditioning.feature_cache(self.entries, room)

        # 1. The encoder reads all decided tokens.
        rows, encoder_rows = self._encode(step, self.branches, kept)
        if self.settings.encoder_cache:
            kept.rows = rows[: self.entries].clone()

        # 2. The decoder computes all rows. Its last block computes only the wanted rows, or the rows of all tokens if
        # later passes may need their residual.
        positions = wanted
        if self.drops_null:
            positions = torch.arange(net.config.tokens, device=wanted.device).expand(self.images, -1)
        x = rows + net.decoder_pos_embed_learned
        features, _ = run_decoder(net, x, positions.repeat(self.branches, 1), kept.decoder)

        # 3. The residual. (10)
        here = wanted.repeat(self.branches, 1)
        if self.drops_null:
            conditional, null = features.chunk(2)
            kept.residual = null - conditional
            features = pick(features, here)

        # Counts of a report are sums: only what is more than at earlier refreshes is added.
        self._count(encoder_rows, rows, None)
        most = max(self.reported_bytes, sum(tensor.nbytes for tensor in kept.tensors))
        canvas.report.add(cache_bytes=most - self.reported_bytes)
        self.reported_bytes = most
        self.kept = kept
        return net.conditions(features, here).unflatten(0, (self.branches, -1))

    def reuse(self, kept: Kept, step: int, wanted: Tensor) -> Tensor:
        """A pass between two refreshes, which computes less."""
        canvas = self.canvas
        net = canvas.model.net
        known = canvas.order.starts[step]
        new = canvas.order.decision_order[:, kept.known : known]  # decided since the previous pass

        # 1. The encoder reads the new tokens, and the other rows of the decoder stay as they are; or without its cache
        # it reads all tokens.
        if kept.rows is None:
            rows, encoder_rows = self._encode(step, self.kept_branches)
        else:
            rows, encoder_rows = self._encode_more(kept, kept.rows, new)

        # 2. The decoder computes the chosen rows. (8), (9)
        choose = None
        if kept.decoder is not None:
            must = torch.cat([wanted, new], dim=1) + net.config.buffer
            choose = self.plan.rows(step, kept.known, must.repeat(self.kept_branches, 1))
        x = rows + net.decoder_pos_embed_learned
        features, chosen = run_decoder(net, x, wanted.repeat(self.kept_branches, 1), kept.decoder, choose)

        # 3. The null branch is the conditional one plus their difference at the refresh. (10)
        if kept.residual is not None:
            features = torch.cat([features, features + pick(kept.residual, wanted)])

        self._count(encoder_rows, rows, chosen)
        kept.step = step
        kept.known = known
        return net.conditions(features, wanted.repeat(self.branches, 1)).unflatten(0, (self.branches, -1))

    def _encode(self, step: int, branches: int, kept: Kept | None = None) -> tuple[Tensor, int]:
        """Encode all decided tokens for so many branches. Returns the decoder's rows [E, N, C], see :meth:`MAR.canvas`,
        and how many rows the encoder computed. ``kept`` receives what its stores have room for.
        """
        canvas = self.canvas
        net = canvas.model.net
        known = canvas.order.decided_before(step)
        vectors = self.vectors[: branches * self.images]
        copies = len(vectors) // self.images  # 1 if the encoder reads no condition
        of_encoder = known.repeat(copies, 1)

        tokens = canvas.values.repeat(copies, 1, 1)
        x = net.encode(tokens, of_encoder, vectors, None, NONE_KEPT if kept is None else kept.encoder)
        cache = None if kept is None else kept.fused
        fused = canvas.conditioning.fuse(x, of_encoder, branches > 1, cache=cache)
        return net.canvas(fused, known.repeat(branches, 1)), len(x) * x.shape[1]

    def _encode_more(self, kept: Kept, rows: Tensor, new: Tensor) -> tuple[Tensor, int]:
        """Encode the new tokens after those that are kept; returns the same as :meth:`_encode`.

        Args:
            rows: the decoder's rows of the previous pass, which this pass writes into.
            new: int64 [B, n].
        """
        canvas = self.canvas
        net = canvas.model.net
        copies = len(self.kept_vectors) // self.images
        tokens = canvas.values.repeat(copies, 1, 1)
        x = net.encode_more(tokens, new.repeat(copies, 1), self.kept_vectors, kept.encoder, kept.known)
        fused = canvas.conditioning.extend(x, kept.fused, kept.known)
        class_rows_first = fused.roll(net.config.buffer, 1)
        rows = net.canvas(class_rows_first, new.repeat(self.kept_branches, 1), rows=rows)
        return rows, len(x) * x.shape[1]

    def _count(self, encoder_rows: int, rows: Tensor, chosen: Tensor | None) -> None:
        """Add a pass to the report.

        Args:
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
            left_out = torch.ones(self.images, total, dtype=torch.int32, device=rows.device)
            left_out.scatter_(1, chosen[: self.images], 0)  # of the conditional branch
            canvas.cached += left_out[:, total - canvas.values.shape[1] :]

        depth = canvas.model.net.config.decoder_depth
        later = depth - self.plan.block - 1
        decoder_rows = round(entries * (total * (depth - later) + computed * later) / depth)  # of an average block
        canvas.report.add(**canvas.conditioning.counts(encoder_rows, decoder_rows))
