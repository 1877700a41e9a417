"""From a spec to cells: which model each sampler uses, all settings, keys and baselines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..assembly import DEMO, PAR, listed_family
from ..errors import UserError
from ..reports.quality import DISTRIBUTION
from ..reports.sweep import digest
from ..samplers import presets
from ..samplers.registry import ALGORITHM, LLAMAGEN, SAMPLERS, Entry
from ..selection import choose_models, identified
from .spec import Combination, Spec, expand
from .store import Cell
from .work import Conditions, Models, Prepared

_VERSION = re.compile(r'^version = "([^"]+)"', re.MULTILINE)


def version() -> str:
    """Version of the package, from its pyproject.toml."""
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    found = _VERSION.search(text)
    return found[1] if found else ""


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
    cells: dict[str, Cell] = {}
    for choice, family, combination in _in_order(spec, models, combinations):
        prepared = models.prepare(combination.choice, family, choice)
        cell = _cell(spec, combination, choice, family, prepared, conditions, models, numbers)
        if cell.key not in cells:  # two combinations may come to the same settings, by a preset and by a value
            cells[cell.key] = cell
            use(cell, prepared)
    out = list(cells.values())
    return [replace(cell, baseline=_baseline(cell, out)) for cell in out]


def _in_order(spec: Spec, models: Models, combinations: Sequence[Combination]) -> list[tuple[str, str, Combination]]:
    """(model, family, combination), one model after another.

    Raises:
        UserError: no model of the spec suits a sampler.
    """
    out: list[tuple[str, str, Combination]] = []
    entries = list(dict.fromkeys(c.choice.entry for c in combinations))
    served: set[str] = set()
    for model in dict.fromkeys(spec.model):
        own = entries if len(spec.model) == 1 else _suited(model, entries, models)
        chosen = choose_models(model, own, models.source, bool(spec.prompts), bool(spec.labels)) if own else {}
        served |= set(chosen)
        rows = [(*chosen[c.choice.entry.name], c) for c in combinations if c.choice.entry.name in chosen]
        out += [(choice, family, c) for family, choice, c in rows]
    missing = next((e for e in entries if e.name not in served), None)
    if missing is not None:
        raise UserError(f"samplers: {missing.name} samples {missing.models}, and no model of the spec is one; add it.")
    rank = {name: i for i, name in enumerate(dict.fromkeys((choice, family) for choice, family, _ in out))}
    return sorted(out, key=lambda row: rank[row[0], row[1]])


def _suited(model: str, entries: Sequence[Entry], models: Models) -> list[Entry]:
    """The samplers that a model of several can be sampled with."""
    if model == DEMO:
        return list(entries)
    family = listed_family(model) or identified(model, models.source)
    return [e for e in entries if (LLAMAGEN if family == PAR else family) in e.families]


def _cell(
    spec: Spec,
    combination: Combination,
    choice: str,
    family: str,
    prepared: Prepared,
    conditions: Conditions,
    models: Models,
    numbers: Mapping[str, Any],
) -> Cell:
    """A cell without its baseline."""
    settings, name = asdict(prepared.settings), prepared.entry.name
    key = digest(
        {
            "algorithm": ALGORITHM,
            "model": prepared.digest,
            "family": family,
            "sampler": name,
            "settings": settings,
            "seed": spec.seed,
            "batch": spec.batch,
            "drawn": conditions.about(prepared.ready),
            "numbers": {**numbers, "dtype": models.source.precision(family)},
        }
    )
    several = len(spec.model) > 1
    words = [name, combination.title.partition(", ")[2], Path(choice).stem if several else ""]
    slug = re.sub(r"[^A-Za-z0-9.+]+", "-", " ".join(filter(None, words))).strip("-.+")[:80]
    return Cell(
        id=f"{slug}-{key[:8]}",
        key=key,
        title=f"{combination.title}, {Path(choice).name}" if several else combination.title,
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
    return {
        "version": version(),
        "algorithm": ALGORITHM,
        "images": spec.images,
        "batch": spec.batch,
        "seed": spec.seed,
        "numerics": dict(numbers),
        "spec": asdict(spec),
    }
