"""Harmon and UniPic: a MAR with a language model between encoder and decoder, with the official parameter names.

Sources: Wu et al. 2025, "Harmonizing Visual Representations for Unified Multimodal Understanding and Generation" (Harmon, arXiv
2503.21979); Wang et al. 2025, "Skywork UniPic" (arXiv 2508.03320). Both are Qwen2.5, the encoder, decoder and diffusion head of
MAR, and two MLPs.

The MAR's encoder does not depend on the prompt, so its output is the same in both branches of guidance. The language model reads
``[prompt | known tokens in raster order | buffer rows]`` with causal attention; its output is added to the encoder's. Rows of
different length are padded at the end, behind the buffer rows, where causal attention hides the padding without a mask.
Between AR steps only the prompts' keys and values are kept: the encoder is bidirectional and new tokens lie between old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .llama import Llama, LlamaConfig, attend
from .llama import initialise as initialise_llm
from .mar import MAR, DiffusionHead, MARConfig, Work, pick
from .mar import initialise as initialise_mar

MAR_PREFIX, LLM_PREFIX = "mar.", "llm."
# Position tables of the MAR; the first two also have buffer rows.
TABLES = ("encoder_pos_embed_learned", "decoder_pos_embed_learned", "diffusion_pos_embed_learned")
# Attention heads of the official language models by width, which no state dict holds.
OFFICIAL_HEADS = {896: 14, 1536: 12}
_LABELS = "class_emb.weight"


@dataclass(frozen=True)
class HybridConfig:
    """Shape of a hybrid: of its MAR, without class labels, and of its language model."""

    mar: MARConfig
    llm: LlamaConfig

    @staticmethod
    def from_state_dict(
        state: Mapping[str, Tensor],
        heads: int | None = None,
        mar_heads: int | None = None,
        positions: int = 32768,
        theta: float = 1e6,
        eps: float = 1e-6,
    ) -> HybridConfig:
        """Derive the shape from official parameter names; class labels and an output matrix are ignored.

        Args:
            state: parameter names to tensors.
            heads, mar_heads: attention heads of the language model and of the MAR; None: the official models' of the same width.
            positions, theta, eps: of the language model, see :class:`.llama.LlamaConfig`.

        Raises:
            KeyError: the state dict is not a hybrid's.
            ValueError: a head count is unknown or does not fit.
        """
        mar = {k.removeprefix(MAR_PREFIX): t for k, t in state.items() if k.startswith(MAR_PREFIX)}
        llm = {k.removeprefix(LLM_PREFIX): t for k, t in state.items() if k.startswith(f"{LLM_PREFIX}model.")}
        mar[_LABELS] = torch.empty(0, mar["fake_latent"].shape[1])
        width = llm["model.embed_tokens.weight"].shape[1]
        heads = heads or OFFICIAL_HEADS.get(width)
        if heads is None:
            raise ValueError(
                f"a language model of width {width} is none of the official sizes; "
                "state llm.num_attention_heads in config.json"
            )
        return HybridConfig(
            MARConfig.from_state_dict(mar, mar_heads), LlamaConfig.of_qwen(llm, heads, positions, theta, eps)
        )

    def llm_flops(self, rows: int, before: int) -> int:
        """Floating-point operations (2 per multiply-add) of ``rows`` rows in the language model, behind ``before`` others."""
        c = self.llm
        linear = c.dim * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.dim * c.hidden
        visible = rows * before + rows * (rows + 1) // 2
        return 2 * c.depth * (rows * linear + 2 * c.heads * c.head_dim * visible)

    def mar_flops(self, work: Work) -> int:
        """Floating-point operations of a pass of the MAR's encoder and decoder."""
        c = self.mar
        after = 9 * c.dim**2  # output projection and MLP
        encoder = work.encoder * (3 * c.dim**2 + after + 2 * c.dim * work.encoder_keys)
        decoder = work.decoder * (3 * c.dim**2 + after + 2 * c.dim * work.decoder_keys)
        last = work.decoder * 3 * c.dim**2 + work.last * (after + 2 * c.dim * work.decoder_keys)
        return 2 * (c.encoder_depth * encoder + (c.decoder_depth - 1) * decoder + last)

    def head_flops(self, rows: int) -> int:
        """Floating-point operations of head rows: tokens times diffusion steps, both branches of guidance."""
        c = self.mar
        w = c.head_width
        return 2 * rows * (c.head_depth * 5 * w * w + 2 * w * w + 3 * w * c.channels)


