"""DiSA: fewer diffusion steps for later tokens. Source: Zhao et al. 2025 (arXiv 2505.20297), section 3.2."""

from __future__ import annotations

import math

from ...errors import UserError
from .settings import DiSASettings

CURVES = {
    "linear": lambda u: 1 - u,
    "cosine": lambda u: math.cos(math.pi / 2 * u),
    "two-stage": lambda u: float(u < 0.5),
}


def annealed_steps(first: int, last: int, curve: str, ar_steps: int) -> list[int]:
    """Diffusion steps of every AR step, from ``first`` down to ``last`` (0 keeps ``first``).

    With u = s / (S - 1) of AR step s: last + floor(shape(u) (first - last)). linear is the reference's schedule, cosine a
    quarter turn, two-stage ``first`` in the first half of the AR steps and ``last`` in the second.
    """
    if not last or ar_steps == 1:
        return [first] * ar_steps
    shape = CURVES[curve]
    # Rounded before the floor: 1 - u of a whole fraction may fall short of it in the last bit.
    return [last + math.floor(round(shape(s / (ar_steps - 1)) * (first - last), 9)) for s in range(ar_steps)]


def diffusion_steps(first: int, settings: DiSASettings, ar_steps: int) -> list[int]:
    """Diffusion steps of every AR step.

    Raises:
        UserError: more diffusion steps at the end than at the beginning.
    """
    last = settings.diffusion_steps_end
    if last > first:
        raise UserError(
            f"diffusion_steps_end: {last} is more than diffusion_steps, {first}; lower it, or 0 to keep them."
        )
    return annealed_steps(first, last, settings.diffusion_steps_curve, ar_steps)
