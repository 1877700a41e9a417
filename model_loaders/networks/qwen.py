"""The language model that writes Tar's semantic codes: Qwen2.5's architecture with the official parameter names.

Sources: Qwen Team 2024, "Qwen2.5 Technical Report" (arXiv 2412.15115); Han et al. 2025, "Vision as a Dialect: Unifying Visual
Understanding and Generation via Text-Aligned Representations" (Tar, arXiv 2506.18898), which adds image codes to its
vocabulary and changes nothing else. The sampling loop lives in ``samplers``.

Prompts of a batch differ in length. They are padded on the right for the one pass that reads them, and every code is written
behind the longest of them: all images share a cache slot a code, and a mask hides the padding, so that positions and
attention are exactly those of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UserError
from .gpt import Linear, attend, multiply

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYERS, _FIRST = "model.layers.", "model.layers.0."
# Of Qwen2.5's larger models; the head count is in no state dict.
_HEAD_DIM = 128
# What a prompt is set in, see :meth:`TarModel.prompt`.
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
        tied: whether the embedding is the output matrix too.
        positions: longest sequence.
        theta: base of the rotations.
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
        """Read the shape off official parameter names.

        Args:
            state: parameter names to tensors; without an output matrix the embedding is used twice.
            heads: attention heads; None takes heads of width 128.
            positions, theta, eps: see the attributes.

        Raises:
            KeyError: the state dict is not a Qwen2's.
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
            depth=len({name.split(".")[2] for name in state if name.startswith(_LAYERS)}),
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


# ------------------------------------------------------------------------------------------------ pieces


class _Biased(Linear):
    def __init__(self, wide: int, out: int):
        super().__init__(wide, out)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class _Norm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, c: QwenConfig):
        super().__init__()
        self.q_proj = _Biased(c.dim, c.heads * c.head_dim)
        self.k_proj, self.v_proj = (_Biased(c.dim, c.kv_heads * c.head_dim) for _ in range(2))
        self.o_proj = Linear(c.heads * c.head_dim, c.dim)
        self.head_dim = c.head_dim

    def project(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, n, C] to queries [R, heads, n, D], keys and values [R, kv heads, n, D], the first two rotated."""
        q, k, v = (
            part(x).reshape(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, *turn), rotate(k, *turn), v


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
        self.input_layernorm, self.post_attention_layernorm = _Norm(c.dim, c.eps), _Norm(c.dim, c.eps)


class _Trunk(nn.Module):
    def __init__(self, c: QwenConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(_Block(c) for _ in range(c.depth))
        self.norm = _Norm(c.dim, c.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [R, heads, n, D], whose first half pairs with its second, by fp32 [R or 1, 1, n, D / 2]; computed in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


@dataclass(eq=False)
class PromptCache:
    """Keys and values of one run, sized once: the prompts' slots, then one a code.

    Attributes:
        keys, values: one tensor a block, [R, kv heads, slots, D].
        lengths: int64 [R], tokens of each prompt.
        prompt: slots of the longest prompt.
        seen: bool [R, 1, 1, slots], False on the padding of shorter prompts; None where there is none.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor
    prompt: int
    seen: Tensor | None

    @property
    def bytes(self) -> int:
        """Memory that the keys and values take."""
        return sum(t.numel() * t.element_size() for t in self.keys + self.values)


