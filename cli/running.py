"""Run a sampler with a progress bar."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from ..samplers.batches import in_parts
from ..samplers.conditioning import AnyCondition
from ..samplers.noise import PairedNoise
from ..samplers.registry import MAR
from ..samplers.settings import make
from ..samplers.tokens.draws import PairedDraws
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
    def start(part: range) -> Any:
        images = range(first + part.start, first + part.stop)
        noise = PairedNoise(seed, images) if planned.entry.family == MAR else PairedDraws(seed, images)
        return planned.entry.run(planned.on.model, condition.of(part), planned.settings, noise, seed)

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
