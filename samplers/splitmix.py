"""Counted random numbers: a hash of a counter instead of a generator's state.

SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): count in steps of
:data:`GOLDEN`, then :func:`mix_`. Any number can be had at any time, on any device, and asking again gives the same.
"""

from __future__ import annotations

from torch import Tensor

# Written as signed numbers: torch counts in int64, whose products wrap around as they should.
GOLDEN, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_STAGES = ((30, _FIRST), (27, _SECOND), (31, 1))


def mix_(x: Tensor) -> Tensor:
    """Turn counters int64 into random bits, in place."""
    for shift, factor in _STAGES:
        # A shift that brings in zeros, which int64's own does not.
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            x.mul_(factor)
    return x
