"""Conditions: class labels, prompts, text features, semantic features or semantic codes, one entry per image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor

from ..errors import UserError
from ..model_loaders.networks.mar import MARModel
from ..model_loaders.networks.prompts import UNCONDITIONAL, HybridModel
from ..model_loaders.networks.rows import ClassRows, Rows

E = TypeVar("E", bound="_Entries")


@dataclass(frozen=True)
class _Entries:
    """A condition whose tuples have one entry per image."""

    def of(self: E, images: Sequence[int]) -> E:
        """The condition of some of the images, by their place in the batch."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: tuple(v[i] for i in images) for name, v in own.items() if isinstance(v, tuple)})


@dataclass(frozen=True)
class Condition(_Entries):
    """Class labels of a batch.

    Attributes:
        labels: class ids, one per image.
        names: class names, same length; used as captions.
        label_set: the list of the names ("picture-book", "imagenet-1k"), or "" for bare ids.
    """

    kind: ClassVar[str] = "class"
    labels: tuple[int, ...]
    names: tuple[str, ...]
    label_set: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def class_ids(self, classes: int, label_set: str, device: torch.device) -> Tensor:
        """int64 [B] on ``device``, checked against a model of ``classes`` classes.

        Raises:
            UserError: no label, a label outside the model's, or names from another label set.
        """
        if not self.labels:
            raise UserError("condition: it holds no label; name at least one.")
        if self.label_set and label_set and self.label_set != label_set:
            raise UserError(
                f"condition: its labels are from {self.label_set}, the model was trained on {label_set}; "
                f"choose label_set {label_set} in Class Label."
            )
        bad = [n for n in self.labels if not 0 <= n < classes]
        if bad:
            raise UserError(f"condition: label {bad[0]} is outside the model's 0 to {classes - 1}.")
        return torch.tensor(self.labels, dtype=torch.int64, device=device)

    def prompt_tokens(self, model: MARModel, guided: bool) -> int:
        """Tokens of prompts that the model keeps: none."""
        return 0

    def rows(self, model: MARModel, guided: bool) -> Rows:
        """The condition as the network reads it; raises as :meth:`class_ids`."""
        device = next(model.net.parameters()).device
        return ClassRows(model.net, self.class_ids(model.net.config.classes, model.label_set, device))


@dataclass(frozen=True)
class PromptCondition(_Entries):
    """Prompts of a batch, for models with a language model of their own. Each model that samples encodes them itself.

    Attributes:
        texts: prompts as typed, one per image.
        unconditional: the whole instruction of the unconditional branch of guidance.
    """

    kind: ClassVar[str] = "prompt"
    texts: tuple[str, ...]
    unconditional: str = UNCONDITIONAL

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def names(self) -> tuple[str, ...]:
        """Captions."""
        return self.texts

    def prompt_tokens(self, model: MARModel, guided: bool) -> int:
        """Tokens of prompts that the model keeps, each distinct one once; raises as :meth:`rows`."""
        hybrid = cast(HybridModel, model)
        null = hybrid.instruction(self.unconditional) if guided else []
        return sum(len(hybrid.prompt(text)) for text in dict.fromkeys(self.texts)) + len(null)

    def rows(self, model: MARModel, guided: bool) -> Rows:
        """The condition as the network reads it.

        Raises:
            UserError: no prompt, or one that the model cannot read.
        """
        if not self.texts:
            raise UserError("condition: it holds no prompt; write at least one.")
        return cast(HybridModel, model).rows(self.texts, self.unconditional, guided)


def from_ids(ids: Sequence[int]) -> Condition:
    """Bare class ids."""
    return Condition(tuple(ids), tuple(str(i) for i in ids))


@dataclass(frozen=True, eq=False)
class TextCondition(_Entries):
    """Encoded text of a batch.

    Attributes:
        features: one float tensor [n_i, E] per image: the encoder's output for the prompt's tokens, without padding.
        names: the prompts, same length; used as captions.
    """

    kind: ClassVar[str] = "text"
    features: tuple[Tensor, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True, eq=False)
class FeatureCondition(_Entries):
    """Semantic features of a batch (Tar's TA-Tok).

    Attributes:
        features: one float tensor [n, E] per image, all of one length.
        names: captions, same length.
    """

    kind: ClassVar[str] = "features"
    features: tuple[Tensor, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True, eq=False)
class CodeCondition(_Entries):
    """Semantic codes of a batch, from Tar's language model or from an image.

    Attributes:
        codes: one int64 tensor [n] per image, all of one length.
        names: captions, same length.
        size: entries of the codebook, 0 if unknown.
    """

    kind: ClassVar[str] = "codes"
    codes: tuple[Tensor, ...]
    names: tuple[str, ...]
    size: int = 0

    def __len__(self) -> int:
        return len(self.codes)


# Conditions of masked models (MAR, Harmon, UniPic).
MaskedCondition = Condition | PromptCondition
AnyCondition = MaskedCondition | TextCondition | FeatureCondition | CodeCondition
