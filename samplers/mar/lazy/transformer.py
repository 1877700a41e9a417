"""The transformer with LazyMAR's caches. ``__init__.py`` describes the method and its equations.

The three caches are the fields ``encoder``, ``token`` and ``residual`` of :class:`TransformerCache`. A field is None if
its cache is off:

=========  =============================================  =====================================  ====================
cache      a refresh stores                               a later pass                           and then updates
=========  =============================================  =====================================  ====================
encoder    keys and values of the encoder, and the        encodes only the class rows and the    the new tokens
           decoder's input rows                           new tokens
token      keys and values of the decoder's later         computes only some rows in the later   the computed rows
           blocks, and V of the measuring block           blocks
condition  the residual: null minus conditional branch    computes only the conditional branch   nothing
=========  =============================================  =====================================  ====================

:class:`.CachesToFill` says which caches a refresh fills. :class:`.FeatureCache` is the memory for keys and values, and
is allocated once for a run.

For example, 8 tokens are decided before AR step 5. AR step 5 is a refresh and decides 3 tokens. AR step 6 decides 2. An
image has 25 tokens and 3 class rows, so N is 28. With guidance and all caches, these are the rows that the two passes
compute in a class model (:class:`RowSelection` continues the example)::

                             AR step 5, refresh_features    AR step 6, reuse_features
    encoder                  3 + 8, in both branches        3 + 3, in the conditional branch
    decoder, up to the       28, in both branches           28, in the conditional branch
      measuring block
    decoder, later blocks    28, in both branches           14, in the conditional branch
    null branch              computed like the other        conditional branch + residual

Shapes: B images, L tokens, N rows of the decoder, C width. The N rows are first the ``buffer`` class rows, then the L
tokens. A row is one vector, so in this file the batch rows of the glossary are called *entries*. The batches of the
decoder and the encoder have E and F entries (:class:`PassShape`). With guidance, they depend on the kind of the
pass::

    pass          its PassShape                       E      F in class models    F in Harmon and UniPic
    a refresh     refresh_shape                       2 B    2 B                  B
    another pass  reuse_shape, condition cache on     B      B                    B
    another pass  reuse_shape, condition cache off    2 B    2 B                  B

Without guidance, all these numbers are B. Whatever a pass computes, it returns z [P, B, M, C] in all P branches: P is 2
with guidance, and 1 without. The null branch is always the last branch of a batch. A cache has only the entries of
``reuse_shape``. So with the condition cache, a refresh stores only its first B entries, the conditional branch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.feature_cache import FeatureCache
from ....networks.graphs import State
from ....networks.mar import NONE_KEPT, DecoderCache, pick, run_decoder
from ....networks.torch_state import to_device
from ...noise import CounterRNG, row_keys
from ..canvas import MARCanvas
from ..transformer import FullTransformer, Transformer
from .head import CachedHeadFactory
from .schedule import BY_STATE, caches_to_fill, computed_ratios, measuring_block, spare_rows
from .settings import CacheSettings


class PassShape(NamedTuple):
    """The branches that a pass computes, for B images. The decoder's batch has E = ``branches`` B entries, and the
    encoder's batch has F = ``encoder_branches`` B entries. An encoder that reads the class computes all branches that
    the decoder computes. Any other encoder computes one branch, and all branches share its output.
    """

    branches: int  # branches that the decoder computes
    encoder_branches: int  # branches that the encoder computes; 1 if all branches share the encoder's output


@dataclass(eq=False)
class EncoderCache:
    """What a pass needs to encode only the new tokens. Every pass adds its new tokens."""

    keys_and_values: State  # of all encoded tokens: a store for each block of the encoder, see MAR.encode_more
    # Keys and values of the language model between encoder and decoder; None in class models.
    language_model: Any
    decoder_rows: Tensor = field(init=False)  # the decoder's input rows, [E, N, C], see MAR.decoder_rows


@dataclass(eq=False)
class TransformerCache:
    """What a refresh stores for the passes before the next refresh. Each of these passes updates it for the next."""

    next_refresh: int  # AR step of the next refresh
    previous_step: int  # AR step of the previous pass
    encoder: EncoderCache | None
    token: DecoderCache | None  # None also if all passes until the next refresh compute all rows
    residual: Tensor | None  # condition cache, equation (10): null minus conditional branch, [B, L, C]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the three caches."""
        found: list[Tensor] = []
        if self.encoder is not None:
            found += [*self.encoder.keys_and_values, self.encoder.decoder_rows]
            if self.encoder.language_model is not None:
                found += self.encoder.language_model.tensors
        if self.token is not None:
            found += [*self.token.stores, *self.token.measured]
        if self.residual is not None:
            found.append(self.residual)
        return found


