"""Conditions: what the images of a batch show. A condition has one entry per image.

Each kind of condition has its own entries: class labels, prompts, images with prompts, text features, semantic
features or semantic codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..errors import OfFastAR, UserError, amount, printable
from ..networks.hybrid import UNCONDITIONAL
from ..reports.record import fingerprint

AnyEntries = TypeVar("AnyEntries", bound="_Entries")

# A condition as text lists at most this many names.
_MOST_SHOWN = 8


@dataclass(frozen=True)
class _Entries(OfFastAR):
    """Base of all conditions. Each field that is a tuple has one entry per image."""

    kind: ClassVar[str] = ""
    title: ClassVar[str] = ""  # the name of the entries in messages
    maker: ClassVar[str] = ""  # the node that makes conditions of this kind
    fastar_version: ClassVar[int] = 1  # docs/sockets.md describes conditions of this version

    # Every derived class has this property, or a field of this name. At run time, the base must not have the property,
    # because ``dataclass`` would take the property for the default value of the field.
    if TYPE_CHECKING:

        @property
        def names(self) -> tuple[str, ...]:
            """The captions of the images."""
            raise NotImplementedError

    @property
    def entries(self) -> tuple[Any, ...]:
        """For each image, what it shows: a class id, a prompt or another value."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        """The text that ComfyUI's Preview as Text shows."""
        shown = ", ".join(map(printable, self.names[:_MOST_SHOWN]))
        more = f" and {len(self.names) - _MOST_SHOWN} more" if len(self.names) > _MOST_SHOWN else ""
        return f"{self.title.capitalize()} for {amount(len(self), 'images')}: {shown}{more}."

    def for_images(self: AnyEntries, images: Sequence[int]) -> AnyEntries:
        """The condition for some images of the batch. ``images``: the indices of these images."""
        chosen: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, tuple):
                chosen[f.name] = tuple(value[i] for i in images)

        return replace(self, **chosen)

    def digests(self) -> tuple[str, ...]:
        """A short digest for each image. The digests of two images are identical if the images have the same entry and
        the same null condition.
        """
        return tuple(fingerprint(self.kind, entry, self.null_text) for entry in self.entries)

    @property
    def null_text(self) -> str:
        """The null condition of guidance, or "" if the model uses its own null condition."""
        return ""

    @property
    def subject(self) -> str:
        """The readable name of what all images show, such as "cat"; "" if the images show different things, or if what
        they show has no such name.
        """
        return ""


@dataclass(frozen=True)
class ClassCondition(_Entries):
    """Class labels for the images of a batch."""

    kind: ClassVar[str] = "class"
    title: ClassVar[str] = "class labels"
    maker: ClassVar[str] = "Class Label"
    labels: tuple[int, ...]  # class ids, one per image
    names: tuple[str, ...]  # class names, same length; used as captions
    label_set: str = ""  # the list that the names are from ("picture-book", "imagenet-1k"); "" for ids without names

    @property
    def entries(self) -> tuple[int, ...]:
        return self.labels

    @property
    def subject(self) -> str:
        if not self.label_set or len({*self.names}) != 1:
            return ""

        name, _, _ = self.names[0].partition(" (")  # "crane (bird)": the brackets only tell equal names apart
        return name

    def class_ids(self, classes: int, label_set: str, device: torch.device) -> Tensor:
        """The labels, int64 [B] on ``device``, for a model with ``classes`` classes.

        Raises:
            UserError: the condition has no label, or has a label outside 0 to ``classes`` - 1, or its names are from
                another label set than the model's ``label_set``.
        """
        if not self.labels:
            raise UserError("condition: it holds no label; name at least one.")
        if self.label_set and label_set and self.label_set != label_set:
            raise UserError(
                f"condition: its labels are from the list {self.label_set}, but the model was trained on {label_set}; "
                f"choose label_set {label_set} in Class Label."
            )

        bad = [n for n in self.labels if not 0 <= n < classes]
        if bad:
            raise UserError(
                f"condition: label {bad[0]} is outside 0 to {classes - 1}, the class ids of the model; "
                "choose an id in this range."
            )
        return torch.tensor(self.labels, dtype=torch.int64, device=device)


# The public name of the class, which scripts and other node packs use.
Condition = ClassCondition


@dataclass(frozen=True, eq=False)
class _Prompts(_Entries):
    """Prompts for the images of a batch."""

    texts: tuple[str, ...]  # prompts as the user typed them, one per image to generate

    @property
    def names(self) -> tuple[str, ...]:
        """Captions."""
        return self.texts

    def expect_prompt(self) -> None:
        """Raise a UserError if there is no prompt."""
        if not self.texts:
            raise UserError("condition: it holds no prompt; write at least one.")


@dataclass(frozen=True)
class PromptCondition(_Prompts):
    """Prompts for the images of a batch, for models that contain a language model, which encodes the prompts."""

    kind: ClassVar[str] = "prompt"
    title: ClassVar[str] = "prompts"
    maker: ClassVar[str] = "Prompt (FastAR)"
    unconditional: str = UNCONDITIONAL  # the whole instruction that the null branch of guidance reads, see HybridModel

    @property
    def entries(self) -> tuple[str, ...]:
        return self.texts

    @property
    def null_text(self) -> str:
        return self.unconditional


# The usual ``freedom`` of an ImagePromptCondition, from the authors of Janus-4o.
USUAL_FREEDOM = 5.0


