"""The schedule of LazyMAR, which is known before the first AR step.

It says which AR steps compute everything (a *refresh*), how many rows of the decoder are computed between two
refreshes, and which block of the decoder measures how much a row has changed. A row is a token, or one of the class
rows in front of the tokens.

Source: Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), and its published code, here called the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .settings import CacheSettings

# Share of the decoder's rows that the reference computes at AR steps 0 to 63, however many AR steps a run has. The
# reference has no entry after step 63.
PUBLISHED_RATIOS = (*(1.0,) * 20, 0.6, *(0.5,) * 4, *(0.4,) * 5, *(0.15,) * 5, *(0.12,) * 5, *(0.05,) * 24)

# Values of the setting ``selection`` that choose all undecided or all decided tokens, however many tokens these are.
BY_STATE = ("undecided", "decided")


def spare_rows(rows: int) -> int:
    """The smallest number of rows that a decoder of ``rows`` rows computes in addition to the required rows. The ratio
    is the reference's, 15 of 320.
    """
    return max(1, round(rows * 15 / 320))


def next_refreshes(settings: CacheSettings, steps: int) -> list[int]:
    """For each of ``steps`` AR steps, the AR step of the next refresh after it; ``steps`` if there is none.

    AR steps 0 to ``start_step`` are refreshes; after these, every ``refresh_period``-th AR step is one. If a sampler
    skips the AR step of a refresh, its next pass becomes the refresh.
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
    # Encoder cache: the largest number of rows (class rows and decided tokens) that the encoder reads before the next
    # refresh; 0 if nothing of the encoder is kept.
    encoder_rows: int
    decoder: bool  # token cache: whether the decoder's keys and values are kept, for passes that leave rows out
    residual: bool  # condition cache: whether the difference between the two branches of guidance is kept


def refreshes(
    settings: CacheSettings, decided_before: Sequence[int], shares: Sequence[float], buffer: int, guided: bool
) -> list[Refresh | None]:
    """For each AR step, what its pass keeps if it is a refresh. None if it keeps nothing: no cache would use it, or the
    next AR step is a refresh, too.

    Args:
        settings: which caches are on, and when refreshes are due.
        decided_before: how many tokens are decided before each AR step.
        shares: share of the decoder's rows that each AR step computes if it is not a refresh.
        buffer: number of class rows.
        guided: whether guidance is on, so there are two branches.
    """
    out: list[Refresh | None] = []
    for step, until in enumerate(next_refreshes(settings, len(decided_before))):
        passes = range(step + 1, until)  # AR steps whose passes may use what is kept
        encoder_rows = buffer + decided_before[until - 1] if settings.encoder_cache else 0
        decoder = any(shares[k] < 1 for k in passes)
        residual = guided and settings.condition_cache

        keeps = len(passes) > 0 and (encoder_rows > 0 or decoder or residual)
        out.append(Refresh(until, encoder_rows, decoder, residual) if keeps else None)
    return out


def measuring_block(depth: int) -> int:
    """Number, counted from 1, of the measuring block in a decoder of ``depth`` blocks. The values of its attention show
    how much a row has changed.

    The reference uses block 4 in every MAR. In the smallest MAR, the three blocks before it are a quarter of the
    decoder. In decoders with fewer blocks, a quarter of the blocks (rounded down) comes before the measuring block.
    """
    return min(3, depth // 4) + 1


def computed_ratios(settings: CacheSettings, steps: int) -> list[float]:
    """For each of ``steps`` AR steps, the share of the decoder's rows to compute if the AR step is not a refresh. The
    share lies between ``computed_ratio`` and 1; the setting ``ratio_schedule`` decides how it falls:

    - *published*: PUBLISHED_RATIOS by AR step, and their last value after step 63. If computed_ratio is not 0.05, they
      are rescaled to end at computed_ratio.
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

        # Map the table's shares, 0.05 to 1, onto the range from ``lowest`` to 1. The result is rounded, because 0.1499
        # in place of 0.15 would lose a row when the number of rows is rounded down.
        out.append(round(1 - (1 - lowest) * (1 - ratio) / (1 - PUBLISHED_RATIOS[-1]), 9))
    return out
