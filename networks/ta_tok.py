"""TA-Tok, Tar's semantic tokenizer: images to codes, and codes to the features of the de-tokenizers.

Parameter names are the official ones.

Sources: Han et al. 2025, "Vision as a Dialect" (Tar, arXiv 2506.18898); Tschannen et al. 2025 (SigLIP 2, arXiv
2502.14786) for both vision transformers; Zhu et al. 2024 (SimVQ, arXiv 2411.02038) for the codebook, a learned
projection of a table, compared on the unit sphere.

Two parts of the official file are not used, see :func:`unused`: both attention-pool heads, and everything after the
second last layer of the image encoder, because the output of that layer is the feature map.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError, not_finite
from .ops import TORCH, Operations
from .precision import is_finite
from .siglip import HEADS, Tower
from .structure import depth
from .torch_state import in_own_state

TABLE = "bottleneck.regularizer.embedding.weight"
# Attention heads of the decoder transformer, which no state dict holds.
DECODER_HEADS = 12
_ENCODER = "encoder.encoder.layers."
_DECODER = "decoder.vision_model.encoder.layers."
_PATCH = "embeddings.patch_embedding.weight"
_POSITIONS = "embeddings.position_embedding.weight"
# Parameters that are used only to encode images.
ENCODING = ("encoder.", "encode_task_layer.", "bottleneck.in_linear.", "scale_layer.")
_POOLED = ("encoder.head.", "decoder.vision_model.head.")
_LAST = "encoder.post_layernorm."
# How many codes are projected at once: 25 MB in the official model.
_BLOCK = 4096


@dataclass(frozen=True)
class TATokConfig:
    """Shape of a TA-Tok. The numbers in the comments are the official model's."""

    width: int  # width C of both transformers and of a feature row; 1152
    code_width: int  # width of a code vector; 1536
    codes: int  # entries of the codebook; 65536
    depth: int  # layers of the decoder transformer; 3
    heads: int  # attention heads of the decoder transformer; 12
    hidden: int  # inner width of its MLPs; 3072
    places: int  # side of the decoder's position table, which is resized to any grid; 16
    encoder_depth: int = 0  # layers of the image encoder that are computed; 26. 0: no image encoder.
    encoder_heads: int = 0  # attention heads of the image encoder; 16
    encoder_hidden: int = 0  # inner width of its MLPs; 4304
    patch: int = 0  # pixels along a side of a patch; 14
    side: int = 0  # side of the finest grid of codes; 27. 0 without an image encoder.
    input_size: int = 0  # pixels per side that images are resized to; 384

    @staticmethod
    def from_state_dict(
        state: Mapping[str, Tensor],
        heads: int | None = None,
        encoder_heads: int | None = None,
        input_size: int | None = None,
    ) -> TATokConfig:
        """Derive the shape from official parameter names.

        There is no image encoder if no name starts with ``encoder.``.

        Args:
            state: weights by name.
            heads: attention heads of the decoder transformer; None: 12.
            encoder_heads: attention heads of the image encoder; None: the official number for its width.
            input_size: pixels along a side of an image; None: 384 for the official encoder, else the pixels that the
                patches cover.

        Raises:
            KeyError, ValueError: the weights are not those of a TA-Tok, or the arguments do not fit.
        """
        codes, code_width = state[TABLE].shape
        width = state[f"decoder.vision_model.{_PATCH}"].shape[0]
        heads = heads or DECODER_HEADS
        if heads < 1 or width % heads:
            raise ValueError(f"{heads} attention heads do not fit the width {width}")

        rows = state[f"decoder.vision_model.{_POSITIONS}"].shape[0]
        places = math.isqrt(rows)
        if places < 1 or places**2 != rows:
            raise ValueError(f"{rows} positions are not a square grid")

        decoder = TATokConfig(
            width=width,
            code_width=code_width,
            codes=codes,
            depth=depth(state, _DECODER),
            heads=heads,
            hidden=state[f"{_DECODER}0.mlp.fc1.weight"].shape[0],
            places=places,
        )
        if not any(name.startswith("encoder.") for name in state):
            return decoder
        return decoder._with_encoder(state, encoder_heads, input_size)

    def _with_encoder(self, state: Mapping[str, Tensor], heads: int | None, input_size: int | None) -> TATokConfig:
        """This shape with the shape of the image encoder added, see :meth:`from_state_dict`."""
        patch = state[f"encoder.{_PATCH}"].shape[-1]
        rows = state[f"encoder.{_POSITIONS}"].shape[0]
        side = math.isqrt(rows)
        input_size = input_size or (384 if (patch, side) == (14, 27) else patch * side)
        if side < 1 or side**2 != rows or patch < 1 or input_size // patch != side:
            raise ValueError(f"{rows} positions of {patch} pixels do not fit images of {input_size}")

        heads = heads or HEADS.get(self.width, self.width // 64)
        if heads < 1 or self.width % heads:
            raise ValueError(
                f"{heads} attention heads of the encoder do not fit the width {self.width}; "
                "its metadata may lack an entry encoder_heads"
            )

        # The official file holds the whole encoder, whose last layer is unused; a file saved from this network lacks
        # it.
        holds_last = any(name.startswith(_LAST) for name in state)
        return replace(
            self,
            encoder_depth=depth(state, _ENCODER) - holds_last,
            encoder_heads=heads,
            encoder_hidden=state[f"{_ENCODER}0.mlp.fc1.weight"].shape[0],
            patch=patch,
            side=side,
            input_size=input_size,
        )


def unused(state: Mapping[str, object]) -> set[str]:
    """Names of an official file that are not used."""
    out = {name for name in state if name.startswith((*_POOLED, _LAST, "teacher"))}
    if any(name.startswith(_LAST) for name in state):
        layers = {name.removeprefix(_ENCODER).split(".")[0] for name in state if name.startswith(_ENCODER)}
        last = max((int(n) for n in layers if n.isdecimal()), default=-1)
        out |= {name for name in state if name.startswith(f"{_ENCODER}{last}.")}

    return out


class SimVQ(nn.Module):
    """The codebook: rows of a table, projected and normalised.

    It computes in fp32, so that rounding does not change which code is nearest.
    """

    def __init__(self, codes: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        self.embedding_proj = nn.Linear(width, width)

    def unit(self, rows: Tensor) -> Tensor:
        """Unit vectors fp32 [..., width] of rows [..., width] of the table."""
        weight = self.embedding_proj.weight.float()
        bias = self.embedding_proj.bias.float()
        return F.normalize(F.linear(rows.float(), weight, bias), dim=-1)

    def vectors(self, codes: Tensor) -> Tensor:
        """Unit vectors fp32 [..., width] of codes int64 [...]."""
        return self.unit(self.embedding(codes))

    def nearest(self, x: Tensor) -> Tensor:
        """Nearest codes int64 [...], by cosine similarity, of vectors [..., width]."""
        flat = F.normalize(x.float().flatten(0, -2), dim=-1)
        best = flat.new_full((len(flat),), -torch.inf)
        code = flat.new_zeros(len(flat), dtype=torch.int64)
        for start in range(0, self.embedding.num_embeddings, _BLOCK):
            table = self.unit(self.embedding.weight[start : start + _BLOCK])
            similarity, at = (flat @ table.T).max(-1)
            code = torch.where(similarity > best, at + start, code)  # of equally near codes, the first
            best = torch.maximum(best, similarity)

        return code.view(x.shape[:-1])


class Bottleneck(nn.Module):
    """Features to codes, and codes to the input of the decoder transformer."""

    def __init__(self, width: int, code_width: int, codes: int, encoding: bool):
        super().__init__()
        if encoding:
            self.in_linear = nn.Linear(width, code_width)
        self.out_linear = nn.Linear(code_width, code_width)
        self.regularizer = SimVQ(codes, code_width)

    def codes(self, x: Tensor) -> Tensor:
        """Nearest codes int64 [B, n] of features [B, n, width]; deterministic."""
        return self.regularizer.nearest(self.in_linear(x))

    def decode(self, codes: Tensor) -> Tensor:
        """The decoder transformer's input, [B, n, code width], for codes int64 [B, n]."""
        vectors = self.regularizer.vectors(codes)
        return self.out_linear(vectors.to(self.out_linear.weight.dtype))


class TATok(nn.Module):
    """The tokenizer."""

    def __init__(self, config: TATokConfig, operations: Operations = TORCH):
        super().__init__()
        c = self.config = config
        if c.encoder_depth:
            self.encoder = Tower(
                patches=nn.Conv2d(3, c.width, c.patch, stride=c.patch),
                positions=c.side**2,
                width=c.width,
                depth=c.encoder_depth,
                heads=c.encoder_heads,
                hidden=c.encoder_hidden,
                norm=False,
                gelu="tanh",
                operations=operations,
            )
            self.encode_task_layer = nn.Sequential(nn.Linear(c.width, c.width), nn.Tanh())
            self.scale_layer = nn.Module()
            for name in ("shift", "scale"):
                self.scale_layer.register_buffer(name, torch.full((1, 3, 1, 1), 0.5))

        tower = Tower(
            patches=nn.Linear(c.code_width, c.width),
            positions=c.places**2,
            width=c.width,
            depth=c.depth,
            heads=c.heads,
            hidden=c.hidden,
            norm=True,
            gelu="tanh",
            operations=operations,
        )
        self.decoder = nn.ModuleDict({"vision_model": tower})
        self.decode_task_layer = nn.Sequential(nn.Linear(c.width, c.width), nn.Tanh(), nn.Linear(c.width, c.width))
        self.bottleneck = Bottleneck(c.width, c.code_width, c.codes, bool(c.encoder_depth))

    def encode(self, images: Tensor) -> Tensor:
        """The image encoder's features, [B, side * side, C], before pooling; images as in :meth:`codes`."""
        x = (images.float() - self.scale_layer.shift.float()) / self.scale_layer.scale.float()
        size = self.config.input_size
        if x.shape[-2:] != (size, size):
            x = F.interpolate(x, (size, size), mode="bilinear", antialias=True)

        return self.encoder.run(self.encoder.embed(x))

    def pooled(self, images: Tensor, pool: int = 1) -> Tensor:
        """Features before quantisation [B, n, C]; arguments as in :meth:`codes`."""
        x = self.encode(images)
        side = self.config.side
        if pool > 1:  # the remainder at the right and at the bottom is dropped
            grid = x.transpose(1, 2).unflatten(2, (side, side))
            x = F.avg_pool2d(grid, pool).flatten(2).transpose(1, 2)

        return self.encode_task_layer(x)

    def codes(self, images: Tensor, pool: int = 1) -> Tensor:
        """Codes int64 [B, n], in raster order, of images [B, 3, H, W] in 0..1, which are resized to a square.

        Officially n is 729, 169 or 81 for ``pool`` 1, 2 or 3.
        """
        return self.bottleneck.codes(self.pooled(images, pool))

    def features(self, codes: Tensor) -> Tensor:
        """Features [B, n, C] of codes int64 [B, n]; n is a square number."""
        return self.finish(self.bottleneck.decode(codes))

    def finish(self, x: Tensor) -> Tensor:
        """Features [B, n, C] from the bottleneck's output x, [B, n, code width]."""
        tower = self.decoder.vision_model
        parts = tower.embeddings
        places = self.config.places
        side = math.isqrt(x.shape[1])

        table = parts.position_embedding.weight.float().T.view(1, -1, places, places)
        table = F.interpolate(table, (side, side), mode="bilinear", antialias=True).flatten(2).transpose(1, 2)
        return self.decode_task_layer(tower.run(parts.patch_embedding(x) + table.to(x.dtype)))


@dataclass(frozen=True, eq=False)
class TATokModel:
    """A TA-Tok and its name."""

    net: TATok  # the network in eval mode
    name: str

    @in_own_state
    @torch.no_grad()
    def codes(self, images: Tensor, pool: int = 1) -> Tensor:
        """See :meth:`TATok.codes`. Images may be on any device; the codes are on the network's.

        Raises:
            UserError: without an image encoder.
        """
        c = self.net.config
        if not c.encoder_depth:
            raise UserError(
                f"ta_tok: the file {self.name} holds only the part that reads codes, but no image encoder; load a "
                "complete TA-Tok."
            )
        assert images.ndim == 4 and images.shape[1] == 3, "images of 3 channels"
        assert 1 <= pool <= c.side, "a setting's choices"

        device = self.net.bottleneck.out_linear.weight.device
        # One image at a time, so that the codes do not depend on the batch; the codebook is projected once for all.
        features = torch.cat([self.net.pooled(image[None].to(device), pool) for image in images])
        if not is_finite(features):  # the codes would hide it
            raise not_finite("ta_tok", self.name, "features")

        return self.net.bottleneck.codes(features)