class LazyTransformer(Transformer):
    """The transformer with LazyMAR's caches, for one run of a sampler. :class:`.CachedHeadFactory` makes the heads.

    A caller may skip AR steps, ask for any undecided positions, and start an edit, in which some tokens are decided
    from the start. A caller that changes decided tokens must call :meth:`discard_features`.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        super().__init__(canvas)
        c = canvas.model.net.config
        self.heads = CachedHeadFactory(canvas.model.net, canvas.report, settings)
        self.full = FullTransformer(canvas)
        self.buffer_vectors = self.full.buffer_vectors  # for the encoder's class rows, [F, C]

        # The batches of a refresh, and of the passes between two refreshes.
        branches = 2 if canvas.guided else 1
        encoder_branches = len(self.buffer_vectors) // canvas.images
        self.refresh_shape = PassShape(branches, encoder_branches)
        self.reuse_shape = self.refresh_shape
        if settings.condition_cache:  # only the conditional branch
            self.reuse_shape = PassShape(branches=1, encoder_branches=1)

        # Which rows the passes between two refreshes compute, and which caches a refresh at each AR step fills.
        self.row_selection = RowSelection(canvas, settings)
        self.caches_to_fill = caches_to_fill(
            settings,
            encoder_rows=[c.buffer + decided for decided in canvas.order.count_before],
            leaves_out_rows=self.row_selection.leaves_out_rows,
            guided=canvas.guided,
        )

        self.memory = self._new_memory()
        self.cache: TransformerCache | None = None  # None if the next pass must be a refresh
        self.reported_bytes = 0  # the report's cache_bytes

    def _new_memory(self) -> FeatureCache:
        """Memory for the keys and values of all refreshes. Each refresh overwrites what the previous refresh stored, so
        the addresses stay the same and the passes can be recorded.
        """
        refreshes = [to_fill for to_fill in self.caches_to_fill if to_fill is not None]
        encoder_rows = max((to_fill.encoder_rows for to_fill in refreshes), default=0)
        token_cache = any(to_fill.token_cache for to_fill in refreshes)
        images = self.canvas.images
        return FeatureCache(
            self.canvas.model.net,
            self.canvas.device,
            self.reuse_shape.branches * images,
            self.reuse_shape.encoder_branches * images,
            encoder_rows,
            self.row_selection.measuring_index if token_cache else None,
        )

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """See :meth:`Transformer.__call__`. The pass reuses cached features, unless a refresh is due."""
        cache = self.cache
        if cache is not None and cache.previous_step <= step < cache.next_refresh:
            return self.reuse_features(cache, step, wanted)

        self.cache = cache = None  # frees its tensors before the refresh makes new ones
        return self.refresh_features(step, wanted)

    def discard_features(self) -> None:
        """Discard all cached features, so the next pass is a refresh."""
        self.cache = None

    def refresh_features(self, step: int, wanted: Tensor) -> Tensor:
        """Run a pass that computes all rows, and store what later passes reuse. Returns z [P, B, M, C]."""
        to_fill = self.caches_to_fill[step]
        if to_fill is None:
            return self.full(step, wanted)

        canvas = self.canvas
        net = canvas.model.net
        shape = self.refresh_shape
        encoder_cache = self._new_encoder_cache(to_fill.encoder_rows)
        token_cache = self.memory.decoder if to_fill.token_cache else None
        residual: Tensor | None = None

        # 1. The encoder reads all decided tokens. This fills the encoder cache.
        decided = canvas.order.decided_before(step)
        rows = self._encode_all(shape, decided, encoder_cache)

        # 2. The decoder computes all rows in all blocks but the last. This fills the token cache. The last block
        # computes the rows of the wanted tokens, or the rows of all tokens if later passes need the residual.
        x = rows + net.decoder_pos_embed_learned
        wanted_of_entries = wanted.repeat(shape.branches, 1)
        if to_fill.condition_cache:
            all_positions = torch.arange(net.config.tokens, device=wanted.device).repeat(len(x), 1)
            features_of_all, _ = run_decoder(net, x, all_positions, token_cache)
            conditional, null = features_of_all.chunk(2)
            residual = null - conditional  # equation (10)
            features = pick(features_of_all, wanted_of_entries)
        else:
            features, _ = run_decoder(net, x, wanted_of_entries, token_cache)

        self.cache = TransformerCache(to_fill.next_refresh, step, encoder_cache, token_cache, residual)
        self._count(shape, decided.shape[1])
        self._count_bytes(self.cache)
        z = net.conditions(features, wanted_of_entries)
        return z.unflatten(0, (shape.branches, -1))

    def reuse_features(self, cache: TransformerCache, step: int, wanted: Tensor) -> Tensor:
        """Run a pass that reuses what the refresh and the previous pass stored. Returns z [P, B, M, C]."""
        canvas = self.canvas
        net = canvas.model.net
        shape = self.reuse_shape

        # The number of tokens decided before the previous pass, and the positions of the tokens decided since then.
        known_count = canvas.order.count_before[cache.previous_step]
        new = canvas.order.positions_from(cache.previous_step, step - cache.previous_step)

        # 1. With the encoder cache, the encoder reads only the class rows and the new tokens. The decoder's input rows
        # of all other tokens do not change. Without the encoder cache, the encoder reads all decided tokens.
        if cache.encoder is not None:
            read = new
            self._update_encoder_cache(cache.encoder, new, known_count)
            rows = cache.encoder.decoder_rows
        else:
            read = canvas.order.decided_before(step)
            rows = self._encode_all(shape, read, None)

        # 2. With the token cache, the decoder's later blocks compute the rows that equation (8) chooses, with attention
        # as in equation (9). This updates the token cache.
        choose = None
        if cache.token is not None:
            required = torch.cat([wanted, new], dim=1) + net.config.buffer
            choose = self.row_selection.choice(step, known_count, required.repeat(shape.branches, 1))
        x = rows + net.decoder_pos_embed_learned
        features, chosen = run_decoder(net, x, wanted.repeat(shape.branches, 1), cache.token, choose)

        # 3. With the condition cache, the null branch is the conditional branch plus the residual.
        if cache.residual is not None:
            features = torch.cat([features, features + pick(cache.residual, wanted)])
        all_branches = self.refresh_shape.branches
        z = net.conditions(features, wanted.repeat(all_branches, 1))

        cache.previous_step = step
        reuses = cache.encoder is not None or chosen is not None or cache.residual is not None
        canvas.report.add(cached_calls=int(reuses))
        self._count(shape, read.shape[1], chosen)
        return z.unflatten(0, (all_branches, -1))

    def _new_encoder_cache(self, encoder_rows: int) -> EncoderCache | None:
        """An empty cache for ``encoder_rows`` class rows and tokens, in the first rows of :attr:`memory`; None if
        ``encoder_rows`` is 0.
        """
        if encoder_rows == 0:
            return None
        return EncoderCache(
            State(store[:, :, :, :encoder_rows] for store in self.memory.encoder),
            self.canvas.conditioning.feature_cache(self.reuse_shape.branches * self.canvas.images, encoder_rows),
        )

    def _encode_all(self, shape: PassShape, decided: Tensor, fill: EncoderCache | None) -> Tensor:
        """Encode all decided tokens. Returns the decoder's input rows [E, N, C], see :meth:`MAR.decoder_rows`.

        Args:
            shape: the batches of the pass.
            decided: positions of all decided tokens, int64 [B, K].
            fill: an empty cache. It receives the entries of ``reuse_shape``. None to store nothing.
        """
        canvas = self.canvas
        net = canvas.model.net
        stores = NONE_KEPT if fill is None else fill.keys_and_values
        language_model = None if fill is None else fill.language_model

        tokens = canvas.values.repeat(shape.encoder_branches, 1, 1)
        positions = decided.repeat(shape.encoder_branches, 1)
        encoded = net.encode(tokens, positions, self.buffer_vectors[: len(tokens)], None, stores)
        fused = canvas.conditioning.fuse(encoded, positions, shape.branches > 1, cache=language_model)
        rows = net.decoder_rows(fused, decided.repeat(shape.branches, 1))
        if fill is not None:
            fill.decoder_rows = rows[: self.reuse_shape.branches * canvas.images].clone()
        return rows

    def _update_encoder_cache(self, cache: EncoderCache, new: Tensor, known_count: int) -> None:
        """Encode the class rows and the n new tokens, and write them into the cache. Their queries attend to the
        stored keys and values of the known tokens, too.

        Args:
            cache: it holds the tokens that were decided before the previous pass. All its tensors change in place.
            new: positions of the new tokens, int64 [B, n].
            known_count: number of tokens in the cache.
        """
        canvas = self.canvas
        net = canvas.model.net
        shape = self.reuse_shape

        # 1. Encoder and language model write keys and values of the new tokens after those of the known tokens. The
        # class rows are last, because the next pass overwrites them with its new tokens (MAR.encode_more).
        tokens = canvas.values.repeat(shape.encoder_branches, 1, 1)
        positions = new.repeat(shape.encoder_branches, 1)
        buffer_vectors = self.buffer_vectors[: len(tokens)]
        encoded = net.encode_more(tokens, positions, buffer_vectors, cache.keys_and_values, known_count)
        class_rows_last = canvas.conditioning.extend(encoded, cache.language_model, known_count)

        # 2. In the decoder's input, the class rows are first.
        class_rows_first = class_rows_last.roll(net.config.buffer, dims=1)  # [E, buffer + n, C]
        net.decoder_rows(class_rows_first, new.repeat(shape.branches, 1), rows=cache.decoder_rows)

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

        # For example, a decoder of 8 blocks with 5 later blocks computes 3 * 28 + 5 * 14 rows at AR step 6 above. The
        # report counts the mean over the blocks.
        encoder_rows = shape.encoder_branches * canvas.images * (c.buffer + tokens_read)
        later = c.decoder_depth - self.row_selection.measuring_index - 1  # number of blocks after the measuring block
        rows_of_blocks = total * (c.decoder_depth - later) + computed * later
        decoder_rows = round(shape.branches * canvas.images * rows_of_blocks / c.decoder_depth)
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


# ------------------------------------------------------------------------------------------------ the token cache


class RowSelection:
    """Selects the decoder rows that a pass between two refreshes computes after the measuring block.

    At an AR step, an image has these tokens, in the order of decision::

        |<--- known --->|<---- new ---->|<-- wanted -->|<-- others -->|
        before the         since then       now            later
        previous pass   |<------- required ----------->|
        |<-------- decided ------------>|<-------- undecided -------->|

           8 tokens        3 tokens       2 tokens       12 tokens      (the example below)

    Table 3 of the paper names each strategy after the tokens that are cached. The setting ``selection`` names a
    strategy after the tokens that a pass computes in addition to the required tokens:

    - *least-similar* (V in Table 3; equation (8)), *most-similar* (IV), *random* (III): enough rows to reach the share
      of :func:`computed_ratios`, but at least :func:`spare_rows` additional rows;
    - *undecided* (II): the tokens called "others" above;
    - *decided* (I): the tokens called "known" above.

    In the example, let 3 class rows stand in front of the 25 tokens, so there are 28 rows. With a share of 0.5 and at
    least 1 additional row, the first three strategies compute max(5 + 1, 0.5 * 28) = 14 rows. *undecided* computes
    5 + 12 = 17 rows, and *decided* 5 + 8 = 13 rows.

    The paper leaves two details open. First, *undecided* and *decided* leave out the class rows. Second, all strategies
    compute the wanted and the new tokens. We infer both from the numbers of operations that the paper states for I and
    II.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        c = canvas.model.net.config
        self.canvas = canvas
        self.selection = settings.selection
        self.total = c.buffer + c.tokens  # rows of the decoder
        self.measuring_index = measuring_block(c.decoder_depth) - 1  # measuring_block counts from 1

        # For each AR step, the share of the rows to compute. *undecided* and *decided* do not use it.
        self.ratios = computed_ratios(settings, canvas.order.steps)
        self.spare = spare_rows(self.total)

        # For each AR step, whether its pass may leave out rows. If the measuring block is the decoder's last block, no
        # pass does, because even without caches the last block computes only the wanted rows.
        possible = settings.token_cache and self.measuring_index + 1 < c.decoder_depth
        by_state = self.selection in BY_STATE
        self.leaves_out_rows = [possible and (by_state or ratio < 1) for ratio in self.ratios]

        if self.selection == "random":
            keys = row_keys(canvas.noise, "selection", self.total)
            self.random = CounterRNG(to_device(keys.flatten(), canvas.device))

    def choice(self, step: int, known_count: int, required: Tensor) -> RowChoice | None:
        """The choice of the rows to compute at AR step ``step``; None to compute all rows.

        Args:
            step: the AR step.
            known_count: number of tokens that were decided before the previous pass.
            required: rows of the wanted tokens, then rows of the new tokens, int64 [E, m].
        """
        order = self.canvas.order
        required_count = required.shape[1]
        decided_count = order.count_before[step]

        # 1. How many rows the pass computes, and their ranks [B, N], if these are known before the pass.
        rank: Tensor | None = None
        if self.selection == "decided":
            size = required_count + known_count
            rank = self._ranked_first(order.decision_order[:, :decided_count])
        elif self.selection == "undecided":
            others_count = self.canvas.cells - known_count - required_count
            size = required_count + others_count
            rank = self._ranked_first(order.decision_order[:, decided_count:])
        else:
            size = max(required_count + self.spare, int(self.total * self.ratios[step]))
            if self.selection == "random":
                rank = self.random.uniform(step).view(-1, self.total)

        # 2. The choice. Both branches of guidance have the same ranks.
        if size >= self.total:
            return None
        if rank is not None:
            rank = rank.repeat(len(required) // len(rank), 1)  # [E, N]
        return RowChoice(required, size, rank, most_similar=self.selection == "most-similar")

    def _ranked_first(self, tokens: Tensor) -> Tensor:
        """Ranks, fp32 [B, N], that put ``tokens``, int64 [B, n], before all other rows."""
        rank = torch.ones(len(tokens), self.total, device=tokens.device)
        return rank.scatter_(1, tokens + self.canvas.model.net.config.buffer, 0.0)


class RowChoice(NamedTuple):
    """Chooses the rows that the decoder computes after the measuring block: the required rows, and then the other rows
    of lowest rank. The decoder calls this object in the measuring block (:func:`.run_decoder`).
    """

    required: Tensor  # int64 [E, m], rows that the pass computes in any case
    size: int  # number of rows that the pass computes, including ``required``
    known_rank: Tensor | None  # fp32 [E, N], ranks that are known before the pass; None to rank by similarity
    # If the rank is the similarity: True if the most similar rows have the lowest ranks, False if the least similar
    # rows have the lowest ranks.
    most_similar: bool

    def __call__(self, values: Tensor, previous: Tensor) -> Tensor:
        """The rows to compute, int64 [E, size]. If two rows have the same rank, the row with the lower index comes
        first.

        ``values``, ``previous``: the attention values V of the measuring block in this pass and in the previous pass,
        [E, heads, N, d].
        """
        if self.known_rank is not None:
            rank = self.known_rank
        else:
            # The similarities of unchanged rows differ only by rounding errors. These must not decide the order of the
            # rows, so round s more coarsely.
            s = (similarity(values, previous) * 2**17).round() / 2**17
            rank = -s if self.most_similar else s  # equation (8) takes the least similar rows

        others = rank.scatter(1, self.required, torch.inf).argsort(dim=1, stable=True)
        return torch.cat([self.required, others[:, : self.size - self.required.shape[1]]], dim=1)


def similarity(values: Tensor, previous: Tensor) -> Tensor:
    """s_i = cos(V_i of this pass, V_i of the previous pass), averaged over the attention heads, fp32 [E, N].

    ``values``, ``previous``: V of the two passes, [E, heads, N, d].
    """
    return F.cosine_similarity(values.float(), previous.float(), dim=-1).mean(dim=1)
