"""CSpD, mode ``published``: the rule of the published code, which approximates the target's distribution.

``densities.py`` explains the rule and its symbols. The published code differs from the paper:

- Equation 5: the paper accepts a draft with probability min(1, Sigma p(x) / q(x)). The code divides by Sigma instead,
  and multiplies the stds of p and q by 42.
- Equation 11: the paper accepts a proposal with probability max(0, 1 - q / (Sigma p)). In the code, the probability is
  max(0, 1 - Sigma q / p), and the stds are not multiplied. The code makes at most 100 proposals. If all of them are
  rejected, all channels of the token become 0.
- A *segment* is the AR steps that the draft model drafts before the target verifies them. When the code's target
  verifies a draft, it reads only the tokens before the segment, not the earlier drafts of the segment. So an accepted
  token stays even if earlier tokens of the segment were rejected.
- When the code's target verifies, it uses the guidance scale of the segment's last AR step for all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ...noise import StreamNoise
from ..canvas import MARCanvas, TokenIndex
from ..transformer import Transformer
from .densities import LastStep, RejectionNoise, Rule, accept_or_resample, joined_by_image
from .draft import MARDrafter, sample_paths, table_with_last_std
from .mode import Mode

# How the published code computes the ratio r: with the inverse of Sigma and, for drafts, with wider densities.
PUBLISHED_RULE = Rule(sigma_power=-1, draft_std_factor=42.0)


class Published(Mode):
    """Draft one AR step after another, then verify all tokens of the segment at once."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        super().__init__(canvas, transformer, drafter, noise)
        settings = canvas.settings
        self.table = table_with_last_std(canvas)
        self.target_noise = noise if settings.alignment else canvas.noise_of("target")
        self.rejection_noise = RejectionNoise(self.keys)

    def segment(self, first: int) -> Iterator[int]:
        """Draft and verify the AR steps from ``first`` up to the next multiple of gamma, or up to the last AR step of
        the run if that is earlier. Both ends are included. If gamma is 4, a segment from AR step 6 has the AR steps 6,
        7 and 8, and a segment from AR step 8 has only this AR step.
        """
        gamma = self.canvas.settings.draft_length
        last = min(math.ceil(first / gamma) * gamma, self.canvas.order.steps - 1)
        ar_steps = range(first, last + 1)

        # 1. Draft one AR step after another, and let the sampler show the drafts. No draft is decided yet.
        drafted = []  # for each AR step, the last diffusion steps of its drafts
        for step in ar_steps:
            paths = self.drafter.draft_step(step, self.noise)
            drafted.append(paths.last_step())
            if step < last:
                yield step + 1

        # 2. Verify all drafts, and decide all tokens of the segment.
        self.verify(ar_steps, drafted)
        yield last + 1

    def verify(self, ar_steps: range, drafted: Sequence[LastStep]) -> None:
        """Verify the drafts of ``ar_steps``, given the tokens before these AR steps, and decide the tokens.

        ``drafted``: for each AR step, the last diffusion steps of its drafts.
        """
        canvas = self.canvas
        order = canvas.order
        positions = order.positions_from(ar_steps[0], len(ar_steps))
        tokens = TokenIndex.all(positions)

        # 1. Sample the target's own paths for all tokens, given the tokens before the segment.
        with canvas.clock.phase("transformer"):
            z = self.transformer(ar_steps[0], positions)
        with canvas.clock.phase("head"):
            batch = canvas.batch(self.table, tokens, z, self.target_noise)
            batch = replace(batch, cfg=torch.full_like(batch.cfg, order.cfg[ar_steps[-1]]))
            target = sample_paths(self.heads, batch, self.adds_last_noise)

            # 2. Accept drafts, and resample the rejected tokens.
            q = joined_by_image(drafted, canvas.images)
            p = target.last_step()
            drafts = canvas.values[tokens.index]
            verified = accept_or_resample(drafts, q, p, PUBLISHED_RULE, self.rejection_noise, tokens)
            canvas.report.add(**verified.counts())

        accepted = verified.accepted.view(positions.shape)
        outcome = self.count_outcomes(accepted)
        if not accepted.all():
            self.drafter.discard_drafts()

        # 3. Decide one AR step after another. In each image, the tokens of the AR steps stand side by side.
        sizes = [order.sizes[step] for step in ar_steps]
        values = verified.values.view(*positions.shape, -1)
        for step, step_positions, step_values, step_outcome in zip(
            ar_steps, positions.split(sizes, 1), values.split(sizes, 1), outcome.split(sizes, 1), strict=True
        ):
            canvas.decide(step_positions, step_values, step, step_outcome)
