"""Sampling a batch of a model, in parts if memory is insufficient for all of it at once.

An image does not depend on its batch, so the pictures are the same; only the time differs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import UserError
from ..memory import out_of_memory
from ..reports.record import Report, joined
from .conditioning import AnyCondition
from .noise import PairedNoise
from .registry import Entry
from .settings import make
from .tokens.draws import PairedDraws

# First words of the note of a batch that was sampled in parts.
SPLIT = "Memory was insufficient for"

S = TypeVar("S")
R = TypeVar("R", bound=tuple)


def begin(
    entry: Entry, model: Any, settings: Any, condition: AnyCondition, seed: int, first: int, part: range
) -> Generator[Any, float | None, Any]:
    """Begin a sampler on some of the images of a condition; image i of the condition uses the noise of (seed, first + i)."""
    images = range(first + part.start, first + part.stop)
    noise = PairedNoise(seed, images) if entry.masked else PairedDraws(seed, images)
    return entry.run(model, condition.of(part), settings, noise, seed)


def warm_up(entry: Entry, model: Any, settings: Any, condition: AnyCondition) -> None:
    """Run one AR step with two diffusion steps, or three passes of a token model: the first calls in a process initialise libraries."""
    settings = short(entry, settings)
    run_beginning(in_parts(partial(begin, entry, model, settings, condition, 0, 0), len(condition)))


def short(entry: Entry, settings: Any) -> Any:
    """Settings of a masked sampler for one AR step with two diffusion steps; of a token sampler as they are."""
    return make(entry.settings, {"ar_steps": 1, "diffusion_steps": 2}) if entry.masked else settings


def run_beginning(steps: Generator[Any, Any, Any]) -> None:
    """Run three steps of a sampler and close it."""
    for _ in islice(steps, 3):
        pass
    steps.close()


def in_parts(start: Callable[[range], Generator[S, float | None, R]], images: int) -> Generator[S, float | None, R]:
    """Sample a batch at once; if memory is insufficient, in parts of half the size, again halved until a part fits.

    The report of a batch in parts says so in its note. Its seconds and counts are the sums over the parts; attempts that ran out of
    memory are not included.

    Args:
        start: begins the sampler for some of the images, by their place in the batch. May be called again for an image.
        images: batch size.

    Yields:
        The steps of the sampler. Of a batch in parts, their tensors hold all images (zero where not begun), and ``done`` and
        ``total`` count steps times images.

    Returns:
        The sampler's result.

    Raises:
        UserError: memory is insufficient for a single image.
    """
    size, at, results = images, 0, list[R]()
    canvas: dict[str, Tensor] = {}
    while True:
        part = range(at, min(at + size, images))
        sampler = None
        try:
            sampler = start(part)
            sent = None
            while True:
                try:
                    step = sampler.send(sent)
                except StopIteration as end:
                    results.append(end.value)
                    break
                sent = yield step if size >= images else _shown(step, part, images, canvas)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        else:
            at = part.stop
            if at >= images:
                break
            continue
        finally:
            if sampler is not None:
                sampler.close()
        # Outside the handler: until its end the exception holds the tensors of the failed attempt.
        sampler = step = None  # type: ignore[assignment]
        _release()
        for whole in canvas.values():
            whole[at:] = 0
        if len(part) <= 1:
            raise UserError(
                "memory: there is too little for a single image; choose a dtype of half the size (bf16 or fp16) where the loader offers "
                "it, a smaller model or picture, or unload other models."
            )
        size = (len(part) + 1) // 2
        logging.getLogger(__name__).warning(
            "FastAR: memory is insufficient for %d images at once; sampling %d at a time.", len(part), size
        )
    if size >= images:
        return results[0]
    note = f"{SPLIT} {images} images at once; they were sampled {size} at a time."
    return type(results[0])(*(_joined(values, note) for values in zip(*results, strict=True)))


def _release() -> None:
    """Return freed memory to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def _shown(step: S, part: range, images: int, canvas: dict[str, Tensor]) -> S:
    """A step of some images as a step of the whole batch; ``canvas`` holds the last state of all images."""
    given: Any = step
    tensors = {f.name: v for f in fields(given) if isinstance(v := getattr(given, f.name), Tensor)}
    for name, value in tensors.items():
        whole = canvas.setdefault(name, value.new_zeros(images, *value.shape[1:]))
        whole[part.start : part.stop] = value
    done, total = part.start * given.total + len(part) * given.done, images * given.total
    return replace(given, done=done, total=total, **{name: canvas[name].clone() for name in tensors})


def _joined(values: Sequence[Any], note: str) -> Any:
    """One field of the parts' results as that of the batch."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, Report):
        return joined(values, note)
    whole = {f.name: [getattr(v, f.name) for v in values] for f in fields(first)}  # a condition
    return replace(first, **{name: sum(v, ()) for name, v in whole.items() if isinstance(v[0], tuple)})
