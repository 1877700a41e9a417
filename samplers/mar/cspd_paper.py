"""CSpD, mode ``paper``: the paper's algorithm 1.

Part of ``cspd.py``, which names the source; ``rejection.py`` has the rule, with equations 5 and 11 as printed, and its
symbols. It is speculative decoding as for discrete tokens (Leviathan et al. 2023, algorithm 1), in the order of the
tokens:

1. The draft model samples gamma tokens, each given those before it.
2. The target evaluates, in one pass, its distribution of each of them and of the next one, given the drafts before it,
   and follows its own diffusion path with the draft's noise (trajectory alignment, equation 3).
3. Drafts are accepted up to the first rejected one, which is drawn again. Later drafts are discarded.
4. If all are accepted, the next token is the target's own.

MAR decides several tokens in an AR step, which are independent given the tokens before it: here gamma counts AR steps,
and a step is accepted if all of its tokens are. With as many AR steps as tokens it is the algorithm, token by token.

A draft must be a sample of the density that it is judged by, so every diffusion step adds its noise, in both models.
MAR's last step adds none; its std is 0.006 of latents of std 1. Steps before the first draft are MAR's.

The paper redraws until a redraw is kept. Here there are 100 redraws at most; then the token is the target's own, and
the report counts it (``redraws_exhausted``). Sigma < 1 makes that possible: if Sigma p is nowhere above q, no redraw
is ever kept.

The target's distribution is kept where Sigma is 1, as in models that do not learn their variances; with learned ones
Sigma p, which the rule takes for the target's density, does not integrate to 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ...reports.record import ACCEPTED, PLAIN, REJECTED
from ..coupling import Gaussian
from ..device import to_device
from ..engine import Sampler, passes
from ..noise import row_keys
from .canvas import MARCanvas
from .drafting import Drafter, Trace, kernel_table, prefill_steps, segment_chains, traced
from .mar import Diffusion, places
from .rejection import AS_PRINTED, RejectionDraws, accept_or_redraw, last_step
from .settings import CSpDSettings
from .transformer import Transformer


@torch.no_grad()
def paper_steps(canvas: MARCanvas, transformer: Transformer, drafter: Drafter, settings: CSpDSettings) -> Sampler:
    """Draft gamma AR steps, accept them up to the first rejected one, replace that.

    A batch advances with its slowest image: when one image rejects, all discard their later drafts. Images that did not
    reject draft these steps again, from the same noise, and judge them with the same random numbers, and every image
    counts its own gamma, so that an image does not depend on its batch. With gamma = 2 and two images, of which b
    rejects its draft of step 5::

        step           4     5     6            7
        drafted        yes   yes   yes, for b   yes
        kept before    0 0   1 1   2 0          0 1
        its own token  -     -     a            -

    """
    order = canvas.order
    gamma = settings.draft_length
    tables = [canvas.table(settings.diffusion_steps)] * order.steps
    plain = Diffusion(canvas, transformer.heads, tables)
    judge = Judge(canvas, transformer, plain.start, plain.noise)

    # 0. Prefill: the first AR steps are the target's alone.
    first = prefill_steps(order.steps, settings.prefill_ratio)
    yield from passes(canvas, {step: order.ahead(step) for step in range(first)}, transformer, plain)

    canvas.drafted = torch.zeros_like(canvas.outcome, dtype=torch.bool)
    kept = np.zeros(canvas.images, dtype=int)  # drafted AR steps in a row that each image has accepted
    start = end = first  # of the segment: its first AR step, and the first one behind it
    for step in range(first, order.steps):
        if step == end:
            # 1. Draft up to gamma AR steps in a row in every image. The step behind them is the target's own. An image
            # that lags may not have gamma when the others take their own token, so that step is drafted too.
            most_kept = int(kept.max())
            to_draft = gamma - most_kept
            start = step
            end = min(step + to_draft + 1, order.steps)
            length = end - step
            some_lag = bool((kept < most_kept).any())
            # Without laggards the last step of the segment has no draft, because every image takes its own token; with
            # some it has one, which images at gamma ignore.
            drafted = length if some_lag else min(to_draft, length)
            drafts = [drafter.step(t, plain.start, plain.noise) for t in range(step, step + drafted)]
            if drafts:
                canvas.drafted.scatter_(1, order.ahead(step, drafted), True)

            # 2. The target's own paths, given the drafts; each is computed when step 3 asks for it.
            paths = judge.paths(step, end - step)

        # 3. Accept the drafts of this AR step or draw them again, but for images that have accepted gamma.
        path = next(paths)
        takes_own = kept == gamma
        draft = None if takes_own.all() else drafts[step - start]
        accepted = judge.decide(step, draft, path, takes_own)

        # 4. After a rejection the later drafts are discarded.
        kept = np.where(accepted & ~takes_own, kept + 1, 0)
        if not accepted.all():
            if step + 1 < end:
                canvas.drafted.scatter_(1, order.ahead(step + 1, end - step - 1), False)
            end = step + 1
            drafter.forget()

        with canvas.clock.paused():
            yield canvas.step(step + 1)
    return canvas.finish()


class Judge:
    """The target, which judges the drafts of an AR step after another."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer, start: Tensor, noise: Tensor):
        self.canvas = canvas
        self.transformer = transformer
        self.start = start
        self.noise = noise
        self.table = kernel_table(canvas)
        self.draws = RejectionDraws(to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device))

    def paths(self, first: int, count: int) -> Iterator[Trace]:
        """The target's own diffusion paths of the tokens of ``count`` AR steps from ``first`` on, given the drafts.

        The transformer evaluates as many AR steps in one pass as it can, and the head their tokens in one batch. One
        with caches reads final tokens only: ask for an AR step when the tokens of the last one are final.
        """
        clock = self.canvas.clock
        conditions = self.transformer.each_step(first, count)
        done = 0
        while done < count:
            with clock.phase("transformer"):
                zs = next(conditions)  # [P, B, n, C] each

            with clock.phase("head"):
                rows, _, _ = segment_chains(self.canvas, first + done, zs, self.start, self.noise, self.table)
                whole = traced(self.canvas, rows, last_noise=True)

            end = 0
            for z in zs:
                at = slice(end, end + z.shape[1] * z.shape[2])
                end = at.stop
                yield Trace(whole.path[at], Gaussian(whole.kernel.mean[at], whole.kernel.log_std[at]))
            done += len(zs)

    def decide(self, step: int, draft: Trace | None, path: Trace, takes_own: np.ndarray) -> np.ndarray:
        """Decide the tokens of an AR step; which images have no rejected draft, bool [B].

        Args:
            draft: the draft model's path; None if there is none.
            path: the target's.
            takes_own: bool [B], images whose tokens are the target's, whatever was drafted.
        """
        canvas = self.canvas
        here = canvas.order.ahead(step)
        of_target = path.path[:, -1]
        if draft is None:
            canvas.write(here, of_target.view(*here.shape, -1), step)
            return np.ones(len(here), dtype=bool)

        with canvas.clock.phase("head"):
            # 1. Judge all drafts.
            image, position = places(here)
            q = last_step(draft.kernel, canvas.settings.temperature)
            p = last_step(path.kernel, canvas.settings.temperature)
            judged = accept_or_redraw(draft.path[:, -1], q, p, AS_PRINTED, self.draws, image, position)

            # 2. The target's own tokens, where they are due or no redraw was kept.
            mine = torch.from_numpy(takes_own).repeat_interleave(here.shape[1])
            due = to_device(mine | ~judged.found, canvas.device)
            tokens = torch.where(due[:, None], of_target, judged.tokens)
            canvas.write(here, tokens.view(*here.shape, -1), step)

        # 3. Record it.
        accepted = judged.accepted.masked_fill(mine, True).view(here.shape)
        outcome = torch.where(judged.accepted, ACCEPTED, REJECTED).masked_fill(mine, PLAIN).to(torch.uint8)
        canvas.outcome.scatter_(1, here, to_device(outcome.view(here.shape), canvas.device))
        rejected = int((~accepted).sum())
        canvas.report.add(
            accepted=int((~mine).sum()) - rejected, rejected=rejected, restarts=int((~accepted).any(1).sum())
        )
        canvas.report.add(**judged.counts(~mine))
        return accepted.all(1).numpy()
