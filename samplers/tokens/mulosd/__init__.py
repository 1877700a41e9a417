"""MuLo-SD: draft at low resolution, verify at high resolution in one pass, repair locally.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149). A cycle:

1. the draft model M_q generates some rows of an image of 1/r the side, in ZipAR's order (``blocks.py``);
2. the draft is enlarged to the target's grid (U_r, ``upsampling.py``);
3. one pass of the target M_p gives p_i at every token i. A draft token is rejected if its probability, pooled over its
   code's nearest neighbours, is below tau (R_T, ``verification.py`` and ``acceptance.py``);
4. every rejection is expanded by a radius l, but not to cells before the first rejection; the result, R_X, is divided
   into islands (``islands.py``);
5. all islands are resampled in parallel, in waves;
6. the result is final. If rows are left, the result is reduced (D_r), and the draft model continues from it.

There is no public code. Where the paper leaves a choice open:

- p is the sampling distribution of the target: after guidance, temperature, top-k, top-p and ``entropy_temperature``.
- The pass of a later wave feeds the cell before each of its own cells, and the cells that the previous pass sampled,
  all at their own positions. A row attends to every position before it, including drafts of other islands, so the
  context has no holes.
- If a token changes, the keys and values of the accepted tokens after it are not updated until the next cycle. This is
  the locality that the method relies on, and the reason why it is *lossy*.
- The pass that updates the keys and values of the last block is the one that verifies the next block.
- The draft model reads the new rows of the reduced image only; its cache of earlier rows is kept.
- The draft model has its own random numbers; the target's belong to the cells, as in ``llamagen.py``. With tau above 1
  in raster order, the tokens are therefore identical to the tokens of serial decoding. If the draft is also a whole
  image at once, the target decodes serially, without a draft.

Shapes: B images, R = B or, with guidance, 2 B batch rows, G the target's side, h rows of a block, n = h G cells.

The host waits for the device before the first pass, to compare the codebook with an earlier run's (``acceptance.py``);
once per cycle for the map of rejections, which determines the number of passes that follow; where pixels of the
tokenizer are checked (``upsampling.py``); and with *draft_parallel* after every call of the draft model.
"""

from __future__ import annotations

import numpy as np
import torch

