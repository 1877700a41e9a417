"""Seconds and speed-ups as they are told: from one run, or from repeats in turn with their spread.

On a machine that does other things too, the seconds of one run say little: the ratio of two runs may be 0.9, 1.9 and
0.9 in three tries. A speed-up is therefore told from repeats in turn only. The ratio of two single runs is marked as
one, and there is none where the two runs differ in more than the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

# What is said of a ratio.
BASELINE = "baseline"
ONE_RUN = "one run each"
APART = "timed apart"
NO_DIFFERENCE = "no measurable difference"
# What is said where there is no ratio.
FIRST_RUN = "first run"
OTHER_MODEL = "other model"
OTHER_SIZE = "other size"
OTHER_EDIT = "other edit"
OTHER_DEVICE = "other device"
OTHER_DTYPE = "other dtype"
OTHER_THREADS = "other threads"
OTHER_PROCESS = "other process"

# Words of a speed-up, with their meaning.
MEANINGS = {
    ONE_RUN: "the ratio of two single runs, which varies from run to run",
    APART: "the two runs were not timed together, so the ratio varies more",
    NO_DIFFERENCE: "some repeats were faster than the baseline's, others slower",
    FIRST_RUN: "the time includes compilation or the initialisation of libraries; run again with a different seed",
    OTHER_MODEL: "the two runs have different models",
    OTHER_SIZE: "the images of the two runs have different numbers of tokens",
    OTHER_EDIT: "the two runs generated different parts of an image",
    OTHER_DEVICE: "the two runs were on different devices",
    OTHER_DTYPE: "the weights of the two runs have different dtypes",
    OTHER_THREADS: "the two runs had different numbers of CPU threads",
    OTHER_PROCESS: "the two runs were timed in different processes",
}


@dataclass(frozen=True)
class Speedup:
    """The seconds an image of a baseline divided by those of a run."""

    value: float | None = None  # a median of the pairs; None where the runs cannot be compared
    low: float | None = None  # the smallest and the largest ratio of a pair
    high: float | None = None
    pairs: int = 1
    of: str = "repeats"  # what the pairs are: "repeats" in turn, or the "seeds" of a sweep
    note: str = ""  # one of the words above, "" for a difference that was measured

    @property
    def told(self) -> bool:
        """Whether it was measured in turn and is larger than the spread."""
        return self.value is not None and self.pairs > 1 and self.of == "repeats" and not self.note

    @property
    def range(self) -> str:
        """The spread of the pairs as text; "" of a single pair."""
        if self.note == BASELINE or self.pairs < 2 or self.low is None or self.high is None:
            return ""
        where = "in" if self.of == "repeats" else "over"
        return f"{self.low:.2f} to {self.high:.2f} {where} {self.pairs} {self.of}"

    @property
    def short(self) -> str:
        """For people, without the spread: "1.40x", "about 1.40x (one run each)", "no measurable difference"."""
        if self.note in (BASELINE, NO_DIFFERENCE):
            return self.note
        if self.value is None:
            return f"not compared ({self.note})"
        if self.told:
            return f"{self.value:.2f}x"

        return f"about {self.value:.2f}x ({self.note})" if self.note else f"about {self.value:.2f}x"

    @property
    def brief(self) -> str:
        """For images, whose readers look up the rest: "1.40x", "about 1.40x", "no difference"."""
        if self.note == NO_DIFFERENCE:
            return "no difference"

        word, _, _ = self.short.partition(" (")
        return word

    @property
    def text(self) -> str:
        """For people: "1.40x (1.32 to 1.51 in 5 repeats)", "about 1.40x (one run each)"."""
        return f"{self.short} ({self.range})" if self.range else self.short

    def to_dict(self) -> dict[str, Any]:
        """The stable JSON form (docs/report.md)."""
        out: dict[str, Any] = {}
        if self.value is not None:
            out["speedup"] = round(self.value, 4)
        if self.pairs > 1 and self.low is not None and self.high is not None:
            out["speedup_range"] = [round(self.low, 4), round(self.high, 4)]
        if self.note:
            out["speedup_note"] = self.note

        return out


def speedup_of(ratios: Sequence[float], of: str = "repeats", note: str = ONE_RUN) -> Speedup:
    """The speed-up of one or more pairs of runs: the median of their ratios with the smallest and the largest.

    Args:
        ratios: the baseline's seconds over the run's, of each pair.
        of: what the pairs are.
        note: what is said of a single pair.
    """
    low = min(ratios)
    high = max(ratios)

    if len(ratios) > 1:
        # As the range is shown: what reads "1.00 to 1.20" is no difference.
        differs = round(low, 2) > 1 or round(high, 2) < 1
        note = "" if differs else NO_DIFFERENCE

    return Speedup(median(ratios), low, high, len(ratios), of, note)


def middle(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of the seconds of pairs of runs, the baseline's first, those of the pair whose ratio is the median; of an even
    number of pairs the means of the middle two.
    """
    ordered = sorted(pairs, key=lambda pair: pair[0] / pair[1])
    of_middle = ordered[(len(pairs) - 1) // 2 : len(pairs) // 2 + 1]
    base, own = zip(*of_middle, strict=True)
    return mean(base), mean(own)


def speedup_of_pairs(pairs: Sequence[tuple[float, float]]) -> Speedup:
    """The speed-up of pairs of runs, from their seconds: it is the ratio of those of :func:`middle`."""
    base, own = middle(pairs)
    return replace(speedup_of([one / other for one, other in pairs], note=ONE_RUN), value=base / own)


def times_as_fast(ratio: float) -> str:
    """A ratio in a sentence, with no more digits than a few runs can tell: "about 3.3 times as fast"."""
    digits = 1 if ratio >= 1.05 else 2
    return f"about {ratio:.{0 if ratio >= 10 else digits}f} times as fast"


def shown_seconds(seconds: float) -> str:
    """Seconds as text: two decimals, three below a second."""
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}"


def how_timed(repeats: int, first_run: bool) -> str:
    """How seconds were measured: "one run", "first run", "median of 5"."""
    if repeats > 1:
        return f"median of {repeats}"
    return FIRST_RUN if first_run else "one run"
