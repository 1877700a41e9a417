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
from ....model_loaders.networks.autoencoder import VQModel

# Images [B, 3, H, W] in 0..1 to larger ones of any size; the result is resized to the exact size.
Enlarge = Callable[[Tensor], Tensor]
# Pixels per call of the autoencoder.
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
            UserError: pixels that are not finite, or an upscale model that makes other than as many RGB images.
        """
        _, height, width = codes.shape
        stride = self.vq.config.stride
        size = (height * factor * stride, width * factor * stride)

        out = []
        largest = []
        for part in self._pieces(codes, size[0] * size[1]):
            small = self.vq.decode_codes(part).float()
            large = self._enlarged(small, size)
            out.append(self._encode(large))
            largest.append(torch.stack([small.abs().amax(), large.abs().amax()]))

        decoded, enlarged = _finite(largest)
        if not decoded:
            raise not_finite("decoder", self.model.name, "pixels")
        if not enlarged:
            raise not_finite("upscale_model", self.name, "pixels")
        return torch.cat(out)

    def down(self, codes: Tensor, factor: int) -> Tensor:
        """D_r: codes int64 [B, h, w] to [B, h / factor, w / factor]; h and w are multiples of ``factor``.

        Raises:
            UserError: pixels that are not finite.
        """
        _, height, width = codes.shape
        pixels = height * width * self.vq.config.stride**2

        out = []
        largest = []
        for part in self._pieces(codes, pixels):
            large = self.vq.decode_codes(part).float()
            out.append(self._encode(F.avg_pool2d(large, factor)))
            largest.append(large.abs().amax())

        if not _finite(largest):
            raise not_finite("decoder", self.model.name, "pixels")
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

    def _pieces(self, codes: Tensor, pixels: int) -> tuple[Tensor, ...]:
        """A batch of codes on the tokenizer's device, split so that memory is bounded; ``pixels`` of each image."""
        return codes.to(self.vq.quantize.embedding.weight.device).split(max(1, _PIXELS // pixels))

    def _encode(self, images: Tensor) -> Tensor:
        return self.vq.encode(images.clamp(-1, 1).to(self.vq.quant_conv.weight.dtype))[1]


def _finite(largest: list[Tensor]) -> np.ndarray:
    """Whether all values are finite, bool [...], of their largest absolute values fp32 [...] in each piece.

    The host waits for the device here, once.
    """
    return np.isfinite(torch.stack(largest).cpu().numpy()).all(axis=0)
