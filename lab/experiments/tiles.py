"""What tiles change in decoded images.

Run it with ComfyUI's Python: ``python -m fastar_nodes.lab tiles --comfyui FOLDER``.

Every decoder decodes the same latents whole and in ComfyUI's blended tiles, as VAE Decode (Tiled) asks for them. The
demo's decoders get scenes that they have encoded. KL-16 and VQ-16 have their official sizes and random weights, and get
random latents: their images have no meaning, so compare the difference with the contrast of the whole image, which is
the standard deviation of its pixels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...networks.autoencoder import KLAutoencoder, KLConfig, VQAutoencoder, VQConfig
from ...pipeline import load
from ...reports.table import markdown
from ..training import picture_book
from ..training.enlarging_recipe import encode
from .enlarged import rendered

SEED = 71
SCENES = 4
# Demo models and the side in pixels that their decoders encode.
DEMO_SIDES = {"demo": 64, "demo-hybrid": 64, "demo-llamagen-low": 64, "demo-llamagen": 128, "demo-dtok": 128}
# Sides of an image and of its tiles, in latent positions: 256 pixels in tiles of 128, and 384 in tiles of 256, which
# VAE Decode takes where memory is short.
OFFICIAL_TILES = {16: 8, 24: 16}
OFFICIAL_SHAPE: dict[str, Any] = {"ch": 128, "ch_mult": (1, 1, 2, 2, 4), "blocks": 2}
HEAD = ["decoder", "pixels", "tile", "mean difference of 255", "% of the contrast"]


def official() -> dict[str, tuple[Any, int]]:
    """KL-16 and VQ-16 with random weights, and the channels of their latents."""
    torch.manual_seed(SEED)
    kl = KLConfig(**OFFICIAL_SHAPE, z_channels=16)
    vq = VQConfig(**OFFICIAL_SHAPE, z_channels=256, codes=16384)
    return {
        "KL-16, random weights": (KLAutoencoder(kl).eval(), kl.z_channels),
        "VQ-16, random weights": (VQAutoencoder(vq).eval(), vq.code_channels),
    }


def in_tiles(net: Any, latents: Tensor, tile: int) -> Tensor:
    """Images [N, 3, H, W] of ComfyUI's tiles of ``tile`` x ``tile`` latent positions, a quarter of which overlap."""
    stride = net.config.output_stride
    return import_module("comfy.utils").tiled_scale(
        latents, net.decode, tile, tile, tile // 4, stride, 3, output_device="cpu"
    )


def rows(name: str, net: Any, latents: Tensor, tiles: list[int]) -> Iterator[list[str]]:
    """The table's rows of a decoder; tiles in latent positions."""
    stride = net.config.output_stride
    whole = net.decode(latents)
    for tile in tiles:
        difference = (in_tiles(net, latents, tile).clamp(-1, 1) - whole.clamp(-1, 1)).abs().mean()
        figures = [f"{127.5 * difference:.1f}", f"{100 * difference / whole.clamp(-1, 1).std():.0f}"]
        yield [name, str(latents.shape[-1] * stride), str(tile * stride), *figures]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--comfyui", type=Path, required=True, help="folder of ComfyUI")


def run(options: argparse.Namespace) -> int:
    """Print the table; returns the exit code."""
    sys.path.insert(0, str(options.comfyui))
    sys.argv = [*sys.argv[:1], "--cpu"]  # ComfyUI's own options

    table = [HEAD]
    with torch.no_grad():
        for name, side in DEMO_SIDES.items():
            net = load(name).decoder.net
            latents = encode(net, rendered(picture_book.scenes(SEED, SCENES), side))
            positions = latents.shape[-1]
            table += rows(name, net, latents, [positions * 3 // 4, positions // 2, positions // 4])

        for name, (net, channels) in official().items():
            for side, tile in OFFICIAL_TILES.items():
                table += rows(name, net, torch.randn(1, channels, side, side), [tile])

    print(markdown(table))
    return 0
