"""DiSA: fewer diffusion steps for later tokens. Source: Zhao et al. 2025 (arXiv 2505.20297), section 3.2."""

from __future__ import annotations

import math


def annealed_steps(first: int, last: int, curve: str, ar_steps: int) -> list[int]:
    """Diffusion steps of every AR step, from ``first`` down to ``last`` (DiSA, section 3.2; 0 keeps ``first``).

    linear: as the reference, last + floor((S - 1 - s) / (S - 1) (first - last)); cosine: the same with the cosine of a
    quarter turn; two-stage: ``first`` in the first half of the AR steps, ``last`` in the second.
    """
    if not last or ar_steps == 1:
        return [first] * ar_steps
    shapes = {
        "linear": lambda u: 1 - u,
        "cosine": lambda u: math.cos(math.pi / 2 * u),
        "two-stage": lambda u: float(u < 0.5),
    }
    shape = shapes[curve]
    # Rounded before it is cut: 1 - u of a whole fraction may fall short of it by the last bit.
    return [last + math.floor(round(shape(s / (ar_steps - 1)) * (first - last), 9)) for s in range(ar_steps)]
