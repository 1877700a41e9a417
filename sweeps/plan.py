"""The plan of a sweep: every combination of the values of settings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runs.choice import PRESET, Choice, choose
from ..runs.registry import Entry
from ..samplers.settings import settings_from

MOST_CELLS = 1024

# Axes that are no settings: the model, and the one label or prompt of all images of a cell.
CHECKPOINT = "checkpoint"
LABEL = "label"
PROMPT = "prompt"
SUBJECTS = (CHECKPOINT, LABEL, PROMPT)

# Name of a setting, the preset among them, or of a subject to its values: text or numbers.
Grid = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Combination:
    """A sampler with one value of every setting and subject of a grid."""

    choice: Choice
    asked: Mapping[str, Any]  # the values by name, the preset and the subjects among them
    title: str  # "FastHybrid, threshold 0.9": the sampler and what varies
    variant: str = ""  # its name beside others of its sampler


def distinct(entry: Entry, name: str, values: Sequence[Any]) -> list[Any]:
    """The values of a setting without those that mean the same, such as 0.5 and "0.50".

    Raises:
        UserError: no such setting, or a value out of range.
    """
    if name in SUBJECTS:
        return list(dict.fromkeys(values))

    found: dict[Any, Any] = {}
    for value in values:
        choose(entry.name, {name: value})
        meant = str(value) if name == PRESET else getattr(settings_from(entry.settings, {name: value}), name)
        found.setdefault(meant, value)

    return list(found.values())


def combinations(entry: Entry, grid: Grid, variant: str = "") -> list[Combination]:
    """All combinations, the last setting changing first. ``variant`` is a name in their titles.

    Raises:
        UserError: as :func:`distinct`.
    """
    grid = {name: distinct(entry, name, values) for name, values in grid.items()}
    varied = [name for name, values in grid.items() if len(values) > 1]

    out = []
    for values in itertools.product(*grid.values()):
        asked = dict(zip(grid, values, strict=True))
        words = [f"{name.replace('_', ' ')} {_in_title(name, asked[name])}" for name in varied]
        title = ", ".join(filter(None, [entry.title, variant, *words]))
        settings = {name: value for name, value in asked.items() if name not in SUBJECTS}
        out.append(Combination(choose(entry.name, settings), asked, title, variant))

    return out


def _in_title(name: str, value: Any) -> str:
    """A value as text; of a file its name."""
    return Path(str(value)).name if name == CHECKPOINT else shown(value)


def shown(value: Any) -> str:
    """A value of a setting as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)
