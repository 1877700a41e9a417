"""One decoder-only transformer for all token models, with the official parameter names of each.

- LlamaGen for classes and texts (Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image
  Generation", arXiv 2406.06525), PAR (Wang et al. 2025, arXiv 2412.15119) and Tar's de-tokenizer AR-DTok (Han et al.
  2025, arXiv 2506.18898): 2-D RoPE on adjacent pairs of numbers, or additive positions. Dropout is omitted.
- Qwen2.5 (Qwen Team 2024, arXiv 2412.15115): the language model of Tar, whose vocabulary also has image codes, and of
  Harmon and UniPic. It has 1-D RoPE on the halves of a head, biases, and the embedding as output layer.
- Qwen3 (Qwen Team 2025, arXiv 2505.09388): the language model of BitDance. It is like Qwen2.5, but has norms of queries
  and keys instead of biases. BitDance has no use for its output layer.

A sequence is a *prefix* (the condition), then image tokens. A row's *position* is its cell of the grid in raster order;
the last row of the prefix has position -1, the row before it -2. Prefixes of a batch may differ in length. They are
padded on the right, so every cell has the same slot of the cache in all images, and a mask hides the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .graphs import State
from .ops import FAST, Operations, linear
from .precision import HALVES
from .speed import Recordable, recorded
from .structure import depth, official_names
from .ta_tok import TATokModel
from .torch_state import dot_product_attention

# Attention heads of LlamaGen by width, which no state dict holds: sizes S, B, L, XL, XXL, 1B, XXXL, 3B, 7B. Others need
# metadata.
OFFICIAL_HEADS = {384: 6, 768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
# On a CUDA device, passes attend to a multiple of this number of slots. So there are only a few lengths, each of which
# is recorded once.
SLOTS = 64
# Head width of Qwen2.5's larger models, whose state dict holds no head count either.
QWEN_HEAD_DIM = 128
# Kinds of a condition. A prompt is token ids of the same vocabulary.
CLASS = "class"
TEXT = "text"
FEATURES = "features"
PROMPT = "prompt"
# Parameters of a LlamaGen that tell which kind of condition it reads.
_CONDITIONS = {
    "cls_embedding.embedding_table.weight": CLASS,
    "cls_embedding.uncond_embedding": TEXT,
    "clip_proj.weight": FEATURES,
}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Our names of parameters, which are LlamaGen's, and the names in a language model's file.
_NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "norm.": "model.norm.",
    "output.": "lm_head.",
    "layers.": "model.layers.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".attention.wq.": ".self_attn.q_proj.",
    ".attention.wk.": ".self_attn.k_proj.",
    ".attention.wv.": ".self_attn.v_proj.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention.q_norm.": ".self_attn.q_norm.",
    ".attention.k_norm.": ".self_attn.k_norm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
}


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a network. The side of the grid is not part of it; see :class:`TokenModel`."""

    dim: int  # width C
    depth: int  # number of blocks
    heads: int  # attention heads
    kv_heads: int  # heads of keys and values; fewer are grouped-query attention
    hidden: int  # inner width of the feed-forward part
    vocab: int  # number of token values V
    condition: str  # CLASS (a label), TEXT (a text encoder's features), FEATURES (of Tar's semantic codes), PROMPT
    condition_size: int = 0  # number of labels, without the null class; width of a feature row; 0 for a prompt
    null: bool = True  # whether it was trained with a null condition, which guidance needs
    text_rows: int = 0  # maximum rows of a text (120 officially); 0 for other conditions
    absolute: int = 0  # rows of the additive position table; 0 selects RoPE: 1-D for prompts, else 2-D
    special: int = 0  # number of PAR's learned transition tokens; 0 for a plain model
    queries: int = 0  # width of all queries of a row; 0 is dim
    bias: bool = False  # whether queries, keys and values have biases
    norms: bool = False  # whether every head of queries and keys is normalised before its rotation
    tied: bool = False  # whether the embedding is also the output layer
    positions: int = 0  # maximum sequence length of a language model
    theta: float = 1e4  # base of RoPE
    eps: float = 1e-5  # of the norms

    @property
    def head_dim(self) -> int:
        """Width of a head D."""
        return (self.queries or self.dim) // self.heads

    @property
    def regions(self) -> int:
        """Tokens that PAR decides in one pass; 1 for a plain model."""
        return self.special + 1

    @staticmethod
    def of_llamagen(state: Mapping[str, Tensor], heads: int | None = None, null: bool = True) -> LlamaConfig:
        """Derive the shape of a LlamaGen, PAR or AR-DTok from official parameter names.

        Args:
            state: weights by name.
            heads: number of attention heads; None takes the number of the official size with the same width.
            null: whether the last class row is the null class.

        Raises:
            KeyError: the state dict is not of such a network.
            ValueError: the head count is unknown or does not fit.
        """
        vocab, dim = state["tok_embeddings.weight"].shape
        heads = heads or OFFICIAL_HEADS.get(dim)
        if heads is None:
            raise ValueError(f"no official GPT has the width {dim}, so the number of attention heads must be stated")

        absolute = state["abs_pe"].shape[1] if "abs_pe" in state else 0
        if dim % heads or not absolute and dim // heads % 4:
            raise ValueError(f"heads: {heads} does not fit the width {dim}")

        kv_heads, rest = divmod(state["layers.0.attention.wqkv.weight"].shape[0] - dim, 2 * (dim // heads))
        if rest or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads: {heads} does not fit the attention weights")

        key = next((name for name in _CONDITIONS if name in state), "cls_embedding.embedding_table.weight")
        condition = _CONDITIONS[key]
        rows, columns = state[key].shape
        special = "spe_tok_embeddings.special_embeddings.weight"
        return LlamaConfig(
            dim=dim,
            depth=depth(state, "layers."),
            heads=heads,
            kv_heads=kv_heads,
            hidden=state["layers.0.feed_forward.w1.weight"].shape[0],
            vocab=vocab,
            condition=condition,
            condition_size=rows - null if condition == CLASS else columns,
            null=null or condition != CLASS,
            text_rows=rows if condition == TEXT else 0,
            absolute=absolute,
            special=state[special].shape[0] if special in state else 0,
        )

    @staticmethod
    def of_qwen(state: Mapping[str, Tensor], heads: int | None = None, **about: Any) -> LlamaConfig:
        """Derive the shape of a language model from official parameter names; raises the errors of :meth:`of_llamagen`.

        Args:
            state: weights by name.
            heads: number of attention heads; None: as many as there are with a head width of 128.
            about: see :func:`qwen_config`.
        """
        vocab, dim = state[EMBEDDING].shape
        queries = state["model.layers.0.self_attn.q_proj.weight"].shape[0]
        keys = state["model.layers.0.self_attn.k_proj.weight"].shape[0]

        heads = heads or queries // QWEN_HEAD_DIM
        if heads < 1 or queries % heads:
            raise ValueError(
                f"{heads} attention heads do not fit queries of {queries} numbers; correct num_attention_heads"
            )
        head_dim = queries // heads
        if head_dim % 2 or keys % head_dim or keys < head_dim or heads % (keys // head_dim):
            raise ValueError(f"{heads} attention heads do not fit keys of {keys} numbers; correct num_attention_heads")

        norms = "model.layers.0.self_attn.q_norm.weight" in state
        return qwen_config(
            dim=dim,
            depth=depth(state, "model.layers."),
            heads=heads,
            kv_heads=keys // head_dim,
            head_dim=head_dim,
            hidden=state["model.layers.0.mlp.gate_proj.weight"].shape[0],
            vocab=vocab,
            **{"tied": HEAD not in state, "norms": norms, "bias": not norms, **about},
        )


def qwen_config(
    dim: int, depth: int, heads: int, kv_heads: int, head_dim: int, hidden: int, vocab: int, **about: Any
) -> LlamaConfig:
    """Shape of a Qwen2. The arguments, and the further ones in ``about``, are fields of :class:`LlamaConfig`."""
    about = {"bias": True, "tied": True, "positions": 32768, "theta": 1e6, "eps": 1e-6} | about
    return LlamaConfig(
        dim=dim,
        depth=depth,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        vocab=vocab,
        condition=PROMPT,
        queries=heads * head_dim,
        **about,
    )


def rope_table(angle: Tensor, pairs: bool) -> Tensor:
    """Cosines and sines, fp32, for :func:`rotate_`. Source: Su et al. 2021, "RoFormer" (arXiv 2104.09864).

    Args:
        angle: the angles by which a head's pairs of numbers are rotated, [..., D / 2].
        pairs: if True, adjacent numbers are a pair, and the table is [..., D / 2, 2], with a cosine and a sine for each
            pair. If False, number i of a head's first half and number i of its second half are a pair, and the table
            is [..., 2, D], with the cosines and the signed sines for each number.
    """
    cos = angle.cos()
    sin = angle.sin()
    if pairs:
        return torch.stack([cos, sin], -1)

    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], -2)


def rotate_(x: Tensor, rope: Tensor, pairs: bool) -> None:
    """Rotate each pair (a, b) of x fp32 [R, n, heads, D] to (a cos - b sin, b cos + a sin), in place.

    ``rope``: rows of :func:`rope_table`, fp32 [n, 1, ...], or [R, n, 1, ...] if the batch rows differ.
    """
    if not pairs:
        cos, sin = rope.unbind(-2)
        swapped = x.roll(x.shape[-1] // 2, -1)
        x.mul_(cos).addcmul_(swapped, sin)
        return

    numbers = x.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # the compiler fuses these operations, and does not support complex numbers
        a, b = numbers.unbind(-1)
        cos, sin = rope.unbind(-1)
        numbers.copy_(torch.stack([a * cos - b * sin, b * cos + a * sin], -1))
    else:
        torch.view_as_complex(numbers).mul_(torch.view_as_complex(rope))


def _frequencies(count: int, theta: float, device: torch.device) -> Tensor:
    """For each of ``count`` pairs of a head, the angle by which it rotates from one position to the next, fp32."""
    return theta ** (-torch.arange(count, device=device).float() / count)


class Positions(NamedTuple):
    """Position encodings of a run."""

    table: Tensor  # fp32 [L, ...] of rope_table, or additive embeddings [L, C]
    offset: int | Tensor  # index of position 0; int64 [R, 1] if prefixes differ in length

    def rows(self, position: Tensor, batch: int) -> Tensor:
        """Rows of the table at positions, int64 [n] or [R, n], for the first ``batch`` batch rows of the run."""
        offset = self.offset if isinstance(self.offset, int) else self.offset[:batch]
        return self.table[position + offset]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Attention output [R, n, C] for queries q [R, heads, n, D], and keys k and values v [R, kv heads, S, D] each.

    ``mask``: [n, S] or [R, 1, n, S], bool, True where a query attends to a key, or numbers that are added to the
    scores. ``causal``: query i attends to the keys 0 to i.
    """
    rows, heads, n, d = q.shape
    group = heads // k.shape[1]
    if group > 1 and causal:  # a mask would select a kernel whose memory grows with the square of the length
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
    elif group > 1:  # the queries of a group become further rows of its key head, so that no key is copied
        q = q.reshape(rows, heads // group, group * n, d)
        if mask is not None:
            mask = mask.repeat(*(1,) * (mask.ndim - 2), group, 1)

    out = dot_product_attention(q, k, v, mask, causal)
    return out.reshape(rows, heads, n, d).transpose(1, 2).flatten(2)


def update(store: Tensor, slot: Tensor, kv: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Write keys and values into a block's cache, and return all keys and values of the slots below ``end``.

    Args:
        store: the cache of the block, [R', 2 kv heads, slots, D], of which the first R rows are used.
        slot: slots to write, int64 [n] or [R, n].
        kv: keys and values of the fed rows, [R, 2 kv heads, n or more, D]; the rows after the first n are padding.
        end: see above.

    Returns keys and values, [R, kv heads, end, D] each.
    """
    store = store[: len(kv)]
    kv = kv[:, :, : slot.shape[-1]]
    if slot.ndim == 1:
        store.index_copy_(2, slot, kv)
    else:
        store.scatter_(2, slot[:, None, :, None].expand(kv.shape), kv)

    keys, values = store[:, :, :end].chunk(2, 1)
    return keys, values


@dataclass(eq=False)
class Cache:
    """KV cache of one run, allocated once and written by slot."""

    # For each block the keys, then the values, [R, 2 kv heads, slots, D]; zero where nothing has been written.
    blocks: list[Tensor]
    prefix: int  # slots of the condition; the slot of cell 0 follows
    positions: Positions
    valid: Tensor | None  # bool [R, 1, 1, slots], False on the padding of shorter prefixes; None without padding

    def keep(self, index: Tensor) -> None:
        """Replace the batch rows by the rows ``index``, int64, which may leave out or repeat rows. This is done one
        tensor at a time, to save memory.
        """
        for i, store in enumerate(self.blocks):
            self.blocks[i] = store[index]

        if isinstance(self.positions.offset, Tensor):
            self.positions = self.positions._replace(offset=self.positions.offset[index])
        if self.valid is not None:
            self.valid = self.valid[index]

    def mask(self, visible: Tensor | None, batch: int, rows: int, end: int) -> Tensor | None:
        """Attention mask of a pass that feeds n = ``rows`` rows: ``visible`` without the padding of prefixes. None: the
        rows attend to all slots.

        ``visible``: bool [n, end] or [R, n, end], True where a row attends to a slot; None: everywhere.
        """
        if visible is not None and visible.ndim == 3:
            visible = visible[:, None]
        if self.valid is None:
            return visible

        valid = self.valid[:batch, ..., :end].expand(-1, -1, rows, -1)
        return valid if visible is None else valid & visible

    @property
    def bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(store.nbytes for store in self.blocks)


class Attention(nn.Module):
    """Projections of self-attention. A language model's file has three matrices for them, but LlamaGen's has one."""

    def __init__(self, c: LlamaConfig, operations: Operations = FAST):
        super().__init__()
        self.config = c
        queries = c.heads * c.head_dim
        keys = c.kv_heads * c.head_dim
        if c.condition == PROMPT:
            self.wq = operations.Linear(c.dim, queries, bias=c.bias)
            self.wk = operations.Linear(c.dim, keys, bias=c.bias)
            self.wv = operations.Linear(c.dim, keys, bias=c.bias)
        else:
            self.wqkv = operations.Linear(c.dim, queries + 2 * keys, bias=c.bias)
        self.wo = operations.Linear(queries, c.dim, bias=False)
        if c.norms:
            self.q_norm = nn.RMSNorm(c.head_dim, c.eps)
            self.k_norm = nn.RMSNorm(c.head_dim, c.eps)

    def project(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries [R, heads, n, D], and keys and values [R, 2 kv heads, n, D], of x [R, n, C]. RoPE is applied in
        fp32.
        """
        c = self.config
        if c.condition == PROMPT:
            joint = torch.cat([self.wq(x), self.wk(x), self.wv(x)], -1)
        else:
            joint = self.wqkv(x)
        joint = joint.unflatten(-1, (c.heads + 2 * c.kv_heads, -1))
        if c.norms:
            q, k, v = joint.split([c.heads, c.kv_heads, c.kv_heads], 2)
            joint = torch.cat([self.q_norm(q), self.k_norm(k), v], 2)

        if rope is not None:
            joint = joint.float()
            rotate_(joint[:, :, : c.heads + c.kv_heads], rope, pairs=c.condition != PROMPT)
            joint = joint.to(x.dtype)

        q, kv = joint.transpose(1, 2).split([c.heads, 2 * c.kv_heads], 1)
        return q, kv


class Norm(nn.RMSNorm):
    """RMSNorm, computed in fp32. Its output has the dtype of its weights, which the next product reads."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is self.weight.dtype:
            return super().forward(x)

        return F.rms_norm(x, self.normalized_shape, self.weight.float(), self.eps).to(self.weight.dtype)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden: int, operations: Operations = FAST):
        super().__init__()
        self.w1 = operations.Linear(dim, hidden, bias=False)
        self.w3 = operations.Linear(dim, hidden, bias=False)
        self.w2 = operations.Linear(hidden, dim, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        """The input of w2."""
        return F.silu(self.w1(x)) * self.w3(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.inner(x))


class Block(nn.Module):
    """Pre-norm block. ``attention`` maps what :meth:`Attention.project` returns to the attention output [R, n, C].

    ``feed_forward``: the feed-forward part; None: the usual one. The residual stream x is overwritten where
    :meth:`Operations.add_product` can do so.
    """

    def __init__(self, c: LlamaConfig, operations: Operations = FAST, feed_forward: nn.Module | None = None):
        super().__init__()
        self.operations = operations
        self.attention_norm = Norm(c.dim, c.eps)
        self.attention = Attention(c, operations)
        self.ffn_norm = Norm(c.dim, c.eps)
        self.feed_forward = feed_forward or FeedForward(c.dim, c.hidden, operations)

    def forward(self, x: Tensor, rope: Tensor | None, attention: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        q, kv = self.attention.project(self.attention_norm(x), rope)
        x = self.operations.add_product(x, self.attention.wo, attention(q, kv))
        return self.operations.add_product(x, self.feed_forward.w2, self.feed_forward.inner(self.ffn_norm(x)))


def cached_block(
    block: Block,
    x: Tensor,
    rope: Tensor | None,
    store: Tensor,
    slot: Tensor,
    end: int,
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """Run a block whose rows attend to the cache; arguments as for :meth:`Llama.feed`."""
    return block(x, rope, lambda q, kv: attend(q, *update(store, slot, kv, end), mask, causal))


@recorded
def decode_step(
    net: Llama,
    stores: State,
    x: Tensor,
    rope: Tensor | None,
    slot: Tensor,
    end: int,
    mask: Tensor | None,
) -> Tensor:
    """Run all blocks of a pass over the cache. ``stores``: one for each block; other arguments as for
    :meth:`Llama.feed`.
    """
    run = net.compiled(cached_block, "decode steps")
    for block, store in zip(net.layers, stores, strict=True):
        x = run(block, x, rope, store, slot, end, mask, False)
    return x


def longer_mask(mask: Tensor | None, rows: int, end: int, slots: int, device: torch.device) -> Tensor:
    """Extend a mask of the slots below ``end`` to ``slots`` slots, bool [..., n, slots]; see :meth:`Llama.feed`."""
    if mask is None:
        return (torch.arange(slots, device=device) < end).repeat(rows, 1)
    return F.pad(mask, (0, slots - end))


def one_shape(x: Tensor, rope: Tensor | None, mask: Tensor, rows: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """The rows of a pass over all slots of a cache, padded to a number of rows.

    In 16 bits a result depends on the order of its sums. The order depends on the kernel, which a library chooses by
    the shape. Passes of one shape take the same kernels, which compute each row in the same way, whatever the other
    rows are and whatever is written in slots to which the row does not attend.

    Args:
        x: rows [R, n, C].
        rope: see :func:`rotate_`; None: the network has no RoPE.
        mask: bool [..., n, slots].
        rows: number of rows after padding.

    Returns x [R, rows, C], its rope, and its mask, [..., rows, slots].
    """
    more = rows - x.shape[1]
    # Padding attends to all slots, because a softmax over none is NaN.
    mask = F.pad(mask, (0, 0, 0, more), value=True)

    x = F.pad(x, (0, 0, 0, more))
    if rope is not None:
        rope = F.pad(rope, (0, 0, 0, 0, 0, 0, 0, more))
    return x, rope, mask


class Llama(Recordable):
    """The transformer.

    With 2-D RoPE the official table is *zero* for the prefix and for PAR's transition tokens: their queries and keys
    are zero, so every image token attends to all of them equally.
    """

    def __init__(self, config: LlamaConfig, operations: Operations = FAST):
        super().__init__(operations)
        c = self.config = config
        if c.condition == CLASS:
            self.cls_embedding = nn.ModuleDict({"embedding_table": nn.Embedding(c.condition_size + c.null, c.dim)})
        elif c.condition == TEXT:
            fc1 = operations.Linear(c.condition_size, c.dim, bias=False)
            fc2 = operations.Linear(c.dim, c.dim, bias=False)
            self.cls_embedding = nn.ModuleDict({"cap_proj": nn.ModuleDict({"fc1": fc1, "fc2": fc2})})
            self.cls_embedding.register_buffer("uncond_embedding", torch.zeros(c.text_rows, c.condition_size))
        elif c.condition == FEATURES:
            self.clip_proj = nn.Linear(c.condition_size, c.dim)

        if c.absolute:
            self.abs_pe = nn.Parameter(torch.zeros(1, c.absolute, c.dim))
        # The table of a language model has up to a billion numbers.
        table = operations.Embedding if c.condition == PROMPT else nn.Embedding
        self.tok_embeddings = table(c.vocab, c.dim)
        if c.special:
            self.spe_tok_embeddings = nn.ModuleDict({"special_embeddings": nn.Embedding(c.special, c.dim)})

        self.layers = nn.ModuleList(Block(c, operations) for _ in range(c.depth))
        self.norm = Norm(c.dim, c.eps)
        if not c.tied:
            self.output = operations.Linear(c.dim, c.vocab, bias=False)

        if c.condition == PROMPT:
            official_names(self, self.official_name)

    @staticmethod
    def official_name(name: str) -> str:
        """The name of a parameter in a language model's file."""
        for ours, theirs in _NAMES.items():
            if name.startswith(ours) or ours[0] == "." and ours in name:
                name = name.replace(ours, theirs, 1)

        return name

    @property
    def compute_device(self) -> torch.device:
        """The device that computes; a host may keep large weights elsewhere."""
        return self.norm.weight.device

    def prefix(self, condition: Tensor, lengths: Tensor | None = None, guided: bool = False) -> Tensor:
        """The rows of the condition, in front of the image tokens.

        Args:
            condition: labels int64 [B], features [B, n, E], or token ids int64 [B, n].
            lengths: int64 [B], the valid rows; None: all.
            guided: whether the rows of the null condition follow.

        Returns rows [B, n, C], or [2 B, n, C] with guidance.
        """
        c = self.config
        if c.condition == PROMPT:
            return self.tok_embeddings(condition)

        if c.condition == CLASS:
            ids = condition[:, None]
            if guided:
                ids = torch.cat([ids, torch.full_like(ids, c.condition_size)])
            return self.cls_embedding.embedding_table(ids)

        x = condition.to(self.tok_embeddings.weight.dtype)
        if c.condition == FEATURES:
            return self.clip_proj(torch.cat([x, torch.zeros_like(x)]) if guided else x)

        if guided:
            n = x.shape[1]
            if lengths is None:
                lengths = torch.full((len(x),), n, device=x.device)
            # The published code pads on the left, so a text of n rows is paired with the last n rows of the null table.
            start = c.text_rows - lengths
            at = (start[:, None] + torch.arange(n, device=x.device)).clamp(max=c.text_rows - 1)
            x = torch.cat([x, self.cls_embedding.uncond_embedding[at].to(x.dtype)])

        projection = self.cls_embedding.cap_proj
        return projection.fc2(F.gelu(projection.fc1(x), approximate="tanh"))

    def logits(self, x: Tensor, span: tuple[int, int] | None = None) -> Tensor:
        """Predictions fp32 [..., V] of hidden rows [..., C]. ``span``: a half-open range of token values; None: all."""
        x = self.norm(x)
        if span is None and not self.config.tied:
            return self.output(x).float()

        head = self.tok_embeddings if self.config.tied else self.output
        low, high = span or (0, self.config.vocab)
        with self.operations.weight(head, x) as weight:
            return linear(x, weight[low:high]).float()

    def rope(self, position: Tensor) -> Tensor:
        """1-D RoPE for places of a sequence, int64 [...]: rows of :func:`rope_table`, fp32 [..., 2, D]."""
        frequency = _frequencies(self.config.head_dim // 2, self.config.theta, position.device)
        return rope_table(position[..., None].float() * frequency, pairs=False)

    def positions(self, grid: int, prefix: int, lengths: Tensor | None = None) -> Positions:
        """Position encodings of ``grid`` x ``grid`` tokens after ``prefix`` rows.

        ``lengths``: int64 [R], lengths of the prefixes if they differ.
        """
        c = self.config
        device = self.compute_device
        if c.absolute:
            return Positions(table=self.abs_pe[0], offset=prefix)
        if c.condition == PROMPT:
            table = self.rope(torch.arange(prefix + grid * grid, device=device))
            return Positions(table=table, offset=prefix if lengths is None else lengths[:, None])

        # The first half of a head's pairs rotates with the grid row, the second half with the column.
        angle = torch.arange(grid, device=device)[:, None] * _frequencies(c.head_dim // 4, c.theta, device)
        down = angle[:, None].expand(-1, grid, -1)
        across = angle[None].expand(grid, -1, -1)
        table = rope_table(torch.cat([down, across], -1).flatten(0, 1), pairs=True)
        zeros = table.new_zeros(prefix, *table.shape[1:])
        return Positions(table=torch.cat([zeros, table]), offset=prefix)

    def _encode(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """The blocks' input and RoPE, from rows of the position table.

        The input begins the residual stream, which is fp32 if the network is fp16, see :mod:`.precision`. It is always
        a new tensor, because blocks add to it in place.
        """
        dtype = torch.float32 if x.dtype is torch.float16 else x.dtype
        if self.config.absolute:
            return x.to(dtype) + rows, None

        return x.to(dtype, copy=True), rows.unsqueeze(-3)

    def forward(
        self,
        x: Tensor,
        position: Tensor,
        positions: Positions,
        mask: Tensor | None = None,
        span: tuple[int, int] | None = None,
    ) -> Tensor:
        """Logits fp32 [R, n, V] of whole sequences, without a cache; for training and tests.

        Args:
            x: prefix, token embeddings and transition tokens in any order, [R, n, C].
            position: the position of each row, int64 [n]; -1 for transition tokens.
            positions: position encodings.
            mask: bool [n, n], True where a query (first index) attends to a key; None: causal.
            span: see :meth:`logits`.
        """

        def attention(q: Tensor, kv: Tensor) -> Tensor:
            k, v = kv.chunk(2, 1)
            return attend(q, k, v, mask, causal=mask is None)

        x, rope = self._encode(x, positions.rows(position, len(x)))
        for block in self.layers:
            x = block(x, rope, attention)

        return self.logits(x, span)

    def hidden(self, x: Tensor, position: Tensor, attention: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Last hidden states [R, n, C], after the final norm, of embeddings x [R, n, C].

        Args:
            position: places of the embeddings in the sequence, int64 [R or 1, n].
            attention: returns the attention output [R, n, C]. Its arguments are a block's index, queries [R, heads, n,
                D], and keys and values [R, kv heads, n, D] each.
        """
        x, rope = self._encode(x, self.rope(position))
        for i, block in enumerate(self.layers):
            x = block(x, rope, lambda q, kv, i=i: attention(i, q, *kv.chunk(2, 1)))

        return self.norm(x)

    def prefill(
        self,
        x: Tensor,
        grid: int,
        slots: int,
        lengths: Tensor | None = None,
        image: Tensor | None = None,
        positions: Positions | None = None,
    ) -> tuple[Tensor, Cache]:
        """Allocate the cache and run the prefix, alone or with the first cells of an image.

        Args:
            x: prefix rows [R, n, C].
            grid: tokens along one side of the image.
            slots: image slots of the cache.
            lengths: int64 [R], valid rows of each prefix; None: all.
            image: rows [R, m, C] of the cells 0 to m - 1; each attends to the prefix and to the cells up to itself.
            positions: position encodings of the run; None: the encodings of the grid.

        Returns hidden rows [R, 1 + m, C] of the last valid prefix row and of the cells (row i predicts cell i), and the
        cache.
        """
        c = self.config
        batch, n, _ = x.shape
        length = self._whole_length(n + slots, x.device)
        shape = (batch, 2 * c.kv_heads, length, c.head_dim)
        if self.records:
            blocks = self.graphs.zeros([shape] * len(self.layers), x)
        else:
            blocks = [x.new_zeros(shape) for _ in self.layers]
        valid = None
        if lengths is not None:
            slot = torch.arange(length, device=x.device)
            valid = ((slot < lengths[:, None]) | (slot >= n))[:, None, None]
        if positions is None:
            positions = self.positions(grid, n, lengths)
        cache = Cache(blocks=blocks, prefix=n, positions=positions, valid=valid)
        if self.records:
            self.graphs.use(blocks, cache)

        if image is not None:
            x = torch.cat([x, image], 1)
        end = x.shape[1]
        slot = torch.arange(end, device=x.device)
        if lengths is None:
            h = self.feed(x, slot - n, slot, cache, end, causal=True)
            return h[:, n - 1 :], cache

        # Padding follows the prefix, where a causal mask hides it from the prefix, but not from image rows.
        mask = None if image is None else slot <= slot[:, None]
        position = torch.where(slot < n, (slot - lengths[:, None]).clamp(max=-1), slot - n)
        h = self.feed(x, position, slot, cache, end, mask, causal=image is None)

        last = h.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, c.dim))
        return torch.cat([last, h[:, n:]], 1), cache

    def feed(
        self,
        x: Tensor,
        position: Tensor,
        slot: Tensor,
        cache: Cache,
        end: int,
        mask: Tensor | None = None,
        causal: bool = False,
        rows: int = 0,
    ) -> Tensor:
        """Feed rows, and write their keys and values into the cache. Returns hidden rows [R, n, C], for :meth:`logits`.

        Args:
            x: rows [R, n, C]. If R is less than the number of batch rows in the cache, its first R rows are used.
            position: int64 [n], or [R, n] if the batch rows differ.
            slot: int64 [n] or [R, n], cache slots to write, counted with the prefix.
            end: the rows attend to slots below this one only.
            mask: bool [n, end] or [R, n, end], True where a row attends to a slot; None: everywhere.
            causal: whether the rows fill the cache from its first slot on, and each row attends to the slots up to its
                own.
            rows: see :func:`one_shape`; 0: no padding. Not together with ``causal``.
        """
        fed = x.shape[1]
        x, rope = self._encode(x, cache.positions.rows(position, len(x)))

        # 1. The slots that the pass reads: those below ``end``, or more, and then a mask hides the additional slots.
        mask = None if causal else cache.mask(mask, len(x), fed, end)
        slots = cache.blocks[0].shape[2]
        longer = end if causal else min(slots, self._whole_length(end, x.device))
        if rows:
            longer = slots
        if longer > end or rows:
            mask = longer_mask(mask, fed, end, longer, x.device)
        if rows:
            x, rope, mask = one_shape(x, rope, mask, rows)
        # Convert the mask to numbers once, because attention would do so in every block. On a GPU it expects the dtype
        # of its queries, which in fp16 is not the dtype of x.
        if mask is not None:
            mask = torch.where(mask, 0.0, -torch.inf).to(cache.blocks[0].dtype)

        # 2. The blocks.
        if causal:
            for block, store in zip(self.layers, cache.blocks, strict=True):
                x = cached_block(block, x, rope, store, slot, longer, mask, causal)
        else:
            x = decode_step(self, State(cache.blocks), x, rope, slot, longer, mask)
        return x[:, :fed]

    def _whole_length(self, slots: int, device: torch.device) -> int:
        """A number of slots, rounded up to a multiple of SLOTS on a CUDA device or if the run records functions."""
        if self.records or device.type == "cuda":
            return math.ceil(slots / SLOTS) * SLOTS
        return slots


def is_16_bit(net: Llama) -> bool:
    """Whether a network computes in fp16 or bf16."""
    return net.norm.weight.dtype in HALVES


@dataclass(frozen=True, eq=False)
class TokenModel:
    """A network with the metadata of its file or of the catalogue."""

    net: Llama  # the network in eval mode
    name: str  # display name, used in messages and reports
    grid: int  # tokens along one side of the image: 16 for 256 pixels, 24 for 384, 32 for 512
    label_set: str = ""  # name of the label list ("imagenet-1k", "picture-book"); "" without labels or if unknown
    ta_tok: TATokModel | None = None  # for a de-tokenizer: the TA-Tok that computes its features from semantic codes
    note: str = ""  # remark for reports: what decides the result without being stated by user or file
    reads_images: ClassVar[bool] = False  # whether it can read images together with a prompt

    @property
    def condition(self) -> str:
        """Kind of condition it is sampled with."""
        return self.net.config.condition

    @property
    def family(self) -> str:
        """See runs/families/__init__.py."""
        return "tar" if self.condition == FEATURES else "llamagen"

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """All weights, in modules that a host may place and offload one by one."""
        return {"transformer": self.net}

    @property
    def device(self) -> torch.device:
        """Device on which it computes."""
        return self.net.compute_device

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.grid**2

    @property
    def regions(self) -> int:
        """Tokens that PAR decides in one pass; 1 for a plain model."""
        return self.net.config.regions


def cache_bytes(net: Llama, rows: int) -> int:
    """Bytes of the keys and values of this many ``rows``."""
    c = net.config
    numbers = 2 * c.depth * c.kv_heads * c.head_dim * rows
    return numbers * next(net.parameters()).element_size()
