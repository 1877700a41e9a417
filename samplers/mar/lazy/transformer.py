"""The transformer with LazyMAR's caches. ``__init__.py`` describes the method and its equations.

Shapes: B images, P branches of guidance, L tokens, N rows of the decoder, C width. The N rows are first the ``buffer``
class rows, then the L tokens. A row is one vector, so in this file the batch rows of the glossary are called *entries*:

- The decoder's batch has E entries. E is P B: one entry for each image in the conditional branch, then one for each
  image in the null branch. E is only B in a pass without the null branch.
- The encoder's batch has F entries. F is E in class models. F is B in Harmon and UniPic, whose encoders do not read the
  prompt, so both branches share the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....networks.feature_cache import FeatureCache
from ....networks.graphs import State
from ....networks.mar import NONE_KEPT, DecoderCache, pick, run_decoder
from ..canvas import MARCanvas
from ..transformer import FullTransformer, Transformer
from .head import CachedHeadFactory
from .schedule import StoredFeatures, stored_by_refreshes
from .selection import RowSelection
from .settings import CacheSettings


@dataclass(eq=False)
class TransformerCache:
    """What a refresh stores for the passes before the next refresh, and what each pass stores for the next pass."""

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


class PassShape(NamedTuple):
    """How many branches of guidance a pass computes. The pass's batches have an entry for each image in each branch."""

    images: int  # B
    branches: int  # branches that the decoder computes
    encoder_branches: int  # branches that the encoder computes; 1 if all branches share the encoder's output

    @property
    def entries(self) -> int:
        """E, the number of entries in the decoder's batch."""
        return self.branches * self.images

    @property
    def encoder_entries(self) -> int:
        """F, the number of entries in the encoder's batch."""
        return self.encoder_branches * self.images

    def repeat_for_decoder(self, of_images: Tensor) -> Tensor:
        """Values of the images, [B, ...], repeated for the entries of the decoder, [E, ...]."""
        return of_images.repeat(self.branches, *(1,) * (of_images.ndim - 1))

    def repeat_for_encoder(self, of_images: Tensor) -> Tensor:
        """Values of the images, [B, ...], repeated for the entries of the encoder, [F, ...]."""
        return of_images.repeat(self.encoder_branches, *(1,) * (of_images.ndim - 1))


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
        # compute only the conditional branch. The null branch is always the last branch of a batch.
        branches = 2 if canvas.guided else 1
        encoder_branches = len(self.buffer_vectors) // canvas.images
        self.shape_of_refresh = PassShape(canvas.images, branches, encoder_branches)
        self.shape_of_reuse = self.shape_of_refresh
        if settings.condition_cache:
            self.shape_of_reuse = PassShape(canvas.images, branches=1, encoder_branches=1)

        self.memory = self._new_memory()
        self.cache: TransformerCache | None = None
        self.reported_bytes = 0

    def _new_memory(self) -> FeatureCache:
        """Memory for what a refresh stores. Each refresh overwrites what the previous refresh stored."""
        stored = [features for features in self.stored_by_refreshes if features is not None]
        encoder_rows = max((features.encoder_rows for features in stored), default=0)
        stores_decoder = any(features.decoder for features in stored)
        shape = self.shape_of_reuse
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
        shape = self.shape_of_refresh
        cache = self._new_cache(stored, step)

        # 1. The encoder reads all decided tokens.
        known = self.canvas.order.decided_before(step)
        rows = self._encode(shape, known, cache)
        if stored.encoder_rows:
            cache.decoder_rows = rows[: self.shape_of_reuse.entries].clone()

        # 2. The decoder computes all rows in all blocks but the last. The last block computes the rows of the wanted
        # tokens, or the rows of all tokens if later passes need the residual.
        wanted = shape.repeat_for_decoder(wanted)
        of_last_block = wanted
        if stored.residual:
            of_last_block = torch.arange(net.config.tokens, device=wanted.device).repeat(len(wanted), 1)
        x = rows + net.decoder_pos_embed_learned
        features, _ = run_decoder(net, x, of_last_block, cache.decoder)

        # 3. The residual, equation (10).
        if stored.residual:
            conditional, null = features.chunk(2)
            cache.residual = null - conditional
            features = pick(features, wanted)

        self._count(shape, known.shape[1])
        self._count_bytes(cache)
        self.cache = cache
        return net.conditions(features, wanted).unflatten(0, (shape.branches, -1))

    def reuse_features(self, cache: TransformerCache, step: int, wanted: Tensor) -> Tensor:
        """Run a pass that reuses what the refresh and the previous pass stored. Returns z [P, B, M, C]."""
        canvas = self.canvas
        net = canvas.model.net
        shape = self.shape_of_reuse

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
            rows = self._encode_more(shape, new, known_count, cache)

        # 2. The decoder computes the rows that equation (8) chooses, with attention as in equation (9).
        choose = None
        if cache.decoder is not None:
            required = torch.cat([wanted, new], dim=1) + net.config.buffer
            choose = self.row_selection.choice(step, known_count, shape.repeat_for_decoder(required))
        x = rows + net.decoder_pos_embed_learned
        features, chosen = run_decoder(net, x, shape.repeat_for_decoder(wanted), cache.decoder, choose)

        # 3. The null branch is the conditional branch plus the residual of the refresh, equation (10).
        if cache.residual is not None:
            features = torch.cat([features, features + pick(cache.residual, wanted)])

        self._count(shape, read.shape[1], chosen)
        reuses = cache.decoder_rows is not None or chosen is not None or cache.residual is not None
        canvas.report.add(cached_calls=int(reuses))
        cache.previous_step = step

        # With the residual, z has both branches again, as in a refresh.
        wanted = self.shape_of_refresh.repeat_for_decoder(wanted)
        return net.conditions(features, wanted).unflatten(0, (self.shape_of_refresh.branches, -1))

    def _new_cache(self, stored: StoredFeatures, step: int) -> TransformerCache:
        """An empty cache for what the refresh at AR step ``step`` stores. It uses :attr:`memory`."""
        cache = TransformerCache(stored.next_refresh, previous_step=step, encoder=NONE_KEPT, decoder=None)
        if stored.decoder:
            cache.decoder = self.memory.decoder
        if stored.encoder_rows:
            cache.encoder = State(store[:, :, :, : stored.encoder_rows] for store in self.memory.encoder)
            entries = self.shape_of_reuse.entries
            cache.language_model = self.canvas.conditioning.feature_cache(entries, stored.encoder_rows)
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
        return net.decoder_rows(fused, shape.repeat_for_decoder(known))

    def _encode_more(self, shape: PassShape, new: Tensor, known_count: int, cache: TransformerCache) -> Tensor:
        """Encode the new tokens and the class rows. They attend to the stored keys and values of earlier tokens.
        Returns the decoder's input rows, like :meth:`_encode`.

        Args:
            new: positions of the new tokens, int64 [B, n].
            known_count: number of tokens that were decided before the previous pass.
            cache: the stores receive the keys and values of the computed rows, and ``decoder_rows`` receives the rows.
        """
        net = self.canvas.model.net
        x = net.encode_more(*self._encoder_inputs(shape, new), cache.encoder, known_count)
        fused = self.canvas.conditioning.extend(x, cache.language_model, known_count)
        class_rows_first = fused.roll(net.config.buffer, 1)  # encode_more returns the class rows last
        new = shape.repeat_for_decoder(new)
        cache.decoder_rows = net.decoder_rows(class_rows_first, new, rows=cache.decoder_rows)  # changes them in place
        return cache.decoder_rows

    def _encoder_inputs(self, shape: PassShape, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The encoder's inputs for a pass that reads the tokens at ``positions``, int64 [B, K]. They are all
        tokens [F, L, c], ``positions`` [F, K], and the vectors for the class rows [F, C].
        """
        tokens = shape.repeat_for_encoder(self.canvas.values)
        return tokens, shape.repeat_for_encoder(positions), self.buffer_vectors[: shape.encoder_entries]

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
