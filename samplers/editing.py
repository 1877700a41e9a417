"""Editing: tokens outside a mask are fixed, tokens inside it are sampled again.

Fixed tokens are known before the first pass, so editing works with every accelerator. In a masked sampler (MAR), a new
token sees all fixed tokens. In a token sampler, which decides tokens in raster order or nearly so, a new token sees
only the fixed tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..networks.precision import is_finite
from ..reports.record import fingerprint

# Smallest mask value at which a token is sampled again. Lower values round to 0 of 255, which is black. With this limit
# the soft edge of a feathered mask belongs to the mask, as in ComfyUI's samplers, which change every value above 0.
LEAST_MASKED = 0.5 / 255
# Largest absolute value of the latents that an edit starts from. Latents of images have a standard deviation of at most
# about 5. Far beyond this limit, norms and fp16 numbers overflow, and a large part of the image becomes NaN.
LARGEST_LATENT = 10_000


@dataclass(frozen=True, eq=False)
class Edit:
    """An image to start from, and the part to sample again."""

    start: Tensor  # decoder latents [1 or B, C, H, W], any float dtype; for a token sampler codes int64 [1 or B, G, G]
    # [1 or B, h, w] of any size, 0..1. A token is sampled again if a mask value in its area is at least LEAST_MASKED.
    mask: Tensor

    def of(self, images: Sequence[int], batch: int) -> Edit:
        """The edit for some images of a batch of ``batch``; ``images`` are their indices. A single start or mask is for
        all images.
        """
        self.expect_batch(batch)
        start, mask = (x if len(x) == 1 else x[list(images)] for x in (self.start, self.mask))
        return Edit(start, mask)

    def expect_batch(self, images: int) -> None:
        """Check the shape of the mask, and that start and mask each have one entry, or one for each of the images.

        Raises:
            UserError: a mask that is empty or has another shape; another number of entries.
        """
        mask = self.mask
        if mask.ndim != 3 or 0 in mask.shape:
            raise UserError(f"mask: it has the shape {list(mask.shape)}; give a mask [batch, height, width].")

        for name, x in (("latent_image", self.start), ("mask", mask)):
            if len(x) in (1, images):
                continue
            channels = name == "mask" and x.shape[2] in (1, 3, 4)
            remedy = "give [height, width] without channels" if channels else "use one, or one for each image"
            raise UserError(
                f"{name}: its batch has {len(x)} entries, but the condition asks for {images} images; {remedy}."
            )

    def token_mask(self, grid: int | tuple[int, int], images: int, device: torch.device) -> Tensor:
        """The tokens to sample again, bool [B, L] on ``device``, for B images of a grid (a side, or height and width).

        Raises:
            UserError: see :meth:`expect_batch`; numbers that are not finite, or a mask that covers nothing.
        """
        self.expect_batch(images)
        for name, x in (("latent_image", self.start), ("mask", self.mask)):
            if not is_finite(x):
                raise UserError(f"{name}: some values are not finite (NaN or infinity); encode or load it again.")

        # Max pooling: a mask of image size covers every token it touches.
        mask = self.mask.to(device, torch.float32)
        tokens = F.adaptive_max_pool2d(mask[:, None], grid)[:, 0] >= LEAST_MASKED
        if not bool(tokens.flatten(1).any(1).all()):
            raise UserError("mask: it is empty; paint over the area to regenerate.")

        return tokens.flatten(1).expand(images, -1)


def masks_of(values: Tensor) -> Tensor | None:
    """Masks [H, W], [B, H, W] or [B, 1, H, W] as [B, H, W]; None for any other shape."""
    if 0 in values.shape:
        return None
    if values.ndim == 2:
        return values[None]
    if values.ndim == 4 and values.shape[1] == 1:
        return values[:, 0]
    return values if values.ndim == 3 else None


def edit_digests(kept: Tensor, again: Tensor) -> tuple[str, ...]:
    """A short digest for each image of an edit. Digests are equal if the same tokens are fixed, with the same values.

    Args:
        kept: the tokens of the image to change, [1 or B, L, ...].
        again: which tokens are sampled again, bool [B, L].
    """
    sampled = again.view(*again.shape, *(1,) * (kept.ndim - 2))  # [B, L, 1 ...]
    fixed = torch.where(sampled, 0, kept)
    return tuple(map(fingerprint, fixed, again))
