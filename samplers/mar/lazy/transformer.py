"""The transformer with LazyMAR's caches. ``__init__.py`` describes the method and its equations.

Shapes: B images, L tokens, N rows of the decoder, C width. The N rows are first the ``buffer`` class rows, then the L
tokens. A row is one vector, so in this file the batch rows of the glossary are called *entries*. The batches of the
decoder and the encoder have E and F entries (:class:`.PassShape`; a pass reads one snapshot of each image). With
guidance, they depend on the kind of the pass::

    pass                                            E      F in class models    F in Harmon and UniPic
    a refresh                                       2 B    2 B                  B
    another pass, with the condition cache          B      B                    B
    another pass, without the condition cache       2 B    2 B                  B

Without guidance, all these numbers are B. Whatever a pass computes, it returns z [P, B, M, C] in all P branches: P is 2
with guidance, and 1 without. The null branch is always the last branch of a batch. A cache has entries only for the
passes that reuse it. So with the condition cache, a refresh stores only the B entries of the conditional branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....networks.feature_cache import FeatureCache
from ....networks.graphs import State
from ....networks.mar import NONE_KEPT, DecoderCache, pick, run_decoder
from ..canvas import MARCanvas
from ..transformer import FullTransformer, PassShape, Transformer
from .head import CachedHeadFactory
from .schedule import StoredFeatures, stored_by_refreshes
from .selection import RowSelection
from .settings import CacheSettings


@dataclass(eq=False)
class TransformerCache:
    """What a refresh stores for the passes before the next refresh, and what each pass stores for the next pass."""

    shape: PassShape  # the batches of the passes that reuse the cache; all tensors have the entries of these batches
    next_refresh: int  # AR step of the next refresh
    previous_step: int  # AR step of the previous pass
    encoder: State  # encoder cache: a store of keys and values for each block; empty without this cache
    decoder: DecoderCache | None  # token cache; None if all passes until the next refresh compute all rows
    # Encoder cache: the features of the language model, which runs between encoder and decoder in Harmon and UniPic.
    language_model: Any = None
    # Encoder cache: the decoder's input rows in the previous pass, [E, N, C], see MAR.decoder_rows.
    decoder_rows: Tensor | None = None
    residual: Tensor | None = None  # condition cache: null minus conditional branch at the refresh, [B, L, C]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in the fields."""
        found = [*self.encoder]
        if self.decoder is not None:
            found += [*self.decoder.stores, *self.decoder.measured]
        if self.language_model is not None:
            found += self.language_model.tensors
        return found + [tensor for tensor in (self.decoder_rows, self.residual) if tensor is not None]


