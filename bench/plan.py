"""From a spec to cells: which model each sampler uses, all settings, keys and baselines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..assembly import choose_models
from ..reports.quality import DISTRIBUTION
from ..reports.sweep import digest
from ..samplers.baseline import Run, baselines, is_lossless
from ..samplers.registry import ALGORITHM
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
    """The cells of a spec, by model and in the order of its samplers. Every model is loaded once."""
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
    return _with_baselines(list(cells.values()))


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
        lossless=DISTRIBUTION if is_lossless(name, settings) else "",
    )


def _with_baselines(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with the plain sampler's cell on the same model that has most settings in common; None for these, and without one."""
    runs = [Run((c.family, c.model), c.sampler, c.settings, 0) for c in cells]
    of = [b if b != i and runs[b].plain and runs[b].exact else None for i, b in enumerate(baselines(runs, alike=True))]
    return [replace(cell, baseline=None if b is None else cells[b].id) for cell, b in zip(cells, of, strict=True)]


def manifest(spec: Spec, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """What the store records of a spec. It is the same for every process of a sweep."""
    return {"algorithm": ALGORITHM, "batch": spec.batch, "numerics": dict(numbers), "spec": asdict(spec)}
