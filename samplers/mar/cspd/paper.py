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

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...noise import StreamNoise
from ..canvas import MARCanvas, TokenIndex
from ..transformer import Transformer
from .densities import PAPER_RULE, RejectionNoise, accept_or_resample
from .draft import MARDrafter, Paths, sample_paths, table_with_last_std
from .mode import Mode


class OwnTurns:
    """Says at which AR steps each image uses drafts. After gamma accepted AR steps in a row, the next AR step is the
    image's *own turn*: the image takes the target's own tokens. After an own turn, or after an AR step with a rejected
    draft, the image counts from 0 again. Each image counts for itself, so its tokens do not depend on its batch, see
    :class:`.Mode`.

    In this example, gamma is 2, and the second of two images rejects its draft of AR step 5. So this image counts from
    AR step 6 on, and its next own turn is 6 + 2. The last two lines say how :meth:`Paper.segment` divides the AR steps
    into segments, and which images use the drafts::

        AR step                 4          5          6          7          8
        first image             accepts    accepts    own turn   accepts    accepts
          next_turn before it   6          6          6          9          9
        second image            accepts    rejects    accepts    accepts    own turn
          next_turn before it   6          6          8          8          8
        segment                 first      first      second     third      third
        drafts are used by      both       both       second     both       first

    """

    next_turn: Tensor  # int64 [B] on the host, the AR step of each image's next own turn

    def __init__(self, images: int, gamma: int, first: int):
        """``images``: B. ``first``: the first AR step after the prefill, where all images begin to count."""
        self.gamma = gamma
        self.next_turn = torch.full((images,), first + gamma)

    def uses_draft(self, step: int) -> Tensor:
        """The images that use their drafts of AR step ``step``, bool [B]. It is the own turn of all other images."""
        return step < self.next_turn

    def restart(self, images: Tensor, step: int) -> None:
        """Let the ``images``, bool [B], count again from AR step ``step`` on."""
        self.next_turn[images] = step + self.gamma


class Paper(Mode):
    """Draft gamma AR steps, accept them up to the first rejected AR step, and resample the rejected tokens.

    A segment ends at the first AR step at which any image has its own turn or rejects a draft, see :class:`OwnTurns`.
    All bool tensors here are on the host, except those whose names begin with d_.
    """

    adds_last_noise = True

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        super().__init__(canvas, transformer, drafter, noise)
        settings = canvas.settings
        self.own_turns = OwnTurns(canvas.images, settings.draft_length, settings.prefill(canvas.order.steps))
        self.table = table_with_last_std(canvas)
        self.rejection_noise = RejectionNoise(self.keys)

    def segment(self, first: int) -> Iterator[int]:
        """Decide the AR steps from ``first`` up to and including the first AR step at which any image has its own turn
        or rejects a draft.
        """
        # 1. Draft the AR steps up to and including the first own turn of any image. Even there, other images may use
        # drafts.
        drafts: dict[int, Paths | None] = {}  # by AR step; None if no image uses a draft
        for step in range(first, self.canvas.order.steps):
            uses_draft = self.own_turns.uses_draft(step)
            drafts[step] = self.drafter.draft_step(step, self.noise) if uses_draft.any() else None
            if not uses_draft.all():
                break

        for ar_steps in self.passes(range(first, first + len(drafts))):
            # 2. In one pass, the target samples its own tokens of these AR steps, given the drafts of earlier AR steps.
            paths_of_steps = self.target_paths(ar_steps)

            # 3. Decide one AR step after another.
            for step, target_paths in zip(ar_steps, paths_of_steps, strict=True):
                uses_draft = self.own_turns.uses_draft(step)
                has_rejection = self.decide(step, drafts[step], target_paths, uses_draft)
                self.own_turns.restart(~uses_draft | has_rejection, step + 1)

                # 4. If a draft is rejected, discard all later drafts, and end the segment.
                if has_rejection.any():
                    self.drafter.discard_drafts()
                    yield step + 1
                    return

                yield step + 1

    def target_paths(self, ar_steps: range) -> list[Paths]:
        """The target's own diffusion paths for each AR step of a pass, given the drafts of earlier AR steps."""
        batch, _, sizes = self.run_target(ar_steps)
        with self.canvas.clock.phase("head"):
            paths = sample_paths(self.heads, batch, self.adds_last_noise)
        return paths.split(sizes)

    def decide(self, step: int, draft: Paths | None, target_paths: Paths, uses_draft: Tensor) -> Tensor:
        """Decide an AR step: accept drafts or resample them, and take the target's own tokens at own turns.

        Args:
            draft: the draft model's paths; None if no image uses a draft.
            target_paths: the target's paths.
            uses_draft: bool [B], the images that use their drafts. In all other images, the drafts are ignored.

        Returns:
            The images that reject a draft, bool [B].
        """
        canvas = self.canvas
        positions = canvas.order.positions_from(step)
        if draft is None:
            canvas.decide(positions, target_paths.tokens.view(*positions.shape, -1), step)
            return torch.zeros_like(uses_draft)

        token_uses_draft = uses_draft.repeat_interleave(positions.shape[1])  # one entry per token, bool [B n]
        with canvas.clock.phase("head"):
            # 1. Verify all drafts.
            tokens = TokenIndex.all(positions)
            q = draft.last_step()
            p = target_paths.last_step()
            verified = accept_or_resample(draft.tokens, q, p, PAPER_RULE, self.rejection_noise, tokens)

            # 2. Take the target's own tokens where the draft is ignored, or where all proposals were rejected.
            d_keeps_value = to_device(token_uses_draft & verified.has_value, canvas.device)
            values = torch.where(d_keeps_value[:, None], verified.values, target_paths.tokens)

        # 3. Count the drafts that are used.
        accepted = verified.accepted.view(positions.shape)
        outcome = self.count_outcomes(accepted, uses_draft)
        canvas.report.add(**verified.counts(token_uses_draft))

        canvas.decide(positions, values.view(*positions.shape, -1), step, outcome)
        return uses_draft & ~accepted.all(1)
