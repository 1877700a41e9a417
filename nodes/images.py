"""Between ComfyUI's IMAGE, float [B, H, W, C] in 0..1 with 1, 3 or 4 channels, and images uint8 [B, H, W, 3]."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import host


def to_rgb(images: Tensor) -> Tensor:
    """Images [B, H, W, C] of 1, 3 or 4 channels to [B, H, W, 3]: grey is repeated, alpha dropped."""
    if images.shape[3] == 1:
        batch, height, width, _ = images.shape
        return images.expand(batch, height, width, 3)

    return images[..., :3]


def to_bytes(images: Tensor) -> np.ndarray:
    """Finite images [B, H, W, C] in 0..1 to uint8 [B, H, W, 3], rounded."""
    rgb = to_rgb(images.detach().float().clamp(0, 1))
    return (rgb * 255).round().to(torch.uint8).cpu().numpy()


def to_image(images: np.ndarray) -> Tensor:
    """Images uint8 [B, H, W, 3] to an IMAGE."""
    return host.devices.to_output(torch.from_numpy(np.array(images)).float() / 255)


def scaled(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Images [B, C, H, W] in 0..1 at another size (height, width), bicubic."""
    if images.shape[2:] == size:
        return images
    return F.interpolate(images.float(), size, mode="bicubic", antialias=True).clamp(0, 1)
