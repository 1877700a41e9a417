"""Target and draft model: checks and settings shared by the samplers with a draft model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.gpt import TokenModel
from .draws import Draws
from .loop import raster_only
from .settings import LanternSettings, MuLoSDSettings, neighbours_of


def check_pair(target: TokenModel, draft: TokenModel, codes: int, sampler: str) -> None:
    """Check that target and draft generate the codes of one tokenizer, in raster order.

    Args:
        target, draft: the two models.
        codes: codebook size of the tokenizer.
        sampler: display name, for messages.

    Raises:
        UserError: a PAR, different vocabularies, or another codebook size.
    """
    for model in (target, draft):
        raster_only(sampler, model)
    a, b = target.net.config.vocab, draft.net.config.vocab
    if a != b:
        raise UserError(
            f"draft: {draft.name} writes {b} codes, {target.name} {a}; choose two models of one VQ tokenizer."
        )
    if a != codes:
        raise UserError(
            f"decoder: it has {codes} codes, {target.name} writes {a}; choose the VQ tokenizer that it was trained with."
        )


def neighbour_count(settings: MuLoSDSettings | LanternSettings, codes: int) -> int:
    """Number of neighbours k of a code, of a codebook of ``codes``.

    Raises:
        UserError: all codes would be neighbours.
    """
    k = neighbours_of(settings, codes)
    if k >= max(1, codes - 1):
        raise UserError(
            f"neighbours: {k} is all of the {codes} codes, so that nothing could be rejected; choose fewer, or -1."
        )
    return k


def scale_factor(target: TokenModel, draft: TokenModel) -> int:
    """The paper's r. Raises UserError if the target's grid is not an integer multiple, above 1, of the draft's."""
    factor, rest = divmod(target.grid, draft.grid)
    if rest or factor < 2:
        raise UserError(
            f"draft: {draft.name} draws {draft.grid} x {draft.grid} tokens, {target.name} {target.grid} x {target.grid}, which is no "
            "whole multiple above 1; choose a draft of half, a third or a quarter of the side."
        )
    return factor


def redraws_all(settings: MuLoSDSettings, draft: TokenModel) -> bool:
    """Whether the tokens are those of serial decoding, whatever the draft."""
    whole = not settings.draft_rows or settings.draft_rows >= draft.grid
    return settings.tau > 1 and not settings.acceptance_target and not settings.resample_window and whole


class DraftDraws:
    """Draws of the draft model: all from the stream "draft", so that they are independent of the target's."""

    def __init__(self, draws: Draws):
        self._draws = draws

    def __len__(self) -> int:
        return len(self._draws)

    def of(self, images: Sequence[int]) -> DraftDraws:
        return DraftDraws(self._draws.of(images))

    def gumbel(self, stream: str, cells: Tensor, values: int) -> Tensor:
        return self._draws.gumbel("draft", cells, values)
