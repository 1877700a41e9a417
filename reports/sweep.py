"""Figures of a sweep's cells: the work, the time and the quality of several runs of one method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from .quality import Quality, psnr_figures
from .record import Report
from .timing import BASELINE, Speedup, how_timed, shown_seconds, speedup_of
from .work import Work


@dataclass(frozen=True)
class Cell:
    """One combination of a sweep."""

    x: int  # index of the value
    y: int
    seed: int
    key: str  # name in the store
    report: Report  # without maps
    baseline: Report | None = None  # of the plain sampler with this seed
    quality: Quality | None = None  # of the images against the baseline's


@dataclass(frozen=True)
class Point:
    """Figures of a combination of values over the seeds: medians of times and of PSNR, means of the rest; None where
    unknown.

    Passes and head calls are without those of a draft model.
    """

    x: int
    y: int
    speedup: Speedup | None
    seconds: float
    passes: float
    acceptance: float | None
    psnr: float | None
    ssim: float | None
    word: str
    head_calls: float | None = None
    seeds: int = 1
    first_run: bool = False  # whether a run of it was the first of its network
    psnr_low: float | None = None  # below which one image in ten is; None for one image

    @property
    def timed(self) -> str:
        """The seconds and how they were measured."""
        how = how_timed(self.seeds, self.first_run)
        return f"{shown_seconds(self.seconds)} ({how})"


def summary(cells: Sequence[Cell]) -> Point:
    """Figures over the seeds of one combination of values, at least one cell."""
    reports = [cell.report for cell in cells]
    qualities = [cell.quality for cell in cells if cell.quality is not None]

    work = Work.of((report.images, report.counts) for report in reports)
    psnrs: list[float] = []
    for quality in qualities:
        psnrs += quality.psnrs or _known([quality.psnr])
    psnr, psnr_low = psnr_figures(psnrs) if psnrs else (None, None)
    ssims = _known(quality.ssim for quality in qualities)

    # A word that holds for all.
    words = {quality.word for quality in qualities}

    return Point(
        x=cells[0].x,
        y=cells[0].y,
        speedup=_over_seeds([cell.report.speedup(cell.baseline) for cell in cells]),
        seconds=median(report.seconds for report in reports),
        passes=work.own_a_run("transformer_passes") or 0,
        acceptance=work.acceptance,
        psnr=psnr,
        ssim=mean(ssims) if ssims else None,
        word=words.pop() if len(words) == 1 else "",
        head_calls=work.own_a_run("head_calls"),
        seeds=len(cells),
        first_run=any(report.first_run for report in reports),
        psnr_low=psnr_low,
    )


def _over_seeds(found: Sequence[Speedup | None]) -> Speedup | None:
    """The speed-ups of a combination of values, one a seed, as one; None if one is unknown.

    The plain sampler's run is the first of each seed, so that other load on the machine may affect one of a pair alone:
    they are no repeats in turn.
    """
    known = [speedup for speedup in found if speedup is not None]
    if not known or len(known) < len(found):
        return None

    if all(speedup.note == BASELINE for speedup in known):
        return known[0]

    ratios = _known(speedup.value for speedup in known)
    if len(known) == 1 or len(ratios) < len(known):
        return next((speedup for speedup in known if speedup.value is None), known[0])
    return speedup_of(ratios, of="seeds")


def _known(values: Iterable[float | None]) -> list[float]:
    """The values that are not None."""
    return [value for value in values if value is not None]
