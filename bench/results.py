"""Measures of a sweep's cells: their names, their results in the sweep's folder, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..reports.table import markdown
from .features import INCEPTION
from .statistics import Estimate, Figure
from .store import Store

# Kinds of measures: of pairs of a cell's picture and its baseline's, of an extractor's features, of the demo's judge.
PAIR, FEATURES, JUDGE = "pair", "features", "judge"


@dataclass(frozen=True)
class Measure:
    """A measure."""

    title: str  # on axes and in tables
    kind: str
    higher: bool  # whether a higher figure is better
    form: str  # format of a value
    scale: float = 1.0  # for display
    least: float = -math.inf  # smallest value
    share: bool = False  # whether it is a share of images, 0..1

    def figure(self, found: Estimate) -> Figure:
        """An estimate with its interval, which does not leave the range of the measure."""
        return found.share() if self.share else found.figure(lambda value: max(self.least, value))

    def show(self, value: float | None) -> str:
        """A value for a table; "" for None."""
        return "" if value is None else f"{value * self.scale:{self.form}}"


MEASURES: dict[str, Measure] = {
    "psnr": Measure("PSNR, dB", PAIR, True, ".2f"),
    "ssim": Measure("SSIM", PAIR, True, ".4f", least=-1),
    "identical": Measure("identical, %", PAIR, True, ".1f", 100, share=True),
    "fid": Measure("FID", FEATURES, False, ".3f", least=0),
    "frechet": Measure("Frechet distance", FEATURES, False, ".3f", least=0),
    "is": Measure("Inception score", FEATURES, True, ".2f", least=1),
    "kid": Measure("KID x 1000", FEATURES, False, ".3f", 1000),
    "precision": Measure("precision, %", FEATURES, True, ".1f", 100, share=True),
    "recall": Measure("recall, %", FEATURES, True, ".1f", 100, share=True),
    "judge-class": Measure("class, %", JUDGE, True, ".1f", 100, share=True),
    "judge-scene": Measure("scene, %", JUDGE, True, ".1f", 100, share=True),
    "judge-whole": Measure("whole, %", JUDGE, True, ".1f", 100, share=True),
    "judge-frechet": Measure("Frechet distance, judge", JUDGE, False, ".3f", least=0),
}
# Figures of pictures that equal the baseline's; PSNR has none.
EQUAL = {"ssim": 1.0, "identical": 1.0}


@dataclass(frozen=True)
class Result:
    """A measure of a cell, one line of the results. An end of an interval that is infinite is None."""

    cell: str  # its id
    measure: str
    extractor: str  # of the features, or ""
    against: str  # id of the baseline's cell, or name of the reference, or ""
    images: int  # number of images of the cell
    digest: str  # of all that the figure depends on: pictures, reference, extractor, resamples
    value: float | None = None  # None where a word takes its place
    low: float | None = None
    high: float | None = None
    difference: tuple[float | None, ...] = (None, None, None)  # from the baseline's figure, paired, with its interval
    word: str = ""  # of reports.quality, in place of the figure

    @property
    def column(self) -> tuple[str, str]:
        """Measure and extractor: what makes two figures comparable, with the same reference."""
        return self.measure, self.extractor

    @property
    def title(self) -> str:
        """Name of its column."""
        name = MEASURES[self.measure].title
        return name if self.extractor in ("", INCEPTION, JUDGE) else f"{name} ({self.extractor})"

    def show(self) -> str:
        """The figure with its interval, or its word."""
        show = MEASURES[self.measure].show
        if self.value is None or self.low is None and self.high is None:
            return self.word or show(self.value)
        return f"{show(self.value)} [{show(self.low) or '-inf'}, {show(self.high) or 'inf'}]"


def from_line(line: Any) -> Result:
    """A result from a line of the results."""
    try:
        found = Result(**{**line, "difference": tuple(line["difference"])})
        known = found.measure in MEASURES and len(found.difference) == 3 and type(found.images) is int
    except (KeyError, TypeError):
        known = False
    if known:
        numbers = (found.value, found.low, found.high, *found.difference)
        texts = (found.cell, found.extractor, found.against, found.digest, found.word)
        known = all(isinstance(text, str) for text in texts) and all(n is None or _finite(n) for n in numbers)
    if not known:
        raise UserError("folder: a line of its results is damaged; delete the folder results, and evaluate again.")
    return found


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def read_results(store: Store) -> list[Result]:
    """All results of a sweep, oldest first."""
    return [from_line(line) for line in store.results()]


def latest(results: Iterable[Result]) -> dict[tuple[str, tuple[str, str]], Result]:
    """The last result of every cell and column."""
    return {(result.cell, result.column): result for result in results}


def columns(results: Iterable[Result]) -> list[tuple[str, str]]:
    """Measures and extractors of results, in the order of :data:`MEASURES`."""
    order = list(MEASURES)
    return sorted({result.column for result in results}, key=lambda column: (order.index(column[0]), column[1]))


def results_table(store: Store, results: Iterable[Result]) -> str:
    """A Markdown table with a row per cell and a column per measure; the last result of each. The column *images* holds several numbers if
    the measures of a cell are of different numbers of images."""
    found = latest(results)
    heads, titles = columns(found.values()), {result.column: result.title for result in found.values()}
    rows = [["cell", "images", *(titles[head] for head in heads)]]
    for cell in store.cells():
        own = [found.get((cell.id, head)) for head in heads]
        images = "/".join(map(str, sorted({result.images for result in own if result is not None})))
        rows.append([cell.title, images, *("" if result is None else result.show() for result in own)])
    return markdown(rows)
