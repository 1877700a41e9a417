"""The transformer with LazyMAR's caches. ``__init__.py`` describes the method and its equations.

Some passes are refreshes, and all others are reuse passes. The three caches are the fields ``encoder``, ``token`` and
``condition`` of :class:`TransformerCache`. A field is None if its cache is off:

=========  =============================================  =====================================  ====================
cache      a refresh stores                               a reuse pass                           and then updates
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

Shapes: B images, L tokens, N rows of the decoder, D transformer width, d numbers of an attention head, and P branches
(2 with guidance, 1 without). The null branch is last. A *row* is one vector. A *position* is the index of a token in
its image. The N rows are the ``buffer`` class rows, then the L tokens, so position p is row ``buffer + p``. The
decoder's batch has E entries, and the encoder's batch has F (:class:`PassShape`).
"""

from __future__ import annotations

from dataclasses import dataclass
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
from .head import CachedHeadSampler
from .schedule import BY_STATE, caches_to_fill, computed_ratios, measuring_block, spare_rows
from .settings import CacheSettings


class PassShape(NamedTuple):
    """The branches that a pass computes. An *entry* of a batch is one image in one branch, so B images have
    E = ``branches`` B entries in the decoder, and F = ``encoder_branches`` B entries in the encoder. The entries of the
    conditional branch are first.

    :class:`LazyTransformer` has two shapes: ``refresh_shape`` for refreshes, and ``reuse_shape`` for reuse passes. If
    the condition cache is on, ``reuse_shape`` has only the conditional branch; otherwise the shapes are equal. The
    encoder cache and the token cache store only the entries of ``reuse_shape``. A pass of either shape returns z of all
    P branches.
    """

    branches: int  # branches that the decoder computes
    # Branches that the encoder computes. An encoder that reads the class computes the same branches as the decoder. Any
    # other encoder computes 1 branch, and all branches share its output.
    encoder_branches: int


class EncoderCache(NamedTuple):
    """What a reuse pass needs to encode only the new tokens. Every reuse pass writes its new tokens into these tensors,
    in place.
    """

    keys_and_values: State  # of all encoded tokens: a store for each block of the encoder, see MAR.encode_more
    # Keys and values of the language model between encoder and decoder; None in class models.
    language_model: Any
    decoder_rows: Tensor  # the decoder's input rows, [E, N, D], see MAR.decoder_rows


@dataclass(eq=False)
class TransformerCache:
    """What a refresh stores for the reuse passes before the next refresh. Each reuse pass updates it for the next."""

    next_refresh: int  # AR step of the next refresh
    previous_step: int  # AR step of the previous pass
    encoder: EncoderCache | None
    token: DecoderCache | None  # None also if all passes until the next refresh compute all rows
    condition: Tensor | None  # the residual, equation (10): null minus conditional branch, [B, L, D]

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
        if self.condition is not None:
            found.append(self.condition)
        return found


