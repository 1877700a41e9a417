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
from ..device import to_device
from ..engine import Sampler, passes
from ..noise import row_keys
from .canvas import MARCanvas
from .drafting import Drafter, Trace, noisy_last_step_table, segment_chains, traced
from .mar import Diffusion, places
from .rejection import AS_PRINTED, Judged, RejectionDraws, accept_or_redraw, last_step
from .settings import CSpDSettings
from .transformer import Transformer


@torch.no_grad()
def paper_steps(canvas: MARCanvas, transformer: Transformer, drafter: Drafter, settings: CSpDSettings) -> Sampler:
    """Draft gamma AR steps, accept them up to the first rejected one, replace that.

    Every image counts its own gamma: after gamma accepted AR steps in a row the tokens of the next one, ``own_at``, are
    the target's own. So an image does not depend on its batch. All images are at the same AR step, though: drafting
    ends at the first AR step at which any of them takes its own tokens, and a rejection in one image discards the later
    drafts of all. The others draft these AR steps again, from the same noise, and judge them with the same random
    numbers. An image that took its own tokens or rejected a draft at AR step k begins to count at k + 1, so that its
    next own ones are those of AR step k + 1 + gamma. With gamma = 2 and two images, of which the second one rejects its
    draft of AR step 5::

        AR step              4          5          6          7
        first image          accepts    accepts    its own    accepts
          own_at before it   6          6          6          9 = 6 + 1 + 2
        second image         accepts    rejects    accepts    accepts
          own_at before it   6          6          8          8 = 5 + 1 + 2

    """
    order = canvas.order
    tables = [canvas.table(settings.diffusion_steps)] * order.steps
    plain = Diffusion(canvas, transformer.heads, tables)
    judge = Judge(canvas, transformer, plain.start, plain.noise)

    # 0. Prefill: the first AR steps are the target's alone.
    step = settings.prefill(order.steps)
    yield from passes(canvas, {k: order.ahead(k) for k in range(step)}, transformer, plain)

    canvas.drafted = torch.zeros_like(canvas.outcome, dtype=torch.bool)
    own_at = np.full(canvas.images, step + settings.draft_length)  # of every image
    while step < order.steps:
        # 1. Draft up to the first AR step at which an image takes its own tokens; also that one if another image does
        # not. If no image is due before the end, this is the last AR step, which all draft.
        first_own_step = min(int(own_at.min()), order.steps - 1)
        others_draft_it = (own_at > first_own_step).any()
        drafts_needed = range(step, first_own_step + others_draft_it)
        drafts = {k: drafter.step(k, plain.start, plain.noise) for k in drafts_needed}
        if drafts:
            canvas.drafted.scatter_(1, order.ahead(step, len(drafts)), True)

        # 2. The target follows its own paths, given the drafts.
        for path in judge.paths(step, first_own_step + 1 - step):
            # 3. Accept the drafts of an AR step or draw them again, but for images that take their own tokens.
            takes_own = own_at == step
            accepted = judge.decide(step, drafts.get(step), path, takes_own)
            step += 1
            own_at[takes_own | ~accepted] = step + settings.draft_length

            # 4. After a rejection the later drafts are discarded.
            rejected = not accepted.all()
            if rejected:
                drafter.forget()
                if step <= first_own_step:
                    canvas.drafted.fill_(False)

            with canvas.clock.paused():
                yield canvas.step(step)
            if rejected:
                break
    return canvas.finish()


class Judge:
    """The target, which judges the drafts of an AR step after another."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer, start: Tensor, noise: Tensor):
        self.canvas = canvas
        self.transformer = transformer
        self.start = start
        self.noise = noise
        self.table = noisy_last_step_table(canvas)
        self.draws = RejectionDraws(to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device))

    def paths(self, first: int, count: int) -> Iterator[Trace]:
        """The target's own diffusion paths of the tokens of ``count`` AR steps from ``first`` on, given the drafts; one
        AR step after another.

        The transformer evaluates as many AR steps in one pass as it can, and the head their tokens in one batch. One
        with caches reads final tokens only: ask for an AR step when the tokens of the last one are final.
        """
        clock = self.canvas.clock
        conditions = self.transformer.each_step(first, count)
        done = 0
        while done < count:
            with clock.phase("transformer"):
                zs = next(conditions)  # [P, B, n, C] of some AR steps

            with clock.phase("head"):
                rows, _, _ = segment_chains(self.canvas, first + done, zs, self.start, self.noise, self.table)
                paths = traced(self.canvas, rows, last_noise=True)

            yield from paths.split([z.shape[1] * z.shape[2] for z in zs])  # B n of each AR step
            done += len(zs)

    def decide(self, step: int, draft: Trace | None, path: Trace, takes_own: np.ndarray) -> np.ndarray:
        """Decide the tokens of an AR step; returns which images have no rejected draft, bool [B].

        Args:
            draft: the draft model's path; None if no image needs one.
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
            own = torch.from_numpy(takes_own).repeat_interleave(here.shape[1])  # bool [B n]
            of_target_here = to_device(own | ~judged.found, canvas.device)
            tokens = torch.where(of_target_here[:, None], of_target, judged.tokens)
            canvas.write(here, tokens.view(*here.shape, -1), step)

        self._record(here, judged, ~own)
        rejected = ~judged.accepted & ~own
        return ~rejected.view(here.shape).any(1).numpy()

    def _record(self, here: Tensor, judged: Judged, drafted: Tensor) -> None:
        """Record the outcome at positions int64 [B, n], of those that were ``drafted``, bool [B n] on the host."""
        canvas = self.canvas
        outcome = torch.where(judged.accepted, ACCEPTED, REJECTED).where(drafted, PLAIN)
        canvas.outcome.scatter_(1, here, to_device(outcome.to(torch.uint8).view(here.shape), canvas.device))

        rejected = drafted & ~judged.accepted
        canvas.report.add(
            accepted=int((drafted & judged.accepted).sum()),
            rejected=int(rejected.sum()),
            restarts=int(rejected.view(here.shape).any(1).sum()),
        )
        canvas.report.add(**judged.counts(drafted))
