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

The paper does not say how the images of a batch advance. Here each image has its *own pace* (:class:`.Pace`), so the
tokens of an image do not depend on its batch. An image with a rejected token waits until all unfinished images need a
full diffusion, because one full diffusion for all images takes as many sequential head calls as a full diffusion for
one image. In the first ``lookahead_start`` AR steps, the sampler works like plain MAR, without drafts.

``state.py`` says which images go on after a pass, holds z and all sampled tokens, and verifies the drafts. This file
has the loop over the passes, and the refinement of accepted drafts (:class:`Refinement`).

Shapes: B images of L tokens, c channels of a token, D transformer width, and P branches of guidance. N tokens are
chosen from all images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....networks.mar import MARModel
from ....networks.torch_state import in_own_state, to_device
from ...chain import DiffusionBatch, MeanAdjustment, noise_for_steps
from ...conditioning import ClassOrPrompt
from ...diffusion_steps import StepTable
from ...editing import Edit
from ...engine import Sampler, run_passes
from ...noise import PairedNoise, StreamNoise
from ..canvas import MARCanvas, TokenIndex
from ..mar import Diffusion, annealed_tables
from ..prepare import mar_canvas
from ..transformer import FullTransformer, Transformer
from .settings import FastHybridSettings
from .state import NewestConditions, Pace, SampledTokens, next_decision


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
    transformer = make_transformer(canvas)
    plain = Diffusion(canvas, transformer.heads, annealed_tables(canvas))
    if settings.lookahead < 2:
        yield from run_passes(canvas, canvas.order.plan, transformer, plain)
        return canvas.finish()

    together = must_stay_together(canvas, transformer)
    pace = Pace(canvas)
    newest_conditions = NewestConditions(canvas, transformer)
    sampled = SampledTokens(canvas, settings.threshold)
    refinement = REFINEMENTS[settings.accepted](canvas)

    while pace.unfinished.any():
        # 1. Run a pass for the images that have moved to a new AR step. It updates z of these images.
        with canvas.clock.phase("transformer"):
            z = newest_conditions.update(pace)  # [P, B, L, D], by column

        with canvas.clock.phase("head"):
            # 2. Verify drafts, and choose the tokens to sample.
            sampled.verify(pace, z[0])
            decision = next_decision(pace, sampled.accepted, together)

            # 3. Sample them. One loop over diffusion steps does both *lookahead* and *refine*.
            in_full = pace.tokens_at(decision.sampled_in_full)
            full_batch = canvas.batch(plain.tables[decision.step], in_full, z, plain.noise)
            refined = pace.tokens_at(decision.refined)
            refinement_batch = refinement.batch(refined, z, sampled.values[refined.index_by_column])
            full_values, refined_values = plain.heads.sample_both(full_batch, refinement_batch)

            # 4. Store the values. Every full sample counts as a draft, also the sample of a token that is decided now.
            #    Such a draft is never verified, because its image moves to the next AR step.
            sampled.has_draft |= decision.sampled_in_full
            sampled.conditions[in_full.index_by_column] = full_batch.z[0].float()
            sampled.values[in_full.index_by_column] = full_values
            sampled.values[refined.index_by_column] = refined_values

        # 5. Decide the tokens of the advancing images' present AR steps. The stored values are refined drafts or full
        #    samples. ``tokens_at(mask)`` and indexing with ``[mask]`` list the N tokens in the same order.
        decided = pace.tokens_at(decision.decided)
        step_of_token = pace.step_of_image.int().expand_as(decision.decided)[decision.decided]
        outcome = to_device(sampled.outcome[decision.decided], z.device)
        values = sampled.values[decided.index_by_column]
        canvas.decide(decided.index, values, to_device(step_of_token, z.device), outcome)

        # 6. Move on the advancing images. The progress is the mean AR step of all images.
        pace.move_to(pace.step_of_image + decision.advancing)
        yield from canvas.yield_step(int(pace.step_of_image.sum()) // canvas.images)

    canvas.report.similarity = sampled.similarity()
    return canvas.finish()


def must_stay_together(canvas: MARCanvas, transformer: Transformer) -> bool:
    """Whether all images must stay at the same AR step. Otherwise each image has its own pace. The report says what
    keeps several images together.
    """
    settings: FastHybridSettings = canvas.settings
    if not transformer.allows_different_steps:
        reason = "LazyMAR's caches"
    elif settings.annealed and canvas.order.steps > 1:
        # With DiSA, the AR steps have different numbers of diffusion steps. But one full diffusion serves all images.
        reason = "diffusion_steps_end"
    else:
        return False

    if canvas.images > 1:
        canvas.report.remark(f"{reason} kept the images at the same AR step, which takes more head calls")
    return True


# ------------------------------------------------------------------------------------------------ refinement


@dataclass(eq=False)
class Refinement:
    """The diffusion of accepted drafts in few steps.

    In this file, i = 0, 1, ... is the index of a diffusion step, in the order in which the T_g steps run. The paper
    counts down: t = T_g - i. A refinement runs only the steps from ``first_step`` on: S = T_g - first_step steps. It
    computes their *initial state*, which is the state before ``first_step``, from the draft x' and noise. If S is 0,
    the result is the initial state. The setting ``accepted`` determines ``first_step`` and the initial state
    (:func:`renoised` explains abar)::

        accepted    first_step                                 initial state
        refine      0, if no step has gamma 1                  noise
                    i + 1, if step i is the last with gamma 1  x' + sigma noise
        renoise     T_g - floor(T_g denoise)                   sqrt(abar) x' + sqrt(1 - abar) noise
        keep        T_g: no step runs                          x'
    """

    canvas: MARCanvas
    table: StepTable  # the S steps that run
    start_noise: Tensor  # the noise in the initial state, fp32 [B, L, c]
    step_noise: Tensor  # the noise of the S steps, fp32 [S, B, L, c]
    # initial_state(drafts, noise) computes the initial states of N tokens from their drafts x' and from their
    # ``start_noise``. The result and both arguments are fp32 [N, c].
    initial_state: Callable[[Tensor, Tensor], Tensor]
    gamma: Tensor | None = None  # gamma of each of the S steps, fp32 [S]; None if no step mixes its mean with the draft

    def batch(self, tokens: TokenIndex, z: Tensor, drafts: Tensor) -> DiffusionBatch:
        """A batch of N tokens with accepted drafts, for S diffusion steps.

        ``tokens``, ``z``: see :meth:`.MARCanvas.batch`; ``drafts``: the drafts x' of the tokens, fp32 [N, c].
        """
        noise = StreamNoise(self.start_noise, self.step_noise)
        from_noise = self.canvas.batch(self.table, tokens, z, noise)  # its states x are the tokens' ``start_noise``
        adjustment = None if self.gamma is None else MeanAdjustment(drafts, self.gamma)
        return replace(from_noise, x=self.initial_state(drafts, from_noise.x), mean_adjustment=adjustment)


def guided(canvas: MARCanvas) -> Refinement:
    """Steps that mix their means with the draft.

    A step with gamma 1 gives x' + sigma noise, whatever the head predicts. So this step and all steps before it need
    not run. The setting ``guidance_schedule`` says which step has gamma 1:

    - *cos*, *linear-down* and *square*: step 0. The steps from step 1 on run. They start from x' + sigma noise.
    - *linear-up*: the last step, so no step runs. The result is x' + sigma noise, which is the draft x', because the
      last step adds no noise: its sigma is 0. The same happens in the schedules above if T_g is 1.
    - *none*: no step, as gamma is always 0. All steps run, and they start from noise.
    """
    settings: FastHybridSettings = canvas.settings
    table, stream = all_guided_steps(canvas)
    weights = guidance_weights(settings.guidance_schedule, len(table))
    gamma = to_device(torch.tensor(weights), canvas.device)

    # 1. No step has gamma 1. The comparison of floats is safe: a schedule reaches 1 at t = T_g, or linear-up at t = 1,
    #    and there its formula gives exactly 1.0.
    if 1 not in weights:
        return Refinement(
            canvas,
            table,
            start_noise=stream.start,
            step_noise=stream.steps,
            initial_state=lambda drafts, noise: noise,
            gamma=gamma,
        )

    # 2. Only the steps after the last step with gamma 1 run. They start from the result of that step, computed with the
    #    noise that the step itself would have added.
    last_with_gamma_1 = max(i for i, weight in enumerate(weights) if weight == 1)
    first_step = last_with_gamma_1 + 1
    noise_of_last = stream.steps[last_with_gamma_1]

    # When a step is run, the head chooses sigma from a range. Here sigma is the middle of this range, times the
    # temperature.
    sigma = table.columns().log_std_middle[last_with_gamma_1].exp() * settings.temperature
    return Refinement(
        canvas,
        table.some_steps(first_step, len(table)),
        start_noise=noise_of_last,
        step_noise=stream.steps[first_step:],
        initial_state=lambda drafts, noise: drafts + sigma * noise,
        gamma=gamma[first_step:],
    )


def renoised(canvas: MARCanvas) -> Refinement:
    """The last S of T_g ordinary steps. They start from the draft x' with added noise: x = sqrt(abar) x' +
    sqrt(1 - abar) noise. So x contains as much noise as the state of a diffusion from pure noise contains before the
    same steps. abar is the product of all 1 - beta up to the timestep of the first of the S steps.

    ``diffusion_steps.py`` has the equation data = data_x x + data_per_prediction prediction. Here the data is the draft
    x', and the prediction is the noise; data_x is 1 / sqrt(abar), and data_per_prediction is -sqrt(1 / abar - 1).
    ``initial_state`` solves this equation for the state x.
    """
    settings: FastHybridSettings = canvas.settings
    table, stream = all_guided_steps(canvas)

    # S is T_g times denoise, rounded down, as is usual in image-to-image pipelines. For example, 15 steps times
    # denoise = 0.9 is 13.5, so S is 13. ``round`` corrects a product that should be a whole number but is slightly
    # below it.
    first_step = len(table) - int(round(len(table) * settings.denoise, 6))
    if first_step == len(table):
        return unchanged(canvas)

    data_x = table.columns().data_x[first_step]
    data_per_prediction = table.columns().data_per_prediction[first_step]
    return Refinement(
        canvas,
        table.some_steps(first_step, len(table)),
        start_noise=stream.start,
        step_noise=stream.steps[first_step:],
        initial_state=lambda drafts, noise: (drafts - data_per_prediction * noise) / data_x,
    )


def unchanged(canvas: MARCanvas) -> Refinement:
    """No step: an accepted draft does not change."""
    table, stream = all_guided_steps(canvas)
    first_step = len(table)
    return Refinement(
        canvas,
        table.some_steps(first_step, len(table)),
        start_noise=stream.start,
        step_noise=stream.steps[first_step:],
        initial_state=lambda drafts, noise: drafts,
    )


# The refinement for each value of the setting ``accepted``.
REFINEMENTS: dict[str, Callable[[MARCanvas], Refinement]] = {
    "refine": guided,
    "renoise": renoised,
    "keep": unchanged,
}


def all_guided_steps(canvas: MARCanvas) -> tuple[StepTable, StreamNoise]:
    """The table of all T_g steps, and the noise, with an entry for each of these steps."""
    settings: FastHybridSettings = canvas.settings
    table = canvas.step_table(settings.guided_steps)
    noise = canvas.noise_of("guided")
    return table, noise._replace(steps=noise_for_steps(noise.steps, len(table)))


def guidance_weights(schedule: str, steps: int) -> tuple[float, ...]:
    """gamma_t for each of the T_g = ``steps`` steps, in the order in which they run: t = T_g - i = T_g .. 1. The paper
    gives a formula only for cos. We chose the other formulas to fit their names.
    """
    weight = {
        "cos": lambda t: math.sin(math.pi / 2 * (t / steps)) ** 2,  # 1 - cos^2(pi t / (2 T_g))
        "linear-down": lambda t: t / steps,
        "square": lambda t: (t / steps) * (t / steps),
        "linear-up": lambda t: 1 - (t - 1) / steps,
        "none": lambda t: 0.0,
    }[schedule]
    return tuple(weight(t) for t in range(steps, 0, -1))
