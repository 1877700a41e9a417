"""The schedule of LazyMAR: when it computes everything (a refresh), which rows it computes between two refreshes, and
which block measures how much the rows changed.

Source: Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), and its published code, called the reference here. Shapes as in
``transformer.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.torch_state import to_device
from ...noise import CounterRNG, row_keys
from ..canvas import MARCanvas
from ..settings import CacheSettings

# Share of decoder rows that are computed at AR steps 0 to 63. The table does not depend on the number of AR steps, and
# the reference has no entry after step 63.
PUBLISHED_RATIOS = (*(1.0,) * 20, 0.6, *(0.5,) * 4, *(0.4,) * 5, *(0.15,) * 5, *(0.12,) * 5, *(0.05,) * 24)

# Selections that compute the tokens of one state, however many they are.
BY_STATE = ("undecided", "decided")


class Plan:
    """The AR steps that compute everything (refreshes), and the rows that the passes between two refreshes compute.

    At an AR step the tokens of an image, in the order in which they are decided, are::

        |<--- known --->|<---- new ---->|<-- wanted -->|<-- others -->|
        before the         since then       now            later
        previous pass   |<------- always computed ---->|
        |<-------- decided ------------>|<-------- undecided -------->|

    Table 3 of the paper names each strategy after the tokens that are cached. The setting ``selection`` names it after
    the tokens that are computed in addition to the new and the wanted ones:

    - *least-similar* (V in Table 3; equation (8)), *most-similar* (IV), *random* (III): as many rows as the shares of
      :func:`computed_ratios` allow;
    - *undecided* (II): the others;
    - *decided* (I): the known ones.

    The paper does not say two things, which we infer from the numbers of operations that it states for I and II:
    *undecided* and *decided* leave out the class rows, and all strategies compute the wanted and the new tokens.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        c = canvas.model.net.config
        steps = canvas.order.steps
        block = usual_block(c.decoder_depth)
        self.total = c.buffer + c.tokens  # rows of the decoder
        self.canvas = canvas
        self.selection = settings.selection
        self.next_refresh = next_refreshes(settings, steps)  # of each AR step
        self.block = block - 1  # from 0; ``block`` counts from 1

        # Share of rows that are computed at each AR step. Skipping rows in the decoder's last block would save nothing,
        # because even without caches it computes only the wanted rows.
        self.share = [1.0] * steps
        if settings.token_cache and block < c.decoder_depth:
            self.share = [0.0] * steps if self.selection in BY_STATE else computed_ratios(settings, steps)
        self.spare = spare_rows(self.total)

        if self.selection == "random":
            keys = row_keys(canvas.noise, "selection", self.total)
            self.random = CounterRNG(to_device(keys.flatten(), canvas.device))

    def refreshes(self, step: int) -> bool:
        """Whether a later AR step may use what a refresh at ``step`` keeps."""
        return self.next_refresh[step] > step + 1

    def prunes(self, step: int) -> bool:
        """Whether any AR step between the refresh at ``step`` and the next refresh leaves rows out."""
        return any(share < 1 for share in self.share[step + 1 : self.next_refresh[step]])

    def rows(self, step: int, known: int, must: Tensor) -> RowChoice | None:
        """The rows to compute at an AR step; None for all.

        Args:
            known: number of tokens that were decided before the previous pass.
            must: rows of the wanted tokens, then of the new ones, int64 [E, m].
        """
        order = self.canvas.order.decision_order
        start = self.canvas.order.starts[step]

        rank = None  # by similarity
        if self.selection == "decided":
            size = known + must.shape[1]  # known + new + wanted
            rank = self._first(order[:, :start])
        elif self.selection == "undecided":
            size = self.canvas.cells - known  # new + wanted + others
            rank = self._first(order[:, start:])
        else:
            size = max(must.shape[1] + self.spare, int(self.total * self.share[step]))
            if self.selection == "random":
                rank = self.random.uniform(step).view(-1, self.total)

        if size >= self.total:
            return None
        if rank is not None:
            rank = rank.repeat(len(must) // len(rank), 1)
        return RowChoice(must, size, rank, self.selection == "most-similar")

    def _first(self, tokens: Tensor) -> Tensor:
        """Ranks, fp32 [B, N], that put the given tokens (int64 [B, n]) before all other rows."""
        rank = torch.ones(len(tokens), self.total, device=tokens.device)
        return rank.scatter_(1, tokens + self.canvas.model.net.config.buffer, 0.0)


class RowChoice(NamedTuple):
    """The decoder rows that a pass computes after the measuring block (see :func:`usual_block`), by equation (8)."""

    must: Tensor  # int64 [E, m], the rows that it computes in any case
    size: int  # number of rows that it computes in all
    rank: Tensor | None  # fp32 [E, N]: rows of low rank come next; None: the least similar rows come next
    most_similar: bool  # if ``rank`` is None: the most similar rows come next instead

    def __call__(self, values: Tensor, previous: Tensor) -> Tensor:
        """The rows, int64 [E, size], which begin with ``must``.

        ``values``, ``previous``: V of the measuring block in this pass and in the previous one, [E, heads, N, d].
        """
        rank = self.rank
        if rank is None:
            # Rounded, because unchanged rows differ by rounding errors, which must not influence their order.
            s = (similarity(values, previous) * 2**17).round() / 2**17
            rank = -s if self.most_similar else s

        # The rows of lowest rank. Among rows of equal rank, the one with the lower index comes first.
        others = rank.scatter(1, self.must, torch.inf).argsort(dim=1, stable=True)
        return torch.cat([self.must, others[:, : self.size - self.must.shape[1]]], dim=1)


def similarity(values: Tensor, previous: Tensor) -> Tensor:
    """s_i = cos(V_i of this pass, V_i of the previous pass), averaged over the heads: [E, N].

    Both V have the shape [E, heads, N, d].
    """
    return F.cosine_similarity(values.float(), previous.float(), dim=-1).mean(dim=1)


def spare_rows(rows: int) -> int:
    """Number of extra decoder rows that are always computed, for a decoder of ``rows`` rows. The ratio is the
    reference's, 15 of 320.
    """
    return max(1, round(rows * 15 / 320))


def next_refreshes(settings: CacheSettings, steps: int) -> list[int]:
    """For each of ``steps`` AR steps, the AR step of the next refresh after it, or ``steps``.

    The first ``start_step`` steps, and from there on every ``refresh_period``-th, are refreshes. If a pass skips the AR
    step of a refresh, the pass itself becomes the refresh.
    """
    period = settings.refresh_period
    start = settings.start_step
    out = []
    for k in range(steps):
        if k < start:
            out.append(k + 1)
        else:
            periods = (k - start) // period + 1
            out.append(min(start + periods * period, steps))
    return out


def usual_block(depth: int) -> int:
    """Number of the measuring block, whose values tell how much a row changed, in a decoder of ``depth`` blocks. It is
    counted from 1.

    The reference uses the 4th block for every MAR. The three blocks before it are a quarter of the smallest MAR's
    decoder; smaller decoders keep this quarter.
    """
    return min(3, depth // 4) + 1


def computed_ratios(settings: CacheSettings, steps: int) -> list[float]:
    """Share of decoder rows to compute at each of ``steps`` AR steps if it is not a refresh. Shares lie between
    ``computed_ratio`` and 1.

    - *published*: the reference's table, indexed by AR step. At computed_ratio 0.05 its values are unchanged. After its
      end, the last share applies.
    - *stretched*: the same table, stretched over all AR steps. With 64 AR steps, it equals *published*.
    - *constant*: computed_ratio at all AR steps, as in the paper's Figure 6.
    """
    lowest = settings.computed_ratio
    if settings.ratio_schedule == "constant":
        return [lowest] * steps

    last = len(PUBLISHED_RATIOS) - 1
    out = []
    for k in range(steps):
        at = k * len(PUBLISHED_RATIOS) / steps if settings.ratio_schedule == "stretched" else k
        low = min(int(at), last)
        high = min(low + 1, last)
        ratio = PUBLISHED_RATIOS[low] + (at - low) * (PUBLISHED_RATIOS[high] - PUBLISHED_RATIOS[low])

        # Map the table's shares, 0.05 to 1, onto the range from ``lowest`` to 1. Rounded, because the number of rows is
        # floored, and 0.15 must not become 0.1499...
        out.append(round(1 - (1 - lowest) * (1 - ratio) / (1 - PUBLISHED_RATIOS[-1]), 9))
    return out
