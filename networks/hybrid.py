"""Harmon and UniPic: a MAR with a language model between encoder and decoder, and their prompts.

Parameter names are the official ones.

Sources: Wu et al. 2025, "Harmonizing Visual Representations for Unified Multimodal Understanding and Generation"
(Harmon, arXiv 2503.21979); Wang et al. 2025, "Skywork UniPic" (arXiv 2508.03320). Both are Qwen2.5, a MAR and two
MLPs.

The MAR's encoder does not depend on the prompt, so its output is the same in both branches of guidance. The language
model reads ``[prompt | known tokens in raster order | buffer rows]`` with causal attention. The padding of shorter rows
is at the end, where causal attention hides it. The language model's output is added to the encoder's output. Between AR
steps only the prompts' keys and values are kept, because new tokens lie between old ones in raster order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chat import chat, checked, expect_text, without_special
from .llama import Llama, LlamaConfig, attend, cache_bytes
from .mar import MAR, Conditioning, DiffusionHead, MARConfig, MARModel, pick
from .ops import FAST, Operations
from .structure import without
from .torch_state import dot_product_attention

MAR_PREFIX = "mar."
LLM_PREFIX = "llm."
# Position tables of the MAR; the first two also have buffer rows.
TABLES = ("encoder_pos_embed_learned", "decoder_pos_embed_learned", "diffusion_pos_embed_learned")
# Attention heads of the official language models by width, which no state dict holds.
OFFICIAL_HEADS = {896: 14, 1536: 12}
_LABELS = "class_emb.weight"
# The chat template (Harmon): one user turn, no system turn, and the image's rows where the answer would be. The
# unconditional branch of guidance has its own prompt.
INSTRUCTION = "Generate an image: "
UNCONDITIONAL = "Generate an image."
# If the largest beta is above _SAFE_BETA (the full cosine schedule) and a run has fewer than SAFE_STEPS diffusion
# steps, the first step multiplies errors by more than 300 (samplers/mar/tables.py). Such a run starts at SAFE_START.
_SAFE_BETA = 0.5
SAFE_STEPS = 100
SAFE_START = 950


@dataclass(frozen=True)
class HybridConfig:
    """Shape of a hybrid: of its MAR, without class labels, and of its language model."""

    mar: MARConfig
    llm: LlamaConfig

    @staticmethod
    def from_state_dict(
        state: Mapping[str, Tensor], heads: int | None = None, mar_heads: int | None = None, **about: Any
    ) -> HybridConfig:
        """Derive the shape from official parameter names; class labels and an output matrix are ignored.

        Args:
            heads, mar_heads: attention heads of the language model and of the MAR; None takes the number of the
            official
                model with the same width.
            about: see :meth:`.LlamaConfig.of_qwen`.

        Raises:
            KeyError: the state dict is not a hybrid's.
            ValueError: a head count is unknown or wrong.
        """
        mar = {k.removeprefix(MAR_PREFIX): t for k, t in state.items() if k.startswith(MAR_PREFIX)}
        llm = {k.removeprefix(LLM_PREFIX): t for k, t in state.items() if k.startswith(f"{LLM_PREFIX}model.")}
        mar[_LABELS] = torch.empty(0, mar["fake_latent"].shape[1])

        width = llm["model.embed_tokens.weight"].shape[1]
        heads = heads or OFFICIAL_HEADS.get(width)
        if heads is None:
            raise ValueError(
                f"a language model of width {width} is not one of the official sizes; "
                "state llm.num_attention_heads in config.json"
            )

        return HybridConfig(
            mar=MARConfig.from_state_dict(mar, mar_heads),
            llm=LlamaConfig.of_qwen(llm, heads, **about),
        )


def resize_table(table: Tensor, side: int, height: int, width: int) -> Tensor:
    """Resize a position table, fp32 [1, rows + side * side, C], to another grid: [1, rows + height * width, C].

    The resizing is bilinear without antialiasing, as in the authors' code. The rows before the grid stay.
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
    """The G rows of a batch whose prompts have P tokens, and the U distinct prompts of these rows."""

    rows: Tensor | slice  # int64 [G], rows of the batch
    prompt: Tensor  # int64 [G], index of each row's prompt
    keys: Tensor  # [layers, U, kv heads, P, D]
    values: Tensor


