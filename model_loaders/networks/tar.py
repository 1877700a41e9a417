"""Tar's language model with its prompt template.

Source: Han et al. 2025, "Vision as a Dialect: Unifying Visual Understanding and Generation via Text-Aligned Representations" (Tar, arXiv
2506.18898). Its network is Qwen2.5's with image codes in the vocabulary; see ``llama.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import UserError
from .llama import Llama, cache_bytes

# System sentence of the chat template, see :meth:`TarModel.prompt`.
_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens."""

    image: int  # start of an image (Tar's <im_start>, not the chat's)
    scale: int  # scale 0; the other scales follow
    code: int  # code 0; the other codes follow
    codes: int  # entries of the codebook
    chat: tuple[int, int] | None = None  # start and end of a chat turn, or None for a model without a chat template


@dataclass(frozen=True, eq=False)
class TarModel:
    """A language model with the metadata of its files."""

    net: Llama  # the network in eval mode
    name: str  # display name, used in messages and reports
    tokenize: Callable[[str], list[int]]  # text to token ids, without special tokens
    special: SpecialTokens  # ids of the special tokens
    sides: tuple[int, ...] = (27, 13, 9)  # side of the grid of codes at every scale: 27, 13 and 9 officially
    repetition_penalty: float = 1.0  # recommended by the files; 1 is none

    @property
    def span(self) -> tuple[int, int]:
        """Token ids of the codes, half-open."""
        return self.special.code, self.special.code + self.special.codes

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
        m = self.special
        if m.chat is None:
            ids = self._text(text)
        else:
            opening, closing = m.chat
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
        m = self.special
        reserved = {m.image, *range(m.scale, m.scale + len(self.sides)), *(m.chat or ())}
        if any(i in reserved or self.span[0] <= i < self.span[1] for i in ids):
            raise UserError(f"text: it holds a special token of {self.name}; write it in another way.")
        wrong = next((i for i in ids if not 0 <= i < self.net.config.vocab), None)
        if wrong is not None:
            raise UserError(
                f"text: the tokenizer makes token {wrong} of it, {self.name} has {self.net.config.vocab}; use the tokenizer of the model."
            )
        return ids

    def cache_bytes(self, images: int, scale: int, prompt: int) -> int:
        """Cache memory of a run with prompts of ``prompt`` tokens."""
        return cache_bytes(self.net, (prompt + self.sides[scale] ** 2 - 1) * images)
