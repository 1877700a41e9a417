"""Sampling a batch of a model, in parts if memory is insufficient for all of it at once.

An image does not depend on its batch: tokens are the same, MAR's latents up to rounding. Only the time differs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..memory import out_of_memory
from ..networks import graphs
from ..networks.speed import COMPILE
from ..networks.torch_state import suited_threads, threads
from ..reports.record import Report, joined
from ..samplers.engine import Step
from ..samplers.noise import noise_bytes
from .registry import family_of

# Most bytes of the noise of a batch.
NOISE_LIMIT = 4 << 30
# First words of the note of a batch that was sampled in parts.
SPLIT = "Memory was insufficient for"

# Networks that have run in this process; of compiled ones by which samplers, because each compiles what it needs.
_RAN: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()

R = TypeVar("R", bound=tuple)
Start: TypeAlias = Callable[[range], Generator[Step, None, R]]
Estimate: TypeAlias = Callable[[range], Mapping[str, int]]


def expect_little_noise(model: Any, settings: Any, images: int, field: str) -> None:
    """Check that the noise of a batch takes at most 4 GB, of a model that draws latents; ``field`` is the input to
    change.

    Raises:
        UserError: it takes more, or the model draws no images of the size in the settings.
    """
    numbers = family_of(model).step_numbers(model, settings)
    if not numbers:
        return

    streams = settings.streams()
    if noise_bytes(images, streams, numbers) > NOISE_LIMIT:
        steps = sum(streams.values())
        raise UserError(
            f"{field}: the noise of {images} images with {steps} diffusion steps needs more than {NOISE_LIMIT >> 30} "
            "GB; ask for fewer images at once, or for fewer diffusion steps."
        )


def run_beginning(steps: Generator[Any, None, Any]) -> None:
    """Run three steps of a sampler and close it."""
    for _ in islice(steps, 3):
        pass
    steps.close()


def in_parts(
    start: Start[R], images: int, net: nn.Module, warm: bool = False, estimate: Estimate | None = None
) -> Generator[Step, None, R]:
    """Sample a batch at once; if memory is insufficient, in parts of half the size, again halved until a part fits.

    ``start`` begins the sampler for some of the images, by their place in the batch, and may be called again for an
    image. ``estimate`` gives the bytes of such a part by stage, for its report.

    In the steps of a batch in parts, tensors hold all images (zero where not begun), and ``done`` and ``total`` count
    steps times images. Its report says so in its note; its seconds and counts are the sums over the parts, without
    attempts that ran out of memory. It also says whether the network had not run before. A small network ``net`` on a
    CPU takes one thread, see :func:`.suited_threads`.

    With ``warm`` a network that has not run takes the sampler's first step twice, the first time untimed, because that
    initialises libraries: ``done`` and ``total`` count it. It would not help a compiled network, which compiles also
    later, nor one whose weights are copied to the device at every call.

    Raises:
        UserError: memory is insufficient for a single image.
    """
    ran = _RAN.get(net)
    ran_before = None if ran is None else set(ran)

    results: list[R] = []
    batch = _BatchSteps(images)
    batch.warms = warm and ran_before is None and _gains_by_warming(net)
    size = images
    first = 0
    while first < images:
        part = range(first, min(first + size, images))
        result = yield from _attempt(start, part, net, batch)
        if result is not None:
            if estimate is not None:
                cast(Any, result).report.memory |= estimate(part)
            results.append(result)
            first = part.stop
            continue

        _release_memory()
        batch.clear(first)
        size = _smaller(len(part))

    if batch.warms:
        ran_before = set()
    for result in results:
        _complete_reports(result, net, ran_before)
    return _whole(results, f"{SPLIT} {images} images at once, so they were sampled {size} at a time.")


def _attempt(start: Start[R], part: range, net: nn.Module, batch: _BatchSteps) -> Generator[Step, None, R | None]:
    """Sample some of the images; returns their result, or None if memory was insufficient.

    This function is left before memory is released: its names would keep the tensors of the attempt.
    """
    suited = suited_threads(net)
    try:
        if batch.warms and net not in _RAN:
            with closing(start(part)) as sampler, threads(suited):
                next(sampler, None)

        with closing(start(part)) as sampler:
            while True:
                # At every step the caller has its threads again.
                with threads(suited):
                    try:
                        step = next(sampler)
                    except StopIteration as end:
                        return end.value

                _RAN.setdefault(net, set())
                if batch.warms:  # the untimed step counts
                    step.done += 1
                    step.total += 1
                yield step if len(part) == batch.images else batch.step(step, part)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise

    return None


def _gains_by_warming(net: nn.Module) -> bool:
    """Whether one step of a network takes out of its later ones what happens once."""
    operations = getattr(net, "operations", None)
    moves = operations is not None and operations.moves(net)
    return not moves and getattr(net, "speed", "") != COMPILE


def _smaller(size: int) -> int:
    """The size of the next parts, where memory was insufficient for ``size`` images.

    Raises:
        UserError: it was a single image.
    """
    if size == 1:
        raise UserError(
            "memory: there is not enough memory even for a single image. If the loader offers the dtype int8, bf16 or "
            "fp16, choose it. Otherwise choose a smaller model, generate a smaller image, or unload other models."
        )

    half = (size + 1) // 2
    logging.getLogger(__name__).warning(
        "FastAR: there is not enough memory for %d images at once; sampling %d at a time.", size, half
    )
    return half


def _release_memory() -> None:
    """Give the memory of a failed attempt back to the devices."""
    graphs.forget_all()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


# ------------------------------------------------------------------------------------------------ steps of a part


class _BatchSteps:
    """Steps of parts as steps of the whole batch."""

    def __init__(self, images: int):
        self.images = images
        self.warms = False  # whether each part begins with a step that is not timed
        self.latents: Tensor | None = None  # of all images, zero where a part has not begun
        self.decided: Tensor | None = None

    def step(self, step: Step, part: range) -> Step:
        """A step of some of the images as a step of all of them."""
        if self.latents is None or self.decided is None:
            self.latents = step.latents.new_zeros(self.images, *step.latents.shape[1:])
            self.decided = step.decided.new_zeros(self.images, *step.decided.shape[1:])
        self.latents[part.start : part.stop] = step.latents
        self.decided[part.start : part.stop] = step.decided
        so_far = self.latents.clone(), self.decided.clone()

        done = part.start * step.total + len(part) * step.done
        return Step(done, self.images * step.total, step.report, lambda: so_far)

    def clear(self, first: int) -> None:
        """Forget the images from ``first`` on, of which an attempt failed."""
        if self.latents is not None and self.decided is not None:
            self.latents[first:] = 0
            self.decided[first:] = False


# ------------------------------------------------------------------------------------------------ results


def _complete_reports(result: tuple, net: nn.Module, ran_before: set[str] | None) -> None:
    """Write into the report of a result what its sampler does not know: the network, and the grid of the image.

    Args:
        ran_before: samplers that the network had run; None if it had not run at all.
    """
    for report in result:
        if not isinstance(report, Report):
            continue

        _note_first_run(report, net, ran_before)
        report.parameters = sum(weight.numel() for weight in net.parameters())
        if "step" in report.maps:  # drawing codes of a prompt has none
            report.grid = report.maps["step"].shape[1:]


def _note_first_run(report: Report, net: nn.Module, ran_before: set[str] | None) -> None:
    """Say in a report whether its seconds include what happens once: initialisation, or compilation.

    Args:
        ran_before: samplers that the network had run; None if it had not run at all.
    """
    compiles = getattr(net, "speed", "") == COMPILE and report.sampler not in (ran_before or ())
    report.first_run = ran_before is None or compiles
    _RAN.setdefault(net, set()).add(report.sampler)


def _whole(results: Sequence[R], note: str) -> R:
    """The result of a batch, from those of its parts. ``note``: for the report of several parts."""
    if len(results) == 1:
        return results[0]
    return type(results[0])(*(_joined(values, note) for values in zip(*results, strict=True)))


def _joined(values: Sequence[Any], note: str) -> Any:
    """One field of the batch's result, from the fields of the parts' results."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, Report):
        return joined(values, note)

    # A condition: the images' entries, one part after the other.
    entries: dict[str, tuple[Any, ...]] = {}
    for f in fields(first):
        of_parts = [getattr(value, f.name) for value in values]
        if isinstance(of_parts[0], tuple):
            entries[f.name] = sum(of_parts, ())
    return replace(first, **entries)
