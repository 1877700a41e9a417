"""CSpD, mode ``lossless``: exactly the target's distribution, whatever the draft.

p is the target, q the draft. The draft model samples the tokens of some AR steps. One pass of the target computes z for
each of these AR steps, given the drafts before it, and one batch evaluates the target's head at all states of the
drafted diffusion paths. A path is accepted up to its first rejected diffusion step. A coupling of the two Gaussians
(``coupling.py``) replaces this step, and the target samples the rest of the path. So every token is a sample of the
target given the tokens before it, and depends neither on the draft length nor on the batch.

A token counts as accepted if its whole path is the draft's. If an AR step has a rejected token, the target computed the
z of all later AR steps from a discarded token, so all later drafts are discarded. Two different models rarely agree on
a whole path, because the last diffusion steps are almost without noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...engine import Verdict
from ...noise import CounterRNG
from ...speculation import Speculation
from ..canvas import MARCanvas, StreamNoise
from ..mar import HeadEvaluation, Transformer
from .draft import MARDrafter, Paths
from .mode import Mode, outcome_of, target_batches


class Lossless(Mode):
    """Draft some AR steps, and continue after the AR steps that the target accepts.

    A batch advances with its slowest image. If another image has accepted later drafts too, the draft model makes these
    drafts again from the same noise, and the target verifies them with the same random numbers. So an image's tokens do
    not depend on its batch.
    """

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        super().__init__(canvas, transformer, drafter, noise)
        self.gamma = canvas.settings.draft_length  # AR steps to draft in the next segment
        self.table = canvas.step_table(canvas.settings.diffusion_steps)
        # Without a cache, even if the transformer has caches.
        self.head = HeadEvaluation(canvas.model.net, canvas.report)

    def segment(self, first: int) -> Iterator[Verdict]:
        """AR steps from ``first`` on, up to the first one with a rejected draft."""
        canvas = self.canvas
        settings = canvas.settings

        # 1. Draft gamma AR steps.
        steps = range(first, min(first + self.gamma, canvas.order.steps))
        drafts = [self.drafter.step(step, self.noise) for step in steps]

        # 2. The target verifies one AR step after another, and samples the rest of each path.
        accepted_ar_steps = 0
        for step, verified in zip(steps, self.verified_paths(steps, drafts), strict=True):
            with canvas.clock.phase("head"):
                here = canvas.order.ahead(step)
                accepted = verified.accepted().view(here.shape)
                values = verified.samples(settings.window).view(*here.shape, -1)
                canvas.report.add(accepted_steps=int(verified.accepted_steps.sum()))
                outcome = outcome_of(canvas, accepted)

            # 3. Discard the later drafts after a rejection.
            has_rejected = not accepted.all()
            if has_rejected:
                self.drafter.forget()
                canvas.discard_drafts()
            yield Verdict(here, values, step, outcome)
            if has_rejected:
                break
            accepted_ar_steps += 1

        # 4. Draft at most twice as many AR steps in the next segment as were accepted in this one.
        self.gamma = min(settings.draft_length, max(1, 2 * accepted_ar_steps))

    def verified_paths(self, steps: range, drafts: Sequence[Paths]) -> Iterator[VerifiedPaths]:
        """Verify the drafts of AR steps, one AR step after another. The head evaluates the tokens of a pass
        together.
        """
        canvas = self.canvas
        left = iter(drafts)
        for batch, tokens, sizes in target_batches(canvas, self.transformer, steps, self.noise, self.table):
            # 1. The head at all states of the drafted paths.
            with canvas.clock.phase("head"):
                rng = CounterRNG(self.keys[tokens.index])
                speculation = Speculation(canvas.model.net, self.head.for_speculation(batch), batch, rng)
                steps_of_pass = Paths.concatenated([*islice(left, len(sizes))]).drafted_steps()
                accepted = speculation.verify(np.arange(len(tokens)), steps_of_pass)
                canvas.report.add(drafted_steps=len(tokens) * speculation.steps)

            # 2. The rows of each AR step.
            for rows in np.split(np.arange(len(tokens)), np.cumsum(sizes)[:-1]):
                yield VerifiedPaths(speculation, rows, accepted[rows])


class VerifiedPaths(NamedTuple):
    """The drafted paths of an AR step, up to the first diffusion step that the target rejects."""

    # The diffusions of all AR steps that one pass verified. The AR steps share this object, but each finishes only its
    # own rows.
    speculation: Speculation
    rows: np.ndarray  # rows of this AR step in ``speculation``, int64 [B n]
    accepted_steps: np.ndarray  # accepted diffusion steps of each row, int64 [B n]

    def accepted(self) -> Tensor:
        """Whether the target accepts the whole path of each row, bool [B n] on the host."""
        return torch.from_numpy(self.accepted_steps == self.speculation.steps)

    def samples(self, window: int) -> Tensor:
        """The samples of the rows, fp32 [B n, channels]. The target samples the rest of each path, with its own drafts
        of ``window`` diffusion steps.
        """
        return self.speculation.finish(self.rows, window)
