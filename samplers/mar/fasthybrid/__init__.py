"""FastHybrid: lookahead drafts, verification by similarity, guided few-step refinement.

Source: "FastHybrid: Accelerating Hybrid Autoregressive Image Generation with Lookahead and Guided Decoding" (CVPR
2026). No code was published; choices that the paper leaves open are settings (see :class:`FastHybridSettings`).

k, lambda, T and T_g are the settings ``lookahead``, ``threshold``, ``diffusion_steps`` and ``guided_steps``; with DiSA,
T falls for later AR steps. At AR step s of an image, the transformer computes z, the conditions of the diffusion head,
for the tokens of the AR steps s to s + k - 1. Then:

1. *verify*: the draft of a token of AR step s is accepted if cos(z', z) >= lambda, where z' is the z from which the
   draft was sampled;
2. *lookahead*: if AR step s has tokens without an accepted draft, a full diffusion of T steps samples these tokens and
   all tokens of the k - 1 following AR steps. The samples for the following AR steps are drafts, called x'; each draft
   is stored with its z';
3. *refine*: T_g guided diffusion steps sample the accepted tokens anew. The mean mu_t of each step is mixed with the
   draft: mu'_t = (1 - gamma_t) mu_t + gamma_t x'. If gamma_t = 1, the head has no influence, so it is not called. If
   the setting ``accepted`` is *renoise*, noise is added to the draft instead, and the last of the T_g steps remove it.
   If it is *keep*, the draft does not change.

Guided steps have noise of their own. We also tried the noise from which the draft was sampled, but the accepted tokens
were then no closer to plain MAR's tokens. The transformer runs at every AR step, as in plain MAR, so a new lookahead
after a rejection costs no additional pass.

The paper does not say how the images of a batch advance. Here each image has its *own pace* (:class:`Pace`), so its
tokens do not depend on its batch. An image with a rejected token waits until all other images need a full diffusion,
too, because a full diffusion takes the same number of sequential head calls for one image as for all images. The first
``lookahead_start`` AR steps are those of plain MAR, without drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.mar import MARModel
from ....networks.torch_state import in_own_state, to_device
from ....reports.record import ACCEPTED, PLAIN, REDONE
from ...conditioning import ClassOrPrompt
from ...editing import Edit
from ...engine import Sampler, run_passes
from ...noise import PairedNoise
from ..canvas import MARCanvas, Tokens, mar_canvas
from ..mar import Diffusion, FullTransformer, Transformer, annealed_tables
from .refinement import REFINEMENTS
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
    draft is rejected, and the images agree with plain MAR's images up to fp32 rounding.
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
    conditions = Conditions(canvas, transformer)
    drafts = TokenDrafts(canvas, settings.threshold)
    refinement = REFINEMENTS[settings.accepted](canvas)

    while pace.unfinished.any():
        # 1. Update z: a pass for the images that have moved to a new AR step. Each image reads its own tokens.
        with canvas.clock.phase("transformer"):
            z = conditions.update(pace)  # [P, B, L, C]

        with canvas.clock.phase("head"):
            # 2. Verify: a draft is accepted if cos(z', z) >= lambda.
            drafts.verify(pace, z[0])
            decision = next_decision(pace, drafts.accepted, together=bool(reason_together))

            # 3. Lookahead: a full diffusion of the tokens without an accepted draft, and of all tokens of the later AR
            # steps in the lookahead.
            drafted_tokens = pace.tokens(decision.drafted)
            full_batch = canvas.batch(plain.tables[decision.step], drafted_tokens, z, plain.noise)

            # 4. Refine: a few-step diffusion of the accepted tokens.
            accepted_tokens = pace.tokens(decision.accepted)
            noise_batch = canvas.batch(refinement.table, accepted_tokens, z, refinement.noise)
            refinement_batch = refinement.from_drafts(noise_batch, drafts.tokens[accepted_tokens.index])

            # 5. Run both diffusions in one loop.
            sampled, refined = plain.head.sample_both(full_batch, refinement_batch)
            drafts.store(decision.drafted, drafted_tokens, sampled, full_batch.z[0])
            drafts.tokens[accepted_tokens.index] = refined

        # 6. Decide the tokens of the present AR steps. The values are the refined drafts, and new samples elsewhere.
        decided_index = pace.tokens(decision.decided).index
        when = to_device(pace.step_of_image.int().expand_as(decision.decided)[decision.decided], z.device)
        outcome = to_device(drafts.outcome[decision.decided], z.device)
        canvas.decide(decided_index, drafts.tokens[decided_index], when, outcome)
        pace.advance(decision.advancing)
        yield from canvas.yield_step(int(pace.step_of_image.sum()) // len(pace.step_of_image))

    canvas.report.similarity = drafts.similarity()
    return canvas.finish()


def held_together_by(transformer: Transformer, plain: Diffusion) -> str:
    """What keeps all images at the same AR step; "" if each image has its own pace."""
    if not transformer.allows_different_steps:
        return "LazyMAR's caches"
    return "diffusion_steps_end" if len(set(plain.tables)) > 1 else ""


class NextDecision(NamedTuple):
    """What is sampled and decided after a pass; :class:`Pace` explains the masks."""

    advancing: Tensor  # mask of the images that decide their AR steps and go on to the next
    decided: Tensor  # mask of the tokens that are decided: those of the present AR steps of these images
    accepted: Tensor  # mask of the decided tokens that have an accepted draft
    # Mask of the tokens that a full diffusion samples: the decided tokens without an accepted draft, and the tokens of
    # later AR steps in the lookahead, whose samples are drafts.
    drafted: Tensor
    step: int  # the AR step whose diffusion steps the full diffusion uses


def next_decision(pace: Pace, accepted: Tensor, together: bool) -> NextDecision:
    """Which images go on after a pass.

    Images whose tokens all have accepted drafts go on at once, in few head calls. If there is no such image, all images
    go on with a full diffusion: it takes the same number of sequential head calls for one image as for all images.

    Args:
        pace: the AR step of each image.
        accepted: mask of the accepted drafts.
        together: whether all images must stay at the same AR step. If False, all AR steps must have the same number of
            diffusion steps.
    """
    # Mask of the images with a token that has no accepted draft.
    needs_diffusion = (pace.present & ~accepted).any(1, keepdim=True)
    ready = pace.unfinished & ~needs_diffusion
    advancing = ready if ready.any() and not together else pace.unfinished

    decided = pace.present & advancing
    drafted = pace.ahead & ~accepted & needs_diffusion & advancing
    return NextDecision(advancing, decided, decided & accepted, drafted, step=int(pace.step_of_image[advancing].max()))


class Pace:
    """The AR step at which every image is. All tensors are on the host.

    Masks of images are bool [B, 1]. Masks of tokens are bool [B, L]; column i is the i-th token in the order in which
    an image decides its tokens. :meth:`tokens` gives the positions of these tokens.
    """

    unfinished: Tensor  # mask of the images that have AR steps left
    moved: Tensor  # mask of the images that have moved to a new AR step since the previous pass
    present: Tensor  # mask of the tokens of the images' present AR steps
    ahead: Tensor  # mask of these tokens, and of later tokens that a lookahead from these AR steps drafts

    def __init__(self, canvas: MARCanvas):
        order = canvas.order
        steps = order.steps
        reach = canvas.settings.reach
        self.order = order

        # For every AR step: the column of its first token, and the column after the last token of a lookahead from this
        # AR step.
        firsts = [*order.count_before, canvas.cells]
        self.firsts = torch.tensor(firsts)
        self.ends = torch.tensor([firsts[min(step + reach(step), steps)] for step in range(steps + 1)])

        # AR step of every image; order.steps once the image is finished.
        self.step_of_image = torch.full((canvas.images, 1), -1)
        self.advance(self.step_of_image < 0)

    def advance(self, advancing: Tensor) -> None:
        """Move the images ``advancing``, bool [B, 1], on to their next AR step."""
        steps = self.order.steps
        self.step_of_image = self.step_of_image + advancing
        self.unfinished = self.step_of_image < steps
        self.moved = advancing & self.unfinished

        column = torch.arange(int(self.firsts[-1]))
        begun = column >= self.firsts[self.step_of_image]
        self.present = begun & (column < self.firsts[(self.step_of_image + 1).clamp(max=steps)])
        self.ahead = begun & (column < self.ends[self.step_of_image])

    def tokens(self, mask: Tensor) -> Tokens:
        """The tokens where ``mask`` is True, one image after another."""
        positions = self.order.decision_order
        image, column = to_device(mask.nonzero().T, positions.device)
        return Tokens((image, positions[image, column]), column)


class Conditions:
    """The newest output z of the transformer for every token: the condition of the diffusion head."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer):
        self.order = canvas.order
        self.transformer = transformer
        self._z = torch.zeros(0)  # empty until the first pass, which is for all images

    def update(self, pace: Pace) -> Tensor:
        """Run a pass for the images that have moved to a new AR step. Returns z in the columns of :class:`Pace`,
        [P, B, L, C], where P is the number of guidance branches and C is the transformer's width. z is up to date in
        the columns ``pace.ahead`` of every image.
        """
        images = pace.moved.flatten().nonzero().flatten()
        if len(images):
            self._run_pass(pace, images)
        return self._z

    def _run_pass(self, pace: Pace, images: Tensor) -> None:
        """Run a pass for ``images``, int64 [R], and store its z."""
        # The columns ``pace.ahead`` of each image. All images need the same number of columns, so an image with fewer
        # columns gets neighbouring columns too.
        steps = pace.step_of_image[images]
        first = pace.firsts[steps]
        most = int((pace.ends[steps] - first).max())
        columns = first.clamp(max=len(pace.present[0]) - most) + torch.arange(most)

        # Run the transformer for the positions in these columns.
        rows = torch.stack([images[:, None].expand_as(columns), columns])
        image, column = to_device(rows, self.order.decision_order.device)
        wanted = self.order.decision_order[image, column]
        z = self.transformer.for_rows(images.tolist(), steps.flatten().tolist(), wanted)

        if not self._z.numel():
            self._z = z.new_zeros(len(z), *self.order.decision_order.shape, z.shape[-1])
        self._z[:, image, column] = z


