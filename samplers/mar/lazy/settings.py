"""Settings of LazyMAR's caches, and of samplers that use these caches.

``samplers/settings.py`` explains the arguments of ``knob``, which describe a setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ....reports.record import Report
from ...settings import HeadGuarantees, Removed, knob
from ..cspd.settings import CSpDSettings
from ..fasthybrid.settings import FastHybridSettings
from ..gtr.settings import GtRSettings
from ..settings import DiSASettings, MARBase, SpeculationSettings

# In a diffusion of 100 steps, every HEAD_PERIOD-th diffusion step computes the diffusion head in full, as in LazyMAR's
# published code. See head_period for other numbers of diffusion steps.
HEAD_PERIOD = 7

# The classes in this file have several base classes, for example
# ``class FastHybridLazyMARSettings(CacheSettings, FastHybridSettings)``. The rules:
#
# - The fields of the last base class come first. So FastHybrid's fields come before the fields of the caches.
# - If several base classes have a method or property of the same name, Python uses the one of the first base class, and
#   ``super()`` in it means the next base class. So ``approximates`` is the one of CacheSettings, and there
#   ``super().approximates`` is the one of FastHybridSettings.

# In each call of ``knob``: first the default and the tooltip, then the range. The code and the tooltip of start_step
# count AR steps from 0. The tooltip of ratio_schedule counts them from 1.


@dataclass(frozen=True)
class CacheSettings(HeadGuarantees):
    """Settings of LazyMAR's caches (Yan et al. 2025): what a sampler reuses from earlier AR steps and diffusion steps,
    and for how long.
    """

    # The removed setting ``block`` chose the decoder block that measures how much a token has changed. Now
    # measuring_block in lazy/schedule.py chooses this block. HEAD_PERIOD replaces the removed setting ``head_period``.
    removed: ClassVar[Mapping[str, Removed]] = {"block": Removed(None), "head_period": Removed(HEAD_PERIOD)}
    # In a combination with another sampler (see the end of this file): the class of that sampler's settings. Otherwise
    # None.
    sampler_settings: ClassVar[type[MARBase] | None] = None

    # fmt: off
    refresh_period: int = knob(9, "Number of AR steps from one full computation of the transformer to the next; a "
        "higher number is faster and less exact. Usual: 9 for 64 AR steps, and 5 for 32; at 1, all caches are off.",
        low=1, high=4096, step=1, symbol="tau", unit="AR steps")
    start_step: int = knob(5, "Up to this AR step, counted from 0, the transformer reuses nothing, because the first "
        "AR steps determine the content; a higher number is slower and more exact. Usual: 5 for 64 AR steps, and 4 "
        "for 32.",
        low=0, high=4096, step=1, unit="AR steps")
    computed_ratio: float = knob(0.05, "Between two full computations, an AR step computes only a share of the tokens "
        "in the transformer's decoder; computed_ratio is the lowest share (see ratio_schedule). Lower is faster and "
        "less exact. Usual: 0.05; at 1, all tokens are computed.",
        low=0.0, high=1.0, step=0.01)
    ratio_schedule: str = knob("published", "How the share of computed tokens falls to computed_ratio. With published, "
        "it falls as in the authors' table: the decoder computes all tokens in AR steps 1 to 20, and the share reaches "
        "computed_ratio in step 41. With stretched, this table is spread over all AR steps; for fewer than 64 AR "
        "steps, stretched is faster and less exact than published. With constant, the share is computed_ratio at every "
        "AR step between two full computations. Usual: published for full-size models, constant for the demo.",
        choices=("published", "stretched", "constant"), advanced=True)
    selection: str = knob("least-similar", "The decoder always computes the tokens of the current and of the "
        "previous AR step; this setting chooses the other tokens that the decoder computes. Usual: least-similar, "
        "the tokens that changed most, as in the paper.",
        choices=("least-similar", "most-similar", "random", "undecided", "decided"), advanced=True,
        more="The other choices gave worse images in the paper. If you choose *undecided* or *decided*, "
            "*computed_ratio* has no effect.")
    condition_cache: bool = knob(True, "Guidance needs the difference between two predictions: one with the label or "
        "prompt, and one without. Between two full computations, this cache reuses the last difference, which halves "
        "the transformer's work; without this cache, runs are slower and more exact.",
        advanced=True,
        more="At *cfg* 1, this cache has no effect.")
    token_cache: bool = knob(True, "Skips tokens that hardly change, and uses their cached values instead. "
        "Without this cache, runs are slower and more exact.",
        advanced=True)
    head_cache: bool = knob(True, "Reuses most of the diffusion head's results from one diffusion step to the next, as "
        "the published code does. Without this cache, runs are slower and more exact.",
        advanced=True)
    encoder_cache: bool = knob(True, "Reuses the encoder's results for the tokens that were decided earlier, as the "
        "published code does. Without this cache, runs are slower and more exact.",
        advanced=True)
    # fmt: on

    @property
    def approximates(self) -> bool:
        """See :attr:`.HeadGuarantees.approximates`. If refresh_period is 1, all caches are off."""
        caches = self.condition_cache or self.token_cache or self.head_cache or self.encoder_cache
        return (self.refresh_period > 1 and caches) or super().approximates

    def no_gain(self, report: Report) -> str:
        """See :meth:`.Guarantees.no_gain`. A reason from a base class comes before the reason of the caches."""
        own = super().no_gain(report)
        if own or report.counts.get("cached_calls") != 0:  # saved reports may lack this count
            return own
        return "Nothing came from the caches: every AR step was computed in full."


def head_period(settings: CacheSettings, steps: int) -> int:
    """Number of diffusion steps from one full call of the head to the next; 1 if every diffusion step computes the head
    in full.

    The period is proportional to ``steps``, the number of all diffusion steps, because the error depends on the period
    divided by ``steps``. If ``refresh_period`` is 1, all caches are off, even the head's.
    """
    if settings.refresh_period == 1 or not settings.head_cache:
        return 1
    return math.ceil(HEAD_PERIOD * steps / 100)


@dataclass(frozen=True)
class LazyMARSettings(SpeculationSettings, CacheSettings, DiSASettings):
    """Settings of MAR with LazyMAR's caches: first MAR's fields, then the fields of the caches, then the field of
    speculation.
    """


# ------------------------------------------------------------------------------------------------ combinations


@dataclass(frozen=True)
class FastHybridLazyMARSettings(CacheSettings, FastHybridSettings):
    """FastHybridSettings with the settings of LazyMAR's caches."""

    sampler_settings = FastHybridSettings


@dataclass(frozen=True)
class CSpDLazyMARSettings(CacheSettings, CSpDSettings):
    """CSpDSettings with the settings of LazyMAR's caches."""

    sampler_settings = CSpDSettings


@dataclass(frozen=True)
class GtRLazyMARSettings(CacheSettings, GtRSettings):
    """GtRSettings with the settings of LazyMAR's caches."""

    sampler_settings = GtRSettings


# For each sampler's settings class, the class that also has the settings of the caches.
WITH_CACHES: dict[type[MARBase], type[MARBase]] = {
    FastHybridSettings: FastHybridLazyMARSettings,
    CSpDSettings: CSpDLazyMARSettings,
    GtRSettings: GtRLazyMARSettings,
}
