"""KL autoencoder with the official parameter names (AutoencoderKL of latent diffusion; MAR uses KL-16).

Width, depth and down-sampling factor are derived from the state dict; the number of GroupNorm groups is not stored in it.
Sources: Rombach et al. 2022 (latent diffusion, arXiv 2112.10752); Li et al. 2024 (MAR, arXiv 2406.11838) for KL-16, whose
decoder has attention only in the middle block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import strips
from .structure import MOST_LEVELS, depth

# Pixels of a picture above which it is decoded in strips; 512 x 512 is decoded whole.
WHOLE = 1 << 19


@dataclass(frozen=True)
class KLConfig:
    """Shape of a KL autoencoder.

    Attributes:
        ch: channels at full resolution.
        ch_mult: multiple of ``ch`` at every level; the stride is ``2 ** (len(ch_mult) - 1)``.
        blocks: residual blocks per level of the encoder (the decoder has one more).
        z_channels: latent channels.
        encoder_attention, decoder_attention: levels (0 = full resolution) whose blocks are followed by attention.
        groups: GroupNorm groups; 32 in the official model.
    """

    ch: int
    ch_mult: tuple[int, ...]
    blocks: int
    z_channels: int
    encoder_attention: frozenset[int] = frozenset()
    decoder_attention: frozenset[int] = frozenset()
    groups: int = 32

    @property
    def stride(self) -> int:
        """Pixels per latent position and side."""
        return 2 ** (len(self.ch_mult) - 1)

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], groups: int = 32) -> KLConfig:
        """Derive the shape from the official parameter names.

        Raises:
            KeyError: a parameter of a KL autoencoder is missing.
            ValueError: the levels or blocks are not numbered from 0 without gaps, or more than 16.
        """
        ch = state["encoder.conv_in.weight"].shape[0]
        levels = depth(state, "encoder.down.", MOST_LEVELS)
        mult = tuple(state[f"encoder.down.{i}.block.0.norm2.weight"].shape[0] // ch for i in range(levels))
        blocks = depth(state, "encoder.down.0.block.", MOST_LEVELS)

        def attention(side: str) -> frozenset[int]:
            return frozenset(i for i in range(levels) if f"{side}.{i}.attn.0.q.weight" in state)

        return KLConfig(
            ch,
            mult,
            blocks,
            state["post_quant_conv.weight"].shape[1],
            attention("encoder.down"),
            attention("decoder.up"),
            groups,
        )


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """GroupNorm with the epsilon of latent diffusion, 1e-6."""
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResBlock(nn.Module):
    """Residual block of two GroupNorm, SiLU, 3x3 convolution; a 1x1 convolution on the skip path if the width changes."""

    def __init__(self, c_in: int, c_out: int, groups: int):
        super().__init__()
        self.norm1, self.conv1 = group_norm(c_in, groups), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2, self.conv2 = group_norm(c_out, groups), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.nin_shortcut(x) + h


class Attention(nn.Module):
    """Single-head self-attention over positions with a residual connection; projections are 1x1 convolutions."""

    def __init__(self, c: int, groups: int):
        super().__init__()
        self.norm = group_norm(c, groups)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(c, c, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).flatten(2).transpose(1, 2)[:, None] for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.proj_out(h.transpose(1, 2).reshape(x.shape))


class Down(nn.Module):
    """Down-sampling by 2: a 3x3 convolution of stride 2."""

    def __init__(self, c: int):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # asymmetric padding, as in latent diffusion


class Up(nn.Module):
    """Up-sampling by 2: nearest neighbour, then a 3x3 convolution."""

    def __init__(self, c: int):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class _Level(nn.Module):
    """One resolution: residual blocks, each with optional attention. The parent adds the resampling module."""

    def __init__(self, c_in: int, c_out: int, blocks: int, attention: bool, groups: int):
        super().__init__()
        self.block = nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out, groups) for i in range(blocks))
        self.attn = nn.ModuleList(Attention(c_out, groups) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        return x


class _Mid(nn.Module):
    def __init__(self, c: int, groups: int):
        super().__init__()
        self.block_1, self.attn_1, self.block_2 = ResBlock(c, c, groups), Attention(c, groups), ResBlock(c, c, groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Images [B, 3, H, W] to features [B, out_channels, H / stride, W / stride]."""

    def __init__(self, c: KLConfig, out_channels: int):
        super().__init__()
        self.conv_in = nn.Conv2d(3, c.ch, 3, padding=1)
        widths = [c.ch * m for m in c.ch_mult]
        self.down = nn.ModuleList()
        for i, (a, b) in enumerate(zip([c.ch, *widths], widths, strict=False)):
            level = _Level(a, b, c.blocks, i in c.encoder_attention, c.groups)
            level.downsample = Down(b) if i + 1 < len(widths) else nn.Identity()
            self.down.append(level)
        self.mid = _Mid(widths[-1], c.groups)
        self.norm_out, self.conv_out = (
            group_norm(widths[-1], c.groups),
            nn.Conv2d(widths[-1], out_channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level.downsample(level(x))
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Latents [B, z, h, w] to images [B, 3, h * stride, w * stride]."""

    def __init__(self, c: KLConfig):
        super().__init__()
        widths = [c.ch * m for m in c.ch_mult]
        self.conv_in = nn.Conv2d(c.z_channels, widths[-1], 3, padding=1)
        self.mid = _Mid(widths[-1], c.groups)
        levels: list[nn.Module] = []
        above = widths[-1]
        for i in reversed(range(len(widths))):
            level = _Level(above, widths[i], c.blocks + 1, i in c.decoder_attention, c.groups)
            level.upsample = Up(widths[i]) if i else nn.Identity()
            levels.insert(0, level)
            above = widths[i]
        self.up = nn.ModuleList(levels)
        self.norm_out, self.conv_out = group_norm(widths[0], c.groups), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level.upsample(level(x))
        return self.conv_out(F.silu(self.norm_out(x)))


class KLAutoencoder(nn.Module):
    """Encoder and decoder between images in -1..1 and Gaussian latents (before any latent scale)."""

    def __init__(self, config: KLConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, 2 * config.z_channels)
        self.decoder = Decoder(config)
        self.quant_conv = nn.Conv2d(2 * config.z_channels, 2 * config.z_channels, 1)
        self.post_quant_conv = nn.Conv2d(config.z_channels, config.z_channels, 1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior of images.

        Args:
            x: [B, 3, H, W] in -1..1; H and W are multiples of the stride.

        Returns:
            mean and std, each [B, z_channels, H / stride, W / stride].
        """
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, dim=1)
        return mean, torch.exp(0.5 * logvar.clamp(-30, 20))

    def decode(self, z: Tensor) -> Tensor:
        """Images [B, 3, H, W] in about -1..1, not clipped, from latents [B, z_channels, h, w].

        Large pictures are decoded one by one in strips (:mod:`.strips`) where no gradient is wanted: equal up to rounding, in less memory.
        """
        x = self.post_quant_conv(z)
        if self._large(*z.shape[2:]) and not torch.is_grad_enabled():
            return torch.cat([strips.decode(self.decoder, one) for one in x.split(1)])
        return self.decoder(x)

    def decode_bytes(self, batch: int, height: int, width: int) -> int:
        """Upper estimate of the memory of :meth:`decode` for latents of that size, without the weights."""
        size = self.post_quant_conv.weight.element_size()
        if self._large(height, width):
            pictures = 3 * batch * height * width * self.config.stride**2 * size
            return strips.decode_bytes(self.config, height, width, size) + 2 * pictures
        # As ComfyUI estimates it: activations of the full-resolution layers.
        return 17 * self.config.ch * batch * height * width * self.config.stride**2 * size

    def _large(self, height: int, width: int) -> bool:
        return height * width * self.config.stride**2 > WHOLE


@dataclass(frozen=True, eq=False)
class KLModel:
    """A KL autoencoder and its display name."""

    net: KLAutoencoder
    name: str
