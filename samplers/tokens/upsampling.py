"""MuLo-SD's up-sampler U_r and down-sampler D_r: codes of the draft's grid to codes of the target's, and back.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149), "Multi-Scale Drafting": decode,
enlarge, encode. This needs no training and is the paper's default. The image is enlarged by bicubic interpolation or by a given
function; D_r averages areas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError, not_finite
from ...model_loaders.networks.autoencoder import VQModel, expect_finite

# Images [B, 3, H, W] in 0..1 to larger ones of any size; the result is resized to the exact size.
Enlarge = Callable[[Tensor], Tensor]
# Pixels per call of the autoencoder.
_PIXELS = 1 << 21


class UpSampling:
    """U_r and D_r with the tokenizer of draft and target; ``enlarge`` None: bicubic interpolation. ``name``: of ``enlarge`` in reports."""

    def __init__(self, vq: VQModel, enlarge: Enlarge | None = None, name: str = "bicubic"):
        self.vq, self._enlarge, self.name = vq.net, enlarge, name
        self._decoder = vq.name

    def up(self, codes: Tensor, factor: int) -> Tensor:
        """U_r: codes int64 [B, h, w] to [B, h * factor, w * factor]. Raises UserError: ``enlarge`` made other than as many RGB images."""
        stride, (_, h, w) = self.vq.config.stride, codes.shape
        size = (h * factor * stride, w * factor * stride)
        return torch.cat([self._up(part, size) for part in self._pieces(codes, size[0] * size[1])])

    def _up(self, codes: Tensor, size: tuple[int, int]) -> Tensor:
        small = self._decoded(codes)
        if self._enlarge is None:
            large = F.interpolate(small, size=size, mode="bicubic", antialias=True)
        else:
            large = self._enlarge((small / 2 + 0.5).clamp(0, 1)).to(small) * 2 - 1
            if not bool(large.isfinite().all()):
                raise not_finite("upscale_model", self.name, "pixels")
            if large.ndim != 4 or large.shape[:2] != small.shape[:2]:
                raise UserError(
                    f"upscale_model: it made {list(large.shape)} of pictures {list(small.shape)}; choose one that enlarges RGB pictures."
                )
            if large.shape[2:] != size:
                large = F.interpolate(large, size=size, mode="bicubic", antialias=True)
        return self._encode(large)

    def down(self, codes: Tensor, factor: int) -> Tensor:
        """D_r: codes int64 [B, h, w] to [B, h / factor, w / factor]; h and w are multiples of ``factor``."""
        stride, (_, h, w) = self.vq.config.stride, codes.shape
        parts = [self._decoded(part) for part in self._pieces(codes, h * w * stride**2)]
        return torch.cat([self._encode(F.avg_pool2d(part, factor)) for part in parts])

    def _decoded(self, codes: Tensor) -> Tensor:
        """Images fp32 [B, 3, H, W] of codes; a UserError if they are not finite, which codes of them would hide."""
        return expect_finite(self.vq.decode_codes(codes).float(), self._decoder)

    def _pieces(self, codes: Tensor, pixels: int) -> tuple[Tensor, ...]:
        """A batch of codes on the tokenizer's device, split so that memory is bounded; ``pixels`` of each image."""
        return codes.to(self.vq.quantize.embedding.weight.device).split(max(1, _PIXELS // pixels))

    def _encode(self, images: Tensor) -> Tensor:
        return self.vq.encode(images.clamp(-1, 1).to(self.vq.quant_conv.weight.dtype))[1]
