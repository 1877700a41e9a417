"""CSpD, mode ``lossless``: exactly the target's distribution, whatever the draft.

Part of ``cspd.py``, which names the source.

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
from torch import Tensor

from ...reports.record import PLAIN
from ..driver import to_device
from ..noise import CounterRNG, row_keys
from .coupling import Gaussian
from .diffusion import HeadBatch
from .drafting import Drafter, Trace, judged, places, prefill_steps
from .loop import Run, Sampler, Transformer
from .mar import plain_steps
from .settings import CSpDSettings
from .speculative import Paths


@torch.no_grad()
def lossless_steps(run: Run, transformer: Transformer, drafter: Drafter, settings: CSpDSettings) -> Sampler:
    """Draft some AR steps, keep those that the target accepts.

    A batch advances with its slowest image. Drafts that others had accepted beyond are made again from the same noise
    and judged with the same random numbers, so that an image's tokens do not depend on its batch.
    """
    plan = run.plan
    table = run.tables
    start, noise = run.draws("full", len(table.steps))
    outcome = torch.full(run.tokens.shape[:2], PLAIN, dtype=torch.uint8, device=start.device)

    # 0. Prefill: the first AR steps are the target's alone.
    first = prefill_steps(plan.steps, settings.prefill_ratio)
    yield from plain_steps(run, transformer, [table] * plan.steps, settings.speculation, first)

    verifier = Verifier(run, transformer, settings.speculation, start, noise)
    run.drafted = torch.zeros_like(outcome, dtype=torch.bool)
    length = settings.draft_length  # of the next segment
    left = 0  # drafted AR steps that are not judged yet
    for step in range(first, plan.steps):
        # 1. Draft the next segment of gamma AR steps when none is left. The target verifies them below, one by one.
        if not left:
            segment = range(step, min(step + length, plan.steps))
            drafts = [drafter.step(t, start, noise) for t in segment]
            run.drafted.scatter_(1, plan.ahead(step, len(segment)), True)
            verified = verifier.verify(step, drafts)
            left = len(segment)
            whole = 0  # AR steps of the segment that were accepted in full

        # 2. Judge the drafts of this AR step. The target samples the rest of each path.
        result = next(verified)
        with run.clock.phase("head"):
            here = plan.ahead(step)
            image, position = places(here)
            accepted = torch.from_numpy(result.kept == len(table.steps)).view(here.shape)
            run.tokens[image, position] = result.paths.finish(result.rows)
            run.report.add(accepted_steps=int(result.kept.sum()))

        # 3. After a rejection discard the later drafts. The next segment has at most twice the accepted length.
        left -= 1
        if judged(run, outcome, here, accepted):
            whole += 1
        else:
            left = 0
            drafter.forget()
        length = min(settings.draft_length, max(1, 2 * whole))

        with run.clock.paused():
            yield run.step(step)
    return run.finish(outcome)


class Verified(NamedTuple):
    """The drafts of an AR step, judged by the target."""

    paths: Paths  # of this AR step and maybe others
    rows: np.ndarray  # of this AR step, int64 [B n]
    kept: np.ndarray  # accepted diffusion steps of each row, int64 [B n]


class Verifier:
    """The target, which judges drafted diffusion paths."""

    def __init__(self, run: Run, transformer: Transformer, speculation: int, start: Tensor, noise: Tensor):
        self.run = run
        self.transformer = transformer
        self.speculation = speculation
        self.start = start
        self.noise = noise
        self.keys = to_device(row_keys(run.noise, "verify", run.plan.tokens), start.device)

    def verify(self, first: int, drafts: Sequence[Trace]) -> Iterator[Verified]:
        """Judge the drafts of the AR steps from ``first`` on, one AR step after another.

        The transformer evaluates as many AR steps in one pass as it can, and the head as many in one batch. One with
        caches reads final tokens only: ask for an AR step when the tokens of the last one are final.
        """
        run = self.run
        passes = self.transformer.verify(run, first, len(drafts))
        done = 0
        while done < len(drafts):
            # 1. The target's conditions of some AR steps, given the drafts before them.
            with run.clock.phase("transformer"):
                zs = next(passes)  # [P, B, n, C] each

            # 2. Its head at all states of their drafted paths.
            with run.clock.phase("head"):
                paths = self._paths(first + done, zs)
                kept = self._judge(paths, drafts[done : done + len(zs)])

            # 3. The rows of each AR step.
            end = 0
            for z in zs:
                rows = np.arange(end, end + z.shape[1] * z.shape[2])
                end += len(rows)
                yield Verified(paths, rows, kept[rows])
            done += len(zs)

    def _paths(self, first: int, zs: Sequence[Tensor]) -> Paths:
        """Paths of the tokens of the AR steps from ``first`` on, at their start noise, given their conditions."""
        plan = self.run.plan
        where = [places(plan.ahead(step)) for step in range(first, first + len(zs))]
        image = torch.cat([image for image, _ in where])
        position = torch.cat([position for _, position in where])
        z = torch.cat([z.flatten(1, 2) for z in zs], 1)
        cfg = plan.scale[image, position, None]
        noise = self.noise[:, image, position]
        batch = HeadBatch(z, cfg, self.start[image, position], noise, self.run.tables)
        return Paths(self.run, batch, self.speculation, CounterRNG(self.keys[image, position]))

    def _judge(self, paths: Paths, drafts: Sequence[Trace]) -> np.ndarray:
        """Advance paths past the diffusion steps that the target accepts; their numbers, int64 [N]."""
        temperature = self.run.settings.temperature
        path = torch.cat([draft.path for draft in drafts])
        mean = torch.cat([draft.kernel.mean for draft in drafts])
        log_std = torch.cat([draft.kernel.log_std for draft in drafts])
        log_std += math.log(temperature) if temperature else -math.inf
        log_std[:, -1] = -math.inf  # the last step adds no noise
        self.run.report.add(drafted_steps=log_std.shape[0] * log_std.shape[1])
        return paths.verify(np.arange(len(path)), path, Gaussian(mean, log_std))
