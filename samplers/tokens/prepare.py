"""Before the first pass: check that a condition fits a token model, and pack the condition into tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.janus import Janus, JanusModel, PromptImages
from ...networks.llama import FEATURES, TEXT, Llama, TokenModel
from ..conditioning import (
    KINDS,
    AnyCondition,
    ClassCondition,
    CodeCondition,
    FeatureCondition,
    ImagePromptCondition,
    PromptCondition,
    TextCondition,
    expect_editor,
    expect_kind,
)
from .features import expect_entries, features_of


@dataclass(frozen=True)
class PreparedCondition:
    """A condition, packed for :meth:`Llama.prefix`. That method makes the *condition rows*, which come before the image
    tokens.

    The transformer runs in up to three branches, each for all images. The first branch reads the condition. If
    ``part_share`` is above 0, a second branch reads a part of the condition. If there is guidance, the last branch
    reads the null condition. The logits of the first two branches are mixed, and guidance then mixes the result with
    the logits of the null condition::

        mixed  = (1 - part_share) first + part_share second      (without a second branch: first)
        guided = null + cfg (mixed - null)

    Only image editing with a Janus has a second branch (:class:`PreparedImages`). There, the first branch reads the
    prompt, the content of the image and the codes of the image. The second branch reads all but the codes.
    """

    # Labels, int64 [B]; features, [B, n, width]; or token ids of prompts, int64 [B, n], or [U, n] for U distinct
    # prompts.
    entries: Tensor
    lengths: Tensor | None = None  # int64 [B] or [U], number of valid rows of each entry; None if all are valid
    # int64 [B], the index in ``entries`` of every image's prompt; None if every image has its own entry.
    prompt_of_image: Tensor | None = None
    part_share: float = 0.0  # share of the second branch in the mix of the first two branches; 0 to below 1

    @property
    def conditional_branches(self) -> int:
        """Number of branches without the null branch."""
        return 2 if self.part_share > 0 else 1

    def prefix(self, net: Llama, null: bool) -> Tensor:
        """The condition rows of E entries in P branches, [P E, n, D]: all entries of the first branch, then all entries
        of the next branch. E is B, or U if several images share a prompt. ``null``: whether the null branch is one of
        the branches.
        """
        return net.prefix(self.entries, self.lengths, guided=null)


@dataclass(frozen=True, kw_only=True)
class PreparedImages(PreparedCondition):
    """Prompts with one image each, for a Janus that edits. The second branch reads all except the images' codes."""

    sources: PromptImages

    def prefix(self, net: Llama, null: bool) -> Tensor:
        return cast(Janus, net).image_prefix(self.entries, self.sources, self.lengths, self.part_share > 0, null)


def prepare(model: TokenModel, condition: AnyCondition, device: torch.device) -> PreparedCondition:
    """Check that a condition fits a model, and pack the condition on ``device``.

    For a de-tokenizer, semantic codes are first converted to features with the TA-Tok of the model.

    Raises:
        UserError: the condition does not fit the model; or the TA-Tok is missing.
    """
    # 1. A de-tokenizer reads features, not semantic codes.
    if isinstance(condition, CodeCondition) and model.condition == FEATURES:
        condition = _features_for(model, condition)

    # 2. Each model reads one kind of condition. In addition, a Janus that edits reads images with prompts.
    if isinstance(condition, ImagePromptCondition):
        expect_editor(condition, model)
    else:
        expect_kind(condition, model.condition, model.name)

    # 3. Each kind of condition has its own packing function. Of the token models, only a Janus reads a PromptCondition.
    if isinstance(condition, ClassCondition):
        return _pack_labels(model, condition, device)
    if isinstance(condition, TextCondition | FeatureCondition):
        return _pack_features(model, condition, device)
    if isinstance(condition, PromptCondition):
        return _pack_prompts(cast(JanusModel, model), condition, device)
    assert isinstance(condition, ImagePromptCondition), "no model reads semantic codes"
    return _pack_images_with_prompts(cast(JanusModel, model), condition, device)


def _features_for(model: TokenModel, condition: CodeCondition) -> FeatureCondition:
    """Convert semantic codes with the TA-Tok of a de-tokenizer, see :func:`features_of`.

    Raises:
        UserError: the model has no TA-Tok. :func:`features_of` states further errors.
    """
    if model.ta_tok is None:
        raise UserError(
            f"condition: it holds semantic codes, but {model.name} reads {KINDS[FEATURES]}; load the model together "
            "with the TA-Tok that turns codes into features."
        )
    return features_of(condition, model.ta_tok)


# ------------------------------------------------------------ one function for each kind of condition


def _pack_labels(model: TokenModel, condition: ClassCondition, device: torch.device) -> PreparedCondition:
    """Class labels, one for each image."""
    return PreparedCondition(condition.class_ids(model.net.config.condition_size, model.label_set, device))


def _pack_features(
    model: TokenModel, condition: TextCondition | FeatureCondition, device: torch.device
) -> PreparedCondition:
    """Feature rows of texts or of semantic codes, padded to the longest entry."""
    expect_entries(condition.features)
    width = model.net.config.condition_size
    for rows in condition.features:
        if rows.shape[-1] != width:
            raise UserError(
                f"condition: its features have a width of {rows.shape[-1]}, but {model.name} needs a width of {width}; "
                "use the encoder that the model was trained with."
            )

    _expect_lengths(model, [len(rows) for rows in condition.features])
    return PreparedCondition(*pad_entries(condition.features, device))


