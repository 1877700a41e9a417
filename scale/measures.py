"""Measures the cells of a sweep and appends the figures to its results.

Pictures are read shard by shard. A figure that is there already for the same pictures, reference, extractor and resamples is not
computed again; one of other pictures is kept, and the new one follows it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ..errors import UserError
from ..reports.quality import IDENTICAL, OTHER_SIZE
from . import evaluation
from .evaluation import Estimate, Figure, Gaussian, Statistic, estimate, mean
from .features import INCEPTION, Extractor
from .references import Reference
from .results import EQUAL, FEATURES, JUDGE, MEASURES, PAIR, Result, latest, read_results, to_line
from .store import Cell, Shard, Store

# Part of every digest: raised when a figure of the same pictures changes.
ALGORITHM = 1
LPIPS = "lpips"
_RECORD = re.compile(r"shard-\d+-\d+\.json")


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
    """What measures are computed with.

    Attributes:
        extractor: of features, or None.
        reference: that features are compared with; None for the baseline's pictures.
        lpips: from two batches to distances [N], or None.
        judge: or None.
        resamples: of the bootstrap.
        device: of matrix products.
    """

    extractor: Extractor | None = None
    reference: Reference | None = None
    lpips: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    judge: Judge | None = None
    resamples: int = evaluation.RESAMPLES
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def check(store: Store, measures: Sequence[str], means: Means) -> None:
    """Check everything that can be checked before a picture is read.

    Raises:
        UserError: no finished shard, a measure that these means do not allow, or a reference of another size.
    """
    cells = store.cells()
    if not any(_begun(store, cell) for cell in cells):
        raise UserError(f"folder: {store.folder.address} holds no finished shard yet; run the sweep first.")
    kinds = {MEASURES[name].kind for name in measures}
    if kinds == {PAIR} and all(cell.baseline is None for cell in cells):
        raise UserError(
            "measures: no cell has a plain sampler's cell to be compared with; add the plain sampler to the sweep."
        )
    reference = means.reference
    if reference is None or FEATURES not in kinds:
        return
    if reference.count == 0 and (
        other := [m for m in measures if MEASURES[m].kind == FEATURES and m not in ("fid", "frechet", "is")]
    ):
        raise UserError(
            f"reference: {reference.name} holds statistics only, which do not allow {', '.join(other)}; give pictures."
        )
    if reference.count == 0 and means.extractor is not None and means.extractor.name != INCEPTION:
        raise UserError(
            f"reference: {reference.name} holds statistics of Inception, not of {means.extractor.name}; give pictures."
        )
    wrong = next((cell for cell in cells if reference.count and cell.size != reference.size), None)
    if wrong is not None:
        (h, w), (own_h, own_w) = reference.size, wrong.size
        raise UserError(
            f"reference: {reference.name} holds pictures of {w} x {h} pixels, and {wrong.id} of {own_w} x {own_h}; give a "
            "reference of that size."
        )


def evaluate(
    store: Store, measures: Sequence[str], means: Means, log: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """Measure all cells; returns the results of these measures, computed now or before.

    Args:
        measures: keys of :data:`MEASURES`.
        log: is given a line per cell and remark.

    Raises:
        UserError: see :func:`check`; or a shard is damaged.
    """
    check(store, measures, means)
    work = _Evaluation(store, measures, means)
    known = latest(read_results(store))
    out: list[Result] = []
    for cell in store.cells():
        done = [(name, known.get((cell.id, (name, work.extractor(name))))) for name in measures]
        digests = {name: work.digest(cell, name) for name in measures}
        kept = [result for name, result in done if result is not None and result.digest == digests[name]]
        missing = [
            name for name in measures if name not in {result.measure for result in kept} and work.applies(cell, name)
        ]
        new = work.results(cell, missing, digests) if missing else []
        if new:
            store.append_results([to_line(result) for result in new])
        out += sorted([*kept, *new], key=lambda result: measures.index(result.measure))
        count = _images(work.shards(cell))
        short = "" if count == cell.images else f"; {count} of its {cell.images} images are finished"
        log(f"{cell.title}: {len(new)} measured, {len(kept)} were there{short}")
    return out


class _Evaluation:
    """One run: caches of what several cells need."""

    def __init__(self, store: Store, measures: Sequence[str], means: Means):
        self.store, self.measures, self.means = store, measures, means
        self.by_id = {cell.id: cell for cell in store.cells()}
        self._shards: dict[str, list[Shard]] = {}
        self._plain: dict[str, dict[str, Estimate]] = {}
        self._gaussians: dict[str, Gaussian] = {}
        self._references: dict[str, np.ndarray] = {}

    # ---------------------------------------------------------------------------------------- what depends on what

    def shards(self, cell: Cell) -> list[Shard]:
        if cell.id not in self._shards:
            self._shards[cell.id] = self.store.shards(cell)
        return self._shards[cell.id]

    def baseline(self, cell: Cell) -> Cell | None:
        return None if cell.baseline is None else self.by_id.get(cell.baseline)

    def pairs(self, cell: Cell, other: Cell) -> list[tuple[Shard, Shard]]:
        """Finished shards of both cells with the same images."""
        theirs = {(shard.first, shard.count): shard for shard in self.shards(other)}
        return [(s, theirs[s.first, s.count]) for s in self.shards(cell) if (s.first, s.count) in theirs]

    def extractor(self, measure: str) -> str:
        kind = MEASURES[measure].kind
        if kind == FEATURES:
            return self.means.extractor.name if self.means.extractor else ""
        return JUDGE if kind == JUDGE else ""

    def against(self, cell: Cell, measure: str) -> str:
        if measure == "is":
            return ""
        if MEASURES[measure].kind == JUDGE:
            return "picture book" if measure == "judge-frechet" else ""
        if MEASURES[measure].kind == FEATURES and self.means.reference is not None:
            return self.means.reference.name
        return cell.baseline or ""

    def applies(self, cell: Cell, measure: str) -> bool:
        """Whether a cell has this measure."""
        if not self.shards(cell):
            return False
        kind, plain = MEASURES[measure].kind, self.baseline(cell)
        if kind == JUDGE:
            assert self.means.judge is not None
            return self.means.judge.judges(cell.size, self.store.labels(cell, self.shards(cell)[0]))
        if kind == FEATURES and (self.means.reference is not None or measure == "is"):
            return True
        return plain is not None and bool(self.pairs(cell, plain))

    def digest(self, cell: Cell, measure: str) -> str:
        """Digest of all that a figure depends on."""
        plain = self.baseline(cell)
        parts = [
            str(ALGORITHM),
            measure,
            self.extractor(measure),
            self.against(cell, measure),
            str(self.means.resamples),
        ]
        parts += [shard.sha256 for shard in self.shards(cell)]
        # Features' and judge's figures have a difference from the baseline's.
        parts += ["baseline", *(shard.sha256 for shard in self.shards(plain))] if plain else []
        if MEASURES[measure].kind == FEATURES and self.means.reference is not None:
            parts.append(self.means.reference.digest)
        if MEASURES[measure].kind == JUDGE and self.means.judge is not None:
            parts.append(self.means.judge.digest)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    # ---------------------------------------------------------------------------------------- figures

    def results(self, cell: Cell, measures: Sequence[str], digests: dict[str, str]) -> list[Result]:
        """Results of a cell."""
        found: dict[str, tuple[Figure, tuple[float | None, float | None, float | None], str, int]] = {}
        pairs = [name for name in measures if MEASURES[name].kind == PAIR]
        plain = self.baseline(cell)
        if pairs and plain is not None:
            found |= {
                name: (figure, (None, None, None), word, n)
                for name, (figure, word, n) in self._paired(cell, plain, pairs).items()
            }
        others = [name for name in measures if MEASURES[name].kind != PAIR]
        if others:
            own = self._estimates(cell, others)
            base = self._of_baseline(plain, others) if plain is not None and self._same_images(cell, plain) else {}
            for name, value in own.items():
                apart = value.minus(base[name]) if name in base else None
                away = apart.figure() if apart is not None else Figure(None)
                found[name] = (
                    MEASURES[name].figure(value),
                    (away.value, away.low, away.high),
                    "",
                    _images(self.shards(cell)),
                )
        return [
            Result(
                cell.id,
                name,
                self.extractor(name),
                self.against(cell, name),
                n,
                digests[name],
                figure.value,
                figure.low,
                figure.high,
                difference,
                word,
            )
            for name, (figure, difference, word, n) in found.items()
        ]

    def _same_images(self, cell: Cell, other: Cell) -> bool:
        return len(self.pairs(cell, other)) == len(self.shards(cell)) == len(self.shards(other))

    def _paired(self, cell: Cell, plain: Cell, measures: Sequence[str]) -> dict[str, tuple[Figure, str, int]]:
        """Figures of pairs of pictures: by measure the figure, the word in its place and the number of pairs."""
        pairs = self.pairs(cell, plain)
        if cell.size != plain.size:
            return {name: (Figure(None), OTHER_SIZE, _images([s for s, _ in pairs])) for name in measures}
        values: dict[str, list[np.ndarray]] = {name: [] for name in ("psnr", *measures)}
        needed = [name for name in measures if name not in ("psnr", "identical")] if not cell.lossless else []
        for own, other in pairs:
            a, b = self.store.pictures(cell, own), self.store.pictures(plain, other)
            values["psnr"].append(evaluation.squared_errors(a, b))
            if "ssim" in needed:
                values["ssim"].append(evaluation.similarities(a, b))
            if LPIPS in needed and self.means.lpips is not None:
                values[LPIPS].append(self.means.lpips(a, b))
        errors = np.concatenate(values["psnr"])
        out: dict[str, tuple[Figure, str, int]] = {}
        for name in measures:
            if name == "identical":
                out[name] = MEASURES[name].figure(self._estimate(mean(errors == 0), len(errors))), "", len(errors)
            elif not errors.any():
                out[name] = Figure(EQUAL.get(name)), IDENTICAL, len(errors)
            elif cell.lossless:
                out[name] = Figure(None), cell.lossless, len(errors)
            elif name == "psnr":
                out[name] = self._estimate(mean(errors), len(errors)).figure(evaluation.to_psnr), "", len(errors)
            else:
                each = np.concatenate(values[name])
                if np.isnan(each).any():
                    continue  # pictures too small for SSIM's window
                out[name] = MEASURES[name].figure(self._estimate(mean(each), len(each))), "", len(each)
        return out

    def _of_baseline(self, plain: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        known = self._plain.setdefault(plain.id, {})
        missing = [name for name in measures if name not in known and self.applies(plain, name)]
        return known | (self._estimates(plain, missing) if missing else {})

    def _estimates(self, cell: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        """Figures of features and of the judge."""
        out: dict[str, Estimate] = {}
        if names := [name for name in measures if MEASURES[name].kind == FEATURES]:
            out |= self._of_features(cell, names)
        if names := [name for name in measures if MEASURES[name].kind == JUDGE]:
            out |= self._of_judge(cell, names)
        if cell.baseline is None:
            self._plain.setdefault(cell.id, {}).update(out)
        return out

    def _estimate(self, statistic: Statistic, n: int, biased: bool = False) -> Estimate:
        return estimate(statistic, n, self.means.resamples, biased)

    def _of_features(self, cell: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        extractor, out = self.means.extractor, {}
        assert extractor is not None
        features, logits = _extracted(extractor, self._pictures(cell))
        if "is" in measures:
            if logits is None:
                raise UserError(f"is: {extractor.name} has no class logits; it is a measure of {INCEPTION}.")
            out["is"] = self._estimate(evaluation.inception_score(logits), len(logits), biased=True)
        which = "" if self.means.reference is not None else str(cell.baseline)
        for name in measures:
            if name in ("fid", "frechet"):
                out[name] = self._estimate(
                    evaluation.frechet(features, self._gaussian(which)), len(features), biased=True
                )
            elif name == "kid":
                blocks = evaluation.kernel_distances(features, self._reference(which), self.means.device)
                out[name] = self._estimate(mean(blocks), len(blocks))
            elif name in ("precision", "recall"):
                sides = (features, self._reference(which))
                inside = evaluation.covered(*(sides if name == "precision" else sides[::-1]), self.means.device)
                out[name] = self._estimate(mean(inside), len(inside))
        return out

    def _pictures(self, cell: Cell) -> Iterator[np.ndarray]:
        """The pictures of a cell, shard by shard; of the shards that were finished when this run began."""
        return (self.store.pictures(cell, shard) for shard in self.shards(cell))

    def _reference(self, which: str) -> np.ndarray:
        """Features of the reference, or of the cell with that id."""
        if which not in self._references:
            reference, extractor = self.means.reference, self.means.extractor
            assert extractor is not None
            if reference is not None:
                images: Iterator[np.ndarray] = reference.images()
            else:
                images = self._pictures(self.by_id[which])
            self._references = {which: _extracted(extractor, images)[0]}  # one at a time
        return self._references[which]

    def _gaussian(self, which: str) -> Gaussian:
        if which not in self._gaussians:
            reference = self.means.reference
            known = reference.statistics() if reference is not None else None
            if known is None:
                features = torch.from_numpy(self._reference(which).astype(np.float64)).to(self.means.device)
                self._gaussians = {which: Gaussian.of(features)}
            else:
                self._gaussians = {which: Gaussian(*(torch.from_numpy(x.copy()).to(self.means.device) for x in known))}
        return self._gaussians[which]

    def _of_judge(self, cell: Cell, measures: Sequence[str]) -> dict[str, Estimate]:
        judge, shards = self.means.judge, self.shards(cell)
        assert judge is not None
        read = [judge.read(self.store.pictures(cell, s), self.store.labels(cell, s)) for s in shards]
        features = np.concatenate([part for part, _ in read])
        shares = {name: np.concatenate([flags[name] for _, flags in read]) for name in read[0][1]}
        out = {name: self._estimate(mean(shares[name]), len(features)) for name in measures if name in shares}
        if "judge-frechet" in measures:
            real = torch.from_numpy(judge.reference(len(features), cell.size[0]).astype(np.float64))
            out["judge-frechet"] = self._estimate(
                evaluation.frechet(features, Gaussian.of(real.to(self.means.device))), len(features), biased=True
            )
        return out


def _extracted(extractor: Extractor, images: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """Features [N, D] of all pictures, and logits [N, C] or None."""
    parts = [extractor(pictures) for pictures in images]
    logits = [part for _, part in parts if part is not None]
    return np.concatenate([part for part, _ in parts]), np.concatenate(logits) if logits else None


def _begun(store: Store, cell: Cell) -> bool:
    """Whether a shard of a cell is finished. No shard is read."""
    return any(_RECORD.fullmatch(name) for name in store.folder.names(f"cells/{cell.id}"))


def _images(shards: Sequence[Shard]) -> int:
    return sum(shard.count for shard in shards)