def resize_table(table: Tensor, side: int, height: int, width: int) -> Tensor:
    """A position table at another grid, bilinear without antialiasing, as upstream.

    Args:
        table: fp32 [1, rows + side * side, C]; rows before the grid are kept.
        side: tokens per side of the table's grid.
        height, width: tokens of the new grid.

    Returns:
        [1, rows + height * width, C].
    """
    if (height, width) == (side, side):
        return table
    before, grid = table.split([table.shape[1] - side**2, side**2], 1)
    grid = grid.transpose(1, 2).unflatten(2, (side, side))
    grid = F.interpolate(grid, size=(height, width), mode="bilinear", align_corners=False)
    return torch.cat([before, grid.flatten(2).transpose(1, 2)], 1)


class PromptCache(NamedTuple):
    """Keys (rotated) and values of one prompt of P tokens, [layers, kv heads, P, D]."""

    keys: Tensor
    values: Tensor


class _Group(NamedTuple):
    """Rows int64 [G] of a batch whose prompts are equally long (None: all rows), the index of each row's prompt, int64 [G], and
    keys and values of the distinct prompts, [layers, U, kv heads, P, D]."""

    rows: Tensor | None
    prompt: Tensor
    keys: Tensor
    values: Tensor


class PromptBatch:
    """Prompts of R rows, grouped by length so that attention needs no padding mask.

    Args:
        prompts: one entry a row; equal prompts are the same object.
    """

    def __init__(self, prompts: Sequence[PromptCache]):
        device = prompts[0].keys.device
        self.host_lengths = [p.keys.shape[2] for p in prompts]
        self.lengths = torch.tensor(self.host_lengths, device=device)
        self.groups: list[_Group] = []
        for length in sorted(set(self.host_lengths)):
            rows = [i for i, n in enumerate(self.host_lengths) if n == length]
            distinct = {id(prompts[i]): prompts[i] for i in rows}
            number = {key: j for j, key in enumerate(distinct)}
            where = None if len(rows) == len(prompts) else torch.tensor(rows, device=device)
            which = torch.tensor([number[id(prompts[i])] for i in rows], device=device)
            keys, values = (torch.stack(t, 1) for t in zip(*distinct.values(), strict=True))
            self.groups.append(_Group(where, which, keys, values))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output [R, n, C] of the last n of S rows over the prompt and the rows up to their own.

        Args:
            layer: index of the block.
            q: queries [R, heads, n, D].
            k, v: keys and values [R, kv heads, S, D].
        """
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler

        n, repeats = q.shape[2], q.shape[1] // k.shape[1]
        out = q.new_empty(len(q), n, q.shape[1] * q.shape[3])
        for g in self.groups:
            rows = slice(None) if g.rows is None else g.rows
            keys, values = (torch.cat([t[layer][g.prompt], x[rows]], 2) for t, x in ((g.keys, k), (g.values, v)))
            keys, values = (t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (keys, values))
            # The queries belong to the last keys; ``is_causal`` would align the first query with the first key.
            mask = causal_lower_right(n, keys.shape[2])
            out[rows] = F.scaled_dot_product_attention(q[rows], keys, values, mask).transpose(1, 2).flatten(2)
        return out


@dataclass(eq=False)
class TokenCache:
    """Keys and values of known tokens in the language model, kept between AR steps (LazyMAR).

    Attributes:
        live: rows of the batch whose features are kept, the first ones.
        room: rows that fit into the cache.
        keys, values: one tensor per block, [live, kv heads, room, D]; buffer rows of the last call lie behind the tokens.
    """

    live: int
    room: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def store(self, k: Tensor, v: Tensor, count: int) -> None:
        """Keep the next block's first ``count`` keys and values of [R, kv heads, n, D]."""
        for stores, t in ((self.keys, k), (self.values, v)):
            stores.append(t.new_empty(self.live, t.shape[1], self.room, t.shape[3]))
            stores[-1][:, :, :count] = t[: self.live, :, :count]


def _mlp(inner: int, width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inner, width), nn.SiLU(), nn.Linear(width, out))


