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
from ..samplers.baseline import Run, baselines, is_lossless
from ..samplers.registry import ALGORITHM, LLAMAGEN, Entry
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
    return _with_baselines(list(cells.values()))


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
        lossless=DISTRIBUTION if is_lossless(name, settings) else "",
    )


def _with_baselines(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with the plain sampler's cell on the same model that has most settings in common; None for these, and without one."""
    runs = [Run((c.family, c.model), c.sampler, c.settings, 0) for c in cells]
    of = [b if b != i and runs[b].plain and runs[b].exact else None for i, b in enumerate(baselines(runs, alike=True))]
    return [replace(cell, baseline=None if b is None else cells[b].id) for cell, b in zip(cells, of, strict=True)]


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
