"""The two image autoencoders, with the official parameter names: KL-16 of MAR and the VQ tokenizer of LlamaGen.

Sources: Rombach et al. 2022 (latent diffusion, arXiv 2112.10752) and Li et al. 2024 (MAR, arXiv 2406.11838) for KL-16,
whose decoder has attention only in the middle block; Sun et al. 2024 (LlamaGen, arXiv 2406.06525), after VQGAN (Esser
et al. 2021), for VQ-16 and VQ-8. Both have the same encoder and decoder; only the names differ.

A LATENT of the VQ tokenizer (the value of a ComfyUI socket) holds unit code vectors [B, code channels, h, w].
:meth:`VQAutoencoder.decode` replaces each vector by its nearest code. So rounding does not change the image, and edited
vectors become valid codes.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import NotOfImages, UserError, not_finite
from ..memory import enough_memory, in_chunks
from .enlarging import Enlarging, EnlargingConfig, MayEnlarge, drawn, silu
from .ops import TORCH, Operations
from .precision import is_finite
from .structure import MOST_LEVELS, depth, official_names
from .torch_state import in_own_state

# Buffer of the official VQ files that inference does not use: the codes that training used last.
HISTORY = "quantize.codebook_used"
# GroupNorm groups of the official files, which do not state this number. If a file without metadata, such as a file of
# ComfyUI's Save VAE, has a different number, a tensor of this name states it.
USUAL_GROUPS = 32
STATED_GROUPS = "fastar_groups"
# If an image has more pixels than this, the images of a batch are decoded one by one. 512 x 512 pixels are fewer.
WHOLE = 1 << 19
# The most images that one pass of the decoder decodes.
DECODE_BATCH = 8
TOO_LITTLE_TO_DECODE = "memory: there is not enough memory to decode even a single image; choose a different device."
# Elements of the similarity matrix of positions and codes that are computed at once: 64 MiB in fp32.
_BLOCK = 1 << 24


@dataclass(frozen=True)
class _Shape(MayEnlarge):
    """What the shapes of both autoencoders have in common."""

    ch: int  # channels at full resolution
    ch_mult: tuple[int, ...]  # multiple of ch at every level
    blocks: int  # residual blocks per level of the encoder; the decoder has one more per level
    z_channels: int  # channels between the encoder or decoder and the 1x1 convolutions; for KL, channels of a latent

    @property
    def stride(self) -> int:
        """Pixels along each side of a latent position or code, in an image that is encoded: 16 for KL-16 and VQ-16, 8
        for VQ-8.
        """
        return 2 ** (len(self.ch_mult) - 1)

    @property
    def widths(self) -> list[int]:
        """Channels of every level."""
        return [self.ch * m for m in self.ch_mult]


@dataclass(frozen=True)
class KLConfig(_Shape):
    """Shape of a KL autoencoder."""

    encoder_attention: frozenset[int] = frozenset()  # levels (0 = full resolution) with attention after each block
    decoder_attention: frozenset[int] = frozenset()
    groups: int = 32  # GroupNorm groups, which no weight states
    enlarging: EnlargingConfig | None = None  # shape of the part that makes larger images; no official file has it
    # Whether 1x1 convolutions stand between encoder and latents, and between latents and decoder; Flux's form has none.
    mixes: bool = True

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], groups: int = 32) -> KLConfig:
        """Derive the shape from the official parameter names; without 1x1 convolutions, ``mixes`` is False.

        Raises:
            KeyError, ValueError: if the names or shapes are not those of a KL autoencoder.
        """
        ch = state["encoder.conv_in.weight"].shape[0]
        levels = depth(state, "encoder.down.", MOST_LEVELS)
        widths = [state[f"encoder.down.{i}.block.0.norm2.weight"].shape[0] for i in range(levels)]
        mixes = "post_quant_conv.weight" in state

        return KLConfig(
            ch=ch,
            ch_mult=tuple(width // ch for width in widths),
            blocks=depth(state, "encoder.down.0.block.", MOST_LEVELS),
            z_channels=state["post_quant_conv.weight" if mixes else "decoder.conv_in.weight"].shape[1],
            encoder_attention=frozenset(i for i in range(levels) if f"encoder.down.{i}.attn.0.q.weight" in state),
            decoder_attention=frozenset(i for i in range(levels) if f"decoder.up.{i}.attn.0.q.weight" in state),
            groups=groups,
            enlarging=EnlargingConfig.from_state_dict(state, levels),
            mixes=mixes,
        )


@dataclass(frozen=True)
class VQConfig(_Shape):
    """Shape of a VQ tokenizer."""

    codes: int  # entries of the codebook
    code_channels: int = 8  # channels of a code vector and of a LATENT; 8 officially
    groups: int = 32  # GroupNorm groups
    enlarging: EnlargingConfig | None = None  # as for a KL autoencoder

    @property
    def encoder_attention(self) -> frozenset[int]:
        """Levels with attention: the lowest resolution."""
        return frozenset((len(self.ch_mult) - 1,))

    decoder_attention = encoder_attention

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], groups: int = 32) -> VQConfig:
        """Derive the shape from official parameter names.

        Raises:
            KeyError, ValueError: if the names or shapes are not those of a VQ tokenizer.
        """
        ch = state["encoder.conv_in.weight"].shape[0]
        levels = depth(state, "encoder.conv_blocks.", MOST_LEVELS)
        widths = [state[f"encoder.conv_blocks.{i}.res.0.conv1.weight"].shape[0] for i in range(levels)]
        if ch < 1 or any(width % ch for width in widths):
            raise ValueError(f"not all of the widths {', '.join(map(str, widths))} are multiples of {ch}")

        codes, code_channels = state["quantize.embedding.weight"].shape
        return VQConfig(
            ch=ch,
            ch_mult=tuple(width // ch for width in widths),
            blocks=depth(state, "encoder.conv_blocks.0.res.", MOST_LEVELS),
            z_channels=state["post_quant_conv.weight"].shape[0],
            codes=codes,
            code_channels=code_channels,
            groups=groups,
            enlarging=EnlargingConfig.from_state_dict(state, levels),
        )


Config = KLConfig | VQConfig


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """The GroupNorm of these autoencoders."""
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResBlock(nn.Module):
    """Residual block: twice GroupNorm, SiLU and a 3x3 convolution.

    If the width changes, a 1x1 convolution is on the skip path.
    """

    def __init__(self, c_in: int, c_out: int, groups: int, operations: Operations, bias: bool = True):
        super().__init__()
        self.norm1 = group_norm(c_in, groups)
        self.conv1 = operations.Conv2d(c_in, c_out, 3, padding=1, bias=bias)
        self.norm2 = group_norm(c_out, groups)
        self.conv2 = operations.Conv2d(c_out, c_out, 3, padding=1, bias=bias)
        self.nin_shortcut = operations.Conv2d(c_in, c_out, 1, bias=bias) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(silu(self.norm1(x)))
        h = self.conv2(silu(self.norm2(h)))
        return h.add_(self.nin_shortcut(x))


class _Attention(nn.Module):
    """Single-head self-attention over positions with a residual connection; projections are 1x1 convolutions."""

    def __init__(self, c: int, groups: int, operations: Operations):
        super().__init__()
        self.norm = group_norm(c, groups)
        self.q = operations.Conv2d(c, c, 1)
        self.k = operations.Conv2d(c, c, 1)
        self.v = operations.Conv2d(c, c, 1)
        self.proj_out = operations.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = _rows(self.q(h))
        k = _rows(self.k(h))
        v = _rows(self.v(h))

        h = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.proj_out(h.transpose(1, 2).reshape(x.shape))


def _rows(maps: Tensor) -> Tensor:
    """Feature maps [B, c, h, w] as rows of one attention head, [B, 1, h * w, c]."""
    return maps.flatten(2).transpose(1, 2)[:, None]


class _Level(nn.Module):
    """One resolution: residual blocks, each with optional attention. The parent adds the resampling module."""

    def __init__(self, c_in: int, c_out: int, blocks: int, attention: bool, groups: int, operations: Operations):
        super().__init__()
        widths = [c_in, *[c_out] * blocks]
        self.block = nn.ModuleList(ResBlock(widths[i], c_out, groups, operations) for i in range(blocks))
        self.attn = nn.ModuleList(_Attention(c_out, groups, operations) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)

        return x


def _mid(c: int, groups: int, operations: Operations) -> nn.Sequential:
    """The part at the lowest resolution."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["block_1"] = ResBlock(c, c, groups, operations)
    parts["attn_1"] = _Attention(c, groups, operations)
    parts["block_2"] = ResBlock(c, c, groups, operations)
    return nn.Sequential(parts)


