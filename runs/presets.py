"""Presets of the accelerators: *exact*, *balanced* and *fast* settings, for the demo and for full-size models.

The demo's values were chosen on its own images; docs/benchmarks.md measures them at a seed that chose nothing.
Full-size values come from the papers, which measured MAR-B, L and H and LlamaGen-XL; none was measured here. A preset
sets the accelerator's own settings, not seed or guidance, and *exact* costs what the baseline costs.

Every accelerator has a function of its name below, which returns what a preset sets; :data:`PRESETS` is the table of
these functions. PAR has none: its groups are fixed by training. Plain MAR has one preset, *few steps*: only the order
and the numbers of steps of LazyMAR's *fast*, to separate their gain from the gain of the caches. ZipAR has one more,
*PJD*.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..errors import UserError
from ..samplers.mar.cspd.settings import CSpDSettings
from ..samplers.mar.fasthybrid.settings import FastHybridSettings
from ..samplers.mar.gtr.settings import GtRSettings
from ..samplers.mar.gtr.stages import PAPER
from ..samplers.mar.lazy.settings import CacheSettings, LazyMARSettings
from ..samplers.mar.settings import MARSettings
from ..samplers.settings import Settings
from ..samplers.tokens.mulosd.settings import AT_ONCE, LOCAL, MuLoSDSettings
from ..samplers.tokens.zipar import ZipARSettings

S = TypeVar("S", bound=Settings)

BALANCED = "balanced"
FAST = "fast"
EXACT = "exact"
CUSTOM = "custom"
NAMES = (BALANCED, FAST, EXACT, CUSTOM)
FEW_STEPS = "few steps"
PJD = "PJD"
# Presets of one sampler only, by name: its settings class and its title.
SPECIAL: dict[str, tuple[type, str]] = {FEW_STEPS: (MARSettings, "plain MAR"), PJD: (ZipARSettings, "ZipAR")}


class Run(NamedTuple):
    """What the values of a preset depend on."""

    demo: bool  # whether the model is the demo's
    width: int  # of a MAR's transformer, by which the papers give some values; 0 where unknown
    steps: int  # AR steps, by which they give others


Values: TypeAlias = dict[str, Any]  # setting to its value
Presets: TypeAlias = Callable[[str, Run], Values]  # what the preset of a name, exact, balanced or fast, sets


def values(kind: type, preset: str, demo: bool, width: int = 0, steps: int = 64) -> Values:
    """The values that a preset, one of :func:`names`, sets on settings of class ``kind``; none for *custom*. For the
    other arguments, see :class:`Run`.
    """
    if preset not in names(kind):
        only = f" {preset} is a preset of {SPECIAL[preset][1]}." if preset in SPECIAL else ""
        raise UserError(f"preset: {preset!r} is not one of {', '.join(names(kind))}.{only}")

    run = Run(demo, width, steps)
    if preset == FEW_STEPS:
        return few_steps(run)
    if preset == CUSTOM:
        return {}

    # Beside LazyMAR's caches a sampler has its own presets, and sets nothing that the caches set.
    beside = getattr(kind, "sampler_settings", None)
    if beside is not None:
        return {**PRESETS.get(beside, nothing)(preset, run), **caches(preset, run)}
    return PRESETS.get(kind, nothing)(preset, run)


def nothing(preset: str, run: Run) -> Values:
    """The presets of a sampler that has none."""
    return {}


def names(kind: type) -> tuple[str, ...]:
    """Names of the presets of settings of class ``kind``; presets of accelerators set nothing on a plain sampler."""
    return (*NAMES, *(name for name, (own, _) in SPECIAL.items() if own is kind))


# ------------------------------------------------------------------------------------------------ FastHybrid

# k for 64 AR steps by the width of MAR-B, L and H; other models have MAR-L's.
_LOOKAHEAD = {768: 7, 1024: 8, 1280: 9}


def fasthybrid(preset: str, run: Run) -> Values:
    """At full size the paper's thresholds, and its k for *balanced*, see :func:`lookahead`; *fast* has twice this k."""
    if preset == EXACT:
        return {"lookahead": 0}

    if run.demo:
        balanced = {"threshold": 0.99, "lookahead": 8, "guided_steps": 5, "lookahead_start": 4}
        fast = {"threshold": 0.95, "lookahead": 8, "guided_steps": 5, "lookahead_start": 2}
    else:
        k = lookahead(run.width, run.steps)
        balanced = {"threshold": 0.8, "lookahead": k, "guided_steps": 10, "lookahead_start": 0}
        fast = {"threshold": 0.6, "lookahead": min(256, 2 * k), "guided_steps": 10, "lookahead_start": 0}
    return balanced if preset == BALANCED else fast


