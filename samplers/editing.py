"""Editing: the tokens outside a mask are fixed, and the sampler regenerates the tokens inside the mask.

Every sampler takes an edit, except the sampler of MuLo-SD. In the MAR samplers, fixed tokens count as decided before
the first pass, so a new token sees all fixed tokens. All other samplers decide tokens in an order that does not depend
on the mask, mostly raster order. There, a new token sees only the fixed tokens that are earlier in this order. In
BitDance, a new token also sees the fixed tokens in its own block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..networks.precision import is_finite
from ..reports.record import Report, fingerprint

# Smallest mask value at which a token is regenerated: on a scale of 0 to 255, all lower values round to 0. So the soft
# edge of a feathered mask belongs to the mask. ComfyUI's samplers, too, change the image wherever the mask is above 0.
LEAST_MASKED = 0.5 / 255
# Largest absolute value that FastAR allows in the latents of the image that an edit starts from. Latents of images have
# a standard deviation of at most about 5. Values far above 10,000 overflow in norms and in fp16, which turns a large
# part of the image into NaN.
LARGEST_LATENT = 10_000


@dataclass(frozen=True, eq=False)
class Edit:
    """An image to start from, and the part of it to regenerate, for B images."""

    # The image to start from: decoder latents [1 or B, C, H, W] of any float dtype, or for a token sampler the codes of
    # h x w tokens, int64 [1 or B, h, w].
    start: Tensor
    # [1 or B, height, width] of any size, values 0 to 1. A token is regenerated if at least one mask value in its area
    # is LEAST_MASKED or more.
    mask: Tensor

    def for_images(self, images: Sequence[int], batch: int) -> Edit:
        """The edit for some images of a batch of ``batch`` images. ``images``: the indices of these images. A single
        start or a single mask applies to every image. Errors: see :meth:`expect_batch`.
        """
        self.expect_batch(batch)
        start, mask = (x if len(x) == 1 else x[list(images)] for x in (self.start, self.mask))
        return Edit(start, mask)

    def expect_batch(self, images: int) -> None:
        """Check the shape of the mask. Check that start and mask have one entry or ``images`` entries each.

        Raises:
            UserError: the mask does not have the shape [batch, height, width]; the mask has a dimension of size 0;
                start or mask has a wrong number of entries.
        """
        mask = self.mask
        if mask.ndim != 3 or 0 in mask.shape:
            raise UserError(f"mask: it has the shape {list(mask.shape)}; give a mask [batch, height, width].")

        for name, x in (("latent_image", self.start), ("mask", mask)):
            if len(x) in (1, images):
                continue
            # The mask may be a picture [height, width, channels] instead of a batch.
            has_channels = name == "mask" and x.shape[2] in (1, 3, 4)
            remedy = "give [height, width] without channels" if has_channels else "use one entry, or one for each image"
            raise UserError(
                f"{name}: its batch has {len(x)} entries, but the condition asks for {images} images; {remedy}."
            )

    def token_mask(self, grid: int | tuple[int, int], images: int, device: torch.device) -> Tensor:
        """The tokens to regenerate, bool [B, L] on ``device``, for B = ``images`` images of L = h w tokens.

        Args:
            grid: h and w; or one number if both are equal.

        Raises:
            UserError: see :meth:`expect_batch`; also, if start or mask has values that are not finite, or if the mask
                of an image covers no token.
        """
        self.expect_batch(images)
        for name, x in (("latent_image", self.start), ("mask", self.mask)):
            if not is_finite(x):
                raise UserError(
                    f"{name}: some values are not finite (NaN or infinity); encode or load this input again."
                )

        # Max pooling: a mask in pixels covers every token whose area it touches.
        mask = self.mask.to(device, torch.float32)
        largest = F.adaptive_max_pool2d(mask[:, None], grid)[:, 0]  # of each token's area, [1 or B, h, w]
        regenerated = (largest >= LEAST_MASKED).flatten(1)
        if not bool(regenerated.any(1).all()):
            raise UserError("mask: it is empty; paint over the area to regenerate.")

        return regenerated.expand(images, -1)


def start_edit(
    edit: Edit, start_tokens: Tensor, grid: tuple[int, int], images: int, report: Report
) -> tuple[Tensor, Tensor]:
    """Start an edit of B = ``images`` images, and write the digests of the edit into the report.

    ``start_tokens``: all tokens of the image that the edit starts from, [1 or B, L, c]; ``grid``: h and w.

    Returns:
        The tokens, [B, L, c], with 0 for the tokens to regenerate; and which tokens to regenerate, bool [B, L].

    Raises:
        UserError: see :meth:`Edit.token_mask`.
    """
    regenerated = edit.token_mask(grid, images, start_tokens.device)
    report.edits = edit_digests(start_tokens, regenerated)
    return torch.where(regenerated[..., None], 0.0, start_tokens), regenerated


def edit_digests(start_tokens: Tensor, regenerated: Tensor) -> tuple[str, ...]:
    """A short digest for each image of an edit. The digests of two images are identical if the same tokens are fixed in
    both images and have the same values.

    Args:
        start_tokens: all tokens of the image that the edit starts from, [1 or B, L, ...].
        regenerated: which tokens the edit regenerates, bool [B, L].
    """
    ones = (1,) * (start_tokens.ndim - 2)
    fixed_tokens = torch.where(regenerated.view(*regenerated.shape, *ones), 0, start_tokens)  # [B, L, ...]
    return tuple(map(fingerprint, fixed_tokens, regenerated))  # maps over the images
