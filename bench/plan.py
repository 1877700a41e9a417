"""From a spec to cells: which model each sampler uses, all settings, keys and baselines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..reports.quality import DISTRIBUTION
from ..reports.sweep import digest
from ..samplers import presets
from ..samplers.registry import ALGORITHM, SAMPLERS
from ..selection import choose_models
from .records import Cell
from .spec import Combination, Spec, expand
from .work import Conditions, Models, Prepared


def plan(
    spec: Spec,
    models: Models,
    conditions: Conditions,
    numbers: Mapping[str, Any],
    use: Callable[[Cell, Prepared], object] = lambda cell, prepared: None,
) -> list[Cell]:
    """The cells of a spec, by model and in the order of its samplers. Every model is loaded once.

    Args:
        numbers: see :func:`.work.numerics`.
        use: called with every cell while its model is loaded.

    Raises:
        UserError: a model is missing or does not suit a sampler, or settings do not suit the model.
    """
    combinations = expand(spec)
    entries = list(dict.fromkeys(c.choice.entry for c in combinations))
    chosen = choose_models(spec.model, entries, models.source, bool(spec.prompts), bool(spec.labels))
    order = list(dict.fromkeys(chosen.values()))  # one model after another
    cells: dict[str, Cell] = {}
    for combination in sorted(combinations, key=lambda c: order.index(chosen[c.choice.entry.name])):
        family, choice = chosen[combination.choice.entry.name]
        prepared = models.prepare(combination.choice, family, choice)
        numbers = {**numbers, "dtype": models.source.precision(family)}
        cell = _cell(spec, combination, choice, prepared, conditions.about(prepared.ready), numbers)
        if cell.key not in cells:  # two combinations may come to the same settings, by a preset and by a value
            cells[cell.key] = cell
            use(cell, prepared)
    out = list(cells.values())
    return [replace(cell, baseline=_baseline(cell, out)) for cell in out]


def _cell(
    spec: Spec,
    combination: Combination,
    choice: str,
    prepared: Prepared,
    about: Mapping[str, Any],
    numbers: Mapping[str, Any],
) -> Cell:
    """A cell without its baseline. Its key is a digest of all that its pictures depend on."""
    settings, name, family = asdict(prepared.settings), prepared.entry.name, prepared.ready.family
    key = digest(
        {
            "algorithm": ALGORITHM,
            "model": prepared.digest,
            "family": family,
            "sampler": name,
            "settings": settings,
            "seed": spec.seed,
            "batch": spec.batch,
            "drawn": about,
            "numbers": numbers,
        }
    )
    words = f"{name} {combination.title.partition(', ')[2]}".strip()
    slug = re.sub(r"[^A-Za-z0-9.+]+", "-", words).strip("-.+")[:80]
    return Cell(
        id=f"{slug}-{key[:8]}",
        key=key,
        title=combination.title,
        model=choice,
        model_digest=prepared.digest,
        family=family,
        sampler=name,
        asked=dict(combination.asked),
        settings=settings,
        seed=spec.seed,
        images=spec.images,
        size=prepared.size,
        baseline=None,
        lossless=DISTRIBUTION if presets.is_lossless(name, settings) else "",
    )


def _baseline(cell: Cell, cells: Sequence[Cell]) -> str | None:
    """The plain sampler's cell on the same model with the most settings in common; None for a plain sampler, and without one."""

    def plain(other: Cell) -> bool:
        return SAMPLERS[other.sampler].baseline and presets.is_exact(other.sampler, other.settings, 0)

    def alike(other: Cell) -> int:
        return sum(cell.settings.get(name) == value for name, value in other.settings.items())

    if plain(cell):
        return None
    found = [c for c in cells if plain(c) and (c.family, c.model) == (cell.family, cell.model)]
    return max(found, key=alike).id if found else None


def manifest(spec: Spec, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """What the store records of a spec. It is the same for every process of a sweep."""
    return {"algorithm": ALGORITHM, "batch": spec.batch, "numerics": dict(numbers), "spec": asdict(spec)}
