"""Janus: a language model that generates the codes of LlamaGen's VQ tokenizer, with its prompt template.

Sources: Wu et al. 2024 (Janus, arXiv 2410.13848) and Chen et al. 2025 (Janus-Pro, arXiv 2501.17811); for images in
prompts, Chen et al. 2025 (ShareGPT-4o-Image, arXiv 2506.18095) and the published code of Janus-4o. The transformer is a
Llama. Words and image tokens have separate tables, and the output layer is an MLP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
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
# How many rows of the folded table are computed at once, see Janus.fold.
_ROWS = 1024
# The most token ids of a prompt with its template, because the prefill costs time and memory.
MOST_IDS = 2048
# The text before a question in the published code. The models were trained to answer questions after this text.
_SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
# Names of models that were trained to edit an image, and of those that were not. Nothing else in a file tells.
_EDITS = re.compile(r"(?<![a-z0-9])4o(?![a-z0-9])", re.IGNORECASE)
_ONLY_DRAWS = re.compile(r"janus[-_. ]?(pro|1[._]3b)", re.IGNORECASE)


def edits(name: str) -> bool | None:
    """Whether a model of this name was trained to edit an image; None if the name does not tell."""
    if _EDITS.search(name):
        return True
    return False if _ONLY_DRAWS.search(name) else None


@dataclass(frozen=True)
class JanusConfig(LlamaConfig):
    """Shape of a Janus; ``vocab`` is the number of codes of its VQ tokenizer."""

    words: int = 0  # rows of the table of words
    narrow: int = 0  # width of the table of image tokens, before its MLP
    projected: int = 0  # width E between the two output layers
    pad: int = 0  # id of the padding token, which fills a null prompt

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
    """The embedding of image tokens, int64 [...] to [..., C]: a narrow table and an MLP."""

    def __init__(self, c: JanusConfig, operations: Operations = FAST):
        super().__init__()
        self.table = nn.Embedding(c.vocab, c.narrow)
        self.fc1 = operations.Linear(c.narrow, c.dim)
        self.fc2 = operations.Linear(c.dim, c.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.table(tokens))))


class WordHead(nn.Module):
    """The output layer for words, which the generation of images does not need."""

    def __init__(self, width: int, words: int, operations: Operations = FAST):
        super().__init__()
        self.lm_head = operations.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Predictions fp32 [..., words] of normalised hidden rows [..., C]."""
        return self.lm_head(x).float()


class PromptImages(NamedTuple):
    """The images of P prompts, and their places in the prompts."""

    rows: Tensor  # [P, S, C], from the tower and the aligner, see janus_vision.py
    codes: Tensor  # int64 [P, S], tokens of the same images
    first_row: int  # place of the first row in every prompt
    first_code: int  # place of the first code in every prompt


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
        """Prefix rows of prompts, int64 [B, n]: [B, n, C], or [2 B, n, C] with guidance, the null prompts' rows last.

        A null prompt has the length of the prompt, but only the first and the last token; all others are padding.
        """
        if not guided:
            return self.words(condition)
        return self.words(torch.cat([condition, self.null_prompts(condition, lengths)]))

    def image_prefix(
        self, prompts: Tensor, images: PromptImages, lengths: Tensor | None, part: bool, guided: bool
    ) -> Tensor:
        """Prefix rows of prompts, int64 [P, n], with an image each: [P, n, C] for each branch, one branch after
        another.

        - The whole condition comes first. It holds the image twice, as rows of the tower and as codes.
        - With ``part``, the condition without the codes follows. At the places of the codes it has rows of padding.
        - With ``guided``, the null prompt follows, see :meth:`prefix`. It is without the image.
        """
        words = self.words(prompts)
        count = images.codes.shape[1]

        seen = words.clone()
        seen[:, images.first_row : images.first_row + count] = images.rows.to(words.dtype)
        whole = seen.clone()
        whole[:, images.first_code : images.first_code + count] = self.tok_embeddings(images.codes).to(words.dtype)

        branches = [whole]
        if part:
            branches.append(seen)
        if guided:
            branches.append(self.words(self.null_prompts(prompts, lengths)))
        return torch.cat(branches)

    def null_prompts(self, prompts: Tensor, lengths: Tensor | None) -> Tensor:
        """Ids of the null prompts: padding between the first and the last token."""
        n = prompts.shape[1]
        place = torch.arange(n, device=prompts.device)
        last = n - 1 if lengths is None else lengths[:, None] - 1
        kept = (place == 0) | (place == last)
        return torch.where(kept, prompts, self.config.pad)

    def logits(self, x: Tensor, span: tuple[int, int] | None = None) -> Tensor:
        """Predictions fp32 [..., V] of hidden rows [..., C]."""
        assert span is None, "all values of a Janus are image codes"
        return self.output(F.gelu(self.projector(self.norm(x)))).float()


