"""Masks of an edit: which tokens are sampled again. Shared by the masked and the token samplers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError


def masked_tokens(latents: Tensor, mask: Tensor, grid: int, images: int, device: torch.device) -> Tensor:
    """The tokens to sample again, bool [B, G * G] on ``device``.

    Args:
        latents: [1 or B, ...], the picture's latents or codes.
        mask: [1 or B, h, w] of any size, 0..1. A token is sampled again if any mask value over it is above 0.5.
        grid: side G of the model.
        images: number of images B.

    Raises:
        UserError: a mask of another shape or empty, batches that do not fit, numbers that are not finite.
    """
    if mask.ndim != 3 or 0 in mask.shape:
        raise UserError(f"mask: it has the shape {list(mask.shape)}; connect a MASK [batch, height, width].")
    for name, x in (("latent", latents), ("mask", mask)):
        if len(x) not in (1, images):
            raise UserError(
                f"{name}: its batch has {len(x)} entries, the condition asks for {images} images; use one, or as many."
            )
        if not bool(x.isfinite().all()):
            raise UserError(f"{name}: it holds numbers that are not finite; make it again.")
    # Max pooling: a mask of picture size covers every token it touches.
    tokens = F.adaptive_max_pool2d(mask.to(device, torch.float32)[:, None], grid)[:, 0] > 0.5
    if not bool(tokens.flatten(1).any(1).all()):
        raise UserError("mask: it is empty; paint over the part to be drawn anew.")
    return tokens.flatten(1).expand(images, -1)