class PromptBatch:
    """Prompts of R rows, grouped by length so that attention needs no padding mask. Rows with equal prompts must hold
    the same object.
    """

    def __init__(self, prompts: Sequence[PromptCache]):
        device = prompts[0].keys.device
        lengths = [prompt.keys.shape[2] for prompt in prompts]
        self.lengths = torch.tensor(lengths, device=device)

        self.groups: list[_Group] = []
        for length in sorted(set(lengths)):
            rows = [i for i, n in enumerate(lengths) if n == length]
            distinct = {id(prompts[i]): prompts[i] for i in rows}
            number = {key: j for j, key in enumerate(distinct)}
            group = _Group(
                rows=slice(None) if len(rows) == len(prompts) else torch.tensor(rows, device=device),
                prompt=torch.tensor([number[id(prompts[i])] for i in rows], device=device),
                keys=torch.stack([prompt.keys for prompt in distinct.values()], 1),
                values=torch.stack([prompt.values for prompt in distinct.values()], 1),
            )
            self.groups.append(group)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output [R, n, C] for the last n of S rows. Each attends to its prompt and to the rows up to itself.

        ``q``: [R, heads, n, D]; ``k``, ``v``: [R, kv heads, S, D] each.
        """
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler

        n = q.shape[2]
        repeats = q.shape[1] // k.shape[1]
        out = q.new_empty(len(q), n, q.shape[1] * q.shape[3])
        for rows, prompt, prompt_keys, prompt_values in self.groups:
            keys = torch.cat([prompt_keys[layer][prompt], k[rows]], 2)
            values = torch.cat([prompt_values[layer][prompt], v[rows]], 2)
            if repeats > 1:
                keys = keys.repeat_interleave(repeats, 1)
                values = values.repeat_interleave(repeats, 1)

            # The queries belong to the last keys; ``is_causal`` would align the first query with the first key.
            mask = causal_lower_right(n, keys.shape[2])
            out[rows] = dot_product_attention(q[rows], keys, values, mask).transpose(1, 2).flatten(2)

        return out


class TokenCache:
    """Keys and values of known tokens in the language model, kept between AR steps (LazyMAR)."""

    def __init__(self, live: int, room: int):
        self.live = live  # how many batch rows are kept; they are the first ones
        self.room = room  # how many tokens and buffer rows of a batch row fit into the cache
        # One tensor per block, [live, kv heads, room, D]. The buffer rows of the last call stand after the tokens.
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are kept."""
        return self.keys + self.values

    def store(self, k: Tensor, v: Tensor, count: int) -> None:
        """Keep the next block's first ``count`` keys and values of [R, kv heads, n, D]."""
        for stores, t in ((self.keys, k), (self.values, v)):
            stores.append(t.new_empty(self.live, t.shape[1], self.room, t.shape[3]))
            stores[-1][:, :, :count] = t[: self.live, :, :count]


def _mlp(inner: int, width: int, out: int) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(inner, width), nn.SiLU(), nn.Linear(width, out))