def lookahead(width: int, steps: int) -> int:
    """FastHybrid's k for a full-size model: of other numbers of AR steps than 64 the same share of the image, 2 to 256.

    The paper gives k for 64 AR steps alone. 1 would draft nothing.
    """
    of_64 = _LOOKAHEAD.get(width, _LOOKAHEAD[1024])
    return min(256, max(2, math.ceil(of_64 * steps / 64)))


# ------------------------------------------------------------------------------------------------ GtR


def gtr(preset: str, run: Run) -> Values:
    """The numbers of steps are the method, so presets set them.

    At full size *balanced* has the paper's 17 AR steps: 12, 3, 1 and 1. The demo has a quarter of the tokens:
    *balanced* has the same share of plain MAR's steps, 6, 1, 1 and 1, and *fast* the paper's number of tokens per step,
    3, 1, 1 and 1.
    """
    if preset == EXACT:
        return {"reconstruction_steps": 0}

    if run.demo:
        steps = 9 if preset == BALANCED else 6
    else:
        steps = 17 if preset == BALANCED else 9

    # t_max: where a run with so few diffusion steps starts anyway; written out so that the node shows it.
    diffusion = {"diffusion_steps": 50, "diffusion_steps_end": 20, "detail_share": 0.1, "t_max": 950}
    plan = {"steps": steps, "reconstruction_steps": 1, "first_share": 0.75, "stages": PAPER}
    return {**diffusion, **plan}


# ------------------------------------------------------------------------------------------------ LazyMAR


def caches(preset: str, run: Run) -> Values:
    """LazyMAR's caches, beside any sampler. *balanced* is the paper's configuration; for the demo, the paper's periods
    for 32 AR steps and one share of computed tokens, as in its Figure 6.
    """
    if preset == EXACT:
        return {"refresh_period": 1}

    of_32 = {"refresh_period": 5, "start_step": 4}  # up to 32 AR steps
    of_64 = {"refresh_period": 9, "start_step": 5}
    periods = of_32 if run.demo or run.steps <= 32 else of_64
    if run.demo and preset == FAST:
        periods = {"refresh_period": 9, "start_step": 4}
    return {**_left_out(preset, run), **periods}


def _left_out(preset: str, run: Run) -> Values:
    """What is not computed between two refreshes. In few AR steps more can be skipped if the paper's table of shares is
    stretched over them. In the demo's 32 AR steps that table reaches ``computed_ratio`` at no step, so *balanced* has
    one share at all of them.
    """
    if preset == BALANCED and run.demo:
        return {"computed_ratio": 0.25, "ratio_schedule": "constant", "head_cache": True}

    schedule = "published" if preset == BALANCED else "stretched"
    return {"computed_ratio": 0.05, "ratio_schedule": schedule, "head_cache": True}


def lazymar(preset: str, run: Run) -> Values:
    """The caches. *fast* also sets the order and the numbers of steps, which caches beside another sampler leave to it.

    At full size *fast* has the demo's values, scaled to 64 AR steps and 256 tokens.
    """
    if preset != FAST:
        return caches(preset, run)

    start_step = 3 if run.demo else 6
    return {**_left_out(FAST, run), "refresh_period": 3, "start_step": start_step, **few_steps(run)}


def few_steps(run: Run) -> Values:
    """Plain MAR's *few steps*, which LazyMAR's *fast* has too. In random order fewer images of the demo show what was
    asked.
    """
    if run.demo:
        return {"order": "halton", "steps": 12, "diffusion_steps": 25, "diffusion_steps_end": 5}
    return {"order": "halton", "steps": 24, "diffusion_steps": 50, "diffusion_steps_end": 10}


