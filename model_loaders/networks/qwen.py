"""The language model that generates Tar's semantic codes: Qwen2.5's architecture with the official parameter names.

Sources: Qwen Team 2024, "Qwen2.5 Technical Report" (arXiv 2412.15115); Han et al. 2025, "Vision as a Dialect: Unifying Visual
Understanding and Generation via Text-Aligned Representations" (Tar, arXiv 2506.18898), which adds image codes to its
vocabulary and changes nothing else. The sampling loop is in ``samplers``.

Prompts of a batch differ in length. They are right-padded for the prefill, and every code is written behind the longest
prompt: code k has the same cache slot in all images. A padding mask hides the padding, so that positions and attention are
exactly those of each prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UserError
from .attention import AttentionFunction, KVCache, attend
from .layers import RMSNorm
from .ops import Embedding, Linear, linear
from .rope import angles, rotate_halves
from .structure import depth

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYERS, _FIRST = "model.layers.", "model.layers.0."
# Head width of Qwen2.5's larger models; no state dict holds the head count.
_HEAD_DIM = 128
# System sentence of the chat template, see :meth:`TarModel.prompt`.
_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class QwenConfig:
    """Shape of the language model.

    Attributes:
        dim: width C.
        depth: number of blocks.
        heads, kv_heads: attention heads, key and value heads.
        head_dim: width of a head D.
        hidden: inner width of the feed-forward part.
        vocab: rows of the embedding.
        tied: whether the embedding is also the output matrix.
        positions: maximum sequence length.
        theta: base of RoPE.
        eps: of the norms.
    """

    dim: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    tied: bool = True
    positions: int = 32768
    theta: float = 1e6
    eps: float = 1e-6

    @staticmethod
    def from_state_dict(
        state: Mapping[str, Tensor],
        heads: int | None = None,
        positions: int = 32768,
        theta: float = 1e6,
        eps: float = 1e-6,
    ) -> QwenConfig:
        """Derive the shape from official parameter names.

        Args:
            state: parameter names to tensors; without an output matrix, embedding and output are tied.
            heads: attention heads; None: heads of width 128.
            positions, theta, eps: see the attributes.

        Raises:
            KeyError: the state dict is not one of a Qwen2.
            ValueError: the head count does not fit the weights.
        """
        vocab, dim = state[EMBEDDING].shape
        inner, own = (state[f"{_FIRST}self_attn.{part}_proj.weight"].shape[0] for part in "qk")
        heads = heads or inner // _HEAD_DIM
        if heads < 1 or inner % heads:
            raise ValueError(
                f"{heads} attention heads do not fit queries of {inner} numbers; num_attention_heads must be right"
            )
        head_dim = inner // heads
        if head_dim % 2 or own % head_dim or own < head_dim or heads % (own // head_dim):
            raise ValueError(
                f"{heads} attention heads do not fit keys of {own} numbers; num_attention_heads must be right"
            )
        return QwenConfig(
            dim=dim,
            depth=depth(state, _LAYERS),
            heads=heads,
            kv_heads=own // head_dim,
            head_dim=head_dim,
            hidden=state[f"{_FIRST}mlp.gate_proj.weight"].shape[0],
            vocab=vocab,
            tied=HEAD not in state,
            positions=positions,
            theta=theta,
            eps=eps,
        )


# ------------------------------------------------------------------------------------------------ layers


class _BiasedLinear(Linear):
    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=True)


class _Attention(nn.Module):
    def __init__(self, c: QwenConfig):
        super().__init__()
        self.q_proj = _BiasedLinear(c.dim, c.heads * c.head_dim)
        self.k_proj, self.v_proj = (_BiasedLinear(c.dim, c.kv_heads * c.head_dim) for _ in range(2))
        self.o_proj = Linear(c.heads * c.head_dim, c.dim)
        self.head_dim = c.head_dim

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, n, C] to queries [R, heads, n, D], keys and values [R, kv heads, n, D]; queries and keys are rotated."""
        q, k, v = (
            part(x).reshape(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate_halves(q, *rope), rotate_halves(k, *rope), v


class _FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Linear(dim, hidden), Linear(dim, hidden), Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Block(nn.Module):
    def __init__(self, c: QwenConfig):
        super().__init__()
        self.self_attn, self.mlp = _Attention(c), _FeedForward(c.dim, c.hidden)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c.dim, c.eps), RMSNorm(c.dim, c.eps)


class _Trunk(nn.Module):
    def __init__(self, c: QwenConfig):
        super().__init__()
        self.embed_tokens = Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(_Block(c) for _ in range(c.depth))
        self.norm = RMSNorm(c.dim, c.eps)


@dataclass(eq=False)
class PromptCache(KVCache):
    """KV cache of one run: the prompts' slots, then one slot per code.

    Attributes:
        lengths: int64 [R], tokens of each prompt.
        prompt: slots of the longest prompt.
        padding_mask: bool [R, 1, 1, slots], False on the padding of shorter prompts; None without padding.
    """

    lengths: Tensor
    prompt: int
    padding_mask: Tensor | None


class QwenLM(nn.Module):
    """The language model. Logits are computed for a half-open range of token ids only, ``span``."""

    def __init__(self, config: QwenConfig):
        super().__init__()
        self.config = config
        self.model = _Trunk(config)
        if not config.tied:
            self.lm_head = Linear(config.dim, config.vocab)

    @property
    def compute_device(self) -> torch.device:
        """Device of the computation; large weights may be elsewhere."""
        return self.model.norm.weight.device

    def forward(self, ids: Tensor, span: tuple[int, int] | None = None) -> Tensor:
        """Logits of whole sequences, without a cache; for training and tests.

        Args:
            ids: int64 [R, n].
            span: None: the whole vocabulary.

        Returns:
            fp32 [R, n, values]; entry i is the prediction of token i.
        """

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _causal(q, k, v)

        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        h = self._blocks(self.model.embed_tokens(ids), positions, attention)
        return self._logits(h, span or (0, self.config.vocab))

    def prefill(
        self, ids: Tensor, lengths: Tensor, slots: int, span: tuple[int, int], images: Tensor | None = None
    ) -> tuple[Tensor, PromptCache]:
        """Run the prompts and allocate the cache.

        Args:
            ids: int64 [P, n], one prompt per row; ids at and beyond its length are ignored.
            lengths: int64 [P], 1 to n.
            slots: number of codes that will be fed.
            span: see the class.
            images: int64 [R], index of every image's prompt, so that a prompt of several images runs once; None: 0 to P - 1.

        Returns:
            fp32 logits [R, values] of the first code, and the cache of R images.
        """
        c, n = self.config, ids.shape[1]
        images = torch.arange(len(ids), device=ids.device) if images is None else images
        x, prompt_lengths, lengths = self.model.embed_tokens(ids), lengths, lengths[images]
        shape = (len(images), c.kv_heads, n + slots, c.head_dim)
        keys, values = ([x.new_zeros(shape) for _ in self.model.layers] for _ in range(2))
        slot = torch.arange(n + slots, device=ids.device)
        padding_mask = (slot < lengths[:, None]) | (slot >= n)
        ragged = bool((lengths < n).any())
        cache = PromptCache(keys, values, lengths, n, padding_mask[:, None, None] if ragged else None)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer][:, :, :n], values[layer][:, :, :n] = k[images], v[images]
            return _causal(q, k, v)

        h = self._blocks(x, torch.arange(n, device=ids.device)[None], attention)
        last = h.gather(1, (prompt_lengths - 1)[:, None, None].expand(-1, 1, c.dim))
        return self._logits(last, span)[images, 0], cache

    def step(self, ids: Tensor, at: int, cache: PromptCache, span: tuple[int, int]) -> Tensor:
        """Feed the next token of every image, and write it into the cache.

        Args:
            ids: int64 [R].
            at: number of codes fed before; 0, 1, 2, ... in order.
            cache: from :meth:`prefill`.
            span: see the class.

        Returns:
            fp32 logits [R, values].
        """
        slot = cache.prompt + at
        mask = None if cache.padding_mask is None else cache.padding_mask[..., : slot + 1]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys[:, :, slot : slot + 1], values[:, :, slot : slot + 1] = k, v
            return attend(q, keys[:, :, : slot + 1], values[:, :, : slot + 1], mask)

        h = self._blocks(self.model.embed_tokens(ids[:, None]), (cache.lengths + at)[:, None], attention)
        return self._logits(h, span)[:, 0]

    def advance(
        self, ids: Tensor, at: Tensor, slot: Tensor, visible: Tensor, cache: PromptCache, span: tuple[int, int]
    ) -> Tensor:
        """Feed several tokens of every image, and write them into the cache.

        Args:
            ids: int64 [R, n].
            at: int64 [R, n], number of codes before each.
            slot: int64 [R, n], cache slots to write, counted with the prompt.
            visible: bool [R, n, end], slots that a token attends to; the padding of prompts is excluded here.
            cache: from :meth:`prefill`.
            span: see the class.

        Returns:
            fp32 logits [R, n, values].
        """
        end = visible.shape[2]
        mask = visible[:, None]
        if cache.padding_mask is not None:
            mask = mask & cache.padding_mask[..., :end]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            target = slot[:, None, :, None].expand(k.shape)
            keys.scatter_(2, target, k)
            values.scatter_(2, target, v)
            return attend(q, keys[:, :, :end], values[:, :, :end], mask)

        h = self._blocks(self.model.embed_tokens(ids), cache.lengths[:, None] + at, attention)
        return self._logits(h, span)

    def hidden(self, x: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Last hidden states, after the final norm, of embeddings that need not be tokens of the vocabulary.

        Args:
            x: [R, n, C].
            positions: int64 [R or 1, n].
            attention: attention of every block; may read and write a cache.

        Returns:
            [R, n, C].
        """
        return self.model.norm(self._blocks(x, positions, attention))

    def _blocks(self, x: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """All blocks, at positions int64 [R or 1, n]."""
        rope = angles(positions, self.config.head_dim, self.config.theta)
        for i, block in enumerate(self.model.layers):
            q, k, v = block.self_attn.project(block.input_layernorm(x), rope)
            x = x + block.self_attn.o_proj(attention(i, q, k, v))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return x

    def _logits(self, x: Tensor, span: tuple[int, int]) -> Tensor:
        head, h = self.model.embed_tokens if self.config.tied else self.lm_head, self.model.norm(x)
        if head.away():
            with head.lend(h, span) as (weight, _):
                return linear(h, weight).float()
        return linear(h, head.weight[span[0] : span[1]]).float()


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole sequences [R, n, C]. Keys are repeated for their group: a mask would select a slow attention
    kernel whose memory grows with the square of the prompt length."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
    return attend(q, k, v, causal=True)


def initialise(net: QwenLM) -> QwenLM:
    """Official initialisation: std 0.02 everywhere, zero biases, unit norms."""
    for name, p in net.named_parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.02)
        elif name.endswith(".bias"):
            nn.init.zeros_(p)
    return net


# ------------------------------------------------------------------------------------------------ the model with its metadata


@dataclass(frozen=True)
class Marks:
    """Ids of special tokens.

    Attributes:
        image: start of an image (Tar's ``<im_start>``, not the chat's).
        scale: scale 0; the other scales follow.
        code: code 0; the other codes follow.
        codes: entries of the codebook.
        turn: start and end of a chat turn, or None for a model without a chat template.
    """

    image: int
    scale: int
    code: int
    codes: int
    turn: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class TarModel:
    """A language model with the metadata of its files.

    Attributes:
        net: the network in eval mode.
        name: display name, used in messages and reports.
        tokenize: text to token ids, without special tokens.
        marks: ids of the special tokens.
        sides: side of the grid of codes at every scale: 27, 13 and 9 officially.
        repetition_penalty: recommended by the files; 1 is none.
    """

    net: QwenLM
    name: str
    tokenize: Callable[[str], list[int]]
    marks: Marks
    sides: tuple[int, ...] = (27, 13, 9)
    repetition_penalty: float = 1.0

    @property
    def span(self) -> tuple[int, int]:
        """Token ids of the codes, half-open."""
        return self.marks.code, self.marks.code + self.marks.codes

    def prompt(self, text: Any, scale: int) -> list[int]:
        """Token ids of a prompt, up to the special token of the scale, which the codes follow.

        A chat model gets the text in its chat template, with the official system sentence; any other model gets the text
        alone. Names of special tokens within the text are encoded as plain text. The prompt may be empty.

        Args:
            text: the prompt as typed.
            scale: 0 to ``len(sides) - 1``.

        Raises:
            UserError: not a text, too long, or encoded as a special token; a scale that the model does not have.
        """
        if not 0 <= scale < len(self.sides):
            have = " or ".join(str(side**2) for side in self.sides)
            raise UserError(
                f"detail: {self.name} knows {len(self.sides)} of the scales ({have} codes); choose a finer one."
            )
        if not isinstance(text, str):
            raise UserError(f"text: a prompt must be text, not {type(text).__name__}.")
        m = self.marks
        if m.turn is None:
            ids = self._text(text)
        else:
            opening, closing = m.turn
            between = [closing, *self._text("\n"), opening]
            ids = [opening, *self._text(f"system\n{_SYSTEM}"), *between, *self._text(f"user\n{text}"), *between]
            ids += self._text("assistant\n")
        ids += [m.image, m.scale + scale]
        most = self.net.config.positions - self.sides[scale] ** 2
        if len(ids) > most:
            raise UserError(
                f"text: the prompt takes {len(ids)} tokens with its template, {self.name} has room for {max(0, most)}; shorten it."
            )
        return ids

    def _text(self, text: str) -> list[int]:
        """Token ids of a text. Raises UserError if one of them is a special token or outside the vocabulary."""
        ids = self.tokenize(text)
        m = self.marks
        marks = {m.image, *range(m.scale, m.scale + len(self.sides)), *(m.turn or ())}
        if any(i in marks or self.span[0] <= i < self.span[1] for i in ids):
            raise UserError(
                f"text: it holds one of the marks that {self.name} keeps for itself; write it in another way."
            )
        wrong = next((i for i in ids if not 0 <= i < self.net.config.vocab), None)
        if wrong is not None:
            raise UserError(
                f"text: the tokenizer makes token {wrong} of it, {self.name} has {self.net.config.vocab}; use the tokenizer of the model."
            )
        return ids

    def cache_bytes(self, images: int, scale: int, prompt: int) -> int:
        """Cache memory of a run with prompts of ``prompt`` tokens."""
        c, size = self.net.config, next(self.net.parameters()).element_size()
        return 2 * c.depth * c.kv_heads * c.head_dim * (prompt + self.sides[scale] ** 2 - 1) * images * size