class _Encoder(nn.Module):
    """Images [B, 3, H, W] to features [B, out_channels, H / stride, W / stride]."""

    def __init__(self, c: Config, out_channels: int, operations: Operations):
        super().__init__()
        widths = c.widths
        self.conv_in = operations.Conv2d(3, c.ch, 3, padding=1)

        self.down = nn.ModuleList()
        for i, (before, width) in enumerate(zip([c.ch, *widths], widths, strict=False)):
            level = _Level(before, width, c.blocks, i in c.encoder_attention, c.groups, operations)
            level.downsample = nn.Identity()
            if i + 1 < len(widths):  # padded at the right and at the bottom only
                half = operations.Conv2d(width, width, 3, stride=2)
                level.downsample = nn.Sequential(OrderedDict(pad=nn.ZeroPad2d((0, 1, 0, 1)), conv=half))
            self.down.append(level)

        self.mid = _mid(widths[-1], c.groups, operations)
        self.norm_out = group_norm(widths[-1], c.groups)
        self.conv_out = operations.Conv2d(widths[-1], out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level.downsample(level(x))

        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class _Decoder(nn.Module):
    """Latents [B, z, h, w] to images [B, 3, h * stride, w * stride]; ``up.0`` is the full resolution."""

    def __init__(self, c: Config, operations: Operations):
        super().__init__()
        widths = c.widths
        self.conv_in = operations.Conv2d(c.z_channels, widths[-1], 3, padding=1)
        self.mid = _mid(widths[-1], c.groups, operations)

        self.up = nn.ModuleList()
        for i, (below, width) in enumerate(zip([*widths[1:], widths[-1]], widths, strict=True)):
            level = _Level(below, width, c.blocks + 1, i in c.decoder_attention, c.groups, operations)
            level.upsample = nn.Identity()
            if i:
                smooth = operations.Conv2d(width, width, 3, padding=1)
                level.upsample = nn.Sequential(OrderedDict(enlarge=nn.Upsample(scale_factor=2.0), conv=smooth))
            self.up.append(level)

        self.norm_out = group_norm(widths[0], c.groups)
        self.conv_out = operations.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        return self.conv_out(self.climb(z))

    def climb(self, z: Tensor, features: list[Tensor] | None = None, top: int = 0) -> Tensor:
        """The features of a level, as :func:`climbed` returns them."""
        return climbed(self, self.mid(self.conv_in(z)), features, top)


def climbed(
    decoder: Any,
    x: Tensor,
    features: list[Tensor] | None,
    top: int,
    enter: Callable[[int, Tensor], Tensor] = lambda level, x: x,
) -> Tensor:
    """The features of level ``top`` of a decoder. ``conv_out`` makes an image from the features of level 0, the full
    resolution.

    Args:
        decoder: has the levels ``up``, the highest resolution first, and ``norm_out``, which ends level 0.
        x: the input of the lowest resolution's level.
        features: a list to which the features of every computed level are appended, the lowest resolution first; None:
            they are not kept.
        top: the last level to compute.
        enter: returns the input of a level. Its arguments are the level's number and the output of the level below.
    """
    for i in reversed(range(top, len(decoder.up))):
        x = decoder.up[i](enter(i, x))
        if i == 0:
            x = silu(decoder.norm_out(x))
        if features is not None:
            features.append(x)
        if i > top:
            x = decoder.up[i].upsample(x)

    return x


class ImageAutoencoder(nn.Module):
    """An autoencoder of images."""

    def __getattr__(self, name: str) -> Any:
        """Raise an error with a readable message for a missing attribute, because ComfyUI's nodes for sounds and meshes
        look for attributes that an autoencoder of images does not have.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise NotOfImages(name) from None


class LatentAutoencoder(ImageAutoencoder):
    """An autoencoder without a codebook: its latents are numbers or bits. It decodes large images one by one."""

    config: Any  # has the ``widths`` of its levels, as KLConfig

    def _drawn(self, x: Tensor) -> Tensor:
        """Decode x, in the form that the decoder reads, [B, C, h, w]: images [B, 3, h * output_stride, w *
        output_stride].
        """
        one_by_one = self._large(*x.shape[2:])
        return torch.cat([drawn(self, part) for part in x.split(1 if one_by_one else len(x))])

    def decode_bytes(self, batch: int, height: int, width: int) -> int:
        """Upper estimate of the bytes that :meth:`decode` takes for latents of this size, without the weights."""
        pixels = height * width * self.config.stride**2
        decoded_at_once = 1 if self._large(height, width) else batch

        # Five maps of the highest level are in memory at once. While a level is resampled, its maps have the channels
        # of the level below.
        top = self.config.top
        maps = 6 * max(w * pixels >> 2 * max(top, i - 1) for i, w in enumerate(self.config.widths) if i >= top)
        if self.config.enlarging:
            maps = max(maps, self.enlarge.live_values(pixels))
        element = self.decoder.conv_in.weight.element_size()
        return element * maps * decoded_at_once + 2 * batch * self.image_bytes(height, width)

    def image_bytes(self, height: int, width: int) -> int:
        """Bytes of one decoded image, for latents of this size."""
        element = self.decoder.conv_in.weight.element_size()
        return element * 3 * height * width * self.config.output_stride**2

    def _large(self, height: int, width: int) -> bool:
        """Whether images are decoded one by one, for latents of this size."""
        return height * width * self.config.output_stride**2 > WHOLE


class KLAutoencoder(LatentAutoencoder):
    """Encoder and decoder between images in -1..1 and Gaussian latents (before any latent scale)."""

    def __init__(self, config: KLConfig, operations: Operations = TORCH):
        super().__init__()
        self.config = config
        self.encoder = _Encoder(config, 2 * config.z_channels, operations)
        self.decoder = _Decoder(config, operations)
        if config.enlarging:
            self.enlarge = Enlarging(config.enlarging, config.widths, operations)
        self.quant_conv = nn.Identity()
        self.post_quant_conv = nn.Identity()
        if config.mixes:
            self.quant_conv = operations.Conv2d(2 * config.z_channels, 2 * config.z_channels, 1)
            self.post_quant_conv = operations.Conv2d(config.z_channels, config.z_channels, 1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std, each [B, z_channels, H / stride, W / stride], of images [B, 3, H, W] in -1..1."""
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, dim=1)
        return mean, torch.exp(0.5 * logvar.clamp(-30, 20))

    def decode(self, z: Tensor) -> Tensor:
        """Images [B, 3, h * output_stride, w * output_stride] in about -1..1, not clipped, from latents [B, z_channels,
        h, w].

        Large images are decoded one by one.
        """
        return self._drawn(self.post_quant_conv(z))


