"""ComfyUI's functions for images: its VAE, work in tiles, upscale models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.utils
import numpy as np
import torch
from comfy.sd import VAE as VAE  # for nodes/vae.py
from comfy.utils import ProgressBar
from torch import Tensor

from ...memory import enough_memory
from .devices import to_output


def to_image(images: np.ndarray) -> Tensor:
    """Images uint8 [B, H, W, 3] to an IMAGE, float [B, H, W, 3] in 0..1 on the output device."""
    return to_output(torch.from_numpy(np.array(images)).float() / 255)


def in_tiles(
    x: Tensor,
    work: Callable[[Tensor], Tensor],
    *,
    tile: tuple[int, int],
    overlap: int,
    scale: float,
    channels: int,
    device: torch.device,
) -> Tensor:
    """``work`` in blended tiles, by core.

    Args:
        x: [B, C, H, W].
        work: from a tile [1, C, h, w] to [1, channels, h * scale, w * scale].
        tile: height and width of a tile of ``x``.
        overlap: of tiles, in positions of ``x``.
        device: of the result.
    """
    height, width = tile
    tiles = comfy.utils.get_tiled_scale_steps(x.shape[3], x.shape[2], tile_x=width, tile_y=height, overlap=overlap)
    bar = ProgressBar(len(x) * tiles)

    with enough_memory("memory: there is not enough memory for one tile; use smaller tiles, or unload other models."):
        return comfy.utils.tiled_scale(
            x,
            work,
            tile_x=width,
            tile_y=height,
            overlap=overlap,
            upscale_amount=scale,
            out_channels=channels,
            output_device=device,
            pbar=bar,
        )


def upscaler(model: Any, place: Callable[[], None]) -> Callable[[Tensor], Tensor]:
    """An UPSCALE_MODEL as a function of images fp32 [B, 3, H, W] in 0..1, by ComfyUI's node.

    ComfyUI's node may unload the sampled models to make room for its own; ``place`` loads them again.
    """
    from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel

    def enlarge(images: Tensor) -> Tensor:
        (done,) = ImageUpscaleWithModel.execute(model, images.movedim(1, -1)).result
        place()
        return done.movedim(-1, 1).to(images.device, torch.float32)

    return enlarge
