"""Checks that models and settings fit MuLo-SD. They run before anything is loaded or computed."""

from __future__ import annotations

from ....errors import UserError
from ....networks.llama import TokenModel
from ..checks import expect_raster
from ..settings import sampling_of
from .settings import MuLoSDSettings


def check(target: TokenModel, settings: MuLoSDSettings) -> None:
    """Check the settings for a target model.

    Raises:
        UserError: so many neighbours that nothing can be rejected, or guidance with a model that was trained without a
            null class.
    """
    sampling_of(settings, target)
    expect_few_neighbours(settings, target.net.config.vocab)


def check_pair(target: TokenModel, draft: TokenModel, *, codes: int, sampler: str) -> None:
    """Check that two models generate codes of the same tokenizer, in raster order.

    ``codes``: the number of the tokenizer's codes; ``sampler``: the sampler's title, for the message.

    Raises:
        UserError: a PAR, a Janus, or a model whose number of codes is not ``codes``.
    """
    why_no_janus = f"{sampler} drafts with a model for smaller images, and there is no such Janus"
    expect_raster(sampler, target, draft, why_no_janus=why_no_janus)
    of_target = target.net.config.vocab
    of_draft = draft.net.config.vocab
    if of_draft != of_target:
        raise UserError(
            f"draft: {draft.name} has {of_draft} codes, but {target.name} has {of_target}; choose two models that use "
            "the same VQ tokenizer."
        )

    if of_target != codes:
        raise UserError(
            f"decoder: this VQ tokenizer has {codes} codes, but {target.name} has {of_target}; choose the VQ tokenizer "
            "that the model was trained with."
        )


def grid_ratio(target: TokenModel, draft: TokenModel) -> int:
    """Return r, the side of the target's grid divided by the side of the draft's grid.

    Raises:
        UserError: r is not an integer above 1.
    """
    ratio, rest = divmod(target.grid, draft.grid)
    if rest or ratio < 2:
        raise UserError(
            f"draft: {draft.name} generates {draft.grid} x {draft.grid} tokens, but {target.name} generates "
            f"{target.grid} x {target.grid}; choose a draft model whose images have a half, a third or a quarter of "
            "the target's side."
        )
    return ratio


def expect_few_neighbours(settings: MuLoSDSettings, codes: int) -> None:
    """Check that the number of neighbours is so small that drafts can be rejected. The codebook has ``codes`` codes.

    Raises:
        UserError: so many neighbours that nothing can be rejected.
    """
    nearest = settings.neighbours_among(codes)
    if nearest >= codes - 1:
        raise UserError(
            f"neighbours: with {nearest} neighbours, every one of the {codes} codes would count as similar, so no "
            f"draft could be rejected; choose at most {codes - 2}."
        )