from ....errors import UserError
from ....networks.llama import TokenModel
from ....networks.torch_state import in_own_state
from ...conditioning import AnyCondition
from ...engine import Sampler, remark_draft
from ..canvas import token_canvas
from ..checks import raster_only
from ..defaults import sampling_of
from ..llamagen import decode_schedule
from ..schedule import raster
from ..token_noise import TokenNoise
from .acceptance import codebook_neighbours
from .blocks import BlockDrafter, blocks_of, enlarge, reduce
from .islands import Repair, islands_of_all, repair_of
from .settings import MuLoSDSettings
from .upsampling import UpSampling
from .verification import BlockVerifier


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
    """MuLo-SD on a LlamaGen or on Tar's de-tokenizer.

    Args:
        target, condition, noise: as :func:`samplers.tokens.llamagen.llamagen`; both models get the condition.
        settings: see :class:`MuLoSDSettings`.
        draft: a model of the same codes on a grid of 1/r the side, r an integer above 1.
        up_sampler: from draft to target and back, with the tokenizer of both; see ``upsampling.py``.

    Yields :class:`Step` after every pass of either model. While a block is drafted, a step shows the draft's codes,
    repeated over the cells that they cover.

    The report counts the passes of both models (``transformer_passes``); the passes of the draft model alone
    (``draft_passes``); accepted and rejected drafts; accepted drafts that were resampled together with a rejected draft
    near them (``expanded``); islands; and waves, which all images share. Its ``similarity`` holds the pooled
    probabilities.

    Raises:
        UserError: a condition that does not fit either model, models or a tokenizer that do not belong together, a PAR,
            a grid that is no integer multiple, so many neighbours that nothing can be rejected, or logits or pixels
            that are not finite.
    """
    check_pair(target, draft, codes=up_sampler.vq.config.codes, sampler="MuLo-SD")
    ratio = check_grids(target, draft)
    check(target, settings)

    canvas, prepared = token_canvas("mulosd", target, condition, settings, noise)
    settings = canvas.settings
    canvas.report.settings["up_sampler"] = up_sampler.name
    one_block = settings.rows_at_once(draft.grid) == draft.grid
    if one_block and settings.exact(target.grid):
        # The tokens are identical to the tokens of serial decoding, whatever the draft.
        result = yield from decode_schedule(canvas, prepared, raster(target.grid))
        step = result.report.maps["step"]
        result.report.maps.update(islands=np.zeros_like(step), waves=np.full_like(step, -1))
        return result

    blocks = blocks_of(settings, draft.grid, ratio)
    nearest = settings.neighbours_among(target.net.config.vocab)
    neighbours = codebook_neighbours(up_sampler.vq.quantize, nearest, canvas.device)
    drafter = BlockDrafter(canvas, draft, condition, blocks)
    verifier = BlockVerifier(canvas, prepared, neighbours, drafter.look)
    repairs: list[Repair] = []

    canvas.total = 2 * canvas.cells  # see Block
    for block in blocks:
        # 1. The draft model generates the rows of the block.
        yield from drafter.generate(block)

        # 2. The draft is enlarged.
        enlarge(block, drafter.canvas, canvas, up_sampler)

        # 3. One pass of the target verifies every token: R_T.
        hidden, rejected = verifier.verify(block)

        # 4. Rejections are expanded to R_X, and divided into islands and waves. The other drafts are accepted.
        repair = repair_of(rejected, settings)
        canvas.report.add(**repair.counts())
        repairs.append(repair)
        verifier.accept(block, repair)

        # 5. All islands are resampled in parallel, one wave per pass.
        for done, verdict in verifier.resample(block, hidden, repair):
            canvas.decide(*verdict)
            yield from canvas.show(done)

        # 6. The block is final. It is reduced for the draft model.
        reduce(block, canvas, drafter.canvas, up_sampler)

    canvas.report.similarity = torch.cat(verifier.pools).cpu().numpy()
    canvas.report.maps["islands"] = islands_of_all(repairs)
    canvas.report.maps["waves"] = np.concatenate([repair.wave for repair in repairs], axis=1)
    drafter.canvas.expect_finite("draft")
    result = canvas.finish()
    remark_draft(result.report, draft)
    return result


# ------------------------------------------------------------ whether models and settings fit


def check(target: TokenModel, settings: MuLoSDSettings) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: so many neighbours that nothing can be rejected, or guidance of a model that was trained without a
            null class.
    """
    sampling_of(settings, target)
    check_neighbours(settings, target.net.config.vocab)


def check_pair(target: TokenModel, draft: TokenModel, *, codes: int, sampler: str) -> None:
    """Check that two models generate the ``codes`` codes of one tokenizer in raster order. ``sampler``: its title, for
    the message.

    Raises:
        UserError: they do not.
    """
    why_no_janus = f"{sampler} needs a model of a smaller image, which no Janus draws"
    raster_only(sampler, target, draft, why_no_janus=why_no_janus)
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


def check_grids(target: TokenModel, draft: TokenModel) -> int:
    """The ratio r of the sides of two grids.

    Raises:
        UserError: it is not an integer above 1.
    """
    ratio, rest = divmod(target.grid, draft.grid)
    if rest or ratio < 2:
        raise UserError(
            f"draft: {draft.name} generates {draft.grid} x {draft.grid} tokens, but {target.name} generates "
            f"{target.grid} x {target.grid}; choose a draft model whose images have a half, a third or a quarter of "
            "the target's side."
        )
    return ratio


def check_neighbours(settings: MuLoSDSettings, codes: int) -> None:
    """Check the number of neighbours in a codebook of ``codes``.

    Raises:
        UserError: so many neighbours that nothing can be rejected.
    """
    nearest = settings.neighbours_among(codes)
    if nearest >= codes - 1:
        raise UserError(
            f"neighbours: with {nearest} neighbours, every one of the {codes} codes would count as similar, so no "
            f"draft could be rejected; choose at most {codes - 2}."
        )
