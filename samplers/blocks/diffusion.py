"""The diffusion of a block: a stochastic differential equation that leads from noise (t = 0) to the tokens (t = 1).

Source: "BitDance" (arXiv 2602.14041) and its published code. At time t, the state is x_t = (1 - t) e + t x. Here x is
the vector of the tokens, and e is noise. The diffusion head predicts x from x_t. The equation is

    dx_t = (v + (g^2 / 2) s) dt + g dW    with g^2 = 2 (1 - t)

Here v = (x - x_t) / (1 - t) is the velocity, s = (t v - x_t) / (1 - t) is the score, and dW is noise. So the drift is
v + (1 - t) s = (1 + t) v - x_t. The Euler-Maruyama method solves the equation. Its steps are linear in x_t, the
prediction and the noise, so they can be written as :class:`.DiffusionStep`.

For S steps of this method, the head is called S + 1 times. u is the time after the shift (:func:`head_calls`):

==========  ================================  ==========================================================================
call        time t of the call                step after the call
==========  ================================  ==========================================================================
i below S   u(i LAST_TIME / S)                Euler-Maruyama from there to u((i + 1) LAST_TIME / S)
S (last)    LAST_TIME, without the shift, as  replaces the state by the prediction
            in the published code
==========  ================================  ==========================================================================
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from ..diffusion_steps import DiffusionStep, HeadCalls

# Time t of the last call of the head.
LAST_TIME = 0.95
# Where 1 - t is smaller than this number, a division by 1 - t divides by this number instead.
SMALLEST_DIVISOR = 0.05


@lru_cache(maxsize=256)
def head_calls(count: int, time_shift: float = 1.0) -> HeadCalls:
    """The S + 1 calls of the head for S = ``count`` steps of Euler-Maruyama, see the table at the top of this file.

    ``time_shift``: k. Each time t is moved to u(t) = t / (t + k (1 - t)). If k is above 1, more steps are near the
    noise. ``nextstep/flow.py`` has the same function in another form. The two forms differ in the last digit.
    """
    shifted = []
    for i in range(count + 1):
        t = LAST_TIME * i / count
        shifted.append(t / (t + time_shift * (1 - t)))

    steps = []
    for t, t_after in pairwise(shifted):
        dt = t_after - t
        # The drift (1 + t) v - x_t is pull (prediction - x_t) - x_t. The std of g dW is g sqrt(dt).
        pull = (1 + t) / max(1 - t, SMALLEST_DIVISOR)
        std = math.sqrt(2 * (1 - t) * dt)
        steps.append(euler_maruyama(x_coefficient=1 - dt * (pull + 1), data_coefficient=dt * pull, std=std))
    steps.append(euler_maruyama(x_coefficient=0.0, data_coefficient=1.0, std=0.0))  # the prediction

    # Step S - 1 leads to the shifted time of the last call, but the call itself is at the unshifted time.
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
