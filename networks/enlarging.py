"""A part of a decoder's file that draws images four times larger from the same latents.

It belongs to no official layout and is this project's own: a second path up the decoder's levels, which reads their
features, adds detail where there are few positions, and ends in two pixel shuffles (Shi et al. 2016, arXiv 1609.05158).
The rest of the file stays as it is.

A part that reads all levels draws over the decoder's own image, enlarged. One that reads only the lower ones, which is
faster, rises to the others by more shuffles and draws the whole image; the decoder does not compute its higher levels.

It adds in place where it can, which is faster on a CPU and takes less memory.
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

# Pixels of the larger image per pixel of the decoder's, and side.
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
        """Derive the shape from the weights of a decoder with that many levels; None if they have no such part.

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
    """What the shape of an autoencoder says about the sizes of its images, which are larger where it has the part."""

    enlarging: EnlargingConfig | None

    @property
    def stride(self) -> int:
        """Pixels per latent position and side of an image that is encoded."""
        raise NotImplementedError

    @property
    def enlarges(self) -> int:
        """How many times higher and wider an image is decoded than it was encoded: 1, or 4."""
        return FACTOR if self.enlarging else 1

    @property
    def top(self) -> int:
        """The highest level of the decoder that decoding computes: 0, the full resolution, or the highest that the part
        reads.
        """
        return len(self.enlarging.rises) if self.enlarging else 0

    @property
    def output_stride(self) -> int:
        """Pixels per latent position and side of an image that is decoded."""
        return self.stride * self.enlarges


def silu(x: Tensor) -> Tensor:
    """SiLU of a tensor that nothing else reads, in place outside of a training."""
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
    """The features of a decoder's levels to an image of four times the height and width of the decoder's.

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
        """Images [B, 3, 4 H, 4 W] of the decoder's features.

        Args:
            features: of the levels that the part reads, [B, channels, h, w], each of twice the size of the one before.
            image: the decoder's, [B, 3, H, W], if the part reads all levels; else None.
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
        """Upper estimate of the numbers that are alive at once beyond those of the decoder, of an image that the
        decoder draws with so many pixels.
        """
        fine, rises = self.config.fine, self.config.rises
        channels = [self.config.width, *rises]
        positions = [pixels >> 2 * i for i in reversed(range(len(channels)))]  # of the highest level read, and above
        kept = sum(count * positions[0] >> 2 * i for i, count in enumerate(reversed(self.channels)))

        # Four maps while it climbs; a rise has its input, and its output twice.
        climbing = 4 * channels[0] * positions[0]
        rising = [(below + 8 * own) * at for (below, own), at in zip(pairwise(channels), positions, strict=False)]

        # The last map and the first shuffle's, beside another as large or two images.
        painting = (channels[-1] + 4 * fine + max(4 * fine, 2 * 3 * FACTOR**2)) * pixels
        return kept + max(climbing, painting, *rising)

    def _climb(self, features: Sequence[Tensor]) -> Tensor:
        """From the lowest resolution to the highest that is read."""
        x: Tensor | None = None
        for level, read, blocks in zip(features, self.read, self.level, strict=True):
            own = read(level)
            x = own if x is None else own.add_(F.interpolate(x, scale_factor=2.0))
            x = blocks(x)

        assert x is not None, "a part reads a level"
        return x


def drawn(net: Any, latents: Tensor) -> Tensor:
    """Images of what the decoder of an autoencoder reads, larger ones if it has the part that enlarges."""
    if net.config.enlarging is None:
        return net.decoder(latents)

    return net.enlarge(*read_levels(net, latents))


def read_levels(net: Any, latents: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """What the part reads: features of the decoder's levels, and its image if it reads all of them."""
    # On a CPU this takes an eighth less time with the channels last.
    latents = latents.contiguous(memory_format=torch.channels_last)

    features: list[Tensor] = []
    highest = net.decoder.climb(latents, features, net.config.top)
    return features, None if net.config.top else net.decoder.conv_out(highest)


def said(name: str, config: MayEnlarge) -> str:
    """The display name of an autoencoder, with what its file adds to it."""
    return f"{name}, enlarges {config.enlarges} x" if config.enlarging else name
