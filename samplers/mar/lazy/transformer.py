"""The transformer with LazyMAR's caches. ``__init__.py`` describes the method and its equations.

Shapes: B images, P branches of guidance, L tokens, N rows of the decoder, C width. The N rows are the class rows, whose
number is ``buffer``, and then the L tokens. A batch has E entries, usually P B: one for each image in the conditional
branch, then one for each image in the null branch. E is only B in a pass without the null branch. It is also B in an
encoder that does not read the class or prompt (Harmon's and UniPic's), because both branches share its output.
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
from ..mar import FullTransformer, Transformer
from .head import CachedHeadEvaluation
from .schedule import BY_STATE, computed_ratios, measuring_block, refreshes, spare_rows
from .settings import CacheSettings


@dataclass(eq=False)
class TransformerCache:
    """What a refresh keeps for the passes until the next refresh, and what each pass keeps for the next pass."""

    until: int  # AR step of the next refresh
    step: int  # AR step of the previous pass
    encoder: State  # encoder cache: a store of keys and values for each block; empty without the cache
    decoder: DecoderCache | None  # token cache; None if all passes until the next refresh compute all rows
    # Encoder cache: what the language model of Harmon and UniPic keeps, which runs between encoder and decoder.
    language_model: Any = None
    rows: Tensor | None = None  # encoder cache: the decoder's rows of the previous pass, [E, N, C], see MAR.canvas
    residual: Tensor | None = None  # condition cache: null minus conditional branch at the refresh, [B, L, C]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in the fields."""
        found = [*self.encoder]
        if self.decoder is not None:
            found += [*self.decoder.stores, *self.decoder.measured]
        if self.language_model is not None:
            found += self.language_model.tensors
        return found + [tensor for tensor in (self.rows, self.residual) if tensor is not None]