def expect_finite(made: Tensor, name: str, what: str = "pixels") -> Tensor:
    """Return ``made``, which the decoder or encoder of the file ``name`` computed, if all of its values are finite;
    else raise a UserError.

    Nodes, command line and Python call this function before they clamp or round the values, which would hide infinity
    and NaN. The host waits for the device.
    """
    if not is_finite(made):
        raise not_finite("decoder", name, what)

    return made


def decode_in_chunks(net: KLAutoencoder | VQAutoencoder, latents: Tensor) -> list[Tensor]:
    """Decode latents: images [b, 3, H, W] in about -1..1, as one tensor for every pass of the decoder.

    A pass decodes at most :func:`images_of_a_pass` images, and fewer if memory is insufficient.
    """
    weight = next(net.parameters())
    latents = latents.to(weight.device, weight.dtype)
    return in_chunks(net.decode, latents, images_of_a_pass(net), torch.cuda.empty_cache)


def images_of_a_pass(net: nn.Module) -> int:
    """The most images that a pass of the decoder of ``net`` decodes: eight.

    On a CPU it is one, which takes no longer than all images at once. With all at once, the last bits would depend on
    the size of the batch.
    """
    return 1 if next(net.parameters()).device.type == "cpu" else DECODE_BATCH


def to_pixels(parts: list[Tensor], name: str) -> Tensor:
    """Convert the images that the decoder ``name`` made to pixels, uint8 [B, H, W, 3] on the CPU. The tensors ``parts``
    are overwritten.
    """
    pixels = []
    for part in parts:
        images = expect_finite(part.float(), name).permute(0, 2, 3, 1)
        images.add_(1).mul_(127.5).round_().clamp_(0, 255)
        pixels.append(images.to(torch.uint8))

    return torch.cat(pixels).cpu()


