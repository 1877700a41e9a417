"""Measures of a sweep's cells: their names, how they are computed, and their results in the sweep's folder.

Images are read shard by shard. Every evaluation adds its results; the plot shows the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ...cli.progress import Bar
from ...errors import UserError, amount
from ...reports.quality import IDENTICAL, OTHER_SIZE
from ..training.quality import nearest
from .clip import Clip
from .features import Inception, Reference, resized
from .records import Cell, Shard
from .statistics import (
    RESAMPLES,
    Estimate,
    Figure,
    Statistic,
    distinct,
    estimate,
    frechet,
    frechet_from,
    inception_score,
    mean,
    similarities,
    squared_errors,
    to_psnr,
)
from .store import Store
from .times import baselines_of

# Kinds of measures: of pairs of a cell's image and its baseline's, of Inception's features, of an image and its prompt,
# of the demo's judge.
PAIR = "pair"
FEATURES = "features"
PROMPT = "prompt"
JUDGE = "judge"


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
    "is": Measure("Inception score", FEATURES, True, ".2f", least=1),
    "clip": Measure("CLIP score", PROMPT, True, ".2f", least=0),
    "judge-class": Measure("class, %", JUDGE, True, ".1f", 100, share=True),
    "judge-scene": Measure("scene, %", JUDGE, True, ".1f", 100, share=True),
    "judge-prompt": Measure("prompt, %", JUDGE, True, ".1f", 100, share=True),
    "judge-whole": Measure("whole, %", JUDGE, True, ".1f", 100, share=True),
    "judge-distinct": Measure("distinct scenes, %", JUDGE, True, ".1f", 100, least=0),
    "judge-nearest": Measure("to the nearest image", JUDGE, True, ".3f", least=0),
    "judge-frechet": Measure("Frechet distance, judge", JUDGE, False, ".1f", least=0),
}
# Figures of images that equal the baseline's; PSNR has none.
EQUAL = {"ssim": 1.0, "identical": 1.0}


@dataclass(frozen=True)
class Result:
    """A measure of a cell, one line of the results. An end of an interval that is infinite is None."""

    cell: str  # its id
    measure: str
    against: str  # id of the baseline's cell, or name of the reference, or ""
    images: int  # number of images of the cell
    value: float | None = None  # None where a word takes its place
    low: float | None = None
    high: float | None = None
    difference: tuple[float | None, ...] = (None, None, None)  # from the baseline's figure, paired, with its interval
    word: str = ""  # of reports.quality, in place of the figure

    def show(self) -> str:
        """The figure with its interval, or its word."""
        show = MEASURES[self.measure].show
        if self.value is None or self.low is None and self.high is None:
            return self.word or show(self.value)

        return f"{show(self.value)} ({show(self.low) or '-inf'} to {show(self.high) or 'inf'})"


def from_line(line: Any) -> Result:
    """A result from a line of the results."""
    return Result(**{**line, "difference": tuple(line["difference"])})


def read_results(store: Store) -> list[Result]:
    """All results of a sweep, oldest first."""
    return [from_line(line) for line in store.results()]


def latest(results: Iterable[Result]) -> dict[tuple[str, str], Result]:
    """The last result of every cell and measure."""
    return {(result.cell, result.measure): result for result in results}


def measured(results: Iterable[Result]) -> list[str]:
    """Names of the measures of results, in the order of :data:`MEASURES`."""
    there = {result.measure for result in results}
    return [name for name in MEASURES if name in there]


# Least images: of two in every part of the Inception score.
_LEAST = {"is": 20}


@dataclass
class Means:
    """What measures are computed with."""

    inception: Inception | None = None
    reference: Reference | None = None  # that features are compared with; None for the baseline's images
    resize: bool = False  # whether images get the reference's size before features are computed
    clip: Clip | None = None
    judge: Any = None  # a sweeps.judging.PictureBookJudge
    resamples: int = RESAMPLES
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of matrix products


def check(store: Store, measures: Sequence[str], means: Means) -> None:
    """Check everything that can be checked before an image is read.

    Raises:
        UserError: no cell has any of the measures.
    """
    cells = store.cells()
    kinds = {MEASURES[name].kind for name in measures}

    if not any(store.shards(cell) for cell in cells):
        raise UserError(f"folder: {store.folder.path} holds no finished shard yet; run the sweep first.")
    of_plain = [name for name in measures if needs_plain(name, means)]
    if measures and of_plain == list(measures) and all(cell.baseline is None for cell in cells):
        raise UserError(
            "measures: there is no cell of the unaccelerated sampler with which other cells could be compared; add "
            "this sampler to the sweep."
        )

    if means.reference is None or FEATURES not in kinds or means.resize:
        return

    problems = [_other_size(cell, means) for cell in cells]
    if all(problems):
        raise UserError(problems[0])


def needs_plain(measure: str, means: Means) -> bool:
    """Whether a measure compares with the images of the plain sampler's cell."""
    kind = MEASURES[measure].kind
    return kind == PAIR or kind == FEATURES and means.reference is None and measure != "is"


