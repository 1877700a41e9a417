"""A learned latent up-sampler: a small grid of code vectors to one of twice the side, without a detour through pixels.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (arXiv 2601.05149), the latent variant of U_r: masked
row-causal convolutions and pixel-shuffle. The paper lists no layers; these are ours. *Row-causal* means that a row depends
on itself and the rows above only, so that the rows of a picture that is still growing come out as they do in the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


@dataclass(frozen=True)
class UpSamplerConfig:
    """Shape of an up-sampler.

    Attributes:
        channels: length of a code vector.
        width: channels inside.
        blocks: residual blocks.
    """

    channels: int
    width: int
    blocks: int

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor]) -> UpSamplerConfig:
        """Read the shape off the parameter names.

        Raises:
            KeyError: the state dict is not an up-sampler's.
        """
        width, channels = state["enter.weight"].shape[:2]
        return UpSamplerConfig(channels, width, len({k.split(".")[1] for k in state if k.startswith("blocks.")}))


class RowConv(nn.Conv2d):
    """3 x 3 convolution without its lowest kernel row: what is below is not seen."""

    def __init__(self, c_in: int, c_out: int):
        super().__init__(c_in, c_out, (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 0)))


class ChannelNorm(nn.Module):
    """Root-mean-square norm over a position's channels; a norm over positions would let rows see those below."""

    def __init__(self, c: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x
            * (x.float().square().mean(1, keepdim=True) + EPS).rsqrt().type_as(x)
            * self.weight[:, None, None].type_as(x)
        )


class Block(nn.Module):
    """Residual block."""

    def __init__(self, c: int):
        super().__init__()
        self.norm1, self.conv1, self.norm2, self.conv2 = ChannelNorm(c), RowConv(c, c), ChannelNorm(c), RowConv(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class UpSampler(nn.Module):
    """Code vectors to those of twice the side, as a correction of plain repetition."""

    def __init__(self, config: UpSamplerConfig):
        super().__init__()
        self.config = c = config
        self.enter = RowConv(c.channels, c.width)
        self.blocks = nn.ModuleList(Block(c.width) for _ in range(c.blocks))
        self.spread = nn.Conv2d(c.width, 4 * c.width, 1)
        self.norm, self.leave = ChannelNorm(c.width), RowConv(c.width, c.channels)

    def forward(self, x: Tensor) -> Tensor:
        """Unit code vectors [B, channels, h, w] to unit vectors [B, channels, 2 h, 2 w], which are near codes but none yet."""
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        h = F.pixel_shuffle(self.spread(h), 2)
        out = F.interpolate(x, scale_factor=2, mode="nearest") + self.leave(F.silu(self.norm(h)))
        return F.normalize(out.float(), dim=1)

    def enlarge(self, x: Tensor, factor: int) -> Tensor:
        """The same by a power of two."""
        for _ in range(round(math.log2(factor))):
            x = self(x.to(self.enter.weight.dtype))
        return x


def initialise(net: UpSampler) -> UpSampler:
    """Begin with plain repetition: torch's own initialisation, and a last layer of zeros."""
    nn.init.zeros_(net.leave.weight)
    nn.init.zeros_(net.leave.bias)  # type: ignore[arg-type]
    return net


@dataclass(frozen=True, eq=False)
class UpSamplerModel:
    """An up-sampler together with its name; the network in eval mode."""

    net: UpSampler
    name: str
