"""Compare the images that a model draws in several dtypes: bytes of the weights, PSNR, and equal tokens.

Image i is drawn from the same noise, with the same label or prompt, in every dtype. The first dtype is the reference.
PSNR is that of all images together. One other token changes all tokens after it, so that a small share of equal tokens
need not mean worse images; evaluate measures those.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...cli.bench import conditions_of
from ...cli.options import AUTO, whole
from ...cli.planning import Planned
from ...cli.running import draw
from ...errors import UserError
from ...model_loaders.kinds import ALL_DTYPES, choose_dtype
from ...reports.quality import psnr
from ...reports.table import markdown
from ...runs.drawing import decode
from ...runs.limits import MOST_IMAGES
from ..work.random_options import planned_for, shared_options


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    shared_options(parser)
    usual = "fp32,int8,fp8"
    parser.add_argument("--dtypes", default=usual, metavar="NAMES", help=f"dtypes to compare; default {usual}")
    parser.add_argument("--images", default="200", metavar="N", help="images in each dtype; default 200")
    parser.add_argument("--batch", default="50", metavar="N", help="images that are drawn at once; default 50")
    parser.add_argument("--seed", default="0", metavar="N", help="seed of the noise; default 0")


@dataclass(frozen=True)
class Drawn:
    """The images of a sampler in one dtype."""

    label: str
    weights: int  # bytes
    images: np.ndarray  # uint8 [N, H, W, 3]
    codes: Tensor | None  # int64 [N, tokens], of token models


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    dtypes = [name.strip() for name in options.dtypes.split(",")]
    images = whole(options.images, "images", 1, MOST_IMAGES)
    batch = min(whole(options.batch, "batch", 1, MOST_IMAGES), images)
    seed = whole(options.seed, "seed", 0, 2**63)

    for name in dtypes:
        if name not in ALL_DTYPES:
            raise UserError(f"dtypes: {name[:60]!r} is not one of {', '.join(ALL_DTYPES)}.")
    if options.dtype != AUTO:
        raise UserError("dtype: this command compares several dtypes; name them with --dtypes instead.")
    if options.random:
        raise UserError("random: an official size with random weights has no decoder; choose a model with --model.")

    rows = [["sampler", "weights", "MB", f"PSNR to {dtypes[0]}, dB", "equal tokens %"]]
    references: list[Drawn] = []
    for name in dtypes:
        options.dtype = name
        planned, asked = planned_for(options)
        if not references:
            _expect_dtypes(planned, dtypes)
        found = [_drawn(p, options, asked, images, batch, seed) for p in planned]

        references = references or found
        rows += [_row(name, drawn, reference) for drawn, reference in zip(found, references, strict=True)]

    print(markdown(rows, empty=False))
    return 0


def _expect_dtypes(planned: list[Planned], dtypes: list[str]) -> None:
    """Raise a UserError if a model has not all dtypes, before the first image is drawn."""
    for p in planned:
        for name in dtypes:
            choose_dtype(name, p.on.device, p.on.kind.files)


def _drawn(p: Planned, options: argparse.Namespace, asked: dict[str, str], images: int, batch: int, seed: int) -> Drawn:
    """Draw the images of a sampler."""
    pixels = []
    codes = []
    for first in range(0, images, batch):
        (condition,) = conditions_of([p], min(batch, images - first), options, asked)
        result: Any = draw(p, condition, seed, first)
        pixels.append(decode(p.on, result).numpy())
        if p.on.kind.codes:
            codes.append(result.latents.flatten(1).cpu())

    weights = sum(parameter.nbytes for parameter in p.on.model.net.parameters())
    return Drawn(p.label, weights, np.concatenate(pixels), torch.cat(codes) if codes else None)


def _row(dtype: str, drawn: Drawn, reference: Drawn) -> list[str]:
    """A row of the table."""
    row = [drawn.label, dtype, f"{drawn.weights / 1e6:.2f}"]
    if drawn is reference:
        return [*row, "", ""]

    decibels = psnr(drawn.images, reference.images)
    row.append("identical" if math.isinf(decibels) else f"{decibels:.1f}")

    if drawn.codes is None or reference.codes is None:
        return [*row, ""]
    equal = (drawn.codes == reference.codes).float().mean().item()
    return [*row, f"{100 * equal:.1f}"]
