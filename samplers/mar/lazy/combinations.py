"""The settings of other samplers together with the settings of LazyMAR's caches.

Each class has the fields of the sampler first, and then the fields of the caches, because the fields of the last base
class come first in a dataclass. If both base classes have a method or property of the same name, Python uses the one of
:class:`CacheSettings`. There, ``super()`` means the sampler's class.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cspd.settings import CSpDSettings
from ..fasthybrid.settings import FastHybridSettings
from ..gtr.settings import GtRSettings
from ..settings import MARBase
from .settings import CacheSettings


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


# The combined class for each class of a sampler's own settings.
WITH_CACHES: dict[type[MARBase], type[MARBase]] = {
    FastHybridSettings: FastHybridLazyMARSettings,
    CSpDSettings: CSpDLazyMARSettings,
    GtRSettings: GtRLazyMARSettings,
}
