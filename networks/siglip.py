"""The vision transformer of SigLIP and SigLIP 2, with the parameter names of the library transformers. It reads images
for TA-Tok and for Janus, and it is also TA-Tok's decoder.

Sources: Zhai et al. 2023 (SigLIP, arXiv 2303.15343), Tschannen et al. 2025 (SigLIP 2, arXiv 2502.14786).
"""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from .ops import Operations

NORM_EPS = 1e-6
# Attention heads by width, which no state dict holds: sizes B, L and so400m.
HEADS = {768: 12, 1024: 16, 1152: 16}


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, operations: Operations):
        super().__init__()
        self.heads = heads
        self.k_proj = operations.Linear(width, width)
        self.v_proj = operations.Linear(width, width)
        self.q_proj = operations.Linear(width, width)
        self.out_proj = operations.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self._heads(self.q_proj(x))
        k = self._heads(self.k_proj(x))
        v = self._heads(self.v_proj(x))

        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """Rows [B, n, width] as [B, heads, n, width / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    """Pre-norm block of a vision transformer; ``gelu`` is "tanh" for the approximation (SigLIP 2), "none" for the exact
    one.
    """

    def __init__(self, width: int, heads: int, hidden: int, gelu: str, operations: Operations):
        super().__init__()
        self.self_attn = Attention(width, heads, operations)
        fc1 = operations.Linear(width, hidden)
        fc2 = operations.Linear(hidden, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(gelu), fc2=fc2))
        self.layer_norm1 = nn.LayerNorm(width, NORM_EPS)
        self.layer_norm2 = nn.LayerNorm(width, NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Tower(nn.Module):
    """A vision transformer with full attention."""

    def __init__(
        self,
        patches: nn.Module,
        positions: int,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
        norm: bool,
        gelu: str,
        operations: Operations,
    ):
        super().__init__()
        embeddings = {"patch_embedding": patches, "position_embedding": nn.Embedding(positions, width)}
        self.embeddings = nn.ModuleDict(embeddings)
        layers = nn.ModuleList(Layer(width, heads, hidden, gelu, operations) for _ in range(depth))
        self.encoder = nn.ModuleDict({"layers": layers})
        self.post_layernorm = nn.LayerNorm(width, NORM_EPS) if norm else nn.Identity()

    def embed(self, pixels: Tensor) -> Tensor:
        """Patch embeddings of normalised images [B, 3, H, W], with positions added: [B, n, width] in raster order."""
        patches = self.embeddings.patch_embedding
        rows = patches(pixels.to(patches.weight.dtype)).flatten(2).transpose(1, 2)
        return rows + self.embeddings.position_embedding.weight

    def run(self, x: Tensor) -> Tensor:
        """Run all layers on patch embeddings with positions added, [B, n, width]."""
        for layer in self.encoder.layers:
            x = layer(x)

        return self.post_layernorm(x)
