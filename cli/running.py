"""Run a sampler with a progress bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..samplers.conditioning import AnyCondition
from .planning import Planned
from .progress import Bar


def draw(planned: Planned, condition: AnyCondition, seed: int, first: int = 0) -> Any:
    """Run a sampler to its end, in parts if memory is insufficient; image i of the batch uses (seed, first + i)."""
    drawing = planned.drawing(condition, seed, first)
    drawing.check(planned.on.device, "batch")
    return drive(drawing.steps(), planned.entry.title, planned.on.kind.unit)


def drive(sampler: Any, title: str, unit: str) -> Any:
    """Run a sampler generator to its end; returns its result."""
    with Bar(title) as bar:
        while True:
            try:
                step = next(sampler)
            except StopIteration as end:
                return end.value

            bar(step.done, step.total, unit)


def warm_up(planned: Planned, condition: AnyCondition) -> None:
    """See :meth:`.Drawing.warm_up`."""
    planned.drawing(condition, 0).warm_up()


def in_turn(
    planned: Sequence[Planned], what: Sequence[AnyCondition], seeds: Sequence[int]
) -> Iterator[tuple[int, int, Any]]:
    """Run all samplers once a seed, one after the other, in every second repeat the last one first.

    Other load on the machine, and what a run leaves in caches, affects all of them. Yields (repeat, sampler, result);
    samplers are counted in the order given.
    """
    for repeat, seed in enumerate(seeds):
        order = list(range(len(planned)))
        if repeat % 2:
            order.reverse()

        for i in order:
            yield repeat, i, draw(planned[i], what[i], seed)
