"""Editing: tokens outside a mask are given, those inside are sampled again.

Given tokens are known before the first step, so editing works with every accelerator. A masked sampler's new tokens
see all given ones; those of a token sampler, which goes in raster order or near it, see the given ones before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..reports.record import fingerprint

# Largest absolute value of a latent that an edit starts from. Latents of images have a standard deviation of at most
# about 5; far beyond this limit norms and fp16 overflow, and half of the image would be NaN.
LARGEST_LATENT = 10_000


@dataclass(frozen=True, eq=False)
class Edit:
    """An image to start from, and the part to sample again."""

    start: Tensor  # decoder latents [1 or B, C, H, W], any float dtype; for a token sampler codes int64 [1 or B, G, G]
    mask: Tensor  # [1 or B, h, w] of any size, 0..1; a token is sampled again if any mask value over it is above 0.5

    def of(self, images: Sequence[int]) -> Edit:
        """The edit of some of the images, by their place in the batch; a single start or mask is for all of them."""
        return Edit(*(x if len(x) == 1 else x[list(images)] for x in (self.start, self.mask)))

    def token_mask(self, grid: int | tuple[int, int], images: int, device: torch.device) -> Tensor:
        """The tokens to sample again, bool [B, L] on ``device``, for B images of a grid (a side, or height and width).

        Raises:
            UserError: a mask of another shape or empty, batches that do not fit, or numbers that are not finite.
        """
        mask = self.mask
        if mask.ndim != 3 or 0 in mask.shape:
            raise UserError(f"mask: it has the shape {list(mask.shape)}; connect a MASK [batch, height, width].")

        for name, x in (("latent_image", self.start), ("mask", mask)):
            if len(x) not in (1, images):
                raise UserError(
                    f"{name}: its batch has {len(x)} entries, and the condition asks for {images} images; use one, or "
                    "as many."
                )
            if not bool(x.isfinite().all()):
                raise UserError(f"{name}: it holds values that are not finite (NaN or infinity); make it again.")

        # Max pooling: a mask of image size covers every token it touches.
        tokens = F.adaptive_max_pool2d(mask.to(device, torch.float32)[:, None], grid)[:, 0] > 0.5
        if not bool(tokens.flatten(1).any(1).all()):
            raise UserError("mask: it is empty; paint over the area to draw again.")

        return tokens.flatten(1).expand(images, -1)


def edit_digests(kept: Tensor, again: Tensor) -> tuple[str, ...]:
    """A short digest an image of an edit: equal if the same tokens are kept.

    Args:
        kept: the tokens of the image to change, [1 or B, L, ...].
        again: which tokens are sampled again, bool [B, L].
    """
    images = len(again)
    given = torch.where(again.unflatten(1, (-1, *[1] * (kept.ndim - 2))), 0, kept.expand(images, *kept.shape[1:]))
    return tuple(fingerprint(given[i], again[i]) for i in range(images))
