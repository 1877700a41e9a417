"""The diffusion of a block: a stochastic differential equation from noise (t = 0) to the tokens (t = 1).

Source: "BitDance" (arXiv 2602.14041) and its published code. With x_t = (1 - t) e + t x, the head predicts x from x_t.
A step of the Euler-Maruyama method is linear in x_t, the prediction and the noise; its numbers are in :class:`Table`.
All states are fp32, whatever the dtype of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...model_loaders.networks.bitdance import BlockNetwork

# Time of the last evaluation, behind which the prediction itself is taken. It is also the floor of 1 - t.
LAST = 0.95
FLOOR = 0.05
# Modulations of the head that are computed at once, in numbers; those of one evaluation may be more.
BUDGET = 1 << 27


@dataclass(frozen=True)
class Table:
    """The evaluations of N steps."""

    times: tuple[float, ...]  # t of the N + 1 evaluations
    # Of each step (a, b, s): x becomes a x + b prediction + s noise.
    steps: tuple[tuple[float, float, float], ...]


@lru_cache(maxsize=256)
def table(count: int, time_shift: float = 1.0) -> Table:
    """The table of ``count`` steps. A ``time_shift`` k moves every time t to t / (t + k (1 - t)); 1 moves none."""
    shifted = []
    for i in range(count + 1):
        t = LAST * i / count
        shifted.append(t / (t + time_shift * (1 - t)))

    steps = []
    for t, after in zip(shifted[:-1], shifted[1:], strict=True):
        dt = after - t
        # Velocity v = (prediction - x) / (1 - t), score (t v - x) / (1 - t): the drift is (1 + t) v - x.
        share = (1 + t) / max(1 - t, FLOOR)
        steps.append((1 - dt * (share + 1), dt * share, math.sqrt(2 * (1 - t) * dt)))

    # The last evaluation is at the unshifted time, as in the published code.
    return Table(times=(*shifted[:-1], LAST), steps=tuple(steps))


class Denoiser:
    """The diffusion head for the conditions of one block: ``prediction = denoiser(k, x)`` at evaluation k.

    It counts its calls, and the tokens that they computed.
    """

    def __init__(self, net: BlockNetwork, conditions: Tensor, of_times: Tensor):
        """``conditions``: rows [R, P, D]; ``of_times``: embeddings [N + 1, W] of the times of all evaluations."""
        self.net = net
        self.calls = 0
        self.tokens = 0
        head = self._head = net.denoiser
        self._evaluate = net.region(type(head).denoise, "diffusion head")
        self._condition = head.conditions(conditions)
        self._times = of_times[:, None, None]

        # The modulations of many evaluations are one product, which reads the weights once.
        rows, block = self._condition.shape[:2]
        self._states_at_once = max(1, BUDGET // (block * head.modulation_numbers))
        self._at_once = max(1, self._states_at_once // rows)
        self._modulations: list[tuple[Tensor, ...]] = []

    def __call__(self, k: int, x: Tensor) -> Tensor:
        """Predicted tokens fp32 [R, P, C] of states x fp32 [R, P, C]; k is 0, then one more at every call."""
        place = k % self._at_once
        if place == 0:
            embedding = self._times[k : k + self._at_once] + self._condition
            self._modulations = list(zip(*self._head.modulations(embedding), strict=True))
        return self._evaluated(x, self._modulations[place])

    def at(self, row: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """Predicted tokens fp32 [M, P, C] of M states x fp32 [M, P, C], with a call for as many as fit :data:`BUDGET`.

        The states are of rows ``row`` of the conditions at evaluations ``k``, int64 [M] each on the device.
        """
        most = self._states_at_once
        predictions = []
        for some, evaluation, state in zip(row.split(most), k.split(most), x.split(most), strict=True):
            embedding = self._times[evaluation, 0] + self._condition[some]
            predictions.append(self._evaluated(state, self._head.modulations(embedding)))

        return torch.cat(predictions)

    def _evaluated(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """One call of the head."""
        self.calls += 1
        self.tokens += x.shape[0] * x.shape[1]
        return self._evaluate(self._head, x, modulations)


def guided(predictions: Tensor, cfg: float, branches: int) -> Tensor:
    """Predictions [M, P, C] with guidance, from those of all branches [branches M, P, C], the null ones last."""
    if branches == 1:
        return predictions

    conditional, null = predictions.chunk(2)
    return null + cfg * (conditional - null)


@dataclass(frozen=True, eq=False)
class Known:
    """Tokens of a block that are given."""

    tokens: Tensor  # fp32 [B, P, C]
    again: Tensor  # bool [B, P, 1]: the tokens that are not given

    def follow(self, x: Tensor, start: Tensor, t: Tensor | float) -> Tensor:
        """States x [B, P, C] at times t, in which given tokens follow their own path (1 - t) start + t token."""
        return torch.where(self.again, x, (1 - t) * start + t * self.tokens)


def diffuse(
    denoiser: Denoiser,
    steps: Table,
    start: Tensor,
    noise: Tensor,
    cfg: float,
    branches: int,
    known: Known | None = None,
) -> Iterator[Tensor]:
    """Denoise the tokens of a block. Yields the prediction fp32 [B, P, C] after every evaluation; the last one counts.

    Args:
        denoiser: the head, with conditions of ``branches`` B rows, the null ones last.
        steps: the times and numbers.
        start: noise fp32 [B, P, C].
        noise: of the steps, fp32 [T, B, P, C] with T >= N. Step k of N steps takes entry k T // N, so that images of
            fewer steps stay comparable.
        cfg: guidance scale; of no meaning with one branch.
        branches: 2 with guidance: both branches get the same states in one evaluation.
        known: given tokens, which have the state (1 - t) start + t token at every evaluation.
    """
    count = len(steps.steps)
    x = start
    for k, t in enumerate(steps.times):
        if known is not None:
            x = known.follow(x, start, t)

        prediction = guided(denoiser(k, torch.cat([x] * branches)), cfg, branches)
        if k < count:
            a, b, s = steps.steps[k]
            x = a * x + b * prediction + s * noise[k * len(noise) // count]

        yield prediction
