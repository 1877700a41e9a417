"""A report in one line, and a sentence for a run that gained nothing."""

from __future__ import annotations

from .quality import Quality
from .record import Report
from .table import figure

# Relative loss of speed that is not reported: below the variation of two equal runs.
_TOLERANCE = 0.02


def one_line(report: Report, baseline: Report | None = None, quality: Quality | None = None) -> str:
    """Speed-up, seconds, passes, acceptance and distance from the baseline, without what is not known: "1.9x, 0.8 s, 97 % kept"."""
    parts = [
        figure(report.speedup(baseline), ".2f", "x"),
        figure(report.seconds or None, ".2f", " s"),
        figure(report.counts.get("transformer_passes") or None, ",", " passes"),
        figure(report.acceptance, ".0f", " % of drafts kept", 100),
        *(value if name == "picture" else f"{name} {value}" for name, value in (quality.lines() if quality else ())),
    ]
    return ", ".join(filter(None, parts))


def no_gain(report: Report, baseline: Report | None = None) -> str:
    """Why a run was not faster than plain sampling, by its counts and the baseline's seconds; "" if it was or that is not known."""
    counts, settings = report.counts, report.settings
    parts = report.sampler.split("+")
    ratio = report.speedup(baseline)
    slower = f" It took {1 / ratio:.2f} times the baseline's seconds." if ratio and ratio < 1 - _TOLERANCE else ""
    if counts.get("rejected") and not counts.get("accepted"):
        return f"No draft was kept: all drafts were extra work; use a lower threshold or shorter drafts.{slower}"
    if counts.get("drafted_steps") and not counts.get("accepted_steps"):
        return f"No drafted diffusion step was kept; use a lower speculation.{slower}"
    none = settings.get("threshold", 0) > 1 and not settings.get("acceptance_target")
    if "fasthybrid" in parts and (settings.get("lookahead") == 0 or none):
        return f"Nothing was drafted: lookahead 0 and thresholds above 1 are plain MAR.{slower}"
    if parts[-1] == "lazymar" and _caches_nothing(report):
        return f"Nothing came from the cache: every AR step was computed in full.{slower}"
    parallel = "zipar" in parts or "par" in parts or (settings.get("parallel") or 0) > 1
    if parallel and (report.tokens_per_pass or 2) <= 1:
        return f"Every pass decided one token, as in plain decoding.{slower}"
    return f"No gain here.{slower}" if slower else ""


def _caches_nothing(report: Report) -> bool:
    """Whether none of LazyMAR's caches was used: neither the transformer's nor the diffusion head's."""
    s = report.settings
    if s.get("refresh_period") == 1:
        return True

    # An AR step reuses something from start_step + 1 on, if anything is kept.
    reaches = s.get("start_step", 0) + 1 < s.get("ar_steps", 1 << 16)
    tokens = s.get("token_cache", True) and s.get("computed_ratio", 0.0) < 1
    condition = s.get("condition_cache", True) and s.get("cfg", 0.0) != 1
    transformer = reaches and (tokens or condition or s.get("encoder_cache", True))

    # The head is evaluated in full every head_period % of the diffusion steps, at every AR step.
    head = s.get("head_cache", True) and s.get("head_period", 7) * s.get("diffusion_steps", 100) > 100
    return not transformer and not head
