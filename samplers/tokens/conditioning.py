"""What a token model draws from: class labels, text features or semantic codes, one entry an image."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.gpt import TokenModel
from ...model_loaders.networks.ta_tok import TATokModel
from ..conditioning import AnyCondition, CodeCondition, Condition, FeatureCondition, TextCondition

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


def features_of(condition: CodeCondition, ta_tok: TATokModel) -> FeatureCondition:
    """Semantic codes as the features that a de-tokenizer draws from.

    Every image is computed alone, so that none depends on its neighbours; equal codes share one tensor.

    Args:
        condition: codes on any device.
        ta_tok: what the codes were made for.

    Returns:
        Features on TA-Tok's device and in its dtype.

    Raises:
        UserError: codes of another codebook, of no square grid, or none.
    """
    size, device = ta_tok.net.config.codes, ta_tok.net.bottleneck.out_linear.weight.device
    if condition.size and condition.size != size:
        raise UserError(
            f"condition: its codes are of a codebook of {condition.size}, {ta_tok.name} has {size}; use the TA-Tok they were made for."
        )
    _check_codes(condition, size, ta_tok.name)
    known: dict[bytes, Tensor] = {}
    out = []
    for codes in condition.codes:
        if math.isqrt(len(codes)) ** 2 != len(codes):
            raise UserError(f"condition: {len(codes)} codes are no square grid; make the condition again.")
        key = codes.to(device="cpu", dtype=torch.int64).contiguous().numpy().tobytes()
        if key not in known:
            with torch.no_grad():
                known[key] = ta_tok.net.features(codes.to(device, torch.int64)[None])[0]
        out.append(known[key])
    return FeatureCondition(tuple(out), condition.names)


def _check_codes(condition: CodeCondition, size: int, whose: str) -> None:
    """Raises UserError where there are none, or one is outside 0 to ``size`` - 1."""
    if not condition.codes:
        raise UserError("condition: it is empty; ask for at least one image.")
    if min(map(len, condition.codes)) < 1:
        raise UserError("condition: an image has no rows at all; make the condition again.")
    low, high = min(int(e.min()) for e in condition.codes), max(int(e.max()) for e in condition.codes)
    if low < 0 or high >= size:
        raise UserError(f"condition: code {low if low < 0 else high} is outside {whose}'s 0 to {size - 1}.")


def given(model: TokenModel, condition: AnyCondition, device: torch.device) -> Given:
    """A condition, checked against a model, on ``device``. Semantic codes become features where the model has a TA-Tok.

    Raises:
        UserError: a condition of another kind than the model's, an empty one, labels or rows that do not fit.
    """
    c = model.net.config
    kind, name = _KINDS[c.condition]
    if isinstance(condition, CodeCondition) and c.condition == "features":
        if model.ta_tok is None:
            raise UserError(
                f"condition: it holds semantic codes, {model.name} draws from {name}; load it with the TA-Tok that makes those of them."
            )
        condition = features_of(condition, model.ta_tok)
    if not isinstance(condition, kind):
        found = next(
            (text for other, text in _KINDS.values() if isinstance(condition, other)), type(condition).__name__
        )
        raise UserError(
            f"condition: it holds {found}, {model.name} draws from {name}; connect the node that makes those."
        )
    if isinstance(condition, Condition):
        return Given(condition.class_ids(c.condition_size, model.label_set, device), None, 1)
    entries = condition.codes if isinstance(condition, CodeCondition) else condition.features
    if not entries:
        raise UserError("condition: it is empty; ask for at least one image.")
    counts = [len(entry) for entry in entries]
    if min(counts) < 1:
        raise UserError("condition: an image has no rows at all; make the condition again.")
    if isinstance(condition, CodeCondition):
        _check_codes(condition, c.condition_size, model.name)
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
