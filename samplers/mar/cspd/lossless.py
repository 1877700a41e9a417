"""CSpD, mode ``lossless``: exactly the target's distribution, whatever the draft.

p is the target, q the draft. The draft model samples some AR steps. The target's z of each is computed given the drafts
before it, in one pass, and its head is evaluated at all states of the drafted diffusion paths in one batch. A path is
kept up to its first rejected diffusion step, which is replaced by a coupling of the two Gaussians (``coupling.py``),
and the target samples the rest. So every token is a sample of the target given the tokens before it, and depends
neither on the draft length nor on the batch.

A token counts as accepted if its whole path is the draft's. After the first AR step with a rejected token the target's
z was computed from discarded tokens: all later drafts are discarded. Two different models rarely agree on a whole path,
because the last diffusion steps are almost without noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...coupling import Gaussian
from ...device import to_device
from ...engine import Verdict
from ...noise import CounterRNG, row_keys
from ...speculation import Drafts, Speculation
from ..canvas import MARCanvas, TokenNoise
from ..network import Transformer, full_head
from .draft import Drafter, Trace, outcome_of, segment_chains


class Lossless:
    """Draft some AR steps, keep those that the target accepts.

    A batch advances with its slowest image. Later drafts that another image had accepted are made again from the same
    noise and verified with the same random numbers, so an image's tokens do not depend on its batch.
    """

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: Drafter, noise: TokenNoise):
        """``noise``: of the target's full diffusion, from which the draft model samples too."""
        self.canvas = canvas
        self.transformer = transformer
        self.drafter = drafter
        self.noise = noise
        self.length = canvas.settings.draft_length  # of the next segment
        self.table = canvas.table(canvas.settings.diffusion_steps)
        self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    def segment(self, first: int) -> Iterator[Verdict]:
        """AR steps from ``first`` on, up to the first one with a rejected draft."""
        canvas = self.canvas
        settings = canvas.settings

        # 1. Draft gamma AR steps.
        steps = range(first, min(first + self.length, canvas.order.steps))
        drafts = [self.drafter.step(step, self.noise) for step in steps]

        # 2. The target verifies one after another, and samples the rest of each path.
        accepted_steps = 0
        for step, verified in zip(steps, self.verify(first, drafts), strict=True):
            with canvas.clock.phase("head"):
                here = canvas.order.ahead(step)
                accepted = torch.from_numpy(verified.kept_steps == len(self.table)).view(here.shape)
                values = verified.paths.finish(verified.rows, settings.window).view(*here.shape, -1)
                canvas.report.add(accepted_steps=int(verified.kept_steps.sum()))
                outcome = outcome_of(canvas, accepted)

            # 3. After a rejection discard the later drafts.
            all_accepted = bool(accepted.all())
            accepted_steps += all_accepted
            if not all_accepted:
                self.drafter.forget()
                canvas.discard_drafts()
            yield Verdict(here, values, step, outcome)
            if not all_accepted:
                break

        # 4. The next segment has at most twice the accepted length.
        self.length = min(settings.draft_length, max(1, 2 * accepted_steps))

    def verify(self, first: int, drafts: Sequence[Trace]) -> Iterator[VerifiedPaths]:
        """Verify the drafts of the AR steps from ``first`` on, one AR step after another.

        The transformer evaluates as many AR steps in one pass as it can, and the head as many in one batch. One with
        caches reads final tokens only: ask for an AR step when the tokens of the last one are final.
        """
        canvas = self.canvas
        net = canvas.model.net
        conditions = self.transformer.each_step(first, len(drafts))
        done = 0
        while done < len(drafts):
            # 1. The target's conditions of some AR steps, given the drafts before them.
            with canvas.clock.phase("transformer"):
                zs = next(conditions)  # [P, B, n, C] each

            # 2. Its head at all states of their drafted paths.
            with canvas.clock.phase("head"):
                rows, tokens = segment_chains(canvas, first + done, zs, self.noise, self.table)
                rng = CounterRNG(tokens.of(self.keys))
                head = full_head(net, rows, canvas.report)
                paths = Speculation(net, head, rows, rng)
                kept_steps = self.advance(paths, drafts[done : done + len(zs)])

            # 3. The rows of each AR step.
            end = 0
            for z in zs:
                of_step = np.arange(end, end + z.shape[1] * z.shape[2])
                end += len(of_step)
                yield VerifiedPaths(paths, of_step, kept_steps[of_step])
            done += len(zs)

    def advance(self, paths: Speculation, drafts: Sequence[Trace]) -> np.ndarray:
        """Advance paths past the diffusion steps that the target accepts. Returns how many it accepts, int64 [N]."""
        temperature = self.canvas.settings.temperature
        path = torch.cat([draft.path for draft in drafts])
        mean = torch.cat([draft.kernel.mean for draft in drafts])
        log_std = torch.cat([draft.kernel.log_std for draft in drafts])
        log_std += math.log(temperature) if temperature else -math.inf
        log_std[:, -1] = -math.inf  # the last step adds no noise
        self.canvas.report.add(drafted_steps=log_std.shape[0] * log_std.shape[1])
        return paths.verify(np.arange(len(path)), Drafts(path[:, :-1], path[:, 1:], Gaussian(mean, log_std)))


class VerifiedPaths(NamedTuple):
    """The drafted paths of an AR step, up to the first diffusion step that the target rejects."""

    # The diffusions of all AR steps that one pass verified. These AR steps share the object, and each finishes its own
    # rows only.
    paths: Speculation
    rows: np.ndarray  # rows of this AR step in ``paths``, int64 [B n]
    kept_steps: np.ndarray  # accepted diffusion steps of each row, int64 [B n]
