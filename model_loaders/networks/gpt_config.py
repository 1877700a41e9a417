"""The shape of a token transformer, also derived from the parameter names of an official file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .structure import depth

# Attention heads by width, which no state dict holds: sizes S, B, L, XL, XXL, 1B, XXXL, 3B, 7B. Others need metadata.
OFFICIAL_HEADS = {384: 6, 768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
_CLASS, _CODES = "cls_embedding.embedding_table.weight", "clip_proj.embedding_table.weight"
_TEXT, _FEATURES = "cls_embedding.uncond_embedding", "clip_proj.weight"
_SPECIAL, _ABSOLUTE = "spe_tok_embeddings.special_embeddings.weight", "abs_pe"


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT. The side of the grid is not part of it; see :class:`TokenModel`.

    Attributes:
        dim: width C.
        depth: number of blocks.
        heads: attention heads.
        kv_heads: key and value heads; fewer than ``heads`` is grouped-query attention.
        hidden: inner width of the feed-forward part.
        vocab: number of token values V.
        condition: "class" (one label), "text" (LlamaGen t2i: features of a text encoder), "features" (AR-DTok:
            semantic features) or "codes" (AR-DTok: semantic codes).
        condition_size: number of labels or codes, without the null entry; otherwise the width of a feature row.
        text_rows: maximum rows of a text (120 officially); 0 for other conditions.
        absolute: rows of the additive position table; 0 selects 2-D RoPE.
        special: number of PAR's learned transition tokens; 0 for a plain model.
    """

    dim: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    condition: str
    condition_size: int
    text_rows: int = 0
    absolute: int = 0
    special: int = 0

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.dim // self.heads

    @property
    def regions(self) -> int:
        """Tokens that PAR decides in one pass; 1 for a plain model."""
        return self.special + 1

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], heads: int | None = None) -> GPTConfig:
        """Derive the shape from official parameter names.

        Args:
            state: official parameter names to tensors.
            heads: attention heads; None uses :data:`OFFICIAL_HEADS`.

        Raises:
            KeyError: the state dict is not one of this network.
            ValueError: the head count is unknown or does not fit the weights.
        """
        vocab, dim = state["tok_embeddings.weight"].shape
        heads = heads or OFFICIAL_HEADS.get(dim)
        if heads is None:
            raise ValueError(f"a GPT of width {dim} is none of the official sizes; give its metadata an entry 'heads'")
        absolute = state[_ABSOLUTE].shape[1] if _ABSOLUTE in state else 0
        if dim % heads or not absolute and dim // heads % 4:
            raise ValueError(f"heads: {heads} does not fit the width {dim}")
        kv_heads, rest = divmod(state["layers.0.attention.wqkv.weight"].shape[0] - dim, 2 * (dim // heads))
        if rest or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads: {heads} does not fit the attention weights")
        kinds = {_CLASS: "class", _TEXT: "text", _FEATURES: "features", _CODES: "codes"}
        key = next((k for k in kinds if k in state), None)
        if key is None:
            raise KeyError(_CLASS)
        rows, columns = state[key].shape
        return GPTConfig(
            dim=dim,
            depth=depth(state, "layers."),
            heads=heads,
            kv_heads=kv_heads,
            hidden=state["layers.0.feed_forward.w1.weight"].shape[0],
            vocab=vocab,
            condition=kinds[key],
            condition_size=rows - 1 if key in (_CLASS, _CODES) else columns,
            text_rows=rows if key == _TEXT else 0,
            absolute=absolute,
            special=state[_SPECIAL].shape[0] if _SPECIAL in state else 0,
        )