# ------------------------------------------------------------------------------------------------ CSpD


def cspd(preset: str, run: Run) -> Values:
    """At full size the draft length is a share of the AR steps: the paper's 16 and 32 of 256 are 4 and 8 of 64."""
    if preset == EXACT:
        return {"mode": "lossless", "prefill_ratio": 1.0}

    length, prefill_ratio = (4, 0.15) if preset == BALANCED else (8, 0.05)
    if not run.demo:
        length = min(256, max(1, round(length * run.steps / 64)))  # 256: the longest of CSpDSettings
    return {"mode": "published", "draft_length": length, "prefill_ratio": prefill_ratio}


# ------------------------------------------------------------------------------------------------ ZipAR


def zipar(preset: str, run: Run) -> Values:
    """The same for all: the demo's grid has the width of the smallest official files.

    *PJD* is Parallel Jacobi Decoding (CVPR 2026, arXiv 2606.05703) in ZipAR's terms: several rows at once, Jacobi
    iteration in each, and a row attends to the rows above. Its images are identical to the images of *balanced*.
    """
    if preset == EXACT:
        return {"window": 256}  # no grid is wider
    if preset == PJD:
        return {"window": 8, "parallel": 16}
    return {"window": 8 if preset == BALANCED else 4}


# ------------------------------------------------------------------------------------------------ MuLo-SD


def mulosd(preset: str, run: Run) -> Values:
    """The paper publishes no values. The demo's were chosen by sweeps on the two LlamaGens and on Tar, with the demo's
    latent samplers:

    - tau rather than acceptance_target: a fixed share rejects drafts even where all are good;
    - draft_rows 4 and expansion 1, the paper's loop in two cycles. *fast* drafts the whole image first, and has
      expansion 0: the area around a rejected token is resampled without knowing the accepted tokens after it, which
      small targets do badly;
    - draft_window 8, a whole row of the draft: narrower windows spoil scenes. *fast* drafts a row by exact parallel
      decoding instead, in fewer passes.

    Full-size presets set the share of accepted drafts, which does not depend on the model (docs/choose.md). There
    *balanced* is the paper's loop in two cycles, too.
    """
    if preset == EXACT:
        # No probability exceeds 1: every token is resampled in raster order, as by the target alone.
        return {"tau": 1.01, "acceptance_target": 0.0, "draft_rows": 0, "resample_window": 0}

    if run.demo:
        by_tau = {"tau": 0.1, "acceptance_target": 0.0}
        balanced = {**by_tau, "draft_rows": 4, "draft_window": 8, "resample_window": 4}
        fast = {**balanced, "draft_rows": 0, "draft_parallel": 8, "expansion": 0}
    else:
        balanced = {"acceptance_target": 0.95, "draft_rows": 8, "draft_window": 8, "resample_window": 8}
        fast = {"acceptance_target": 0.98, "draft_rows": 0, "draft_window": 4, "resample_window": 4}

    repair = {"expansion": 1, "neighbours": None, "resample_order": AT_ONCE, "repair": LOCAL}
    return {**repair, **(balanced if preset == BALANCED else fast)}


# ------------------------------------------------------------------------------------------------ the table

# Settings class of a sampler, or of the caches beside any, to the values of its presets.
PRESETS: dict[type, Presets] = {
    FastHybridSettings: fasthybrid,
    GtRSettings: gtr,
    CacheSettings: caches,
    LazyMARSettings: lazymar,
    CSpDSettings: cspd,
    ZipARSettings: zipar,
    MuLoSDSettings: mulosd,
}
# A preset leaves to the user what all samplers of a kind have: steps, order, guidance, temperature. Where some of these
# are the method, they are named here: its presets but *exact* set them too.
ALSO_SET: dict[type, frozenset[str]] = {
    GtRSettings: frozenset({"steps", "diffusion_steps", "diffusion_steps_end", "t_max"}),
    LazyMARSettings: frozenset({"steps", "diffusion_steps", "diffusion_steps_end", "order"}),
}
