"""MuLo-SD's up-sampler U_r and down-sampler D_r: codes of the draft's grid to codes of the target's, and back.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149), "Multi-Scale
Drafting". In pixels: decode, enlarge, encode; this needs no training and is the paper's default. The image is enlarged by
bicubic interpolation or by a given function. In latents: a learned network, without decoding. D_r averages areas of pixels in
both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.autoencoder import VQAutoencoder, VQModel
from ...model_loaders.networks.upsampler import UpSamplerModel
from .settings import LATENT, PIXEL

# Images [B, 3, H, W] in 0..1 to larger ones of any size; the result is resized to the exact size.
Enlarge = Callable[[Tensor], Tensor]
# Pixels per call of the autoencoder.
_PIXELS = 1 << 21


class UpSampling(Protocol):
    """U_r and D_r.

    Attributes:
        name: display name, in reports.
        vq: the tokenizer of draft and target; its codebook defines the neighbours of a code.
    """

    name: str
    vq: VQAutoencoder

    def fits(self, factor: int) -> None:
        """Check that codes can be enlarged by ``factor``.

        Raises:
            UserError: they cannot.
        """
        ...

    def up(self, codes: Tensor, factor: int) -> Tensor:
        """U_r: codes int64 [B, h, w] to [B, h * factor, w * factor]."""
        ...

    def down(self, codes: Tensor, factor: int) -> Tensor:
        """D_r: codes int64 [B, h, w] to [B, h / factor, w / factor]; h and w are multiples of ``factor``."""
        ...


def _pieces(codes: Tensor, vq: VQAutoencoder, pixels: int) -> tuple[Tensor, ...]:
    """A batch of codes on the tokenizer's device, split so that memory is bounded; ``pixels`` of each image."""
    return codes.to(vq.quantize.embedding.weight.device).split(max(1, _PIXELS // pixels))


class PixelUpSampling:
    """U_r and D_r in pixels.

    Args:
        vq: the tokenizer.
        enlarge: see :data:`Enlarge`; None: bicubic interpolation.
        name: display name of ``enlarge``.
    """

    def __init__(self, vq: VQModel, enlarge: Enlarge | None = None, name: str = "bicubic"):
        self.vq, self._enlarge, self.name = vq.net, enlarge, f"{PIXEL}, {name}"

    def fits(self, factor: int) -> None:
        """Every factor is possible."""

    def up(self, codes: Tensor, factor: int) -> Tensor:
        stride, (_, h, w) = self.vq.config.stride, codes.shape
        size = (h * factor * stride, w * factor * stride)
        return torch.cat([self._up(part, size) for part in _pieces(codes, self.vq, size[0] * size[1])])

    def _up(self, codes: Tensor, size: tuple[int, int]) -> Tensor:
        small = self.vq.decode_codes(codes).float()
        if self._enlarge is None:
            large = F.interpolate(small, size=size, mode="bicubic", antialias=True)
        else:
            large = self._enlarge((small / 2 + 0.5).clamp(0, 1)).to(small) * 2 - 1
            if large.ndim != 4 or large.shape[:2] != small.shape[:2]:
                raise UserError(
                    f"upscale_model: it made {list(large.shape)} of pictures {list(small.shape)}; choose one that enlarges RGB pictures."
                )
            if large.shape[2:] != size:
                large = F.interpolate(large, size=size, mode="bicubic", antialias=True)
        return self._encode(large)

    def down(self, codes: Tensor, factor: int) -> Tensor:
        stride, (_, h, w) = self.vq.config.stride, codes.shape
        parts = [self.vq.decode_codes(part).float() for part in _pieces(codes, self.vq, h * w * stride**2)]
        return torch.cat([self._encode(F.avg_pool2d(part, factor)) for part in parts])

    def _encode(self, images: Tensor) -> Tensor:
        return self.vq.encode(images.clamp(-1, 1).to(self.vq.quant_conv.weight.dtype))[1]


class LatentUpSampling(PixelUpSampling):
    """U_r by a learned network; D_r in pixels.

    Args:
        vq: the tokenizer.
        model: the network.

    Raises:
        UserError: a network for another number of code channels.
    """

    def __init__(self, vq: VQModel, model: UpSamplerModel):
        super().__init__(vq)
        channels, expected = vq.net.config.code_channels, model.net.config.channels
        if channels != expected:
            raise UserError(
                f"up_sampler: {model.name} reads vectors of {expected} numbers, {vq.name} has {channels}; use one trained for it."
            )
        self.name, self._net, self._title = f"{LATENT}, {model.name}", model.net, model.name

    def fits(self, factor: int) -> None:
        if factor & (factor - 1):
            raise UserError(
                f"up_sampler: {self._title} doubles the side, and {factor} is no power of two; choose {PIXEL!r}, which takes any factor."
            )

    def up(self, codes: Tensor, factor: int) -> Tensor:
        codes = codes.to(self.vq.quantize.embedding.weight.device)
        # The network may be on another device.
        vectors = self.vq.vectors(codes).to(self._net.enter.weight.device)
        return self.vq.codes(self._net.enlarge(vectors, factor).to(codes.device))


def up_sampling(
    kind: str,
    vq: VQModel,
    enlarge: Enlarge | None = None,
    enlarge_name: str = "upscale model",
    model: UpSamplerModel | None = None,
) -> UpSampling:
    """The up-sampler of the setting ``up_sampler``.

    Args:
        kind: one of the choices of the setting.
        vq: the tokenizer of draft and target.
        enlarge: see :data:`Enlarge`; replaces bicubic interpolation in pixels.
        enlarge_name: display name of ``enlarge``.
        model: the learned network, or None.

    Raises:
        UserError: latent up-sampling without a network for this tokenizer, or together with ``enlarge``.
    """
    if kind != LATENT:
        return PixelUpSampling(vq) if enlarge is None else PixelUpSampling(vq, enlarge, enlarge_name)
    if enlarge is not None:
        raise UserError(f"up_sampler: {LATENT!r} has no use for the upscale model; choose {PIXEL!r}, or disconnect it.")
    if model is None:
        raise UserError(f"up_sampler: there is no learned up-sampler for {vq.name}; choose {PIXEL!r}.")
    return LatentUpSampling(vq, model)
