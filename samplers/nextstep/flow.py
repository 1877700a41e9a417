"""The flow of a token from noise (time t = 0) to the token (t = 1), for five published solvers.

Source: NextStep-1 (arXiv 2508.10711) and its published code. At time t, the state is x_t = t x + (1 - t) e. Here x is
the token, and e is noise. The flow-matching head predicts the velocity v = x - e. From v, the solver computes the
expected token x_1 = x_t + (1 - t) v and the score s = (t v - x_t) / (1 - t). Let dt be u - t, and let n be new noise.
The solvers em, em0, sde and ode take this step from t to u:

    x_u = x_t + v dt + (g^2 / 2) s dt + g sqrt(dt) n

The solver cps takes a different step, see :func:`_cps`. Every solver calls the head S times for a token, once before
each of the S steps:

=======  ================================  ==================================================================
name     g^2                               times t (before the shift) of the S calls, and the last step
=======  ================================  ==================================================================
em       2 (1 - t)                         evenly from 0 to 0.96; the last step is x_t + 0.04 v, without noise
em0      2 (1 - t)                         0, 1 / S, ... 1 - 1 / S; the last step ends at 1 and adds noise
sde      0.64 (1 - t) / t                  as em0; at t = 0, g^2 is 0.64 / (1 - shifted time of the last call)
ode      0                                 as em0, but no step adds noise
cps      none                              as em0, but the result of the last step is x_1
=======  ================================  ==================================================================

em is from the authors' code of August 2025. em0 is from the code in NextStep-1.1's folder. sde, ode and cps are from
the authors' code of February 2026. Because v = (x_1 - x_t) / (1 - t), each step is linear in x_t, x_1 and the noise. A
step can therefore be written as a :class:`.DiffusionStep` with x_1 as the data.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ..diffusion_steps import DiffusionStep, HeadCalls

EM = "em"
EM0 = "em0"
SDE = "sde"
ODE = "ode"
CPS = "cps"
SOLVERS = (EM0, EM, SDE, ODE, CPS)
# The solver em: the unshifted time of its last call, and the length of its last step. The shift does not change this
# length.
EM_LAST_TIME = 0.96
EM_LAST_LENGTH = 0.04
# Noise level of sde and cps in the published code. For sde, g^2 is the square of this level, times (1 - t) / t. For
# cps, see _cps.
NOISE_LEVEL = 0.8


@lru_cache(maxsize=256)
def flow(solver: str, count: int, shift: float = 1.0) -> HeadCalls:
    """The flow of a solver, one of :data:`SOLVERS`: ``count`` calls of the head at the shifted times, and the steps.

    A ``shift`` k moves each time t to t / (k - (k - 1) t). If k is above 1, more steps are near the noise.
    ``blocks/diffusion.py`` has the same function in another form. The two forms differ in the last digit.
    """
    if solver == EM:
        unshifted = [EM_LAST_TIME * i / max(1, count - 1) for i in range(count)]
    else:
        unshifted = [i / count for i in range(count)]
    times = tuple(t / (shift - (shift - 1) * t) for t in unshifted)

    def make_step(t: float, u: float) -> DiffusionStep:
        if solver == CPS:
            return _cps(t, u)
        return _euler_maruyama(t, u, _squared_noise(solver, t, times[-1]))

    steps = [make_step(t, u) for t, u in zip(times[:-1], times[1:], strict=True)]
    if solver == EM:
        last = _step(times[-1], x_factor=1.0, velocity_factor=EM_LAST_LENGTH, std=0.0)
    else:
        last = make_step(times[-1], 1.0)
    return HeadCalls(times, (*steps, last))


def _squared_noise(solver: str, t: float, last: float) -> float:
    """g^2 at t for the solvers em, em0, sde and ode. ``last``: time of the last call."""
    if solver == ODE:
        return 0.0
    if solver == SDE:
        return NOISE_LEVEL**2 * (1 - t) / t if t else NOISE_LEVEL**2 / (1 - last)
    return 2 * (1 - t)


def _euler_maruyama(t: float, u: float, g2: float) -> DiffusionStep:
    """The step of em, em0, sde or ode from t to u. ``g2``: g^2 at t."""
    dt = u - t
    weight = g2 * dt / (2 * (1 - t))  # the term of the score, (g^2 / 2) s dt, is weight (t v - x_t)
    return _step(t, x_factor=1 - weight, velocity_factor=dt + weight * t, std=math.sqrt(g2 * dt))


def _cps(t: float, u: float) -> DiffusionStep:
    """The step of cps: x_u = cos(a) (1 - u) x_0 + u x_1 + sin(a) (1 - u) n. Here a is 0.4 pi, and x_0 = x_t - t v is
    the expected noise.
    """
    angle = NOISE_LEVEL * math.pi / 2
    noise_coefficient = math.cos(angle) * (1 - u)
    velocity_factor = -noise_coefficient * t + u * (1 - t)
    return _step(t, x_factor=noise_coefficient + u, velocity_factor=velocity_factor, std=math.sin(angle) * (1 - u))


def _step(t: float, x_factor: float, velocity_factor: float, std: float) -> DiffusionStep:
    """The step to x_factor x_t + velocity_factor v + std n, written with the data x_1: v = (x_1 - x_t) / (1 - t)."""
    data_factor = velocity_factor / (1 - t)
    return DiffusionStep(
        data_x=1.0,
        data_per_prediction=1 - t,
        x_coefficient=x_factor - data_factor,
        data_coefficient=data_factor,
        log_std_middle=math.log(std) if std else -math.inf,
        log_std_per_logit=0.0,
    )