class LazyTransformer(Transformer):
    """The transformer with LazyMAR's caches, for one run of a sampler. :class:`.CachedHeadFactory` makes the heads.

    A caller may skip AR steps, ask for any undecided positions, and start an edit, in which some tokens are decided
    from the start. A caller that changes decided tokens must call :meth:`discard_features`.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        super().__init__(canvas)
        c = canvas.model.net.config
        self.head = CachedHeadFactory(canvas.model.net, canvas.report, settings)
        self.full = FullTransformer(canvas)
        self.buffer_vectors = self.full.buffer_vectors  # for the encoder's class rows, [F, C]

        # Which rows the passes between two refreshes compute, and what a refresh at each AR step stores.
        self.row_selection = RowSelection(canvas, settings)
        self.stored_by_refreshes = stored_by_refreshes(
            settings, canvas.order.count_before, self.row_selection.leaves_out_rows, c.buffer, canvas.guided
        )

        # A refresh computes all branches of guidance. If the condition cache is on, the passes between two refreshes
        # compute only the conditional branch.
        branches = 2 if canvas.guided else 1
        encoder_branches = len(self.buffer_vectors) // canvas.images
        self.all_branches = PassShape(canvas.images, branches, encoder_branches)
        self.reusing_branches = self.all_branches
        if settings.condition_cache:
            self.reusing_branches = PassShape(canvas.images, branches=1, encoder_branches=1)

        self.memory = self._new_memory()
        self.cache: TransformerCache | None = None
        self.reported_bytes = 0

    def _new_memory(self) -> FeatureCache:
        """Memory for what a refresh stores. Each refresh overwrites what the previous refresh stored."""
        stored = [features for features in self.stored_by_refreshes if features is not None]
        encoder_rows = max((features.encoder_rows for features in stored), default=0)
        stores_decoder = any(features.decoder for features in stored)
        shape = self.reusing_branches
        return FeatureCache(
            self.canvas.model.net,
            self.canvas.device,
            shape.entries,
            shape.encoder_entries,
            encoder_rows,
            self.row_selection.measuring_index if stores_decoder else None,
        )

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """See :meth:`Transformer.__call__`. The pass reuses cached features, unless a refresh is due."""
        cache = self.cache
        if cache is not None and cache.previous_step <= step < cache.next_refresh:
            return self.reuse_features(cache, step, wanted)

        self.cache = None  # frees its tensors before the refresh makes new ones
        return self.refresh_features(step, wanted)

    def discard_features(self) -> None:
        """Discard all cached features, so the next pass is a refresh."""
        self.cache = None

    def refresh_features(self, step: int, wanted: Tensor) -> Tensor:
        """Run a pass that computes all rows, and store what later passes reuse. Returns z [P, B, M, C]."""
        stored = self.stored_by_refreshes[step]
        if stored is None:
            return self.full(step, wanted)

        net = self.canvas.model.net
        shape = self.all_branches
        cache = self._new_cache(stored, step)

        # 1. The encoder reads all decided tokens.
        known = self.canvas.order.decided_before(step)
        rows = self._encode(shape, known, cache)
        if stored.encoder_rows:
            cache.decoder_rows = rows[: cache.shape.entries].clone()

        # 2. The decoder computes all rows in all blocks but the last. The last block computes the rows of the wanted
        # tokens, or the rows of all tokens if later passes need the residual, equation (10).
        x = rows + net.decoder_pos_embed_learned
        wanted_of_entries = shape.for_decoder(wanted)
        if stored.residual:
            all_positions = torch.arange(net.config.tokens, device=wanted.device).repeat(shape.entries, 1)
            features_of_all, _ = run_decoder(net, x, all_positions, cache.decoder)
            conditional, null = features_of_all.chunk(2)
            cache.residual = null - conditional
            features = pick(features_of_all, wanted_of_entries)
        else:
            features, _ = run_decoder(net, x, wanted_of_entries, cache.decoder)

        self._count(shape, known.shape[1])
        self._count_bytes(cache)
        self.cache = cache
        return self._conditions(features, wanted)

    def reuse_features(self, cache: TransformerCache, step: int, wanted: Tensor) -> Tensor:
        """Run a pass that reuses what the refresh and the previous pass stored. Returns z [P, B, M, C]."""
        canvas = self.canvas
        net = canvas.model.net
        shape = cache.shape

        # The number of tokens decided before the previous pass, and the positions of the tokens decided since then.
        previous = cache.previous_step
        known_count = canvas.order.count_before[previous]
        new = canvas.order.positions_from(previous, step - previous)

        # 1. With the encoder cache, the encoder reads only the class rows and the new tokens. The decoder's input rows
        # of all other tokens do not change. Without the encoder cache, the encoder reads all decided tokens.
        if cache.decoder_rows is None:
            read = canvas.order.decided_before(step)
            rows = self._encode(shape, read, cache)
        else:
            read = new
            rows = cache.decoder_rows
            self._encode_new_into(rows, new, known_count, cache)

        # 2. The decoder computes the rows that equation (8) chooses, with attention as in equation (9).
        choose = None
        if cache.decoder is not None:
            required = torch.cat([wanted, new], dim=1) + net.config.buffer
            choose = self.row_selection.choice(step, known_count, shape.for_decoder(required))
        x = rows + net.decoder_pos_embed_learned
        features, chosen = run_decoder(net, x, shape.for_decoder(wanted), cache.decoder, choose)
        if cache.residual is not None:
            features = with_null_branch(features, pick(cache.residual, wanted))

        self._count(shape, read.shape[1], chosen)
        reuses = cache.decoder_rows is not None or chosen is not None or cache.residual is not None
        canvas.report.add(cached_calls=int(reuses))
        cache.previous_step = step
        return self._conditions(features, wanted)

    def _conditions(self, features: Tensor, wanted: Tensor) -> Tensor:
        """The conditions z [P, B, M, C] from the decoder's features in all branches, [P B, M, C], at the positions
        ``wanted``, int64 [B, M].
        """
        shape = self.all_branches
        z = self.canvas.model.net.conditions(features, shape.for_decoder(wanted))
        return z.unflatten(0, (shape.branches, -1))

    def _new_cache(self, stored: StoredFeatures, step: int) -> TransformerCache:
        """An empty cache for what the refresh at AR step ``step`` stores. It uses :attr:`memory`."""
        cache = TransformerCache(
            self.reusing_branches, stored.next_refresh, previous_step=step, encoder=NONE_KEPT, decoder=None
        )
        if stored.decoder:
            cache.decoder = self.memory.decoder
        if stored.encoder_rows:
            cache.encoder = State(store[:, :, :, : stored.encoder_rows] for store in self.memory.encoder)
            cache.language_model = self.canvas.conditioning.feature_cache(cache.shape.entries, stored.encoder_rows)
        return cache

    def _encode(self, shape: PassShape, known: Tensor, cache: TransformerCache) -> Tensor:
        """Encode all decided tokens. Returns the decoder's input rows [E, N, C], see :meth:`MAR.decoder_rows`. The
        stores of ``cache``, if it has any, receive the keys and values.

        ``known``: positions of all decided tokens, int64 [B, K].
        """
        net = self.canvas.model.net
        conditioning = self.canvas.conditioning
        tokens, positions, buffer_vectors = self._encoder_inputs(shape, known)
        x = net.encode(tokens, positions, buffer_vectors, None, cache.encoder)
        fused = conditioning.fuse(x, positions, shape.branches > 1, cache=cache.language_model)
        return net.decoder_rows(fused, shape.for_decoder(known))

    def _encode_new_into(self, rows: Tensor, new: Tensor, known_count: int, cache: TransformerCache) -> None:
        """Encode the new tokens and the class rows, and replace their rows in the decoder's input. They attend to the
        stored keys and values of earlier tokens.

        Args:
            rows: the decoder's input rows in the previous pass, [E, N, C]; changed in place.
            new: positions of the n new tokens, int64 [B, n].
            known_count: number of tokens that were decided before the previous pass.
            cache: the stores receive the keys and values of the computed rows.
        """
        net = self.canvas.model.net
        shape = cache.shape
        encoded = net.encode_more(*self._encoder_inputs(shape, new), cache.encoder, known_count)
        fused = self.canvas.conditioning.extend(encoded, cache.language_model, known_count)

        # Here the class rows stand after the n new tokens (MAR.encode_more says why). In ``rows``, they come first.
        class_rows_first = fused.roll(net.config.buffer, dims=1)
        net.decoder_rows(class_rows_first, shape.for_decoder(new), rows=rows)

    def _encoder_inputs(self, shape: PassShape, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The encoder's inputs for a pass that reads the tokens at ``positions``, int64 [B, K]. They are all
        tokens [F, L, c], ``positions`` [F, K], and the vectors for the class rows [F, C].
        """
        tokens = shape.for_encoder(self.canvas.values)
        return tokens, shape.for_encoder(positions), self.buffer_vectors[: shape.encoder_entries]

    def _count(self, shape: PassShape, tokens_read: int, chosen: Tensor | None = None) -> None:
        """Add the work of a pass to the report, and to the map that shows which tokens came from the token cache.

        Args:
            tokens_read: number of tokens that the encoder read in each entry, without the class rows.
            chosen: the rows that the decoder computed after the measuring block, int64 [E, n]; None for all rows.
        """
        canvas = self.canvas
        c = canvas.model.net.config
        total = self.row_selection.total
        computed = total if chosen is None else chosen.shape[1]

        encoder_rows = shape.encoder_entries * (c.buffer + tokens_read)
        later = c.decoder_depth - self.row_selection.measuring_index - 1  # number of blocks after the measuring block
        rows_of_blocks = total * (c.decoder_depth - later) + computed * later
        decoder_rows = round(shape.entries * rows_of_blocks / c.decoder_depth)  # the mean over the blocks
        canvas.report.add(**canvas.conditioning.counts(encoder_rows, decoder_rows))

        if chosen is not None and canvas.cached is not None:
            left_out = torch.ones(canvas.images, total, dtype=torch.int32, device=chosen.device)
            left_out.scatter_(1, chosen[: canvas.images], 0)  # rows of the conditional branch
            canvas.cached += left_out[:, c.buffer :]  # the class rows come first

    def _count_bytes(self, cache: TransformerCache) -> None:
        """Raise the report's ``cache_bytes`` to the size of this cache if it is the largest cache of the run so far.
        The report can only add to a count, so this adds the increase.
        """
        largest_bytes = max(self.reported_bytes, sum(tensor.nbytes for tensor in cache.tensors))
        self.canvas.report.add(cache_bytes=largest_bytes - self.reported_bytes)
        self.reported_bytes = largest_bytes


def with_null_branch(conditional: Tensor, residual: Tensor) -> Tensor:
    """Features of both branches, [2 B, M, C]. The null branch is the conditional branch plus the residual of the
    refresh, equation (10). Both arguments are [B, M, C].
    """
    return torch.cat([conditional, conditional + residual])
