"""What the demo's decoders gain from drawing larger images.

PSNR is that of scenes which trained nothing, encoded and decoded, against their renderings at both sizes; the judge
reads what the models draw. Small is the image that the decoder draws without its part that enlarges.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError
from ...pipeline import load
from ...reports.table import markdown
from ..sweeps.judging import PictureBookJudge
from ..training import picture_book
from ..training.enlarging_recipe import encode, without_part
from ..training.recipes import psnr, to_rgb, to_signed

# Seed of the scenes, and of what the models draw.
SEED = 71
# Demo models and the side that their decoders encode: all three decoders, and the tokenizer at its second size.
SIDES = {"demo": 64, "demo-llamagen-low": 64, "demo-llamagen": 128, "demo-bitdance": 64}
HEAD = ["model", "pixels", "PSNR small", "PSNR large, brought down", "PSNR small, enlarged", "PSNR large"]
HEAD += ["scene % small", "scene % large", "whole % small", "whole % large"]


@torch.no_grad()
def in_parts(work: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """What a network makes of a batch, fp32, a few at a time."""
    return torch.cat([work(part).float() for part in batch.split(10)])


def decoded(net: Any, latents: Tensor) -> Tensor:
    """Images [N, 3, H, W] in -1..1."""
    return in_parts(net.decode, latents).clamp(-1, 1)


def reconstructions(net: Any, side: int, count: int) -> list[float]:
    """PSNR in dB of scenes: the small image, the large one averaged to its size; the small one enlarged bicubically to
    the size of the large one, and the large one.
    """
    scenes = picture_book.scenes(SEED, count)
    truth, large_truth = (rendered(scenes, size) for size in (side, side * net.config.enlarges))
    latents = in_parts(lambda part: encode(net, part), truth)
    small = decoded(without_part(net), latents)
    large = decoded(net, latents)

    down = F.avg_pool2d(large, net.config.enlarges)
    up = F.interpolate(small, scale_factor=net.config.enlarges, mode="bicubic").clamp(-1, 1)
    return [psnr(small, truth), psnr(down, truth), psnr(up, large_truth), psnr(large, large_truth)]


def rendered(scenes: picture_book.Scenes, side: int) -> Tensor:
    """Renderings [N, 3, side, side] in -1..1."""
    return to_signed(torch.from_numpy(picture_book.render(scenes, side)[0]).permute(0, 3, 1, 2))


def shares(net: Any, latents: Tensor, labels: np.ndarray, judge: PictureBookJudge) -> list[float]:
    """Per cent of scenes and of whole objects among drawn images: small, large, small, large."""
    read = [judge.read(to_rgb(decoded(one, latents)), labels)[1] for one in (without_part(net), net)]
    return [100 * float(found[f"judge-{name}"].mean()) for name in ("scene", "whole") for found in read]


def row(model: str, count: int, judge: PictureBookJudge) -> list[str]:
    """The figures of a model's decoder."""
    pipe = load(model)
    net: Any = pipe.decoder.net
    if not net.config.enlarging:
        raise UserError(f"models: the decoder of {model} does not enlarge; train its part first.")

    labels = np.arange(count) % len(picture_book.LABELS)
    latents = torch.cat(
        [
            pipe.sample([int(label) for label in labels[at : at + 10]], seed=SEED, first=at).latents
            for at in range(0, count, 10)
        ]
    )
    if pipe.ready.kind.codes:
        latents = net.vectors(latents)

    side = SIDES[model]
    figures = [*reconstructions(net, side, count), *shares(net, latents, labels, judge)]
    return [model, f"{side}, {side * net.config.enlarges}", *(f"{figure:.1f}" for figure in figures)]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--models", default=",".join(SIDES), help="demo models, separated by commas")
    parser.add_argument("--images", type=int, default=200, help="scenes, and images that each model draws")


def run(options: argparse.Namespace) -> int:
    """Print the table; returns the exit code."""
    judge = PictureBookJudge()
    rows = [row(model, options.images, judge) for model in options.models.split(",")]
    print(markdown([HEAD, *rows]))
    return 0
