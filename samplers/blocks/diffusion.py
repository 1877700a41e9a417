"""The diffusion of a block: a stochastic differential equation that leads from noise (t = 0) to the tokens (t = 1).

Source: "BitDance" (arXiv 2602.14041) and its published code. At time t, the state is x_t = (1 - t) e + t x. Here x is
the vector of the tokens, and e is noise. The diffusion head predicts x from x_t. The Euler-Maruyama method solves the
equation. A step of this method is linear in x_t, the prediction and the noise, so it can be written as a
:class:`.DiffusionStep`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from ..diffusion_steps import DiffusionStep, HeadCalls

# Time t of the last call of the head. The prediction of this call is the result.
LAST_TIME = 0.95
# Where 1 - t is smaller than this number, a division by 1 - t divides by this number instead.
SMALLEST_DIVISOR = 0.05


@lru_cache(maxsize=256)
def head_calls(count: int, time_shift: float = 1.0) -> HeadCalls:
    """The calls of the head for ``count`` steps of Euler-Maruyama: one call before each step, and a last call. After
    the last call, an additional step replaces the state by the head's prediction.

    ``time_shift``: k. Each time t is moved to t / (t + k (1 - t)). If k is above 1, more steps are near the noise.
    """
    shifted = []
    for i in range(count + 1):
        t = LAST_TIME * i / count
        shifted.append(t / (t + time_shift * (1 - t)))

    steps = []
    for t, after in pairwise(shifted):
        dt = after - t
        # The velocity is v = (prediction - x) / (1 - t), and the score is (t v - x) / (1 - t). So the drift is
        # (1 + t) v - x, or pull (prediction - x) - x.
        pull = (1 + t) / max(1 - t, SMALLEST_DIVISOR)
        std = math.sqrt(2 * (1 - t) * dt)
        steps.append(euler_maruyama(x_coefficient=1 - dt * (pull + 1), data_coefficient=dt * pull, std=std))
    steps.append(euler_maruyama(x_coefficient=0.0, data_coefficient=1.0, std=0.0))

    # The last call of the head is at the unshifted time, as in the published code.
    return HeadCalls(times=(*shifted[:-1], LAST_TIME), steps=tuple(steps))


def euler_maruyama(x_coefficient: float, data_coefficient: float, std: float) -> DiffusionStep:
    """A step from x to x_coefficient x + data_coefficient prediction + std noise. The prediction is the data itself."""
    log_std = math.log(std) if std else -math.inf
    return DiffusionStep(
        data_x=0.0,
        data_per_prediction=1.0,
        x_coefficient=x_coefficient,
        data_coefficient=data_coefficient,
        log_std_middle=log_std,
        log_std_per_logit=0.0,
    )
