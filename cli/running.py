"""Run a sampler with a progress bar."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from ..samplers.batches import in_parts
from ..samplers.conditioning import AnyCondition
from ..samplers.registry import MAR
from ..samplers.settings import make
from ..selection import begin
from .planning import Planned
from .progress import Bar


def draw(planned: Planned, condition: AnyCondition, seed: int, first: int = 0) -> Any:
    """Run a sampler to its end; the batch is sampled in parts if memory is insufficient.

    Args:
        first: index of the first image; image i of the batch uses (seed, first + i).

    Returns:
        The sampler's result.
    """
    unit = "AR steps" if planned.entry.family == MAR else "steps"
    return drive(_begin(planned, condition, seed, first), planned.entry.title, unit)


def drive(sampler: Any, title: str, unit: str) -> Any:
    """Run a sampler generator to its end; returns its result."""
    with Bar(title) as bar:
        while True:
            try:
                step = next(sampler)
            except StopIteration as end:
                return end.value
            bar(step.done, step.total, unit)


def _begin(planned: Planned, condition: AnyCondition, seed: int, first: int = 0) -> Any:
    start = partial(begin, planned.entry, planned.on, planned.settings, condition, seed, first)
    return in_parts(start, len(condition))


def warm_up(planned: Planned, condition: AnyCondition) -> None:
    """Run one AR step with two diffusion steps, or three passes of a token model, untimed.

    The first call in a process includes the initialisation of libraries.
    """
    if planned.entry.family == MAR:
        settings = make(planned.entry.settings, {"ar_steps": 1, "diffusion_steps": 2})
        draw(replace(planned, settings=settings), condition, 0)
    else:
        sampler = _begin(planned, condition, 0)
        for _ in islice(sampler, 3):
            pass
        sampler.close()
