"""Editing: tokens outside the mask are given, those inside are sampled again.

Given tokens are known before the first AR step, so editing works with every accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.mar import MARModel
from ..editing import masked_tokens


@dataclass(frozen=True, eq=False)
class Edit:
    """A picture to start from, and the part to sample again.

    Attributes:
        latents: decoder latents [1 or B, C, H, W], any float dtype.
        mask: [1 or B, h, w] of any size, 0..1. A token is sampled again if any mask value over it is above 0.5.
    """

    latents: Tensor
    mask: Tensor

    def of(self, images: Sequence[int]) -> Edit:
        """The edit of some of the images, by their place in the batch; a single latent or mask is for all of them."""
        latents, mask = (x if len(x) == 1 else x[list(images)] for x in (self.latents, self.mask))
        return Edit(latents, mask)

    def tokens(self, model: MARModel, images: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Start tokens fp32 [B, L, channels] and a mask of those to sample, bool [B, L].

        Raises:
            UserError: latents of another shape or not finite, an empty mask, batches that do not fit, or masks that
                cover different numbers of tokens in one batch.
        """
        c = model.net.config
        want = (c.channels // model.patch**2, c.grid * model.patch, c.grid * model.patch)
        if self.latents.ndim != 4 or tuple(self.latents.shape[1:]) != want:
            raise UserError(
                f"latent: it has the shape {list(self.latents.shape)}, {model.name} makes [batch, {want[0]}, {want[1]}, {want[2]}]; "
                f"encode a picture of the model's own size with VAE Encode and the vae of the same loader."
            )
        drawn = masked_tokens(self.latents, self.mask, c.grid, images, device)
        start = self.latents.to(device, torch.float32).expand(images, -1, -1, -1)
        counts = drawn.sum(1).tolist()
        if min(counts) != max(counts):
            raise UserError(
                f"mask: the images' masks cover different numbers of tokens ({min(counts)} to {max(counts)}); "
                "use one mask for the batch, or run the images apart."
            )
        return model.to_tokens(start), drawn
