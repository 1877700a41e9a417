"""MAR's diffusion head, as the samplers evaluate it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...model_loaders.networks.mar import BUDGET, MAR
from ...reports.record import Report
from ..chain import Chains, Head, run_chain
from ..noise import CounterRNG
from ..speculation import Speculation


class Heads:
    """How the diffusion head is evaluated: in full, or in part (LazyMAR)."""

    def whole(self, steps: int) -> bool:
        """Whether the head is evaluated in full at every one of so many diffusion steps."""
        return True

    def head(self, net: MAR, rows: Chains, report: Report) -> Callable[[int, Tensor], Tensor]:
        """The head for rows, see :func:`..chain.run_chain`."""
        return full_head(net, rows, report)

    def sample(self, net: MAR, rows: Chains, report: Report) -> Tensor:
        """The tokens of rows, fp32 [N, channels]."""
        x = rows.x
        if len(rows.table):
            for done in run_chain(net, rows, self.head(net, rows, report)):
                x = done.x
        return x


def full_head(net: MAR, rows: Chains, report: Report) -> Head:
    """The head in full."""
    return Head(net, net.head, rows, report, BUDGET)


def speculation_of(net: MAR, rows: Chains, rng: CounterRNG, report: Report) -> Speculation:
    """Chains before their first step, for speculation."""
    return Speculation(net, full_head(net, rows, report), rows, rng, report)
