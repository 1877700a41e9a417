"""Measures of a sweep's cells: their names, the lines of results.jsonl, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import UserError
from .evaluation import Estimate, Figure
from .store import Store

# Kinds of measures: of pairs of a cell's picture and its baseline's, of an extractor's features, of the demo's judge.
PAIR, FEATURES, JUDGE = "pair", "features", "judge"


@dataclass(frozen=True)
class Measure:
    """A measure.

    Attributes:
        title: on axes and in tables.
        kind: one of PAIR, FEATURES and JUDGE.
        higher: whether a higher figure is better.
        form: format of a value.
        scale: factor for display.
        least: smallest value.
        share: whether it is a share of images, 0..1.
    """

    title: str
    kind: str
    higher: bool
    form: str
    scale: float = 1.0
    least: float = -math.inf
    share: bool = False

    def figure(self, found: Estimate) -> Figure:
        """An estimate with its interval, which does not leave the range of the measure."""
        return found.share() if self.share else found.figure(lambda value: max(self.least, value))

    def show(self, value: float | None) -> str:
        """A value for a table; "" for None."""
        return "" if value is None else f"{value * self.scale:{self.form}}"


MEASURES: dict[str, Measure] = {
    "psnr": Measure("PSNR, dB", PAIR, True, ".2f"),
    "ssim": Measure("SSIM", PAIR, True, ".4f", 1, -1),
    "identical": Measure("identical, %", PAIR, True, ".1f", 100, share=True),
    "lpips": Measure("LPIPS", PAIR, False, ".4f", 1, 0),
    "fid": Measure("FID", FEATURES, False, ".3f", 1, 0),
    "frechet": Measure("Frechet distance", FEATURES, False, ".3f", 1, 0),
    "is": Measure("Inception score", FEATURES, True, ".2f", 1, 1),
    "kid": Measure("KID x 1000", FEATURES, False, ".3f", 1000),
    "precision": Measure("precision, %", FEATURES, True, ".1f", 100, share=True),
    "recall": Measure("recall, %", FEATURES, True, ".1f", 100, share=True),
    "judge-class": Measure("class, %", JUDGE, True, ".1f", 100, share=True),
    "judge-scene": Measure("scene, %", JUDGE, True, ".1f", 100, share=True),
    "judge-whole": Measure("whole, %", JUDGE, True, ".1f", 100, share=True),
    "judge-frechet": Measure("Frechet distance, judge", JUDGE, False, ".3f", 1, 0),
}

# Figures of pictures that equal the baseline's; PSNR has none.
EQUAL = {"ssim": 1.0, "identical": 1.0, "lpips": 0.0}


@dataclass(frozen=True)
class Result:
    """A measure of a cell, one line of results.jsonl.

    Attributes:
        cell: id of the cell.
        measure: a key of :data:`MEASURES`.
        extractor: of the features, or "".
        against: id of the baseline's cell, or name of the reference; "" for neither.
        images: number of images of the cell.
        digest: of all that the figure depends on: pictures, reference, extractor, resamples.
        value, low, high: the figure and its 95 % interval; None where a word takes their place, or where an end is infinite.
        difference: from the baseline's figure, with the interval of the paired difference; (None, None, None) if there is none.
        word: of ``reports.quality``, in place of the figure, or "".
    """

    cell: str
    measure: str
    extractor: str
    against: str
    images: int
    digest: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    difference: tuple[float | None, float | None, float | None] = (None, None, None)
    word: str = ""

    @property
    def column(self) -> tuple[str, str]:
        """Measure and extractor: what makes two figures comparable, with the same reference."""
        return self.measure, self.extractor

    @property
    def title(self) -> str:
        """Name of its column."""
        name = MEASURES[self.measure].title
        return name if self.extractor in ("", "inception", "judge") else f"{name} ({self.extractor})"

    def show(self) -> str:
        """The figure with its interval, or its word."""
        about = MEASURES[self.measure]
        if self.value is None:
            return self.word
        if self.low is None and self.high is None:
            return about.show(self.value)
        return f"{about.show(self.value)} [{about.show(self.low) or '-inf'}, {about.show(self.high) or 'inf'}]"

    def figure(self) -> Figure:
        """The figure alone."""
        return Figure(self.value, self.low, self.high)


def to_line(result: Result) -> dict[str, Any]:
    """A result as an object of JSON."""
    return asdict(result) | {"difference": list(result.difference)}


def from_line(line: Any) -> Result | None:
    """A result from a line of results.jsonl; None for a measure that this version does not have.

    Raises:
        UserError: a damaged line.
    """
    try:
        if line["measure"] not in MEASURES:
            return None
        texts = [line[name] for name in ("cell", "measure", "extractor", "against")]
        numbers = [_number(line[name]) for name in ("value", "low", "high")]
        first, low, high = (_number(x) for x in line["difference"])
        images, digest, word = line["images"], line["digest"], line["word"]
        if not all(isinstance(text, str) for text in (*texts, digest, word)) or not isinstance(images, int):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise UserError("folder: results.jsonl is damaged; delete it, and evaluate again.") from None
    cell, measure, extractor, against = texts
    value, lowest, highest = numbers
    return Result(cell, measure, extractor, against, images, digest, value, lowest, highest, (first, low, high), word)


def _number(value: Any) -> float | None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
    ):
        raise TypeError
    return value


def read_results(store: Store) -> list[Result]:
    """All results of a sweep, oldest first."""
    return [result for line in store.results() if (result := from_line(line)) is not None]


def latest(results: Iterable[Result]) -> dict[tuple[str, tuple[str, str]], Result]:
    """The last result of every cell and column."""
    return {(result.cell, result.column): result for result in results}


def columns(results: Iterable[Result]) -> list[tuple[str, str]]:
    """Measures and extractors of results, in the order of :data:`MEASURES`."""
    found = dict.fromkeys(result.column for result in results)
    order = list(MEASURES)
    return sorted(found, key=lambda column: (order.index(column[0]), column[1]))


def results_table(store: Store, results: Iterable[Result]) -> str:
    """A Markdown table with a row per cell and a column per measure; the last result of each.

    The column *images* holds several numbers if the measures of a cell are of different numbers of images.
    """
    found = latest(results)
    heads = columns(found.values())
    titles = {result.column: result.title for result in found.values()}
    rows = [["cell", "images", *(titles[head] for head in heads)]]
    for cell in store.cells():
        own = [found.get((cell.id, head)) for head in heads]
        images = {result.images for result in own if result is not None}
        rows.append(
            [
                cell.title,
                "/".join(map(str, sorted(images))),
                *("" if result is None else result.show() for result in own),
            ]
        )
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first is its head."""
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, width, strict=True)) + " |" for row in rows]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *text[1:]])
