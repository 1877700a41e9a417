"""CSpD, mode ``paper``: the paper's algorithm 1.

``densities.py`` explains the rule, its symbols and *proposals*. Our copy of the paper lacks equations 5 and 11, so we
derived these equations from the text around them. The algorithm applies speculative decoding (Leviathan et al. 2023,
algorithm 1), which was made for discrete tokens, to continuous tokens:

1. The draft model samples gamma tokens, each given the tokens before it.
2. In one pass, the target computes the distributions of these tokens and of the token after them, each given the drafts
   before it. The target samples its own diffusion paths with the draft model's noise (trajectory alignment, equation
   3).
3. The target accepts drafts up to the first rejected draft, and resamples this one. Later drafts are discarded.
4. If all drafts are accepted, the target samples the next token itself.

MAR decides several tokens in an AR step. They are independent of each other, given the tokens of earlier AR steps. Here
gamma counts AR steps, and an AR step is accepted if all its tokens are accepted. If every AR step decides one token,
this is the paper's algorithm.

A draft must be a sample of the density with which it is verified. So every diffusion step adds noise, in both models.
In MAR, the last step adds no noise. Here it adds noise with a std of 0.006; the latents have a std of 1. In the AR
steps before the first draft, the target samples tokens as in MAR.

The paper makes proposals until one is accepted. Here there are at most 100 proposals for a token. If all 100 are
rejected, the target takes the token of its own path, and the report counts this token as ``redraws_exhausted``. This
can happen if Sigma < 1: if Sigma p is nowhere above q, no proposal is ever accepted.

If Sigma is 1, as in models that do not learn their variances, the images have the target's distribution. With learned
variances they do not: the rule treats Sigma p as the target's density, but Sigma p does not integrate to 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...engine import Verdict
from ...noise import StreamNoise
from ..canvas import MARCanvas
from ..tokens import TokenIndex
from ..transformer import Transformer
from .densities import PAPER_RULE, RejectionNoise, accept_or_resample
from .draft import MARDrafter, Paths, sample_paths, table_with_last_std
from .mode import DecidedStep, Mode


class Paper(Mode):
    """Draft gamma AR steps, accept them up to the first rejected AR step, and resample the rejected tokens.

    Each image has its own count of accepted AR steps. After gamma accepted AR steps in a row, the image takes the
    target's own tokens at the next AR step. ``takes_own_at`` holds the index of that AR step. With these counts, the
    tokens of an image do not depend on its batch, see :class:`Mode`. A segment ends at the first AR step at which any
    image takes the target's own tokens.

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
        # 1. Draft the AR steps at which some image needs a draft.
        last, to_draft = self.last_and_drafts(first)
        drafts = {step: self.drafter.step(step, self.noise) for step in to_draft}

        # 2. At each AR step, the target samples its own tokens, given the drafts of earlier AR steps.
        for step, target_paths in enumerate(self.paths(range(first, last + 1)), first):
            # 3. Accept drafts, and resample rejected tokens, except in images that take the target's own tokens.
            takes_own = self.takes_own_at == step
            draft = drafts.get(step)
            if draft is None:
                decided = self.own_tokens(step, target_paths)
            else:
                decided = self.verify(step, draft, target_paths, torch.from_numpy(~takes_own))
            self.takes_own_at[takes_own | decided.has_rejection] = step + 1 + self.gamma

            # 4. If a draft is rejected, discard all later drafts.
            any_rejection = decided.has_rejection.any()
            if any_rejection:
                self.drafter.discard_drafts()
            yield decided.verdict
            if any_rejection:
                return

    def last_and_drafts(self, first: int) -> tuple[int, range]:
        """The last AR step of the segment that starts at ``first``, if no draft is rejected, and the AR steps to draft.

        The last AR step is the first one at which any image takes the target's own tokens, or the last AR step of the
        run if that is earlier. It needs a draft too, unless all images take the target's own tokens there. In the
        example of the class, the segments are::

            first    takes_own_at    last    AR steps to draft
            4        6, 6            6       4, 5
            6        6, 8            6       6, for the second image
            7        9, 8            8       7, and 8 for the first image

        """
        last = min(int(self.takes_own_at.min()), self.canvas.order.steps - 1)
        last_needs_draft = bool((self.takes_own_at > last).any())
        return last, range(first, last + 1 if last_needs_draft else last)

    def paths(self, steps: range) -> Iterator[Paths]:
        """Yield the target's own diffusion paths for each AR step, given the drafts of all earlier AR steps."""
        for batch, _, sizes in self.target_batches(steps):
            with self.canvas.clock.phase("head"):
                paths = sample_paths(self.canvas, batch, adds_last_noise=True)
            yield from paths.split(sizes)

    def own_tokens(self, step: int, target_paths: Paths) -> DecidedStep:
        """Take the target's own tokens in all images, at an AR step without drafts."""
        positions = self.canvas.order.positions_from(step)
        verdict = Verdict(positions, target_paths.tokens.view(*positions.shape, -1), step, None)
        return DecidedStep(verdict, has_rejection=np.zeros(len(positions), dtype=bool))

    def verify(self, step: int, draft: Paths, target_paths: Paths, uses_draft: Tensor) -> DecidedStep:
        """Verify the drafts of an AR step.

        Args:
            draft: the draft model's paths.
            target_paths: the target's paths.
            uses_draft: bool [B] on the host. In an image where it is False, the drafts are ignored, and all tokens are
                the target's own.
        """
        canvas = self.canvas
        positions = canvas.order.positions_from(step)
        token_uses_draft = uses_draft.repeat_interleave(positions.shape[1])  # one entry per token, bool [B n]

        with canvas.clock.phase("head"):
            # 1. Verify all drafts.
            tokens = TokenIndex.all(positions)
            q, p = draft.last_step(), target_paths.last_step()
            verified = accept_or_resample(draft.tokens, q, p, PAPER_RULE, self.rejection_noise, tokens)

            # 2. Take the target's own tokens where the draft is ignored, or where all proposals were rejected.
            keeps_value = to_device(token_uses_draft & verified.has_value, canvas.device)
            values = torch.where(keeps_value[:, None], verified.values, target_paths.tokens)

        # 3. Count the drafts. The counts are computed on the host.
        accepted = verified.accepted.view(positions.shape)
        outcome = self.count_outcomes(accepted, uses_draft)
        canvas.report.add(**verified.counts(token_uses_draft))

        has_rejection = uses_draft & ~accepted.all(1)
        return DecidedStep(Verdict(positions, values.view(*positions.shape, -1), step, outcome), has_rejection.numpy())
