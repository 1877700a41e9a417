"""The token transformer, with the official parameter names: LlamaGen for classes or text, PAR, and Tar's de-tokenizer
AR-DTok, which is the same network with other position encodings and another condition.

Sources: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (arXiv
2406.06525); Wang et al. 2025, "Parallelized Autoregressive Visual Generation" (arXiv 2412.15119). Dropout is omitted:
it has no parameters and is off at inference. The sampling loop is in ``samplers``.

A sequence is a *prefix* (the condition) followed by image tokens. A row's *position* is its cell of the grid in raster
order; the last row of the prefix has position -1, the one before it -2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import attend
from .gpt_config import GPTConfig
from .graphs import Graphs, Input
from .layers import Block, Caption, RMSNorm, Special, Table, advance, advance_serial, rest
from .ops import Linear
from .rope import PositionTable, grid_table
from .speed import COMPILE, PLAIN, Regional
from .ta_tok import TATokModel
from .token_cache import SLOTS, Cache, lend

NORM_EPS = 1e-5

# (block index, queries, keys followed by values) of one block to its attention output [R, n, C]; may read and write a cache.
PairAttention = Callable[[int, Tensor, Tensor], Tensor]


class GPT(Regional):
    """The transformer. ``condition`` tensors are, by ``config.condition``:

    - "class": labels int64 [B];
    - "text": features [B, n, E], left-aligned, with ``lengths`` int64 [B];
    - "features": features [B, n, E]; "codes": int64 [B, n].

    With 2-D RoPE the queries and keys of the prefix are *zero*, because the official rotation table is zero there: every
    image token attends to all prefix values equally. A text of n rows is therefore kept in one slot, exactly: key 0, the mean
    of the n values, and log n added to its score.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = c = config
        if c.condition == "class":
            self.cls_embedding: nn.Module = Table(c.condition_size + 1, c.dim)
        elif c.condition == "text":
            self.cls_embedding = Caption(c.condition_size, c.dim, c.text_rows)
        elif c.condition == "codes":
            self.clip_proj: nn.Module = Table(c.condition_size + 1, c.dim)
        else:
            self.clip_proj = nn.Linear(c.condition_size, c.dim)
        if c.absolute:
            self.abs_pe = nn.Parameter(torch.zeros(1, c.absolute, c.dim))
        self.tok_embeddings = nn.Embedding(c.vocab, c.dim)
        if c.special:
            self.spe_tok_embeddings = Special(c.special, c.dim)
        self.layers = nn.ModuleList(
            Block(c.dim, c.heads, c.kv_heads, c.head_dim, c.hidden, NORM_EPS) for _ in range(c.depth)
        )
        self.norm, self.output = RMSNorm(c.dim, NORM_EPS), Linear(c.dim, c.vocab)

    # -------------------------------------------------------------------------------------------- inputs

    def prefix(self, condition: Tensor, lengths: Tensor | None = None, guided: bool = False) -> Tensor:
        """Prefix rows [B, n, C] of a condition; with ``guided`` followed by those of the null condition, [2 B, n, C]."""
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
            # The reference pads on the left, so a text of n rows is paired with the last n rows of the null table.
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

    def positions(self, grid: int, prefix: int) -> PositionTable:
        """Position encodings of ``grid`` x ``grid`` tokens behind ``prefix`` condition rows."""
        if self.config.absolute:
            return PositionTable(self.abs_pe[0], prefix)
        return PositionTable(grid_table(grid, self.config.head_dim, self.tok_embeddings.weight.device), 1)

    # -------------------------------------------------------------------------------------------- passes

    def forward(self, x: Tensor, position: Tensor, positions: PositionTable, mask: Tensor | None = None) -> Tensor:
        """Logits of whole sequences, without a cache; for training and tests.

        Args:
            x: rows [R, n, C]: prefix, token embeddings, transition tokens, in any order.
            position: int64 [n]; -1 for transition tokens.
            positions: see :meth:`positions`.
            mask: bool [n, n], True where a query (first index) attends to a key; None: causal.

        Returns:
            fp32 [R, n, V]; entry i is the prediction of row i.
        """

        def attention(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            k, v = kv.chunk(2, dim=1)
            return attend(q, k, v, mask, causal=mask is None)

        return self.logits(self._blocks(x, positions.rows(position), attention))

    def prefill(
        self, x: Tensor, grid: int, slots: int, lengths: Tensor | None = None, serial: bool = False
    ) -> tuple[Tensor, Cache]:
        """Run the prefix and allocate the cache.

        Args:
            x: prefix rows [R, n, C]; rows at and beyond an image's length are ignored.
            grid: side of the image in tokens.
            slots: image slots of the cache.
            lengths: int64 [R], valid rows of each prefix; None: all. Only with 2-D RoPE.
            serial: whether most passes feed one token behind all others, which takes fewer launches on a GPU then.

        Returns:
            fp32 logits [R, V] of the last valid row (the prediction of cell 0), and the cache.
        """
        hidden, cache = self.start(x, grid, slots, lengths, serial=serial)
        return self.logits(hidden)[:, 0], cache

    def start(
        self,
        x: Tensor,
        grid: int,
        slots: int,
        lengths: Tensor | None = None,
        image: Tensor | None = None,
        serial: bool = False,
    ) -> tuple[Tensor, Cache]:
        """Run the prefix together with the first cells of an image, and allocate the cache.

        Args:
            x, grid, slots, lengths, serial: as for :meth:`prefill`.
            image: rows [R, m, C] of the cells 0 to m - 1, m <= ``slots``; each attends to the prefix and to the cells up to
                itself.

        Returns:
            Hidden rows [R, 1 + m, C] of the last valid prefix row and of the cells (row i predicts cell i), and the cache.
        """
        c, (rows, n), m = self.config, x.shape[:2], 0 if image is None else image.shape[1]
        collapsed = not c.absolute and n > 1
        prefix = 1 if collapsed else n
        end = prefix + m
        shape = (rows, 2 * c.kv_heads, prefix + slots, c.head_dim)
        serial = serial and x.device.type != "cpu" and self.speed == PLAIN
        cache = lend(
            self.captured(), (shape, n, grid, x.dtype), partial(self._cache, shape, prefix, n, grid, x, serial)
        )
        positions = cache.positions
        keys, values = cache.keys, cache.values
        count = torch.full((rows,), n, device=x.device) if lengths is None else lengths
        share = (torch.arange(n, device=x.device) < count[:, None]) / count[:, None]  # [R, n]
        if collapsed:
            assert cache.bias is not None
            cache.bias[:, 0, 0, 0] = count.log()
        image_mask = None
        if collapsed and m:  # the uncollapsed prefix is visible to its own rows only
            causal = torch.arange(end, device=x.device) <= prefix + torch.arange(m, device=x.device)[:, None]
            image_mask = cache.bias[..., :end].expand(-1, -1, m, -1).masked_fill(~causal, -torch.inf)

        def attention(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            k, v = kv.chunk(2, dim=1)
            if collapsed:  # the keys are zero, like the new cache
                mean = (v[:, :, :n].float() * share[:, None, :, None]).sum(2, keepdim=True)
                values[layer][:, :, :1] = mean.type_as(v)
            else:
                keys[layer][:, :, :n], values[layer][:, :, :n] = k[:, :, :n], v[:, :, :n]
            if m:
                keys[layer][:, :, prefix:end], values[layer][:, :, prefix:end] = k[:, :, n:], v[:, :, n:]
            if image_mask is None:
                return attend(q, k, v, causal=True)
            of_prefix = attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], causal=True)
            of_image = attend(q[:, :, n:], keys[layer][:, :, :end], values[layer][:, :, :end], image_mask)
            return torch.cat([of_prefix, of_image], dim=1)

        x = x if image is None else torch.cat([x, image], dim=1)
        h = self._blocks(x, positions.rows(torch.arange(-n, m, device=x.device)), attention)
        last = h.gather(1, (count - 1)[:, None, None].expand(-1, 1, c.dim))
        return torch.cat([last, h[:, n:]], dim=1) if m else last, cache

    def step(
        self,
        x: Tensor,
        position: Tensor,
        slot: Tensor,
        cache: Cache,
        end: int,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """:meth:`advance`, followed by the logits.

        Args:
            x, position, slot, cache, end, mask, last: see :meth:`advance`.
            rows: int64 [m], rows whose logits are computed; None: all.

        Returns:
            fp32 logits [R, m, V].
        """
        graphs = self.captured()
        if graphs is not None and cache.lasting is not None:
            found = self._replayed(graphs, x, position, slot, cache, end, rows, mask)
            if found is not None:
                return found
        h = self.advance(x, position, slot, cache, end, mask, last)
        return self.logits(h if rows is None else h[:, rows])

    def _cache(
        self, shape: tuple[int, int, int, int], prefix: int, n: int, grid: int, like: Tensor, serial: bool
    ) -> Cache:
        """An empty cache with tensors of this shape and the type of ``like``, behind a condition of n rows."""
        c, positions = self.config, self.positions(grid, n)
        if serial:
            cache = Cache.serial((len(self.layers), *shape), c.heads * c.head_dim, like, prefix, positions)
        else:
            cache = Cache.of([like.new_zeros(shape) for _ in self.layers], prefix, positions)
        if prefix < n:
            cache.shifted = torch.zeros(shape[0], 1, 1, 1 + shape[2], device=like.device)
            cache.bias = cache.shifted[..., 1:]
        return cache

    def _replayed(
        self,
        graphs: Graphs,
        x: Tensor,
        position: Tensor,
        slot: Tensor,
        cache: Cache,
        end: int,
        rows: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor | None:
        """:meth:`step` as a captured function, with the key length rounded up; None if that failed."""
        most = min(-(-end // SLOTS) * SLOTS, cache.pairs[0].shape[2])
        if mask is None:
            mask = (torch.arange(most, device=x.device) < end).expand(x.shape[1], -1)
        else:
            mask = F.pad(mask, (0, most - end))
        lasting = cache.lasting
        assert lasting is not None

        def function(x: Tensor, position: Tensor, slot: Tensor, mask: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
            h = self.advance(x, position, slot, lasting, most, mask)
            return (self.logits(h[:, rows[0]] if rows else h),)

        given = [x, position, slot, mask, *(() if rows is None else (rows,))]
        found = graphs.run(("step", id(lasting)), function, [Input(value) for value in given])
        return None if found is None else found[0]

    def advance(
        self,
        x: Tensor,
        position: Tensor,
        slot: Tensor,
        cache: Cache,
        end: int,
        mask: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """Feed rows behind the cached ones, and write their keys and values into the cache.

        Args:
            x: rows [R, n, C]; R may be less than the cache's, then its first R rows are used.
            position: int64 [n], or [R, n] if the batch rows differ.
            slot: int64 of the same shape, cache slots to write, counted with the prefix.
            cache: from :meth:`prefill` or :meth:`start`.
            end: slots below this one are attended to.
            mask: bool [n, end] or [R, 1, n, end], True where a row attends to a slot; None: everywhere.
            last: whether there is one row, whose slot is ``end`` - 1, and no mask.

        Returns:
            Hidden rows [R, n, C], for :meth:`logits`.
        """
        if last and cache.rows is not None:
            return self._advance_serial(x, position, slot, cache, end)
        bias = None if cache.bias is None else cache.bias[: len(x), ..., :end]
        if mask is not None and bias is not None:
            mask = bias.expand(-1, -1, mask.shape[-2], -1).masked_fill(~mask, -torch.inf)
        elif bias is not None:
            mask = bias.expand(-1, -1, x.shape[1], -1)

        x, rope = self._encoded(x, cache.positions.rows(position))
        if rope is not None and self.speed == COMPILE:  # the compiler has no complex numbers
            rope = torch.view_as_real(rope)
        run = self.region(advance)
        for i, block in enumerate(self.layers):
            x = run(block, x, rope, cache.pairs[i][: len(x)], slot, end, mask, i > 0)
        return x

    def _advance_serial(self, x: Tensor, position: Tensor, slot: Tensor, cache: Cache, end: int) -> Tensor:
        """:meth:`advance` of the newest token, for a cache with ``rows``."""
        assert cache.rows is not None and cache.storage is not None
        batch = len(x)
        bias = None if cache.shifted is None else cache.shifted[:batch, ..., :end]
        x, rope = self._encoded(x, cache.positions.rows(position))
        for i, block in enumerate(self.layers):
            x = advance_serial(block, x, rope, cache.storage[i, :batch], end, bias, i > 0)
        rows = cache.rows[:, :batch]
        rows[:, :, 1:].index_copy_(2, slot, rows[:, :, :1])
        return x

    def _blocks(self, x: Tensor, encoding: Tensor, attention: PairAttention) -> Tensor:
        """All blocks. ``encoding``: rows of the position table, RoPE or additive."""
        x, rope = self._encoded(x, encoding)
        for i, block in enumerate(self.layers):
            q, kv = block.attention.project(block.attention_norm(x), rope)
            x = rest(block, x, attention(i, q, kv), i > 0)
        return x

    def _encoded(self, x: Tensor, encoding: Tensor) -> tuple[Tensor, Tensor | None]:
        """The blocks' input, with additive encodings in it, and RoPE or None."""
        return (x + encoding, None) if self.config.absolute else (x, encoding)

    def logits(self, x: Tensor) -> Tensor:
        """Predictions fp32 [..., V] of hidden rows [..., C]."""
        return self.output(self.norm(x)).float()


@dataclass(frozen=True, eq=False)
class TokenModel:
    """A GPT with the metadata of its file or of the catalogue.

    Attributes:
        net: the network in eval mode.
        name: display name, used in messages and reports.
        grid: tokens along one side of the image: 16 for 256 pixels, 24 for 384, 32 for 512.
        label_set: name of the label list ("imagenet-1k", "picture-book"), or "" if there are no labels or it is unknown.
        ta_tok: of a de-tokenizer: the TA-Tok that computes its features from semantic codes.
    """

    net: GPT
    name: str
    grid: int
    label_set: str = ""
    ta_tok: TATokModel | None = None

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.grid**2

    @property
    def regions(self) -> int:
        """Tokens that PAR decides in one pass; 1 for a plain model."""
        return self.net.config.regions

    def cache_bytes(self, images: int, guided: bool, prefix: int = 1) -> int:
        """Upper bound of a run's cache memory, with ``prefix`` condition slots (1 for classes and texts)."""
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
