"""From labels and prompts to the conditions of a model. The command line and the pipeline build them here.

What reads prompts and images (Tar's language model, TA-Tok, a text encoder, Janus' tower) is loaded when it is first
needed, and once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from ..errors import UserError
from ..model_loaders.llamagen.captions import prompt_of
from ..networks.hybrid import UNCONDITIONAL
from ..networks.janus import JanusModel, WordHead
from ..networks.janus_vision import ImageReader
from ..networks.ta_tok import TATokModel
from ..networks.tar import TarModel
from ..samplers.conditioning import (
    AnyCondition,
    ClassCondition,
    CodeCondition,
    ImagePromptCondition,
    PromptCondition,
    TextCondition,
    expect_editor,
)
from ..samplers.engine import finish
from ..samplers.settings import settings_from
from ..samplers.tokens.features import features_of
from ..samplers.tokens.settings import EditSettings
from ..samplers.tokens.tar import TarPrompted, TarPromptSettings, tar_prompt
from ..samplers.tokens.token_noise import TokenNoise
from .batches import in_parts
from .images import one_for_each
from .labels import labels_for, split_labels, unknown_words
from .loading import (
    AUTO,
    ENCODER,
    Ready,
    Source,
    language_model_for,
    load_image_reader,
    load_language_model,
    load_reader,
    load_word_head,
    prompt_settings,
    read_images,
)


def has_null_prompt(model: str) -> UserError:
    """The error for a negative prompt to a model that reads none; ``model``: its name."""
    return UserError(
        f"negative: {model} reads no negative text, because it always uses its own null prompt (a prompt without "
        "content); leave negative out."
    )


@dataclass
class ConditionBuilder:
    """Conditions of models from labels or prompts."""

    files: Source  # how models are found
    tar: str = AUTO  # choices of Tar's language model, of TA-Tok and of the text encoder
    ta_tok: str = AUTO
    encoder: str = ENCODER
    seed: int = 0  # of Tar's codes
    asked: Mapping[str, Any] = field(default_factory=dict)  # settings of Tar's language model
    unconditional: str | None = None  # what guidance leads away from, for models that read it; None for their own
    # Runs Tar's sampler; also gets title and unit.
    run: Callable[[Generator[Any, Any, Any], str, str], Any] = lambda sampler, title, unit: finish(sampler)
    warn: Callable[[str], None] = lambda sentence: None  # gets a sentence about what a model does not read as meant

    def __post_init__(self) -> None:
        self.forget()

    def use(self, files: Source) -> None:
        """Find models elsewhere, or place them on another device; loaded ones are freed."""
        self.files = files
        self.forget()

    def forget(self) -> None:
        """Free the language model, the readers and the encoder."""
        self._language: tuple[TarModel, dict[str, Any]] | None = None
        self._reader: tuple[Ready, TATokModel] | None = None
        self._image_reader: tuple[Ready, ImageReader] | None = None
        self._head: tuple[Ready, WordHead] | None = None
        self._text_encoder: Any = None
        self._rows: dict[str, Tensor] = {}

    def labels(
        self, on: Ready, text: str, repeat: int = 1, field: str = "label", most: float = math.inf
    ) -> ClassCondition:
        """Class labels, checked against the model.

        Args:
            on: the model.
            text: names or ids, see :func:`.runs.labels.resolve_labels`.
            repeat: images of each label.
            field: name of the input, for messages.
            most: largest number of images.

        Raises:
            UserError: an unknown label, or more than ``most`` images.
        """
        images = len(split_labels(text, field)) * repeat
        if images > most:
            raise UserError(f"batch: {images} images are too many; ask for at most {most}.")

        condition = labels_for(text, on.model.label_set, repeat, field)
        condition.class_ids(on.classes, on.model.label_set, on.device)
        return condition

    def prompts(self, on: Ready, texts: Sequence[str], first: int = 0) -> AnyCondition:
        """One prompt an image; image i of Tar's codes uses (seed, first + i).

        Raises:
            UserError: a prompt that the model cannot read.
        """
        if on.condition == "prompt":
            return self._instructions(on, texts)
        if on.condition == "text":
            prompts = [prompt_of(text, "prompt") for text in texts]
            rows = [self._encoded(on, prompt) for prompt in prompts]
            return TextCondition(tuple(rows), tuple(prompts))

        return self.read(self.codes(on, texts, first), on)

    def _instructions(self, on: Ready, texts: Sequence[str]) -> PromptCondition:
        """Prompts for a model with its own language model, checked."""
        model: Any = on.model
        for text in dict.fromkeys(texts):
            model.prompt(text)
        self._warn(unknown_words(model, texts))

        condition = PromptCondition(tuple(texts))
        if self.unconditional is not None:
            condition = PromptCondition(tuple(texts), self.unconditional)

        if on.kind.reads_negatives:
            model.instruction(UNCONDITIONAL if self.unconditional is None else self.unconditional)
        elif condition.unconditional != UNCONDITIONAL:
            raise has_null_prompt(model.name)
        return condition

    def image_prompts(
        self, on: Ready, texts: Sequence[str], image: Any, freedom: float | str | None = None, repeat: int = 1
    ) -> ImagePromptCondition:
        """Images with what is to be changed in each, for a model that edits.

        Args:
            on: the model.
            texts: prompts.
            image: an image or several in a list, see :func:`.images.one_for_each`.
            freedom: see :class:`.EditSettings`; None for the usual one.
            repeat: images of each prompt.

        Raises:
            UserError: a model that cannot edit, images or a prompt that it cannot read, or ``freedom`` that is no
                number of 0 to 10, or is given to a model that has none.
        """
        model: Any = on.model
        if freedom is not None and not on.kind.takes_freedom:
            raise UserError(f"freedom: {model.name} does not use this setting; leave it out, and set cfg_img instead.")
        settings = settings_from(EditSettings, {} if freedom is None else {"freedom": freedom})
        pairs = list(zip(texts, one_for_each(image, len(texts)), strict=True))
        prompts, pictures = zip(*[pair for pair in pairs for _ in range(repeat)], strict=True)
        condition = ImagePromptCondition(prompts, pictures, settings.freedom)
        expect_editor(condition, model)
        for text in dict.fromkeys(texts):
            model.image_prompt(text)

        return read_images(condition, self.image_reader(on), on.kind)

    def image_reader(self, on: Ready) -> Any:
        """What reads images for a model."""
        own = on.kind.own_reader(on.model, on.decoder)
        if own is not None:
            return own
        if self._image_reader is None or self._image_reader[0] is not on:
            self._image_reader = (on, load_image_reader(cast(JanusModel, on.model), on.vq, self.files))
        return self._image_reader[1]

    def word_head(self, on: Ready) -> WordHead:
        """The output layer for words of a Janus."""
        if self._head is None or self._head[0] is not on:
            self._head = (on, load_word_head(cast(JanusModel, on.model), self.files))
        return self._head[1]

    def _encoded(self, on: Ready, text: str) -> Tensor:
        """Rows of a prompt. Each prompt is encoded alone: a batch changes the last bits."""
        if text in self._rows:
            return self._rows[text]

        if self._text_encoder is None:
            from ..model_loaders.llamagen.text import load_text_encoder

            path = self.files.find(self.encoder, "t5")
            self._text_encoder = load_text_encoder(path, AUTO, on.device)

        self._rows[text] = self._text_encoder.encode([text])[0]
        return self._rows[text]

    def codes(self, on: Ready, texts: Sequence[str], first: int = 0) -> CodeCondition:
        """Codes that Tar's language model writes for the prompts; image i uses (seed, first + i)."""
        if self._language is None:
            choice = language_model_for(on) if self.tar == AUTO else self.tar
            self._language = load_language_model(choice, self.files)

        model, stated = self._language
        settings = prompt_settings(stated, self.asked)
        prompts = [text.strip() for text in texts]
        self._warn(unknown_words(model, prompts))

        return self.run(written_codes(model, prompts, settings, self.seed, first), "prompt", "codes").condition

    def read(self, codes: CodeCondition, on: Ready) -> AnyCondition:
        """Features of codes, for a de-tokenizer."""
        if self._reader is None or self._reader[0] is not on:
            self._reader = (on, load_reader(on, self.files, self.ta_tok))

        _, reader = self._reader
        return features_of(codes, reader)

    def _warn(self, sentence: str) -> None:
        """Say what a model reads otherwise than it is meant, if there is anything."""
        if sentence:
            self.warn(sentence)


def written_codes(
    model: TarModel, prompts: Sequence[str], settings: TarPromptSettings, seed: int, first: int
) -> Generator[Any, None, TarPrompted]:
    """Write codes for prompts with Tar's language model, in parts if memory is insufficient for all at once; image i
    uses (seed, first + i).
    """

    def start(part: range) -> Any:
        """The language model on some of the prompts."""
        numbers = range(first + part.start, first + part.stop)
        return tar_prompt(model, [prompts[i] for i in part], settings, TokenNoise(seed, numbers))

    return in_parts(start, len(prompts), model.net)
