"""Which accelerator is fastest within a loss: a short paired calibration on the user's own model, device and batch.

Every round has one seed. The first runs the plain sampler once and then all candidates, to find those that can still win. In the later
ones each of these runs next to the plain sampler, before and behind it in turn, so that other load on the machine affects both. The
figures are the median of the rounds' time ratios and the mean of their distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

import numpy as np

from ..errors import UserError
from ..reports.quality import DISTRIBUTION, Quality, measure
from ..reports.record import Report
from . import presets
from .choice import Choice, parse_choice
from .registry import LLAMAGEN, MAR, TAR
from .settings import knob

PSNR, SSIM, ACCEPTANCE, EXACT, LOSSLESS = "PSNR", "SSIM", "acceptance", "identical", "same distribution"
PAR = "par"
# Lines of the candidates by plain sampler; those of the second list need a draft model.
_CANDIDATES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    MAR: (
        (
            "fasthybrid: preset=balanced",
            "fasthybrid: preset=fast",
            "lazymar: preset=balanced",
            "lazymar: preset=fast",
            "fasthybrid+lazymar: preset=balanced",
            "fasthybrid+lazymar: preset=fast",
            "mar: diffusion_steps_end=10",
            "mar: speculation=8",
        ),
        ("cspd: mode=lossless", "cspd: preset=balanced", "cspd: preset=fast"),
    ),
    LLAMAGEN: (
        (
            "llamagen: parallel=16",
            "zipar: preset=balanced",
            "zipar: preset=fast",
            "zipar: preset=balanced, parallel=16",
        ),
        ("mulosd: preset=balanced", "mulosd: preset=fast"),
    ),
    PAR: (("par: parallel=4", "par: parallel=16"), ()),
}
_CANDIDATES[TAR] = (
    tuple(line.replace("llamagen", "tar") for line in _CANDIDATES[LLAMAGEN][0]),
    _CANDIDATES[LLAMAGEN][1],
)
# A candidate is run again while its ratio is at least this share of the best one's; one round on a busy machine varies by that much.
_CLOSE = 0.6

# Draws pictures uint8 [N, H, W, 3] with a choice and a seed.
Run = Callable[[Choice, int], tuple[np.ndarray, Report]]


@dataclass(frozen=True)
class AdviceSettings:
    """How a calibration is made."""

    measure: str = knob(
        SSIM,
        "How the loss is measured. SSIM and PSNR: closeness to the plain sampler's picture with the same seed; acceptance: share of drafts "
        "kept, where there are drafts; identical: every pixel is equal; same distribution: identical, or a lossless method. Identical "
        "pictures, and with SSIM and PSNR lossless methods too, pass whatever the limit.",
        choices=(SSIM, PSNR, ACCEPTANCE, EXACT, LOSSLESS),
    )
    least: float = knob(
        0.9,
        "The least value that is accepted: SSIM 0 to 1, PSNR in dB, acceptance in percent. Higher is closer to plain sampling and slower.",
        low=0.0,
        high=100.0,
        step=0.01,
    )
    repeats: int = knob(
        3, "Rounds with a seed each. More is slower and steadier. Usual: 3.", low=1, high=100, step=1, unit="rounds"
    )


@dataclass
class Measured:
    """A candidate and what was measured of it.

    Attributes:
        choice: sampler and settings.
        ratios: the baseline's seconds divided by the candidate's, one per round.
        qualities: of the pictures, one per round.
        reports: one per round.
        problem: why it could not be run, or "".
    """

    choice: Choice
    ratios: list[float] = field(default_factory=list)
    qualities: list[Quality] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    problem: str = ""

    @property
    def ratio(self) -> float:
        """Median speed-up of the rounds in pairs, or else of the first round; 0 if it did not run."""
        return median(self.ratios[1:] or self.ratios) if self.ratios else 0.0

    @property
    def word(self) -> str:
        """The word in place of a distance, if it is the same in all rounds."""
        words = {q.word for q in self.qualities}
        return words.pop() if len(words) == 1 else ""

    def value(self, what: str) -> float | None:
        """Mean of a measure over the rounds: SSIM, PSNR (infinite if identical) or acceptance in percent; None if it has none."""
        if what == ACCEPTANCE:
            shares = [r.acceptance for r in self.reports if r.acceptance is not None]
            return 100 * mean(shares) if shares else None
        found = [q.ssim if what == SSIM else math.inf if q.identical else q.psnr for q in self.qualities]
        return None if not found or None in found else mean(v for v in found if v is not None)

    def passes(self, settings: AdviceSettings) -> bool:
        """Whether its loss is within the limit."""
        exact = bool(self.qualities) and all(q.identical for q in self.qualities)
        lossless = exact or bool(self.qualities) and all(q.word in (DISTRIBUTION, "identical") for q in self.qualities)
        if settings.measure in (EXACT, LOSSLESS):
            return exact if settings.measure == EXACT else lossless
        if exact or lossless and settings.measure != ACCEPTANCE:
            return True
        value = self.value(settings.measure)
        return value is not None and value >= settings.least


@dataclass(frozen=True)
class Advice:
    """Result of a calibration.

    Attributes:
        settings: how it was made.
        baseline: the plain sampler.
        measured: the candidates, those that pass first, each group by falling speed-up.
        best: the fastest candidate that passes and is faster than the baseline; else the baseline's choice.
    """

    settings: AdviceSettings
    baseline: Choice
    measured: tuple[Measured, ...]
    best: Choice

    @property
    def sentence(self) -> str:
        """The answer."""
        s = self.settings
        limit = s.measure if s.measure in (EXACT, LOSSLESS) else f"{s.measure} of at least {s.least:g}"
        won = next((m for m in self.measured if m.choice is self.best), None)
        if won is None:
            return f"No candidate is faster than {self.baseline.entry.title} with {limit}: keep it."
        return f"Fastest with {limit}: {won.choice.text}, {won.ratio:.2f} times as fast as {self.baseline.entry.title}."

    @property
    def table(self) -> str:
        """The answer and a Markdown table of all candidates."""
        head = ("sampler", "speed-up", "range", "acceptance", "PSNR", "SSIM", "within the limit")
        rows = [_row(m, self.settings) for m in self.measured]
        width = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
        lines = [
            "| " + " | ".join(c.ljust(w) for c, w in zip(line, width, strict=True)) + " |" for line in [head, *rows]
        ]
        rule = "|" + "|".join("-" * (w + 2) for w in width) + "|"
        failed = [f"{m.choice.text} was not run: {m.problem}" for m in self.measured if m.problem]
        return "\n".join([self.sentence, "", lines[0], rule, *lines[1:], *([""] if failed else []), *failed])


def _row(m: Measured, settings: AdviceSettings) -> tuple[str, ...]:
    if not m.ratios:
        return (m.choice.text, *[""] * 5, "not run")
    accepted, ssim = m.value(ACCEPTANCE), m.value(SSIM)
    near = m.word or f"{m.value(PSNR) or 0:.1f} dB"
    return (
        m.choice.text,
        f"{m.ratio:.2f}x",
        f"{min(m.ratios):.2f} to {max(m.ratios):.2f}",
        "" if accepted is None else f"{accepted:.0f} %",
        near,
        "" if ssim is None or m.word else f"{ssim:.3f}",
        "yes" if m.passes(settings) else "no",
    )


def candidates(plain: str, draft: bool) -> list[Choice]:
    """The choices that are tried on a model.

    Args:
        plain: name of its plain sampler: mar, llamagen, tar or par.
        draft: whether there is a draft model.
    """
    own, drafted = _CANDIDATES[plain]
    return [parse_choice(line, "sampler") for line in [*own, *(drafted if draft else ())]]


def calibrate(
    plain: Choice, tried: Sequence[Choice], run: Run, settings: AdviceSettings, seed: int
) -> Generator[tuple[int, int, str], None, Advice]:
    """Measure the candidates. A generator: yields (runs done, runs planned, next line) before every run and returns the Advice.

    Args:
        plain: the baseline.
        tried: the candidates; one that cannot run on the model is left out and named in the table.
        run: draws with a choice and a seed.
        settings: measure, limit and rounds.
        seed: of the first round; the others follow.

    Raises:
        UserError: the baseline cannot run.
    """
    found = [Measured(choice) for choice in tried]
    left, done = list(found), 0
    for repeat in range(settings.repeats):
        at = seed + repeat
        paired = repeat > 0
        planned = done + (settings.repeats - repeat) * (2 if paired else 1) * max(1, len(left)) + (not paired)
        if not paired:
            yield done, planned, plain.text
            base = run(plain, at)
            done += 1
        for k, m in enumerate(list(left)):
            first = plain if paired and (repeat + k) % 2 else m.choice
            yield done, planned, first.text
            try:
                made = {id(first): run(first, at)}
                done += 1
                if paired:
                    second = m.choice if first is plain else plain
                    yield done, planned, second.text
                    made[id(second)] = run(second, at)
                    base = made[id(plain)]
                    done += 1
            except UserError as problem:
                m.problem = str(problem)
                left.remove(m)
                continue
            own, report = made[id(m.choice)]
            m.ratios.append(report.speedup(base[1]) or 0.0)
            m.qualities.append(measure(own, base[0], DISTRIBUTION if presets.lossless(report) else ""))
            m.reports.append(report)
        left = _contenders(left, settings)
    # One baseline of the first round says little on a busy machine: what was measured in pairs comes first.
    ranked = sorted(found, key=lambda m: (not m.passes(settings), len(m.ratios) < 2, -m.ratio))
    won = next((m for m in ranked if m.passes(settings) and m.ratio > 1), None)
    return Advice(settings, plain, tuple(ranked), won.choice if won else plain)


def _contenders(left: Sequence[Measured], settings: AdviceSettings) -> list[Measured]:
    """Candidates worth another round: not much slower than the best that passes, and not far from the limit."""
    best = max((m.ratio for m in left if m.passes(settings)), default=0.0)
    margin = {SSIM: 0.1, PSNR: 3.0, ACCEPTANCE: 10.0}.get(settings.measure, 0.0)

    def close(m: Measured) -> bool:
        value = m.value(settings.measure) if margin else None
        return m.passes(settings) or value is not None and value >= settings.least - margin

    return [m for m in left if m.ratio >= max(_CLOSE * best, _CLOSE) and close(m)]
