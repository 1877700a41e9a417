"""One row: a sampler's seconds with each speed, what it launches, its memory, and whether its images are plain's."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...cli.bench import conditions_of
from ...cli.planning import Planned, with_draft
from ...cli.running import warm_up
from ...networks.speed import PLAIN, choose
from ...reports.record import Report
from ...samplers.conditioning import AnyCondition
from ..work.operations import counted
from ..work.random_options import planned_for, shared_options
from ..work.sizes import random_model
from .cases import Case

# With speeds that record, the first image is plain and the second one is recorded: the third one counts. It has the
# seed of the plain image, the others have not: a graph that keeps the noise of another image is found out. Of large
# batches the second one counts, whose seconds include what is still recorded.
SEEDS = (1, 2, 0)
SEEDS_OF_BATCHES = (1, 0)
_LARGE = 16
# Plain images that take less than so many seconds are drawn three times.
SHORT = 2.0
LARGEST_BATCH = 64  # of a rehearsal less
# Seconds for which operations are counted, unless half of the image is done by then.
COUNTED = 2.0
# Name of the measurement that draws the plain image once more.
PLAIN_AGAIN = "plain again"
_DRAFT = "MAR-B"
# Standard deviation of what the authors initialise to zero.
_SMALL = 0.01
# The dtypes of what they initialise; weights of 8 bits are left alone.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Save = Callable[[], None]


class TimeUp(Exception):
    """The time of a part is over."""


@dataclass(eq=False)
class Prepared:
    """A case with its models."""

    planned: Planned
    condition: AnyCondition

    @property
    def draft(self) -> Any:
        """The draft model; None if it has none."""
        return self.planned.beside.get("draft")

    @property
    def models(self) -> list[Any]:
        return [self.planned.on.model, *([self.draft] if self.draft is not None else [])]

    def choose(self, speed: str) -> None:
        """Set how the networks run."""
        for model in self.models:
            choose(model.net, speed, self.planned.on.device)


# ------------------------------------------------------------------------------------------------ models


def prepare(case: Case, more: str, device: torch.device) -> Prepared:
    """Build or load the models of a case on the device; ``more``: further arguments of bench."""
    parser = argparse.ArgumentParser()
    shared_options(parser)
    options = parser.parse_args([*case.arguments.split(), *more.split(), "--device", str(device)])

    planned, asked = planned_for(options)
    (p,) = planned
    if options.random and p.entry.needs_draft:
        p = replace(p, beside={"draft": random_model(_DRAFT, options.dtype, device).model})
    else:
        (p,) = with_draft([p], options)

    made = Prepared(p, conditions_of([p], min(case.batch, LARGEST_BATCH), options, asked)[0])
    if options.random:
        for model in made.models:
            awaken(model)
    return made


@torch.no_grad()
def awaken(model: Any) -> None:
    """Give matrices of zeros small random numbers.

    The last layers of a diffusion head are zero at the start of a training: images would not depend on the network, and
    a wrong graph would go unnoticed.
    """
    made = torch.Generator(device=model.device).manual_seed(1)
    for part in model.parts.values():
        for weight in part.parameters():
            is_matrix = weight.ndim == 2 and weight.dtype in _FLOATS and not hasattr(weight, "stored")
            if is_matrix and not weight.any():
                weight.normal_(std=_SMALL, generator=made)


def release(device: torch.device) -> None:
    """Give the memory of models that nothing holds any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------ the floor


def bytes_read(model: Any) -> tuple[int, int]:
    """Bytes of the weights that a pass of the transformer reads, and of those that a call of the head reads.

    Tables of embeddings are left out: a pass reads a few of their rows.
    """
    head = getattr(model.net, "head", None)
    of_head = {id(weight) for weight in head.parameters()} if isinstance(head, nn.Module) else set()

    transformer: dict[int, int] = {}
    for part in model.parts.values():
        for module in part.modules():
            if not isinstance(module, nn.Embedding):
                transformer.update((id(weight), _bytes(weight)) for weight in module.parameters(recurse=False))

    in_head = sum(size for key, size in transformer.items() if key in of_head)
    return sum(transformer.values()) - in_head, in_head


def _bytes(weight: Tensor) -> int:
    stored = getattr(weight, "stored", weight)
    return int(stored.numel() * stored.element_size())


