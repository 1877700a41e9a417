"""CSpD, mode ``published``: the rule of the published code; approximate.

``densities.py`` has the rule and its symbols. The draft model and the target each follow their own diffusion
path. The paper's equations, and what the code does instead:

- (5): a token is accepted with probability min(1, Sigma p(x) / q(x)). The code divides by Sigma, and p and q are the
  last diffusion step's densities with stds multiplied by 42.
- (11): a rejected token is resampled from p: a proposal is accepted with probability max(0, 1 - q / (Sigma p)). The
  code multiplies by Sigma: max(0, 1 - Sigma q / p), with the stds as they are. It makes 100 proposals at most; if it
  accepts none, the token is zero.
- Drafts are verified given only the tokens that were decided before their segment, and not given the earlier drafts of
  the segment. An accepted token stays even if earlier tokens were rejected. To verify, the target has the guidance
  scale of the segment's last AR step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ....reports.record import DRAFTED
from ...engine import Verdict
from ..canvas import MARCanvas, StreamNoise, Tokens
from ..mar import Transformer
from .densities import LastStep, RejectionNoise, Rule, accept_or_resample, image_by_image
from .draft import MARDrafter, sample_paths, table_with_last_std
from .mode import Mode, outcome_of

# The published code's ratio r (densities.py): Sigma is inverted, and both densities are wider while drafts are
# verified.
PUBLISHED_RULE = Rule(power=-1, inner_temperature=42.0)


class Published(Mode):
    """Draft AR steps one by one, then verify all tokens of the segment at once."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        super().__init__(canvas, transformer, drafter, noise)
        settings = canvas.settings
        self.table = table_with_last_std(canvas)
        self.target_noise = noise if settings.alignment else canvas.noise_of("target")
        self.rule = PUBLISHED_RULE  # an attribute, because lab/parity verifies with other inner temperatures
        self.rejection_noise = RejectionNoise(self.keys)

    def segment(self, first: int) -> Iterator[Verdict]:
        """The AR steps from ``first`` up to the next one (``first`` itself, if it is one) whose number is a multiple of
        gamma, or up to the last of all AR steps.
        """
        order = self.canvas.order
        gamma = self.canvas.settings.draft_length
        last = min(-(-first // gamma) * gamma, order.steps - 1)

        # 1. Draft the AR steps one by one. Until they are verified, drafts count as decided.
        drafted = []  # the last diffusion step of each drafted AR step
        for step in range(first, last + 1):
            here = order.ahead(step)
            paths = self.drafter.step(step, self.noise)
            drafted.append(paths.last_step())
            if step < last:
                outcome = torch.full_like(here, DRAFTED, dtype=torch.uint8)
                yield Verdict(here, paths.tokens.view(*here.shape, -1), step, outcome)

        # 2. Verify the whole segment.
        yield self.verdict(first, last, drafted)

    def verdict(self, first: int, last: int, drafted: Sequence[LastStep]) -> Verdict:
        """Verify the drafts of the AR steps ``first`` to ``last``, given the tokens before ``first``."""
        canvas = self.canvas
        order = canvas.order
        here = order.ahead(first, last + 1 - first)
        tokens = Tokens.all(here)

        # The target's own paths of all tokens, given the tokens before the segment.
        with canvas.clock.phase("transformer"):
            z = self.transformer(first, here)
        with canvas.clock.phase("head"):
            batch = canvas.batch(self.table, tokens, z, self.target_noise, step=last)
            target = sample_paths(canvas, batch, adds_last_noise=False)

            # Accept drafts, and resample the rejected tokens.
            q = image_by_image(drafted, canvas.images)
            p = target.last_step()
            resampled = accept_or_resample(canvas.values[tokens.index], q, p, self.rule, self.rejection_noise, tokens)
            canvas.report.add(**resampled.counts())

        accepted = resampled.accepted.view(here.shape)
        if not accepted.all():
            self.drafter.forget()
        when = [torch.full_like(order.ahead(step), step, dtype=torch.int32) for step in range(first, last + 1)]
        return Verdict(here, resampled.tokens.view(*here.shape, -1), torch.cat(when, 1), outcome_of(canvas, accepted))