class TokenDrafts:
    """The drafts of all tokens, and which of them are accepted."""

    def __init__(self, canvas: MARCanvas, threshold: float):
        """``threshold``: lambda."""
        images, length, _ = canvas.values.shape
        self.threshold = threshold
        self.report = canvas.report

        # Indexed by position: the draft x', which the refined token later replaces if the draft is accepted; and z',
        # from which the draft was sampled.
        self.tokens = torch.zeros_like(canvas.values)
        self.draft_conditions = torch.zeros(images, length, canvas.model.net.config.dim, device=canvas.device)

        # In the columns of Pace: whether a token has a draft, whether the draft is accepted, and the draft's outcome.
        self.has_draft = torch.zeros(images, length, dtype=torch.bool)
        self.accepted = torch.zeros(images, length, dtype=torch.bool)
        self.outcome = torch.full((images, length), PLAIN, dtype=torch.uint8)

        self._similarities: list[Tensor] = []  # cos(z', z) of the drafts of each verification, [n] on the device

    def store(self, mask: Tensor, drafted: Tokens, x: Tensor, z: Tensor) -> None:
        """Store drafts of N tokens.

        Args:
            mask: the tokens, in the columns of :class:`Pace`.
            drafted: the same tokens as images and positions.
            x: the drafts x', fp32 [N, channels].
            z: the conditions z' from which the drafts were sampled, [N, C].
        """
        self.has_draft |= mask
        self.tokens[drafted.index] = x
        self.draft_conditions[drafted.index] = z.float()

    def verify(self, pace: Pace, z_by_column: Tensor) -> None:
        """Verify the drafts of the AR steps that images have newly reached: accept a draft if cos(z', z) >= lambda.

        ``z_by_column``: z of the branch with the condition, [B, L, C], in the columns of :class:`Pace`.
        """
        drafted = pace.present & pace.moved & self.has_draft
        tokens = pace.tokens(drafted)
        image, _ = tokens.index
        z = z_by_column[image, tokens.column].float()
        cosine = F.cosine_similarity(self.draft_conditions[tokens.index], z, dim=-1)
        self._similarities.append(cosine)
        accepted = (cosine >= self.threshold).cpu()  # in an AR step, the host waits for the device only here

        self.accepted[drafted] = accepted
        self.outcome[drafted] = torch.where(accepted, ACCEPTED, REDONE).to(torch.uint8)
        rejected = drafted & ~self.accepted
        self.report.add(
            accepted=int(accepted.sum()),
            rejected=int(rejected.sum()),
            restarts=int(rejected.any(1).sum()),
        )

    def similarity(self) -> np.ndarray:
        """cos(z', z) of all verified drafts, fp32 [n]."""
        return torch.cat(self._similarities).cpu().numpy()
