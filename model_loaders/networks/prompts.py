"""Prompts of a hybrid: the model with its tokenizer, and the condition of a batch of prompts.

Template (Wu et al. 2025, Harmon): one user turn, no system turn, and the picture's rows in the place of the answer. The unconditional
branch of guidance is a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .chat import chat, checked, expect_text, without_special
from .hybrid import Hybrid, PromptBatch, PromptCache, TokenCache
from .llama import cache_bytes
from .mar import ClassRows, Kept, MARModel, Work

INSTRUCTION = "Generate an image: "
UNCONDITIONAL = "Generate an image."
# With the full cosine schedule and fewer diffusion steps, the first step multiplies errors by more than 300 (samplers/mar/tables.py).
_SAFE_BETA, _SAFE_STEPS, _SAFE_START = 0.5, 100, 950


@dataclass(frozen=True, eq=False)
class HybridModel(MARModel):
    """A hybrid and the metadata of its files; ``net`` is its MAR, with position tables of the sampled grid."""

    hybrid: Hybrid = field(kw_only=True)  # all networks, in eval mode
    tokenize: Callable[[str], list[int]] = field(kw_only=True)  # text to token ids, without special tokens
    turn: tuple[int, int] = field(kw_only=True)  # ids of the special tokens that begin and end a chat turn
    trained: int = field(kw_only=True)  # tokens per side of the pictures it was trained for
    condition: ClassVar[str] = "prompt"

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        between = nn.ModuleList([self.hybrid.llm, self.hybrid.proj_in, self.hybrid.proj_out])
        transformer = nn.Module()  # the MAR without its head; the tensors are the network's own
        for name, child in self.net.named_children():
            if child is not self.net.diffloss:
                transformer.add_module(name, child)
        for name, parameter in self.net.named_parameters(recurse=False):
            transformer.register_parameter(name, parameter)
        return {"language model": between, "MAR": transformer, "head": self.net.diffloss}

    @property
    def note(self) -> str:
        side = self.net.config.grid
        if side == self.trained:
            return ""
        return f"{side} x {side} tokens; the model was trained for {self.trained} x {self.trained}"

    def working_bytes(self, rows: int) -> dict[str, int]:
        c, size = self.hybrid.config.llm, next(self.hybrid.parameters()).element_size()
        # The MLP's three tensors, residual stream and norms, queries with repeated keys and values.
        width = 3 * c.hidden + 6 * c.dim + 6 * c.heads * c.head_dim
        return super().working_bytes(rows) | {"language model": rows * width * size}

    def first_timestep(self, diffusion_steps: int) -> int:
        """950 at fewer than 100 diffusion steps, unless the largest beta is low or the checkpoint says less."""
        if self.max_beta > _SAFE_BETA and diffusion_steps < _SAFE_STEPS:
            return min(self.t_max, _SAFE_START)
        return self.t_max

    def prompt(self, text: Any) -> list[int]:
        """Token ids of a prompt with its instruction; a UserError if it is not a text, too long, or encoded as a special token."""
        return self._turn(text, INSTRUCTION, "text")

    def instruction(self, text: Any) -> list[int]:
        """Token ids of a whole instruction, for the unconditional branch; raises as :meth:`prompt`."""
        return self._turn(text, "", "negative")

    def _turn(self, text: Any, before: str, name: str) -> list[int]:
        expect_text(text, name)

        def encode(part: str) -> list[int]:
            return without_special(self.tokenize(part), [self.turn], self.name, name)

        ids, llm = chat([f"user\n{before}{text}"], encode, self.turn), self.hybrid.config.llm
        most = llm.positions - self.net.config.tokens - self.net.config.buffer
        return checked(ids, llm.vocab, most, self.name, name)

    def rows(self, texts: Sequence[Any], unconditional: Any, guided: bool) -> PromptRows:
        """The condition of one image per prompt; equal prompts are read once, and with guidance the unconditional branch's instruction."""
        device = next(self.hybrid.parameters()).device
        ids = {text: self.prompt(text) for text in texts}
        rows = [*ids.values(), *([self.instruction(unconditional)] if guided else [])]
        caches = [self.hybrid.read(torch.tensor(row, device=device)) for row in rows]
        of = dict(zip(ids, caches, strict=False))
        return PromptRows(self.hybrid, [of[t] for t in texts], caches[-1] if guided else None, sum(map(len, rows)))

    def prompt_bytes(self, tokens: int) -> int:
        """Memory of the keys and values of that many tokens."""
        return cache_bytes(self.hybrid.llm, tokens)


