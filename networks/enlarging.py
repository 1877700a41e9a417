"""A part of a decoder's file that draws images four times larger from the same latents.

The part is this project's own and belongs to no official layout. It is a second path up the decoder's levels, which
reads the features of these levels, adds detail at low resolutions, and ends in two pixel shuffles (Shi et al. 2016,
arXiv 1609.05158). All other weights of the file stay as they are.

A part that reads all levels adds to the decoder's own image, enlarged. A part that reads only the lower levels is
faster: it reaches the resolutions of the higher levels by more pixel shuffles and makes the whole image, so the decoder
does not compute its higher levels.

Sums are computed in place where possible, which is faster on a CPU and takes less memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops import Operations
from .structure import MOST_LEVELS, depth

# How many times higher and wider the larger image is than the decoder's image.
FACTOR = 4
# What the names of its weights begin with.
PREFIX = "enlarge."


@dataclass(frozen=True)
class EnlargingConfig:
    """Shape of the part."""

    width: int  # channels at the levels that it reads
    fine: int  # channels at twice the decoder's resolution
    blocks: tuple[int, ...]  # residual blocks per level that it reads, the lowest resolution first
    rises: tuple[int, ...] = ()  # channels at the decoder's other levels, the lowest resolution first

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], levels: int) -> EnlargingConfig | None:
        """Derive the shape from the weights of a decoder with this many ``levels``; None if the file has no such part.

        Raises:
            ValueError: if weights that tell the shape are missing, or the part is for more levels.
        """
        names = [name for name in state if name.startswith(PREFIX)]
        if not names:
            return None

        rises = depth(names, f"{PREFIX}rise.", MOST_LEVELS)
        reads = levels - rises
        wanted = [f"{PREFIX}read.{i}.weight" for i in range(max(1, reads))]
        wanted += [f"{PREFIX}rise.{i}.weight" for i in range(rises)] + [f"{PREFIX}smooth.weight"]
        missing = next((name for name in wanted if name not in state), None)
        if missing:
            raise ValueError(f"it holds only some of the part {PREFIX}*, which enlarges images: {missing} is missing")
        if depth(names, f"{PREFIX}read.", MOST_LEVELS) > reads:
            raise ValueError(f"its part {PREFIX}* is for a decoder of more than {levels} levels")

        return EnlargingConfig(
            width=len(state[f"{PREFIX}read.0.weight"]),
            fine=len(state[f"{PREFIX}smooth.weight"]),
            blocks=tuple(depth(names, f"{PREFIX}level.{i}.", MOST_LEVELS) for i in range(reads)),
            rises=tuple(len(state[f"{PREFIX}rise.{i}.weight"]) // 4 for i in range(rises)),
        )


class MayEnlarge:
    """The part of an autoencoder's shape about the sizes of its images, which are larger if it has the part."""

    enlarging: EnlargingConfig | None

    @property
    def stride(self) -> int:
        """Pixels along each side of a latent position, in an image that is encoded."""
        raise NotImplementedError

    @property
    def enlarges(self) -> int:
        """How many times higher and wider an image is decoded than it was encoded: 1, or 4."""
        return FACTOR if self.enlarging else 1

    @property
    def top(self) -> int:
        """The highest level of the decoder that decoding computes: 0, which is the full resolution, or the highest
        level that the part reads.
        """
        return len(self.enlarging.rises) if self.enlarging else 0

    @property
    def output_stride(self) -> int:
        """Pixels along each side of a latent position, in an image that is decoded."""
        return self.stride * self.enlarges


def silu(x: Tensor) -> Tensor:
    """SiLU of a tensor that nothing else reads; in place, except in training."""
    return F.silu(x, inplace=not x.requires_grad)


class _Block(nn.Module):
    """Residual block of two SiLU, 3x3 convolution."""

    def __init__(self, width: int, operations: Operations):
        super().__init__()
        self.conv1 = operations.Conv2d(width, width, 3, padding=1)
        self.conv2 = operations.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(silu(self.conv1(F.silu(x)))).add_(x)