def _other_size(cell: Cell, means: Means) -> str:
    """Why the images of a cell cannot be compared with the reference's; "" if they can."""
    reference = means.reference
    if reference is None or reference.size is None or means.resize or cell.size == reference.size:
        return ""

    height, width = reference.size
    own_height, own_width = cell.size
    return (
        f"reference: {reference.name} holds images of {width} x {height} pixels, but the images of {cell.id} "
        f"have {own_width} x {own_height}; give a reference of {own_width} x {own_height}, or add --resize."
    )


def evaluate(
    store: Store,
    measures: Sequence[str],
    means: Means,
    log: Callable[[str], None] = lambda text: None,
    failed: list[str] | None = None,
) -> list[Result]:
    """Measure all cells, add the results to the folder, and return them.

    A cell that cannot be measured does not stop the others.

    Args:
        log: gets a line for every cell, and one for every reason why measures are left out.
        failed: gets the cells that could not be measured although they have images, with the reason, such as a damaged
            file; without it the first reason is raised after the other cells.

    Raises:
        UserError: see :func:`check`; or no cell could be measured.
    """
    check(store, measures, means)
    store.folder.check("folder")

    work = _Evaluation(store, means)
    problems: list[UserError] = []
    unmeasured: list[str] = []
    left_out: dict[str, list[str]] = {}  # reason to "measure of cell"
    out: list[Result] = []
    for cell in store.cells():
        for name in measures:
            why = work.lacks(cell, name)
            if why:
                left_out.setdefault(why, []).append(f"{name} of {cell.title}")

        try:
            results = work.results(cell, [name for name in measures if work.applies(cell, name)])
        except UserError as problem:
            problems.append(problem)
            unmeasured.append(f"{cell.title} is not measured: {problem}")
            continue
        out += results

        if results:
            store.append_results([asdict(result) for result in results])

        count = work.images(cell)
        short = "" if count == cell.images else f"; {count} of its {cell.images} images are finished"
        log(f"{cell.title}: {len(results)} measured{short}")

    if problems and (failed is None or not out):
        raise problems[0]
    if not out and left_out:
        raise UserError(f"measures: nothing can be measured: {next(iter(left_out))}.")

    for why, what in left_out.items():
        log(f"left out: {', '.join(what)}: {why}")
    for line in unmeasured:
        log(line)
    if failed is not None:
        failed += unmeasured
    return out


