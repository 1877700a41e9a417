"""Samplers and settings of a run, from --samplers, --set and --steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..assembly import Ready, defaults
from ..errors import UserError
from ..samplers import presets
from ..samplers.baseline import Run, baselines
from ..samplers.choice import PRESET, assigned, assignment, by_key
from ..samplers.registry import Entry
from ..samplers.settings import knobs


@dataclass(frozen=True)
class Planned:
    """A sampler of a run.

    Attributes:
        entry: the sampler.
        settings: its settings.
        asked: settings given for this sampler by name.
        variant: text after the colon in --samplers; "" if none.
        ready: its model; None while only the options are checked.
    """

    entry: Entry
    settings: Any
    asked: dict[str, str]
    variant: str = ""
    ready: Ready | None = None

    @property
    def label(self) -> str:
        """Label of its picture and table row."""
        if self.variant:
            return f"{self.entry.title}, {self.variant}"
        asked = (f"{name.replace('_', ' ')} {value}" for name, value in self.asked.items())
        return " ".join([self.entry.title, *asked])

    @property
    def on(self) -> Ready:
        """Its model."""
        assert self.ready is not None, "planned without a model"
        return self.ready


def plan(samplers: str, sets: Sequence[str], steps: int | None, ready: Mapping[str, Ready]) -> list[Planned]:
    """Samplers with their settings, grouped by family, the baseline first in each.

    A later source of a setting takes precedence: the model's defaults, settings for all samplers, the preset, settings for one sampler.

    Args:
        samplers: names separated by commas; several variants of one sampler as mar:one,mar:other.
        sets: "sampler.name=value" or "name=value"; later ones take precedence.
        steps: AR steps, or None.
        ready: models by sampler name; without a model the settings are only checked.

    Raises:
        UserError: an unknown sampler or setting, or a value out of range.
    """
    entries = by_key(samplers.split(","))
    if steps is not None and not any("ar_steps" in knobs(e.settings) for e in entries.values()):
        raise UserError("steps: no sampler of this run has AR steps; their passes follow from the picture's size.")
    values = [assignment(text, "set") for text in sets]
    if steps is not None:
        values.insert(0, ("ar_steps", str(steps)))
    given = assigned(entries, values)
    out = []
    for key, entry in entries.items():
        on = ready.get(entry.name)
        shared, own = given[key]
        asked = {**shared, **own}
        preset = asked.pop(PRESET, presets.CUSTOM)
        width = on.model.net.config.dim if on else 0
        demo = on is None or on.demo
        settings: Any = presets.combine(entry.settings, defaults(on) if on else {}, preset, asked, demo, width)
        out.append(Planned(entry, settings, own, key.partition(":")[2], on))
    family = [p.ready.family if p.ready else p.entry.family for p in out]
    rank = {name: i for i, name in enumerate(dict.fromkeys(family))}
    order = sorted(range(len(out)), key=lambda i: (rank[family[i]], not out[i].entry.baseline or bool(out[i].variant)))
    return [out[i] for i in order]


def measured_against(planned: Sequence[Planned]) -> list[int]:
    """For each sampler the index of the one its speed-up is relative to, see :func:`samplers.baseline.baselines`.

    Models of two families or sizes have different networks, so the ratio of their seconds is not a property of a method.
    """
    return baselines(
        [Run((p.on.family, p.on.tokens), p.entry.name, asdict(p.settings), math.isqrt(p.on.tokens)) for p in planned]
    )
