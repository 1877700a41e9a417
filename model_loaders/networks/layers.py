"""Layers of the token transformer, under the official parameter names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import attend
from .ops import Linear
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

    def project(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [R, n, C] to queries [R, heads, n, D], and keys followed by values [R, 2 kv heads, n, D].

        Queries and keys are rotated unless ``rope`` is None.
        """
        parts = self.wqkv(x).contiguous().view(*x.shape[:2], -1, self.head_dim)
        if rope is not None:
            both = self.heads + self.kv_heads
            rotated = rotate_pairs(parts[:, :, :both], rope)
            if torch.is_grad_enabled() or not rope.is_complex():  # not in place
                parts = torch.cat([rotated, parts[:, :, both:]], dim=2)
        return parts[:, :, : self.heads].transpose(1, 2), parts[:, :, self.heads :].transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x). On a GPU w1 and w3 are one product: their weights are then views of one matrix."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1, self.w3, self.w2 = Linear(dim, hidden), Linear(dim, hidden), Linear(hidden, dim)

    def inner(self, x: Tensor) -> Tensor:
        """silu(w1 x) * w3 x."""
        if not (fused(self.w1, x) and fused(self.w3, x)):
            return F.silu(self.w1(x)) * self.w3(x)
        gate, up = F.linear(x, self._joint()).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.inner(x))

    def _joint(self) -> Tensor:
        """The weights of w1 and w3 as one matrix; they are moved into one storage where they are not, as after a move."""
        a, b = self.w1.weight, self.w3.weight
        if b.storage_offset() != a.storage_offset() + a.numel() or _storage(a) != _storage(b):
            with torch.inference_mode(False), torch.no_grad():
                a, b = torch.cat([a, b]).chunk(2)
                self.w1.weight, self.w3.weight = (nn.Parameter(w, requires_grad=False) for w in (a, b))
        return a.as_strided((2 * len(a), a.shape[1]), (a.shape[1], 1), a.storage_offset())


def _storage(x: Tensor) -> object:
    """Identity of a tensor's storage; meta tensors have no address."""
    return x.untyped_storage()._cdata


def fused(layer: nn.Module, x: Tensor) -> bool:
    """Whether products with a layer's weight are merged with other operations: on a GPU, where every launch counts.

    On a CPU the layer chooses its product (``ops.py``). A weight that is off the device is left to its layer.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(layer) is not Linear:
        return False
    return x.device.type != "cpu" and not layer.away()


def add_product(x: Tensor, layer: nn.Module, y: Tensor, own: bool) -> Tensor:
    """x + layer(y) for a layer without bias; x and the result [R, n, C]. In place if ``own``, on a GPU."""
    if not fused(layer, y):
        return x + layer(y)
    weight, rows = layer.weight.t(), y.flatten(0, 1)  # type: ignore[operator]
    if own:
        x.view(len(rows), -1).addmm_(rows, weight)
        return x
    return torch.addmm(x.reshape(len(rows), -1), rows, weight).view(x.shape)


class Block(nn.Module):
    """Pre-norm block."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, hidden: int, eps: float):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim, eps), Attention(dim, heads, kv_heads, head_dim)
        self.ffn_norm, self.feed_forward = RMSNorm(dim, eps), FeedForward(dim, hidden)


def rest(block: Block, x: Tensor, attended: Tensor, own: bool) -> Tensor:
    """A block after its attention. ``own``: x may be overwritten."""
    x = add_product(x, block.attention.wo, attended, own)
    return add_product(x, block.feed_forward.w2, block.feed_forward.inner(block.ffn_norm(x)), True)


def advance(
    block: Block, x: Tensor, rope: Tensor | None, pair: Tensor, slot: Tensor, end: int, mask: Tensor | None, own: bool
) -> Tensor:
    """A block of ``GPT.advance``.

    Args:
        block, x: the block and its input rows [R, n, C].
        rope: see :meth:`Attention.project`.
        pair: the block's keys and values in the cache, [R, 2 kv heads, slots, D]; written at ``slot``.
        slot: int64 [n], or [R, n].
        end: slots below this one are attended to.
        mask: see :func:`attend`.
        own: x may be overwritten.
    """
    q, kv = block.attention.project(block.attention_norm(x), rope)
    if slot.ndim == 1:
        pair.index_copy_(2, slot, kv)
    else:
        pair.scatter_(2, slot[:, None, :, None].expand(kv.shape), kv)
    keys, values = pair[:, :, :end].chunk(2, dim=1)
    return rest(block, x, attend(q, keys, values, mask), own)


def advance_serial(
    block: Block, x: Tensor, rope: Tensor | None, storage: Tensor, end: int, bias: Tensor | None, own: bool
) -> Tensor:
    """:func:`advance` of the newest token x [R, 1, C], in slot ``end`` - 1, on a GPU. One product writes all that is made of it.

    Args:
        block, x, rope, own: see there.
        storage: the block's part of ``Cache.storage``, [R, ...].
        end: number of keys with the token's own.
        bias: added to the scores [R, 1, 1, end], the token's own first; or None.
    """
    a = block.attention
    weight, heads = a.wqkv.weight, 2 * a.kv_heads
    made = storage[:, : a.wqkv.out_features]
    normed = block.attention_norm(x).flatten(0, 1)
    if fused(a.wqkv, normed):
        torch.mm(normed, weight.t(), out=made)
    else:  # a weight that is off the device
        made.copy_(a.wqkv(normed))
    parts = made.unflatten(1, (1, -1, a.head_dim))
    if rope is not None:
        rotate_pairs(parts[:, :, : a.heads + a.kv_heads], rope)
    rows = storage[:, a.heads * a.head_dim :].unflatten(1, (-1, heads, a.head_dim))
    keys, values = rows[:, :end].transpose(1, 2).chunk(2, dim=1)
    return rest(block, x, attend(parts[:, :, : a.heads].transpose(1, 2), keys, values, bias), own)


class Table(nn.Module):
    """An embedding table of a condition."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.embedding_table = nn.Embedding(rows, dim)


class Caption(nn.Module):
    """Projection of text features of width ``size``, and the ``rows`` features of the null text."""

    def __init__(self, size: int, dim: int, rows: int):
        super().__init__()
        self.cap_proj = nn.Module()
        self.cap_proj.fc1, self.cap_proj.fc2 = Linear(size, dim), Linear(dim, dim)
        self.register_buffer("uncond_embedding", torch.zeros(rows, size))


class Special(nn.Module):
    """PAR's transition tokens."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.special_embeddings = nn.Embedding(rows, dim)
