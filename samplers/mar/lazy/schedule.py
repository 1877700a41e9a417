"""The schedule of LazyMAR, which is known before the first AR step.

It says which AR steps compute everything (*refreshes*), and how many rows of the decoder a pass between two refreshes
computes. A row is a token, or one of the class rows in front of the tokens. The schedule also says which block of the
decoder measures how much a row has changed.

Source: Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), and the published code. AR steps are counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .settings import CacheSettings

# Share of the decoder's rows that the published code computes at AR steps 0 to 63. The shares do not depend on the
# number of AR steps in a run. The published code has no entry after step 63.
PUBLISHED_RATIOS = (*(1.0,) * 20, 0.6, *(0.5,) * 4, *(0.4,) * 5, *(0.15,) * 5, *(0.12,) * 5, *(0.05,) * 24)

# With these values of the setting ``selection``, a pass computes all undecided or all decided tokens, however many
# there are.
BY_STATE = ("undecided", "decided")


def spare_rows(rows: int) -> int:
    """The smallest number of rows that a pass computes in addition to the required rows. ``rows``: number of all rows
    of the decoder. The published code computes at least 15 additional rows of 320.
    """
    return max(1, round(rows * 15 / 320))


def next_refreshes(settings: CacheSettings, steps: int) -> list[int]:
    """For each of ``steps`` AR steps, the AR step of the next refresh after it; ``steps`` if there is none.

    AR steps 0 to ``start_step`` are refreshes. After them, every ``refresh_period``-th AR step is a refresh. If a
    sampler skips the AR step of a refresh, the sampler's next pass becomes the refresh.
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


class CachesToFill(NamedTuple):
    """Which caches a refresh fills for the passes before the next refresh; a field for each cache."""

    next_refresh: int  # AR step of the next refresh
    # The size of the encoder cache: the largest number of class rows and decided tokens before the next refresh. 0 not
    # to fill this cache.
    encoder_rows: int
    token_cache: bool  # False also if no pass before the next refresh may leave out rows
    condition_cache: bool


def caches_to_fill(
    settings: CacheSettings, encoder_rows: Sequence[int], leaves_out_rows: Sequence[bool], guided: bool
) -> list[CachesToFill | None]:
    """For each AR step, which caches its pass fills if the pass is a refresh. None if it fills none, because no cache
    would be used or because the next AR step is a refresh, too.

    In this example, guidance and all caches are on, start_step is 1, and refresh_period is 3. AR steps 0, 1 and 4 are
    refreshes. Another AR step is a refresh only if the sampler skips AR steps::

        AR step           0     1     2     3     4     5
        encoder_rows      2     3     5     8     12    17
        leaves_out_rows   no    no    no    no    yes   yes
        next refresh      1     4     4     4     6     6
        caches to fill    None  [1]   [1]   None  [2]   None

        [1] for AR step 3, or 2 and 3: encoder_rows=8,  token_cache=False, condition_cache=True
        [2] for AR step 5:             encoder_rows=17, token_cache=True,  condition_cache=True

    Args:
        settings: which caches are on, and when refreshes are due.
        encoder_rows: for each AR step, how many class rows and decided tokens there are before it.
        leaves_out_rows: for each AR step, whether its pass may leave out rows of the decoder if it is not a refresh.
        guided: whether guidance is on, so there are two branches.
    """
    steps = len(encoder_rows)
    out: list[CachesToFill | None] = []
    for step, next_refresh in enumerate(next_refreshes(settings, steps)):
        passes = range(step + 1, next_refresh)  # AR steps whose passes may use the caches
        if not passes:
            out.append(None)
            continue

        # The last of these passes reads the most rows of the encoder.
        caches = CachesToFill(
            next_refresh,
            encoder_rows=encoder_rows[passes[-1]] if settings.encoder_cache else 0,
            token_cache=any(leaves_out_rows[k] for k in passes),
            condition_cache=settings.condition_cache and guided,
        )
        fills_any = caches.encoder_rows > 0 or caches.token_cache or caches.condition_cache
        out.append(caches if fills_any else None)
    return out


def measuring_block(depth: int) -> int:
    """The measuring block of a decoder of ``depth`` blocks, counted from 1. The attention values of this block show how
    much a row has changed.

    The published code uses block 4 in every MAR. In the smallest MAR, the three blocks before block 4 are a quarter of
    the decoder. In decoders with fewer blocks, a quarter of the blocks (rounded down) comes before the measuring block.
    """
    return min(3, depth // 4) + 1


def computed_ratios(settings: CacheSettings, steps: int) -> list[float]:
    """For each of ``steps`` AR steps, the share of the decoder's rows to compute if the AR step is not a refresh. The
    share lies between ``computed_ratio`` and 1. The setting ``ratio_schedule`` determines how the share falls:

    - *published*: AR step k has entry k of PUBLISHED_RATIOS, and the last entry after step 63. If computed_ratio is not
      0.05, the entries are rescaled to end at computed_ratio.
    - *stretched*: the same table, stretched over all AR steps. With 32 AR steps, AR step k has entry 2 k; with 128 AR
      steps, AR step 41 lies halfway between the entries 20 and 21. With 64 AR steps, *stretched* and *published* are
      the same.
    - *constant*: computed_ratio at all AR steps, as in the paper's Figure 6.
    """
    lowest = settings.computed_ratio
    if settings.ratio_schedule == "constant":
        return [lowest] * steps

    # 1. The table's share at each AR step.
    table = PUBLISHED_RATIOS
    if settings.ratio_schedule == "published":
        shares = [table[min(k, len(table) - 1)] for k in range(steps)]
    else:  # stretched
        shares = [interpolated(table, k * len(table) / steps) for k in range(steps)]

    # 2. Map the table's shares, 0.05 to 1, onto the range from ``lowest`` to 1. Round the result: RowSelection rounds
    # the number of rows down, so 0.1499 in place of 0.15 could lose a row.
    return [round(1 - (1 - lowest) * (1 - share) / (1 - table[-1]), 9) for share in shares]


def interpolated(table: Sequence[float], index: float) -> float:
    """The entry of the table at ``index``, which is at least 0 and less than the number of entries. For example, the
    entry at 20.25 is 3/4 of entry 20 plus 1/4 of entry 21. The last entry continues up to the end of the table.
    """
    low = int(index)
    high = min(low + 1, len(table) - 1)
    return table[low] + (index - low) * (table[high] - table[low])