class LazyTransformer(Transformer):
    """The transformer with LazyMAR's caches, for one run of a sampler; its head is :class:`.CachedHeadEvaluation`.

    A caller may skip AR steps, ask for any undecided positions, and start from fixed tokens. A caller that changes
    decided tokens must call :meth:`discard_features`.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        super().__init__(canvas)
        net = canvas.model.net
        c = net.config
        self.images = canvas.images
        self.head = CachedHeadEvaluation(net, canvas.report, settings)
        self.full = FullTransformer(canvas)

        # Which rows the passes between two refreshes compute, and what a refresh at each AR step keeps.
        self.row_selection = RowSelection(canvas, settings)
        shares = self.row_selection.share
        self.refreshes = refreshes(settings, canvas.order.count_before, shares, c.buffer, canvas.guided)

        # A refresh computes ``branches`` branches of guidance, and the passes after it ``branches_between_refreshes``.
        # In a pass of n branches, the positions of the images are repeated n times.
        self.branches = 1 + canvas.guided
        self.branches_between_refreshes = 1 if settings.condition_cache else self.branches
        self.entries = self.branches_between_refreshes * self.images
        # In the encoder's class rows, [E, C]; the null branch comes last.
        self.buffer_vectors = self.full.buffer_vectors

        # Memory for what a refresh keeps. Each refresh overwrites what the previous refresh kept.
        keeping = [refresh for refresh in self.refreshes if refresh is not None]
        encoder_rows = max((refresh.encoder_rows for refresh in keeping), default=0)
        block = self.row_selection.block if any(refresh.decoder for refresh in keeping) else None
        encoder_entries = self.encoder_branches(self.branches_between_refreshes) * self.images
        self.memory = FeatureCache(net, canvas.device, self.entries, encoder_entries, encoder_rows, block)
        self.cache: TransformerCache | None = None
        self.reported_bytes = 0

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """See :meth:`Transformer.__call__`. The pass reuses what is kept, unless a refresh is due."""
        cache = self.cache
        if cache is not None and cache.step <= step < cache.until:
            return self.reuse(cache, step, wanted)

        self.cache = None  # frees its tensors before the refresh makes new ones
        return self.refresh(step, wanted)

    def encoder_branches(self, branches: int) -> int:
        """Number of branches that the encoder computes in a pass of ``branches`` branches: 1 if the encoder does not
        read the class or prompt.
        """
        return min(branches, len(self.buffer_vectors) // self.images)

    def discard_features(self) -> None:
        """Discard all cached features, so the next pass is a refresh."""
        self.cache = None

    def refresh(self, step: int, wanted: Tensor) -> Tensor:
        """A pass that computes all rows of both branches, and keeps what later passes use. Returns z [P, B, M, C]."""
        plan = self.refreshes[step]
        if plan is None:
            return self.full(step, wanted)

        canvas = self.canvas
        net = canvas.model.net
        cache = TransformerCache(until=plan.until, step=step, encoder=NONE_KEPT, decoder=None)
        if plan.decoder:
            cache.decoder = self.memory.decoder
        if plan.encoder_rows:
            cache.encoder = State(store[:, :, :, : plan.encoder_rows] for store in self.memory.encoder)
            cache.language_model = canvas.conditioning.feature_cache(self.entries, plan.encoder_rows)

        # 1. The encoder reads all decided tokens.
        rows, encoder_rows = self._encode(step, self.branches, cache)
        if plan.encoder_rows:
            cache.rows = rows[: self.entries].clone()

        # 2. The decoder computes all rows. Its last block computes only the rows of the wanted tokens or, if later
        # passes need the residual, the rows of all tokens.
        wanted = wanted.repeat(self.branches, 1)
        of_last_block = wanted
        if plan.residual:
            of_last_block = torch.arange(net.config.tokens, device=wanted.device).repeat(len(wanted), 1)
        x = rows + net.decoder_pos_embed_learned
        features, _ = run_decoder(net, x, of_last_block, cache.decoder)

        # 3. The residual, equation (10).
        if plan.residual:
            conditional, null = features.chunk(2)
            cache.residual = null - conditional
            features = pick(features, wanted)

        # The report adds up its counts. But cache_bytes is the largest size so far, so only an increase is added.
        self._count(encoder_rows, len(rows))
        largest_bytes = max(self.reported_bytes, sum(tensor.nbytes for tensor in cache.tensors))
        canvas.report.add(cache_bytes=largest_bytes - self.reported_bytes)
        self.reported_bytes = largest_bytes
        self.cache = cache
        return net.conditions(features, wanted).unflatten(0, (self.branches, -1))

    def reuse(self, cache: TransformerCache, step: int, wanted: Tensor) -> Tensor:
        """A pass between two refreshes, which computes less. Returns z [P, B, M, C]."""
        canvas = self.canvas
        net = canvas.model.net
        known_count = canvas.order.count_before[cache.step]  # number of tokens decided before the previous pass
        new = canvas.order.between(cache.step, step)  # positions of the tokens decided since then

        # 1. With the encoder cache, the encoder reads only the new tokens, and the decoder's rows of all other tokens
        # stay as they are. Without the encoder cache, the encoder reads all decided tokens.
        if cache.rows is None:
            rows, encoder_rows = self._encode(step, self.branches_between_refreshes)
        else:
            rows, encoder_rows = self._encode_more(cache, known_count, new)

        # 2. The decoder computes the chosen rows, equations (8) and (9).
        choose = None
        if cache.decoder is not None:
            required = torch.cat([wanted, new], dim=1) + net.config.buffer
            choose = self.row_selection.choice(step, known_count, required.repeat(self.branches_between_refreshes, 1))
        x = rows + net.decoder_pos_embed_learned
        features, chosen = run_decoder(net, x, wanted.repeat(self.branches_between_refreshes, 1), cache.decoder, choose)

        # 3. The null branch is the conditional branch plus the residual of the refresh, equation (10).
        if cache.residual is not None:
            features = torch.cat([features, features + pick(cache.residual, wanted)])

        self._count(encoder_rows, len(rows), chosen)
        reuses = cache.rows is not None or chosen is not None or cache.residual is not None
        canvas.report.add(cached_calls=int(reuses))
        cache.step = step
        return net.conditions(features, wanted.repeat(self.branches, 1)).unflatten(0, (self.branches, -1))

    def _encode(self, step: int, branches: int, cache: TransformerCache | None = None) -> tuple[Tensor, int]:
        """Encode all decided tokens in a pass of ``branches`` branches. Returns the decoder's rows [E, N, C], see
        :meth:`MAR.canvas`, and how many rows the encoder computed. The stores of ``cache``, if it is not None, receive
        keys and values.
        """
        canvas = self.canvas
        net = canvas.model.net
        known = canvas.order.decided_before(step)
        encoder_branches = self.encoder_branches(branches)
        buffer_vectors = self.buffer_vectors[: encoder_branches * self.images]
        of_encoder = known.repeat(encoder_branches, 1)

        tokens = canvas.values.repeat(encoder_branches, 1, 1)
        x = net.encode(tokens, of_encoder, buffer_vectors, None, NONE_KEPT if cache is None else cache.encoder)
        language_model_cache = None if cache is None else cache.language_model
        fused = canvas.conditioning.fuse(x, of_encoder, branches > 1, cache=language_model_cache)
        return net.canvas(fused, known.repeat(branches, 1)), len(x) * x.shape[1]

    def _encode_more(self, cache: TransformerCache, known_count: int, new: Tensor) -> tuple[Tensor, int]:
        """Encode the new tokens and the class rows, which attend to kept keys and values of earlier tokens. Returns the
        same as :meth:`_encode`.

        Args:
            cache: its stores receive the keys and values of the computed rows, and its ``rows`` their new values.
            known_count: number of tokens that were decided before the previous pass.
            new: positions of the new tokens, int64 [B, n].
        """
        canvas = self.canvas
        net = canvas.model.net
        encoder_branches = self.encoder_branches(self.branches_between_refreshes)
        buffer_vectors = self.buffer_vectors[: encoder_branches * self.images]
        tokens = canvas.values.repeat(encoder_branches, 1, 1)
        x = net.encode_more(tokens, new.repeat(encoder_branches, 1), buffer_vectors, cache.encoder, known_count)
        fused = canvas.conditioning.extend(x, cache.language_model, known_count)
        class_rows_first = fused.roll(net.config.buffer, 1)  # encode_more returns the class rows last
        new_of_branches = new.repeat(self.branches_between_refreshes, 1)
        cache.rows = net.canvas(class_rows_first, new_of_branches, rows=cache.rows)  # changes cache.rows in place
        return cache.rows, len(x) * x.shape[1]

    def _count(self, encoder_rows: int, entries: int, chosen: Tensor | None = None) -> None:
        """Add the work of a pass to the report, and to the map that shows which tokens came from the token cache.

        Args:
            encoder_rows: number of rows that the encoder computed.
            entries: E of the decoder.
            chosen: the decoder's rows that the blocks after the measuring block computed, int64 [E, n]; None for all.
        """
        canvas = self.canvas
        total = self.row_selection.total
        computed = total if chosen is None else chosen.shape[1]

        depth = canvas.model.net.config.decoder_depth
        later = depth - self.row_selection.block - 1
        decoder_rows = round(entries * (total * (depth - later) + computed * later) / depth)  # the mean over the blocks
        canvas.report.add(**canvas.conditioning.counts(encoder_rows, decoder_rows))

        if chosen is not None and canvas.cached is not None:
            left_out = torch.ones(self.images, total, dtype=torch.int32, device=chosen.device)
            left_out.scatter_(1, chosen[: self.images], 0)  # rows of the conditional branch
            canvas.cached += left_out[:, canvas.model.net.config.buffer :]  # the class rows come first


# ------------------------------------------------------------------------------------------------ the chosen rows


class RowSelection:
    """Selects the decoder rows that a pass between two refreshes computes after the measuring block.

    At an AR step, the tokens of an image are, in the order in which they are decided::

        |<--- known --->|<---- new ---->|<-- wanted -->|<-- others -->|
        before the         since then       now            later
        previous pass   |<------- always computed ---->|
        |<-------- decided ------------>|<-------- undecided -------->|

    Table 3 of the paper names each strategy after the tokens that are cached. The setting ``selection`` names it after
    the tokens that a pass computes in addition to the new and the wanted tokens:

    - *least-similar* (V in Table 3; equation (8)), *most-similar* (IV), *random* (III): enough rows to reach the share
      of :func:`computed_ratios`, but at least :func:`spare_rows` additional rows;
    - *undecided* (II): the tokens called "others" above;
    - *decided* (I): the tokens called "known" above.

    The paper leaves two things open. We infer them from the numbers of operations that the paper states for I and II:
    *undecided* and *decided* leave out the class rows, and all strategies compute the wanted and the new tokens.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        c = canvas.model.net.config
        steps = canvas.order.steps
        self.total = c.buffer + c.tokens  # rows of the decoder
        self.canvas = canvas
        self.selection = settings.selection
        self.block = measuring_block(c.decoder_depth) - 1  # index of the measuring block, from 0

        # The share of rows to compute at each AR step. It stays 1 if the measuring block is the decoder's last block,
        # because even without caches the last block computes only the wanted rows.
        self.share = [1.0] * steps
        if settings.token_cache and self.block + 1 < c.decoder_depth:
            self.share = [0.0] * steps if self.selection in BY_STATE else computed_ratios(settings, steps)
        self.spare = spare_rows(self.total)

        if self.selection == "random":
            keys = row_keys(canvas.noise, "selection", self.total)
            self.random = CounterRNG(to_device(keys.flatten(), canvas.device))

    def choice(self, step: int, known_count: int, required: Tensor) -> RowChoice | None:
        """The rows to compute at an AR step; None for all rows.

        Args:
            step: the AR step.
            known_count: number of tokens that were decided before the previous pass.
            required: rows of the wanted tokens, then of the new ones, int64 [E, m].
        """
        order = self.canvas.order.decision_order
        start = self.canvas.order.count_before[step]

        rank = None  # for least-similar and most-similar, which rank rows by similarity
        if self.selection == "decided":
            size = known_count + required.shape[1]  # known + new + wanted
            rank = self._ranked_first(order[:, :start])
        elif self.selection == "undecided":
            size = self.canvas.cells - known_count  # new + wanted + others
            rank = self._ranked_first(order[:, start:])
        else:
            size = max(required.shape[1] + self.spare, int(self.total * self.share[step]))
            if self.selection == "random":
                rank = self.random.uniform(step).view(-1, self.total)

        if size >= self.total:
            return None
        if rank is not None:
            rank = rank.repeat(len(required) // len(rank), 1)
        return RowChoice(required, size, rank, self.selection == "most-similar")

    def _ranked_first(self, tokens: Tensor) -> Tensor:
        """Ranks, fp32 [B, N], that put ``tokens``, int64 [B, n], before all other rows."""
        rank = torch.ones(len(tokens), self.total, device=tokens.device)
        return rank.scatter_(1, tokens + self.canvas.model.net.config.buffer, 0.0)


class RowChoice(NamedTuple):
    """Chooses the decoder rows that a pass computes after the measuring block, by equation (8)."""

    required: Tensor  # int64 [E, m], rows that the pass computes in any case
    size: int  # number of all rows that the pass computes, including ``required``
    rank: Tensor | None  # fp32 [E, N]; rows with the lowest ranks are computed. None: ranks by similarity
    most_similar: bool  # for ranks by similarity: whether the most similar rows are computed, or the least similar

    def __call__(self, values: Tensor, previous: Tensor) -> Tensor:
        """The rows, int64 [E, size], which begin with ``required``.

        ``values``, ``previous``: V of the measuring block in this pass and in the previous one, [E, heads, N, d].
        """
        rank = self.rank
        if rank is None:
            # Rounded, because s of unchanged rows differs by rounding errors, which must not decide their order.
            s = (similarity(values, previous) * 2**17).round() / 2**17
            rank = -s if self.most_similar else s

        # The rows of lowest rank. Of two rows with equal rank, the row with the lower index comes first.
        others = rank.scatter(1, self.required, torch.inf).argsort(dim=1, stable=True)
        return torch.cat([self.required, others[:, : self.size - self.required.shape[1]]], dim=1)


def similarity(values: Tensor, previous: Tensor) -> Tensor:
    """s_i = cos(V_i of this pass, V_i of the previous pass), averaged over the heads: [E, N].

    Both V have the shape [E, heads, N, d].
    """
    return F.cosine_similarity(values.float(), previous.float(), dim=-1).mean(dim=1)
