"""Values on the sockets of this pack, recognised by what they carry. docs/sockets.md describes them for other packs.

Every value says its ``kind`` and, as ``fastar_version``, the version of the page that describes it. Its class may be
that of another copy of this pack, or of another pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from ..errors import UserError
from ..reports.table import amount, printable
from ..samplers.conditioning import (
    KINDS,
    AnyCondition,
    CodeCondition,
    Condition,
    FeatureCondition,
    ImagePromptCondition,
    PromptCondition,
    TextCondition,
)
from ..samplers.labels import split_labels
from .schema import describe

T = TypeVar("T")

# Of the page: a new attribute of a value leaves it, another meaning of one raises it.
VERSION = 1
# The remedy where a value is not as the page says.
_ASK = "ask the author of the node that made it"


@dataclass(frozen=True)
class LabelText:
    """Labels, ``repeat`` images of each, whose label set is the one of the model that samples them."""

    kind: ClassVar[str] = "label text"
    fastar_version: ClassVar[int] = VERSION
    text: str
    repeat: int

    def __str__(self) -> str:
        """For people: what core's Preview as Text shows."""
        return (
            f"Class labels, {amount(self.repeat, 'images')} of each: {printable(', '.join(split_labels(self.text)))}."
        )


def kind_on(value: Any) -> str:
    """The kind that a value states; "" if it is not a value of this pack's sockets."""
    kind = getattr(value, "kind", None)
    version = getattr(value, "fastar_version", None)
    return kind if isinstance(kind, str) and isinstance(version, int) else ""


def expect_kind_on(value: Any, kinds: tuple[str, ...], field: str, source: str) -> Any:
    """Check that the value of the input ``field`` states one of the kinds; ``source`` is the node whose output fits.

    Raises:
        UserError: another value, or one that a newer version describes.
    """
    if kind_on(value) not in kinds:
        raise UserError(f"{field}: it got {describe(value)}; connect the output of {source}.")

    if value.fastar_version > VERSION:
        raise UserError(
            f"{field}: its value of the kind {value.kind} came from a newer FastAR (sockets of version "
            f"{value.fastar_version}, this one knows {VERSION}); update this one."
        )
    return value


def expect_own(value: Any, cls: type[T], field: str, source: str) -> T:
    """As :func:`expect_kind_on` for the kind of a dataclass of ours; a value of another class becomes one of it."""
    expect_kind_on(value, (cls.kind,), field, source)  # type: ignore[attr-defined]
    if isinstance(value, cls):
        return value

    carried: dict[str, Any] = {}
    for attribute in fields(cls):  # type: ignore[arg-type]
        if hasattr(value, attribute.name):
            carried[attribute.name] = getattr(value, attribute.name)

    lacking: list[str] = []
    for attribute in fields(cls):  # type: ignore[arg-type]
        needed = attribute.default is MISSING and attribute.default_factory is MISSING
        if needed and attribute.name not in carried:
            lacking.append(attribute.name)
    if lacking:
        raise UserError(f"{field}: its value of the kind {value.kind} lacks {', '.join(lacking)}; {_ASK}.")
    return cls(**carried)


# ------------------------------------------------------------------------------------------------ conditions


def _is_label(entry: Any) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool)


def _is_text(entry: Any) -> bool:
    return isinstance(entry, str)


def _is_rows(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.is_floating_point() and entry.ndim == 2


def _is_codes(entry: Any) -> bool:
    return isinstance(entry, Tensor) and not entry.is_floating_point() and entry.ndim == 1


def _is_pixels(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype == torch.uint8 and entry.ndim == 3 and entry.shape[2] == 3


# Class of a condition by kind, the attribute that has an entry an image, what an entry is, and the check of one.
_CONDITIONS: dict[str, tuple[type[AnyCondition], str, str, Callable[[Any], bool]]] = {
    Condition.kind: (Condition, "labels", "whole numbers", _is_label),
    PromptCondition.kind: (PromptCondition, "texts", "texts", _is_text),
    ImagePromptCondition.kind: (ImagePromptCondition, "texts", "texts", _is_text),
    TextCondition.kind: (TextCondition, "features", "float tensors [rows, width]", _is_rows),
    FeatureCondition.kind: (FeatureCondition, "features", "float tensors [rows, width]", _is_rows),
    CodeCondition.kind: (CodeCondition, "codes", "int64 tensors [codes]", _is_codes),
}


def expect_condition(value: Any, source: str) -> AnyCondition | LabelText:
    """Check the value of a condition socket, and return it as an instance of our classes.

    Raises:
        UserError: another value, or one whose attributes are not what docs/sockets.md says.
    """
    expect_kind_on(value, (LabelText.kind, *_CONDITIONS), "condition", source)
    if value.kind == LabelText.kind:
        return expect_own(value, LabelText, "condition", source)

    cls, attribute, what, fits = _CONDITIONS[value.kind]
    made = expect_own(value, cls, "condition", source)
    entries = _listed(made, attribute)
    if not all(map(fits, entries)):
        raise UserError(f"condition: {attribute} of its {KINDS[value.kind]} are not {what}; {_ASK}.")

    if isinstance(made, PromptCondition):
        return PromptCondition(entries, made.unconditional)
    if isinstance(made, ImagePromptCondition):
        images = _listed(made, "images")
        if len(images) != len(entries) or not all(map(_is_pixels, images)):
            raise UserError(
                f"condition: its {KINDS[value.kind]} must have a uint8 tensor [height, width, 3] in images for each of "
                f"{len(entries)} texts; {_ASK}."
            )
        return ImagePromptCondition(entries, images, made.freedom)

    names = _listed(made, "names")
    if len(names) != len(entries) or not all(map(_is_text, names)):
        raise UserError(
            f"condition: its {KINDS[value.kind]} must have a text in names for each of {len(entries)} images; {_ASK}."
        )

    more = {name: getattr(made, name) for name in ("label_set", "size") if hasattr(made, name)}
    return cast(Any, cls)(entries, names, **more)


def _listed(condition: Any, attribute: str) -> tuple[Any, ...]:
    """The entries of an attribute, a list or tuple."""
    entries = getattr(condition, attribute)
    if not isinstance(entries, (list, tuple)):
        raise UserError(f"condition: {attribute} of its {KINDS[condition.kind]} is not a list; {_ASK}.")
    return tuple(entries)
