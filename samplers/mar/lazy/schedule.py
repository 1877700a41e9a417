"""The schedule of LazyMAR, which is known before the first AR step: when it computes everything (a refresh), how many
rows it computes between two refreshes, and which block measures how much the rows changed.

Source: Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), and its published code, called the reference here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .settings import CacheSettings

# Share of decoder rows that are computed at AR steps 0 to 63. The table does not depend on the number of AR steps, and
# the reference has no entry after step 63.
PUBLISHED_RATIOS = (*(1.0,) * 20, 0.6, *(0.5,) * 4, *(0.4,) * 5, *(0.15,) * 5, *(0.12,) * 5, *(0.05,) * 24)

# Selections that compute the tokens of one state, however many they are.
BY_STATE = ("undecided", "decided")


def spare_rows(rows: int) -> int:
    """Number of extra decoder rows that are always computed, for a decoder of ``rows`` rows. The ratio is the
    reference's, 15 of 320.
    """
    return max(1, round(rows * 15 / 320))


def next_refreshes(settings: CacheSettings, steps: int) -> list[int]:
    """For each of ``steps`` AR steps, the AR step of the next refresh after it, or ``steps``.

    The first ``start_step`` steps, and from there on every ``refresh_period``-th, are refreshes. If a pass skips the AR
    step of a refresh, the pass itself becomes the refresh.
    """
    period = settings.refresh_period
    start = settings.start_step
    out = []
    for k in range(steps):
        if k < start:
            out.append(k + 1)
        else:
            periods = (k - start) // period + 1
            out.append(min(start + periods * period, steps))
    return out


class Refresh(NamedTuple):
    """What a refresh keeps for the passes until the next refresh."""

    until: int  # AR step of the next refresh
    # Encoder cache: how many rows the encoder reads before the next refresh, at most: class rows and decided tokens. 0
    # if nothing of the encoder is kept.
    encoder_rows: int
    decoder: bool  # token cache: whether the decoder's keys and values are kept, because a pass leaves rows out
    residual: bool  # condition cache: whether the difference of both branches of guidance is kept


def refreshes(
    settings: CacheSettings, starts: Sequence[int], shares: Sequence[float], buffer: int, guided: bool
) -> list[Refresh | None]:
    """What the pass of each AR step keeps if it is a refresh; None if it keeps nothing, because no cache is on, or
    because the next AR step is a refresh too.

    Args:
        settings: which caches are on, and when refreshes are due.
        starts: how many tokens are decided before each AR step.
        shares: share of the decoder's rows that each AR step computes if it is not a refresh.
        buffer: number of class rows.
        guided: whether there is a null branch.
    """
    out: list[Refresh | None] = []
    for step, until in enumerate(next_refreshes(settings, len(starts))):
        passes = range(step + 1, until)  # AR steps whose passes may use what is kept
        encoder_rows = buffer + starts[until - 1] if settings.encoder_cache else 0
        decoder = any(shares[k] < 1 for k in passes)
        residual = guided and settings.condition_cache

        keeps = len(passes) > 0 and (encoder_rows > 0 or decoder or residual)
        out.append(Refresh(until, encoder_rows, decoder, residual) if keeps else None)
    return out


def usual_block(depth: int) -> int:
    """Number of the measuring block, whose values tell how much a row changed, in a decoder of ``depth`` blocks. It is
    counted from 1.

    The reference uses the 4th block for every MAR. The three blocks before it are a quarter of the smallest MAR's
    decoder; smaller decoders keep this quarter.
    """
    return min(3, depth // 4) + 1


def computed_ratios(settings: CacheSettings, steps: int) -> list[float]:
    """Share of decoder rows to compute at each of ``steps`` AR steps if it is not a refresh. Shares lie between
    ``computed_ratio`` and 1.

    - *published*: the reference's table, indexed by AR step. At computed_ratio 0.05 its values are unchanged. After its
      end, the last share applies.
    - *stretched*: the same table, stretched over all AR steps. With 64 AR steps, it equals *published*.
    - *constant*: computed_ratio at all AR steps, as in the paper's Figure 6.
    """
    lowest = settings.computed_ratio
    if settings.ratio_schedule == "constant":
        return [lowest] * steps

    last = len(PUBLISHED_RATIOS) - 1
    out = []
    for k in range(steps):
        at = k * len(PUBLISHED_RATIOS) / steps if settings.ratio_schedule == "stretched" else k
        low = min(int(at), last)
        high = min(low + 1, last)
        ratio = PUBLISHED_RATIOS[low] + (at - low) * (PUBLISHED_RATIOS[high] - PUBLISHED_RATIOS[low])

        # Map the table's shares, 0.05 to 1, onto the range from ``lowest`` to 1. Rounded, because the number of rows is
        # floored, and 0.15 must not become 0.1499...
        out.append(round(1 - (1 - lowest) * (1 - ratio) / (1 - PUBLISHED_RATIOS[-1]), 9))
    return out
