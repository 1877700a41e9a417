"""A learned latent up-sampler: a grid of code vectors to one of twice the side, without decoding to pixels.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (arXiv 2601.05149), the latent variant of U_r: masked
row-causal convolutions and pixel-shuffle. The paper does not list the layers; these are chosen here. *Row-causal*: an output
row depends on its own input row and the rows above only, so that rows below may be added later without changing it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .structure import depth

EPS = 1e-6


@dataclass(frozen=True)
class UpSamplerConfig:
    """Shape of an up-sampler.

    Attributes:
        channels: channels of a code vector.
        width: channels of the hidden layers.
        blocks: residual blocks.
    """

    channels: int
    width: int
    blocks: int

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor]) -> UpSamplerConfig:
        """Derive the shape from the parameter names.

        Raises:
            KeyError: the state dict is not one of an up-sampler.
        """
        width, channels = state["enter.weight"].shape[:2]
        return UpSamplerConfig(channels, width, depth(state, "blocks."))


class RowConv(nn.Conv2d):
    """3 x 3 convolution without the lowest kernel row, so that an output row does not depend on the rows below."""

    def __init__(self, c_in: int, c_out: int):
        super().__init__(c_in, c_out, (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 0)))


class ChannelNorm(nn.Module):
    """Root-mean-square norm over the channels of each position; a norm over positions would not be row-causal."""

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
    """Code vectors to those of twice the side: nearest-neighbour repetition plus a learned correction."""

    def __init__(self, config: UpSamplerConfig):
        super().__init__()
        self.config = c = config
        self.enter = RowConv(c.channels, c.width)
        self.blocks = nn.ModuleList(Block(c.width) for _ in range(c.blocks))
        self.spread = nn.Conv2d(c.width, 4 * c.width, 1)
        self.norm, self.leave = ChannelNorm(c.width), RowConv(c.width, c.channels)

    def forward(self, x: Tensor) -> Tensor:
        """Unit code vectors [B, channels, h, w] to unit vectors [B, channels, 2 h, 2 w], not yet replaced by codes."""
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        h = F.pixel_shuffle(self.spread(h), 2)
        out = F.interpolate(x, scale_factor=2, mode="nearest") + self.leave(F.silu(self.norm(h)))
        return F.normalize(out.float(), dim=1)

    def enlarge(self, x: Tensor, factor: int) -> Tensor:
        """Repeat :meth:`forward` to enlarge by ``factor``, a power of two."""
        for _ in range(round(math.log2(factor))):
            x = self(x.to(self.enter.weight.dtype))
        return x


def initialise(net: UpSampler) -> UpSampler:
    """torch's default initialisation and a last layer of zeros, so that the network starts as nearest-neighbour repetition."""
    nn.init.zeros_(net.leave.weight)
    nn.init.zeros_(net.leave.bias)  # type: ignore[arg-type]
    return net


@dataclass(frozen=True, eq=False)
class UpSamplerModel:
    """An up-sampler in eval mode and its name."""

    net: UpSampler
    name: str
