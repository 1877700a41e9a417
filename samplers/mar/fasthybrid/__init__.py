"""FastHybrid: lookahead drafts, verification by similarity, guided few-step refinement.

Source: "FastHybrid: Accelerating Hybrid Autoregressive Image Generation with Lookahead and Guided Decoding" (CVPR
2026). The authors published no code. Where the paper leaves a choice open, FastAR has a setting for it (see
:class:`FastHybridSettings`).

k, lambda, T and T_g are the settings ``lookahead``, ``threshold``, ``diffusion_steps`` and ``guided_steps``. With DiSA,
T is smaller in later AR steps. At AR step s of an image, the transformer computes z, the conditions of the diffusion
head, for the tokens of the AR steps s to s + k - 1. Then the sampler does three things:

1. *verify*: it accepts the draft of a token of AR step s if cos(z', z) >= lambda, where z' is the earlier z of this
   token, from which the draft was sampled.
2. *lookahead*: if AR step s has tokens without an accepted draft, a full diffusion of T steps samples these tokens and
   all tokens of the k - 1 following AR steps. The samples for the following AR steps are drafts, called x'. Each draft
   is stored with its z'.
3. *refine*: it samples the tokens with an accepted draft anew, in T_g *guided* diffusion steps. Each guided step mixes
   its mean mu_t with the draft: mu'_t = (1 - gamma_t) mu_t + gamma_t x'. If gamma_t = 1, the head has no influence, so
   it is not called.

The setting ``accepted`` can replace the guided steps of *refine*. With *renoise*, the sampler adds noise to the draft,
and then removes the noise in the last steps of an ordinary diffusion of T_g steps. With *keep*, the draft does not
change.

Guided steps have their own noise, not the noise with which the draft was sampled. We also tried the draft's noise, but
the refined tokens were then no closer to plain MAR's tokens. The transformer runs at every AR step, as in plain MAR, so
a new lookahead after a rejection costs no additional pass.

The paper does not say how the images of a batch advance. Here each image has its *own pace* (``pace.py``), so the
tokens of an image do not depend on its batch. An image with a rejected token waits until all unfinished images need a
full diffusion, because one full diffusion for all images takes as many sequential head calls as a full diffusion for
one image. In the first ``lookahead_start`` AR steps, the sampler works like plain MAR, without drafts.

``pace.py`` decides which images go on. ``drafts.py`` holds z and the drafts, and verifies the drafts. ``refinement.py``
refines accepted drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....networks.mar import MARModel
from ....networks.torch_state import in_own_state, to_device
from ...conditioning import ClassOrPrompt
from ...editing import Edit
from ...engine import Sampler, run_passes
from ...noise import PairedNoise
from ..canvas import MARCanvas, mar_canvas
from ..diffusion import Diffusion, annealed_tables
from ..transformer import FullTransformer, Transformer
from .drafts import NewestConditions, TokenDrafts
from .pace import Decision, Pace, next_decision
from .refinement import REFINEMENTS, Refinement
from .settings import FastHybridSettings


@in_own_state
@torch.no_grad()
def fasthybrid(
    model: MARModel,
    condition: ClassOrPrompt,
    settings: FastHybridSettings,
    noise: PairedNoise,
    make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images by FastHybrid; see :func:`samplers.mar.mar.mar` for arguments and errors.

    If ``lookahead`` is 0 or 1, the images are bit-identical to plain MAR's images. If ``threshold`` is above 1, every
    draft is rejected, and the images differ from plain MAR's images only by fp32 rounding.
    """
    canvas = mar_canvas("fasthybrid", model, condition, settings, noise, edit)
    order = canvas.order
    transformer = make_transformer(canvas)
    plain = Diffusion(canvas, transformer.head, annealed_tables(canvas))
    if settings.lookahead < 2:
        yield from run_passes(canvas, order.plan, transformer, plain)
        return canvas.finish()

    reason_together = held_together_by(transformer, plain)
    if reason_together and canvas.images > 1:
        canvas.report.remark(f"{reason_together} kept the images at the same AR step, which takes more head calls")

    pace = Pace(canvas)
    newest_conditions = NewestConditions(canvas, transformer)
    drafts = TokenDrafts(canvas, settings.threshold)
    refinement = REFINEMENTS[settings.accepted](canvas)

    while pace.unfinished.any():
        # Run a pass for the images that have moved to a new AR step. It updates z of these images.
        with canvas.clock.phase("transformer"):
            z = newest_conditions.update(pace)  # [P, B, L, C]

        with canvas.clock.phase("head"):
            drafts.verify(pace, z[0])
            decision = next_decision(pace, drafts.accepted, together=bool(reason_together))
            sample(decision, pace, z, drafts, plain, refinement)

        # Decide the tokens of the advancing images' present AR steps. Their values are refined drafts, or samples of a
        # full diffusion.
        decided = pace.tokens_at(decision.decided)
        values = drafts.newest[decided.index_by_column]
        when = to_device(pace.steps_of(decision.decided), z.device)
        outcome = to_device(drafts.outcome[decision.decided], z.device)
        canvas.decide(decided.index, values, when, outcome)
        pace.advance(decision.advancing)
        yield from canvas.yield_step(pace.mean_step)

    canvas.report.similarity = drafts.similarity()
    return canvas.finish()


def held_together_by(transformer: Transformer, plain: Diffusion) -> str:
    """What keeps all images at the same AR step; "" if each image has its own pace."""
    if not transformer.allows_different_steps:
        return "LazyMAR's caches"
    return "diffusion_steps_end" if len(set(plain.tables)) > 1 else ""


def sample(
    decision: Decision, pace: Pace, z: Tensor, drafts: TokenDrafts, plain: Diffusion, refinement: Refinement
) -> None:
    """Sample the tokens of a decision, and write them into ``drafts.newest``. One loop over diffusion steps does both
    *lookahead* and *refine*.

    Args:
        decision: the tokens to sample in full, and the tokens to refine.
        pace: the AR step of each image.
        z: the newest output of the transformer by column (see ``pace.py``), [P, B, L, C]: P branches of guidance, B
            images of L tokens, C transformer width.
        drafts: has the drafts to refine, and gets all samples.
        plain: the full diffusion.
        refinement: the diffusion of accepted drafts.
    """
    # 1. Make a batch of the tokens to sample in full, and a batch of the tokens to refine.
    in_full = pace.tokens_at(decision.sampled_in_full)
    full_batch = plain.canvas.batch(plain.tables[decision.step], in_full, z, plain.noise)
    refined = pace.tokens_at(decision.refined)
    refinement_batch = refinement.batch(refined, z, drafts.newest[refined.index_by_column])

    # 2. Run both diffusions.
    samples, refined_values = plain.head.sample_both(full_batch, refinement_batch)

    # 3. Store every full sample as a draft, even the sample of a token that is decided now, without verification.
    drafts.store(decision.sampled_in_full, in_full, samples, full_batch.z[0])
    drafts.newest[refined.index_by_column] = refined_values
