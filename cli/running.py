"""Run a sampler with a progress bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..runs import batches
from ..samplers.conditioning import AnyCondition
from .planning import Planned
from .progress import Bar


def draw(planned: Planned, condition: AnyCondition, seed: int, first: int = 0) -> Any:
    """Run a sampler to its end, in parts if memory is insufficient; image i of the batch uses (seed, first + i)."""
    model = planned.on.model
    batches.expect_little_noise(model, planned.settings, len(condition), "batch")

    start = partial(batches.begin, planned.entry, model, planned.settings, condition, seed, first)
    return drive(batches.in_parts(start, len(condition), model.net), planned.entry.title, planned.on.kind.unit)


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
    """See :func:`runs.batches.warm_up`."""
    batches.warm_up(planned.entry, planned.on.model, planned.settings, condition)


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
