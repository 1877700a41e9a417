"""A report in one line, and a sentence for a run that gained nothing."""

from __future__ import annotations

from .quality import Quality
from .record import Report, counted
from .table import percent
from .timing import BASELINE, how_timed, shown_seconds


def one_line(report: Report, baseline: Report | None = None, quality: Quality | None = None) -> str:
    """Work, distance from the baseline and seconds: "32 passes, 97 % of drafts kept, 0.861 s (one run)".

    The work comes first, because it does not depend on the machine. What is not known is left out.
    """
    kept = percent(report.acceptance)
    parts = [
        counted(report, "transformer_passes", ",", " passes"),
        counted(report, "head_calls", ",", " head calls"),
        f"{kept} of drafts kept" if kept else "",
    ]

    if quality is not None:
        for name, value in quality.lines():
            parts.append(value if name == "image" else f"{name} {value}")

    if report.seconds:
        how = how_timed(report.repeats, report.first_run)
        parts.append(f"{shown_seconds(report.seconds)} s ({how})")

    speedup = report.speedup(baseline)
    if speedup is not None and speedup.note != BASELINE:
        parts.append(f"speed-up {speedup.text}" if speedup.value is None else speedup.text)

    return ", ".join(part for part in parts if part)


def no_gain(report: Report, baseline: Report | None = None) -> str:
    """Why a run was not faster than plain sampling; "" if it was, or if that is not known.

    The reason comes from the run's counts. Seconds are a reason if they were measured in repeats in turn and differ by
    more than the repeats do: two single runs may differ by any factor on a busy machine.
    """
    counts = report.counts
    settings = report.settings
    methods = report.sampler.split("+")

    slower = ""
    speedup = report.speedup(baseline)
    if speedup is not None and speedup.told and speedup.value is not None and speedup.value < 1:
        slower = f" It took {1 / speedup.value:.2f} times the baseline's seconds."

    # Drafts that were all rejected.
    if counts.get("rejected") and not counts.get("accepted"):
        return f"No draft was accepted, so all drafts were extra work; use a lower threshold or shorter drafts.{slower}"
    if counts.get("drafted_steps") and not counts.get("accepted_steps"):
        return f"No drafted diffusion step was accepted; use a lower speculation.{slower}"

    # Settings at which a method is plain sampling.
    if "fasthybrid" in methods and (settings.get("lookahead") == 0 or settings.get("threshold", 0) > 1):
        return f"Nothing was drafted: lookahead 0 and thresholds above 1 are plain MAR.{slower}"

    if methods[-1] == "lazymar" and _caches_nothing(report):
        return f"Nothing came from the cache: every AR step was computed in full.{slower}"

    parallel = "zipar" in methods or "par" in methods or (settings.get("parallel") or 0) > 1
    if parallel and (report.tokens_per_pass or 2) <= 1:
        return f"Every pass decided one token, as in plain decoding.{slower}"

    # No reason is known.
    return f"No gain here.{slower}" if slower else ""


def _caches_nothing(report: Report) -> bool:
    """Whether none of LazyMAR's caches was used: neither the transformer's nor the diffusion head's."""
    settings = report.settings
    if settings.get("refresh_period") == 1:
        return True

    # An AR step reuses something from start_step + 1 on, if anything is kept.
    reaches = settings.get("start_step", 0) + 1 < settings.get("steps", 1 << 16)
    tokens = bool(report.counts.get("cached_tokens"))
    condition = settings.get("condition_cache", True) and settings.get("cfg", 0.0) != 1
    encoder = settings.get("encoder_cache", True)
    transformer = reaches and (tokens or condition or encoder)

    # The head is evaluated in full every head_period % of the diffusion steps, at every AR step.
    skips = settings.get("head_period", 7) * settings.get("diffusion_steps", 100) > 100
    head = settings.get("head_cache", True) and skips

    return not transformer and not head