class Hybrid(nn.Module):
    """MAR encoder, language model, MAR decoder and diffusion head."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.config = config
        c, h = config.mar.dim, config.llm.dim
        self.mar, self.llm = MAR(config.mar), Llama(replace(config.llm, tied=True))
        self.proj_in, self.proj_out = _mlp(c, h, h), _mlp(h, h, c)

    @property
    def head(self) -> DiffusionHead:
        return self.mar.head

    # -------------------------------------------------------------------------------------------- training

    def forward(
        self, tokens: Tensor, known: Tensor, ids: Tensor, lengths: Tensor, wanted: Tensor | None = None
    ) -> Tensor:
        """z as ``MAR.decode``'s, prompts included in the sequence; differentiable, for training and tests.

        Args:
            tokens: fp32 [B, L, channels]; only the known positions are read.
            known: int64 [B, K], known positions, ascending.
            ids, lengths: prompts int64 [B, P], padded at the end, and their tokens, int64 [B].
            wanted: int64 [B, M], positions whose z is needed; None for all L.
        """
        encoded = self.mar.encode(tokens, known, self.mar.class_rows(None, len(tokens)))
        return self.mar.decode(self.fuse_ids(encoded, known, ids, lengths), known, wanted)

    def fuse_ids(self, encoded: Tensor, known: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """:meth:`fuse` for training: prompts are included in the sequence; differentiable. Arguments as for :meth:`forward`."""
        most, order = ids.shape[1], self.llm_order(known)
        y = pick(self.proj_in(encoded), order)
        # Prompt, picture, then the prompt's padding.
        slot = torch.arange(most + y.shape[1], device=ids.device).expand(len(ids), -1).clone()
        padding = torch.arange(most, device=ids.device) >= lengths[:, None]
        slot[:, :most] += padding * y.shape[1]
        slot[:, most:] -= (most - lengths)[:, None]
        x = pick(torch.cat([self.llm.tok_embeddings(ids), y], 1), slot.argsort(1))
        position = torch.arange(x.shape[1], device=ids.device)[None]
        h = self.llm.hidden(x, position, lambda layer, q, k, v: attend(q, k, v, causal=True))
        h = pick(h, slot[:, most:])
        return encoded + self.proj_out(pick(h, order.argsort(1)))

    # -------------------------------------------------------------------------------------------- sampling

    def read(self, ids: Tensor) -> PromptCache:
        """Keys and values of a prompt, int64 [P]."""
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k[0])
            values.append(v[0])
            return attend(q, k, v, causal=True)

        self.llm.hidden(self.llm.tok_embeddings(ids[None]), torch.arange(len(ids), device=ids.device)[None], attention)
        return PromptCache(torch.stack(keys), torch.stack(values))

    def llm_order(self, known: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Indices of the encoder's rows in the language model's order, int64 [B, buffer + K]: tokens by position, buffer rows, padding.

        ``known`` int64 [B, K], in any order; ``padding_mask`` bool [B, K], False for padding, None for none.
        """
        c, (batch, count) = self.config.mar, known.shape
        last = c.tokens + c.buffer
        buffers = torch.arange(c.tokens, last, device=known.device).expand(batch, -1)
        if padding_mask is not None:
            known = torch.where(padding_mask, known, last + torch.arange(count, device=known.device))
        return torch.cat([buffers, known], 1).argsort(1)

    def fuse(
        self,
        encoded: Tensor,
        known: Tensor,
        prompts: PromptBatch,
        padding_mask: Tensor | None = None,
        cache: TokenCache | None = None,
    ) -> Tensor:
        """The decoder's input rows [R, buffer + K, C]: encoder output plus what the language model adds to it.

        Args:
            encoded, known, padding_mask: as for ``mar.encode``, and its output [B, buffer + K, C].
            prompts: of R rows, a multiple of B; rows b, B + b, ... belong to image b.
            cache: receives the known tokens' keys and values.
        """
        branches = len(prompts.lengths) // len(encoded)
        order = self.llm_order(known, padding_mask)
        y = pick(self.proj_in(encoded), order).repeat(branches, 1, 1)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if cache is not None:
                cache.store(k, v, known.shape[1])
            return prompts.attend(layer, q, k, v)

        h = self.llm.hidden(y, self._positions(prompts, 0, y.shape[1]), attention)
        back = order.argsort(1).repeat(branches, 1)
        return encoded.repeat(branches, 1, 1) + self.proj_out(pick(h, back))

    def extend(self, encoded: Tensor, prompts: PromptBatch, cache: TokenCache, at: int) -> Tensor:
        """:meth:`fuse` for new tokens and the buffer rows only, [R, N + buffer, C]; the tokens' keys and values go to the cache.

        Args:
            encoded: [B, N + buffer, C], encoder output of N new tokens, then the buffer rows.
            prompts, cache: of R rows, a multiple of B.
            at: tokens in the cache. The new ones get the positions behind them, not those of their raster order.
        """
        branches = len(prompts.lengths) // len(encoded)
        y, end = self.proj_in(encoded).repeat(branches, 1, 1), at + encoded.shape[1]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys[:, :, at:end], values[:, :, at:end] = k, v
            return prompts.attend(layer, q, keys[:, :, :end], values[:, :, :end])

        h = self.llm.hidden(y, self._positions(prompts, at, encoded.shape[1]), attention)
        return encoded.repeat(branches, 1, 1) + self.proj_out(h)

    @staticmethod
    def _positions(prompts: PromptBatch, at: int, count: int) -> Tensor:
        """Positions int64 [R, count] behind each row's prompt and ``at`` tokens."""
        return prompts.lengths[:, None] + at + torch.arange(count, device=prompts.lengths.device)


def initialise(net: Hybrid) -> Hybrid:
    """Official initialisation of the parts; Xavier matrices in the MLPs between them."""
    initialise_mar(net.mar)
    initialise_llm(net.llm)
    for layer in (*net.proj_in, *net.proj_out):
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return net
