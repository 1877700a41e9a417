"""Sampling a batch of a model, in parts if memory is insufficient for all of it at once.

An image does not depend on its batch: tokens are the same, MAR's latents up to rounding. Only the time differs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..memory import out_of_memory
from ..model_loaders.networks.bitdance import BlockModel
from ..model_loaders.networks.mar import MARModel
from ..model_loaders.networks.speed import PLAIN, suited_threads
from ..reports.record import Report, joined
from .conditioning import AnyCondition
from .noise import PairedNoise, noise_bytes
from .registry import Entry
from .settings import make
from .tokens.draws import PairedDraws

# Most bytes of the noise of a batch.
NOISE_LIMIT = 4 << 30
# First words of the note of a batch that was sampled in parts.
SPLIT = "Memory was insufficient for"

# Networks that have run in this process; of compiled ones by which samplers, because each compiles what it needs.
_RAN: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()

S = TypeVar("S")
R = TypeVar("R", bound=tuple)


def begin(
    entry: Entry, model: Any, settings: Any, condition: AnyCondition, seed: int, first: int, part: range
) -> Generator[Any, None, Any]:
    """Begin a sampler on some of the images of a condition; image i uses the noise of (seed, first + i)."""
    images = range(first + part.start, first + part.stop)
    noise = PairedNoise(seed, images) if entry.latents else PairedDraws(seed, images)
    return entry.run(model, condition.of(part), settings, noise)


def expect_little_noise(model: Any, settings: Any, images: int, field: str) -> None:
    """Check that the noise of a batch takes at most 4 GB, of a model that draws latents; ``field`` is the input to
    change.

    Raises:
        UserError: it takes more, or the model draws no images of the size in the settings.
    """
    if isinstance(model, BlockModel):
        height, width = model.grid(settings.height, settings.width, settings.any_size)
        tokens = height * width
        channels = model.net.channels
    elif isinstance(model, MARModel):
        tokens = model.net.config.tokens
        channels = model.net.config.channels
    else:
        return  # a token model

    steps = settings.diffusion_steps
    if noise_bytes(images, steps, tokens, channels) > NOISE_LIMIT:
        raise UserError(
            f"{field}: {images} images with {steps} diffusion steps need more than {NOISE_LIMIT >> 30} GB of noise; "
            "ask for fewer images at once, or lower diffusion_steps."
        )


def warm_up(entry: Entry, model: Any, settings: Any, condition: AnyCondition) -> None:
    """Run one AR step with two diffusion steps, or three passes of a token model: the first calls in a process
    initialise libraries.
    """
    settings = short(entry, settings)
    run_beginning(in_parts(partial(begin, entry, model, settings, condition, 0, 0), len(condition), model.net))


def short(entry: Entry, settings: Any) -> Any:
    """Settings of a masked sampler for one AR step with two diffusion steps, of one of blocks for two diffusion steps;
    of a token sampler as they are.
    """
    if entry.masked:
        return make(entry.settings, {"steps": 1, "diffusion_steps": 2})
    return replace(settings, diffusion_steps=2) if entry.latents else settings


def run_beginning(steps: Generator[Any, None, Any]) -> None:
    """Run three steps of a sampler and close it."""
    for _ in islice(steps, 3):
        pass
    steps.close()


def in_parts(start: Callable[[range], Generator[S, None, R]], images: int, net: nn.Module) -> Generator[S, None, R]:
    """Sample a batch at once; if memory is insufficient, in parts of half the size, again halved until a part fits.

    ``start`` begins the sampler for some of the images, by their place in the batch, and may be called again for an
    image. In the steps of a batch in parts, tensors hold all images (zero where not begun), and ``done`` and ``total``
    count steps times images. Its report says so in its note; its seconds and counts are the sums over the parts,
    without attempts that ran out of memory. It also says whether the network had not run before. A small network
    ``net`` on a CPU takes one thread, see :func:`.suited_threads`.

    Raises:
        UserError: memory is insufficient for a single image.
    """

    ran = _RAN.get(net)
    ran_before = None if ran is None else set(ran)
    results: list[R] = []
    shown: dict[str, Tensor] = {}  # tensors of the last step, of all images
    size = images
    first = 0
    while first < images:
        part = range(first, min(first + size, images))
        result: R | None = None
        try:
            with suited_threads(net), closing(start(part)) as sampler:
                while result is None:
                    try:
                        step = next(sampler)
                    except StopIteration as end:
                        result = end.value
                    else:
                        _RAN.setdefault(net, set())
                        yield step if len(part) == images else _of_batch(step, part, images, shown)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise

        if result is not None:
            results.append(result)
            first = part.stop
            continue

        # Memory was insufficient. These names would keep the tensors of the attempt.
        sampler = step = None  # type: ignore[assignment]
        _release_memory()
        for whole in shown.values():
            whole[first:] = 0
        if len(part) == 1:
            raise UserError(
                "memory: there is too little for a single image; choose a smaller dtype (int8, bf16 or fp16) where "
                "the loader offers it, a smaller model or image, or unload other models."
            )
        size = (len(part) + 1) // 2
        logging.getLogger(__name__).warning(
            "FastAR: memory is insufficient for %d images at once; sampling %d at a time.", len(part), size
        )

    for values in results:
        for report in values:
            if isinstance(report, Report):
                _note_first_run(report, net, ran_before)
                if "step" in report.maps:  # drawing codes of a prompt has none
                    report.grid = report.maps["step"].shape[1:]
                report.parameters = sum(weight.numel() for weight in net.parameters())
    if len(results) == 1:
        return results[0]

    note = f"{SPLIT} {images} images at once; they were sampled {size} at a time."
    return type(results[0])(*(_joined(values, note) for values in zip(*results, strict=True)))


def _note_first_run(report: Report, net: nn.Module, ran_before: set[str] | None) -> None:
    """Say in a report whether its seconds include what happens once: initialisation, or compilation.

    Args:
        ran_before: samplers that the network had run; None if it had not run at all.
    """
    compiles = getattr(net, "speed", PLAIN) != PLAIN and report.sampler not in (ran_before or ())
    report.first_run = ran_before is None or compiles
    _RAN.setdefault(net, set()).add(report.sampler)


def _release_memory() -> None:
    """Give the memory of a failed attempt back to the devices."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def _of_batch(step: S, part: range, images: int, shown: dict[str, Tensor]) -> S:
    """A step of some images as a step of the whole batch."""
    given: Any = step
    tensors = {f.name: v for f in fields(given) if isinstance(v := getattr(given, f.name), Tensor)}
    for name, value in tensors.items():
        whole = shown.setdefault(name, value.new_zeros(images, *value.shape[1:]))
        whole[part.start : part.stop] = value

    done = part.start * given.total + len(part) * given.done
    total = images * given.total
    return replace(given, done=done, total=total, **{name: shown[name].clone() for name in tensors})


def _joined(values: Sequence[Any], note: str) -> Any:
    """One field of the parts' results as that of the batch."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, Report):
        return joined(values, note)

    # A condition: the images' entries one part behind the other.
    entries: dict[str, tuple[Any, ...]] = {}
    for f in fields(first):
        of_parts = [getattr(value, f.name) for value in values]
        if isinstance(of_parts[0], tuple):
            entries[f.name] = sum(of_parts, ())
    return replace(first, **entries)
