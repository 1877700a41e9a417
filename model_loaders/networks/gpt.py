"""The GPT that writes picture tokens, with the official parameter names: LlamaGen for classes or text, PAR, and Tar's
de-tokenizer AR-DTok, which is the same transformer with other positions and another condition.

Sources: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (arXiv
2406.06525); Wang et al. 2025, "Parallelized Autoregressive Visual Generation" (arXiv 2412.15119). Dropout is left out:
it has no parameters and inference never uses it. The sampling loop lives in ``samplers``.

A sequence is a *prefix* (the condition) followed by picture tokens. A *place* says where a row stands: 0 and up is a
cell of the grid in raster order, -1 the prefix's last row, -2 the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ta_tok import TATokModel

# The head count is in no state dict. Official sizes S, B, L, XL, XXL, 1B, XXXL, 3B, 7B by width; others need metadata.
OFFICIAL_HEADS = {384: 6, 768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
NORM_EPS = 1e-5
ROPE_BASE = 10_000
# Where a CPU's products go another way, see multiply: weights that no cache holds, and so few rows.
LARGE_WEIGHT, FEW_ROWS, WIDE = 1 << 18, 4, 1024

_CLASS, _CODES = "cls_embedding.embedding_table.weight", "clip_proj.embedding_table.weight"
_TEXT, _FEATURES = "cls_embedding.uncond_embedding", "clip_proj.weight"
_SPECIAL, _ABSOLUTE = "spe_tok_embeddings.special_embeddings.weight", "abs_pe"


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT. The side of its grid is in no file; :class:`TokenModel` holds it.

    Attributes:
        dim: width C.
        depth: number of blocks.
        heads: attention heads.
        kv_heads: key and value heads; fewer than ``heads`` is grouped-query attention.
        hidden: inner width of the feed-forward part.
        vocab: number of token values V.
        condition: "class" (one label), "text" (LlamaGen t2i: features of a text encoder), "features" (AR-DTok:
            semantic features) or "codes" (AR-DTok: semantic codes).
        condition_size: labels or codes, not counting the one for "no condition"; width of a feature row otherwise.
        text_rows: most rows a text may have (120 officially); 0 for other conditions.
        absolute: rows of the additive position table; 0 means rotations by grid row and column (2-D RoPE).
        special: PAR's learned transition tokens; 0 for a plain model.
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
        """Tokens that PAR decides together; 1 for a plain model."""
        return self.special + 1

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], heads: int | None = None) -> GPTConfig:
        """Read the shape off official parameter names.

        Args:
            state: official parameter names to tensors.
            heads: attention heads; None looks the width up in :data:`OFFICIAL_HEADS`.

        Raises:
            KeyError: the state dict is not a GPT's of this family.
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
            depth=len({k.split(".")[1] for k in state if k.startswith("layers.")}),
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


# ------------------------------------------------------------------------------------------------ pieces


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x [..., wide] times the transposed matrix w [out, wide], to [..., out]; the result may be strided.

    Decoding multiplies large matrices by a handful of rows, and the time goes into reading the weights. CPU libraries
    read them badly at x W^T of that shape: W x^T with x in rows takes half the time, and so does a single row if it is
    asked for as a batch of two half matrices. Not so for small weights, nor for many or long rows.
    """
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS or w.numel() < LARGE_WEIGHT or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, w)
    columns = x.reshape(rows, -1).contiguous().T
    if rows == 1 and not len(w) % 2:
        out = torch.bmm(w.view(2, -1, w.shape[1]), columns.expand(2, -1, -1)).view(-1, 1)
    elif rows == 2 or rows > 2 and w.shape[1] < WIDE:
        out = w @ columns
    else:
        return F.linear(x, w)
    return out.T.view(*x.shape[:-1], len(w))


class Linear(nn.Linear):
    """A matrix without bias."""

    def __init__(self, wide: int, out: int):
        super().__init__(wide, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., wide] to [..., out]; the result may be strided."""
        return multiply(x, self.weight)