class Hybrid(nn.Module):
    """MAR encoder, language model, MAR decoder and diffusion head."""

    def __init__(self, config: HybridConfig, operations: Operations = FAST):
        super().__init__()
        self.config = config
        self.mar = MAR(config.mar, operations)
        self.llm = Llama(replace(config.llm, tied=True), operations)
        c = config.mar.dim
        h = config.llm.dim
        self.proj_in = _mlp(c, h, h)
        self.proj_out = _mlp(h, h, c)

    @property
    def head(self) -> DiffusionHead:
        """The diffusion head."""
        return self.mar.head

    def read(self, ids: Tensor) -> PromptCache:
        """Keys and values of a prompt, int64 [P]."""
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k[0])
            values.append(v[0])
            return attend(q, k, v, causal=True)

        position = torch.arange(len(ids), device=ids.device)[None]
        self.llm.hidden(self.llm.tok_embeddings(ids[None]), position, attention)
        return PromptCache(keys=torch.stack(keys), values=torch.stack(values))

    def llm_order(self, known: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Indices int64 [B, buffer + K] of the encoder's rows in the language model's order.

        That order is: tokens by position, buffer rows, padding.
        """
        c = self.config.mar
        batch, count = known.shape
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
        """The decoder's input rows [R, buffer + K, C]: the encoder's output plus what the language model adds to it.

        Args:
            encoded: encoder output [B, buffer + K, C].
            known: int64 [B, K], positions of the tokens.
            prompts: the prompts of R rows; R is a multiple of B, and the prompts b, B + b, ... belong to image b.
            padding_mask: bool [B, K], False for padding.
            cache: receives the known tokens' keys and values.
        """
        branches = len(prompts.lengths) // len(encoded)
        order = self.llm_order(known, padding_mask)
        y = pick(self.proj_in(encoded), order).repeat(branches, 1, 1)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if cache is not None:
                cache.store(k, v, known.shape[1])
            return prompts.attend(layer, q, k, v)

        self.mar.note_plain("language model")
        h = self.llm.hidden(y, self._positions(prompts, 0, y.shape[1]), attention)
        back = order.argsort(1).repeat(branches, 1)
        return encoded.repeat(branches, 1, 1) + self.proj_out(pick(h, back))

    def extend(self, encoded: Tensor, prompts: PromptBatch, cache: TokenCache, at: int) -> Tensor:
        """:meth:`fuse` for N new tokens and the buffer rows only, [R, N + buffer, C].

        The keys and values of the new tokens go to the cache. The new tokens get the positions after the ``at`` tokens
        that the cache holds, not positions by raster order.
        """
        branches = len(prompts.lengths) // len(encoded)
        y = self.proj_in(encoded).repeat(branches, 1, 1)
        end = at + encoded.shape[1]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = cache.keys[layer]
            values = cache.values[layer]
            keys[:, :, at:end] = k
            values[:, :, at:end] = v
            return prompts.attend(layer, q, keys[:, :, :end], values[:, :, :end])

        self.mar.note_plain("language model")
        h = self.llm.hidden(y, self._positions(prompts, at, encoded.shape[1]), attention)
        return encoded.repeat(branches, 1, 1) + self.proj_out(h)

    @staticmethod
    def _positions(prompts: PromptBatch, at: int, count: int) -> Tensor:
        """Positions of ``count`` rows that follow each row's prompt and ``at`` tokens, int64 [R, count]."""
        return prompts.lengths[:, None] + at + torch.arange(count, device=prompts.lengths.device)


@dataclass(frozen=True, eq=False)
class HybridModel(MARModel):
    """A hybrid and the metadata of its files; ``net`` is its MAR, with position tables of the sampled grid."""

    hybrid: Hybrid = field(kw_only=True)  # all networks, in eval mode
    tokenize: Callable[[str], list[int]] = field(kw_only=True)  # text to token ids, without special tokens
    turn: tuple[int, int] = field(kw_only=True)  # ids of the special tokens that begin and end a chat turn
    trained: int = field(kw_only=True)  # tokens per side of the images it was trained for
    condition: ClassVar[str] = "prompt"
    family: ClassVar[str] = "hybrid"

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        transformer = without(self.net, self.net.diffloss)
        between = nn.ModuleList([self.hybrid.llm, self.hybrid.proj_in, self.hybrid.proj_out])
        return {"language model": between, "MAR": transformer, "head": self.net.diffloss}

    @property
    def note(self) -> str:
        side = self.net.config.grid
        if side == self.trained:
            return self.assumed

        size = f"{side} x {side} tokens, but the model was trained for {self.trained} x {self.trained}"
        return f"{self.assumed}; {size}" if self.assumed else size

    def working_bytes(self, rows: int) -> dict[str, int]:
        c = self.hybrid.config.llm
        size = next(self.hybrid.parameters()).element_size()
        # The MLP's three tensors, residual stream and norms, queries with repeated keys and values.
        width = 3 * c.hidden + 6 * c.dim + 6 * c.heads * c.head_dim
        return super().working_bytes(rows) | {"language model": rows * width * size}

    def first_timestep(self, diffusion_steps: int) -> int:
        """950 for settings of fewer than 100 diffusion steps, unless the largest beta is low or the file says less."""
        if self.max_beta > _SAFE_BETA and diffusion_steps < SAFE_STEPS:
            return min(self.t_max, SAFE_START)

        return self.t_max

    def prompt(self, text: Any) -> list[int]:
        """Token ids of a prompt with its instruction.

        Raises:
            UserError: the text is too long, or encoded as a special token or outside the vocabulary.
        """
        return self._turn(text, INSTRUCTION, "text")

    def instruction(self, text: Any) -> list[int]:
        """Token ids of a whole instruction, for the unconditional branch; raises the errors of :meth:`prompt`."""
        return self._turn(text, "", "negative")

    def _turn(self, text: Any, before: str, name: str) -> list[int]:
        """Token ids of a user's turn; ``name`` is the input that messages begin with."""
        expect_text(text, name)

        def encode(part: str) -> list[int]:
            return without_special(self.tokenize(part), [self.turn], self.name, name)

        ids = chat([f"user\n{before}{text}"], encode, self.turn)
        llm = self.hybrid.config.llm
        most = llm.positions - self.net.config.tokens - self.net.config.buffer
        return checked(ids, llm.vocab, most, self.name, name)

    def conditioning(self, texts: Sequence[Any], unconditional: Any, guided: bool) -> PromptConditioning:
        """The condition of one image per prompt.

        Equal prompts are read once, and with guidance the instruction of the unconditional branch.
        """
        ids = {text: self.prompt(text) for text in texts}
        null_ids = self.instruction(unconditional) if guided else []

        device = next(self.hybrid.parameters()).device
        caches = {text: self.hybrid.read(torch.tensor(row, device=device)) for text, row in ids.items()}
        null = self.hybrid.read(torch.tensor(null_ids, device=device)) if guided else None

        tokens_read = sum(map(len, ids.values())) + len(null_ids)
        return PromptConditioning(self.hybrid, [caches[text] for text in texts], null, tokens_read)

    def prompt_bytes(self, tokens: int) -> int:
        """Memory of the language model's keys and values for this many ``tokens``."""
        return cache_bytes(self.hybrid.llm, tokens)


class PromptConditioning(Conditioning):
    """The condition of B images with prompts, which the language model between encoder and decoder reads.

    Args:
        prompts: one for each image; equal prompts are the same object.
        null: the unconditional prompt; None without guidance.
        read: how many prompt tokens were read for this batch.
    """

    def __init__(self, net: Hybrid, prompts: Sequence[PromptCache], null: PromptCache | None, read: int = 0):
        self.net = net
        self.prompts = tuple(prompts)
        self.null = null
        self._batches: dict[bool, PromptBatch] = {}
        self._part: tuple[Sequence[int], PromptConditioning] | None = None  # result of the last of()
        self._counts = {"llm_rows": 0, "prompt_rows": read}  # since the last pass

    def __len__(self) -> int:
        return len(self.prompts)

    def of(self, images: Sequence[int]) -> PromptConditioning:
        if self._part is None or self._part[0] != images:
            part = PromptConditioning(self.net, [self.prompts[i] for i in images], self.null)
            part._counts = self._counts
            self._part = images, part
        return self._part[1]

    def vectors(self, guided: bool) -> Tensor:
        return self.net.mar.class_rows(None, len(self))

    def fuse(
        self, encoded: Tensor, known: Tensor, guided: bool, padding_mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        prompts = self._batch(guided)
        self._count(prompts, encoded.shape[1])
        return self.net.fuse(encoded, known, prompts, padding_mask, cache)

    def feature_cache(self, live: int, room: int) -> TokenCache:
        return TokenCache(live, room)

    def extend(self, encoded: Tensor, cache: TokenCache, known: int) -> Tensor:
        prompts = self._batch(cache.live > len(encoded))
        self._count(prompts, encoded.shape[1])
        return self.net.extend(encoded, prompts, cache, known)

    def counts(self, encoder: int, decoder: int) -> dict[str, int]:
        counts = super().counts(encoder, decoder) | self._counts
        counts |= {"encoder_rows": encoder, "decoder_rows": decoder}
        counts["transformer_tokens"] += counts["llm_rows"]
        self._counts.update(dict.fromkeys(self._counts, 0))
        return counts

    def _batch(self, guided: bool) -> PromptBatch:
        """The prompts, and with guidance the unconditional prompt once for each of them."""
        if guided not in self._batches:
            prompts = [*self.prompts]
            if guided and self.null is not None:
                prompts += [self.null] * len(self)
            self._batches[guided] = PromptBatch(prompts)

        return self._batches[guided]

    def _count(self, prompts: PromptBatch, rows: int) -> None:
        """Count ``rows`` rows of the language model after each prompt."""
        self._counts["llm_rows"] += rows * len(prompts.lengths)