def _pack_prompts(model: JanusModel, condition: PromptCondition, device: torch.device) -> PreparedCondition:
    """Token ids of prompts, padded to the longest prompt."""
    prompts = [torch.tensor(ids) for ids in prompt_ids(model, condition)]
    _expect_lengths(model, [len(prompt) for prompt in prompts])
    return PreparedCondition(*pad_entries(prompts, device))


def _pack_images_with_prompts(
    model: JanusModel, condition: ImagePromptCondition, device: torch.device
) -> PreparedCondition:
    """Images with prompts, for a Janus that edits. Identical pairs of image and prompt are packed once."""
    ids_of_prompts = prompt_ids(model, condition)
    assert condition.encoded_images is not None, "nodes and pipeline read the images"

    # 1. The distinct pairs. read_images (runs/loading.py) reads an image that occurs several times only once, and gives
    #    the same object for all its occurrences. The id of this object therefore identifies the image.
    pairs = [(text, id(encoded)) for text, encoded in zip(condition.texts, condition.encoded_images, strict=True)]
    first_indices, prompt_of_image = distinct(pairs, device)
    distinct_images = [condition.encoded_images[i] for i in first_indices]
    for image in distinct_images:
        if image.rows.shape != (model.tokens, model.net.config.dim) or image.codes.shape != (model.tokens,):
            raise UserError(
                f"condition: the image in this condition was encoded as {len(image.rows)} vectors of width "
                f"{image.rows.shape[-1]}, but {model.name} needs {model.tokens} vectors of width "
                f"{model.net.config.dim}; encode the image with {model.name}."
            )

    # 2. The prompts of these pairs, padded to the longest prompt, and the rows and codes of their images.
    prompts, lengths = pad_entries([torch.tensor(ids_of_prompts[i]) for i in first_indices], device)
    sources = PromptImages(
        torch.stack([image.rows.to(device) for image in distinct_images]),
        torch.stack([image.codes.to(device) for image in distinct_images]),
        *model.image_places(),
    )

    # 3. The first branch has the weight 1, and the second branch has the weight ``freedom``. Both are divided by their
    #    sum.
    part_share = condition.freedom / (1 + condition.freedom)
    return PreparedImages(prompts, lengths, prompt_of_image, part_share, sources=sources)


# ------------------------------------------------------------ entries of a batch


def distinct(entries: Sequence[Hashable], device: torch.device) -> tuple[list[int], Tensor | None]:
    """Find the distinct entries.

    Returns:
        1. For each distinct entry, the index at which it first occurs in ``entries``.
        2. For each of the B entries, its index among the distinct entries, int64 [B]; None if all entries are distinct.
    """
    distinct_entries = list(dict.fromkeys(entries))
    first_indices = [entries.index(entry) for entry in distinct_entries]
    if len(distinct_entries) == len(entries):
        return first_indices, None
    return first_indices, torch.tensor([distinct_entries.index(entry) for entry in entries], device=device)


def pad_entries(entries: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Pad entries at the end to the length n of the longest entry. Returns the padded entries, [B, n, ...], and the
    lengths before padding, int64 [B]. The lengths are None if all are equal.
    """
    counts = [len(entry) for entry in entries]
    batch = torch.nn.utils.rnn.pad_sequence([entry.to(device) for entry in entries], batch_first=True)
    if min(counts) == max(counts):
        return batch, None
    return batch, torch.tensor(counts, dtype=torch.int64, device=device)


def prompt_ids(model: JanusModel, condition: PromptCondition | ImagePromptCondition) -> list[list[int]]:
    """Token ids of every prompt, in the template of the Janus model.

    Raises:
        UserError: there is no prompt, or a prompt is not valid.
    """
    condition.expect_prompt()
    if isinstance(condition, ImagePromptCondition):
        return [model.image_prompt(text) for text in condition.texts]
    return [model.prompt(text) for text in condition.texts]


def _expect_lengths(model: TokenModel, counts: list[int]) -> None:
    """Check the ``counts``, the number of condition rows of each image.

    Raises:
        UserError: a text has more tokens than the model reads; or the model has absolute positions, and either the
            counts differ or the positions are too few.
    """
    c = model.net.config
    least = min(counts)
    most = max(counts)
    if c.condition == TEXT and most > c.text_rows:
        raise UserError(
            f"condition: a text has {most} tokens, but {model.name} reads at most {c.text_rows}; shorten the text."
        )
    if c.absolute and most != least:
        raise UserError(
            f"condition: the images have different numbers of codes, {least} to {most}; set detail to the same value "
            "for all images."
        )
    if c.absolute:
        _expect_positions(model, most)


def _expect_positions(model: TokenModel, rows: int) -> None:
    """Check that a model with absolute positions has enough of them for ``rows`` condition rows and the image.

    Raises:
        UserError: the model has too few positions.
    """
    name = model.name
    positions = model.net.config.absolute
    positions_left = positions - (model.tokens - 1)  # for the condition; the last image token needs no position
    if rows <= positions_left:
        return
    if positions_left >= 1:
        raise UserError(
            f"condition: {rows} codes are too many for {name} with {model.grid} x {model.grid} tokens; choose a "
            f"value of the setting detail with at most {positions_left} codes."
        )
    raise UserError(
        f"grid: a condition of {rows} codes, followed by {model.grid} x {model.grid} image tokens, needs "
        f"{rows + model.tokens - 1} positions, but {name} has only {positions}; choose the grid that the model was "
        "trained for."
    )
