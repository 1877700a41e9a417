"""LazyMAR's token cache: which rows of the decoder a pass between two refreshes computes.

Source: Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), section 3.2.1, equation (8) and Table 3. ``__init__.py`` explains
the terms.

Shapes: B images, L tokens, N rows of the decoder: first the ``buffer`` class rows, then the L tokens. The decoder's
batch has E entries: the B images, or each image twice if a pass computes both branches of guidance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.torch_state import to_device
from ...noise import CounterRNG, row_keys
from ..canvas import MARCanvas
from .schedule import BY_STATE, computed_ratios, measuring_block, spare_rows
from .settings import CacheSettings


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
    most_similar: bool  # by similarity: whether the most similar rows have the lowest ranks, or the least similar

    def __call__(self, values: Tensor, previous: Tensor) -> Tensor:
        """The rows to compute, int64 [E, size]; see :func:`lowest_ranked`.

        ``values``, ``previous``: the attention values V of the measuring block in this pass and in the previous pass,
        [E, heads, N, d].
        """
        if self.known_rank is not None:
            return lowest_ranked(self.known_rank, self.required, self.size)

        # The similarities of unchanged rows differ only by rounding errors. These must not decide the order of the
        # rows, so round s more coarsely.
        s = (similarity(values, previous) * 2**17).round() / 2**17
        rank = -s if self.most_similar else s  # equation (8) takes the least similar rows
        return lowest_ranked(rank, self.required, self.size)


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
