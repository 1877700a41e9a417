"""A candidate of a calibration: what was measured of it, and whether that is within the user's limit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..reports.quality import DISTRIBUTION, IDENTICAL, OTHER_IMAGE
from ..reports.sweep import Cell, Point, summary
from ..reports.timing import Speedup, speedup_of_pairs
from ..samplers.settings import Settings, knob
from .choice import Choice

PSNR = "PSNR"
SSIM = "SSIM"
ACCEPTANCE = "acceptance"
EXACT = "identical"
LOSSLESS = "same distribution"
# Decimals of a figure in the table. It is compared as it is shown: what reads 0.900 passes a limit of 0.9.
DECIMALS = {SSIM: 3, PSNR: 1, ACCEPTANCE: 1}


# In each field: first the default and the tooltip, then the range.
# fmt: off


@dataclass(frozen=True)
class AdviceSettings(Settings):
    """How a calibration is made. Each measure has its own limit, because their units differ."""

    measure: str = knob(SSIM, "What Advisor compares with the limit. SSIM and PSNR measure how similar a sampler's "
        "image is to the unaccelerated sampler's image; acceptance is the share of a sampler's drafts that were "
        "accepted. identical and same distribution have no limit: with identical, a sampler passes if every pixel is "
        "equal; with same distribution, a sampler also passes if it keeps the distribution of the images.",
        choices=(SSIM, PSNR, ACCEPTANCE, EXACT, LOSSLESS),
        more="Identical images always pass. With *SSIM* and *PSNR*, a sampler that keeps the distribution of the "
            "images passes at any limit. A sampler that is meant to give a *different image*, for example with fewer "
            "steps, passes with *SSIM* and *PSNR* only if the limit is 0.")
    least_ssim: float = knob(0.9, "Used only if 'measure' is 'SSIM': the lowest SSIM to accept, from 0 to 1; with a "
        "higher limit, the recommended sampler is slower, but its images are closer to the unaccelerated images. "
        "Usual: 0.9.",
        low=0.0, high=1.0, step=0.01)
    least_psnr: float = knob(25.0, "Used only if 'measure' is 'PSNR': the lowest PSNR to accept, in dB; with a "
        "higher limit, the recommended sampler is slower, but its images are closer to the unaccelerated images. "
        "Usual: 20 to 40.",
        low=0.0, high=100.0,
        step=0.5, unit="dB")
    least_acceptance: float = knob(80.0, "Used only if 'measure' is 'acceptance': the lowest share of accepted "
        "drafts, in percent; with a higher limit, the recommended sampler is slower, but its images are closer to "
        "the unaccelerated images. Usual: 80.",
        low=0.0, high=100.0, step=1.0, unit="%")
    repeats: int = knob(2, "The first round tries every sampler once; this setting is the number of repeats after the "
        "first round. More repeats take longer and give steadier results. Usual: 2.",
        low=1, high=100, step=1,
        more="After each round, Advisor drops the samplers that are too slow to be the fastest, or too far outside "
            "the limit.")


    @property
    def least(self) -> float | None:
        """The limit of the chosen measure; None for measures that need none."""
        limits = {SSIM: self.least_ssim, PSNR: self.least_psnr, ACCEPTANCE: self.least_acceptance}
        return limits.get(self.measure)


# fmt: on


@dataclass
class Measured:
    """What was measured of a candidate."""

    choice: Choice
    cells: list[Cell] = field(default_factory=list)  # of every round; the first has no pair
    images: tuple[np.ndarray, np.ndarray] | None = None  # the plain sampler's and its own, of the first pair
    problem: str = ""  # why it could not be run

    @property
    def point(self) -> Point:
        """Figures over the rounds."""
        return summary(self.cells)

    @property
    def speedup(self) -> Speedup | None:
        """Speed-up of the rounds in pairs, or of the first round if there are none; None if it did not run."""
        paired = self.cells[1:] or self.cells
        found = [cell.report.speedup(cell.baseline) for cell in paired]
        timed = [cell for cell, one in zip(paired, found, strict=True) if one is not None and one.value is not None]
        pairs = [(cell.baseline.seconds, cell.report.seconds) for cell in timed if cell.baseline is not None]
        if pairs:
            return speedup_of_pairs(pairs)

        # A first run, which compiles: its note says so.
        return next((one for one in found if one is not None), None)

    @property
    def ratio(self) -> float:
        """Median speed-up; 0 if it did not run."""
        found = self.speedup
        return found.value if found is not None and found.value is not None else 0.0

    @property
    def timed(self) -> bool:
        """Whether its speed-up is known; not after a first run, which compiles."""
        return self.ratio > 0

    @property
    def always_faster(self) -> bool:
        """Whether it was faster than the plain sampler in every round in pairs: more than the rounds differ."""
        found = self.speedup
        return found is not None and found.low is not None and round(found.low, 2) > 1

    def may_be_as_fast_as(self, other: Measured) -> bool:
        """Whether the repeats of both overlap: another calibration may find this one the faster of the two."""
        own = self.speedup
        others = other.speedup
        if len(self.cells) < 2 or own is None or others is None or own.high is None or others.low is None:
            return False
        return own.high >= others.low

    def within_limit(self, settings: AdviceSettings, margin: float = 0.0) -> bool:
        """Whether its loss is within the limit, or at most ``margin`` beyond it."""
        if not self.cells:
            return False

        # 1. Images that need no figures: equal ones; for SSIM, PSNR and same distribution also lossless runs, whose
        # images have the same distribution.
        words = {cell.quality.word for cell in self.cells if cell.quality is not None}
        good = {IDENTICAL} if settings.measure in (EXACT, ACCEPTANCE) else {IDENTICAL, DISTRIBUTION}
        if words and words <= good:
            return True

        # 2. The figure, as the table shows it.
        p = self.point
        value = {PSNR: p.psnr, SSIM: p.ssim, ACCEPTANCE: None if p.acceptance is None else 100 * p.acceptance}
        found = value.get(settings.measure)
        if OTHER_IMAGE in words and settings.measure in (PSNR, SSIM):
            found = 0.0  # not meant to be close: a limit of 0 accepts it
        if found is None or settings.least is None:
            return False
        return round(found, DECIMALS[settings.measure]) >= settings.least - margin
