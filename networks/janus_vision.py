"""How a Janus reads an image: as rows that say what it shows, from a SigLIP tower, and as codes of its VQ tokenizer.

Sources: Wu et al. 2024 (Janus, arXiv 2410.13848) for the tower; an MLP, the *aligner*, maps the tower's output after
its last norm to the width of the language model. Chen et al. 2025 (ShareGPT-4o-Image, arXiv 2506.18095) for the codes,
which Janus-4o reads in addition to these rows when it edits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError, not_finite
from .autoencoder import VQModel
from .ops import TORCH, Operations
from .precision import is_finite
from .siglip import HEADS, Tower
from .structure import depth
from .torch_state import in_own_state

# Fewest pixels along a side of a scaled image, in all published models.
LEAST_SIDE = 14
_LAYERS = "tower.encoder.layers."


def normalised(pixels: Tensor) -> Tensor:
    """Images uint8 [..., H, W, 3] as fp32 [..., 3, H, W] in -1..1, for the tower and for the VQ tokenizer."""
    return (pixels.movedim(-1, -3).contiguous() / 255 - 0.5) / 0.5


@dataclass(frozen=True)
class VisionConfig:
    """Shape of a tower and its aligner. The numbers in the comments are those of all published models."""

    width: int  # width of the tower; 1024
    depth: int  # layers of the tower; 24
    heads: int  # attention heads of the tower; 16
    hidden: int  # inner width of its MLPs; 4096
    patch: int  # pixels along a side of a patch; 16
    places: int  # patches along a side of the image; 24
    dim: int  # width of the language model

    @property
    def side(self) -> int:
        """Pixels along a side of the image; 384."""
        return self.patch * self.places

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], heads: int | None = None) -> VisionConfig:
        """Derive the shape from the names of :class:`JanusVision`. ``heads``: None takes the number of the SigLIP with
        the same width.

        Raises:
            KeyError, ValueError: the weights are not of this network, or the number of heads does not fit.
        """
        width, _, patch, _ = state["tower.embeddings.patch_embedding.weight"].shape
        heads = heads or HEADS.get(width, width // 64)
        if heads < 1 or width % heads:
            raise ValueError(f"{heads} attention heads of the vision tower do not fit the width {width}")

        rows = state["tower.embeddings.position_embedding.weight"].shape[0]
        places = math.isqrt(rows)
        if places < 1 or places**2 != rows:
            raise ValueError(f"{rows} positions of the vision tower are not a square grid")

        return VisionConfig(
            width=width,
            depth=depth(state, _LAYERS),
            heads=heads,
            hidden=state[f"{_LAYERS}0.mlp.fc1.weight"].shape[0],
            patch=patch,
            places=places,
            dim=state["aligner.fc1.weight"].shape[0],
        )


class Aligner(nn.Module):
    """Maps rows of the tower, [..., width], to rows of the language model, [..., C]."""

    def __init__(self, c: VisionConfig, operations: Operations):
        super().__init__()
        self.fc1 = operations.Linear(c.width, c.dim)
        self.fc2 = operations.Linear(c.dim, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class JanusVision(nn.Module):
    """The tower and the aligner."""

    def __init__(self, config: VisionConfig, operations: Operations = TORCH):
        super().__init__()
        c = self.config = config
        self.tower = Tower(
            patches=nn.Conv2d(3, c.width, c.patch, stride=c.patch),
            positions=c.places**2,
            width=c.width,
            depth=c.depth,
            heads=c.heads,
            hidden=c.hidden,
            norm=True,
            gelu="none",
            operations=operations,
        )
        self.aligner = Aligner(c, operations)

    def forward(self, pixels: Tensor) -> Tensor:
        """Rows [B, S, C] of the language model, in raster order, of images [B, 3, side, side] in -1..1."""
        return self.aligner(self.tower.run(self.tower.embed(pixels)))


class ReadImage(NamedTuple):
    """An image as a Janus reads it."""

    rows: Tensor  # [S, C], rows that say what the image shows
    codes: Tensor  # int64 [S], the image's tokens in raster order


@dataclass(frozen=True, eq=False)
class ImageReader:
    """What reads images for a Janus. The tower and the VQ tokenizer are from the model's own file."""

    net: JanusVision  # in eval mode
    vq: VQModel
    name: str
    least: int = LEAST_SIDE  # see squares.py

    @property
    def side(self) -> int:
        """Pixels along a side of the images that it reads."""
        return self.net.config.side

    @in_own_state
    @torch.no_grad()
    def read(self, square: Tensor) -> ReadImage:
        """Read an image. The result is on the device of the tower. Images are read one at a time, so the result does
        not depend on a batch.

        ``square``: uint8 [side, side, 3], from :func:`.squares.squared`.

        Raises:
            UserError: rows or features that are not finite, or a VQ tokenizer of another size than the tower.
        """
        rows = self.look(square)

        vq = self.vq.net
        images = normalised(square)[None]
        dtype = next(vq.parameters()).dtype
        features = vq.features(images.to(vq.quantize.embedding.weight.device, dtype))
        if not is_finite(features):
            raise not_finite("model", self.vq.name, "features of the image")

        codes = vq.codes(features).flatten()
        if len(codes) != len(rows):
            raise UserError(
                f"image: {self.name} reads an image as {len(rows)} vectors, but the decoder gives {len(codes)} tokens; "
                "use the decoder that the model's file contains."
            )
        return ReadImage(rows, codes.to(rows.device))

    @in_own_state
    @torch.no_grad()
    def look(self, square: Tensor) -> Tensor:
        """The rows that say what an image shows, [S, C]; :meth:`read` returns the codes too."""
        # A norm's weight is on the device, but a host may keep other weights off the device.
        device = self.net.tower.post_layernorm.weight.device
        rows = self.net(normalised(square)[None].to(device))[0]
        if not is_finite(rows):
            raise not_finite("model", self.name, "vectors of the image")
        return rows
