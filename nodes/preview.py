"""Pictures of partial results, for live previews. Independent of ComfyUI."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Decode = Callable[[Tensor], Tensor]
"""Decoder latents [B, C, h, w] to pictures [B, H, W, 3] in 0..1."""

GREY = 128
LEAST = 256  # smaller pictures are enlarged by an integer factor, so that single tokens are visible
MOST_IMAGES = 4  # of a batch
INTERVAL = 0.5  # in seconds


class Canvas:
    """Draws previews of a sampler's steps at a bounded cost.

    The interval between previews is at least half a second and at least ten times the duration of the last one.
    """

    def __init__(self, decode: Decode):
        self.decode = decode
        self._next = time.perf_counter() + INTERVAL

    def due(self) -> bool:
        """Whether the next preview is due."""
        return time.perf_counter() >= self._next

    def draw(self, latents: Tensor, decided: Tensor) -> np.ndarray:
        """Draw a partial result; undecided tokens are grey.

        Args:
            latents: decoder latents [B, C, h, w]; values of undecided tokens are ignored.
            decided: bool [B, gh, gw], token grid.

        Returns:
            uint8 [H, W, 3]; of a batch the first four images, two by two.
        """
        known = decided[:MOST_IMAGES].cpu().numpy()  # synchronises, so that only the decoder is timed
        began = time.perf_counter()
        pictures = to_bytes(self.decode(latents[:MOST_IMAGES]))
        self._next = time.perf_counter() + max(INTERVAL, 10 * (time.perf_counter() - began))
        n, height, width, _ = pictures.shape
        rows, columns = np.arange(height) * known.shape[1] // height, np.arange(width) * known.shape[2] // width
        pictures = np.where(known[:, rows][:, :, columns, None], pictures, np.uint8(GREY))
        across = math.ceil(math.sqrt(n))
        down = math.ceil(n / across)
        sheet = np.full((down * height, across * width, 3), 0, np.uint8)
        for i, picture in enumerate(pictures):
            y, x = i // across * height, i % across * width
            sheet[y : y + height, x : x + width] = picture
        factor = max(1, LEAST // max(sheet.shape[:2]))
        return sheet.repeat(factor, axis=0).repeat(factor, axis=1)


def to_bytes(pictures: Tensor) -> np.ndarray:
    """Pictures [B, H, W, C] in 0..1 to uint8 [B, H, W, 3]; grey is repeated, alpha dropped, NaN black."""
    x = pictures.detach().float().nan_to_num(0.0).clamp(0, 1)
    x = x.expand(*x.shape[:3], 3) if x.shape[3] == 1 else x[..., :3]
    return (x * 255).round().to(torch.uint8).cpu().numpy()
