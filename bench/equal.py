"""Count the images of exact parallel decoding that equal those of serial decoding, by dtype.

Every image is drawn from the same noise with each value of *parallel*; the first value is the reference. --alone draws
the reference again, one image at a time. Two images are equal if all their tokens are. In fp32, (nearly) all images
should be equal. In 16 bits the order of a sum affects the result: all values from 1 on compute in the same shape and
should give equal images; serial decoding (0) uses another shape. A CPU has other kernels for bf16 and fp16 than a GPU,
so run the command on the device in question. --random draws with an official width, random weights and a few blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..cli.bench import conditions_of, planned_for, shared_options
from ..cli.options import MOST_IMAGES, whole
from ..cli.planning import Planned
from ..cli.running import draw
from ..errors import UserError
from ..model_loaders.networks.llama import TokenModel
from ..reports.record import dtype_of
from ..reports.table import markdown
from ..samplers.conditioning import AnyCondition

ALONE = "alone"
# Of a network with random weights: blocks, and tokens per side of its images.
_BLOCKS = 2
_GRID = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    shared_options(parser)
    parser.add_argument("--parallel", default="1,0,8", metavar="W,W", help="values to compare; default 1,0,8")
    parser.add_argument("--images", default="200", metavar="N", help="images of each sampler; default 200")
    parser.add_argument("--batch", default="25", metavar="N", help="images that are drawn at once; default 25")
    parser.add_argument("--seed", default="0", metavar="N", help="seed of the noise; default 0")
    parser.add_argument("--alone", action="store_true", help="also draw every image alone, which takes long")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    windows = [whole(text, "parallel", 0, 4096) for text in options.parallel.split(",")]
    images = whole(options.images, "images", 1, MOST_IMAGES)
    batch = min(whole(options.batch, "batch", 1, MOST_IMAGES), images)
    seed = whole(options.seed, "seed", 0, 2**63)
    if len(windows) < 2 and not options.alone:
        raise UserError("parallel: one value has nothing to be compared with; give at least two, for example 1,8.")

    planned, asked = planned_for(options)
    for p in planned:
        if not hasattr(p.settings, "parallel"):
            raise UserError(f"samplers: {p.entry.name} has no setting parallel; name a sampler of tokens.")
    if options.random:
        planned = [_few_blocks(p) for p in planned]

    rows = [["sampler", "dtype", "compared", f"equal to parallel {windows[0]}", "of", "equal tokens %"]]
    for p in planned:
        counts = dict.fromkeys([*map(_name, windows[1:]), *([ALONE] if options.alone else [])], (0, 0))
        for first in range(0, images, batch):
            count = min(batch, images - first)
            (condition,) = conditions_of([p], count, options, asked)
            drawn = dict(_drawn(p, condition, windows, seed, first, options.alone))
            reference = drawn.pop(_name(windows[0]))
            for name, codes in drawn.items():
                same = codes == reference
                equal, tokens = counts[name]
                counts[name] = equal + int(same.all(1).sum()), tokens + int(same.sum())

        reference_tokens = reference.shape[1]
        for name, (equal, tokens) in counts.items():
            share = 100 * tokens / (images * reference_tokens)
            row = [p.label, dtype_of(p.on.model.net), name]
            rows.append([*row, str(equal), str(images), f"{share:.1f}"])

    print(markdown(rows, empty=False))
    return 0


def _name(window: int) -> str:
    """The name of a row of the table."""
    return f"parallel {window}"


def _drawn(
    p: Planned, condition: AnyCondition, windows: list[int], seed: int, first: int, alone: bool
) -> Iterator[tuple[str, Tensor]]:
    """Codes int64 [B, N] with every value of ``parallel``, and those of single images."""
    for window in windows:
        yield _name(window), _codes(p, window, condition, seed, first)

    if alone:
        found = []
        for i in range(len(condition)):
            single = condition.of([i])  # type: ignore[attr-defined]
            found.append(_codes(p, windows[0], single, seed, first + i))
        yield ALONE, torch.cat(found)


def _codes(p: Planned, window: int, condition: AnyCondition, seed: int, first: int) -> Tensor:
    """Codes int64 [B, N] of a run."""
    settings = replace(p.settings, parallel=window)
    codes: Any = draw(replace(p, settings=settings), condition, seed, first).codes
    return codes.flatten(1).cpu()


def _few_blocks(p: Planned) -> Planned:
    """The sampler on the first blocks of its network and a small image."""
    model = p.on.model
    assert isinstance(model, TokenModel)  # run() refuses others
    model.net.layers = model.net.layers[:_BLOCKS]
    return replace(p, ready=replace(p.on, model=replace(model, grid=_GRID)))
