"""MuLo-SD's up-sampler U_r and down-sampler D_r. U_r turns codes of the draft's grid into codes of the target's grid,
whose side is r times as long. D_r does the opposite.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149), section
"Multi-Scale Drafting". There are two kinds of U_r and D_r:

- in pixels: the tokenizer decodes the codes, U_r or D_r resizes the decoded image, and the tokenizer encodes the
  resized image. This kind needs no training and is the paper's default. U_r resizes by bicubic interpolation or with an
  upscale model. D_r averages areas of pixels.
- in latents: two trained networks turn codes into codes, without a decoder (``networks/latent_samplers.py``).

Both kinds get only the first grid rows of an image, because the later rows are not generated yet.

Shapes: B images of w x w codes; h, at most w, is the number of grid rows that U_r or D_r gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....errors import UserError, not_finite
from ....networks.autoencoder import VQModel
from ....networks.latent_samplers import LatentSamplersModel

# A function that enlarges images [B, 3, H, W] in 0..1, to any size; the up-sampler then resizes them to the exact size.
Enlarge = Callable[[Tensor], Tensor]
# Images are computed together up to this number of pixels of the larger size. An image with more is computed alone.
_PIXELS_AT_ONCE = 1 << 21
# Images are computed together up to this number of cells of the larger grid. An image with more is computed alone.
_CELLS_AT_ONCE = 1 << 16
# The name in reports if U_r works in pixels without an upscale model.
BICUBIC = "bicubic"


class UpSampling(ABC):
    """U_r and D_r for a pair of models, draft and target.

    Attributes:
        tokenizer: the tokenizer of both models.
        tokenizer_net: the tokenizer's network.
        name: name of the model or method that enlarges images, for reports and messages.
    """

    def __init__(self, vq: VQModel, name: str):
        self.tokenizer = vq
        self.tokenizer_net = vq.net
        self.name = name

    @abstractmethod
    def up(self, codes: Tensor, factor: int) -> Tensor:
        """U_r: enlarge the first rows of images, int64 [B, h, w], to [B, h * factor, w * factor]. ``factor``: r.

        Raises:
            UserError: pixels that are not finite, or an upscale model that does not turn each image into one RGB
                image.
        """

    @abstractmethod
    def down(self, codes: Tensor, factor: int) -> Tensor:
        """D_r: reduce the first rows of images, int64 [B, h, w], to [B, h / factor, w / factor]. ``factor``: r. h and w
        are multiples of r.

        Raises:
            UserError: pixels that are not finite.
        """


class LatentUpSampling(UpSampling):
    """U_r and D_r as trained networks.

    Args:
        vq: the tokenizer.
        samplers: the two networks, trained for this tokenizer's codebook and for the ratio r of the grids.
    """

    def __init__(self, vq: VQModel, samplers: LatentSamplersModel):
        super().__init__(vq, samplers.name)
        self._net = samplers.net

    def up(self, codes: Tensor, factor: int) -> Tensor:
        return self._apply_in_parts(self._net.up, codes, codes[0].numel() * factor**2)

    def down(self, codes: Tensor, factor: int) -> Tensor:
        return self._apply_in_parts(self._net.down, codes, codes[0].numel())

    def _apply_in_parts(self, network: Callable[[Tensor], Tensor], codes: Tensor, cells: int) -> Tensor:
        """Apply a network to some images at a time. ``cells``: number of cells of one image in the larger grid."""
        codes = codes.to(self._net.codebook.embedding.weight.device)
        return torch.cat([network(part) for part in codes.split(max(1, _CELLS_AT_ONCE // cells))])


class PixelUpSampling(UpSampling):
    """U_r and D_r in pixels.

    Args:
        vq: the tokenizer of draft and target.
        enlarge: a function that enlarges images, such as an upscale model; None for bicubic interpolation.
        name: the name of this function or model.
    """

    def __init__(self, vq: VQModel, enlarge: Enlarge | None = None, name: str = BICUBIC):
        super().__init__(vq, name)
        self._enlarge = enlarge

    def up(self, codes: Tensor, factor: int) -> Tensor:
        side = codes.shape[2] * factor * self.tokenizer_net.config.stride
        large = self._decode_resize_encode(codes, side, lambda images: self._enlarged(images, (side, side)))
        return large[:, : codes.shape[1] * factor]

    def down(self, codes: Tensor, factor: int) -> Tensor:
        side = codes.shape[2] * self.tokenizer_net.config.stride
        small = self._decode_resize_encode(codes, side, lambda images: F.avg_pool2d(images, factor))
        return small[:, : codes.shape[1] // factor]

    def _decode_resize_encode(self, codes: Tensor, side: int, resize: Callable[[Tensor], Tensor]) -> Tensor:
        """Decode codes to images [B, 3, H, W] in -1..1, call ``resize`` with the images, and encode the resized images.

        ``side``: side of an image in pixels, before or after resizing, whichever is larger. This side determines how
        many images are computed at a time. The host waits for the device once, at the end.

        Raises:
            UserError: decoded or resized pixels that are not finite.
        """
        codes = whole_image(codes).to(self.tokenizer_net.quantize.embedding.weight.device)
        out = []
        largest = []  # per part, the largest absolute value of the decoded and of the resized pixels, fp32 [2]
        for part in codes.split(max(1, _PIXELS_AT_ONCE // side**2)):
            decoded = self.tokenizer_net.decode_codes(part).float()
            resized = resize(decoded)
            pixels = resized.clamp(-1, 1).to(self.tokenizer_net.quant_conv.weight.dtype)
            out.append(self.tokenizer_net.encode(pixels)[1])
            largest.append(torch.stack([decoded.abs().amax(), resized.abs().amax()]))

        decoded_well, resized_well = np.isfinite(torch.stack(largest).cpu().numpy()).all(axis=0)
        if not decoded_well:
            raise not_finite("decoder", self.tokenizer.name, "pixels")
        if not resized_well:
            raise not_finite("upscale_model", self.name, "pixels")
        return torch.cat(out)

    def _enlarged(self, small: Tensor, size: tuple[int, int]) -> Tensor:
        """Enlarge images, fp32 [B, 3, h, w] in -1..1, to the size (H, W)."""
        if self._enlarge is None:
            return F.interpolate(small, size=size, mode="bicubic", antialias=True)

        large = self._enlarge((small / 2 + 0.5).clamp(0, 1)).to(small) * 2 - 1
        if large.ndim != 4 or large.shape[:2] != small.shape[:2]:
            raise UserError(
                f"upscale_model: this model turned images of the shape {list(small.shape)} into images of the shape "
                f"{list(large.shape)}; choose a model that enlarges RGB images."
            )
        if large.shape[2:] != size:
            large = F.interpolate(large, size=size, mode="bicubic", antialias=True)
        return large


def whole_image(codes: Tensor) -> Tensor:
    """Repeat the last grid row of ``codes``, int64 [B, h, w], until the grid is square: int64 [B, w, w].

    The tokenizer normalises over all cells, attends to all cells, and pads at the borders. If it encoded the
    first rows alone, their codes would therefore differ from the codes of the same rows in a whole image, and the
    target would reject the codes.
    """
    _, height, width = codes.shape
    below = codes[:, -1:].expand(-1, width - height, -1)
    return torch.cat([codes, below], dim=1)
