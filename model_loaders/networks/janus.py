"""Janus: a language model that generates the codes of LlamaGen's VQ tokenizer, with its prompt template.

Sources: Wu et al. 2024 (Janus, arXiv 2410.13848), Chen et al. 2025 (Janus-Pro, arXiv 2501.17811). The transformer is a
Llama; words and image tokens have separate tables, and the output layer is an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chat import checked, expect_text
from .llama import Llama, LlamaConfig, TokenModel
from .ops import FAST, Operations

# Prefix of the transformer's official names.
TRUNK = "language_model."
# Our names of the other parameters, and the official ones.
_NAMES = {
    "words.": f"{TRUNK}model.embed_tokens.",
    "tok_embeddings.table.": "gen_embed.",
    "tok_embeddings.fc1.": "gen_aligner.layers.0.",
    "tok_embeddings.fc2.": "gen_aligner.layers.2.",
    "projector.": "gen_head.output_mlp_projector.",
    "output.": "gen_head.vision_head.",
}
# Rows of the folded table that are computed at once.
_ROWS = 1024
# Token ids of a prompt with its template; the prefill of more costs time and memory.
MOST_IDS = 2048


@dataclass(frozen=True)
class JanusConfig(LlamaConfig):
    """Shape of a Janus; ``vocab`` are the codes of its VQ tokenizer."""

    words: int = 0  # rows of the table of words
    narrow: int = 0  # width of the table of image tokens, before its MLP
    projected: int = 0  # width E between the two output layers
    pad: int = 0  # id of the padding token, of which a null prompt consists

    @staticmethod
    def of_janus(state: Mapping[str, Tensor], pad: int = 0, **numbers: Any) -> JanusConfig:
        """Derive the shape from official parameter names; ``numbers`` and errors: see :meth:`.LlamaConfig.of_qwen`."""
        trunk = {name.removeprefix(TRUNK): tensor for name, tensor in state.items() if name.startswith(TRUNK)}
        language = LlamaConfig.of_qwen(trunk, **{"positions": 16384, "theta": 1e4, **numbers})
        vocab, narrow = state["gen_embed.weight"].shape

        shape = {**vars(language), "vocab": vocab, "bias": False, "tied": False}
        return JanusConfig(
            **shape,
            words=language.vocab,
            narrow=narrow,
            projected=len(state["gen_head.output_mlp_projector.weight"]),
            pad=pad,
        )


class ImageTokens(nn.Module):
    """Rows of image tokens int64 [...] to [..., C]: a narrow table and an MLP."""

    def __init__(self, c: JanusConfig, operations: Operations = FAST):
        super().__init__()
        self.table = nn.Embedding(c.vocab, c.narrow)
        self.fc1 = operations.Linear(c.narrow, c.dim)
        self.fc2 = operations.Linear(c.dim, c.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.table(tokens))))


class Janus(Llama):
    """The transformer with its tables and its output MLP. Prompts are token ids of the table of words."""

    config: JanusConfig

    def __init__(self, config: JanusConfig, operations: Operations = FAST):
        super().__init__(config, operations)
        self.words = operations.Embedding(config.words, config.dim)
        self.tok_embeddings = ImageTokens(config, operations)
        self.projector = operations.Linear(config.dim, config.projected)
        self.output = operations.Linear(config.projected, config.vocab)

    @staticmethod
    def official_name(name: str) -> str:
        """The name of a parameter in the authors' files."""
        for ours, theirs in _NAMES.items():
            if name.startswith(ours):
                return name.replace(ours, theirs, 1)

        return TRUNK + Llama.official_name(name)

    def fold(self) -> Janus:
        """Compute the rows of all image tokens once, in place; a row depends on its token alone.

        Returns the network.
        """
        vocab = self.config.vocab
        device = self.compute_device
        table = torch.empty(vocab, self.config.dim, dtype=self.norm.weight.dtype, device=device)
        with torch.no_grad():
            for first in range(0, vocab, _ROWS):
                tokens = torch.arange(first, min(first + _ROWS, vocab), device=device)
                table[first : first + len(tokens)] = self.tok_embeddings(tokens)

        self.tok_embeddings = self.operations.Embedding(vocab, self.config.dim, device="meta")
        self.tok_embeddings.weight = nn.Parameter(table, requires_grad=False)
        return self

    def prefix(self, condition: Tensor, lengths: Tensor | None = None, guided: bool = False) -> Tensor:
        """Prefix rows of prompts int64 [B, n].

        The null prompt has the same length, and only its first and last token.
        """
        if not guided:
            return self.words(condition)

        n = condition.shape[1]
        place = torch.arange(n, device=condition.device)
        last = n - 1 if lengths is None else lengths[:, None] - 1
        kept = (place == 0) | (place == last)
        null = torch.where(kept, condition, self.config.pad)
        return self.words(torch.cat([condition, null]))

    def logits(self, x: Tensor, span: tuple[int, int] | None = None) -> Tensor:
        """Predictions fp32 [..., V] of hidden rows [..., C]."""
        assert span is None, "all values of a Janus are image codes"
        return self.output(F.gelu(self.projector(self.norm(x)))).float()


@dataclass(frozen=True)
class Template:
    """Ids of the tokens around a prompt."""

    begin: int  # start of the text
    image: int  # start of the image
    user: int | None = None  # of the two roles; None: they are words of the text, as in Janus 1.3B
    assistant: int | None = None


@dataclass(frozen=True, eq=False)
class JanusModel(TokenModel):
    """A Janus with the metadata of its files."""

    net: Janus
    tokenize: Callable[[str], list[int]] = field(kw_only=True)  # text to token ids, without special tokens
    template: Template = field(kw_only=True)  # ids of the special tokens

    @property
    def family(self) -> str:
        return "janus"

    def prompt(self, text: Any) -> list[int]:
        """Token ids of a prompt in its template, up to the special token that the image follows.

        Spaces around the text are removed, and names of special tokens in it are plain text. For an empty one
        the template has neither space nor line feeds, as the authors'.

        Raises:
            UserError: if it is no text, too long, or encoded outside the vocabulary.
        """
        expect_text(text)
        text = text.strip()
        said = f": {text}\n\n" if text else ":"

        t = self.template
        if t.user is None or t.assistant is None:
            turns = self.tokenize(f"User{said}Assistant:")
        else:
            turns = [t.user, *self.tokenize(said), t.assistant, *self.tokenize(":")]
        return checked([t.begin, *turns, t.image], self.net.config.words, MOST_IDS, self.name)