def floor_bytes(made: Prepared, report: Report) -> int:
    """Bytes of weights that the passes and head calls of a run read, if each reads all of its network."""
    whole = 0
    transformer, head = bytes_read(made.planned.on.model)
    whole += (report.own("transformer_passes") or 0) * transformer + (report.own("head_calls") or 0) * head

    if made.draft is not None:
        transformer, head = bytes_read(made.draft)
        whole += report.of_draft("transformer_passes") * transformer + report.of_draft("head_calls") * head
    return whole


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a large copy within the memory of the device reads and writes; the best of ten."""
    size = 2 << 30 if device.type == "cuda" else 64 << 20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    fastest = float("inf")
    for _ in range(10):
        wait(device)
        began = time.perf_counter()
        target.copy_(source)
        wait(device)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size / fastest


def wait(device: torch.device) -> None:
    """Wait until the device has done everything; raises what went wrong on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------------ measurements


def images(made: Prepared, speed: str, found: dict[str, Any], save: Save, until: float, reference: Path) -> Report:
    """Draw images with a speed; writes seconds, memory and equality into ``found``, and saves after every image.

    ``reference``: file of the plain image, which speed plain writes.
    """
    device = made.planned.on.device
    made.choose(speed)
    if speed == PLAIN:
        warm_up(made.planned, made.condition)
        seeds: tuple[int, ...] = (0, 0, 0)
    else:
        seeds = SEEDS if len(made.condition) < _LARGE else SEEDS_OF_BATCHES

    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
    found["seconds"] = []
    for seed in seeds:
        began = time.perf_counter()
        latents, report = draw(made, seed, until)
        wait(device)
        found.setdefault("wall", []).append(round(time.perf_counter() - began, 4))
        found["seconds"].append(round(report.seconds, 4))
        if device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
            found["reserved_bytes"] = torch.cuda.memory_reserved(device)
        found["note"] = report.note
        if seed == 0 and (speed != PLAIN or len(found["seconds"]) > 1):
            found["equal"] = compared(latents, reference)
        elif seed == 0:
            np.save(reference, latents.cpu().numpy())
        save()
        if speed == PLAIN and found["seconds"][0] > SHORT:
            break

    return report


def draw(made: Prepared, seed: int, until: float) -> tuple[Tensor, Report]:
    """One run: its result and report. Raises TimeUp: it does not end in time."""
    sampler = made.planned.drawing(made.condition, seed).steps()
    while True:
        try:
            next(sampler)
        except StopIteration as end:
            return end.value
        if time.monotonic() > until:
            sampler.close()
            raise TimeUp


def compared(latents: Tensor, reference: Path) -> str:
    """Whether latents or tokens are those of a file: "yes", or how far they are from it."""
    if not reference.exists():
        return "no plain image"

    other = torch.from_numpy(np.load(reference))
    ours = latents.cpu()
    if ours.shape == other.shape and torch.equal(ours, other):
        return "yes"
    if ours.shape != other.shape:
        return f"no: {list(ours.shape)}, plain {list(other.shape)}"
    if not ours.is_floating_point():
        return f"no: {100 * (ours == other).double().mean():.2f} % of the tokens"
    return f"no: up to {(ours - other).abs().max():.3g} of {other.abs().max():.3g}"


def launches(made: Prepared, found: dict[str, Any], until: float, reference: Path) -> None:
    """Count what the host launches for one image: operations that compute or copy, and replays of graphs.

    Of an image that takes long only the beginning is counted, and multiplied.
    """
    done, total = 0, 1
    sampler = made.planned.drawing(made.condition, 0).steps()
    result = None

    with _masks_uncounted(), counted() as work, _replays() as replays:
        began = time.monotonic()
        while result is None:
            try:
                step = next(sampler)
                done, total = step.done, step.total
            except StopIteration as end:
                result = end.value
                break
            if time.monotonic() > until:
                sampler.close()
                raise TimeUp
            if time.monotonic() - began > COUNTED and done < total / 2:
                break
    sampler.close()

    scale = 1.0 if result is not None else total / max(1, done)
    found["operations"] = round(work.operations * scale)
    found["replays"] = round(replays[0] * scale)
    found["waits"] = round(work.waits * scale)
    found["extrapolated"] = result is None
    if result is not None:
        found["equal"] = compared(result[0], reference)


@contextmanager
def _masks_uncounted() -> Iterator[None]:
    """Make the masks of prompts outside of the counting, which cannot be made within."""
    from torch.nn.attention import bias

    original = bias.causal_lower_right

    def make(*size: int) -> Any:
        with _disable_current_modes():
            return original(*size)

    bias.causal_lower_right = make
    try:
        yield
    finally:
        bias.causal_lower_right = original


@contextmanager
def _replays() -> Iterator[list[int]]:
    """Count the CUDA graphs that are launched in a block."""
    count = [0]
    graph: Any = torch.cuda.CUDAGraph
    original = graph.replay

    def replay(self: Any) -> Any:
        count[0] += 1
        return original(self)

    graph.replay = replay
    try:
        yield count
    finally:
        graph.replay = original
