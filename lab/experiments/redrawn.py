"""How much MuLo-SD draws again at a share of kept drafts, without a model.

Rejections are simulated on a target's grid, expanded by the radius, and planned as the sampler plans them: independent
of each other, or in clusters, where smoothed noise is lowest. With a standard deviation of half a cell they cluster as
on the demo, where the right neighbour of a rejected draft is rejected in 42, 27 and 13 % of the cases if 70, 90 and
95 % are kept.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F

from ...samplers.tokens.mulosd import islands as geometry

SHARES = (0.7, 0.8, 0.9, 0.95, 0.98)
# Standard deviation in cells of what smooths the noise: independent, as on the demo, large clusters.
SMOOTH = (0.0, 0.5, 1.0)


def rejections(side: int, share: float, smooth: float, images: int, seed: int = 0) -> np.ndarray:
    """Rejected drafts, bool [images, side, side]: in every image the ``1 - share`` of the cells with the lowest noise.

    ``smooth``: standard deviation in cells of the Gaussian that smooths the noise; 0 for independent cells.
    """
    noise = torch.randn(images, 1, side, side, generator=torch.Generator().manual_seed(seed))
    if smooth:
        reach = int(3 * smooth + 1)
        line = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * smooth**2))
        noise = F.conv2d(noise, line.view(1, 1, 1, -1), padding=(0, reach))
        noise = F.conv2d(noise, line.view(1, 1, -1, 1), padding=(reach, 0))

    kept = torch.ones(images, side**2, dtype=torch.bool)
    order = noise.flatten(1).argsort(dim=1)
    kept.scatter_(1, order[:, : round((1 - share) * side**2)], False)
    return (~kept).view(images, side, side).numpy()


def redrawn(rejected: np.ndarray, radius: int = 1, window: int = 8) -> tuple[float, float]:
    """The share of cells that is drawn again, and the waves of an image, both on average over bool [B, h, w]."""
    region = geometry.expand(rejected, radius)
    waves = geometry.waves(geometry.islands(region), window)

    return float(region.mean()), float((waves.max(axis=(1, 2)) + 1).mean())


def neighbours_rejected(rejected: np.ndarray) -> float:
    """How often the cell to the right of a rejected one is rejected too."""
    left = rejected[:, :, :-1]
    both = left & rejected[:, :, 1:]

    return float(both.sum() / max(1, left.sum()))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--radius", type=int, default=1)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--images", type=int, default=200)


def run(options: argparse.Namespace) -> int:
    """Print the table; returns the exit code."""
    print("| kept | smooth | drawn again | waves | neighbour rejected too |")
    print("| --- | --- | --- | --- | --- |")
    for share in SHARES:
        for smooth in SMOOTH:
            rejected = rejections(options.side, share, smooth, options.images)
            again, waves = redrawn(rejected, options.radius, options.window)
            near = neighbours_rejected(rejected)
            print(f"| {share:.0%} | {smooth:g} | {again:.0%} | {waves:.0f} | {near:.0%} |")

    return 0
