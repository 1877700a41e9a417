"""MuLo-SD: draft at low resolution, verify at high resolution in one pass, repair locally.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). An image is a grid
of *cells*, one token each. MuLo-SD generates it in *blocks* of several grid rows. Each block takes one cycle of six
stages:

1. The draft model M_q generates grid rows of a small image, whose side is 1/r of the target's side. These rows cover
   the block. M_q follows ZipAR's order or, with *draft_window* 0, raster order (``drafting.py``).
2. The up-sampler U_r enlarges these grid rows to the target's grid (``drafting.py``).
3. One pass of the target M_p gives p_i, the distribution of each token i. The *pooled* probability of a draft token is
   the sum of p_i over the token's code and the nearest neighbours of this code. If the sum is below tau, the draft
   token is rejected. If *acceptance_target* is above 0, this share of the draft tokens is accepted, whatever tau is.
   R_T is the set of rejected cells (``verification.py``).
4. R_T is expanded by a radius l, but not to cells before the first rejected cell. The result, R_X, consists of separate
   *islands* (``islands.py``).
5. The target resamples all islands in parallel, in *waves*. A wave is a set of cells that are resampled together
   (``islands.py``).
6. The block is final. If grid rows are left, the down-sampler D_r reduces the block, and the draft model continues from
   the reduced rows.

The method is *lossy*: it assumes that a change in an island has little effect outside the island. For example, if a
token changes, the keys and values of the accepted tokens after it stay as they are until the next cycle.
:meth:`MuLoSDSettings.exact` says with which settings the tokens are identical to the tokens of serial decoding.

This file has the sampler, and then its checks. There is no public code. Where the paper leaves a choice open, the
function that decides says what FastAR does. The other files, in reading order: ``settings.py``, ``drafting.py``,
``islands.py`` and ``verification.py``.

Shapes in all files: B images; R batch rows, where R is B without guidance and 2 B with guidance; G, the side of the
target's grid; h grid rows of a block; n = h G cells of a block.
"""

from __future__ import annotations

import numpy as np
import torch

from ....errors import UserError
from ....networks.llama import TokenModel
from ....networks.torch_state import in_own_state
from ...conditioning import AnyCondition
from ...engine import Sampler, remark_draft
from ..canvas import TokenCanvas, token_canvas
from ..checks import expect_raster
from ..decode import decode_schedule
from ..prepare import PreparedCondition
from ..schedule import raster
from ..settings import sampling_of
from ..token_noise import TokenNoise
from .drafting import BlockDrafter, UpSampling, blocks_of, enlarge_draft, reduce_result
from .islands import Repair, islands_of_all, repair_of
from .settings import MuLoSDSettings
from .verification import BlockVerifier, cached_neighbours


