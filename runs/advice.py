"""Which accelerator is fastest within a loss: a short paired calibration on the user's own model, device and batch.

Every round has one seed. The first runs the plain sampler once and then all candidates. In the later rounds, the
repeats, each candidate that can still win runs next to the plain sampler, before and after it in turn, so that other
load on the machine affects both. The figures are the median of the pairs' time ratios and the distances over all
rounds. The first round has no pairs; its ratios only decide what runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from time import monotonic
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from ..reports.quality import Quality, measure
from ..reports.record import Report, repeated
from ..reports.sweep import Cell
from ..reports.timing import middle
from .advice_text import advice_table, answer_of
from .baseline import quality_word
from .choice import Choice, parse_choice
from .limits import SEEDS
from .measured import ACCEPTANCE, PSNR, SSIM, AdviceSettings, Measured
from .presets import BALANCED, FAST, PRESETS
from .registry import SAMPLERS

# Further candidates by plain sampler, beside the presets of the accelerators.
_MORE: dict[str, tuple[str, ...]] = {
    "mar": (
        "fasthybrid+lazymar: preset=balanced",
        "fasthybrid+lazymar: preset=fast",
        "mar: preset=few steps",
        "mar: diffusion_steps_end=10",
        "mar: speculation=8",
        "cspd: mode=lossless",
    ),
    "llamagen": ("llamagen: parallel=16", "zipar: preset=balanced, parallel=16"),
    "tar": ("tar: parallel=16", "zipar: preset=balanced, parallel=16"),
    "par": ("par: parallel=4", "par: parallel=16"),
    "bitdance": ("bitdance: diffusion_steps=25", "bitdance: diffusion_steps_end=10", "bitdance: speculation=8"),
    "nextstep": ("nextstep: diffusion_steps=20", "nextstep: diffusion_steps_end=10", "nextstep: speculation=8"),
}
# A candidate is run again while its ratio is at least this share of the best one's; one round on a busy machine varies
# by that much.
_CLOSE = 0.6
# How far from the limit a candidate may be to be run again.
_MARGINS = {SSIM: 0.1, PSNR: 3.0, ACCEPTANCE: 10.0}

# Samples images uint8 [N, H, W, 3] with a choice and a seed.
MakeImages = Callable[[Choice, int], tuple[np.ndarray, Report]]


class Progress(NamedTuple):
    """What runs next in a calibration."""

    done: int  # runs
    planned: int  # an estimate of all runs
    line: str  # the sampler that runs next
    seconds_left: float | None  # at most, by the newest run of each candidate; None in the first round


class Shown(NamedTuple):
    """A run of the calibration: its images with the figures of all its repeats."""

    images: np.ndarray  # uint8 [N, H, W, 3]
    report: Report
    quality: Quality | None = None  # over all rounds; None of the plain sampler


class Advice(NamedTuple):
    """Result of a calibration."""

    measured: tuple[Measured, ...]  # the candidates, those within the limit first, each group by falling speed-up
    best: Choice  # the fastest candidate within the limit that is faster than the baseline, else the baseline's choice
    sentence: str  # the answer
    table: str  # the answer and a Markdown table of all candidates
    shown: tuple[Shown, ...]  # the plain sampler and then the answer, of the same seeds; one if that is the same


def candidates(plain: str, draft: bool) -> list[Choice]:
    """The choices that are tried on a model.

    Each accelerator of its family with *balanced* and *fast*, then further ones.

    Args:
        plain: its plain sampler.
        draft: whether there is a draft model.
    """
    choices = []
    entry = SAMPLERS[plain]
    if entry.baseline:  # a PAR has no accelerators
        for other in SAMPLERS.values():
            if entry.families[0] in other.families and other.settings in PRESETS:
                choices += [Choice(other, BALANCED), Choice(other, FAST)]

    choices += [parse_choice(line, "sampler") for line in _MORE.get(plain, ())]
    return [choice for choice in choices if draft or not choice.entry.needs_draft]


def calibrate(
    plain: Choice, tried: Sequence[Choice], make_images: MakeImages, settings: AdviceSettings, seed: int
) -> Generator[Progress, None, Advice]:
    """Measure the candidates. A generator: yields its Progress before every run and returns the Advice.

    Args:
        plain: the baseline.
        tried: the candidates; one that cannot run on the model is left out and named in the table.
        make_images: samples with a choice and a seed.
        settings: measure, limit and rounds.
        seed: of the first round, 0 to 2^64 - 1; the next seeds follow, with 0 after 2^64 - 1.

    Raises:
        UserError: the baseline cannot run.
    """
    measured = [Measured(choice) for choice in tried]
    left = list(measured)
    runs = _Runs(plain, make_images)
    rounds = settings.repeats + 1
    for k in range(rounds):
        at = (seed + k) % SEEDS
        paired = k > 0
        planned = _planned_runs(runs.done, paired, rounds - k, len(left))

        # 1. The first round has one run of the plain sampler for all candidates.
        if not paired:
            yield Progress(runs.done, planned, plain.text, None)
            runs.plain(at)

        # 2. Every candidate; later ones beside the plain sampler, before and after it in turn.
        this_round = list(left)  # a copy: the loop removes some of the other candidates
        for i, m in enumerate(this_round):
            seconds = runs.seconds([*this_round[i:], *(rounds - k - 1) * left]) if paired else None
            plain_first = paired and (k + i) % 2 == 1
            if plain_first:
                yield Progress(runs.done, planned, plain.text, seconds)
                runs.plain(at)

            yield Progress(runs.done, planned, m.choice.text, seconds)
            try:
                images, report = runs.of(m.choice, at)
            except UserError as problem:
                m.problem = str(problem)
                m.cells.clear()
                left.remove(m)
                continue

            if paired and not plain_first:
                yield Progress(runs.done, planned, plain.text, seconds)
                runs.plain(at)

            plain_images, plain_report = runs.newest
            quality = measure(images, plain_images, quality_word(report, plain_report))
            m.cells.append(Cell(i, 0, at, "", report, plain_report, quality))
            if k <= 1:  # the values of the first pair
                m.images = (plain_images, images)

        # 3. Those that can still win.
        left = _worth_another_round(left, settings)

    return _judged(plain, measured, settings, runs)


class _Runs:
    """The runs of a calibration: counted, and timed with all that belongs to them, as a user waits for them."""

    def __init__(self, plain: Choice, make_images: MakeImages):
        self._plain = plain
        self._make_images = make_images
        self._took: dict[str, float] = {}  # seconds of the newest run of a sampler
        self.done = 0
        self.newest: tuple[np.ndarray, Report]  # images and report of the plain sampler

    def of(self, choice: Choice, seed: int) -> tuple[np.ndarray, Report]:
        """Images and report of a run."""
        began = monotonic()
        made = self._make_images(choice, seed)
        self._took[choice.text] = monotonic() - began
        self.done += 1
        return made

    def plain(self, seed: int) -> None:
        """Run the plain sampler."""
        self.newest = self.of(self._plain, seed)

    def seconds(self, measured: Sequence[Measured]) -> float:
        """Seconds that candidates take once more, each beside the plain sampler."""
        return sum(self._took[m.choice.text] + self._took[self._plain.text] for m in measured)


def _planned_runs(done: int, paired: bool, rounds_left: int, left: int) -> int:
    """An estimate of all runs, at the beginning of a round; ``left``: candidates in it."""
    left = max(1, left)
    if paired:
        return done + rounds_left * 2 * left  # every candidate beside a plain run

    # The first round: one plain run, then every candidate. Later rounds run two each, but of so few candidates that one
    # each of all is the better guess.
    return done + 1 + rounds_left * left


def _worth_another_round(left: Sequence[Measured], settings: AdviceSettings) -> list[Measured]:
    """Candidates that are not much slower than the best within the limit, and not far from the limit."""
    fastest = max((m.ratio for m in left if m.within_limit(settings)), default=0.0)
    least = _CLOSE * max(fastest, 1.0)
    margin = _MARGINS.get(settings.measure, 0.0)
    return [m for m in left if (m.ratio >= least or not m.timed) and m.within_limit(settings, margin)]


def _judged(plain: Choice, measured: Sequence[Measured], settings: AdviceSettings, runs: _Runs) -> Advice:
    """The advice of what was measured."""
    # One baseline of the first round says little on a busy machine: what was measured in pairs comes first.
    ranked = sorted(measured, key=lambda m: (not m.within_limit(settings), len(m.cells) < 2, -m.ratio))
    won = next((m for m in ranked if m.within_limit(settings) and m.always_faster), None)

    rivals = [m for m in ranked if won and m is not won and m.within_limit(settings) and m.may_be_as_fast_as(won)]
    answer = answer_of(plain, won, settings, rivals)
    return Advice(
        measured=tuple(ranked),
        best=won.choice if won else plain,
        sentence=answer,
        table=advice_table(answer, ranked, settings),
        shown=_shown(won) if won else (Shown(*runs.newest),),
    )


def _shown(won: Measured) -> tuple[Shown, Shown]:
    """The plain sampler's images and a candidate's, with the figures that the table gives."""
    assert won.images is not None
    plain_images, images = won.images
    pairs = won.cells[1:] or won.cells
    plain_report = repeated([cell.baseline for cell in pairs if cell.baseline is not None])
    report = repeated([cell.report for cell in pairs])

    # Seconds whose ratio is the speed-up; the medians of the two samplers may be from different pairs.
    if len(pairs) > 1:
        base, own = middle(list(zip(plain_report.timings, report.timings, strict=True)))
        plain_report = replace(plain_report, seconds=base)
        report = replace(report, seconds=own)

    point = won.point
    quality = Quality(point.psnr, point.ssim, point.word, point.psnr_low)
    return Shown(plain_images, plain_report), Shown(images, report, quality)
