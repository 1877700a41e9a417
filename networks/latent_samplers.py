"""MuLo-SD's trained up-sampler U_r and down-sampler D_r: codes of a small grid to codes of a large one, and back.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149), "Multi-Scale
Drafting": convolutions that are causal over rows, and a pixel shuffle. The paper gives no sizes, and there is no public
file, so names, widths and depths are this project's own.

Both networks read code vectors and return unit vectors; the codes nearest to these are the result. No row of the result
depends on a row below it, so the first rows of an image are the same whether or not the rest exists. Both networks are
convolutional, so one file serves every pair of grids with its ratio, for example 8 to 16 and 16 to 32 tokens per side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autoencoder import Codebook
from .ops import TORCH, Operations
from .structure import MOST_LEVELS, depth


@dataclass(frozen=True)
class LatentSamplersConfig:
    """Shape of both networks."""

    ratio: int  # r: side of the large grid divided by the side of the small grid
    codes: int  # entries of the codebook
    channels: int  # channels of a code vector
    up_width: int  # channels within U_r
    up_small: int  # residual blocks of U_r on the small grid
    up_large: int  # residual blocks of U_r on the large grid
    down_width: int  # channels within D_r
    down_small: int  # residual blocks of D_r, all on the small grid

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor]) -> LatentSamplersConfig:
        """Derive the shape from the parameter names.

        Raises:
            KeyError, ValueError: if the names or shapes are not those of latent samplers.
        """
        codes, channels = state["codebook.embedding.weight"].shape
        up_width = len(state["up_sampler.read.weight"])
        squared = len(state["up_sampler.rise.weight"]) // max(1, up_width)
        ratio = round(squared**0.5)
        if ratio < 2 or ratio**2 != squared:
            raise ValueError(
                f"its up-sampler makes {squared} cells from one cell, and this number is not the square of an integer "
                "above 1"
            )

        return LatentSamplersConfig(
            ratio=ratio,
            codes=codes,
            channels=channels,
            up_width=up_width,
            up_small=depth(state, "up_sampler.small.", MOST_LEVELS),
            up_large=depth(state, "up_sampler.large.", MOST_LEVELS),
            down_width=len(state["down_sampler.read.weight"]),
            down_small=depth(state, "down_sampler.small.", MOST_LEVELS),
        )


class RowCausal(nn.Module):
    """A 3 x 3 convolution that reads no row below: each row reads itself and the two rows above."""

    def __init__(self, c_in: int, c_out: int, operations: Operations):
        super().__init__()
        self.conv = operations.Conv2d(c_in, c_out, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (1, 1, 2, 0)))


class _Block(nn.Module):
    """Residual block: RMS norm of every cell, a gated row-causal convolution, a 1 x 1 convolution.

    The norm is over the channels of a cell, because a norm over positions would read the rows below.
    """

    def __init__(self, width: int, operations: Operations):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gated = RowCausal(width, 2 * width, operations)
        self.out = operations.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.scale[:, None, None]
        values, gate = self.gated(normed).chunk(2, dim=1)
        return x + self.out(values * F.silu(gate))


class UpSampler(nn.Module):
    """U_r: unit vectors [B, channels, h, w] to unit vectors [B, channels, h * ratio, w * ratio]."""

    def __init__(self, c: LatentSamplersConfig, operations: Operations):
        super().__init__()
        self.ratio = c.ratio
        self.read = operations.Conv2d(c.channels, c.up_width, 1)
        self.small = nn.Sequential(*[_Block(c.up_width, operations) for _ in range(c.up_small)])
        self.rise = operations.Conv2d(c.up_width, c.up_width * c.ratio**2, 1)
        self.large = nn.Sequential(*[_Block(c.up_width, operations) for _ in range(c.up_large)])
        self.write = operations.Conv2d(c.up_width, c.channels, 1)

    def forward(self, vectors: Tensor) -> Tensor:
        x = self.small(self.read(_of_unit_variance(vectors)))
        x = self.large(F.pixel_shuffle(self.rise(x), self.ratio))
        return F.normalize(self.write(x).float(), dim=1)


class DownSampler(nn.Module):
    """D_r: unit vectors [B, channels, h * ratio, w * ratio] to unit vectors [B, channels, h, w]."""

    def __init__(self, c: LatentSamplersConfig, operations: Operations):
        super().__init__()
        self.ratio = c.ratio
        self.read = operations.Conv2d(c.channels * c.ratio**2, c.down_width, 1)
        self.small = nn.Sequential(*[_Block(c.down_width, operations) for _ in range(c.down_small)])
        self.write = operations.Conv2d(c.down_width, c.channels, 1)

    def forward(self, vectors: Tensor) -> Tensor:
        x = self.small(self.read(F.pixel_unshuffle(_of_unit_variance(vectors), self.ratio)))
        return F.normalize(self.write(x).float(), dim=1)


def _of_unit_variance(vectors: Tensor) -> Tensor:
    """Scale unit vectors [B, C, h, w] so that the mean square over their channels is 1."""
    return vectors * vectors.shape[1] ** 0.5


class LatentSamplers(nn.Module):
    """U_r and D_r, with the codebook that they were trained for."""

    def __init__(self, config: LatentSamplersConfig, operations: Operations = TORCH):
        super().__init__()
        self.config = config
        self.up_sampler = UpSampler(config, operations)
        self.down_sampler = DownSampler(config, operations)
        self.codebook = Codebook(config.codes, config.channels)

    def up(self, codes: Tensor) -> Tensor:
        """U_r: codes int64 [B, h, w] to [B, h * ratio, w * ratio]."""
        return self.nearest(self.up_sampler(self.vectors(codes)))

    def down(self, codes: Tensor) -> Tensor:
        """D_r: codes int64 [B, h, w], with h and w multiples of ``ratio``, to [B, h / ratio, w / ratio]."""
        return self.nearest(self.down_sampler(self.vectors(codes)))

    def vectors(self, codes: Tensor) -> Tensor:
        """Unit vectors fp32 [B, channels, h, w] of codes int64 [B, h, w]."""
        return F.embedding(codes, self.codebook.unit()).permute(0, 3, 1, 2)

    def nearest(self, vectors: Tensor) -> Tensor:
        """Nearest codes int64 [B, h, w] of vectors [B, channels, h, w]."""
        b, c, h, w = vectors.shape
        return self.codebook.nearest(vectors.permute(0, 2, 3, 1).reshape(-1, c)).view(b, h, w)


@dataclass(frozen=True, eq=False)
class LatentSamplersModel:
    """Latent samplers in eval mode and their display name."""

    net: LatentSamplers
    name: str

    family: ClassVar[str] = "latent samplers"

    @property
    def ratio(self) -> int:
        """Side of the large grid divided by the side of the small grid."""
        return self.net.config.ratio
