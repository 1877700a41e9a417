"""The answer of a calibration in words, and the table of its candidates."""

from __future__ import annotations

from collections.abc import Sequence

from ..reports.quality import closeness
from ..reports.table import literal, markdown, percent
from ..reports.timing import times_as_fast
from ..samplers.settings import knobs
from .choice import Choice
from .measured import ACCEPTANCE, DECIMALS, EXACT, LOSSLESS, AdviceSettings, Measured

_LONGEST = 400  # characters of a reason in the table


def answer_of(plain: Choice, won: Measured | None, settings: AdviceSettings, rivals: Sequence[Measured] = ()) -> str:
    """What is said of ``won``, the fastest candidate within the limit; None if there is none.

    ``rivals``: candidates within the limit whose repeats overlap with the repeats of ``won``.
    """
    limit = limit_of(settings)
    if won is None:
        return f"No candidate with {limit} is measurably faster than {plain.entry.title}: keep {plain.entry.title}."

    speedup = won.speedup
    spread = speedup.range if speedup is not None else ""
    if not spread:
        spread = "one run each; raise repeats to measure the speed-up"
    answer = f"Fastest with {limit}: {won.choice.text}, {times_as_fast(won.ratio)} as {plain.entry.title} ({spread})."
    if not rivals:
        return answer

    names = "; ".join(f"{m.choice.text}, {times_as_fast(m.ratio)}" for m in rivals)
    return f"{answer} Not measurably slower than the fastest sampler: {names}. More repeats may tell them apart."


def time_left(seconds: float | None) -> str:
    """Seconds as a rest of a run: "about 3 minutes left"; "" for None."""
    if seconds is None:
        return ""

    minutes = round(seconds / 60)
    if not minutes:
        return "less than a minute left"
    return "about a minute left" if minutes == 1 else f"about {minutes} minutes left"


def limit_of(settings: AdviceSettings) -> str:
    """What a candidate must keep: "identical images", "SSIM of at least 0.9"."""
    limit = {EXACT: "identical images", LOSSLESS: "the same distribution"}.get(settings.measure, "")
    if settings.least is not None:
        unit = knobs(AdviceSettings)[f"least_{settings.measure.lower()}"][1].unit
        limit = f"{settings.measure} of at least {settings.least:g} {unit}".rstrip()
    return limit


def advice_table(answer: str, ranked: Sequence[Measured], settings: AdviceSettings) -> str:
    """The answer and a Markdown table of all candidates."""
    rows = [["sampler", "acceptance", "PSNR", "SSIM", "speed-up", "within the limit"]]
    for m in ranked:
        if not m.cells:
            rows.append([m.choice.text, *[""] * 4, "not run"])
            continue

        acceptance = percent(m.point.acceptance, DECIMALS[ACCEPTANCE])
        within = "yes" if m.within_limit(settings) else "no"
        speedup = m.speedup.text if m.speedup is not None else ""
        rows.append([m.choice.text, acceptance, *closeness(m.point), speedup, within])

    lines = [answer, "", markdown(rows)]
    failed = [f"{m.choice.text} was not run: {literal(m.problem, _LONGEST)}" for m in ranked if m.problem]
    if failed:
        lines += ["", *failed]
    return "\n".join(lines)
