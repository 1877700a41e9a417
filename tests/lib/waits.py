"""What the host of a GPU waits for, counted on any machine: values that
a sampler reads from the device, and copies of memory that is not pinned.

A wait costs a GPU the time in which nothing is queued for it. Tensors report a pretended device and compute on the CPU
(``pretended_cuda.py``), and every operation that would make the
host wait is counted with the line of the package that asks for it.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastar_nodes.networks.bitdance import BlockModel
from pretended_cuda import META, pretended_cuda, to_cuda

# The last layer of the head of a MAR stays in fp32.
KEPT = ("final_layer.linear",)


def moved(model: Any, dtype: Any = None) -> Any:
    """A copy of a model on the pretended device."""
    hybrid = getattr(model, "hybrid", None)
    if hybrid is not None:
        hybrid = to_cuda(copy.deepcopy(hybrid), dtype, KEPT)
        return dataclasses.replace(model, net=hybrid.mar, hybrid=hybrid)
    kept = () if isinstance(model, BlockModel) else KEPT
    return dataclasses.replace(model, net=to_cuda(copy.deepcopy(model.net), dtype, kept))


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """A pretended device in this block; yields the waits so far,
    by operation and line ("nonzero samplers/mar/cspd/rejection.py:12").
    """
    with pretended_cuda(META) as waits:
        yield waits


def waits_of_steps(sampler: Any, waits: Counter[str]) -> tuple[list[Counter[str]], Any]:
    """Run a sampler whose models are on the pretended device: the waits before each of its steps, and its result.

    The first entry holds the setup, too. The last entry holds the waits between the last step and the result.
    """
    found: list[Counter[str]] = []
    waits.clear()
    while True:
        try:
            next(sampler)
        except StopIteration as end:
            found.append(Counter(waits))
            return found, end.value
        found.append(Counter(waits))
        waits.clear()
