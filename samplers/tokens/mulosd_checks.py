"""Whether two models and settings fit MuLo-SD (``mulosd.py``), before anything is loaded or computed."""

from __future__ import annotations

from ...errors import UserError
from ...model_loaders.networks.llama import TokenModel
from .defaults import raster_only, resolve
from .settings import MuLoSDSettings, neighbours_of


def check(target: TokenModel, settings: MuLoSDSettings) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: so many neighbours that nothing can be rejected, or guidance of a model that was trained without a
            null class.
    """
    resolve(settings, target)
    check_neighbours(settings, target.net.config.vocab)


def check_pair(target: TokenModel, draft: TokenModel, codes: int, sampler: str) -> None:
    """Check that two models generate the ``codes`` codes of one tokenizer in raster order. ``sampler``: its title, for
    the message.

    Raises:
        UserError: they do not.
    """
    raster_only(sampler, target, draft, janus="needs a model of a smaller image, which no Janus draws")
    of_target = target.net.config.vocab
    of_draft = draft.net.config.vocab
    if of_draft != of_target:
        raise UserError(
            f"draft: {draft.name} has {of_draft} codes, and {target.name} has {of_target}; choose two models that use "
            "the same VQ tokenizer."
        )

    if of_target != codes:
        raise UserError(
            f"decoder: it has {codes} codes, and {target.name} has {of_target}; choose the VQ tokenizer that the model "
            "was trained with."
        )


def check_grids(target: TokenModel, draft: TokenModel) -> int:
    """The ratio r of the sides of two grids.

    Raises:
        UserError: it is not an integer above 1.
    """
    ratio, rest = divmod(target.grid, draft.grid)
    if rest or ratio < 2:
        raise UserError(
            f"draft: {draft.name} draws {draft.grid} x {draft.grid} tokens, and {target.name} draws {target.grid} x "
            f"{target.grid}; choose a draft of half, a third or a quarter of the side."
        )
    return ratio


def check_neighbours(settings: MuLoSDSettings, codes: int) -> int:
    """The number of neighbours in a codebook of ``codes``.

    Raises:
        UserError: they are all codes.
    """
    nearest = neighbours_of(settings, codes)
    if nearest >= codes - 1:
        raise UserError(
            f"neighbours: {nearest} is all of the {codes} codes, so that nothing could be rejected; choose fewer."
        )
    return nearest
