"""Which decoder rows LazyMAR (``lazymar.py``) computes behind the block that measures; equation (8) there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import to_device
from ..noise import CounterRNG, row_keys
from .canvas import MARCanvas
from .refresh import computed_ratios, spare_rows
from .settings import CacheSettings

# Selections that compute the tokens of one state, however many they are.
BY_STATE = ("undecided", "decided")


class RowChoice:
    """The choice of rows of a generation.

    The paper's Table 3 names its strategies by what is cached, the setting ``selection`` by what is computed:

    - *least-similar* (V), (8); *most-similar* (IV); *random* (III): as many rows as the share says;
    - *undecided* (II): the tokens that are not decided; *decided* (I): those that are.

    That *undecided* and *decided* leave class rows out is a guess from the operations that the paper states for I and
    II, and so is that all strategies compute the wanted and the new tokens.
    """

    def __init__(self, canvas: MARCanvas, settings: CacheSettings, block: int):
        """``block``: the one that measures, counted from 1."""
        c = canvas.model.net.config
        steps = canvas.order.steps
        self.canvas = canvas
        self.selection = settings.selection
        self.by_state = self.selection in BY_STATE

        # Of each AR step the share of rows that are computed. The last block saves nothing: it computes the wanted rows
        # only, in plain MAR too.
        self.share = [1.0] * steps
        if settings.token_cache and block < c.decoder_depth:
            self.share = [0.0] * steps if self.by_state else computed_ratios(settings, steps)
        self.spare = spare_rows(c.buffer + c.tokens)

        if self.selection == "random":
            keys = row_keys(canvas.noise, "selection", c.buffer + c.tokens)
            self.random = CounterRNG(to_device(keys.flatten(), canvas.device))

    def rows(self, step: int, known: int, values: Tensor, last: Tensor, must: Tensor) -> Tensor | None:
        """Rows to compute at an AR step, int64 [E, n]; None for all.

        Args:
            known: tokens that were decided before the last call.
            values, last: V of the block that measures, at this call and at the last one, [E, heads, N, d].
            must: rows of the needed tokens (in such a call the wanted ones), then of the new ones, int64 [E, m]. The
                result begins with them.
        """
        entries, _, total, _ = values.shape
        count = self._count(step, known, must.shape[1], total)
        if count >= total:
            return None

        if self.by_state:
            rank = self._rank_by_state(step)
        elif self.selection == "random":
            rank = self.random.uniform(step).view(-1, total)
        else:
            # Unchanged rows differ by rounding only, which must not order them.
            s = (similarity(values, last) * 2**17).round() / 2**17
            rank = s if self.selection == "least-similar" else -s
        rank = rank.repeat(entries // len(rank), 1)

        # Those of lowest rank; of equal rows the lower one comes first.
        others = rank.scatter(1, must, torch.inf).argsort(dim=1, stable=True)
        return torch.cat([must, others[:, : count - must.shape[1]]], dim=1)

    def _count(self, step: int, known: int, must: int, total: int) -> int:
        """How many of ``total`` rows are computed, of which ``must`` are of tokens that are wanted or new."""
        # All tokens are known + new + wanted + others, must = new + wanted, and a token of two sets counts once.
        if self.selection == "decided":
            return must + known  # decided (known + new) and must
        if self.selection == "undecided":
            return self.canvas.cells - known  # undecided (wanted + others) and must: all but known
        return max(must + self.spare, int(total * self.share[step]))

    def _rank_by_state(self, step: int) -> Tensor:
        """0 for the rows that *decided* or *undecided* compute, 1 for the others: fp32 [B, N]."""
        c = self.canvas.model.net.config
        order = self.canvas.order
        start = order.starts[step]
        tokens = order.reveal[:, :start] if self.selection == "decided" else order.reveal[:, start:]

        rank = torch.ones(self.canvas.images, c.buffer + c.tokens, device=tokens.device)
        return rank.scatter_(1, tokens + c.buffer, 0.0)


def similarity(values: Tensor, last: Tensor) -> Tensor:
    """s_i = cos(V_i of this call, V_i of the last one), mean of the heads, [B, N]; V are [B, heads, N, d]."""
    return F.cosine_similarity(values.float(), last.float(), dim=-1).mean(dim=1)
