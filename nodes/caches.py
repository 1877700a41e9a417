"""The socket of LazyMAR's caches: settings that depend on the model of the sampler they are connected to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import OfFastAR, UserError
from ..samplers.mar.lazy import check_caches
from ..samplers.mar.lazy.settings import CacheSettings
from ..samplers.settings import in_words, knobs, settings_from
from .host.loaded import Loaded
from .sent import PRESETS, expect_removed_to_hold, facts_of, settings_sent
from .sockets import expect_own


@dataclass(frozen=True)
class CachePlan(OfFastAR):
    """Value of a cache socket: the preset of LazyMAR Cache and its values, which depend on the sampled model."""

    kind: ClassVar[str] = "cache"
    fastar_version: ClassVar[int] = 1  # of its description in docs/sockets.md
    preset: str
    values: Mapping[str, Any]
    removed: Mapping[str, Any] = field(default_factory=dict)  # see :func:`take_removed`

    def __str__(self) -> str:
        """For people: what ComfyUI's Preview as Text shows."""
        return f"LazyMAR's caches, preset {self.preset}: {in_words(CacheSettings, self.values) or 'its own settings'}."

    def settings(self, loaded: Loaded[Any], steps: int) -> tuple[Any, str]:
        """The settings for a model and a number of AR steps, and what its sampler says of them."""
        made, said = settings_sent(CacheSettings, PRESETS, self.preset, facts_of(loaded), self.values, steps)
        return made, f"LazyMAR Cache: {said}" if said else ""


def expect_cache(value: Any) -> CachePlan:
    """Check the value of a cache socket, with its settings.

    Raises:
        UserError: another value, or a setting that does not exist or is outside its range.
    """
    plan = expect_own(value, CachePlan, "cache", "LazyMAR Cache")
    with _blamed_on_cache():
        settings_from(CacheSettings, plan.values)
    return plan


def checked_cache(value: Any, loaded: Loaded[Any], settings: Any) -> CacheSettings | None:
    """The settings of LazyMAR's caches for a model; None if the cache socket is not connected."""
    if value is None:
        return None

    plan = expect_cache(value)
    with _blamed_on_cache(knobs(settings)):
        caches, _ = plan.settings(loaded, settings.steps)
        expect_removed_to_hold(CacheSettings, plan.removed, facts_of(loaded).own_values(settings))
        check_caches(loaded.model, settings, caches)
    return caches


@contextmanager
def _blamed_on_cache(own: Collection[str] = ()) -> Iterator[None]:
    """Name the socket in an error about a setting of the caches, which is on another node. ``own``: settings of the
    sampler, which is on this one.
    """
    try:
        yield
    except UserError as problem:
        field, _, _ = str(problem).partition(":")
        if field in own:
            raise
        raise UserError(
            f"cache: the settings of LazyMAR Cache do not fit ({str(problem).rstrip('.')}); change them on that node."
        ) from None
