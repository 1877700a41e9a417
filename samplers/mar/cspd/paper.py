"""CSpD, mode ``paper``: the paper's algorithm 1.

``densities.py`` explains the rule and its symbols. The text of the paper that we read lacks equations 5 and 11, so we
derived them from the text around them. The algorithm is speculative decoding as for discrete tokens (Leviathan et al.
2023, algorithm 1):

1. The draft model samples gamma tokens, each given the tokens before it.
2. In one pass, the target computes the distributions of these tokens and of the token after them, each given the drafts
   before it. It follows its own diffusion paths with the draft model's noise (trajectory alignment, equation 3).
3. Drafts are accepted up to the first rejected draft, which is resampled. Later drafts are discarded.
4. If all drafts are accepted, the target samples the next token itself.

MAR decides several tokens in an AR step. They are independent of each other, given the tokens of earlier AR steps. Here
gamma counts AR steps, and an AR step is accepted if all its tokens are accepted. If every AR step decides one token,
this is the paper's algorithm.

A draft must be a sample of the density with which it is verified, so every diffusion step adds noise, in both models.
In MAR the last step adds no noise. Here it adds noise with a std of 0.006, where the latents have a std of 1. The AR
steps before the first draft are sampled as in MAR.

The paper makes proposals until one is accepted. Here there are at most 100 proposals. If all of them are rejected, the
target's own token is taken, and the report counts it as ``redraws_exhausted``. This can happen if Sigma < 1: if Sigma p
is nowhere above q, no proposal is ever accepted.

If Sigma is 1, as in models that do not learn their variances, the images have the target's distribution. With learned
variances they do not: the rule takes Sigma p for the target's density, but Sigma p does not integrate to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED, PLAIN, REJECTED
from ...engine import Verdict
from ..canvas import MARCanvas, StreamNoise, Tokens
from ..mar import Transformer
from .densities import PAPER_RULE, RejectionNoise, accept_or_resample
from .draft import MARDrafter, Paths, sample_paths, table_with_last_std
from .mode import Mode, target_batches


class Paper(Mode):
    """Draft gamma AR steps, accept them up to the first rejected AR step, and resample the rejected tokens.

    Every image counts its accepted AR steps for itself: after gamma of them in a row, it takes the target's own tokens
    at the next AR step, ``takes_own_at``. So an image does not depend on its batch.

    Still, all images are at the same AR step. Drafting ends at the first AR step at which an image takes the target's
    own tokens, and a rejection in one image discards the later drafts of all images. The draft model makes the
    discarded drafts of all other images again from the same noise, and the target verifies them with the same random
    numbers.

    If an image takes the target's own tokens or rejects a draft at AR step k, it begins to count at k + 1. So it next
    takes the target's own tokens at AR step k + 1 + gamma. In this example, gamma is 2, and the second of two images
    rejects its draft of AR step 5::

        AR step                    4          5          6          7
        first image                accepts    accepts    its own    accepts
          takes_own_at before it   6          6          6          9 = 6 + 1 + 2
        second image               accepts    rejects    accepts    accepts
          takes_own_at before it   6          6          8          8 = 5 + 1 + 2

    """

    takes_own_at: np.ndarray  # int64 [B], the AR step at which each image next takes the target's own tokens

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        super().__init__(canvas, transformer, drafter, noise)
        self.gamma = canvas.settings.draft_length
        first = canvas.settings.prefill(canvas.order.steps)  # the first AR step after the prefill
        self.takes_own_at = np.full(canvas.images, first + self.gamma)
        self.table = table_with_last_std(canvas)
        self.rejection_noise = RejectionNoise(self.keys)

    def segment(self, first: int) -> Iterator[Verdict]:
        """Decide the AR steps from ``first`` up to the first AR step at which an image takes the target's own tokens or
        rejects a draft.
        """
        # 1. Draft the AR steps before ``last``, the first AR step at which an image takes the target's own tokens, or
        # else the last of all AR steps. Draft ``last``, too, if an image needs a draft there.
        last = min(int(self.takes_own_at.min()), self.canvas.order.steps - 1)
        needs_draft = self.takes_own_at > last
        stop = last + int(needs_draft.any())
        drafts = {k: self.drafter.step(k, self.noise) for k in range(first, stop)}

        # 2. The target samples its own tokens, given the drafts.
        for step, target_paths in enumerate(self.paths(range(first, last + 1)), first):
            # 3. Accept or resample the drafts of an AR step, except in images that take the target's own tokens.
            takes_own = self.takes_own_at == step
            verified = self.verify(step, drafts.get(step), target_paths, takes_own)
            self.takes_own_at[takes_own | verified.rejects] = step + 1 + self.gamma

            # 4. Discard the later drafts after a rejection.
            has_rejected = verified.rejects.any()
            if has_rejected:
                self.drafter.discard_features()
                self.canvas.discard_drafts()
            yield verified.verdict
            if has_rejected:
                return

    def paths(self, steps: range) -> Iterator[Paths]:
        """Yield the target's own diffusion paths for each AR step, given the drafts of all earlier AR steps."""
        for batch, _, sizes in target_batches(self.canvas, self.transformer, steps, self.noise, self.table):
            with self.canvas.clock.phase("head"):
                paths = sample_paths(self.canvas, batch, adds_last_noise=True)
            yield from paths.split(sizes)

    def verify(self, step: int, draft: Paths | None, target_paths: Paths, takes_own: np.ndarray) -> VerifiedStep:
        """Verify the drafts of an AR step.

        Args:
            draft: the draft model's paths; None if no image needs a draft.
            target_paths: the target's paths.
            takes_own: bool [B], the images that take the target's own tokens, whatever was drafted.
        """
        canvas = self.canvas
        positions = canvas.order.positions_from(step)
        if draft is None:
            verdict = Verdict(positions, target_paths.tokens.view(*positions.shape, -1), step, None)
            return VerifiedStep(verdict, rejects=np.zeros(len(positions), dtype=bool))

        with canvas.clock.phase("head"):
            # 1. Verify all drafts.
            tokens = Tokens.all(positions)
            q, p = draft.last_step(), target_paths.last_step()
            verified = accept_or_resample(draft.tokens, q, p, PAPER_RULE, self.rejection_noise, tokens)

            # 2. Take the target's own tokens in the images of ``takes_own``, and where every proposal was rejected.
            # Both masks are bool [B n]; ``drafted`` is True for the drafts that count.
            drafted = ~torch.from_numpy(takes_own).repeat_interleave(positions.shape[1])
            uses_target = to_device(~drafted | ~verified.has_value, canvas.device)
            values = torch.where(uses_target[:, None], target_paths.tokens, verified.tokens)

        # 3. Count the drafts, on the host.
        accepted = drafted & verified.accepted
        rejected = drafted & ~verified.accepted
        rejects = rejected.view(positions.shape).any(1)
        canvas.report.add(accepted=int(accepted.sum()), rejected=int(rejected.sum()), restarts=int(rejects.sum()))
        canvas.report.add(**verified.counts(drafted))

        outcome = torch.where(verified.accepted, ACCEPTED, REJECTED).where(drafted, PLAIN)
        outcome = to_device(outcome.to(torch.uint8).view(positions.shape), canvas.device)
        return VerifiedStep(Verdict(positions, values.view(*positions.shape, -1), step, outcome), rejects.numpy())


class VerifiedStep(NamedTuple):
    """An AR step after the target has verified its drafts."""

    verdict: Verdict
    rejects: np.ndarray  # bool [B], the images with a rejected draft
