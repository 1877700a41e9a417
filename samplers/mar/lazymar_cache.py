"""The features that LazyMAR keeps, and parts of a transformer block that compute only some rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from ...model_loaders.networks.mar import Block, pick
from ...model_loaders.networks.rows import Kept


def typed_blocks(modules: nn.ModuleList) -> list[Block]:
    """The blocks of an encoder or decoder, typed."""
    return cast(list[Block], list(modules))


# The second half of a block, see :func:`block_mlp`.
MLP = Callable[[Block, Tensor], Tensor]


def block_pass(mlp: MLP, block: Block, x: Tensor, rows: slice | Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A block's output, at some ``rows`` only if given (a slice, or int64 [B, M]), and keys and values of all rows of x."""
    q, k, v = block.attn.project(block.norm1(x))
    if isinstance(rows, slice):
        q, x = q[:, :, rows], x[:, rows]
    elif rows is not None:
        q, x = q.gather(2, row_index(rows, q)), pick(x, rows)
    return block_rest(mlp, block, x, q, k, v), k, v


def block_rest(mlp: MLP, block: Block, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The block after its projection: rows x [B, N, C] whose queries are q, over keys k and values v."""
    return mlp(block, x + block.attn.attend(q, k, v))


def block_mlp(block: Block, x: Tensor) -> Tensor:
    """The block after its attention."""
    return x + block.mlp(block.norm2(x))


def row_index(index: Tensor, like: Tensor) -> Tensor:
    """Row index [B, M] for tensors [B, heads, N, d]."""
    return index[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])


def own_copy(x: Tensor, live: int) -> Tensor:
    """A copy of the first ``live`` entries; a view would keep the whole projection in memory."""
    return x[:live].clone(memory_format=torch.contiguous_format)


@dataclass(eq=False)
class FeatureCache:
    """Features of one refresh. ``live`` decoder rows: images, or images times two branches without the condition cache.

    ``encoded`` encoder rows: as many, or images where the branches of guidance do not differ in the encoder.
    """

    live: int
    encoded: int
    between: Kept | None = None
    """What is kept between encoder and decoder; with the encoder cache."""
    canvas: Tensor | None = None
    """The decoder's input [live, N, C]; stored with the encoder cache, so that old tokens are not embedded again."""
    encoder: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values of every encoder block, [encoded, heads, room, d]: decided tokens, then the class rows of the last call."""
    values: Tensor | None = None
    """Values of the chosen decoder block at the last call, [live, heads, N, d]; None if all rows are always computed."""
    decoder: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values of the decoder blocks after it."""
    residual: Tensor | None = None
    """Null minus conditional branch after the last decoder block, [B, L, C]."""

    @property
    def bytes(self) -> int:
        """Bytes of all stored tensors."""
        pairs = (t for pair in (*self.encoder, *self.decoder) for t in pair)
        between = self.between.tensors if self.between else []
        return sum(
            t.untyped_storage().nbytes()
            for t in (self.canvas, self.values, self.residual, *pairs, *between)
            if t is not None
        )