class PromptRows(ClassRows):
    """Prompts of B images: the language model between encoder and decoder.

    Equal entries of ``prompts`` are the same object; ``null`` is the unconditional prompt, None without guidance; ``read`` prompt tokens
    were read for this batch.
    """

    def __init__(self, net: Hybrid, prompts: Sequence[PromptCache], null: PromptCache | None, read: int = 0):
        self.net, self.prompts, self.null = net, tuple(prompts), null
        self._batches: dict[tuple[int, bool], PromptBatch] = {}
        self._counts = {"llm_rows": 0, "prompt_rows": read, "transformer_flops": 0}

    def __len__(self) -> int:
        return len(self.prompts)

    def vectors(self, guided: bool, count: int = 1) -> Tensor:
        return self.net.mar.class_rows(None, count * len(self))

    def fuse(self, encoded: Tensor, known: Tensor, guided: bool, padding_mask: Tensor | None = None) -> Tensor:
        prompts = self._batch(len(encoded), guided)
        self._count(prompts, 0, encoded.shape[1])
        return self.net.fuse(encoded, known, prompts, padding_mask)

    def keep(
        self, encoded: Tensor, known: Tensor, guided: bool, live: int, room: int, cached: bool
    ) -> tuple[Tensor, Kept]:
        prompts, both = self._batch(len(encoded), guided), live > len(encoded)
        self._count(prompts, 0, encoded.shape[1])
        if not cached:
            return self.net.fuse(encoded, known, prompts), _Encoded(self, encoded, known, both)
        cache = TokenCache(live, room)
        return self.net.fuse(encoded, known, prompts, cache=cache), _Tokens(self, len(encoded), both, cache)

    def counts(self, work: Work) -> dict[str, int]:
        counts = super().counts(work) | self._counts
        counts |= {"encoder_rows": work.encoder, "decoder_rows": work.decoder, "last_rows": work.last}
        counts["transformer_tokens"] += counts["llm_rows"]
        counts["transformer_flops"] += self.net.config.mar_flops(work)
        self._counts = dict.fromkeys(self._counts, 0)
        return counts

    def _batch(self, images: int, guided: bool) -> PromptBatch:
        """Prompts of ``images`` rows per branch, the batch repeated as often as needed."""
        key = images, guided
        if key not in self._batches:
            rows = self.prompts * (images // len(self))
            self._batches[key] = PromptBatch([*rows, *([self.null] * images if guided and self.null else [])])
        return self._batches[key]

    def _count(self, prompts: PromptBatch, at: int, rows: int) -> None:
        """Count ``rows`` rows behind each prompt and ``at`` tokens."""
        for length in prompts.host_lengths:
            self._counts["llm_rows"] += rows
            self._counts["transformer_flops"] += self.net.config.llm_flops(rows, length + at)


class _Tokens(Kept):
    """Keys and values of known tokens in the language model."""

    def __init__(self, rows: PromptRows, images: int, guided: bool, cache: TokenCache):
        super().__init__(rows.net.config.mar.buffer)
        self.rows, self.prompts, self.cache = rows, rows._batch(images, guided), cache
        self.tensors = cache.keys + cache.values

    def extend(self, encoded: Tensor, new: Tensor, at: int) -> tuple[Tensor, Tensor]:
        self.rows._count(self.prompts, at, encoded.shape[1])
        x = self.rows.net.extend(encoded, self.prompts, self.cache, at)
        return x, self.places(new, len(x))


class _Encoded(Kept):
    """Encoder output of known tokens; the language model reads all of it again in raster order."""

    def __init__(self, rows: PromptRows, encoded: Tensor, known: Tensor, guided: bool):
        super().__init__(rows.net.config.mar.buffer)
        self.rows, self.guided, self.known = rows, guided, known
        self.encoded = encoded[:, self.buffer :].clone()
        self.tensors = [self.encoded]

    def extend(self, encoded: Tensor, new: Tensor, at: int) -> tuple[Tensor, Tensor]:
        buffer, count = self.buffer, new.shape[1]
        self.encoded = torch.cat([self.encoded, encoded[:, :count]], 1)
        self.known = torch.cat([self.known, new], 1)
        # The language model sorts by position.
        x = self.rows.fuse(torch.cat([encoded[:, count:], self.encoded], 1), self.known, self.guided)
        return torch.cat([x[:, buffer:], x[:, :buffer]], 1), self.places(self.known, len(x))