@dataclass(frozen=True)
class Template:
    """Ids of the tokens around a prompt."""

    begin: int  # start of the text
    image: int  # start of the image
    user: int | None = None  # the user's role; None: both roles are words of the text, as in Janus 1.3B
    assistant: int | None = None  # the assistant's role
    image_end: int | None = None  # end of an image in a prompt; None: the tokenizer has no such token
    place: int | None = None  # placeholder for a row of the tower
    end: int | None = None  # end of an answer


@dataclass(frozen=True, eq=False)
class JanusModel(TokenModel):
    """A Janus with the metadata of its files."""

    net: Janus
    tokenize: Callable[[str], list[int]] = field(kw_only=True)  # text to token ids, without special tokens
    template: Template = field(kw_only=True)  # ids of the special tokens
    # Token ids to text, for answers.
    detokenize: Callable[[Sequence[int]], str] | None = field(default=None, kw_only=True, compare=False)
    # The file with the part that reads images; None: no file has it.
    vision_file: Path | None = field(default=None, kw_only=True, compare=False)
    reads_images: ClassVar[bool] = True
    editor: ClassVar[str] = "a Janus-4o"  # the model of its family that was trained to edit

    @property
    def family(self) -> str:
        return "janus"

    @property
    def edits(self) -> bool | None:
        """See :func:`edits`."""
        return edits(self.name)

    @property
    def lacks_reader(self) -> bool:
        """Whether its file lacks the part that reads images."""
        return self.vision_file is None

    def prompt(self, text: Any) -> list[int]:
        """Token ids of a prompt in its template, up to the special token that the image follows.

        Spaces around the text are removed. If the text contains names of special tokens, they are plain text. If the
        text is empty, the template has neither space nor line feeds, as in the authors' code.

        Raises:
            UserError: the text is too long, or encoded outside the vocabulary.
        """
        expect_text(text)
        text = text.strip()
        said = f": {text}\n\n" if text else ":"

        t = self.template
        if t.user is None:
            turns = self.tokenize(f"User{said}Assistant:")
        else:
            turns = [*self._user(said), *self._assistant("")]
        return checked([t.begin, *turns, t.image], self.net.config.words, MOST_IDS, self.name)

    def image_prompt(self, text: Any) -> list[int]:
        """Token ids of a prompt that says how to change an image; for the template see :meth:`prompt`.

        The image stands twice before the text, see :meth:`image_places`. Spaces at the end of the text are removed.

        Raises:
            UserError: as :meth:`prompt`; or the tokenizer lacks the special tokens.
        """
        expect_text(text)
        t = self.template
        image = self._image()
        again = [t.image, *[self.net.config.pad] * self.tokens, t.image_end]
        ids = [t.begin, *self._user(": "), *image, *again, *self._assistant(f"{text.rstrip()}\n\n"), t.image]
        return checked(ids, self.net.config.words, MOST_IDS, self.name)

    def _image(self) -> list[int]:
        """Token ids of an image in a prompt."""
        t = self.template
        if t.image_end is None or t.place is None or t.end is None:
            raise UserError(
                f"image: the tokenizer of {self.name} has no tokens for an image in a prompt; replace the tokenizer "
                "with the model's own."
            )

        return [t.image, *[t.place] * self.tokens, t.image_end]

    def question(self, text: Any, images: int = 1) -> list[int]:
        """Token ids of images and a question about them, after which the answer follows.

        Raises:
            UserError: as :meth:`image_prompt`.
        """
        expect_text(text)
        t = self.template
        image = self._image()
        shown = image + (images - 1) * [*self.tokenize(" "), *image]
        if t.user is None:
            head = self.tokenize(f"{_SYSTEM}\n\nUser: ")
        else:
            head = [*self.tokenize(f"{_SYSTEM}\n\n"), *self._user(": ")]
        ids = [t.begin, *head, *shown, *self._assistant(f"\n{text.rstrip()}\n\n")]
        return checked(ids, self.net.config.words, MOST_IDS, self.name)

    def image_places(self) -> tuple[int, int]:
        """Where the rows of the tower and the codes begin in an image prompt."""
        before = 1 + len(self._user(": ")) + 1
        return before, before + self.tokens + 2

    def _user(self, said: str) -> list[int]:
        """Ids of the beginning of a user's turn, and of the text ``said`` after it."""
        user = self.template.user
        return self.tokenize(f"User{said}") if user is None else [user, *self.tokenize(said)]

    def _assistant(self, said: str) -> list[int]:
        """Ids of the text ``said``, which ends a user's turn, and of the beginning of the assistant's turn."""
        assistant = self.template.assistant
        if assistant is None:
            return self.tokenize(f"{said}Assistant:")
        return [*self.tokenize(said), assistant, *self.tokenize(":")]