class QwenLM(nn.Module):
    """The language model. ``span`` is always a half-open range of token ids, of which alone logits are computed."""

    def __init__(self, config: QwenConfig):
        super().__init__()
        self.config = config
        self.model = _Trunk(config)
        if not config.tied:
            self.lm_head = Linear(config.dim, config.vocab)

    def forward(self, ids: Tensor, span: tuple[int, int] | None = None) -> Tensor:
        """Logits of whole sequences, without a cache; for training and tests.

        Args:
            ids: int64 [R, n].
            span: None: the whole vocabulary.

        Returns:
            fp32 [R, n, values]; entry i is what token i predicts.
        """

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _causal(q, k, v)

        at = torch.arange(ids.shape[1], device=ids.device)[None]
        return self._logits(self._blocks(self.model.embed_tokens(ids), at, look), span or (0, self.config.vocab))

    def prefill(
        self, ids: Tensor, lengths: Tensor, slots: int, span: tuple[int, int], images: Tensor | None = None
    ) -> tuple[Tensor, PromptCache]:
        """Read the prompts and make the cache.

        Args:
            ids: int64 [P, n], one row a prompt; what stands at and beyond its length is ignored.
            lengths: int64 [P], 1 to n.
            slots: how many codes will be fed.
            span: see the class.
            images: int64 [R], the prompt of every image, so that one of several images is read once; None: one each.

        Returns:
            fp32 logits [R, values] of what follows the prompts, and the cache of R images.
        """
        c, n = self.config, ids.shape[1]
        images = torch.arange(len(ids), device=ids.device) if images is None else images
        x, own, lengths = self.model.embed_tokens(ids), lengths, lengths[images]
        shape = (len(images), c.kv_heads, n + slots, c.head_dim)
        keys, values = ([x.new_zeros(shape) for _ in self.model.layers] for _ in range(2))
        slot = torch.arange(n + slots, device=ids.device)
        seen = (slot < lengths[:, None]) | (slot >= n)
        ragged = bool((lengths < n).any())
        cache = PromptCache(keys, values, lengths, n, seen[:, None, None] if ragged else None)

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer][:, :, :n], values[layer][:, :, :n] = k[images], v[images]
            return _causal(q, k, v)

        h = self._blocks(x, torch.arange(n, device=ids.device)[None], look)
        last = h.gather(1, (own - 1)[:, None, None].expand(-1, 1, c.dim))
        return self._logits(last, span)[images, 0], cache

    def step(self, ids: Tensor, at: int, cache: PromptCache, span: tuple[int, int]) -> Tensor:
        """Feed the next token of every image, and write it into the cache.

        Args:
            ids: int64 [R].
            at: how many were fed behind the prompts before; 0, 1, 2, ... in turn.
            cache: from :meth:`prefill`.
            span: see the class.

        Returns:
            fp32 logits [R, values].
        """
        slot = cache.prompt + at
        seen = None if cache.seen is None else cache.seen[..., : slot + 1]

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys[:, :, slot : slot + 1], values[:, :, slot : slot + 1] = k, v
            return attend(q, keys[:, :, : slot + 1], values[:, :, : slot + 1], seen)

        h = self._blocks(self.model.embed_tokens(ids[:, None]), (cache.lengths + at)[:, None], look)
        return self._logits(h, span)[:, 0]

    def _turn(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines fp32 [R, 1, n, D / 2] of positions int64 [R, n]."""
        d = self.config.head_dim
        frequency = self.config.theta ** (-torch.arange(0, d, 2, device=at.device).float() / d)
        angle = at[:, None, :, None].float() * frequency
        return angle.cos(), angle.sin()

    def _blocks(self, x: Tensor, at: Tensor, look: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """All blocks; ``look(layer, q, k, v)`` answers the queries of a block."""
        turn = self._turn(at)
        for i, block in enumerate(self.model.layers):
            q, k, v = block.self_attn.project(block.input_layernorm(x), turn)
            x = x + block.self_attn.o_proj(look(i, q, k, v))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return x

    def _logits(self, x: Tensor, span: tuple[int, int]) -> Tensor:
        head = self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight
        return multiply(self.model.norm(x), head[span[0] : span[1]]).float()


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole sequences [R, n, C]. Keys are copied for their group: with a mask instead, attention would
    leave its quick path, and memory would grow with the square of a prompt."""
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


# ------------------------------------------------------------------------------------------------ what a file says


@dataclass(frozen=True)
class Marks:
    """Token ids with a meaning of their own.

    Attributes:
        image: what opens an image (Tar's ``<im_start>``; not the chat's).
        scale: of scale 0; the other scales follow.
        code: of code 0; the other codes follow.
        codes: entries of the codebook.
        turn: what opens and what closes a turn of a chat, or None for a model that knows no chat.
    """

    image: int
    scale: int
    code: int
    codes: int
    turn: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class TarModel:
    """A language model together with what its files say about using it.

    Attributes:
        net: the network in eval mode.
        name: what a person calls it, used in messages and reports.
        words: text to token ids; none of them is one of the marks.
        marks: see :class:`Marks`.
        sides: side of the grid of codes at every scale: 27, 13 and 9 officially.
        repetition_penalty: what the files recommend; 1 is none.
    """

    net: QwenLM
    name: str
    words: Callable[[str], list[int]]
    marks: Marks
    sides: tuple[int, ...] = (27, 13, 9)
    repetition_penalty: float = 1.0

    @property
    def span(self) -> tuple[int, int]:
        """Token ids of the codes, half-open."""
        return self.marks.code, self.marks.code + self.marks.codes

    def prompt(self, text: Any, scale: int) -> list[int]:
        """Token ids of a prompt, up to and with the mark behind which the codes begin.

        A chat model gets it as the user's turn between the official system sentence and the assistant's; another one gets
        it as it is. Names of marks within the text are read as text. An empty prompt is one without a wish.

        Args:
            text: the prompt as typed.
            scale: 0 to ``len(sides) - 1``.

        Raises:
            UserError: it is no text, too long, or cannot be told from a mark; the model has no such scale.
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
                f"text: the prompt takes {len(ids)} tokens with what stands around it, {self.name} has room for {max(0, most)}; shorten it."
            )
        return ids

    def _text(self, text: str) -> list[int]:
        """Raises UserError where the tokenizer makes a mark of what was typed."""
        ids = self.words(text)
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
        """Memory that the cache of a run takes, behind prompts of ``prompt`` tokens."""
        c, size = self.net.config, next(self.net.parameters()).element_size()
        return 2 * c.depth * c.kv_heads * c.head_dim * (prompt + self.sides[scale] ** 2 - 1) * images * size
