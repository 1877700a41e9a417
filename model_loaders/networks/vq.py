"""The VQ tokenizer of LlamaGen (VQ-16, VQ-8 and any other size), with the official parameter names.

Source: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (LlamaGen, arXiv
2406.06525), after VQGAN (Esser et al. 2021). Codes are compared on the unit sphere: features and codebook are
L2-normalised wherever they are used, so that their stored lengths do not matter.

A LATENT of this family holds the normalised code vectors, [B, code channels, h, w]. :meth:`VQAutoencoder.decode` replaces
each vector by its nearest code, so that rounding does not change the image and edited vectors become valid codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kl import Attention, Down, ResBlock, Up, group_norm
from .structure import MOST_LEVELS, depth

# Buffer of the official files that inference does not use: the codes that training used last.
HISTORY = "quantize.codebook_used"
# Elements of one block of the similarity matrix of positions and codes: 64 MB in fp32.
_BLOCK = 1 << 24


@dataclass(frozen=True)
class VQConfig:
    """Shape of a VQ tokenizer.

    Attributes:
        ch: channels at full resolution.
        ch_mult: multiple of ``ch`` at every level; the stride is ``2 ** (len(ch_mult) - 1)``.
        blocks: residual blocks a level in the encoder (the decoder has one more).
        z_channels: channels between the networks and the two 1x1 convolutions around the codebook.
        codes: entries of the codebook.
        code_channels: channels of a code vector and of a LATENT; 8 officially.
        groups: GroupNorm groups; not in the state dict, 32 officially.
    """

    ch: int
    ch_mult: tuple[int, ...]
    blocks: int
    z_channels: int
    codes: int
    code_channels: int = 8
    groups: int = 32

    @property
    def stride(self) -> int:
        """Pixels a code covers, per side: 16 for VQ-16, 8 for VQ-8."""
        return 2 ** (len(self.ch_mult) - 1)

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], groups: int = 32) -> VQConfig:
        """Derive the shape from official parameter names.

        Raises:
            KeyError: the state dict is not one of this tokenizer.
            ValueError: a width is no multiple of the first.
        """
        ch = state["encoder.conv_in.weight"].shape[0]
        levels = depth(state, "encoder.conv_blocks.", MOST_LEVELS)
        widths = [state[f"encoder.conv_blocks.{i}.res.0.conv1.weight"].shape[0] for i in range(levels)]
        if ch < 1 or any(width % ch for width in widths):
            raise ValueError(f"widths {', '.join(map(str, widths))} are no multiples of {ch}")
        blocks = depth(state, "encoder.conv_blocks.0.res.", MOST_LEVELS)
        codes, code_channels = state["quantize.embedding.weight"].shape
        return VQConfig(
            ch,
            tuple(width // ch for width in widths),
            blocks,
            state["post_quant_conv.weight"].shape[0],
            codes,
            code_channels,
            groups,
        )


class _Level(nn.Module):
    """One resolution: residual blocks, each followed by attention if ``attention``. The parent may add a resampling module."""

    def __init__(self, c_in: int, c_out: int, blocks: int, attention: bool, groups: int):
        super().__init__()
        self.res = nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out, groups) for i in range(blocks))
        self.attn = nn.ModuleList(Attention(c_out, groups) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        return x


def _mid(c: int, groups: int) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(c, c, groups), Attention(c, groups), ResBlock(c, c, groups)])


class VQEncoder(nn.Module):
    """Images [B, 3, H, W] to features [B, z_channels, H / stride, W / stride]."""

    def __init__(self, c: VQConfig):
        super().__init__()
        widths = [c.ch * m for m in c.ch_mult]
        self.conv_in = nn.Conv2d(3, c.ch, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for i, (a, b) in enumerate(zip([c.ch, *widths], widths, strict=False)):
            deepest = i + 1 == len(widths)
            level = _Level(a, b, c.blocks, deepest, c.groups)
            level.downsample = nn.Identity() if deepest else Down(b)
            self.conv_blocks.append(level)
        self.mid = _mid(widths[-1], c.groups)
        self.norm_out = group_norm(widths[-1], c.groups)
        self.conv_out = nn.Conv2d(widths[-1], c.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.conv_blocks:
            x = level.downsample(level(x))
        for layer in self.mid:
            x = layer(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class VQDecoder(nn.Module):
    """Features [B, z_channels, h, w] to images [B, 3, h * stride, w * stride]. ``conv_blocks.0`` is the deepest level."""

    def __init__(self, c: VQConfig):
        super().__init__()
        widths = [c.ch * m for m in reversed(c.ch_mult)]
        self.conv_in = nn.Conv2d(c.z_channels, widths[0], 3, padding=1)
        self.mid = _mid(widths[0], c.groups)
        self.conv_blocks = nn.ModuleList()
        for i, (a, b) in enumerate(zip([widths[0], *widths], widths, strict=False)):
            level = _Level(a, b, c.blocks + 1, i == 0, c.groups)
            level.upsample = Up(b) if i + 1 < len(widths) else nn.Identity()
            self.conv_blocks.append(level)
        self.norm_out, self.conv_out = group_norm(widths[-1], c.groups), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for layer in self.mid:
            x = layer(x)
        for level in self.conv_blocks:
            x = level.upsample(level(x))
        return self.conv_out(F.silu(self.norm_out(x)))


class Codebook(nn.Module):
    """The codebook. Codes are looked up and compared as unit vectors in fp32."""

    def __init__(self, codes: int, channels: int):
        super().__init__()
        self.embedding = nn.Embedding(codes, channels)

    def unit(self) -> Tensor:
        """All code vectors at length 1, fp32 [codes, channels]."""
        return F.normalize(self.embedding.weight.float(), dim=-1)

    def nearest(self, features: Tensor) -> Tensor:
        """Nearest codes int64 [N], by cosine similarity, of features [N, channels]."""
        features, table = F.normalize(features.float(), dim=-1), self.unit().t()
        # For unit vectors the smallest distance is the largest dot product.
        rows = max(1, _BLOCK // table.shape[1])
        return torch.cat([(part @ table).argmax(1) for part in features.split(rows)])


class VQAutoencoder(nn.Module):
    """Images in -1..1 to a grid of codes and back, by way of code vectors."""

    def __init__(self, config: VQConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = VQEncoder(config), VQDecoder(config)
        self.quantize = Codebook(config.codes, config.code_channels)
        self.quant_conv = nn.Conv2d(config.z_channels, config.code_channels, 1)
        self.post_quant_conv = nn.Conv2d(config.code_channels, config.z_channels, 1)

    # --- codes and their vectors

    def vectors(self, codes: Tensor) -> Tensor:
        """Unit code vectors fp32 [B, code_channels, h, w], a LATENT, of codes int64 [B, h, w] in 0..codes - 1."""
        return F.embedding(codes, self.quantize.unit()).permute(0, 3, 1, 2).contiguous()

    def codes(self, vectors: Tensor) -> Tensor:
        """Nearest codes int64 [B, h, w], by cosine similarity, of vectors or features [B, code_channels, h, w]."""
        b, c, h, w = vectors.shape
        return self.quantize.nearest(vectors.permute(0, 2, 3, 1).reshape(-1, c)).view(b, h, w)

    # --- encoding

    def features(self, x: Tensor) -> Tensor:
        """Features before quantisation, [B, code_channels, H / stride, W / stride], of images as in :meth:`encode`."""
        return self.quant_conv(self.encoder(x))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode images [B, 3, H, W] in -1..1, H and W multiples of the stride.

        Returns:
            Code vectors fp32 [B, code_channels, H / stride, W / stride] and codes int64 [B, H / stride, W / stride].
        """
        codes = self.codes(self.features(x))
        return self.vectors(codes), codes

    # --- decoding

    def render(self, vectors: Tensor) -> Tensor:
        """Images as in :meth:`decode`, of vectors without the look-up of the nearest codes."""
        return self.decoder(self.post_quant_conv(vectors.to(self.post_quant_conv.weight.dtype)))

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Images as in :meth:`decode`, of codes int64 [B, h, w]; any h and w."""
        return self.render(self.vectors(codes))

    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, h * stride, w * stride], about -1..1 and not clipped, of a LATENT [B, code_channels, h, w].

        Each vector is replaced by its nearest code, so that a LATENT rounded to half precision decodes to the same image.
        """
        return self.decode_codes(self.codes(latents))


@dataclass(frozen=True, eq=False)
class VQModel:
    """A VQ tokenizer and its name.

    Attributes:
        net: the network in eval mode; the codebook in fp32, the rest in the compute dtype.
        name: display name.
    """

    net: VQAutoencoder
    name: str
