"""Layers of the token transformer, under the official parameter names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .matmul import Linear
from .rope import rotate_pairs


class RMSNorm(nn.Module):
    """Division by the root mean square, then a weight."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    """Projections of self-attention; the attention itself is an ``AttentionFunction``, which may use a cache."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.wqkv = Linear(dim, (heads + 2 * kv_heads) * head_dim)
        self.wo = Linear(dim, dim)

    def project(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, n, C] to queries [R, heads, n, D], keys and values [R, kv heads, n, D]; rotated unless ``rope`` is None."""
        parts = self.wqkv(x).contiguous().view(*x.shape[:2], -1, self.head_dim)
        both = self.heads + self.kv_heads
        qk, v = parts[:, :, :both], parts[:, :, both:]
        if rope is not None:
            qk = rotate_pairs(qk, rope)
        q, k = qk[:, :, : self.heads], qk[:, :, self.heads :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1, self.w3, self.w2 = Linear(dim, hidden), Linear(dim, hidden), Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm block."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, hidden: int, eps: float):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim, eps), Attention(dim, heads, kv_heads, head_dim)
        self.ffn_norm, self.feed_forward = RMSNorm(dim, eps), FeedForward(dim, hidden)
