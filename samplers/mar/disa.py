"""DiSA: fewer diffusion steps for later tokens. Source: Zhao et al. 2025 (arXiv 2505.20297), section 3.2, and its code."""

from __future__ import annotations

import math

from ...errors import UserError
from .diffusion import Tables
from .loop import Run
from .settings import DiSASettings

# Below so many steps, starting at t = 999 multiplies the head's error by thousands (diffusion.py); the authors' code clips.
FEW_STEPS, CLIPPED = 30, 950

CURVES = {
    "linear": lambda u: 1 - u,
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "quarter cosine": lambda u: math.cos(math.pi / 2 * u),
    "two-stage": lambda u: float(u < 0.5),
}


def annealed_steps(first: int, last: int, curve: str, ar_steps: int) -> list[int]:
    """Diffusion steps of every AR step, from ``first`` down to ``last`` (0 keeps ``first``).

    With u = s / (S - 1) of AR step s: last + floor(shape(u) (first - last)). linear, cosine (half a period) and two-stage
    (``first`` in the first half of the AR steps, ``last`` in the second) are the authors'.
    """
    if not last or ar_steps == 1:
        return [first] * ar_steps
    shape = CURVES[curve]
    # Rounded before the floor: 1 - u of a whole fraction may fall short of it in the last bit.
    return [last + math.floor(round(shape(s / (ar_steps - 1)) * (first - last), 9)) for s in range(ar_steps)]


def annealed_tables(run: Run, settings: DiSASettings) -> list[Tables]:
    """Diffusion tables of every AR step.

    Where the setting ``t_max`` is 0 and fewer than 30 steps remain at the end, the tables start at t = 950 or below.

    Raises:
        UserError: more diffusion steps at the end than at the beginning.
    """
    first, last = run.settings.diffusion_steps, settings.diffusion_steps_end
    if last > first:
        raise UserError(
            f"diffusion_steps_end: {last} is more than diffusion_steps, {first}; lower it, or 0 to keep them."
        )
    t_max = run.t_max
    if 0 < last < FEW_STEPS and not run.settings.t_max:
        t_max = min(t_max, CLIPPED)
    counts = annealed_steps(first, last, settings.diffusion_steps_curve, run.plan.steps)
    return [run.table(count, t_max) for count in counts]