@in_own_state
@torch.inference_mode()
def mulosd(
    target: TokenModel,
    condition: AnyCondition,
    settings: MuLoSDSettings,
    noise: TokenNoise,
    *,
    draft: TokenModel,
    up_sampler: UpSampling,
) -> Sampler:
    """Generate images with MuLo-SD. The target is a LlamaGen model or Tar's de-tokenizer.

    Args:
        target, condition, noise: the arguments model, condition and noise of
            :func:`samplers.tokens.llamagen.llamagen`. Both models read the condition.
        settings: see :class:`MuLoSDSettings`.
        draft: a model for the same codes. The side of its grid is 1/r of the target's, where r is an integer above 1.
        up_sampler: enlarges the draft and reduces the result, with the tokenizer of both models; see ``drafting.py``.

    Yields :class:`Step` after every pass of either model. While a block is drafted, a step shows the draft's codes.
    Each code is repeated over the cells that it covers.

    The report counts the passes of both models (``transformer_passes``) and of the draft model alone
    (``draft_passes``). It counts the draft tokens that the verification accepted (``accepted``) and rejected
    (``rejected``). ``expanded`` counts the accepted tokens that were resampled because a rejected token is near. The
    report also counts the islands of all images, and the waves; a wave has cells of all images. The ``similarity`` of
    the report holds the pooled probabilities.

    Raises:
        UserError: a condition that does not fit one of the models; models or a tokenizer that do not belong together; a
            PAR or a Janus; grids whose ratio r is not an integer above 1; guidance with a model that was trained
            without a null class; so many neighbours that nothing can be rejected; an upscale model that does not return
            RGB images; or logits or pixels that are not finite.
    """
    check_pair(target, draft, codes=up_sampler.tokenizer_net.config.codes, sampler="MuLo-SD")
    ratio = grid_ratio(target, draft)
    check(target, settings)

    canvas, prepared = token_canvas("mulosd", target, condition, settings, noise)
    settings = canvas.settings  # the same settings, with the published value where cfg or top_k was None
    canvas.report.settings["up_sampler"] = up_sampler.name
    if settings.exact(target.grid) and settings.rows_at_once(draft.grid) == draft.grid:
        # All of the image is one block, and every draft token would be rejected.
        return (yield from _without_draft(canvas, prepared))

    blocks = blocks_of(settings, draft.grid, ratio)
    neighbour_count = settings.neighbours_among(target.net.config.vocab)
    neighbours = cached_neighbours(up_sampler.tokenizer_net.quantize, neighbour_count, canvas.device)
    drafter = BlockDrafter(canvas, draft, condition, blocks)
    verifier = BlockVerifier(canvas, prepared, neighbours)
    repairs: list[Repair] = []

    canvas.total = 2 * canvas.cells  # each cell counts twice, see progress_of_draft
    for block in blocks:
        # 1. The draft model generates the draft rows of the block.
        yield from drafter.generate(block)

        # 2. The up-sampler enlarges the draft.
        enlarge_draft(block, drafter.canvas, canvas, up_sampler)

        # 3. One pass of the target verifies every draft token of the block. ``rejected`` is R_T. The host waits for
        #    R_T, because R_T determines how many passes follow.
        hidden, rejected = verifier.verify(block)

        # 4. Expand R_T to R_X, and divide R_X into islands and waves. Decide the drafts outside R_X.
        repair = repair_of(rejected, settings)
        canvas.report.add(**repair.counts())
        repairs.append(repair)
        verifier.accept(block, repair)

        # 5. The target resamples all islands in parallel, one wave after another.
        for done, verdict in verifier.resample(block, hidden, repair):
            canvas.decide(*verdict)
            yield from canvas.yield_step(done)

        # 6. The block is final. The draft model continues from the reduced block.
        reduce_result(block, canvas, drafter.canvas, up_sampler)

    canvas.report.similarity = torch.cat(verifier.pools).cpu().numpy()
    canvas.report.maps["islands"] = islands_of_all(repairs)
    canvas.report.maps["waves"] = np.concatenate([repair.wave_of_cell for repair in repairs], axis=1)
    drafter.canvas.expect_finite("draft")
    result = canvas.finish()
    remark_draft(result.report, draft)
    return result


def _without_draft(canvas: TokenCanvas, condition: PreparedCondition) -> Sampler:
    """Let the target decode serially, without a draft. The caller makes sure that no draft could change the tokens.

    The report has the same maps as with a draft: no cell is in an island (0), and no wave resamples a cell (-1).
    """
    result = yield from decode_schedule(canvas, condition, raster(canvas.grid[0]))
    step = result.report.maps["step"]
    result.report.maps.update(islands=np.zeros_like(step), waves=np.full_like(step, -1))
    return result


# ------------------------------------------------------------ checks, before anything is loaded or computed


def check(target: TokenModel, settings: MuLoSDSettings) -> None:
    """Check the settings for a target model.

    Raises:
        UserError: so many neighbours that nothing can be rejected, or guidance with a model that was trained without a
            null class.
    """
    sampling_of(settings, target)

    codes = target.net.config.vocab
    neighbour_count = settings.neighbours_among(codes)
    if neighbour_count >= codes - 1:
        raise UserError(
            f"neighbours: with {neighbour_count} neighbours, every one of the {codes} codes would count as similar, so "
            f"no draft could be rejected; choose at most {codes - 2}."
        )


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
