"""What a token model draws from: class labels, text features or semantic codes, one entry an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from ..model_loaders.networks.gpt import TokenModel
from .conditioning import Condition


@dataclass(frozen=True, eq=False)
class TextCondition:
    """Text of a batch, encoded.

    Attributes:
        features: one float tensor [n_i, E] an image: the encoder's rows of the prompt's own tokens, without padding.
        names: the prompts, same length; used as captions.
    """

    features: tuple[Tensor, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True, eq=False)
class FeatureCondition:
    """Semantic features of a batch (Tar's TA-Tok): one float tensor [n, E] an image, as many rows in each."""

    features: tuple[Tensor, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True, eq=False)
class CodeCondition:
    """Semantic codes of a batch (Tar's language model): one int64 tensor [n] an image, as many in each."""

    codes: tuple[Tensor, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.codes)


AnyCondition = Condition | TextCondition | FeatureCondition | CodeCondition

# Kind of a network's condition to the class it is given in, and what a person calls it.
_KINDS: dict[str, tuple[type, str]] = {
    "class": (Condition, "class labels"),
    "text": (TextCondition, "text"),
    "features": (FeatureCondition, "semantic features"),
    "codes": (CodeCondition, "semantic codes"),
}


class Given(NamedTuple):
    """A condition as :meth:`GPT.prefix` takes it; ``lengths`` int64 [B] only where images differ in rows."""

    condition: Tensor
    lengths: Tensor | None
    rows: int


def given(model: TokenModel, condition: AnyCondition, device: torch.device) -> Given:
    """A condition, checked against a model, on ``device``.

    Raises:
        UserError: a condition of another kind than the model's, an empty one, labels or rows that do not fit.
    """
    c = model.net.config
    kind, name = _KINDS[c.condition]
    if not isinstance(condition, kind):
        found = next((text for other, text in _KINDS.values() if isinstance(condition, other)), type(condition).__name__)
        raise UserError(f"condition: it holds {found}, {model.name} draws from {name}; connect the node that makes those.")
    if isinstance(condition, Condition):
        return Given(condition.class_ids(c.condition_size, model.label_set, device), None, 1)
    entries = condition.codes if isinstance(condition, CodeCondition) else condition.features
    if not entries:
        raise UserError("condition: it is empty; ask for at least one image.")
    counts = [len(entry) for entry in entries]
    if min(counts) < 1:
        raise UserError("condition: an image has no rows at all; make the condition again.")
    if isinstance(condition, CodeCondition):
        low, high = min(int(e.min()) for e in entries), max(int(e.max()) for e in entries)
        if low < 0 or high >= c.condition_size:
            bad = low if low < 0 else high
            raise UserError(f"condition: code {bad} is outside the model's 0 to {c.condition_size - 1}.")
    else:
        width = next((e.shape[-1] for e in entries if e.shape[-1] != c.condition_size), c.condition_size)
        if width != c.condition_size:
            raise UserError(
                f"condition: its rows hold {width} numbers, {model.name} reads {c.condition_size}; use the encoder that belongs to it."
            )
    most = max(counts)
    if c.condition == "text" and most > c.text_rows:
        raise UserError(f"condition: a text has {most} tokens, {model.name} reads {c.text_rows}; shorten it.")
    if c.absolute:
        if most != min(counts):
            raise UserError(f"condition: images have {min(counts)} to {most} codes; run those of one detail at a time.")
        need = most + model.tokens - 1
        if need > c.absolute:
            raise UserError(
                f"grid: {model.grid} x {model.grid} tokens behind {most} condition rows need {need} positions, {model.name} "
                f"has {c.absolute}; choose the grid the checkpoint was made for."
            )
    batch = torch.nn.utils.rnn.pad_sequence([e.to(device) for e in entries], batch_first=True)
    lengths = None if most == min(counts) else torch.tensor(counts, dtype=torch.int64, device=device)
    return Given(batch, lengths, most)
