"""MAR's diffusion head, as the samplers evaluate it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...model_loaders.networks.mar import BUDGET, MAR
from ...reports.record import Report
from ..chain import ChainHead, Chains, Head, StepTable, run_chain
from ..noise import CounterRNG
from ..speculation import Speculation


class Heads:
    """How the diffusion head is evaluated: in full, or in part (LazyMAR)."""

    def whole(self, steps: int) -> bool:
        """Whether the head is evaluated in full at every one of so many diffusion steps."""
        return True

    def head(self, net: MAR, rows: Chains, report: Report) -> ChainHead:
        """The head for rows, see :func:`..chain.run_chain`."""
        return full_head(net, rows, report)

    def sample(self, net: MAR, rows: Chains, report: Report) -> Tensor:
        """The tokens of rows, fp32 [N, channels]; without a row or a step the head is not called."""
        x = rows.x
        if len(rows.x) and len(rows.table):
            for advanced in run_chain(net, rows, self.head(net, rows, report)):
                x = advanced.x
        return x

    def sample_both(
        self, net: MAR, one: Chains, other: Chains, report: Report, join: Callable[[Chains, Chains], Chains]
    ) -> tuple[Tensor, Tensor]:
        """The tokens of two batches of rows, fp32 [N, channels] each, in one loop.

        The longer one starts alone, and the other joins it for the last steps, so that the sequential head calls are
        those of the longer one. With 5 steps of ``one`` and 3 of ``other``::

            head call     0  1  2  3  4
            step of one   0  1  2  3  4
            step of other       0  1  2

        A cache of the head belongs to one diffusion: with one they run after each other.

        ``join`` makes one batch of those last steps: :func:`joined`, or one that also joins what a sampler makes of the
        means.
        """
        together = min(len(one.table), len(other.table)) if len(one.x) and len(other.x) else 0
        if not together or not (self.whole(len(one.table)) and self.whole(len(other.table))):
            return self.sample(net, one, report), self.sample(net, other, report)

        # 1. The first steps of the longer one, alone.
        alone = []
        for rows in (one, other):
            first = len(rows.table) - together
            x = self.sample(net, rows.part(0, first), report)
            alone.append(replace(rows.part(first, len(rows.table)), x=x))

        # 2. The steps of both.
        x = self.sample(net, join(*alone), report)
        return x[: len(one.x)], x[len(one.x) :]


def joined(one: Chains, other: Chains) -> Chains:
    """The rows of both as one batch, of equally many steps that are each row's own; changes of the means are left
    out.
    """
    parts = (one, other)
    columns = [rows.table.numbers[:, :, None, None].expand(-1, -1, len(rows.x), -1) for rows in parts]
    times = [rows.table.times[:, None].expand(-1, len(rows.x), -1) for rows in parts]

    return Chains(
        z=torch.cat([rows.z for rows in parts], 1),
        cfg=torch.cat([rows.cfg for rows in parts]),
        x=torch.cat([rows.x for rows in parts]),
        noise=torch.cat([rows.noise for rows in parts], 1),
        table=StepTable(torch.cat(columns, 2), torch.cat(times, 1), one.table.learned),
        temperature=one.temperature,
    )


def full_head(net: MAR, rows: Chains, report: Report) -> Head:
    """The head in full."""
    return Head(net, net.head, rows, report, BUDGET)


def speculation_of(net: MAR, rows: Chains, rng: CounterRNG, report: Report) -> Speculation:
    """Chains before their first step, for speculation."""
    return Speculation(net, full_head(net, rows, report), rows, rng, report)
