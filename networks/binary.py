"""BitDance's binary autoencoder, with the official parameter names: images to maps of bits and back.

Source: "BitDance" (arXiv 2602.14041). A token is one position of the map: C bits, each -1 or +1. The residual blocks
are like those of the KL autoencoder, but without biases. There is no attention. The decoder normalises every level with
statistics of the whole map, so decoding an image in tiles would change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autoencoder import KLModel, LatentAutoencoder, ResBlock, climbed, group_norm
from .enlarging import Enlarging, EnlargingConfig, MayEnlarge
from .ops import TORCH, Operations
from .structure import MOST_LEVELS, depth


@dataclass(frozen=True)
class BinaryConfig(MayEnlarge):
    """Shape of a binary autoencoder."""

    widths: tuple[int, ...]  # channels of every level, the full resolution first
    blocks: int  # residual blocks per level, and in the middle
    z_channels: int  # bits C of a token
    noisy: bool = False  # whether the decoder also reads noise ("gan_decoder")
    groups: int = 32  # GroupNorm groups, which no weight states
    enlarging: EnlargingConfig | None = None  # shape of the part that makes larger images; no official file has it

    @property
    def stride(self) -> int:
        """Pixels along each side of a token, in an image that is encoded."""
        return 2 ** (len(self.widths) - 1)

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], groups: int = 32) -> BinaryConfig:
        """Derive the shape from the official parameter names.

        Raises:
            KeyError, ValueError: if the names or shapes are not those of a binary autoencoder.
        """
        levels = depth(state, "encoder.down.", MOST_LEVELS)
        channels = state["encoder.conv_out.weight"].shape[0]
        read = state["decoder.conv_in.weight"].shape[1]
        if read not in (channels, 2 * channels):
            raise ValueError(f"its encoder makes {channels} channels, and its decoder reads {read}")

        return BinaryConfig(
            widths=tuple(len(state[f"encoder.down.{i}.block.0.norm2.weight"]) for i in range(levels)),
            blocks=depth(state, "encoder.down.0.block.", MOST_LEVELS),
            z_channels=channels,
            noisy=read != channels,
            groups=groups,
            enlarging=EnlargingConfig.from_state_dict(state, levels),
        )


def to_bits(x: Tensor) -> Tensor:
    """The bits of features or latents of any shape and dtype: +1 above zero, else -1."""
    return torch.where(x > 0, 1.0, -1.0).to(x.dtype)


class _Level(nn.Module):
    """Residual blocks of one resolution. The parent adds the resampling module."""

    def __init__(self, before: int, width: int, c: BinaryConfig, operations: Operations):
        super().__init__()
        self.block = _blocks(before, width, c, operations)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)

        return x


def _blocks(before: int, width: int, c: BinaryConfig, operations: Operations) -> nn.ModuleList:
    widths = [before, *[width] * c.blocks]
    return nn.ModuleList(ResBlock(widths[i], width, c.groups, operations, bias=False) for i in range(c.blocks))


class _Encoder(nn.Module):
    """Images [B, 3, H, W] to features [B, C, H / stride, W / stride], whose signs are the bits."""

    def __init__(self, c: BinaryConfig, operations: Operations):
        super().__init__()
        first = c.widths[0]
        last = c.widths[-1]
        self.conv_in = operations.Conv2d(3, first, 3, padding=1, bias=False)

        self.down = nn.ModuleList()
        for i, (before, width) in enumerate(zip([first, *c.widths], c.widths, strict=False)):
            level = _Level(before, width, c, operations)
            level.downsample = nn.Identity()
            if i + 1 < len(c.widths):
                level.downsample = operations.Conv2d(width, width, 3, stride=2, padding=1)
            self.down.append(level)

        self.mid_block = _blocks(last, last, c, operations)
        self.norm_out = group_norm(last, c.groups)
        self.conv_out = operations.Conv2d(last, c.z_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level.downsample(level(x))
        for block in self.mid_block:
            x = block(x)

        return self.conv_out(F.silu(self.norm_out(x)))


class _AdaptiveNorm(nn.Module):
    """GroupNorm whose scale and shift follow from the std and the mean of every bit over the whole map."""

    def __init__(self, width: int, c: BinaryConfig):
        super().__init__()
        self.groups = c.groups
        self.gamma = nn.Linear(c.z_channels, width)
        self.beta = nn.Linear(c.z_channels, width)

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        cells = bits.flatten(2)
        std = (cells.var(2) + 1e-6).sqrt()
        gamma = self.gamma(std)[..., None, None]
        beta = self.beta(cells.mean(2))[..., None, None]
        return torch.addcmul(beta, F.group_norm(x, self.groups, eps=1e-6), gamma)


class _Enlarge(nn.Module):
    """Doubles the resolution: a convolution to four times the channels, which are ordered (row, column, channel)."""

    def __init__(self, width: int, operations: Operations):
        super().__init__()
        self.conv1 = operations.Conv2d(width, 4 * width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        x = self.conv1(x).view(b, 2, 2, -1, h, w)
        return x.permute(0, 3, 4, 1, 5, 2).reshape(b, -1, 2 * h, 2 * w)


class _Decoder(nn.Module):
    """Bits [B, C, h, w] to images [B, 3, h * stride, w * stride]; ``up.0`` is the full resolution."""

    def __init__(self, c: BinaryConfig, operations: Operations):
        super().__init__()
        last = c.widths[-1]
        self.conv_in = operations.Conv2d(c.z_channels * (1 + c.noisy), last, 3, padding=1)
        self.mid_block = _blocks(last, last, c, operations)

        self.up = nn.ModuleList()
        self.adaptive = nn.ModuleList()
        for i, (below, width) in enumerate(zip([*c.widths[1:], last], c.widths, strict=True)):
            level = _Level(below, width, c, operations)
            level.upsample = _Enlarge(width, operations) if i else nn.Identity()
            self.up.append(level)
            self.adaptive.append(_AdaptiveNorm(below, c))

        self.norm_out = group_norm(c.widths[0], c.groups)
        self.conv_out = operations.Conv2d(c.widths[0], 3, 3, padding=1)

    def forward(self, bits: Tensor, noise: Tensor | None = None) -> Tensor:
        return self.conv_out(self.climb(bits, noise=noise))

    def climb(
        self,
        bits: Tensor,
        features: list[Tensor] | None = None,
        top: int = 0,
        noise: Tensor | None = None,
    ) -> Tensor:
        """The features of a level, as :func:`~.autoencoder.climbed` returns them."""
        x = self.conv_in(bits if noise is None else torch.cat([bits, noise], 1))
        for block in self.mid_block:
            x = block(x)
        return climbed(self, x, features, top, lambda level, below: self.adaptive[level](below, bits))


class BinaryAutoencoder(LatentAutoencoder):
    """Encoder and decoder between images in -1..1 and maps of bits."""

    def __init__(self, config: BinaryConfig, operations: Operations = TORCH):
        super().__init__()
        self.config = config
        self.encoder = _Encoder(config, operations)
        self.decoder = _Decoder(config, operations)
        if config.enlarging:
            self.enlarge = Enlarging(config.enlarging, config.widths, operations)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Bits, and the features whose signs they are, [B, C, H / stride, W / stride] each, of images [B, 3, H, W]."""
        features = self.encoder(x)
        return to_bits(features), features

    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, h * output_stride, w * output_stride] in about -1..1, not clipped, from latents [B, C, h, w].

        Only the sign of each number is decoded, so rounded or edited latents are valid. 0, which stands for a token
        that is not sampled yet, stays 0. Large images are decoded one by one.
        """
        return self._drawn(latents.sign())


@dataclass(frozen=True, eq=False)
class BinaryModel(KLModel):
    """A binary autoencoder and its display name; it is used as a KL autoencoder whose latents are bits."""

    net: BinaryAutoencoder  # type: ignore[assignment]

    encoded: ClassVar[str] = "features"  # only the features can show numbers that are not finite, not the bits
