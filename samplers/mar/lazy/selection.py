"""LazyMAR's token cache: which rows of the decoder a pass between two refreshes computes.

Source: Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), section 3.2.1, equation (8) and Table 3. ``__init__.py`` explains
the terms.

Shapes: B images, L tokens, N rows of the decoder: first the ``buffer`` class rows, then the L tokens. The decoder's
batch has E entries: the B images, or each image twice if a pass computes both branches of guidance.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.torch_state import to_device
from ...noise import CounterRNG, row_keys
from ..canvas import MARCanvas
from .schedule import BY_SIMILARITY, BY_STATE, computed_ratios, measuring_block, spare_rows
from .settings import CacheSettings


class RowSelection:
    """Selects the decoder rows that a pass between two refreshes computes after the measuring block.

    At an AR step, an image has these tokens, in the order of decision::

        |<--- known --->|<---- new ---->|<-- wanted -->|<-- others -->|
        before the         since then       now            later
        previous pass   |<------- always computed ---->|
        |<-------- decided ------------>|<-------- undecided -------->|

    Table 3 of the paper names each strategy after the tokens that are cached. The setting ``selection`` names a
    strategy after the tokens that a pass computes in addition to the new and the wanted tokens:

    - *least-similar* (V in Table 3; equation (8)), *most-similar* (IV), *random* (III): enough rows to reach the share
      of :func:`computed_ratios`, but at least :func:`spare_rows` additional rows;
    - *undecided* (II): the tokens called "others" above;
    - *decided* (I): the tokens called "known" above.

    The pass measures the similarities that *least-similar* and *most-similar* need (:class:`ChoiceBySimilarity`). For
    the other strategies, ranks that are known before the pass order the rows (:class:`ChoiceByRank`).

    We infer two details, which the paper leaves open, from the numbers of operations that the paper states for I and
    II: *undecided* and *decided* leave out the class rows, and all strategies compute the wanted and the new tokens.
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
        size = self._size(step, known_count, required.shape[1])
        if size >= self.total:
            return None
        if self.selection in BY_SIMILARITY:
            return ChoiceBySimilarity(required, size, most_similar=self.selection == "most-similar")

        rank = self._rank(step)  # [B, N]
        return ChoiceByRank(required, size, rank.repeat(len(required) // len(rank), 1))

    def _size(self, step: int, known_count: int, required_count: int) -> int:
        """Number of rows to compute; ``required_count``: number of wanted and new tokens."""
        if self.selection == "decided":
            return known_count + required_count  # known + new + wanted
        if self.selection == "undecided":
            return self.canvas.cells - known_count  # new + wanted + others
        return max(required_count + self.spare, int(self.total * self.ratios[step]))

    def _rank(self, step: int) -> Tensor:
        """Ranks of the rows for *decided*, *undecided* and *random*, fp32 [B, N]."""
        if self.selection == "random":
            return self.random.uniform(step).view(-1, self.total)

        order = self.canvas.order.decision_order
        decided_count = self.canvas.order.count_before[step]
        if self.selection == "decided":
            return self._ranked_first(order[:, :decided_count])
        return self._ranked_first(order[:, decided_count:])

    def _ranked_first(self, tokens: Tensor) -> Tensor:
        """Ranks, fp32 [B, N], that put ``tokens``, int64 [B, n], before all other rows."""
        rank = torch.ones(len(tokens), self.total, device=tokens.device)
        return rank.scatter_(1, tokens + self.canvas.model.net.config.buffer, 0.0)


class ChoiceByRank(NamedTuple):
    """Chooses the rows that the decoder computes after the measuring block, by ranks that are known before the pass."""

    required: Tensor  # int64 [E, m], rows that the pass computes in any case
    size: int  # number of rows that the pass computes, including ``required``
    rank: Tensor  # fp32 [E, N]

    def __call__(self, values: Tensor, previous: Tensor) -> Tensor:
        """The rows to compute, int64 [E, size]; see :func:`lowest_ranked`. The arguments are those of
        :meth:`ChoiceBySimilarity.__call__`, and have no effect here.
        """
        return lowest_ranked(self.rank, self.required, self.size)


class ChoiceBySimilarity(NamedTuple):
    """Chooses the rows that the decoder computes after the measuring block, by equation (8)."""

    required: Tensor  # int64 [E, m], rows that the pass computes in any case
    size: int  # number of rows that the pass computes, including ``required``
    most_similar: bool  # whether to compute the most similar rows, or the least similar

    def __call__(self, values: Tensor, previous: Tensor) -> Tensor:
        """The rows to compute, int64 [E, size]; see :func:`lowest_ranked`.

        ``values``, ``previous``: the attention values V of the measuring block in this pass and in the previous pass,
        [E, heads, N, d].
        """
        # The similarities of unchanged rows differ only by rounding errors. These must not decide the order of the
        # rows, so round s more coarsely.
        s = (similarity(values, previous) * 2**17).round() / 2**17
        return lowest_ranked(-s if self.most_similar else s, self.required, self.size)


RowChoice: TypeAlias = ChoiceByRank | ChoiceBySimilarity


def lowest_ranked(rank: Tensor, required: Tensor, size: int) -> Tensor:
    """The rows in ``required``, int64 [E, m], and then the other rows of lowest ``rank``, fp32 [E, N]: int64 [E, size].
    If two rows have the same rank, the row with the lower index comes first.
    """
    others = rank.scatter(1, required, torch.inf).argsort(dim=1, stable=True)
    return torch.cat([required, others[:, : size - required.shape[1]]], dim=1)


def similarity(values: Tensor, previous: Tensor) -> Tensor:
    """s_i = cos(V_i of this pass, V_i of the previous pass), averaged over the attention heads, fp32 [E, N].

    ``values``, ``previous``: V of the two passes, [E, heads, N, d].
    """
    return F.cosine_similarity(values.float(), previous.float(), dim=-1).mean(dim=1)
