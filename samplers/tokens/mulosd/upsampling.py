"""MuLo-SD's up-sampler U_r and down-sampler D_r. U_r turns codes of the draft's grid into codes of the target's grid,
whose side is r times as long. D_r does the opposite.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149), section
"Multi-Scale Drafting". There are two kinds:

- in pixels: the tokenizer decodes the codes, the image is resized, and the tokenizer encodes the result. This needs no
  training and is the paper's default. U_r resizes by bicubic interpolation or by a given function; D_r averages areas
  of pixels.
- in latents: two trained networks turn codes into codes (``networks/latent_samplers.py``) without a decoder.

Both kinds get only the first rows of an image, because MuLo-SD drafts some rows at a time.

Shapes: B images; h rows of w codes, the first rows of an image of w x w codes, so h is at most w.
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

# A function that enlarges images [B, 3, H, W] in 0..1, to any size. The result is then resized to the exact size.
Enlarge = Callable[[Tensor], Tensor]
# Pixels of the larger images that are computed at once, unless one image alone has more.
_PIXELS_AT_ONCE = 1 << 21
# Cells of the large grids that a trained network computes at once, unless one image alone has more.
_CELLS_AT_ONCE = 1 << 16
# The name in reports if images are enlarged without an upscale model.
BICUBIC = "bicubic"


class UpSampling(ABC):
    """U_r and D_r of a pair of models.

    Attributes:
        tokenizer: the tokenizer of both models.
        tokenizer_net: the tokenizer's network.
        name: name of the model or method that enlarges, for reports and messages.
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
        """D_r: reduce the first rows of images, int64 [B, h, w], to [B, h / factor, w / factor]. ``factor`` is r; h and
        w are multiples of it.

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
        """Apply a network to some images at a time. ``cells``: number of cells that an image has in the large grid."""
        codes = codes.to(self._net.codebook.embedding.weight.device)
        return torch.cat([network(part) for part in codes.split(max(1, _CELLS_AT_ONCE // cells))])


class PixelUpSampling(UpSampling):
    """U_r and D_r in pixels.

    Args:
        vq: the tokenizer of draft and target.
        enlarge: the function that enlarges images; None for bicubic interpolation.
        name: name of ``enlarge``.
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
        """Decode codes, ``resize`` the images [B, 3, H, W] in -1..1, and encode the result.

        ``side``: side, in pixels, of the images before or after resizing, whichever are larger. It determines how many
        images are computed at a time. The host waits for the device once, at the end.

        Raises:
            UserError: decoded or resized pixels that are not finite.
        """
        codes = whole_image(codes).to(self.tokenizer_net.quantize.embedding.weight.device)
        out = []
        largest = []  # for each part the largest absolute values of the decoded and of the resized images, fp32 [2]
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
    """Complete the first rows of images to squares, int64 [B, w, w], by repeating the last row. ``codes``: the first
    rows, int64 [B, h, w].

    The tokenizer normalises over all positions, attends to all positions, and pads at the borders. If it encoded the
    first rows alone, their codes would therefore differ from the codes of the same rows in a whole image, and the
    target would reject them.
    """
    _, height, width = codes.shape
    below = codes[:, -1:].expand(-1, width - height, -1)
    return torch.cat([codes, below], dim=1)
