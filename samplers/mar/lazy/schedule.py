"""The schedule of LazyMAR, which is known before the first AR step.

It says which AR steps are refreshes, which compute everything, and which caches a refresh fills. It also says which
block of the decoder measures how much a row has changed, and how many rows the blocks after it compute in a reuse pass.
``__init__.py`` explains these words. A row is a token, or one of the class rows in front of the tokens.

Source: Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), and the published code. AR steps are counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .settings import CacheSettings

# Share of the decoder's rows that the published code computes at AR steps 0 to 63, if the AR step is not a refresh. The
# shares do not depend on the number of AR steps in a run. The published code has no entry after AR step 63.
PUBLISHED_RATIOS = (*(1.0,) * 20, 0.6, *(0.5,) * 4, *(0.4,) * 5, *(0.15,) * 5, *(0.12,) * 5, *(0.05,) * 24)

# With these values of the setting ``selection``, a reuse pass computes all undecided or all decided tokens, whatever
# their share is.
BY_STATE = ("undecided", "decided")


def spare_rows(rows: int) -> int:
    """The smallest number of rows that a reuse pass computes in addition to the required rows. The published code
    computes at least 15 additional rows of 320. ``rows``: number of all rows of the decoder.
    """
    return max(1, round(rows * 15 / 320))


def next_refreshes(settings: CacheSettings, steps: int) -> list[int]:
    """For each of ``steps`` AR steps, the AR step of the next refresh after it; ``steps`` if there is none.

    AR steps 0 to ``start_step`` are refreshes. After them, every ``refresh_period``-th AR step is a refresh. If a
    sampler skips the AR step of a refresh, the sampler's next pass becomes the refresh.
    """
    period = settings.refresh_period
    start = settings.start_step
    following = []
    for k in range(steps):
        if k < start:
            following.append(k + 1)
        else:
            periods = (k - start) // period + 1  # whole periods from ``start`` to the first refresh after k
            following.append(min(start + periods * period, steps))
    return following


class CachesToFill(NamedTuple):
    """Which caches a refresh fills for the reuse passes before the next refresh."""

    next_refresh: int  # AR step of the next refresh
    # The rows for which the encoder cache needs room: the largest number of class rows and decided tokens before the
    # next refresh. 0 not to fill this cache.
    encoder_cache_size: int
    token_cache: bool  # False also if no pass before the next refresh may leave out rows
    condition_cache: bool


def caches_to_fill(
    settings: CacheSettings, rows_before: Sequence[int], leaves_out_rows: Sequence[bool], guided: bool
) -> list[CachesToFill | None]:
    """Any AR step may become a refresh, because a sampler may skip one, or discard the cached features. So the list has
    an entry for each AR step: what a refresh there would fill. None if it would fill nothing, because no cache would be
    used or because the next AR step is a refresh, too.

    In this example, guidance and all caches are on, start_step is 1, and refresh_period is 3. AR steps 0, 1 and 4 are
    refreshes::

        AR step            0     1     2     3     4     5
        rows_before        2     3     5     8     12    17
        leaves_out_rows    no    no    no    no    yes   yes
        next refresh       1     4     4     4     6     6
        caches used by     -     2, 3  3     -     5     -

    So a refresh at AR step 1 fills the caches for the passes at 2 and 3, and a refresh at 2 would fill them for the
    pass at 3. The results for the AR steps 0 to 5 are:

    - for 1 and 2: next_refresh=4, encoder_cache_size=8, token_cache=False, condition_cache=True;
    - for 4: next_refresh=6, encoder_cache_size=17, token_cache=True, condition_cache=True;
    - for 0, 3 and 5: None.

    Args:
        settings: which caches are on, and when refreshes are due.
        rows_before: for each AR step, the number of class rows and of tokens that are decided before it.
        leaves_out_rows: for each AR step, whether its pass may leave out rows of the decoder if it is not a refresh.
        guided: whether guidance is on, so there are two branches.
    """
    steps = len(rows_before)
    result: list[CachesToFill | None] = []
    for step, next_refresh in enumerate(next_refreshes(settings, steps)):
        users = range(step + 1, next_refresh)  # AR steps whose passes may use the caches
        if not users:
            result.append(None)
            continue

        # The encoder cache must have room for the last of these passes, which reads the most rows.
        caches = CachesToFill(
            next_refresh,
            encoder_cache_size=rows_before[users[-1]] if settings.encoder_cache else 0,
            token_cache=any(leaves_out_rows[k] for k in users),
            condition_cache=settings.condition_cache and guided,
        )
        fills_any = caches.encoder_cache_size > 0 or caches.token_cache or caches.condition_cache
        result.append(caches if fills_any else None)
    return result


def measuring_block(depth: int) -> int:
    """The measuring block of a decoder of ``depth`` blocks, counted from 1. The attention values of this block show how
    much a row has changed.

    The paper uses the 3rd layer, but the published code uses block 4, in every MAR. In the smallest MAR, the three
    blocks before block 4 are a quarter of the decoder. So in decoders with fewer blocks, a quarter of the blocks
    (rounded down) comes before the measuring block.
    """
    return min(3, depth // 4) + 1


def computed_ratios(settings: CacheSettings, steps: int) -> list[float]:
    """For each of ``steps`` AR steps, the share of the decoder's rows to compute if the AR step is not a refresh. The
    share lies between ``computed_ratio`` and 1. The setting ``ratio_schedule`` determines how the share falls:

    - *published*: AR step k has entry k of PUBLISHED_RATIOS, and the last entry after AR step 63. If computed_ratio is
      not 0.05, the entries are rescaled to end at computed_ratio.
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

    # 2. How far the table has fallen at each AR step: 0 where its share is 1, and 1 where its share is the last, 0.05.
    fallen = [(1 - share) / (1 - table[-1]) for share in shares]

    # 3. Let the result fall from 1 to ``lowest``. Round it, because RowSelection rounds the number of rows down:
    # 0.1499999 in place of 0.15 could lose a row.
    return [round(1 - (1 - lowest) * part, 9) for part in fallen]


def interpolated(table: Sequence[float], index: float) -> float:
    """The entry of the table at ``index``, which is at least 0 and less than the number of entries. For example, the
    entry at 20.25 is 3/4 of entry 20 plus 1/4 of entry 21. The last entry continues up to the end of the table.
    """
    low = int(index)
    high = min(low + 1, len(table) - 1)
    return table[low] + (index - low) * (table[high] - table[low])
