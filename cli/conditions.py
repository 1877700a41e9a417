"""Conditions of the samplers of a run: class labels, encoded text, or Tar's semantic codes."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..assembly import (
    AUTO,
    Ready,
    Source,
    language_model_for,
    load_language_model,
    load_reader,
    prompt_settings,
)
from ..errors import UserError
from ..model_loaders.captions import prompt_of
from ..model_loaders.networks.hybrid import UNCONDITIONAL
from ..model_loaders.networks.ta_tok import TATokModel
from ..samplers.batches import in_parts
from ..samplers.conditioning import (
    AnyCondition,
    CodeCondition,
    Condition,
    PromptCondition,
    TextCondition,
    expect_null_prompt,
    labels_for,
    split_labels,
    unknown_words,
)
from ..samplers.tokens.conditioning import features_of
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.tar import tar_prompt
from .options import MOST_IMAGES, source
from .planning import PROMPT, Planned
from .running import drive


@dataclass
class Builder:
    """Conditions of a model from labels or prompts. What reads prompts is loaded once."""

    files: Source  # how models are found
    seed: int = 0  # of Tar's codes
    tar: str = AUTO  # choices of Tar's language model, of TA-Tok and of the text encoder
    ta_tok: str = AUTO
    encoder: str = "flan-t5-xl"
    asked: Mapping[str, str] = field(default_factory=dict)  # settings of Tar's language model
    unconditional: str | None = None  # instruction of the unconditional branch of Harmon and UniPic; None for their own

    def __post_init__(self) -> None:
        self._said: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Free the language model, the reader and the encoder."""
        self._language: Any = None
        self._reader: tuple[Ready, TATokModel] | None = None
        self._t5: Any = None
        self._rows: dict[str, Tensor] = {}

    def labels(self, on: Ready, text: str, repeat: int = 1, field: str = "label", most: float = math.inf) -> Condition:
        """Class labels, checked against the model. ``most``: largest number of images."""
        images = len(split_labels(text, field)) * repeat
        if images > most:
            raise UserError(f"batch: {images} images are more than {most}; ask for fewer.")
        condition = labels_for(text, on.model.label_set, repeat, field)
        condition.class_ids(on.classes, on.model.label_set, on.device)
        return condition

    def prompts(self, on: Ready, texts: Sequence[str], first: int = 0) -> AnyCondition:
        """One prompt an image; image i of Tar's codes uses (seed, first + i)."""
        if on.condition == "prompt":
            return self._instructions(on, texts)
        if on.condition == "text":
            prompts = [prompt_of(text, "text") for text in texts]
            return TextCondition(tuple(self._encoded(on, text) for text in prompts), tuple(prompts))
        return self.read(self.codes(on, texts, first), on)

    def _say_unknown(self, model: Any, texts: Sequence[str]) -> None:
        """Print once the words that a model does not know: it draws something else for them."""
        sentence = unknown_words(model, texts)
        if sentence and sentence not in self._said:
            self._said.add(sentence)
            print(f"note: {sentence}", file=sys.stderr)

    def _instructions(self, on: Ready, texts: Sequence[str]) -> PromptCondition:
        model: Any = on.model
        for text in dict.fromkeys(texts):
            model.prompt(text)
        self._say_unknown(model, texts)
        more = () if self.unconditional is None else (self.unconditional,)
        if on.masked:
            model.instruction(*more or (UNCONDITIONAL,))
        condition = PromptCondition(tuple(texts), *more)
        if not on.masked:
            expect_null_prompt(condition, model.name)
        return condition

    def _encoded(self, on: Ready, text: str) -> Tensor:
        """Rows of a prompt. Each prompt is encoded alone: a batch changes the last bits."""
        if text not in self._rows:
            if self._t5 is None:
                from ..model_loaders.text import load_text_encoder

                self._t5 = load_text_encoder(self.files.find(self.encoder, "t5"), AUTO, on.device)
            self._rows[text] = self._t5.encode([text])[0]
        return self._rows[text]

    def codes(self, on: Ready, texts: Sequence[str], first: int = 0) -> CodeCondition:
        """Codes that Tar's language model writes for the prompts."""
        if self._language is None:
            choice = language_model_for(on) if self.tar == AUTO else self.tar
            self._language = load_language_model(choice, self.files)
        model, stated = self._language
        settings = prompt_settings(stated, self.asked)
        texts = [text.strip() for text in texts]
        self._say_unknown(model, texts)

        def start(part: range) -> Any:
            images = range(first + part.start, first + part.stop)
            return tar_prompt(model, [texts[i] for i in part], settings, PairedDraws(self.seed, images), self.seed)

        return drive(in_parts(start, len(texts)), "prompt", "codes").condition

    def read(self, codes: CodeCondition, on: Ready) -> AnyCondition:
        """Features of codes, for a de-tokenizer."""
        if self._reader is None or self._reader[0] is not on:
            self._reader = on, load_reader(on, self.files, self.ta_tok)
        return features_of(codes, self._reader[1])


def conditions(
    planned: Sequence[Planned],
    label: str | None,
    texts: Sequence[str] | None,
    repeat: int,
    options: argparse.Namespace,
    seed: int = 0,
    asked: Mapping[str, str] | None = None,
) -> list[AnyCondition]:
    """The condition of each sampler, ``repeat`` images per label or text. Tar's codes are generated once for all samplers.

    ``seed`` and ``asked`` are of Tar's codes. A UserError for an unknown label, a missing prompt, or an option that no model uses.
    """
    names = ", ".join(dict.fromkeys(p.on.model.name for p in planned))
    if texts and not any(p.on.condition != "class" for p in planned):
        raise UserError(f"text: the models of this run ({names}) draw classes; name one with --label.")
    if label is not None and all(p.on.condition != "class" for p in planned):
        raise UserError(f"label: the model of this run ({names}) draws from text; say what with --text.")
    if asked and not any(p.on.condition == "features" for p in planned):
        raise UserError(
            f"set: no sampler of this run draws from Tar's codes, which {PROMPT}.{next(iter(asked))} is about."
        )
    negative = getattr(options, "negative", None)
    build = Builder(source(options), seed, options.tar, options.ta_tok, options.encoder, asked or {}, negative)
    made: dict[int, AnyCondition] = {}
    codes: CodeCondition | None = None
    for p in planned:
        if id(p.on) in made:
            continue
        if p.on.condition == "class":
            made[id(p.on)] = build.labels(p.on, "0" if label is None else label, repeat, most=MOST_IMAGES)
        elif p.on.condition != "features":
            made[id(p.on)] = build.prompts(p.on, _each(texts, repeat, p.on))
        else:
            codes = codes or build.codes(p.on, _each(texts, repeat, p.on))
            build.forget()  # the language model is larger than the de-tokenizer
            made[id(p.on)] = build.read(codes, p.on)
    return [made[id(p.on)] for p in planned]


def _each(texts: Sequence[str] | None, repeat: int, on: Ready) -> list[str]:
    """The prompt of every image."""
    encoded = on.condition == "text"
    name = "text" if encoded else "prompt"
    if not texts:
        raise UserError(
            f"{name}: {on.model.name} draws from text; say what with --{name}, for example --{name} 'a red boat at sunset'."
        )
    if len(texts) * repeat > MOST_IMAGES:
        raise UserError(f"batch: {len(texts) * repeat} images are more than {MOST_IMAGES}; ask for fewer.")
    if encoded:
        texts = [prompt_of(text, "text") for text in texts]
    return [text for text in texts for _ in range(repeat)]
