"""Decode all undecided tokens of a MAR at once, after some of its AR steps: the experiment that FastHybrid starts from.

At each AR step of --at, the diffusion head decodes every token that is not decided yet, each from the transformer's
output at that step. The images stand side by side with plain MAR's of the same noise. The table has their PSNR to
plain MAR's image, and how similar those outputs are to the ones that the same tokens have in their own AR step: the
cosine that FastHybrid compares with its threshold.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...cli.conditions import conditions
from ...cli.options import condition_options, model_options, setting_option, whole
from ...cli.planning import prepare
from ...errors import UserError
from ...networks.mar import MARModel, pick
from ...networks.speed import suited_threads, threads
from ...reports.files import Result, encoded, image_endings, output, save
from ...reports.grid import compare_grid, expect_fits
from ...reports.quality import measure
from ...reports.table import figure, markdown
from ...runs.drawing import decode
from ...runs.limits import MOST_IMAGES, SEEDS
from ...samplers.conditioning import MaskedCondition
from ...samplers.engine import Sampled
from ...samplers.mar.canvas import Tokens, mar_canvas
from ...samplers.mar.mar import Diffusion, FullTransformer, annealed_tables
from ...samplers.mar.settings import MARSettings
from ...samplers.noise import PairedNoise


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    model_options(parser)
    setting_option(parser)
    parser.set_defaults(samplers="mar")
    condition_options(parser, "seed of the noise")
    parser.add_argument(
        "--at",
        metavar="N,N",
        help="AR steps after which all other tokens are decoded at once; default 1, an eighth, a quarter and half of "
        "all",
    )
    parser.add_argument("--out", default="probe.png", metavar="FILE", help="the image; default probe.png")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    seed = whole(options.seed, "seed", 0, SEEDS - 1)
    batch = whole(options.batch, "batch", 1, MOST_IMAGES)
    out = output(options.out, "out", image_endings())
    assert out is not None

    planned, asked = prepare(options)
    (p,) = planned
    steps = p.settings.steps
    after = chosen_steps(options.at, steps)
    expect_fits(len(after) + 1, 0)
    model: Any = p.on.model
    condition: Any
    (condition,) = conditions(planned, options.label, options.text, batch, options, seed, asked)

    noise: Any = p.entry.family.noise(seed, range(len(condition)))
    with threads(suited_threads(model.net)):
        found, whole_image = probe(model, condition, p.settings, noise, after)

    plain = decode(p.on, whole_image).numpy()
    images = [decode(p.on, Sampled(one.latents, whole_image.report)).numpy() for one in found]
    rows = [["decided in AR steps", "decided, %", "PSNR, dB", "similarity, mean", "similarity, least"]]
    for one, image in zip(found, images, strict=True):
        rows.append(
            [
                f"{one.after} of {steps}",
                f"{100 * one.decided:.0f}",
                figure(measure(image, plain).psnr, ".2f"),
                f"{one.similarity.mean():.3f}",
                f"{one.similarity.min():.3f}",
            ]
        )

    labels = [f"after {one.after} of {steps} AR steps" for one in found]
    title = f"{', '.join(dict.fromkeys(condition.names))}, seed {seed}, {model.name}"
    grid = compare_grid([*images, plain], [*labels, "MAR"], [None] * (len(images) + 1), title=title)
    unsaved = save([Result("out", out, encoded(grid, out))])

    print(markdown(rows, empty=False))
    if unsaved:
        raise UserError(unsaved)
    print(f"image: {out}")
    return 0


def chosen_steps(text: str | None, steps: int) -> list[int]:
    """The AR steps that --at names, in ascending order, or the usual ones of so many AR steps."""
    if steps == 1:
        raise UserError("steps: one AR step decides all tokens; ask for at least 2.")
    if text is None:
        usual = {1, steps // 8, steps // 4, steps // 2}
        return sorted(n for n in usual if 0 < n < steps - 1) or [0]
    return sorted({whole(part, "at", 0, steps - 2) for part in text.split(",")})


@dataclass(frozen=True)
class Probed:
    """Images of which all tokens that were undecided after some AR steps were decoded at once."""

    after: int  # AR steps
    decided: float  # share of the tokens that these decided
    latents: Tensor  # as of Sampled
    # fp32 [n], of the tokens of later AR steps than the next: cosine of this z and that of their own step.
    similarity: np.ndarray


@torch.no_grad()
def probe(
    model: MARModel, condition: MaskedCondition, settings: MARSettings, noise: PairedNoise, after: Sequence[int]
) -> tuple[list[Probed], Sampled]:
    """Draw plain MAR's images, and beside them decode what is undecided after each number of AR steps ``after``.

    Arguments otherwise as of :func:`samplers.mar.mar.mar`. A token decoded ahead has its own noise and guidance scale.
    """
    canvas = mar_canvas("mar", model, condition, settings, noise, None)
    order = canvas.order
    transformer = FullTransformer(canvas)
    draw = Diffusion(canvas, transformer.heads, annealed_tables(canvas, settings))
    own = torch.zeros(canvas.images, canvas.cells, model.net.config.dim, device=canvas.device)  # z of a token's AR step

    looks: list[tuple[int, Tensor, Tensor, Tensor]] = []  # AR step; positions after it, and their z; latents
    for step in range(order.steps):
        here = order.ahead(step)
        n = here.shape[1]
        everything = order.ahead(step, order.steps) if step in after else here  # [B, m], the n first
        z = transformer(step, everything)

        # All undecided tokens at once, beside the image.
        if step in after:
            tokens = Tokens.all(everything)
            batch = canvas.batch(draw.tables[step], tokens, z, draw.noise)
            values = canvas.values.clone()
            values[tokens.index] = transformer.heads.sample(batch)
            looks.append((step, everything[:, n:], z[0, :, n:].float(), canvas.to_latents(values)))

        # The tokens of this AR step.
        z = z[:, :, :n]
        own.scatter_(1, here[:, :, None].expand(-1, -1, own.shape[2]), z[0].float())
        canvas.decide(here, draw(step, here, z), step)

    found = []
    for step, later, z, latents in looks:
        similarity = F.cosine_similarity(z, pick(own, later), dim=-1)
        found.append(Probed(step, order.starts[step] / canvas.cells, latents, similarity.flatten().cpu().numpy()))
    return found, canvas.finish()
