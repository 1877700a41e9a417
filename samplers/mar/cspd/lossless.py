"""CSpD, mode ``lossless``: images with exactly the target's distribution, whatever the draft model is.

The draft model samples the tokens of several AR steps. Each token has a *path*: its states from noise to the token. One
pass of the target's transformer computes z, the conditions of the target's diffusion head, for all these AR steps. The
z of an AR step depends on the drafts of the AR steps before it. (A transformer with caches needs a pass for each AR
step.) The target's head then evaluates all states of the drafted paths in one batch.

The target accepts a path up to its first rejected diffusion step. For this step, a coupling of the two models'
Gaussians (``coupling.py``) gives a new state, and from there the target samples the rest of the path. So every token is
a sample of the target, given the tokens before it. The token depends neither on the draft length nor on the batch.

A draft counts as accepted if its whole path is accepted. After an AR step with a rejected draft, all later drafts are
discarded, because the target computed their z from the rejected draft. Two different models rarely agree on a whole
path, because the last diffusion steps add almost no noise.

Shapes: B images, and n tokens of an image in an AR step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...diffusion_steps import StepTable
from ...noise import CounterRNG, StreamNoise
from ...speculation import Speculation
from ..canvas import MARCanvas
from ..transformer import Transformer
from .mode import MARDrafter, Mode, Paths


class Lossless(Mode):
    """Draft several AR steps, and decide them up to and including the first with a rejected draft in any image."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        super().__init__(canvas, transformer, drafter, noise)
        # Number of AR steps that the newest segment accepted. The first segment drafts as if a segment before it had
        # accepted draft_length AR steps.
        self.accepted_ar_steps = canvas.settings.draft_length

    @staticmethod
    def make_table(canvas: MARCanvas) -> StepTable:
        return canvas.step_table(canvas.settings.diffusion_steps)

    def segment(self, first: int) -> Iterator[int]:
        """Draft AR steps from ``first`` on, and decide them up to and including the first with a rejected draft in any
        image.
        """
        # 1. Draft at most twice as many AR steps as the previous segment accepted, but at least one.
        count = min(self.canvas.settings.draft_length, max(1, 2 * self.accepted_ar_steps))
        ar_steps = range(first, min(first + count, self.canvas.order.steps))
        drafts = {step: self.drafter.draft_step(step, self.noise) for step in ar_steps}

        self.accepted_ar_steps = 0
        for ar_steps_of_pass in self.passes(ar_steps):
            # 2. In one pass, the target verifies the drafts of these AR steps.
            verified_of_steps = self.verify(ar_steps_of_pass, drafts)

            # 3. Decide one AR step after another.
            for step, verified in zip(ar_steps_of_pass, verified_of_steps, strict=True):
                any_rejection = self.decide(step, verified)

                # 4. If a draft is rejected, discard all later drafts, and end the segment.
                if any_rejection:
                    self.drafter.discard_drafts()
                    yield step + 1
                    return

                self.accepted_ar_steps += 1
                yield step + 1

    def verify(self, ar_steps: range, drafts: Mapping[int, Paths]) -> list[VerifiedPaths]:
        """Verify the drafts of the AR steps of a pass. The head evaluates the tokens of all these AR steps together.
        Returns the verified paths of each AR step. ``drafts``: the drafted paths, by AR step.
        """
        canvas = self.canvas
        batch, tokens, sizes = self.run_target(ar_steps)

        # 1. Evaluate the head at all states of the drafted paths. The speculation gets no report, which would also
        # count the steps that the target drafts for itself. This method and :meth:`decide` count the draft model's.
        all_rows = np.arange(len(tokens))
        with canvas.clock.phase("head"):
            rng = CounterRNG(self.keys[tokens.index])
            speculation = Speculation(self.heads.net, self.heads.for_speculation(batch), batch, rng)
            paths = Paths.concatenated([drafts[step] for step in ar_steps])
            accepted_steps = speculation.verify(all_rows, paths.drafted_steps())
            canvas.report.add(drafted_steps=len(tokens) * speculation.step_count)

        # 2. Split the rows among the AR steps. For example, AR steps of 4 and 6 tokens get the rows 0 to 3 and 4 to 9.
        rows_of_steps = np.split(all_rows, np.cumsum(sizes)[:-1])
        return [VerifiedPaths(speculation, rows, accepted_steps[rows]) for rows in rows_of_steps]

    def decide(self, step: int, verified: VerifiedPaths) -> bool:
        """Decide an AR step: the target samples the rest of each path. Returns whether any image rejects a draft."""
        canvas = self.canvas
        positions = canvas.order.positions_from(step)
        with canvas.clock.phase("head"):
            accepted = verified.accepted().view(positions.shape)
            values = verified.finish(canvas.settings.speculation_window).view(*positions.shape, -1)
            canvas.report.add(accepted_steps=int(verified.accepted_steps.sum()))
            outcome = self.count_outcomes(accepted, ~accepted)

        canvas.decide(positions, values, step, outcome)
        return not accepted.all()


class VerifiedPaths(NamedTuple):
    """A handle to the rows of one AR step in a running speculation: :meth:`finish` takes the remaining diffusion steps
    of these rows. A row is the path of a token. The target has verified it, so it has come past its accepted diffusion
    steps, and past the first rejected one if there is one.

    All AR steps that one pass verified share the object ``speculation``. But no two of them share a row, so
    :meth:`finish` does not change the paths of other AR steps.
    """

    speculation: Speculation
    rows: np.ndarray  # indices of this AR step's rows in ``speculation``, int64 [B n]
    accepted_steps: np.ndarray  # number of accepted diffusion steps of each row, int64 [B n]

    def accepted(self) -> Tensor:
        """Whether the target accepts the whole path of each row, bool [B n] on the host."""
        return torch.from_numpy(self.accepted_steps == self.speculation.step_count)

    def finish(self, window: int) -> Tensor:
        """Let the target sample the rest of each path, and return the tokens of the rows, fp32 [B n, channels]. The
        target drafts ``window`` of its own diffusion steps at once. If ``window`` is 1, it does not draft.
        """
        return self.speculation.finish(self.rows, window)