class RMSNorm(nn.Module):
    """Division by the root mean square, then a weight."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, NORM_EPS)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [R, n, heads, D] by turn fp32 [n, 2, D] or [R, n, 2, D] (cosines, signed sines), in fp32."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x.float() * turn[..., 0, None, :], swapped.float(), turn[..., 1, None, :]).type_as(x)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Attention output [R, n, C].

    Args:
        q: queries [R, heads, n, D].
        k, v: [R, kv heads, S, D].
        mask: bool (True is seen) or fp32 (added), [n, S] or [R, 1, n, S]; None: everything is seen.
        causal: each query sees as many keys as its own index says; only without a mask.
    """
    rows, heads, n, d = q.shape
    group = heads // k.shape[1]
    if group > 1:  # the queries of a group stand as further rows of their one key head, so that no key is copied
        q = q.reshape(rows, heads // group, group * n, d)
        if causal:
            mask, causal = torch.ones(n, k.shape[2], dtype=torch.bool, device=q.device).tril(), False
        if mask is not None:
            mask = mask.repeat(*(1,) * (mask.ndim - 2), group, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return out.reshape(rows, heads, n, d).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Self-attention in two halves, so that a cache can stand between them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.wqkv = Linear(config.dim, (config.heads + 2 * config.kv_heads) * config.head_dim)
        self.wo = Linear(config.dim, config.dim)

    def project(self, x: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, n, C] to queries [R, heads, n, D], keys and values [R, kv heads, n, D]; rotated, if at all."""
        parts = self.wqkv(x).contiguous().view(*x.shape[:2], -1, self.head_dim)
        both = self.heads + self.kv_heads
        turning, v = parts[:, :, :both], parts[:, :, both:]
        if turn is not None:
            turning = rotate(turning, turn)
        q, k = turning[:, :, : self.heads], turning[:, :, self.heads :]
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

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.dim), Attention(config)
        self.ffn_norm, self.feed_forward = RMSNorm(config.dim), FeedForward(config.dim, config.hidden)


class _Table(nn.Module):
    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.embedding_table = nn.Embedding(rows, dim)


class _Caption(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.cap_proj = nn.Module()
        self.cap_proj.fc1 = Linear(config.condition_size, config.dim)
        self.cap_proj.fc2 = Linear(config.dim, config.dim)
        self.register_buffer("uncond_embedding", torch.zeros(config.text_rows, config.condition_size))


class _Special(nn.Module):
    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.special_embeddings = nn.Embedding(rows, dim)


@dataclass(frozen=True, eq=False)
class Places:
    """What distinguishes rows by where they stand.

    Attributes:
        table: rotations fp32 [1 + N, 2, D] whose first row is zero (2-D RoPE), or vectors to be added [L, C].
        offset: index of place 0 in the table.
    """

    table: Tensor
    offset: int

    def rows(self, place: Tensor) -> Tensor:
        """Table rows [n, ...] or [R, n, ...] of int64 places [n] or [R, n]."""
        return self.table[(place + self.offset).clamp(min=0)]


@dataclass(eq=False)
class Cache:
    """Keys and values of one decoding run, sized once and written by slot.

    Attributes:
        keys, values: one tensor a block, [R, kv heads, slots, D]; zero where nothing has been written.
        prefix: slots the condition takes; the slot of cell 0 comes next.
        bias: fp32 [R, 1, 1, slots] to be added to attention scores, or None. Where a text is collapsed into one slot it
            holds log n there.
        places: see :class:`Places`.
    """

    keys: list[Tensor]
    values: list[Tensor]
    prefix: int
    bias: Tensor | None
    places: Places

    @property
    def bytes(self) -> int:
        """Memory that the keys and values take."""
        return sum(t.numel() * t.element_size() for t in self.keys + self.values)


class GPT(nn.Module):
    """The transformer. ``condition`` tensors are, by ``config.condition``:

    - "class": labels int64 [B];
    - "text": features [B, n, E], each image's behind one another from the left, with ``lengths`` int64 [B];
    - "features": features [B, n, E]; "codes": int64 [B, n].

    With 2-D RoPE the prefix's rows are not turned but *zeroed*: the official rotation table is zero there, so their
    queries and keys vanish and every picture token sees their values in equal shares. A text of n rows can therefore be
    kept as one slot, exactly: key 0, the mean of the n values, and log n added to its score.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = c = config
        if c.condition == "class":
            self.cls_embedding: nn.Module = _Table(c.condition_size + 1, c.dim)
        elif c.condition == "text":
            self.cls_embedding = _Caption(c)
        elif c.condition == "codes":
            self.clip_proj: nn.Module = _Table(c.condition_size + 1, c.dim)
        else:
            self.clip_proj = nn.Linear(c.condition_size, c.dim)
        if c.absolute:
            self.abs_pe = nn.Parameter(torch.zeros(1, c.absolute, c.dim))
        self.tok_embeddings = nn.Embedding(c.vocab, c.dim)
        if c.special:
            self.spe_tok_embeddings = _Special(c.special, c.dim)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.norm, self.output = RMSNorm(c.dim), Linear(c.dim, c.vocab)

    # -------------------------------------------------------------------------------------------- what goes in

    def prefix(self, condition: Tensor, lengths: Tensor | None = None, guided: bool = False) -> Tensor:
        """Prefix rows [B, n, C] of a condition; with ``guided`` followed by those of "no condition", [2 B, n, C]."""
        c = self.config
        if c.condition in ("class", "codes"):
            ids = condition[:, None] if c.condition == "class" else condition
            if guided:
                ids = torch.cat([ids, torch.full_like(ids, c.condition_size)])
            return (self.cls_embedding if c.condition == "class" else self.clip_proj).embedding_table(ids)
        x = condition.to(self.tok_embeddings.weight.dtype)
        if c.condition == "features":
            return self.clip_proj(torch.cat([x, torch.zeros_like(x)]) if guided else x)
        if guided:
            n = x.shape[1]
            start = c.text_rows - (torch.full((len(x),), n, device=x.device) if lengths is None else lengths)
            # The reference pads on the left, so a text of n rows meets the last n rows of the unconditional table.
            at = (start[:, None] + torch.arange(n, device=x.device)).clamp(max=c.text_rows - 1)
            x = torch.cat([x, self.cls_embedding.uncond_embedding[at].to(x.dtype)])
        projection = self.cls_embedding.cap_proj
        return projection.fc2(F.gelu(projection.fc1(x), approximate="tanh"))

    def embed(self, tokens: Tensor) -> Tensor:
        """Token values int64 [R, n] to rows [R, n, C]."""
        return self.tok_embeddings(tokens)

    def special_rows(self) -> Tensor:
        """PAR's transition tokens [special, C]."""
        return self.spe_tok_embeddings.special_embeddings.weight

    def places(self, grid: int, prefix: int) -> Places:
        """Positions of a picture of ``grid`` x ``grid`` tokens behind ``prefix`` condition rows."""
        if self.config.absolute:
            return Places(self.abs_pe[0], prefix)
        # The first half of a head's pairs turns with the row, the second with the column.
        half, device = self.config.head_dim // 2, self.tok_embeddings.weight.device
        frequency = 1.0 / ROPE_BASE ** (torch.arange(0, half, 2, device=device).float() / half)
        angle = torch.arange(grid, device=device)[:, None] * frequency
        down, across = angle[:, None].expand(-1, grid, -1), angle[None].expand(grid, -1, -1)
        angle = torch.cat([down, across], dim=-1).flatten(0, 1)
        turn = torch.stack([angle.cos().repeat_interleave(2, 1), angle.sin().repeat_interleave(2, 1)], dim=1)
        turn[:, 1, ::2].neg_()
        return Places(torch.cat([torch.zeros_like(turn[:1]), turn]), 1)

    # -------------------------------------------------------------------------------------------- passes

    def forward(self, x: Tensor, place: Tensor, places: Places, mask: Tensor | None = None) -> Tensor:
        """Logits of whole sequences, without a cache; for training and tests.

        Args:
            x: rows [R, n, C]: prefix, token embeddings, transition tokens, in any order.
            place: int64 [n]; transition tokens stand at -1.
            places: see :meth:`places`.
            mask: bool [n, n], True where a row (first index) sees another; None is causal.

        Returns:
            fp32 [R, n, V]; entry i is what row i predicts.
        """

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask, causal=mask is None)

        return self.logits(self._blocks(x, places.rows(place), look))

    def prefill(self, x: Tensor, grid: int, slots: int, lengths: Tensor | None = None) -> tuple[Tensor, Cache]:
        """Run the prefix and make the cache.

        Args:
            x: prefix rows [R, n, C]; rows at and beyond an image's length are ignored.
            grid: side of the picture in tokens.
            slots: picture slots of the cache.
            lengths: int64 [R], how many rows of each are valid; None for all. Only with 2-D RoPE.

        Returns:
            fp32 logits [R, V] of the last valid row (they predict cell 0), and the cache.
        """
        hidden, cache = self.start(x, grid, slots, lengths)
        return self.logits(hidden)[:, 0], cache

    def start(
        self, x: Tensor, grid: int, slots: int, lengths: Tensor | None = None, picture: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Run the prefix, together with the first cells of a picture, and make the cache.

        Args:
            x, grid, slots, lengths: as for :meth:`prefill`.
            picture: rows [R, m, C] of the cells 0 to m - 1, m at most ``slots``; each sees the prefix and the cells up to itself.

        Returns:
            Hidden rows [R, 1 + m, C] of the last valid prefix row and of the cells (:meth:`logits` of row i predict cell i),
            and the cache.
        """
        c, (rows, n), m = self.config, x.shape[:2], 0 if picture is None else picture.shape[1]
        collapsed = not c.absolute and n > 1
        own = 1 if collapsed else n
        places = self.places(grid, n)
        shape = (rows, c.kv_heads, own + slots, c.head_dim)
        keys, values = ([x.new_zeros(shape) for _ in self.layers] for _ in range(2))
        cache = Cache(keys, values, own, None, places)
        count = torch.full((rows,), n, device=x.device) if lengths is None else lengths
        share = (torch.arange(n, device=x.device) < count[:, None]) / count[:, None]  # [R, n]
        if collapsed:
            cache.bias = torch.zeros(rows, 1, 1, own + slots, device=x.device)
            cache.bias[:, 0, 0, 0] = count.log()
        end, behind = own + m, None
        if collapsed and m:  # the prefix in its full length answers only its own rows
            causal = torch.arange(end, device=x.device) <= own + torch.arange(m, device=x.device)[:, None]
            behind = cache.bias[..., :end].expand(-1, -1, m, -1).masked_fill(~causal, -torch.inf)

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if collapsed:  # the keys are zero, as the cache is
                values[layer][:, :, :1] = (
                    (v[:, :, :n].float() * share[:, None, :, None]).sum(2, keepdim=True).type_as(v)
                )
            else:
                keys[layer][:, :, :n], values[layer][:, :, :n] = k[:, :, :n], v[:, :, :n]
            if m:
                keys[layer][:, :, own:end], values[layer][:, :, own:end] = k[:, :, n:], v[:, :, n:]
            if behind is None:
                return attend(q, k, v, causal=True)
            before = attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], causal=True)
            return torch.cat(
                [before, attend(q[:, :, n:], keys[layer][:, :, :end], values[layer][:, :, :end], behind)], dim=1
            )

        x = x if picture is None else torch.cat([x, picture], dim=1)
        h = self._blocks(x, places.rows(torch.arange(-n, m, device=x.device)), look)
        last = h.gather(1, (count - 1)[:, None, None].expand(-1, 1, c.dim))
        return torch.cat([last, h[:, n:]], dim=1) if m else last, cache

    def step(
        self,
        x: Tensor,
        place: Tensor,
        slot: Tensor,
        cache: Cache,
        end: int,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Feed rows behind what the cache holds, and write them into it.

        Args:
            x, place, slot, cache, end, mask: see :meth:`advance`.
            rows: int64 [m], rows whose prediction is wanted; None for all.

        Returns:
            fp32 logits [R, m, V].
        """
        h = self.advance(x, place, slot, cache, end, mask)
        return self.logits(h if rows is None else h[:, rows])

    def advance(
        self, x: Tensor, place: Tensor, slot: Tensor, cache: Cache, end: int, mask: Tensor | None = None
    ) -> Tensor:
        """Feed rows behind what the cache holds, and write them into it.

        Args:
            x: rows [R, n, C], R at most the cache's: the first R of it are used.
            place: int64 [n], or [R, n] where every batch row has its own.
            slot: int64 of the same shape, cache slots that are written, counted with the prefix.
            cache: from :meth:`prefill` or :meth:`start`.
            end: slots below this one are looked at.
            mask: bool [n, end] or [R, 1, n, end], True where a row sees a slot; None: all of them.

        Returns:
            Hidden rows [R, n, C], for :meth:`logits`.
        """
        bias = None if cache.bias is None else cache.bias[: len(x), ..., :end]
        if mask is not None and bias is not None:
            mask = bias.expand(-1, -1, mask.shape[-2], -1).masked_fill(~mask, -torch.inf)
        elif bias is not None:
            mask = bias.expand(-1, -1, x.shape[1], -1)

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer][: len(x)], cache.values[layer][: len(x)]
            if slot.ndim == 1:
                keys.index_copy_(2, slot, k)
                values.index_copy_(2, slot, v)
            else:
                at = slot[:, None, :, None].expand(k.shape)
                keys.scatter_(2, at, k)
                values.scatter_(2, at, v)
            return attend(q, keys[:, :, :end], values[:, :, :end], mask)

        return self._blocks(x, cache.places.rows(place), look)

    def _blocks(self, x: Tensor, position: Tensor, look: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """All blocks; ``look(layer, q, k, v)`` answers the queries of a block."""
        turn = None if self.config.absolute else position
        if turn is None:
            x = x + position
        for i, block in enumerate(self.layers):
            q, k, v = block.attention.project(block.attention_norm(x), turn)
            x = x + block.attention.wo(look(i, q, k, v))
            x = x + block.feed_forward(block.ffn_norm(x))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """What hidden rows [..., C] predict: fp32 [..., V]."""
        return self.output(self.norm(x)).float()


@dataclass(frozen=True, eq=False)
class TokenModel:
    """A GPT together with what its file (or the catalogue) says about using it.

    Attributes:
        net: the network in eval mode.
        name: what a person calls it, used in messages and reports.
        grid: tokens along one side of the picture: 16 for 256 pixels, 24 for 384, 32 for 512.
        label_set: name of the label list ("imagenet-1k", "picture-book"), or "" if there are no labels or it is unknown.
        ta_tok: of a de-tokenizer: what makes its features of semantic codes, so that it can be given those.
    """

    net: GPT
    name: str
    grid: int
    label_set: str = ""
    ta_tok: TATokModel | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a picture."""
        return self.grid**2

    @property
    def regions(self) -> int:
        """Tokens that PAR decides together; 1 for a plain model."""
        return self.net.config.regions

    def cache_bytes(self, images: int, guided: bool, prefix: int = 1) -> int:
        """Most memory that the cache of a run takes, behind ``prefix`` rows (1 for classes and texts)."""
        c, size = self.net.config, next(self.net.parameters()).element_size()
        return 2 * c.depth * c.kv_heads * c.head_dim * (prefix + self.tokens) * images * (2 if guided else 1) * size


def initialise(net: GPT) -> GPT:
    """Official initialisation: std 0.02 everywhere, unit norms, a zero output layer."""
    for name, p in net.named_parameters():
        if name == "output.weight" or name.endswith(".bias"):
            nn.init.zeros_(p)
        elif p.ndim > 1:
            nn.init.normal_(p, std=0.02)
    return net