class LazyTransformer(Transformer):
    """The transformer with LazyMAR's caches, for one run of a sampler. :class:`.CachedHeadSampler` makes the heads.

    A caller may skip AR steps, ask for any undecided positions, and start an edit, in which some tokens are decided
    from the start. A caller that changes decided tokens must call :meth:`discard_features`.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        super().__init__(canvas)
        c = canvas.model.net.config
        self.heads = CachedHeadSampler(canvas.model.net, canvas.report, settings)
        self.full = FullTransformer(canvas)

        # The vectors for the class rows of a refresh, [F, D]. The conditional branch is first.
        self.buffer_vectors = self.full.buffer_vectors

        self.refresh_shape = PassShape(self.full.branches, self.full.encoder_branches)
        self.reuse_shape = self.refresh_shape
        if settings.condition_cache:
            self.reuse_shape = PassShape(branches=1, encoder_branches=1)

        # Which rows the reuse passes compute, and which caches a refresh at each AR step fills.
        self.row_selection = RowSelection(canvas, settings)
        self.caches_to_fill = caches_to_fill(
            settings,
            rows_before=[c.buffer + decided for decided in canvas.order.count_before],
            leaves_out_rows=self.row_selection.leaves_out_rows,
            guided=canvas.guided,
        )

        # The map of the report, which shows the tokens that come from the token cache.
        if settings.refresh_period > 1 and settings.token_cache:
            canvas.cached = torch.zeros(canvas.images, canvas.cells, dtype=torch.int32, device=canvas.device)

        self.memory = self._new_memory()
        self.cache: TransformerCache | None = None  # None if the next pass must be a refresh
        self.reported_bytes = 0  # the report's cache_bytes

    def _new_memory(self) -> FeatureCache:
        """Memory for the keys and values of all refreshes. Each refresh overwrites what the previous refresh stored, so
        the addresses stay the same and the passes can be recorded.
        """
        refreshes = [to_fill for to_fill in self.caches_to_fill if to_fill is not None]
        token_cache = any(to_fill.token_cache for to_fill in refreshes)
        images = self.canvas.images
        return FeatureCache(
            self.canvas.model.net,
            self.canvas.device,
            entries=self.reuse_shape.branches * images,
            encoder_entries=self.reuse_shape.encoder_branches * images,
            room=max((to_fill.encoder_cache_size for to_fill in refreshes), default=0),
            block=self.row_selection.measuring_index if token_cache else None,
        )

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """See :meth:`Transformer.__call__`. The pass is a refresh if one is due, or if the caller goes back to an
        earlier AR step.
        """
        cache = self.cache
        if cache is not None and cache.previous_step <= step < cache.next_refresh:
            return self.reuse_features(cache, step, wanted)

        self.cache = cache = None  # frees its tensors before the refresh makes new ones
        return self.refresh_features(step, wanted)

    def discard_features(self) -> None:
        """Discard all cached features, so the next pass is a refresh."""
        self.cache = None

    def refresh_features(self, step: int, wanted: Tensor) -> Tensor:
        """Run a pass that computes all rows, and store what reuse passes need. Returns z [P, B, M, D]."""
        to_fill = self.caches_to_fill[step]
        if to_fill is None:  # the next pass is a refresh, too, or all caches are off
            return self.full(step, wanted)

        canvas = self.canvas
        net = canvas.model.net
        shape = self.refresh_shape

        # 1. The encoder reads all decided tokens. This fills the encoder cache.
        decided = canvas.order.decided_before(step)
        rows, encoder_cache = self._fill_encoder_cache(decided, to_fill.encoder_cache_size)

        # 2. The decoder computes all rows in all blocks but the last. This fills the token cache. The last block
        # computes the rows of the wanted tokens, or the rows of all tokens if reuse passes need the residual.
        x = rows + net.decoder_pos_embed_learned
        token_cache = self.memory.decoder if to_fill.token_cache else None
        residual: Tensor | None = None
        wanted_positions = wanted.repeat(shape.branches, 1)  # [E, M]
        if to_fill.condition_cache:
            all_positions = torch.arange(net.config.tokens, device=wanted.device).repeat(len(x), 1)  # [E, L]
            all_features, _ = run_decoder(net, x, all_positions, token_cache)  # [E, L, D]
            conditional, null = all_features.chunk(2)
            residual = null - conditional  # equation (10)
            features = pick(all_features, wanted_positions)
        else:
            features, _ = run_decoder(net, x, wanted_positions, token_cache)  # [E, M, D]

        self.cache = TransformerCache(to_fill.next_refresh, step, encoder_cache, token_cache, residual)
        self._count(shape, tokens_read=decided.shape[1], later_rows=self.row_selection.total)
        self._count_bytes(self.cache)
        z = net.conditions(features, wanted_positions)
        return z.unflatten(0, (shape.branches, -1))

    def _fill_encoder_cache(self, decided: Tensor, size: int) -> tuple[Tensor, EncoderCache | None]:
        """Encode all decided tokens in a refresh. Returns the decoder's input rows [E, N, D], and the encoder cache.

        Args:
            decided: positions of all decided tokens, int64 [B, K].
            size: :attr:`.CachesToFill.encoder_cache_size`. If it is 0, nothing is stored, and the cache is None.
        """
        if size == 0:
            return self._encode_all(self.refresh_shape, decided), None

        keys_and_values = self.memory.encoder_rows(size)
        entries = self.reuse_shape.branches * self.canvas.images  # E of a reuse pass; these entries are stored
        language_model = self.canvas.conditioning.feature_cache(entries, size)
        rows = self._encode_all(self.refresh_shape, decided, keys_and_values, language_model)
        # The clone is smaller than ``rows`` if the null branch is not stored. A view would keep all of ``rows`` in
        # memory until the next refresh.
        return rows, EncoderCache(keys_and_values, language_model, rows[:entries].clone())

    def _encode_all(
        self, shape: PassShape, decided: Tensor, stores: State = NONE_KEPT, language_model: Any = None
    ) -> Tensor:
        """Encode all decided tokens. Returns the decoder's input rows [E, N, D], see :meth:`MAR.decoder_rows`.

        Args:
            shape: the batches of the pass.
            decided: positions of all decided tokens, int64 [B, K].
            stores: empty memory of an :class:`EncoderCache` for the encoder's keys and values.
            language_model: the same for the language model; None in class models, or to store nothing.
        """
        canvas = self.canvas
        net = canvas.model.net
        tokens = canvas.values.repeat(shape.encoder_branches, 1, 1)
        positions = decided.repeat(shape.encoder_branches, 1)
        buffer_vectors = self.buffer_vectors[: len(tokens)]  # [F, D]; in a reuse pass, F may be smaller
        encoded = net.encode(tokens, positions, buffer_vectors, None, stores)
        fused = canvas.conditioning.fuse(encoded, positions, shape.branches > 1, cache=language_model)
        return net.decoder_rows(fused, decided.repeat(shape.branches, 1))

    def reuse_features(self, cache: TransformerCache, step: int, wanted: Tensor) -> Tensor:
        """Run a pass that reuses what the refresh and the previous pass stored. Returns z [P, B, M, D]."""
        canvas = self.canvas
        net = canvas.model.net
        buffer = net.config.buffer
        shape = self.reuse_shape

        # The number of tokens decided before the previous pass, and the positions of the tokens decided since then.
        known_count = canvas.order.count_before[cache.previous_step]
        new = canvas.order.positions_from(cache.previous_step, step - cache.previous_step)  # [B, n]

        # 1. With the encoder cache, the encoder reads only the class rows and the new tokens. The decoder's input rows
        # of all other tokens do not change. Without the encoder cache, the encoder reads all decided tokens.
        if cache.encoder is not None:
            read = new
            self._update_encoder_cache(cache.encoder, new, known_count)
            rows = cache.encoder.decoder_rows
        else:
            read = canvas.order.decided_before(step)
            rows = self._encode_all(shape, read)

        # 2. With the token cache, the decoder's later blocks compute the rows that equation (8) chooses, with attention
        # as in equation (9). This updates the token cache. run_decoder returns the features at the wanted positions,
        # and the rows that the later blocks computed, int64 [E, size]; None if they computed all rows.
        choose = None
        if cache.token is not None:
            # The wanted rows first: run_decoder returns the features of the first M chosen rows.
            required_rows = torch.cat([wanted, new], dim=1) + buffer  # [B, M + n]
            choose = self.row_selection.choice(step, known_count, required_rows.repeat(shape.branches, 1))
        x = rows + net.decoder_pos_embed_learned
        wanted_positions = wanted.repeat(shape.branches, 1)  # [E, M]
        features, chosen_rows = run_decoder(net, x, wanted_positions, cache.token, choose)

        # 3. With the condition cache, the null branch is the conditional branch plus the residual.
        if cache.condition is not None:
            features = torch.cat([features, features + pick(cache.condition, wanted)])
        all_branches = self.refresh_shape.branches  # P
        z = net.conditions(features, wanted.repeat(all_branches, 1))

        # 4. The report, and the map that shows which tokens came from the token cache.
        reuses = cache.encoder is not None or chosen_rows is not None or cache.condition is not None
        canvas.report.add(cached_calls=int(reuses))
        total = self.row_selection.total
        self._count(shape, read.shape[1], total if chosen_rows is None else chosen_rows.shape[1])
        if chosen_rows is not None and canvas.cached is not None:
            left_out = torch.ones(canvas.images, total, dtype=torch.int32, device=z.device)
            left_out.scatter_(1, chosen_rows[: canvas.images], 0)  # the first entries are the conditional branch
            canvas.cached += left_out[:, buffer:]

        cache.previous_step = step
        return z.unflatten(0, (all_branches, -1))

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

        # 1. Encoder and language model write keys and values of the new tokens after the known tokens' entries. The
        # class rows are last, because the next pass overwrites them with its new tokens (MAR.encode_more).
        tokens = canvas.values.repeat(shape.encoder_branches, 1, 1)
        positions = new.repeat(shape.encoder_branches, 1)
        buffer_vectors = self.buffer_vectors[: len(tokens)]  # [F, D]; F may be smaller than in a refresh
        encoded = net.encode_more(tokens, positions, buffer_vectors, cache.keys_and_values, known_count)
        class_rows_last = canvas.conditioning.extend(encoded, cache.language_model, known_count)  # [E, n + buffer, D]

        # 2. In the decoder's input, the class rows are first. decoder_rows writes the rows into the cache.
        class_rows_first = class_rows_last.roll(net.config.buffer, dims=1)
        net.decoder_rows(class_rows_first, new.repeat(shape.branches, 1), rows=cache.decoder_rows)

    def _count(self, shape: PassShape, tokens_read: int, later_rows: int) -> None:
        """Add the work of a pass to the report.

        Args:
            shape: the batches of the pass.
            tokens_read: number of tokens that the encoder read in each entry, without the class rows.
            later_rows: number of rows that each of the decoder's later blocks computed in each entry. The blocks before
                them computed all rows.
        """
        canvas = self.canvas
        c = canvas.model.net.config
        encoder_rows = shape.encoder_branches * canvas.images * (c.buffer + tokens_read)

        # The report counts an average block of the decoder. For example, a decoder of 8 blocks has 5 later blocks. With
        # 28 rows, of which the later blocks compute 14, the blocks compute 3 * 28 + 5 * 14 rows.
        first_blocks = self.row_selection.measuring_index + 1
        later_blocks = c.decoder_depth - first_blocks
        rows_of_blocks = first_blocks * self.row_selection.total + later_blocks * later_rows
        decoder_rows = round(shape.branches * canvas.images * rows_of_blocks / c.decoder_depth)
        canvas.report.add(**canvas.conditioning.counts(encoder_rows, decoder_rows))

    def _count_bytes(self, cache: TransformerCache) -> None:
        """Raise the report's ``cache_bytes`` to the size of this cache if it is the largest cache of the run so far.
        The report can only add to a count, so this adds the increase.
        """
        largest_bytes = max(self.reported_bytes, sum(tensor.nbytes for tensor in cache.tensors))
        self.canvas.report.add(cache_bytes=largest_bytes - self.reported_bytes)
        self.reported_bytes = largest_bytes


# ------------------------------------------------------------------------------------------------ the token cache


class RowSelection:
    """Selects the decoder rows that a reuse pass computes after the measuring block.

    At an AR step, an image has these tokens, in the order of decision::

        |<--- known --->|<---- new ---->|<-- wanted -->|<-- others -->|
        before the         since then       now            later
        previous pass   |<------- required ----------->|
        |<-------- decided ------------>|<-------- undecided -------->|

           8 tokens        3 tokens       2 tokens       12 tokens      (the example below)

    The setting ``selection`` names a strategy after the tokens that a pass computes in addition to the required tokens.
    (The paper's Table 3 names each strategy after the tokens that are cached.)

    - *least-similar* (V in Table 3; equation (8)), *most-similar* (IV), *random* (III): enough rows to reach the share
      of :func:`computed_ratios`, but at least :func:`spare_rows` additional rows;
    - *undecided* (II): the tokens called "others" above;
    - *decided* (I): the tokens called "known" above.

    In the example, let 3 class rows stand in front of the 25 tokens, so there are 28 rows. With a share of 0.5 and at
    least 1 additional row, the first three strategies compute max(5 + 1, 0.5 * 28) = 14 rows. *undecided* computes
    5 + 12 = 17 rows, and *decided* 5 + 8 = 13 rows.

    The paper leaves two details open: whether *undecided* and *decided* compute the class rows, and whether all
    strategies compute the wanted and the new tokens. We infer "no" and "yes" from the numbers of operations that the
    paper states for I and II.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        c = canvas.model.net.config
        self.canvas = canvas
        self.selection = settings.selection
        self.total = c.buffer + c.tokens  # N, rows of the decoder
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
            keys = row_keys(canvas.noise, "selection", self.total)  # a key for each row of each image
            self.random = CounterRNG(to_device(keys.flatten(), canvas.device))

    def choice(self, step: int, known_count: int, required: Tensor) -> RowChoice | None:
        """The choice of the rows to compute at AR step ``step``; None to compute all rows.

        Args:
            step: the AR step.
            known_count: number of tokens that were decided before the previous pass.
            required: see :attr:`RowChoice.required`.
        """
        order = self.canvas.order
        required_count = required.shape[1]
        decided_count = order.count_before[step]

        # 1. How many rows the pass computes in addition to the required rows, and the ranks [B, N], if these are known
        # before the pass. *decided* also ranks the new tokens first, and *undecided* the wanted tokens, although
        # ``extra_count`` does not count them. This has no effect, because RowChoice ignores the ranks of required rows.
        rank: Tensor | None = None
        if self.selection == "decided":
            extra_count = known_count
            rank = self._ranked_first(order.decision_order[:, :decided_count])
        elif self.selection == "undecided":
            extra_count = self.canvas.cells - known_count - required_count
            rank = self._ranked_first(order.decision_order[:, decided_count:])
        else:
            extra_count = max(self.spare, int(self.total * self.ratios[step]) - required_count)
            if self.selection == "random":
                rank = self.random.uniform(step).view(-1, self.total)  # [B N, 1] -> [B, N]

        # 2. The choice. Both branches of guidance have the same ranks.
        size = required_count + extra_count
        if size >= self.total:
            return None
        if rank is not None:
            branches = len(required) // self.canvas.images
            rank = rank.repeat(branches, 1)  # [E, N]
        return RowChoice(required, size, rank, most_similar=self.selection == "most-similar")

    def _ranked_first(self, tokens: Tensor) -> Tensor:
        """Ranks, fp32 [B, N], that put the rows of ``tokens``, positions int64 [B, n], before all other rows."""
        rank = torch.ones(len(tokens), self.total, device=tokens.device)
        return rank.scatter_(1, tokens + self.canvas.model.net.config.buffer, 0.0)


class RowChoice(NamedTuple):
    """Chooses the rows that the decoder computes after the measuring block: the required rows, and then the other rows
    of lowest rank. The decoder calls this object in the measuring block (:func:`.run_decoder`).
    """

    # int64 [E, m], rows that the pass computes in any case: the wanted rows first (run_decoder relies on it), then the
    # rows of the new tokens.
    required: Tensor
    size: int  # number of rows that the pass computes, including ``required``
    known_rank: Tensor | None  # fp32 [E, N], ranks that are known before the pass; None to rank by similarity
    # If the similarity determines the ranks: whether the most similar rows come first. If False, the least similar rows
    # come first.
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
            # Equation (8) prints argmax, but the paper's text and code take the least similar rows.
            rank = -s if self.most_similar else s

        by_rank = rank.scatter(1, self.required, torch.inf).argsort(dim=1, stable=True)  # the required rows are last
        # ``required`` first, see the field.
        return torch.cat([self.required, by_rank[:, : self.size - self.required.shape[1]]], dim=1)


def similarity(values: Tensor, previous: Tensor) -> Tensor:
    """s_i = cos(V_i of this pass, V_i of the previous pass), averaged over the attention heads, fp32 [E, N]. The
    arguments are V in the two passes, [E, heads, N, d].
    """
    return F.cosine_similarity(values.float(), previous.float(), dim=-1).mean(dim=1)
