"""LazyMAR's token cache: which rows of the decoder a pass between two refreshes computes.

Source: Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), section 3.2.1, equation (8) and Table 3. ``__init__.py`` explains
the terms.

Shapes: B images, L tokens, N rows of the decoder: first the ``buffer`` class rows, then the L tokens. A batch has E
entries: the B images, or each image twice if a pass computes both branches of guidance.
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
        previous pass   |<------- always computed ---->|
        |<-------- decided ------------>|<-------- undecided -------->|

    Table 3 of the paper names each strategy after the tokens that are cached. The setting ``selection`` names a
    strategy after the tokens that a pass computes in addition to the new and the wanted tokens:

    - *least-similar* (V in Table 3; equation (8)), *most-similar* (IV), *random* (III): enough rows to reach the share
      of :func:`computed_ratios`, but at least :func:`spare_rows` additional rows;
    - *undecided* (II): the tokens called "others" above;
    - *decided* (I): the tokens called "known" above.

    We infer two details, which the paper leaves open, from the numbers of operations that the paper states for I and
    II: *undecided* and *decided* leave out the class rows, and all strategies compute the wanted and the new tokens.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        c = canvas.model.net.config
        steps = canvas.order.steps
        self.total = c.buffer + c.tokens  # rows of the decoder
        self.canvas = canvas
        self.selection = settings.selection
        self.block = measuring_block(c.decoder_depth) - 1  # index of the measuring block, from 0

        # The share of rows to compute at each AR step. The share stays 1 if the measuring block is the decoder's last
        # block, because even without caches the last block computes only the wanted rows. For the strategies BY_STATE,
        # a share of 0 only says that passes leave out rows.
        self.share = [1.0] * steps
        if settings.token_cache and self.block + 1 < c.decoder_depth:
            self.share = [0.0] * steps if self.selection in BY_STATE else computed_ratios(settings, steps)
        self.spare = spare_rows(self.total)

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
        order = self.canvas.order.decision_order
        start = self.canvas.order.count_before[step]

        rank = None  # for least-similar and most-similar, RowChoice ranks the rows by similarity
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
    """Chooses the rows that the decoder computes after the measuring block: ``required``, and the rows of lowest rank.

    With ranks by similarity, this is equation (8).
    """

    required: Tensor  # int64 [E, m], rows that the pass computes in any case
    size: int  # number of rows that the pass computes, including ``required``
    rank: Tensor | None  # fp32 [E, N]. None: rank the rows by similarity
    most_similar: bool  # if rank is None: whether to compute the most similar rows, or the least similar

    def __call__(self, values: Tensor, previous: Tensor) -> Tensor:
        """The rows to compute, int64 [E, size]. The rows in ``required`` come first.

        ``values``, ``previous``: the attention values V of the measuring block in this pass and in the previous pass,
        [E, heads, N, d].
        """
        rank = self.rank
        if rank is None:
            # The similarities of unchanged rows differ only by rounding errors. These must not decide the order of the
            # rows, so round s more coarsely.
            s = (similarity(values, previous) * 2**17).round() / 2**17
            rank = -s if self.most_similar else s

        # The rows of lowest rank. If two rows have the same rank, the row with the lower index comes first.
        others = rank.scatter(1, self.required, torch.inf).argsort(dim=1, stable=True)
        return torch.cat([self.required, others[:, : self.size - self.required.shape[1]]], dim=1)


def similarity(values: Tensor, previous: Tensor) -> Tensor:
    """s_i = cos(V_i of this pass, V_i of the previous pass), averaged over the attention heads, fp32 [E, N].

    ``values``, ``previous``: V of the two passes, [E, heads, N, d].
    """
    return F.cosine_similarity(values.float(), previous.float(), dim=-1).mean(dim=1)
