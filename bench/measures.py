"""Computes the measures of the cells of a sweep.

Pictures are read shard by shard. A figure that is there already for the same pictures, reference, extractor and resamples is not
computed again; one of other pictures is kept, and the new one follows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
import torch

from ..errors import UserError
from ..reports.quality import IDENTICAL, OTHER_SIZE
from .features import INCEPTION, Extractor, Reference, figure
from .records import Cell, Shard
from .results import EQUAL, FEATURES, JUDGE, MEASURES, PAIR, Result, latest, read_results
from .statistics import (
    RESAMPLES,
    Estimate,
    Figure,
    Statistic,
    estimate,
    frechet,
    mean,
    similarities,
    squared_errors,
    to_psnr,
)
from .store import Store

# Part of every digest: raised when a figure of the same pictures changes.
ALGORITHM = 2
# KID: most images of a block, and least blocks.
_BLOCK, _BLOCKS = 1000, 20
# Least images: of two in every part of the Inception score and in every block of KID, and of neighbours.
_LEAST = {"is": 20, "kid": 2 * _BLOCKS, "precision": 4, "recall": 4}


class Judge(Protocol):
    """The demo's judge; tools/judging.py has it."""

    digest: str

    def read(self, pictures: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Features [N, D] of uint8 [N, H, W, 3] of class ids [N], and by measure whether each image fulfils it, bool [N]."""
        ...

    def reference(self, images: int, side: int) -> np.ndarray:
        """Features [images, D] of real pictures."""
        ...

    def judges(self, size: tuple[int, int], labels: np.ndarray) -> bool:
        """Whether it is made for pictures of that height and width with these labels."""
        ...


@dataclass
class Means:
    """What measures are computed with."""

    extractor: Extractor | None = None
    reference: Reference | None = None  # that features are compared with; None for the baseline's pictures
    judge: Judge | None = None
    resamples: int = RESAMPLES
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of matrix products


def check(store: Store, measures: Sequence[str], means: Means) -> None:
    """Check everything that can be checked before a picture is read."""
    cells, kinds = store.cells(), {MEASURES[name].kind for name in measures}
    if not any(store.shards(cell) for cell in cells):
        raise UserError(f"folder: {store.folder.address} holds no finished shard yet; run the sweep first.")
    if kinds == {PAIR} and all(cell.baseline is None for cell in cells):
        raise UserError("measures: no cell has a plain sampler's to be compared with; add the plain sampler.")
    reference = means.reference if FEATURES in kinds else None
    wrong = next((cell for cell in cells if reference is not None and cell.size != reference.size), None)
    if wrong is not None and reference is not None:
        (h, w), (own_h, own_w) = reference.size, wrong.size
        raise UserError(
            f"reference: {reference.name} holds pictures of {w} x {h} pixels, and {wrong.id} of {own_w} x {own_h}; give a "
            "reference of that size."
        )


def evaluate(
    store: Store, measures: Sequence[str], means: Means, log: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """Measure all cells; returns the results of these measures, computed now or before."""
    check(store, measures, means)
    work, known, out = _Evaluation(store, means), latest(read_results(store)), list[Result]()
    for cell in store.cells():
        wanted = [work.empty(cell, name) for name in measures if work.applies(cell, name)]
        there = {r: old for r in wanted if (old := known.get((cell.id, r.column))) and old.digest == r.digest}
        new = work.results(cell, [result for result in wanted if result not in there])
        if new:
            store.append_results([asdict(result) for result in new])
        out += sorted([*there.values(), *new], key=lambda result: measures.index(result.measure))
        count = work.images(cell)
        short = "" if count == cell.images else f"; {count} of its {cell.images} images are finished"
        log(f"{cell.title}: {len(new)} measured, {len(there)} were there{short}")
    return out


class _Evaluation:
    """One run, with what several cells need."""

    def __init__(self, store: Store, means: Means):
        self.store, self.means = store, means
        self._shards = {cell.id: store.shards(cell) for cell in store.cells()}
        self._plain: dict[str, dict[str, Estimate]] = {}
        self._reference: tuple[str, np.ndarray] | None = None

    def images(self, cell: Cell) -> int:
        """Number of finished images."""
        return sum(shard.count for shard in self._shards[cell.id])

    def _baseline(self, cell: Cell) -> Cell | None:
        return None if cell.baseline is None else self.store.cell(cell.baseline)

    def _pairs(self, cell: Cell, other: Cell) -> list[tuple[Shard, Shard]]:
        """Finished shards of both cells with the same images."""
        theirs = {shard.first: shard for shard in self._shards[other.id]}
        return [(s, theirs[s.first]) for s in self._shards[cell.id] if s.first in theirs]

    def applies(self, cell: Cell, measure: str) -> bool:
        """Whether a cell has this measure."""
        shards, kind, plain = self._shards[cell.id], MEASURES[measure].kind, self._baseline(cell)
        if shards and kind == JUDGE and self.means.judge is not None:
            return self.means.judge.judges(cell.size, self.store.labels(cell, shards[0]))
        if shards and kind == FEATURES and (self.means.reference is not None or measure == "is"):
            return True
        return plain is not None and bool(self._pairs(cell, plain))

    def empty(self, cell: Cell, measure: str) -> Result:
        """The result of a measure without its figure."""
        kind, plain, means = MEASURES[measure].kind, self._baseline(cell), self.means
        extractor, against, more = "", cell.baseline or "", ""
        if kind == JUDGE and means.judge is not None:
            extractor, against, more = JUDGE, "picture book" if measure == "judge-frechet" else "", means.judge.digest
        elif kind == FEATURES and means.extractor is not None:
            extractor = means.extractor.name
            if measure == "is":
                against = ""
            elif means.reference is not None:
                against, more = means.reference.name, means.reference.digest
        parts = [str(ALGORITHM), measure, extractor, against, more, str(means.resamples)]
        for shards in (self._shards[cell.id], self._shards[plain.id] if plain else []):
            parts += [str(len(shards)), *(shard.sha256 for shard in shards)]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        return Result(cell.id, measure, extractor, against, self.images(cell), digest)

    def results(self, cell: Cell, wanted: Sequence[Result]) -> list[Result]:
        """The results with their figures, without those that the pictures are too small for."""
        plain, names = self._baseline(cell), [result.measure for result in wanted]
        paired: dict[str, tuple[Figure, str, int]] = {}
        if plain is not None and (pairs := [name for name in names if MEASURES[name].kind == PAIR]):
            paired = self._paired(cell, plain, pairs)
        own = self._estimates(cell, [name for name in names if MEASURES[name].kind != PAIR])
        base: dict[str, Estimate] = {}
        if plain is not None and len(self._pairs(cell, plain)) == len(self._shards[cell.id]):
            base = self._of_baseline(plain, list(own))
        out = []
        for result in wanted:
            name, word, images, away = result.measure, "", result.images, Figure(None)
            if name in paired:
                found, word, images = paired[name]
            elif name in own:
                found = MEASURES[name].figure(own[name])
                difference = own[name].minus(base[name]) if name in base else None
                away = difference.figure() if difference is not None else away
            else:
                continue
            values = (found.value, found.low, found.high, (away.value, away.low, away.high), word)
            out.append(Result(cell.id, name, result.extractor, result.against, images, result.digest, *values))
        return out

    def _paired(self, cell: Cell, plain: Cell, measures: Sequence[str]) -> dict[str, tuple[Figure, str, int]]:
        """Figures of pairs of pictures: by measure the figure, the word in its place and the number of pairs."""
        pairs = self._pairs(cell, plain)
        n = sum(shard.count for shard, _ in pairs)
        if cell.size != plain.size:
            return {name: (Figure(None), OTHER_SIZE, n) for name in measures}

        def each(distance: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
            found = ((self.store.pictures(cell, own), self.store.pictures(plain, other)) for own, other in pairs)
            return np.concatenate([distance(*pair) for pair in found])

        errors = each(squared_errors)
        out: dict[str, tuple[Figure, str, int]] = {}
        for name in measures:
            if name == "identical":
                out[name] = MEASURES[name].figure(self._estimate(mean(errors == 0), n)), "", n
            elif not errors.any():
                out[name] = Figure(EQUAL.get(name)), IDENTICAL, n
            elif cell.lossless:
                out[name] = Figure(None), cell.lossless, n
            elif name == "psnr":
                out[name] = self._estimate(mean(errors), n).figure(to_psnr), "", n
            elif not np.isnan(alike := each(similarities)).any():
                out[name] = MEASURES[name].figure(self._estimate(mean(alike), n)), "", n
        return out

    def _estimate(self, statistic: Statistic, n: int, biased: bool = False, value: float | None = None) -> Estimate:
        return estimate(statistic, n, self.means.resamples, biased, value)

    def _of_baseline(self, plain: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        known = self._plain.setdefault(plain.id, {})
        known |= self._estimates(plain, [n for n in measures if n not in known and self.applies(plain, n)])
        return known

    def _estimates(self, cell: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        """Figures of features and of the judge."""
        features = [name for name in measures if MEASURES[name].kind == FEATURES]
        judged = [name for name in measures if MEASURES[name].kind == JUDGE]
        out = self._of_features(cell, features) if features else {}
        out |= self._of_judge(cell, judged) if judged else {}
        if cell.baseline is None:
            self._plain.setdefault(cell.id, {}).update(out)
        return out

    def _pictures(self, cell: Cell) -> Iterator[np.ndarray]:
        """The pictures of a cell, shard by shard; of the shards that were finished when this run began."""
        return (self.store.pictures(cell, shard) for shard in self._shards[cell.id])

    def _others(self, cell: Cell) -> np.ndarray:
        """Features that those of a cell are compared with. One set is in memory at a time."""
        reference, extractor = self.means.reference, self.means.extractor
        assert extractor is not None
        name = "" if reference is not None else cell.baseline or ""
        if self._reference is None or self._reference[0] != name:
            images = self._pictures(self.store.cell(name)) if reference is None else reference.images()
            self._reference = name, extractor(images)[0]
        return self._reference[1]

    def _of_features(self, cell: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        """Figures of torch-fidelity with our intervals. The Frechet distance of other extractors is ours."""
        extractor, out = self.means.extractor, {}
        assert extractor is not None
        rows, logits = extractor(self._pictures(cell))
        other = self._others(cell) if set(measures) != {"is"} else rows
        n, least = len(rows), min(len(rows), len(other))
        for name in measures:
            if least < _LEAST.get(name, 2):
                raise UserError(f"{name}: {least} images are too few; it takes {_LEAST.get(name, 2)} or more.")
            if name in ("fid", "frechet"):
                value = figure("fid", rows, other) if name == "fid" else None
                out[name] = self._estimate(frechet(rows, other, self.means.device), n, True, value)
            elif name == "is":
                if logits is None:
                    raise UserError(f"is: {extractor.name} has no class logits; it is a measure of {INCEPTION}.")
                out[name] = self._estimate(_inception_score(logits), n, True)
            elif name == "kid":
                blocks = _kid(rows, other)
                out[name] = self._estimate(mean(blocks), len(blocks))
            else:
                out[name] = Estimate(figure(name, rows, other), np.empty(0), n if name == "precision" else len(other))
        return out

    def _of_judge(self, cell: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        judge, shards = self.means.judge, self._shards[cell.id]
        assert judge is not None
        read = [judge.read(self.store.pictures(cell, s), self.store.labels(cell, s)) for s in shards]
        features, out = np.concatenate([part for part, _ in read]), {}
        for name in measures:
            if name == "judge-frechet":
                real = judge.reference(len(features), cell.size[0])
                out[name] = self._estimate(frechet(features, real, self.means.device), len(features), True)
            else:
                out[name] = self._estimate(mean(np.concatenate([flags[name] for _, flags in read])), len(features))
        return out


def _inception_score(logits: np.ndarray) -> Statistic:
    return lambda weights: figure("is", np.repeat(logits, weights.astype(int), axis=0))


def _kid(rows: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KID of blocks, float64 [blocks]; the mean is unbiased (Zaremba et al. 2013, arXiv 1307.1954). Block k takes every ``blocks``-th
    image from image k on, so that classes in turn are spread over all blocks."""
    least = min(len(rows), len(other))
    size = min(_BLOCK, least // _BLOCKS)
    blocks = least // size
    return np.array([figure("kid", rows[k::blocks][:size], other[k::blocks][:size]) for k in range(blocks)])