def _expect_latents(latents: Tensor, channels: int) -> None:
    """Raise a UserError unless ``latents`` is a batch of finite latents with this many ``channels``."""
    if not isinstance(latents, Tensor) or latents.ndim != 4 or latents.shape[1] != channels or not latents.numel():
        shape = list(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
        raise UserError(
            f"latents: the decoder reads latents of the shape [batch, {channels}, height, width], but it got {shape}."
        )

    if not is_finite(latents):
        raise UserError("latents: some numbers are not finite (NaN or infinity); generate the latents again.")


@dataclass(frozen=True, eq=False)
class KLModel:
    """A KL autoencoder and its display name."""

    net: KLAutoencoder
    name: str

    encoded: ClassVar[str] = "latents"  # what its encoder computes, for messages

    @in_own_state
    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images uint8 [B, H, W, 3] on the CPU.

        Args:
            latents: [B, channels, h, w] on any device and of any float dtype, as the masked samplers return them.

        Raises:
            UserError: latents of another shape or not finite, pixels that are not finite, or insufficient memory.
        """
        with enough_memory(TOO_LITTLE_TO_DECODE):
            _expect_latents(latents, self.net.config.z_channels)
            return to_pixels(decode_in_chunks(self.net, latents), self.name)

    def encode(self, x: Tensor) -> Tensor:
        """Latents fp32 [B, channels, h, w] of images x, [B, 3, H, W] in -1..1, in the dtype and on the device of the
        network.

        Raises:
            UserError: what the encoder computed is not finite.
        """
        latents, other = self.net.encode(x)
        for made in (latents, other):
            expect_finite(made, self.name, self.encoded)
        return latents.float()


class Codebook(nn.Module):
    """The codebook. Codes are looked up and compared as unit vectors in fp32."""

    def __init__(self, codes: int, channels: int):
        super().__init__()
        self.embedding = nn.Embedding(codes, channels)
        # MuLo-SD's table of the nearest codes of every code, and before it the unit vectors that it was made for; None
        # before the first use. It is kept here, because it depends on the codebook and lives as long as the codebook.
        self.neighbours: tuple[Tensor, Tensor] | None = None

    def unit(self) -> Tensor:
        """All code vectors, scaled to length 1, fp32 [codes, channels]."""
        return F.normalize(self.embedding.weight.float(), dim=-1)

    def nearest(self, features: Tensor) -> Tensor:
        """Nearest codes int64 [N], by cosine similarity, of features [N, channels]."""
        features = F.normalize(features.float(), dim=-1)
        table = self.unit().t()

        rows = max(1, _BLOCK // table.shape[1])
        return torch.cat([(part @ table).argmax(1) for part in features.split(rows)])


class VQAutoencoder(ImageAutoencoder):
    """Images in -1..1 to a grid of codes and back, by way of code vectors."""

    def __init__(self, config: VQConfig, operations: Operations = TORCH):
        super().__init__()
        self.config = config
        self.encoder = _Encoder(config, config.z_channels, operations)
        self.decoder = _Decoder(config, operations)
        if config.enlarging:
            self.enlarge = Enlarging(config.enlarging, config.widths, operations)
        self.quantize = Codebook(config.codes, config.code_channels)
        self.quant_conv = operations.Conv2d(config.z_channels, config.code_channels, 1)
        self.post_quant_conv = operations.Conv2d(config.code_channels, config.z_channels, 1)
        official_names(self, self._official)

    def _official(self, name: str) -> str:
        """LlamaGen's name of a parameter; its decoder counts the levels from the lowest resolution."""

        deepest = len(self.config.ch_mult) - 1
        name = re.sub(r"decoder\.up\.(\d+)", lambda m: f"decoder.conv_blocks.{deepest - int(m[1])}", name)
        name = name.replace("encoder.down.", "encoder.conv_blocks.")
        name = re.sub(r"(conv_blocks\.\d+)\.block\.", r"\1.res.", name)

        name = name.replace("mid.block_1.", "mid.0.")
        name = name.replace("mid.attn_1.", "mid.1.")
        return name.replace("mid.block_2.", "mid.2.")

    def vectors(self, codes: Tensor) -> Tensor:
        """Unit code vectors (a LATENT), fp32 [B, code_channels, h, w], of codes, int64 [B, h, w] in 0..codes - 1."""
        return F.embedding(codes, self.quantize.unit()).permute(0, 3, 1, 2).contiguous()

    def codes(self, vectors: Tensor) -> Tensor:
        """Nearest codes int64 [B, h, w], by cosine similarity, of vectors or features [B, code_channels, h, w]."""
        b, c, h, w = vectors.shape
        return self.quantize.nearest(vectors.permute(0, 2, 3, 1).reshape(-1, c)).view(b, h, w)

    def features(self, x: Tensor) -> Tensor:
        """Features before quantisation, [B, code_channels, H / stride, W / stride], of images as in :meth:`encode`."""
        return self.quant_conv(self.encoder(x))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Code vectors fp32 [B, code_channels, h, w] and codes int64 [B, h, w] of images [B, 3, H, W] in -1..1."""
        codes = self.codes(self.features(x))
        return self.vectors(codes), codes

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Images [B, 3, h * stride, w * stride], in about -1..1 and not clipped, of codes int64 [B, h, w]; any h and w.

        They have the size that :meth:`encode` reads, even if :meth:`decode` makes larger images.
        """
        return self.decoder(self.decoder_input(codes))

    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, h * output_stride, w * output_stride], in about -1..1 and not clipped, of the codes nearest to
        the vectors of a LATENT [B, code_channels, h, w].
        """
        return drawn(self, self.decoder_input(self.codes(latents)))

    def decoder_input(self, codes: Tensor) -> Tensor:
        """What the decoder reads, [B, z_channels, h, w], of codes int64 [B, h, w]."""
        convolution = self.post_quant_conv
        return convolution(self.vectors(codes).to(convolution.weight.dtype))


@dataclass(frozen=True, eq=False)
class VQModel:
    """A VQ tokenizer in eval mode (codebook in fp32, the rest in the compute dtype) and its display name."""

    net: VQAutoencoder
    name: str

    @in_own_state
    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Images uint8 [B, H, W, 3] on the CPU.

        Args:
            codes: int64 [B, h, w] on any device, as the token samplers return them; or code vectors, float
                [B, channels, h, w], of which the nearest codes are decoded.

        Raises:
            UserError: codes of another shape or outside the codebook, vectors that are not finite, pixels that are not
                finite, or insufficient memory.
        """
        with enough_memory(TOO_LITTLE_TO_DECODE):
            return to_pixels(decode_in_chunks(self.net, self._vectors(codes)), self.name)

    def encode(self, x: Tensor) -> Tensor:
        """Codes int64 [B, h, w] of images x, [B, 3, H, W] in -1..1, in the dtype and on the device of the network.

        Raises:
            UserError: the features are not finite, which codes would hide.
        """
        return self.net.codes(expect_finite(self.net.features(x), self.name, "features"))

    def _vectors(self, codes: Tensor) -> Tensor:
        """Check codes or code vectors, and return code vectors: those of the codes, or the given ones."""
        if isinstance(codes, Tensor) and codes.is_floating_point():
            _expect_latents(codes, self.net.config.code_channels)
            return codes

        if not isinstance(codes, Tensor) or codes.ndim != 3 or not codes.numel():
            shape = list(codes.shape) if isinstance(codes, Tensor) else type(codes).__name__
            raise UserError(f"codes: the decoder reads codes of the shape [batch, height, width], but it got {shape}.")

        self.expect_entries(codes, "codes")
        return self.net.vectors(codes.to(self.net.quantize.embedding.weight.device, torch.int64))

    def expect_entries(self, codes: Tensor, field: str) -> None:
        """Check that codes int64 [B, h, w] are entries of the codebook.

        Raises:
            UserError: a code is not an entry; ``field`` is the input that the message names.
        """
        entries = self.net.config.codes
        if int(codes.min()) < 0 or int(codes.max()) >= entries:
            raise UserError(
                f"{field}: some codes are outside the range of {self.name}, which is 0 to {entries - 1}; give codes "
                "that belong to this decoder."
            )