@dataclass(frozen=True, eq=False)
class ImagePromptCondition(_Prompts):
    """Images, each with a prompt that says what to change, for a model that edits images."""

    kind: ClassVar[str] = "image prompt"
    title: ClassVar[str] = "images with prompts"
    maker: ClassVar[str] = "Image and Prompt"
    images: tuple[Tensor, ...]  # uint8 [H, W, 3] of any size, one per text
    # Janus-4o's w: the weight of the guidance branch that does not read the image's VQ tokens; 0 omits this branch.
    freedom: float = USUAL_FREEDOM
    # For each image, the output of the part of the model that reads images; None until the model has read them.
    encoded_images: tuple[Any, ...] | None = None

    @property
    def entries(self) -> tuple[tuple[str, Tensor], ...]:
        return tuple(zip(self.texts, self.images, strict=True))

    def digests(self) -> tuple[str, ...]:
        return tuple(fingerprint(self.kind, text, image, self.freedom) for text, image in self.entries)


@dataclass(frozen=True, eq=False)
class _Features(_Entries):
    """Feature vectors for each image of a batch."""

    features: tuple[Tensor, ...]  # one float tensor per image: [n, E], n vectors of E numbers
    names: tuple[str, ...]  # captions, same length

    @property
    def entries(self) -> tuple[Tensor, ...]:
        return self.features


class TextCondition(_Features):
    """Encoded prompts: the text encoder's output for the tokens of each prompt, without padding. The captions
    (``names``) are the prompts as text.
    """

    kind: ClassVar[str] = "text"
    title: ClassVar[str] = "text"
    maker: ClassVar[str] = "LlamaGen Prompt"


class FeatureCondition(_Features):
    """Semantic features from Tar's image tokenizer, TA-Tok. Every image has the same number of feature vectors."""

    kind: ClassVar[str] = "features"
    title: ClassVar[str] = "semantic features"
    maker: ClassVar[str] = "Tar Prompt or Image to Codes"


@dataclass(frozen=True, eq=False)
class CodeCondition(_Entries):
    """Semantic codes for the images of a batch. A code is an index into the codebook of TA-Tok, Tar's image tokenizer.
    Either Tar's language model writes the codes, or TA-Tok computes them from existing images.
    """

    kind: ClassVar[str] = "codes"
    title: ClassVar[str] = "semantic codes"
    maker: ClassVar[str] = "Tar Prompt or Image to Codes"
    codes: tuple[Tensor, ...]  # one int64 tensor [n] per image; n is the same for all images
    names: tuple[str, ...]  # captions, same length
    size: int = 0  # number of entries in the codebook, 0 if unknown

    @property
    def entries(self) -> tuple[Tensor, ...]:
        return self.codes


# MAR reads class labels; Harmon and UniPic read prompts. Some BitDance models read labels, and the others prompts.
ClassOrPrompt = ClassCondition | PromptCondition
AnyCondition = ClassOrPrompt | ImagePromptCondition | TextCondition | FeatureCondition | CodeCondition

_CLASSES = (ClassCondition, PromptCondition, ImagePromptCondition, TextCondition, FeatureCondition, CodeCondition)
# For each kind of condition: the name of its entries in messages, and the node that makes such a condition.
KINDS = {condition.kind: condition.title for condition in _CLASSES}
MAKERS = {condition.kind: condition.maker for condition in _CLASSES}


def from_ids(ids: Sequence[int]) -> ClassCondition:
    """A condition of class ids without a label set. The names are the ids as text."""
    return ClassCondition(tuple(ids), tuple(str(i) for i in ids))


def expect_kind(condition: AnyCondition, kind: str, model: str) -> None:
    """Raise a UserError if a condition is not of ``kind``, the kind that the model named ``model`` reads."""
    if condition.kind != kind:
        raise wrong_kind(condition, kind, model)


def wrong_kind(condition: AnyCondition, kind: str, model: str) -> UserError:
    """The error for a condition that the model named ``model`` cannot read. ``kind``: the kind that the model reads."""
    return UserError(
        f"condition: {model} reads {KINDS[kind]}, but the condition holds {condition.title}; connect the node "
        f"{MAKERS[kind]}."
    )


def expect_editor(condition: AnyCondition, model: Any) -> None:
    """Check that a model can edit images. If it is unknown whether the model was trained to edit, the check assumes
    that it was.

    Raises:
        UserError: the model does not read images with prompts; the model was not trained to edit, so it would ignore
            the image; or the model's file lacks the part that reads images.
    """
    if not getattr(model, "reads_images", False):  # models of most families do not have this attribute
        raise wrong_kind(condition, model.condition, model.name)
    if model.edits is False:
        raise UserError(
            f"condition: {model.name} was not trained to edit and would ignore the image; load {model.editor}, or "
            f"connect the node {MAKERS['prompt']}."
        )
    if model.lacks_reader:
        raise UserError(
            f"condition: the file of {model.name} lacks the part that reads images; get a file with all weights of the "
            "model."
        )


def expect_null_prompt(condition: PromptCondition, model: str) -> None:
    """Raise a UserError if the prompts have a negative text. ``model``: name of a model with its own null prompt (Janus
    or BitDance). Such a model would ignore the negative text.
    """
    if condition.unconditional != UNCONDITIONAL:
        raise UserError(
            f"condition: its prompts have a negative text, but {model} always uses its own null prompt (a prompt "
            "without content); leave negative empty."
        )
