"""Rotary position embeddings (Su et al. 2021, "RoFormer", arXiv 2104.09864): 2-D for grids, 1-D for text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GRID_BASE = 10_000


def grid_table(grid: int, head_dim: int, device: torch.device) -> Tensor:
    """Table of 2-D RoPE, complex64 [1 + grid * grid, D / 2]: the rotation exp(i angle) of every cell and pair.

    The first half of a head's pairs rotates with the grid row, the second half with the column. Entry 0 is zero, as in the
    official table, and is the entry of every row before the grid.
    """
    half = head_dim // 2
    frequency = 1.0 / GRID_BASE ** (torch.arange(0, half, 2, device=device).float() / half)
    angle = torch.arange(grid, device=device)[:, None] * frequency
    down, across = angle[:, None].expand(-1, grid, -1), angle[None].expand(grid, -1, -1)
    angle = torch.cat([down, across], dim=-1).flatten(0, 1)
    rope = torch.complex(angle.cos(), angle.sin())
    return torch.cat([torch.zeros_like(rope[:1]), rope])


@dataclass(frozen=True, eq=False)
class PositionTable:
    """Position encodings of one image size.

    Attributes:
        table: 2-D RoPE complex64 [1 + N, D / 2] of :func:`grid_table`, or additive embeddings [L, C].
        offset: index of position 0 in the table.
    """

    table: Tensor
    offset: int

    def rows(self, position: Tensor) -> Tensor:
        """Table rows [n, ...] or [R, n, ...] of int64 positions [n] or [R, n]."""
        return self.table[(position + self.offset).clamp(min=0)]


def rotate_pairs(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate adjacent pairs of x [R, n, heads, D] by rope complex64 [n, D / 2] or [R, n, D / 2] of :func:`grid_table`.

    Computed in fp32. In place unless gradients are computed, or rope is real: fp32 [..., D / 2, 2] of ``torch.view_as_real``.
    """
    if not rope.is_complex():
        (cos, sin), (a, b) = rope[..., None, :, :].unbind(-1), x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(x)
    rope = rope[..., None, :]
    if not torch.is_grad_enabled() and x.dtype in (torch.float32, torch.float64):
        torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(rope)
        return x
    turned = torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rope).flatten(-2)
    return turned.type_as(x) if torch.is_grad_enabled() else x.copy_(turned)


def angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines fp32 [R, 1, n, D / 2] of 1-D positions int64 [R, n]."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angle = positions[:, None, :, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [R, heads, n, D], whose first half pairs with its second, by fp32 [R or 1, 1, n, D / 2]; computed in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)
