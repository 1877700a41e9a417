"""Presets of the accelerators: *exact*, *balanced* and *fast* settings, for the demo and for full-size models.

The demo's values were chosen on its own images; docs/benchmarks.md measures them at a seed that chose nothing.
Full-size values come from the papers, which measured MAR-B, L and H and LlamaGen-XL; none was measured here. A preset
sets the accelerator's own settings, not seed or guidance, and *exact* costs what the baseline costs.

- LazyMAR: *balanced* is the paper's configuration, on the demo its values for 32 AR steps. *fast* also sets the order
  and the numbers of steps.
- MAR has one preset, *few steps*: the order and the numbers of LazyMAR's *fast* alone, so that the gain of the caches
  can be told from theirs.
- GtR: its presets set the numbers of steps, which are the method.
- MuLo-SD publishes no values. Its full-size presets set the share of accepted drafts, which does not depend on the
  model: the one at which as much is drawn again as on the demo (``tools/redrawn.py``, docs/choose.md).
- PAR has none: its groups are fixed by training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import UserError
from .mar.settings import (
    CacheSettings,
    CSpDSettings,
    FastHybridSettings,
    GtRSettings,
    LazyMARSettings,
    MARSettings,
)
from .settings import Settings, knobs, make
from .tokens.settings import AT_ONCE, LOCAL, MuLoSDSettings, ZipARSettings

S = TypeVar("S", bound=Settings)

BALANCED = "balanced"
FAST = "fast"
EXACT = "exact"
CUSTOM = "custom"
NAMES = (BALANCED, FAST, EXACT, CUSTOM)
FEW_STEPS = "few steps"  # of plain MAR only

Values = dict[str, dict[str, Any]]
_EXACT_FASTHYBRID = {"lookahead": 0}
_EXACT_GTR = {"reconstruction_steps": 0}
_EXACT_CACHES = {"refresh_period": 1}
_EXACT_CSPD = {"mode": "lossless", "prefill_ratio": 1.0}
# The demo's grid has the width of the smallest official files. No grid is wider than 256.
_WINDOWS: Values = {
    "exact": {"window": 256},
    "balanced": {"window": 8, "mask_undecoded": True},
    "fast": {"window": 4, "mask_undecoded": True},
}
# What was measured in LazyMAR's paper. In fewer AR steps more can be skipped if the table of shares is stretched.
_LAZYMAR = {"computed_ratio": 0.05, "ratio_schedule": "published", "head_cache": True, "head_period": 7}
_STRETCHED = {**_LAZYMAR, "ratio_schedule": "stretched"}
# Plain MAR's *few steps*, for the demo and for full-size models: what LazyMAR's *fast* sets beside its caches. In
# random order fewer images of the demo show what was asked.
_FEW_STEPS: tuple[dict[str, Any], dict[str, Any]] = (
    {"order": "halton", "steps": 12, "diffusion_steps": 25, "diffusion_steps_end": 5},
    {"order": "halton", "steps": 24, "diffusion_steps": 50, "diffusion_steps_end": 10},
)
_FEW_STEPS_CACHED = (
    {**_FEW_STEPS[0], **_STRETCHED, "refresh_period": 3, "start_step": 3},
    {**_FEW_STEPS[1], **_STRETCHED, "refresh_period": 3, "start_step": 6},
)
# No probability exceeds 1: every token is redrawn in raster order, as by the target alone.
_ALL_AGAIN = {"tau": 1.01, "acceptance_target": 0.0, "draft_rows": 0, "resample_window": 0}
_LOCALLY = {"expansion": 1, "neighbours": None, "resample_order": AT_ONCE, "repair": LOCAL}
_BY_TAU = {**_LOCALLY, "tau": 0.1, "acceptance_target": 0.0}
# 950: where a run with so few diffusion steps starts anyway; written out so that the node shows it.
_GTR_DIFFUSION = {"diffusion_steps": 50, "diffusion_steps_end": 20, "detail_share": 0.1, "t_max": 950}
_GTR = {**_GTR_DIFFUSION, "steps": 32, "reconstruction_steps": 2, "first_share": 0.75}
_GTR_SHORT = {"steps": 16, "reconstruction_steps": 1}
# FastHybrid's k for 64 AR steps by the width of MAR-B, L and H; other models have MAR-L's.
_LOOKAHEAD = {768: 7, 1024: 8, 1280: 9}
_LONGEST_DRAFT = 256  # of CSpDSettings
# LazyMAR's periods by number of AR steps: those for 32 hold up to there.
_PERIODS = {
    64: {"refresh_period": 9, "start_step": 5},
    32: {"refresh_period": 5, "start_step": 4},
}
# Settings class to (demo, full size). A combination takes the presets of all its parts, in this order: a later part
# replaces what an earlier one sets.
PRESETS: dict[type, tuple[Values, Values]] = {
    FastHybridSettings: (
        {
            "exact": _EXACT_FASTHYBRID,
            "balanced": {"threshold": 0.95, "lookahead": 4, "guided_steps": 5, "lookahead_start": 8},
            "fast": {"threshold": 0.8, "lookahead": 8, "guided_steps": 5, "lookahead_start": 0},
        },
        {
            "exact": _EXACT_FASTHYBRID,
            "balanced": {"threshold": 0.8, "lookahead": _LOOKAHEAD[1024], "guided_steps": 10, "lookahead_start": 0},
            "fast": {"threshold": 0.6, "lookahead": _LOOKAHEAD[1024], "guided_steps": 10, "lookahead_start": 0},
        },
    ),
    # Balanced at full size: the paper's 32 AR steps, half of the usual 64. On the demo half of the usual 32.
    GtRSettings: (
        {"exact": _EXACT_GTR, "balanced": {**_GTR, **_GTR_SHORT}, "fast": {**_GTR, **_GTR_SHORT, "steps": 8}},
        {"exact": _EXACT_GTR, "balanced": _GTR, "fast": {**_GTR, **_GTR_SHORT}},
    ),
    CacheSettings: (
        {
            "exact": _EXACT_CACHES,
            "balanced": {**_LAZYMAR, **_PERIODS[32]},
            "fast": {**_STRETCHED, "refresh_period": 9, "start_step": 4},
        },
        {
            "exact": _EXACT_CACHES,
            "balanced": {**_LAZYMAR, **_PERIODS[64]},
            "fast": {**_STRETCHED, **_PERIODS[64]},
        },
    ),
    # Few AR steps, annealed diffusion steps and LazyMAR's caches together. A preset of LazyMAR's sampler only, since it
    # changes the numbers of steps. Full size: the demo's values scaled to 64 AR steps and 256 tokens; not measured.
    LazyMARSettings: (
        {"exact": {}, "balanced": {}, "fast": _FEW_STEPS_CACHED[0]},
        {"exact": {}, "balanced": {}, "fast": _FEW_STEPS_CACHED[1]},
    ),
    CSpDSettings: (
        {
            "exact": _EXACT_CSPD,
            "balanced": {"mode": "published", "draft_length": 4, "prefill_ratio": 0.15},
            "fast": {"mode": "published", "draft_length": 8, "prefill_ratio": 0.05},
        },
        {
            "exact": _EXACT_CSPD,
            # For 64 AR steps. The paper's gamma (draft_length) of 16 and 32 is for 256: it is a share of the AR steps.
            "balanced": {"mode": "published", "draft_length": 4, "prefill_ratio": 0.15},
            "fast": {"mode": "published", "draft_length": 8, "prefill_ratio": 0.05},
        },
    ),
    ZipARSettings: (_WINDOWS, _WINDOWS),
    # The demo's were chosen by sweeps on the two LlamaGens and on Tar:
    # - tau rather than acceptance_target: a fixed share rejects drafts even where all are good;
    # - a narrower window in the repair than in the draft, whose 8 x 8 tokens suffer more from it;
    # - draft_rows 0: in several cycles more tokens are drawn again by the demo's target, which is worse than its draft
    #   model.
    # At full size balanced is the paper's loop, in two cycles.
    MuLoSDSettings: (
        {
            "exact": _ALL_AGAIN,
            "balanced": {**_BY_TAU, "draft_rows": 0, "draft_window": 8, "resample_window": 4},
            "fast": {**_BY_TAU, "draft_rows": 0, "draft_window": 4, "resample_window": 2},
        },
        {
            "exact": _ALL_AGAIN,
            "balanced": {
                **_LOCALLY,
                "acceptance_target": 0.95,
                "draft_rows": 8,
                "draft_window": 8,
                "resample_window": 8,
            },
            "fast": {**_LOCALLY, "acceptance_target": 0.98, "draft_rows": 0, "draft_window": 4, "resample_window": 4},
        },
    ),
}


def names(kind: type) -> tuple[str, ...]:
    """Names of the presets of settings of class ``kind``; those of accelerators set nothing on a plain sampler."""
    return (*NAMES, FEW_STEPS) if kind is MARSettings else NAMES


def values(
    kind: type, preset: str, demo: bool, width: int = 0, steps: int = 64, sets_steps: bool = True
) -> dict[str, Any]:
    """The values that a preset, one of :func:`names`, sets on settings of class ``kind``; none for *custom*.

    Args:
        demo: whether the model is the demo's.
        width: of a MAR's transformer, by which the papers give some values; 0 where unknown.
        steps: AR steps of the run, by which they give others.
        sets_steps: whether a preset's own number of AR steps holds; False if the user set steps, which replace it.
    """
    if preset not in names(kind):
        only = f" {FEW_STEPS} is a preset of plain MAR." if preset == FEW_STEPS else ""
        raise UserError(f"preset: {preset!r} is not one of {', '.join(names(kind))}.{only}")

    if preset == CUSTOM:
        return {}
    if preset == FEW_STEPS:
        return dict(_FEW_STEPS[0 if demo else 1])

    out: dict[str, Any] = {}
    for part, (small, full) in PRESETS.items():
        if not issubclass(kind, part):
            continue
        if demo:
            out.update(small[preset])
            continue

        out.update(full[preset])
        if preset == EXACT:
            continue
        if part is FastHybridSettings:
            out["lookahead"] = lookahead(width, steps)
        # FastHybrid and GtR come before the caches. LazyMAR's *fast* comes after them, and replaces the periods too.
        of_run = out.get("steps", steps) if sets_steps else steps
        if part is CacheSettings and of_run <= 32:
            out.update(_PERIODS[32])
        if part is CSpDSettings:
            out["draft_length"] = min(_LONGEST_DRAFT, max(1, round(out["draft_length"] * steps / 64)))

    return out


def lookahead(width: int, steps: int) -> int:
    """FastHybrid's k for a full-size model: of other numbers of AR steps than 64 the same share of the image, 2 to 256.

    The paper gives k for 64 AR steps alone. 1 would draft nothing.
    """
    of_64 = _LOOKAHEAD.get(width, _LOOKAHEAD[1024])
    return min(256, max(2, math.ceil(of_64 * steps / 64)))


def combine(
    kind: type[S],
    recommended: Mapping[str, Any],
    preset: str,
    asked: Mapping[str, Any],
    demo: bool,
    width: int = 0,
    steps: int | None = None,
) -> S:
    """Settings of class ``kind`` from all sources; a later one takes precedence: defaults, the model's file, the
    preset, the user.

    Args:
        recommended: by the model's file; names that ``kind`` does not have are ignored.
        asked: by the user, name by name.
        preset, demo, width: as :func:`values`.
        steps: of the run, for settings that do not hold it.

    Raises:
        UserError: no such preset, or a value out of range.
    """
    # Before what the file recommends, so that the message names the user's setting.
    make(kind, asked)

    suited = {k: v for k, v in recommended.items() if k in knobs(kind)}
    try:
        make(kind, suited)
    except UserError as e:
        raise UserError(f"model: its file recommends a setting that cannot be used ({str(e).rstrip('.')}).") from e

    steps = vars(make(kind, {**suited, **asked})).get("steps", steps or 64)
    chosen = values(kind, preset, demo, width, steps, sets_steps="steps" not in asked)

    if preset == BALANCED and "window" in suited:
        chosen["window"] = suited["window"]  # measured on the model's own grid

    return make(kind, {**suited, **chosen, **asked})
