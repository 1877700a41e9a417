"""The diffusion of a block: a stochastic differential equation from noise (t = 0) to the tokens (t = 1).

Source: "BitDance" (arXiv 2602.14041) and its published code. At time t, the state is x_t = (1 - t) e + t x, where x are
the tokens and e is noise. The head predicts x from x_t. A step of the Euler-Maruyama method is linear in x_t, the
prediction and the noise, so it is a step of ``chain.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..chain import DiffusionStep

# Time of the last evaluation, whose prediction is the result.
LAST = 0.95
# Smallest divisor where a number is divided by 1 - t.
FLOOR = 0.05
# How many values of the head's modulations are computed at once; a single evaluation may need more.
BUDGET = 1 << 27


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of N steps of Euler-Maruyama."""

    times: tuple[float, ...]  # t of the N + 1 evaluations
    steps: tuple[DiffusionStep, ...]  # N + 1 steps; the last one takes the prediction


@lru_cache(maxsize=256)
def evaluations(count: int, time_shift: float = 1.0) -> Evaluations:
    """The evaluations of ``count`` steps. A ``time_shift`` k moves each time t to t / (t + k (1 - t)); 1 keeps t."""
    shifted = []
    for i in range(count + 1):
        t = LAST * i / count
        shifted.append(t / (t + time_shift * (1 - t)))

    steps = []
    for t, after in pairwise(shifted):
        dt = after - t
        # Velocity v = (prediction - x) / (1 - t), score (t v - x) / (1 - t): the drift is (1 + t) v - x, which is
        # pull (prediction - x) - x.
        pull = (1 + t) / max(1 - t, FLOOR)
        std = math.sqrt(2 * (1 - t) * dt)
        steps.append(euler_maruyama(x_coefficient=1 - dt * (pull + 1), data_coefficient=dt * pull, std=std))
    steps.append(euler_maruyama(x_coefficient=0.0, data_coefficient=1.0, std=0.0))

    # The last evaluation is at the unshifted time, as in the published code.
    return Evaluations(times=(*shifted[:-1], LAST), steps=tuple(steps))


def euler_maruyama(x_coefficient: float, data_coefficient: float, std: float) -> DiffusionStep:
    """A step from x to x_coefficient x + data_coefficient prediction + std noise. The head predicts the data."""
    log_std = math.log(std) if std else -math.inf
    return DiffusionStep(
        data_x=0.0,
        data_out=1.0,
        x_coefficient=x_coefficient,
        data_coefficient=data_coefficient,
        middle=log_std,
        slope=0.0,
    )