class Enlarging(nn.Module):
    """Makes an image from the features of a decoder's levels, four times as high and as wide as the decoder's image.

    Args:
        widths: channels of the decoder's levels, the highest resolution first.
    """

    def __init__(self, config: EnlargingConfig, widths: Sequence[int], operations: Operations):
        super().__init__()
        self.config = config
        self.channels = widths[::-1][: len(config.blocks)]
        width, fine = config.width, config.fine
        self.read = nn.ModuleList(operations.Conv2d(c, width, 3, padding=1) for c in self.channels)
        self.level = nn.ModuleList(
            nn.Sequential(*[_Block(width, operations) for _ in range(count)]) for count in config.blocks
        )

        below = [width, *config.rises]
        self.rise = nn.ModuleList(operations.Conv2d(c_in, 4 * c_out, 3, padding=1) for c_in, c_out in pairwise(below))
        self.widen = operations.Conv2d(below[-1], 4 * fine, 3, padding=1)
        self.smooth = operations.Conv2d(fine, fine, 3, padding=1)
        self.paint = operations.Conv2d(fine, 12, 3, padding=1)

    def forward(self, features: Sequence[Tensor], image: Tensor | None) -> Tensor:
        """Images [B, 3, 4 H, 4 W] from the decoder's features.

        Args:
            features: features of the levels that the part reads, [B, channels, h, w], each twice as high and as wide as
                the features before.
            image: the decoder's image, [B, 3, H, W], if the part reads all levels; else None.
        """
        x = self._climb(features)
        for rise in self.rise:
            x = F.pixel_shuffle(rise(silu(x)), 2)

        fine = F.pixel_shuffle(self.widen(silu(x)), 2)
        fine = silu(fine)
        fine = silu(self.smooth(fine)).add_(fine)
        painted = F.pixel_shuffle(self.paint(fine), 2)
        if image is None:
            return painted
        return painted.add_(F.interpolate(image, scale_factor=FACTOR, mode="bilinear"))

    def live_values(self, pixels: int) -> int:
        """Upper estimate of how many numbers the part has in memory at once for an image, besides the decoder's
        numbers.

        ``pixels``: number of pixels of the decoder's image.
        """
        fine, rises = self.config.fine, self.config.rises
        channels = [self.config.width, *rises]
        # Positions of the highest level that is read, and of each level above.
        positions = [pixels >> 2 * i for i in reversed(range(len(channels)))]
        kept = sum(count * positions[0] >> 2 * i for i, count in enumerate(reversed(self.channels)))

        # Climbing needs four maps. A rise needs its input, and its output twice.
        climbing = 4 * channels[0] * positions[0]
        rising = [(below + 8 * own) * at for (below, own), at in zip(pairwise(channels), positions, strict=False)]

        # Painting needs the last map, the map after the first shuffle, and another map of its size or two images.
        painting = (channels[-1] + 4 * fine + max(4 * fine, 2 * 3 * FACTOR**2)) * pixels
        return kept + max(climbing, painting, *rising)

    def _climb(self, features: Sequence[Tensor]) -> Tensor:
        """Combine the features, from the lowest resolution to the highest that is read."""
        x: Tensor | None = None
        for level, read, blocks in zip(features, self.read, self.level, strict=True):
            own = read(level)
            x = own if x is None else own.add_(F.interpolate(x, scale_factor=2.0))
            x = blocks(x)

        assert x is not None, "a part reads a level"
        return x


def drawn(net: Any, latents: Tensor) -> Tensor:
    """Decode ``latents``, in the form that the autoencoder's decoder reads. The images are larger if it has the part
    that enlarges.
    """
    if net.config.enlarging is None:
        return net.decoder(latents)

    return net.enlarge(*read_levels(net, latents))


def read_levels(net: Any, latents: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """What the part reads: features of the decoder's levels, and the decoder's image if the part reads all levels."""
    # On a CPU this takes an eighth less time with the channels last.
    latents = latents.contiguous(memory_format=torch.channels_last)

    features: list[Tensor] = []
    highest = net.decoder.climb(latents, features, net.config.top)
    return features, None if net.config.top else net.decoder.conv_out(highest)


def said(name: str, config: MayEnlarge) -> str:
    """The display name of an autoencoder, with what its file adds to it."""
    return f"{name}, enlarges {config.enlarges} x" if config.enlarging else name
