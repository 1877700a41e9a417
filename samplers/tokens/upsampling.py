"""From the draft's codes to the target's and back: MuLo-SD's U_r and D_r as a plug.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149), "Multi-Scale
Drafting". In pixels: decode, enlarge, encode, which needs no training and is the paper's default; the enlarging is bicubic,
or any function given from outside. In latents: a learned network, and nothing is decoded. The way back is through pixels
in both (area averaging), since no down-sampler needs to be learned for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.upsampler import UpSamplerModel
from ...model_loaders.networks.vq import VQAutoencoder, VQModel
from .settings import LATENT, PIXEL

# Pictures [B, 3, H, W] in 0..1 to larger ones of any size; what they become is then brought to the exact one.
Enlarge = Callable[[Tensor], Tensor]
# Pixels that go through the autoencoder at once.
_PIXELS = 1 << 21


class UpSampling(Protocol):
    """How codes change their resolution.

    Attributes:
        name: what a person calls it; in reports.
        vq: the tokenizer that draft and target share; its codebook says which codes are neighbours.
    """

    name: str
    vq: VQAutoencoder

    def fits(self, factor: int) -> None:
        """Nothing if it can enlarge by ``factor``.

        Raises:
            UserError: it cannot.
        """
        ...

    def up(self, codes: Tensor, factor: int) -> Tensor:
        """Codes int64 [B, h, w] to [B, h * factor, w * factor]."""
        ...

    def down(self, codes: Tensor, factor: int) -> Tensor:
        """Codes int64 [B, h, w] to [B, h / factor, w / factor]; h and w are multiples."""
        ...


def _pieces(codes: Tensor, vq: VQAutoencoder, pixels: int) -> tuple[Tensor, ...]:
    """A batch where the tokenizer is, in pieces: a picture has so many pixels, and memory should not grow with the batch."""
    return codes.to(vq.quantize.embedding.weight.device).split(max(1, _PIXELS // pixels))


class PixelUpSampling:
    """Through pixels.

    Args:
        vq: the tokenizer.
        enlarge: see :data:`Enlarge`; None is bicubic.
        name: of what enlarges.
    """

    def __init__(self, vq: VQModel, enlarge: Enlarge | None = None, name: str = "bicubic"):
        self.vq, self._enlarge, self.name = vq.net, enlarge, f"{PIXEL}, {name}"

    def fits(self, factor: int) -> None:
        """Any factor does."""

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

    def _encode(self, pictures: Tensor) -> Tensor:
        return self.vq.encode(pictures.clamp(-1, 1).to(self.vq.quant_conv.weight.dtype))[1]


class LatentUpSampling(PixelUpSampling):
    """Through a learned network; back through pixels.

    Args:
        vq: the tokenizer.
        model: the network.

    Raises:
        UserError: a network for code vectors of another length.
    """

    def __init__(self, vq: VQModel, model: UpSamplerModel):
        super().__init__(vq)
        own, theirs = vq.net.config.code_channels, model.net.config.channels
        if own != theirs:
            raise UserError(
                f"up_sampler: {model.name} reads vectors of {theirs} numbers, {vq.name} has {own}; use one trained for it."
            )
        self.name, self._net, self._title = f"{LATENT}, {model.name}", model.net, model.name

    def fits(self, factor: int) -> None:
        if factor & (factor - 1):
            raise UserError(
                f"up_sampler: {self._title} doubles the side, and {factor} is no power of two; choose {PIXEL!r}, which takes any factor."
            )

    def up(self, codes: Tensor, factor: int) -> Tensor:
        codes = codes.to(self.vq.quantize.embedding.weight.device)
        # The network may compute elsewhere.
        vectors = self.vq.vectors(codes).to(self._net.enter.weight.device)
        return self.vq.codes(self._net.enlarge(vectors, factor).to(codes.device))


def up_sampling(
    kind: str,
    vq: VQModel,
    enlarge: Enlarge | None = None,
    enlarge_name: str = "upscale model",
    model: UpSamplerModel | None = None,
) -> UpSampling:
    """The plug that the setting ``up_sampler`` names.

    Args:
        kind: one of its choices.
        vq: the tokenizer that draft and target share.
        enlarge: for pixels, instead of bicubic.
        enlarge_name: its name.
        model: the learned network, if there is one.

    Raises:
        UserError: the learned one is asked for and there is none, or not for this tokenizer; an upscale model without use.
    """
    if kind != LATENT:
        return PixelUpSampling(vq) if enlarge is None else PixelUpSampling(vq, enlarge, enlarge_name)
    if enlarge is not None:
        raise UserError(f"up_sampler: {LATENT!r} has no use for the upscale model; choose {PIXEL!r}, or disconnect it.")
    if model is None:
        raise UserError(f"up_sampler: there is no learned up-sampler for {vq.name}; choose {PIXEL!r}.")
    return LatentUpSampling(vq, model)
