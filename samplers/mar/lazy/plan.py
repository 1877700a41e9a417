"""When LazyMAR computes everything, which rows it computes in between, and which block measures how they changed.

Source: Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), and its published code, called the reference here. Shapes as in
``transformer.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.ops import to_device
from ...noise import CounterRNG, row_keys
from ..canvas import MARCanvas
from ..settings import CacheSettings

# Share of computed decoder rows at AR steps 0..63, whatever their number is. The reference goes no further.
PUBLISHED_RATIOS = (*(1.0,) * 20, 0.6, *(0.5,) * 4, *(0.4,) * 5, *(0.15,) * 5, *(0.12,) * 5, *(0.05,) * 24)

# Selections that compute the tokens of one state, however many they are.
BY_STATE = ("undecided", "decided")


class Plan:
    """The refreshes of a generation, and the rows of the passes between them.

    At an AR step the tokens of an image, in the order in which they are decided, are::

        |<--- known --->|<---- new ---->|<-- wanted -->|<-- others -->|
        before the last    since then       now            later
        pass            |<------- always computed ---->|
        |<-------- decided ------------>|<-------- undecided -------->|

    The paper's Table 3 names its strategies by what is cached, the setting ``selection`` by what is computed beside the
    new and the wanted tokens:

    - *least-similar* (V), (8); *most-similar* (IV); *random* (III): a number of rows that the share gives;
    - *undecided* (II): the others; *decided* (I): the known ones.

    That *undecided* and *decided* leave class rows out is a guess from the operations that the paper states for I and
    II, and so is that all strategies compute the wanted and the new tokens.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings):
        c = canvas.model.net.config
        steps = canvas.order.steps
        block = usual_block(c.decoder_depth)
        self.canvas = canvas
        self.selection = settings.selection
        self.next_refresh = next_refreshes(settings, steps)  # of each AR step
        self.block = block - 1  # from 0; ``block`` counts from 1

        # Of each AR step the share of rows that are computed. The last block saves nothing: it computes the wanted rows
        # only, in plain MAR too.
        self.share = [1.0] * steps
        if settings.token_cache and block < c.decoder_depth:
            self.share = [0.0] * steps if self.selection in BY_STATE else computed_ratios(settings, steps)
        self.spare = spare_rows(c.buffer + c.tokens)

        if self.selection == "random":
            keys = row_keys(canvas.noise, "selection", c.buffer + c.tokens)
            self.random = CounterRNG(to_device(keys.flatten(), canvas.device))

    def refreshes(self, step: int) -> bool:
        """Whether a later AR step may use what a refresh at ``step`` keeps."""
        return self.next_refresh[step] > step + 1

    def prunes(self, step: int) -> bool:
        """Whether one of these AR steps leaves rows out."""
        return any(share < 1 for share in self.share[step + 1 : self.next_refresh[step]])

    def rows(self, step: int, known: int, must: Tensor) -> RowChoice | None:
        """The rows to compute at an AR step; None for all.

        Args:
            known: tokens that were decided before the last pass.
            must: rows of the wanted, then of the new tokens, int64 [E, m].
        """
        canvas = self.canvas
        c = canvas.model.net.config
        total = c.buffer + c.tokens
        start = canvas.order.starts[step]
        rank = None

        if self.selection == "decided":
            count = must.shape[1] + known  # known + new + wanted
            rank = self._first(canvas.order.decision_order[:, :start])
        elif self.selection == "undecided":
            count = canvas.cells - known  # new + wanted + others
            rank = self._first(canvas.order.decision_order[:, start:])
        else:
            count = max(must.shape[1] + self.spare, int(total * self.share[step]))

        if count >= total:
            return None
        if self.selection == "random":
            rank = self.random.uniform(step).view(-1, total)
        if rank is not None:
            rank = rank.repeat(len(must) // len(rank), 1)
        return RowChoice(must, count, rank, self.selection == "most-similar")

    def _first(self, tokens: Tensor) -> Tensor:
        """Ranks fp32 [B, N] that put tokens int64 [B, n] before all other rows."""
        c = self.canvas.model.net.config
        rank = torch.ones(len(tokens), c.buffer + c.tokens, device=tokens.device)
        return rank.scatter_(1, tokens + c.buffer, 0.0)


class RowChoice(NamedTuple):
    """The decoder rows that a pass computes after the block that measures: equation (8)."""

    must: Tensor  # int64 [E, m], the rows that it computes in any case
    size: int  # number of rows that it computes in all
    rank: Tensor | None  # fp32 [E, N]: rows of low rank come next; None: the least similar ones
    most_similar: bool  # if ``rank`` is None, the most similar ones instead

    def __call__(self, values: Tensor, last: Tensor) -> Tensor:
        """The rows, int64 [E, size], which begin with ``must``.

        ``values``, ``last``: V of the block that measures, in this pass and in the last one, [E, heads, N, d].
        """
        rank = self.rank
        if rank is None:
            # Unchanged rows differ by rounding only, which must not order them.
            s = (similarity(values, last) * 2**17).round() / 2**17
            rank = -s if self.most_similar else s

        # The rows of lowest rank; of equal rows the lower one comes first.
        others = rank.scatter(1, self.must, torch.inf).argsort(dim=1, stable=True)
        return torch.cat([self.must, others[:, : self.size - self.must.shape[1]]], dim=1)


def similarity(values: Tensor, last: Tensor) -> Tensor:
    """s_i = cos(V_i of this pass, V_i of the last one), mean of the heads, [E, N]; V are [E, heads, N, d]."""
    return F.cosine_similarity(values.float(), last.float(), dim=-1).mean(dim=1)


def spare_rows(rows: int) -> int:
    """Extra decoder rows that are always computed, of ``rows`` in all: 15 of 320, as in the reference."""
    return max(1, round(rows * 15 / 320))


def next_refreshes(settings: CacheSettings, steps: int) -> list[int]:
    """For each of ``steps`` AR steps, the AR step of the next refresh after it, or ``steps``.

    The first ``start_step`` steps, and from there on every ``refresh_period``-th, are refreshes. A call that skips AR
    steps does not skip a refresh.
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
    """The block whose values tell how much a row changed, from 1, in a decoder of ``depth`` blocks.

    The reference's is the 4th, for every MAR. Three blocks precede it: a quarter of the smallest MAR's decoder.
    """
    return min(3, depth // 4) + 1


def computed_ratios(settings: CacheSettings, steps: int) -> list[float]:
    """Share of decoder rows to compute at each of ``steps`` AR steps between two refreshes, ``computed_ratio`` to 1.

    - *published*: the reference's table by AR step, unchanged at computed_ratio 0.05; after its end the last share.
    - *stretched*: the same table over the progress of the image, so with 64 AR steps the same shares.
    - *constant*: computed_ratio, as in the paper's Figure 6.
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

        # From the table's shares 0.05..1 to lowest..1. Rounded: the row count is floored, and 0.15 must not become
        # 0.1499...
        out.append(round(1 - (1 - lowest) * (1 - ratio) / (1 - PUBLISHED_RATIOS[-1]), 9))
    return out
