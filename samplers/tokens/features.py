"""From the semantic codes of an image to the features that Tar's de-tokenizer reads.

Tar has a language model that generates the *semantic codes* of an image, and a *de-tokenizer* that generates the image
from these codes. *TA-Tok* converts semantic codes to the features that the de-tokenizer reads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...errors import UserError, not_finite
from ...networks.precision import is_finite
from ...networks.ta_tok import TATokModel
from ...networks.torch_state import in_own_state
from ..conditioning import CodeCondition, FeatureCondition


@in_own_state
def features_of(condition: CodeCondition, ta_tok: TATokModel) -> FeatureCondition:
    """Convert semantic codes to the features that a de-tokenizer reads. The features have the device and the dtype of
    TA-Tok.

    TA-Tok computes one image at a time, so the features do not depend on the batch. Images with the same codes share
    one tensor.

    Raises:
        UserError: the codes are missing, are from a different codebook or do not form a square grid; or the features
            are not finite.
    """
    size = ta_tok.net.config.codes
    device = ta_tok.net.bottleneck.out_linear.weight.device
    if condition.size and condition.size != size:
        raise UserError(
            f"condition: its codes are from a codebook of {condition.size} codes, but {ta_tok.name} has {size}; use "
            "the TA-Tok that made these codes."
        )
    _expect_codes(condition, size, ta_tok.name)

    keys = [tuple(codes.tolist()) for codes in condition.codes]
    features = {key: _features_of_image(ta_tok, torch.tensor(key, device=device)) for key in dict.fromkeys(keys)}
    return FeatureCondition(tuple(features[key] for key in keys), condition.names)


@torch.no_grad()
def _features_of_image(ta_tok: TATokModel, codes: Tensor) -> Tensor:
    """Compute the features [n, E] of one image from its ``codes``, int64 [n]."""
    if math.isqrt(len(codes)) ** 2 != len(codes):
        raise UserError(f"condition: {len(codes)} codes do not form a square grid; make the condition again.")
    features = ta_tok.net.features(codes[None])[0]
    if not is_finite(features):
        raise not_finite("ta_tok", ta_tok.name, "features")
    return features


def _expect_codes(condition: CodeCondition, size: int, owner: str) -> None:
    """Check that every image has codes, and that all codes are from 0 to ``size`` - 1. ``owner``: the TA-Tok's name."""
    expect_entries(condition.codes)
    low = min(int(codes.min()) for codes in condition.codes)
    high = max(int(codes.max()) for codes in condition.codes)
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise UserError(
            f"condition: code {wrong} is outside 0 to {size - 1}, the codes of {owner}; use the TA-Tok that made these "
            "codes."
        )


def expect_entries(entries: tuple[Tensor, ...]) -> None:
    """Check that there is at least one image, and that every image has features or codes."""
    if not all(map(len, entries)) or not entries:
        raise UserError(
            "condition: it has no images, or one of its images has neither features nor codes; make the condition "
            "again."
        )
