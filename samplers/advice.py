"""Which accelerator is fastest within a loss: a short paired calibration on the user's own model, device and batch.

Every round has one seed. The first runs the plain sampler once and then all candidates. In the later rounds each
candidate that can still win runs next to the plain sampler, before and after it in turn, so that other load on the
machine affects both. The figures are the median of the pairs' time ratios and the mean of the rounds' distances. The
first round has no pairs; its ratios only decide what runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from ..reports.quality import DISTRIBUTION, IDENTICAL, closeness, measure
from ..reports.record import Report
from ..reports.sweep import Cell, Point, summary
from ..reports.table import literal, markdown, percent
from ..reports.timing import ONE_RUN, Speedup, speedup_of
from .baseline import word_for
from .choice import Choice, parse_choice
from .settings import Settings, knob, knobs

PSNR = "PSNR"
SSIM = "SSIM"
ACCEPTANCE = "acceptance"
EXACT = "identical"
LOSSLESS = "same distribution"
SEEDS = 1 << 64
_MAR = (
    "fasthybrid: preset=balanced",
    "fasthybrid: preset=fast",
    "lazymar: preset=balanced",
    "lazymar: preset=fast",
    "fasthybrid+lazymar: preset=balanced",
    "fasthybrid+lazymar: preset=fast",
    "mar: diffusion_steps_end=10",
    "mar: speculation=8",
    "cspd: mode=lossless",
    "cspd: preset=balanced",
    "cspd: preset=fast",
)
_TOKENS = (
    "zipar: preset=balanced",
    "zipar: preset=fast",
    "zipar: preset=balanced, parallel=16",
    "mulosd: preset=balanced",
    "mulosd: preset=fast",
)
# Lines of the candidates by plain sampler.
_CANDIDATES: dict[str, tuple[str, ...]] = {
    "mar": _MAR,
    "llamagen": ("llamagen: parallel=16", *_TOKENS),
    "tar": ("tar: parallel=16", *_TOKENS),
    "par": ("par: parallel=4", "par: parallel=16"),
    "bitdance": ("bitdance: diffusion_steps=25", "bitdance: diffusion_steps_end=10", "bitdance: speculation=8"),
}
# A candidate is run again while its ratio is at least this share of the best one's; one round on a busy machine varies
# by that much.
_CLOSE = 0.6
_LONGEST = 400  # characters of a reason in the table
# How far from the limit a candidate may be to be run again.
_MARGINS = {SSIM: 0.1, PSNR: 3.0, ACCEPTANCE: 10.0}
# Decimals of a figure in the table. It is judged as it is shown: what reads 0.900 passes a limit of 0.9.
_DECIMALS = {SSIM: 3, PSNR: 1, ACCEPTANCE: 1}

# Samples images uint8 [N, H, W, 3] with a choice and a seed.
Run = Callable[[Choice, int], tuple[np.ndarray, Report]]


# A field is its default and sentence, then its range.
# fmt: off


@dataclass(frozen=True)
class AdviceSettings(Settings):
    """How a calibration is made. Each measure has a limit of its own, because their units differ."""

    measure: str = knob(SSIM, "How closeness is measured: SSIM and PSNR compare with the plain sampler's image, "
        "acceptance is the share of drafts that were accepted. identical allows only equal images, same distribution "
        "also lossless methods.",
        choices=(SSIM, PSNR, ACCEPTANCE, EXACT, LOSSLESS))
    least_ssim: float = knob(0.9, "Lowest SSIM to accept, from 0 to 1, if measure is SSIM; higher is slower and closer "
        "to plain sampling. Usual: 0.9.", low=0.0, high=1.0, step=0.01)
    least_psnr: float = knob(25.0, "Lowest PSNR to accept, in dB, if measure is PSNR; higher is slower and closer to "
        "plain sampling. Usual: 20 to 40.", low=0.0, high=100.0, step=0.5, unit="dB")
    least_acceptance: float = knob(80.0, "Lowest share of accepted drafts, in percent, if measure is acceptance; "
        "higher is slower and closer to plain sampling. Usual: 80.",
        low=0.0, high=100.0, step=1.0, unit="%")
    repeats: int = knob(3, "Number of rounds, each with its own seed; more takes longer and gives steadier results. "
        "Usual: 3.",
        low=1, high=100, step=1, unit="rounds")


# fmt: on

    @property
    def least(self) -> float | None:
        """The limit of the chosen measure; None for measures that need none."""
        limits = {SSIM: self.least_ssim, PSNR: self.least_psnr, ACCEPTANCE: self.least_acceptance}
        return limits.get(self.measure)


@dataclass
class Measured:
    """A candidate with a cell per round; ``problem`` says why it could not be run, or is ""."""

    choice: Choice
    cells: list[Cell] = field(default_factory=list)
    problem: str = ""

    @property
    def point(self) -> Point:
        """Figures over the rounds."""
        return summary(self.cells)

    @property
    def speedup(self) -> Speedup | None:
        """Speed-up of the rounds in pairs, or of the first round if there are none; None if it did not run."""
        paired = self.cells[1:] or self.cells
        found = [cell.report.speedup(cell.baseline) for cell in paired]
        ratios = [one.value for one in found if one is not None and one.value is not None]
        if ratios:
            return speedup_of(ratios, note=ONE_RUN)

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
    def faster(self) -> bool:
        """Whether it was faster than the plain sampler in every round in pairs: more than the rounds differ."""
        found = self.speedup
        return found is not None and found.low is not None and round(found.low, 2) > 1

    def passes(self, settings: AdviceSettings, margin: float = 0.0) -> bool:
        """Whether its loss is within the limit, or at most ``margin`` beyond it."""
        if not self.cells:
            return False
        words = {cell.quality.word for cell in self.cells if cell.quality is not None}
        good = {IDENTICAL} if settings.measure in (EXACT, ACCEPTANCE) else {IDENTICAL, DISTRIBUTION}
        if words and words <= good:
            return True

        p = self.point
        value = {PSNR: p.psnr, SSIM: p.ssim, ACCEPTANCE: None if p.acceptance is None else 100 * p.acceptance}
        found = value.get(settings.measure)
        if found is None or settings.least is None:
            return False
        return round(found, _DECIMALS[settings.measure]) >= settings.least - margin


class Advice(NamedTuple):
    """Result of a calibration."""

    measured: tuple[Measured, ...]  # the candidates, those that pass first, each group by falling speed-up
    best: Choice  # the fastest candidate that passes and is faster than the baseline; else the baseline's choice
    sentence: str  # the answer
    table: str  # the answer and a Markdown table of all candidates


def candidates(plain: str, draft: bool) -> list[Choice]:
    """The choices that are tried on a model whose plain sampler is ``plain``: mar, llamagen, tar or par; ``draft``:
    with a draft model.
    """
    choices = [parse_choice(line, "sampler") for line in _CANDIDATES[plain]]
    return [choice for choice in choices if draft or not choice.entry.needs_draft]


def calibrate(
    plain: Choice, tried: Sequence[Choice], run: Run, settings: AdviceSettings, seed: int
) -> Generator[tuple[int, int, str], None, Advice]:
    """Measure the candidates. A generator: yields (runs done, runs planned, next line) before every run and returns the
    Advice.

    Args:
        plain: the baseline.
        tried: the candidates; one that cannot run on the model is left out and named in the table.
        run: samples with a choice and a seed.
        settings: measure, limit and rounds.
        seed: of the first round, 0 to 2^64 - 1; the others follow, 0 after 2^64 - 1.

    Raises:
        UserError: the baseline cannot run.
    """
    measured = [Measured(choice) for choice in tried]
    left = list(measured)
    done = 0
    margin = _MARGINS.get(settings.measure, 0.0)
    made: dict[bool, tuple[np.ndarray, Report]] = {}  # whether it is the plain sampler's to images and report
    for k in range(settings.repeats):
        at = (seed + k) % SEEDS
        paired = k > 0

        planned = done + (settings.repeats - k) * (1 + paired) * max(1, len(left)) + (not paired)
        if not paired:
            yield done, planned, plain.text
            made[True] = run(plain, at)
            done += 1

        for i, m in enumerate(list(left)):
            order = [False]
            if paired:
                order = [False, True] if (k + i) % 2 == 0 else [True, False]
            try:
                for is_plain in order:
                    choice = plain if is_plain else m.choice
                    yield done, planned, choice.text
                    made[is_plain] = run(choice, at)
                    done += 1
            except UserError as problem:
                m.problem = str(problem)
                left.remove(m)
                continue

            own, report = made[False]
            other, base = made[True]
            quality = measure(own, other, word_for(report, base))
            m.cells.append(Cell(i, 0, at, "", report, base, quality))

        # Worth another round: not much slower than the best that passes, and not far from the limit.
        fastest = max((m.ratio for m in left if m.passes(settings)), default=0.0)
        least = _CLOSE * max(fastest, 1.0)
        left = [m for m in left if (m.ratio >= least or not m.timed) and m.passes(settings, margin)]

    # One baseline of the first round says little on a busy machine: what was measured in pairs comes first.
    ranked = sorted(measured, key=lambda m: (not m.passes(settings), len(m.cells) < 2, -m.ratio))
    won = next((m for m in ranked if m.passes(settings) and m.faster), None)

    answer = _answer(plain, won, settings)
    return Advice(tuple(ranked), won.choice if won else plain, answer, _table(answer, ranked, settings))


def _answer(plain: Choice, won: Measured | None, settings: AdviceSettings) -> str:
    """The sentence about the fastest candidate within the limit, None if there is none."""
    limit = {EXACT: "identical images", LOSSLESS: "the same distribution"}.get(settings.measure, "")
    if settings.least is not None:
        unit = knobs(AdviceSettings)[f"least_{settings.measure.lower()}"][1].unit
        limit = f"{settings.measure} of at least {settings.least:g} {unit}".rstrip()

    if won is None:
        return f"No candidate is measurably faster than {plain.entry.title} with {limit}: keep it."

    speedup = won.speedup
    spread = speedup.range if speedup is not None else ""
    if not spread:
        spread = "one run each; raise repeats to measure it in turn"
    return f"Fastest with {limit}: {won.choice.text}, {won.ratio:.2f} times as fast as {plain.entry.title} ({spread})."


def _table(answer: str, ranked: Sequence[Measured], settings: AdviceSettings) -> str:
    """The answer and a Markdown table of all candidates."""
    rows = [["sampler", "acceptance", "PSNR", "SSIM", "speed-up", "within the limit"]]
    for m in ranked:
        if not m.cells:
            rows.append([m.choice.text, *[""] * 4, "not run"])
            continue

        kept = percent(m.point.acceptance, _DECIMALS[ACCEPTANCE])
        passes = "yes" if m.passes(settings) else "no"
        speedup = m.speedup.text if m.speedup is not None else ""
        rows.append([m.choice.text, kept, *closeness(m.point), speedup, passes])

    failed = [f"{m.choice.text} was not run: {literal(m.problem, _LONGEST)}" for m in ranked if m.problem]

    return "\n".join([answer, "", markdown(rows), *([""] if failed else []), *failed])