class _Evaluation:
    """One run, with what several cells need."""

    def __init__(self, store: Store, means: Means):
        self.store = store
        self.means = means
        self._shards = {cell.id: store.shards(cell) for cell in store.cells()}
        self._plain_ones = baselines_of(store.cells())
        # Estimates of plain samplers by cell and measure, and the features that were compared with last, by their name.
        self._plain: dict[str, dict[str, Estimate]] = {}
        self._reference: tuple[str, np.ndarray] | None = None

    def images(self, cell: Cell) -> int:
        """Number of finished images."""
        return sum(shard.count for shard in self._shards[cell.id])

    def _baseline(self, cell: Cell) -> Cell | None:
        """The plain sampler's cell."""
        return None if cell.baseline is None else self.store.cell(cell.baseline)

    def _pairs(self, cell: Cell, other: Cell) -> list[tuple[Shard, Shard]]:
        """Finished shards of both cells with the same images."""
        theirs = {shard.first: shard for shard in self._shards[other.id]}
        return [(shard, theirs[shard.first]) for shard in self._shards[cell.id] if shard.first in theirs]

    def applies(self, cell: Cell, measure: str) -> bool:
        """Whether a cell has this measure."""
        kind = MEASURES[measure].kind
        shards = self._shards[cell.id]

        if not shards or self.lacks(cell, measure):
            return False
        if kind == JUDGE:
            judge = self.means.judge
            return judge is not None and measure in judge.measures(cell.size, self.store.labels(cell, shards[0]))

        # Other measures compare with the plain sampler's images, which a plain sampler's cell does not.
        return not needs_plain(measure, self.means) or cell.baseline is not None

    def lacks(self, cell: Cell, measure: str) -> str:
        """Why a cell with images has not a measure that it could have; "" if it has it or could not have it."""
        if not self._shards[cell.id]:
            return ""

        kind = MEASURES[measure].kind
        if kind == FEATURES and _other_size(cell, self.means):
            return _other_size(cell, self.means).rstrip(".")

        if kind == PROMPT and self.store.labels(cell, self._shards[cell.id][0]).dtype.kind != "U":
            return "its images were generated from classes, not from prompts"

        plain = self._baseline(cell)
        of_plain = needs_plain(measure, self.means)
        if of_plain and plain is None:
            lacks_plain = "the sweep has no cell of the unaccelerated sampler to compare with"
            return "" if cell.id in self._plain_ones else lacks_plain

        fewest = self._fewest(cell, plain if of_plain else None, measure)
        least = _LEAST.get(measure, 2)
        return "" if fewest >= least else f"only {amount(fewest, 'images')}, but the measure needs {least} or more"

    def _fewest(self, cell: Cell, plain: Cell | None, measure: str) -> int:
        """The images that a measure of a cell is computed from, of it or of what it is compared with."""
        if plain is not None and MEASURES[measure].kind == PAIR:
            return sum(shard.count for shard, _ in self._pairs(cell, plain))

        own = self.images(cell)
        if plain is not None:
            return min(own, self.images(plain))

        reference = self.means.reference
        with_reference = MEASURES[measure].kind == FEATURES and measure != "is"
        if with_reference and reference is not None and reference.pictures is not None:
            return min(own, len(reference.pictures))
        return own

    def _compared(self, cell: Cell, measure: str) -> str:
        """What the figure of a measure is compared with: id of a cell, name of a reference, or ""."""
        kind = MEASURES[measure].kind
        if kind == JUDGE:
            return "picture book" if measure == "judge-frechet" else ""
        if measure == "is" or kind == PROMPT:
            return ""

        reference = self.means.reference
        if kind == PAIR or reference is None:
            return cell.baseline or ""
        if reference.size is None or cell.size == reference.size:
            return reference.name

        height, width = reference.size
        return f"{reference.name}, at {width} x {height}"

    def results(self, cell: Cell, names: Sequence[str]) -> list[Result]:
        """The results of measures, without those that the images are too small for."""
        plain = self._baseline(cell)

        # Measures of pairs of images.
        of_pairs = [name for name in names if MEASURES[name].kind == PAIR]
        paired: dict[str, tuple[Figure, str, int]] = {}
        if plain is not None and of_pairs:
            paired = self._paired(cell, plain, of_pairs)

        # Measures of a set of images, and of the plain sampler's set if it holds the same images.
        of_sets = [name for name in names if MEASURES[name].kind in (FEATURES, PROMPT, JUDGE)]
        own = self._estimates(cell, of_sets)
        base: dict[str, Estimate] = {}
        if plain is not None and len(self._pairs(cell, plain)) == len(self._shards[cell.id]):
            base = self._of_baseline(plain, list(own))

        out = []
        for name in names:
            word = ""
            images = self.images(cell)
            difference = Figure(None)

            if name in paired:
                found, word, images = paired[name]
            elif name in own:
                found = MEASURES[name].figure(own[name])
                if name in base:
                    minus = own[name].minus(base[name])
                    difference = difference if minus is None else minus.figure()
            else:
                continue

            result = Result(
                cell=cell.id,
                measure=name,
                against=self._compared(cell, name),
                images=images,
                value=found.value,
                low=found.low,
                high=found.high,
                difference=(difference.value, difference.low, difference.high),
                word=word,
            )
            out.append(result)

        return out

    def _paired(self, cell: Cell, plain: Cell, measures: Sequence[str]) -> dict[str, tuple[Figure, str, int]]:
        """Figures of pairs of images: by measure the figure, the word in its place and the number of pairs."""
        pairs = self._pairs(cell, plain)
        n = sum(shard.count for shard, _ in pairs)
        if cell.size != plain.size:
            return {name: (Figure(None), OTHER_SIZE, n) for name in measures}

        def each(distance: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
            """A distance of every pair of images; one pair of shards is in memory at a time."""
            parts = []
            for own, other in pairs:
                parts.append(distance(self.store.pictures(cell, own), self.store.pictures(plain, other)))
            return np.concatenate(parts)

        errors = each(squared_errors)

        out: dict[str, tuple[Figure, str, int]] = {}
        for name in measures:
            if name == "identical":
                out[name] = (MEASURES[name].figure(self._estimate(name, mean(errors == 0), n)), "", n)
            elif not errors.any():
                out[name] = (Figure(EQUAL.get(name)), IDENTICAL, n)
            elif cell.lossless:
                out[name] = (Figure(None), cell.lossless, n)
            elif name == "psnr":
                out[name] = (self._estimate(name, mean(errors), n).figure(to_psnr), "", n)
            else:
                alike = each(similarities)
                if not np.isnan(alike).any():
                    out[name] = (MEASURES[name].figure(self._estimate(name, mean(alike), n)), "", n)

        return out

    def _estimate(self, name: str, statistic: Statistic, n: int, biased: bool = False) -> Estimate:
        """The estimate of a measure, with a progress bar: Inception's features take seconds a resample."""
        with Bar(name) as bar:

            def report(done: int, total: int) -> None:
                bar(done, total, "resamples")

            return estimate(statistic, n, self.means.resamples, biased, report)

    def _of_baseline(self, plain: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        """Figures of a plain sampler's images, which are computed once."""
        known = self._plain.setdefault(plain.id, {})
        unknown = [name for name in measures if name not in known and self.applies(plain, name)]
        known |= self._estimates(plain, unknown)

        return known

    def _estimates(self, cell: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        """Figures of features, of prompts and of the judge."""
        features = [name for name in measures if MEASURES[name].kind == FEATURES]
        judged = [name for name in measures if MEASURES[name].kind == JUDGE]

        out: dict[str, Estimate] = {}
        if features:
            out |= self._of_features(cell, features)
        if "clip" in measures:
            scores = self._of_prompts(cell)
            out["clip"] = self._estimate("clip", mean(scores), len(scores))
        if judged:
            out |= self._of_judge(cell, judged)

        if cell.baseline is None:
            self._plain.setdefault(cell.id, {}).update(out)

        return out

    def _pictures(self, cell: Cell) -> Iterator[np.ndarray]:
        """The images of a cell, shard by shard, with a progress bar.

        They are of the shards that were finished when this run began.
        """
        shards = self._shards[cell.id]

        with Bar(f"features of {cell.title}") as bar:
            for done, shard in enumerate(shards):
                bar(done, len(shards), "shards")
                yield self._sized(self.store.pictures(cell, shard))

    def _sized(self, pictures: np.ndarray) -> np.ndarray:
        """Images at the size at which they are measured."""
        reference = self.means.reference
        if reference is None or reference.size is None or not self.means.resize:
            return pictures

        return resized(pictures, reference.size)

    def _others(self, cell: Cell) -> np.ndarray:
        """Features that those of a cell are compared with. One set is in memory at a time."""
        reference = self.means.reference
        assert self.means.inception is not None

        name = "" if reference is not None else cell.baseline or ""
        if self._reference is None or self._reference[0] != name:
            if reference is None:
                pictures = self._pictures(self.store.cell(name))
            else:
                assert reference.pictures is not None, "its statistics are used where it has some"
                pictures = iter([reference.pictures])
            features, _ = self.means.inception(pictures)
            self._reference = (name, features)

        return self._reference[1]

    def _of_features(self, cell: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        """Figures of Inception's features and logits."""
        assert self.means.inception is not None
        moments = None if self.means.reference is None else self.means.reference.moments
        rows, logits = self.means.inception(self._pictures(cell))
        n = len(rows)

        out = {}
        for name in measures:
            if name == "is":
                statistic = inception_score(logits)
            elif moments is not None:
                statistic = frechet_from(rows, moments, self.means.device)
            else:
                statistic = frechet(rows, self._others(cell), self.means.device)
            out[name] = self._estimate(name, statistic, n, True)

        return out

    def _of_prompts(self, cell: Cell) -> np.ndarray:
        """CLIP scores of the images of a cell, float64 [N]."""
        clip = self.means.clip
        assert clip is not None

        scores = []
        for shard in self._shards[cell.id]:
            scores.append(clip.scores(self.store.pictures(cell, shard), self.store.labels(cell, shard)))
        return np.concatenate(scores)

    def _of_judge(self, cell: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        """Figures of the demo's judge."""
        judge = self.means.judge
        assert judge is not None

        readings = []
        all_labels = []
        for shard in self._shards[cell.id]:
            labels = self.store.labels(cell, shard)
            readings.append(judge.read(self.store.pictures(cell, shard), labels))
            all_labels.append(labels)

        n = sum(len(reading.features) for reading in readings)

        out = {}
        for name in measures:
            if name == "judge-frechet":
                features = np.concatenate([reading.features for reading in readings])
                real = judge.reference(np.concatenate(all_labels), cell.size[0])
                out[name] = self._estimate(name, frechet(features, real, self.means.device), n, True)
            elif name == "judge-distinct":
                scenes = np.concatenate([reading.scenes for reading in readings])
                out[name] = self._estimate(name, distinct(scenes), n, True)
            elif name == "judge-nearest":
                distances = nearest(np.concatenate([reading.small for reading in readings]))
                out[name] = self._estimate(name, mean(distances), n)
            else:
                judged = np.concatenate([reading.flags[name] for reading in readings])
                out[name] = self._estimate(name, mean(judged), n)

        return out
