"""When LazyMAR (``lazymar.py``) computes everything, how many rows it computes in between, and which block measures.

Source: the published code of Yan et al. 2025, "LazyMAR" (arXiv 2503.12450), called the reference here.
"""

from __future__ import annotations

from ...errors import UserError
from .settings import CacheSettings

# Share of computed decoder rows at AR steps 0..63, whatever their number is. The reference goes no further.
PUBLISHED_RATIOS = (*(1.0,) * 20, 0.6, *(0.5,) * 4, *(0.4,) * 5, *(0.15,) * 5, *(0.12,) * 5, *(0.05,) * 24)


def spare_rows(rows: int) -> int:
    """Decoder rows, of so many, that are always computed beyond those that must be: 15 of 320, as the reference."""
    return max(1, round(rows * 15 / 320))


def next_refreshes(settings: CacheSettings, steps: int) -> list[int]:
    """Of each of ``steps`` AR steps that of the next refresh after it, or ``steps``.

    The first ``start_step`` steps, and from there on every ``refresh_period``-th, are refreshes. A call that skips AR
    steps does not skip a refresh.
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


def usual_block(depth: int) -> int:
    """The block whose values tell how much a row changed, from 1, of a decoder of ``depth`` blocks.

    The reference's is the 4th, for every MAR. Three blocks precede it: a quarter of the smallest MAR's decoder.
    """
    return min(3, depth // 4) + 1


def computed_ratios(settings: CacheSettings, steps: int) -> list[float]:
    """Share of decoder rows to compute at each of ``steps`` AR steps between two refreshes, ``computed_ratio`` to 1.

    - *published*: the reference's table by AR step, exactly that at computed_ratio 0.05; behind its end its last share.
    - *stretched*: the same table over the progress of the image, so with 64 AR steps the same shares.
    - *constant*: computed_ratio, as in the paper's Figure 6.
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

        # From the table's shares 0.05..1 to lowest..1. Rounded: the row count is floored, and 0.15 must not become
        # 0.1499...
        out.append(round(1 - (1 - lowest) * (1 - ratio) / (1 - PUBLISHED_RATIOS[-1]), 9))
    return out


def chosen_block(settings: CacheSettings, depth: int, model: str) -> int:
    """The decoder block, of ``depth`` and counted from 1, that measures how much a token changed. ``model``: its name.

    Raises:
        UserError: the decoder has fewer blocks.
    """
    block = usual_block(depth) if settings.block is None else settings.block
    if block > depth:
        raise UserError(
            f"block: {block} is outside 1 to {depth}, the blocks of the decoder of {model}; lower it, or leave it out."
        )
    return block
