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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..chain import StepTable
from ..coupling import Gaussian
from ..device import to_device
from ..engine import Sampler, passes
from ..noise import CounterRNG, row_keys
from ..speculation import Drafts, Speculation
from .canvas import MARCanvas
from .drafting import Drafter, Trace, record_outcome, segment_chains
from .heads import speculation_of
from .mar import Diffusion
from .settings import CSpDSettings
from .transformer import Transformer


@torch.no_grad()
def lossless_steps(canvas: MARCanvas, transformer: Transformer, drafter: Drafter, settings: CSpDSettings) -> Sampler:
    """Draft some AR steps, keep those that the target accepts.

    A batch advances with its slowest image. Drafts that others had accepted beyond are made again from the same noise
    and judged with the same random numbers, so that an image's tokens do not depend on its batch.
    """
    order = canvas.order
    table = canvas.table(settings.diffusion_steps)
    plain = Diffusion(canvas, transformer.heads, [table] * order.steps)

    # 0. Prefill: the first AR steps are the target's alone.
    first = settings.prefill(order.steps)
    yield from passes(canvas, {step: order.ahead(step) for step in range(first)}, transformer, plain)

    verifier = Verifier(canvas, transformer, table, plain.start, plain.noise)
    canvas.drafted = torch.zeros_like(canvas.outcome, dtype=torch.bool)
    length = settings.draft_length  # of the next segment
    segment = Segment(iter(()), left=0)
    for step in range(first, order.steps):
        # 1. Draft the next segment of gamma AR steps when none is left. The target verifies them below, one by one.
        if not segment.left:
            steps = range(step, min(step + length, order.steps))
            drafts = [drafter.step(t, plain.start, plain.noise) for t in steps]
            canvas.drafted.scatter_(1, order.ahead(step, len(steps)), True)
            segment = Segment(verifier.judge(step, drafts), left=len(steps))

        # 2. Judge the drafts of this AR step. The target samples the rest of each path.
        verdict = next(segment.verdicts)
        with canvas.clock.phase("head"):
            here = order.ahead(step)
            accepted = torch.from_numpy(verdict.kept_steps == len(table)).view(here.shape)
            tokens = verdict.paths.finish(verdict.rows, plain.window)
            canvas.write(here, tokens.view(*here.shape, -1), step)
            canvas.report.add(accepted_steps=int(verdict.kept_steps.sum()))

        # 3. After a rejection discard the later drafts. The next segment has at most twice the accepted length.
        segment.left -= 1
        if record_outcome(canvas, here, accepted):
            segment.accepted += 1
        else:
            if segment.left:
                canvas.drafted.scatter_(1, order.ahead(step + 1, segment.left), False)
            segment.left = 0
            drafter.forget()
        length = min(settings.draft_length, max(1, 2 * segment.accepted))

        with canvas.clock.paused():
            yield canvas.step(step + 1)
    return canvas.finish()


@dataclass
class Segment:
    """Drafted AR steps, of which the target judges one after another."""

    verdicts: Iterator[Verdict]
    left: int  # AR steps that are not judged yet
    accepted: int = 0  # AR steps that were accepted in full


class Verdict(NamedTuple):
    """The drafts of an AR step, judged by the target."""

    # The diffusions of all AR steps that were judged in the same pass. Their verdicts hold the same object, and each
    # finishes its own rows only.
    paths: Speculation
    rows: np.ndarray  # of this AR step in paths, int64 [B n]
    kept_steps: np.ndarray  # accepted diffusion steps of each row, int64 [B n]


class Verifier:
    """The target, which judges drafted diffusion paths."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer, table: StepTable, start: Tensor, noise: Tensor):
        self.canvas = canvas
        self.transformer = transformer
        self.table = table
        self.start = start
        self.noise = noise
        self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), start.device)

    def judge(self, first: int, drafts: Sequence[Trace]) -> Iterator[Verdict]:
        """Judge the drafts of the AR steps from ``first`` on, one AR step after another.

        The transformer evaluates as many AR steps in one pass as it can, and the head as many in one batch. One with
        caches reads final tokens only: ask for an AR step when the tokens of the last one are final.
        """
        clock = self.canvas.clock
        conditions = self.transformer.each_step(first, len(drafts))
        done = 0
        while done < len(drafts):
            # 1. The target's conditions of some AR steps, given the drafts before them.
            with clock.phase("transformer"):
                zs = next(conditions)  # [P, B, n, C] each

            # 2. Its head at all states of their drafted paths.
            with clock.phase("head"):
                paths = self._paths(first + done, zs)
                kept_steps = self._advance(paths, drafts[done : done + len(zs)])

            # 3. The rows of each AR step.
            end = 0
            for z in zs:
                rows = np.arange(end, end + z.shape[1] * z.shape[2])
                end += len(rows)
                yield Verdict(paths, rows, kept_steps[rows])
            done += len(zs)

    def _paths(self, first: int, zs: Sequence[Tensor]) -> Speculation:
        """Paths of the tokens of the AR steps from ``first`` on, at their start noise, given their conditions."""
        rows, image, position = segment_chains(self.canvas, first, zs, self.start, self.noise, self.table)
        rng = CounterRNG(self.keys[image, position])
        return speculation_of(self.canvas.model.net, rows, rng, self.canvas.report)

    def _advance(self, paths: Speculation, drafts: Sequence[Trace]) -> np.ndarray:
        """Advance paths past the diffusion steps that the target accepts; their numbers, int64 [N]."""
        temperature = self.canvas.settings.temperature
        path = torch.cat([draft.path for draft in drafts])
        mean = torch.cat([draft.kernel.mean for draft in drafts])
        log_std = torch.cat([draft.kernel.log_std for draft in drafts])
        log_std += math.log(temperature) if temperature else -math.inf
        log_std[:, -1] = -math.inf  # the last step adds no noise
        self.canvas.report.add(drafted_steps=log_std.shape[0] * log_std.shape[1])
        return paths.verify(np.arange(len(path)), Drafts(path[:, :-1], path[:, 1:], Gaussian(mean, log_std)))
