"""MuLo-SD's up-sampler U_r and down-sampler D_r: codes of the draft's grid to codes of the target's, and back.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149), "Multi-Scale
Drafting": decode, enlarge, encode. This needs no training and is the paper's default. The image is enlarged by bicubic
interpolation or by a given function; D_r averages areas.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....errors import UserError, not_finite
from ....networks.autoencoder import VQModel

# Images [B, 3, H, W] in 0..1 to larger ones of any size; the result is resized to the exact size.
Enlarge = Callable[[Tensor], Tensor]
# Pixels of the larger images, per call of the autoencoder.
_PIXELS = 1 << 21
# The name of an up-sampling without an upscale model.
BICUBIC = "bicubic"


class UpSampling:
    """U_r and D_r with the tokenizer of draft and target.

    Args:
        vq: the tokenizer.
        enlarge: the function that enlarges images; None for bicubic interpolation.
        name: of ``enlarge``, for reports and messages.
    """

    def __init__(self, vq: VQModel, enlarge: Enlarge | None = None, name: str = BICUBIC):
        self.model = vq
        self.vq = vq.net
        self.name = name
        self._enlarge = enlarge

    def up(self, codes: Tensor, factor: int) -> Tensor:
        """U_r: codes int64 [B, h, w] to [B, h * factor, w * factor].

        Raises:
            UserError: pixels that are not finite, or an upscale model that does not make one RGB image of each.
        """
        _, height, width = codes.shape
        stride = self.vq.config.stride
        size = (height * factor * stride, width * factor * stride)
        return self._recoded(codes, size, lambda images: self._enlarged(images, size))

    def down(self, codes: Tensor, factor: int) -> Tensor:
        """D_r: codes int64 [B, h, w] to [B, h / factor, w / factor]; h and w are multiples of ``factor``.

        Raises:
            UserError: pixels that are not finite.
        """
        _, height, width = codes.shape
        stride = self.vq.config.stride
        size = (height * stride, width * stride)
        return self._recoded(codes, size, lambda images: F.avg_pool2d(images, factor))

    def _recoded(self, codes: Tensor, size: tuple[int, int], resize: Callable[[Tensor], Tensor]) -> Tensor:
        """Decode codes, ``resize`` the images [B, 3, H, W] in -1..1, and encode the result.

        ``size``: height and width of the larger images, which decide how many images one call computes.
        The host waits for the device at the end, once.
        """
        height, width = size
        codes = codes.to(self.vq.quantize.embedding.weight.device)
        out = []
        largest = []  # absolute values of the decoded and of the resized images, fp32 [2]
        for part in codes.split(max(1, _PIXELS // (height * width))):
            decoded = self.vq.decode_codes(part).float()
            resized = resize(decoded)
            out.append(self.vq.encode(resized.clamp(-1, 1).to(self.vq.quant_conv.weight.dtype))[1])
            largest.append(torch.stack([decoded.abs().amax(), resized.abs().amax()]))

        decoded_well, resized_well = np.isfinite(torch.stack(largest).cpu().numpy()).all(axis=0)
        if not decoded_well:
            raise not_finite("decoder", self.model.name, "pixels")
        if not resized_well:
            raise not_finite("upscale_model", self.name, "pixels")
        return torch.cat(out)

    def _enlarged(self, small: Tensor, size: tuple[int, int]) -> Tensor:
        """Images fp32 [B, 3, h, w] in -1..1 at the size (H, W)."""
        if self._enlarge is None:
            return F.interpolate(small, size=size, mode="bicubic", antialias=True)

        large = self._enlarge((small / 2 + 0.5).clamp(0, 1)).to(small) * 2 - 1
        if large.ndim != 4 or large.shape[:2] != small.shape[:2]:
            raise UserError(
                f"upscale_model: it made {list(large.shape)} of images {list(small.shape)}; choose one that enlarges "
                "RGB images."
            )
        if large.shape[2:] != size:
            large = F.interpolate(large, size=size, mode="bicubic", antialias=True)
        return large
