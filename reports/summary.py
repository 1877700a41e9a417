"""A report in one line, and the result of a comparison in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import amount
from .quality import (
    DISTRIBUTION,
    IDENTICAL,
    OTHER_CONDITION,
    OTHER_EDIT,
    OTHER_IMAGE,
    OTHER_MODEL,
    OTHER_SEED,
    OTHER_SIZE,
    Quality,
)
from .record import Report, counted
from .table import percent
from .timing import BASELINE, FIRST_RUN, how_timed, shown_seconds, times_as_fast

# PSNR in dB from which an image is called the same within rounding, nearly the same, and a similar one. Rounding
# changes a few pixels by one level of 256; a change of every pixel by one level is 48 dB.
ROUNDED = 60.0
NEARLY = 30.0
SIMILAR = 20.0
# Ratios of the seconds of two single runs: above the first, other load on the machine cannot be the reason; from the
# second on, a run is called faster.
_CLEAR = 2.0
_FASTER = 1.1
# Words of runs that drew different things, so that there is no result of the method.
_OTHER_TASKS = (OTHER_SEED, OTHER_CONDITION, OTHER_EDIT, OTHER_SIZE)


# Counts that say what a run does one after another, and their units.
_WORK = (("transformer_passes", "passes"), ("head_calls", "diffusion calls"))


class Gain(NamedTuple):
    """What a run saves."""

    ratio: float  # of the baseline's work or seconds to the run's; 1 without a gain
    text: str


def headline(
    labels: Sequence[str], reports: Sequence[Report | None], base: int, quality: Sequence[Quality | None]
) -> str:
    """The result of runs that have one baseline, in one line: "57 passes instead of 256, identical image".

    Of several runs it is the one with the largest gain, with its label.

    Args:
        base: index of the baseline.
        quality: of each run against it, None where there is none.

    Returns:
        "" if there is no run to compare, or if all drew different things; if only their seeds differ, what to do.
    """
    baseline = reports[base]
    results: list[tuple[Gain, str]] = []
    for i, (label, report, found) in enumerate(zip(labels, reports, quality, strict=True)):
        if i == base or report is None or baseline is None:
            continue
        if found is not None and found.word in _OTHER_TASKS:
            continue

        gain = gained(report, baseline, found)
        outcome = outcome_of(report, found)
        parts = [gain.text, outcome] if outcome else [gain.text]
        text = ", ".join(parts)
        results.append((gain, text if len(reports) == 2 else f"{label}: {text}"))

    if not results:
        remedies = [same_seed(report, baseline, found) for report, found in zip(reports, quality, strict=True)]
        return next(filter(None, remedies), "").capitalize()

    _, best = max(results, key=lambda result: result[0].ratio)
    return best[:1].upper() + best[1:]


def same_seed(report: Report | None, baseline: Report | None, quality: Quality | None) -> str:
    """What to do if a run is not compared with its baseline because their seeds differ; "" if that is not so.

    Two runs that differ in nothing but the seed show what it changes, and stay as they are.
    """
    if report is None or baseline is None or quality is None or quality.word != OTHER_SEED:
        return ""

    alike = (report.sampler, report.settings) == (baseline.sampler, baseline.settings)
    return "" if alike else "different seeds: give both samplers the same seed"


def gained(report: Report, baseline: Report, quality: Quality | None = None) -> Gain:
    """What a run saves against its baseline, told by what is surest. The first of these that there is:

    1. the speed-up of repeats in turn;
    2. of a different image, a clear ratio of seconds, because its passes may be others than the baseline's;
    3. fewer passes, which are the same on every machine;
    4. fewer calls of the diffusion head;
    5. the ratio of the seconds of two single runs.
    """
    speedup = report.speedup(baseline)
    ratio = speedup.value if speedup is not None and speedup.value is not None else 0.0
    about = Gain(ratio, times_as_fast(ratio))
    if speedup is not None and speedup.told:
        return about

    another = quality is not None and quality.word in (OTHER_IMAGE, OTHER_MODEL, DISTRIBUTION)
    if another and ratio >= _CLEAR:
        return about

    fewer = fewer_calls(report, baseline)
    if fewer is not None:
        return fewer

    return about if ratio >= _FASTER else Gain(1.0, "no gain")


def fewer_calls(report: Report, baseline: Report) -> Gain | None:
    """The passes or diffusion calls that a run saves, which are the same on every machine; None if it saves none."""
    for count, unit in _WORK:
        own = report.own(count)
        plain = baseline.own(count)
        if own and plain and own < plain:
            whose = " of the large model" if report.of_draft(count) else ""
            return Gain(plain / own, f"{amount(own, unit)}{whose} instead of {plain:,}")

    return None


def alone(report: Report | None) -> str:
    """A run that is compared with none, in one line: "20 images in 32 passes"; "" of one image, or without passes."""
    passes = None if report is None else report.own("transformer_passes")
    if report is None or not passes or report.images < 2:
        return ""

    return f"{report.images:,} images in {amount(passes, 'passes')}"


def outcome_of(report: Report, quality: Quality | None) -> str:
    """What became of the baseline's image, in words; "" if that is not known."""
    if quality is None:
        return ""
    several = report.images > 1
    if quality.word == IDENTICAL:
        return "identical images" if several else "identical image"
    if quality.word == DISTRIBUTION:
        return DISTRIBUTION
    if quality.word or quality.psnr is None or quality.psnr < SIMILAR:
        return "different images" if several else f"a different {_named(report.subject)}"

    if quality.psnr < NEARLY:
        return "similar images" if several else "a similar image"
    same = "images" if several else "image"
    return f"the same {same} within rounding" if quality.psnr >= ROUNDED else f"nearly the same {same}"


def _named(subject: str) -> str:
    """What an image shows as one word in the singular, else "image"."""
    return "image" if not subject or subject.endswith("s") else subject


def one_line(report: Report, baseline: Report | None = None, quality: Quality | None = None) -> str:
    """Work, distance from the baseline and seconds: "32 passes, 97 % of drafts accepted, 0.861 s (one run)".

    The work comes first, because it does not depend on the machine. What is not known is left out.
    """
    accepted = percent(report.acceptance)
    parts = [
        counted(report, "transformer_passes", units="passes"),
        counted(report, "head_calls", units="diffusion calls"),
        f"{accepted} of {report.judged}" if accepted else "",
    ]

    if quality is not None:
        for name, value in quality.lines():
            parts.append(value if name == "image" else f"{name} {value}")

    if report.seconds:
        how = how_timed(report.repeats, report.first_run)
        parts.append(f"{shown_seconds(report.seconds)} s ({how})")

    speedup = report.speedup(baseline)
    if speedup is not None and speedup.note == FIRST_RUN:
        # ComfyUI does not run a node again with the same seed.
        parts.append("speed-up not measured in a first run: run again with a different seed")
    elif speedup is not None and speedup.note != BASELINE:
        parts.append(f"speed-up {speedup.text}" if speedup.value is None else speedup.text)

    return ", ".join(part for part in parts if part)
