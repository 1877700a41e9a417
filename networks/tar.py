"""Tar's language model with its prompt template.

Source: Han et al. 2025, "Vision as a Dialect: Unifying Visual Understanding and Generation via Text-Aligned
Representations" (Tar, arXiv 2506.18898). The network is Qwen2.5 with image codes in the vocabulary; see ``llama.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import UserError
from .chat import chat, checked, expect_text, without_special
from .llama import Llama

# System sentence of the chat template.
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
    repetition_penalty: float = 1.0  # the penalty that the files recommend; 1 is none

    note: ClassVar[str] = ""  # see TokenModel
    family: ClassVar[str] = "language"  # not a family of models that generate images

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """All weights, in modules that a host may place and offload one by one."""
        return {"language model": self.net}

    @property
    def device(self) -> torch.device:
        """Device on which it computes."""
        return self.net.compute_device

    @property
    def span(self) -> tuple[int, int]:
        """Token ids of the codes, half-open."""
        return self.special.code, self.special.code + self.special.codes

    def prompt(self, text: Any, scale: int) -> list[int]:
        """Token ids of a prompt, up to the special token of the scale, which the codes follow.

        ``scale``: 0 to ``len(sides) - 1``. A chat model gets the text in its chat template, with the official system
        sentence. Any other model gets the text alone. If the text contains names of special tokens, they are plain
        text.

        Raises:
            UserError: an unknown scale, or a text that is too long or encoded as a special token.
        """
        if not 0 <= scale < len(self.sides):
            known = " or ".join(str(side**2) for side in self.sides)
            raise UserError(
                f"detail: {self.name} writes only {known} codes, so it has no number of codes for this value of "
                "detail; choose a larger value."
            )
        expect_text(text)

        special = self.special
        scales = range(special.scale, special.scale + len(self.sides))
        reserved = [(special.image,), scales, special.chat or (), range(*self.span)]

        def encode(part: str) -> list[int]:
            return without_special(self.tokenize(part), reserved, self.name)

        if special.chat is None:
            ids = encode(text)
        else:
            ids = chat([f"system\n{_SYSTEM}", f"user\n{text}"], encode, special.chat)

        most = self.net.config.positions - self.sides[scale] ** 2
        return checked([*ids, special.image, special.scale + scale], self.net.config.vocab, most, self.name)
