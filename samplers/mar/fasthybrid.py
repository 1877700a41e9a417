"""FastHybrid: lookahead drafts, verification by similarity, guided few-step refinement.

Source: "FastHybrid: Accelerating Hybrid Autoregressive Image Generation with Lookahead and Guided Decoding" (CVPR
2026). No code was published; choices that the paper leaves open are settings (see :class:`FastHybridSettings`).

At AR step s, with z the transformer's output for the positions of step s and of those up to the next multiple of k:

1. *verify*: a token of step s keeps its draft if cos(z', z) >= lambda, where z' is the condition its draft was made
   from;
2. *lookahead*: all other tokens of step s, and for their images all tokens of the following steps up to the next
   multiple of k, are sampled by a full diffusion pass of T steps; the latter are the drafts x' of these steps, and
   their z is z';
3. *refine*: accepted tokens are sampled by T_g guided diffusion steps, whose means are mixed with the draft,
   mu'_t = (1 - gamma_t) mu_t + gamma_t x'. A step with gamma_t = 1 does not depend on the head and skips it.

Lookaheads end at multiples of k, so that the images of a batch start their next ones together: the number of
sequential head calls of a batch then stays near that of one image. Guided steps have noise of their own: with entries
of the noise that made the draft, accepted tokens were no closer to plain MAR's. With ``lookahead_start``, which the
paper does not have, the first AR steps are plain MAR's. Nor does the paper have ``acceptance_target``, which takes the
place of lambda: of the drafts of an image, those of a step that are most similar are kept, as many as make up the
share of all its drafts so far. This is lambda as a quantile; a fixed lambda keeps all drafts of one image and none of
another. The transformer runs at every AR step as in plain MAR, so a restarted lookahead costs no further transformer
pass.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_loaders.networks.mar import MARModel, pick
from ...reports.record import ACCEPTED, PLAIN, REDONE
from ..conditioning import MaskedCondition
from ..driver import to_device
from ..editing import Edit
from ..noise import PairedNoise
from .diffusion import Head, HeadBatch, ancestral_steps, denoise
from .loop import FullTransformer, Run, Sampler, Transformer, begin
from .mar import annealed_tables, plain_steps
from .settings import FastHybridSettings


@torch.no_grad()
def fasthybrid(
    model: MARModel,
    condition: MaskedCondition,
    settings: FastHybridSettings,
    noise: PairedNoise,
    seed: int | None = None,
    transformer: Transformer | None = None,
    edit: Edit | None = None,
) -> Sampler:
    """FastHybrid on MAR; arguments and errors as of :func:`samplers.mar.mar.mar`.

    With ``lookahead`` 0 this is plain MAR bit for bit; with ``threshold`` above 1 every draft is rejected, and the
    result equals plain MAR within fp32 rounding.
    """
    transformer = transformer or FullTransformer()
    run = begin("fasthybrid", model, condition, settings, noise, seed, edit, transformer)
    tables = annealed_tables(run, settings)
    if not settings.lookahead:
        yield from plain_steps(run, transformer, tables)
        return run.finish()

    plan = run.plan
    device = run.tokens.device
    images, length, _ = run.tokens.shape
    start, full_noise = run.draws("full", len(run.tables.steps))
    guided = Guided(run, transformer, settings)

    draft = torch.zeros_like(run.tokens)  # x'
    z_draft = torch.zeros(
        images, length, model.net.config.dim, device=device
    )  # z', the condition that a draft was made from
    has_draft = torch.zeros(images, length, dtype=torch.bool, device=device)
    outcome = torch.full((images, length), PLAIN, dtype=torch.uint8, device=device)
    verified = accepted = torch.zeros(images, dtype=torch.int64, device=device)  # drafts of each image so far
    similarities = []

    for step in range(plan.steps):
        # Lookaheads end at multiples of k, so that the images of a batch start their next ones together.
        k = settings.lookahead
        reach = 1 if step < settings.lookahead_start else k - step % k
        here = plan.ahead(step)  # [B, n]
        ahead = plan.ahead(step, reach)  # [B, m], the n first
        n = here.shape[1]

        with run.clock.phase("transformer"):
            z = transformer(run, step, ahead)  # [P, B, m, C]

        with run.clock.phase("head"):
            # 1. Verify: a draft is accepted if cos(z', z) >= lambda.
            drafted = has_draft.gather(1, here)
            cosine = F.cosine_similarity(pick(z_draft, here), z[0, :, :n].float(), dim=-1)
            ok = drafted & (cosine >= settings.threshold)
            if settings.acceptance_target:
                # Of each image the most similar drafts, so that the share of all its drafts is kept.
                verified = verified + drafted.sum(1)
                most = (settings.acceptance_target * verified).round() - accepted
                rank = (
                    cosine.masked_fill(~drafted, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
                )
                ok = drafted & (rank < most[:, None])
                accepted = accepted + ok.sum(1)
            judged = torch.where(ok, ACCEPTED, torch.where(drafted, REDONE, PLAIN))
            outcome.scatter_(1, here, judged.to(torch.uint8))
            ok, drafted = torch.stack([ok, drafted]).cpu()  # the host waits for the device here, and nowhere else
            similarities.append((cosine, drafted))

            # 2. Lookahead: full diffusion of all other tokens and, for the images that have one, of all later steps in
            # reach.
            restarts = (~ok).any(1, keepdim=True)
            todo = torch.cat([~ok, restarts.expand(-1, ahead.shape[1] - n)], 1)
            full_batch = full_at = None
            if bool(todo.any()):
                b, c = to_device(todo.nonzero().T, device)
                p = ahead[b, c]
                full_at = (b, p)
                full_batch = HeadBatch(
                    z[:, b, c], plan.scale[b, p, None], start[b, p], full_noise[:, b, p], tables[step]
                )
                z_draft[b, p] = z[0, b, c].float()
                has_draft[b, p] = True

            # 3. Refine: guided diffusion of the accepted tokens, mu' = (1 - gamma) mu + gamma x'.
            guided_batch = guided_at = None
            if bool(ok.any()) and settings.accepted == "refine":
                b, c = to_device(ok.nonzero().T, device)
                p = here[b, c]
                guided_at = (b, p)
                guided_batch = guided.batch(z[:, b, c], plan.scale[b, p, None], b, p, draft[b, p])

            # 4. The tokens of both.
            of_full, of_guided = sample(run, transformer, full_batch, guided_batch)
            if of_full is not None:
                draft[full_at] = of_full
            if of_guided is not None:
                draft[guided_at] = of_guided
            run.tokens.scatter_(1, here[..., None].expand(-1, -1, draft.shape[2]), pick(draft, here))

        redone = drafted & ~ok
        run.report.add(accepted=int(ok.sum()), rejected=int(redone.sum()), restarts=int(redone.any(1).sum()))
        with run.clock.paused():
            yield run.step(step)

    run.report.similarity = np.concatenate([cosine.cpu()[drafted].numpy() for cosine, drafted in similarities])
    return run.finish(outcome)


class Guided:
    """The guided diffusion of accepted tokens: T_g steps whose means are mixed with the draft."""

    def __init__(self, run: Run, transformer: Transformer, settings: FastHybridSettings):
        self.table = run.table(settings.guided_steps)
        steps = len(self.table.steps)
        self.start, self.noise = run.draws("guided", steps)
        self.gamma = guidance_weights(settings.guidance_schedule, steps)

        # A step with gamma = 1 gives x' + sigma noise whatever the head predicts, so that the head is not evaluated:
        # the first step of most schedules, the last one of linear-up. A head with a cache starts with the first step
        # all the same.
        uncached = not transformer.caches_head(steps)
        self.first = 1 if uncached and self.gamma[0] == 1 else 0
        self.stop = steps - 1 if uncached and self.gamma[-1] == 1 and steps > 1 else steps

        # Log sigma of the first step: the middle of the learned range. The last step has no noise.
        self.log_sigma = self.table.steps[0].middle
        self.temperature = settings.temperature if steps > 1 else 0.0

    def batch(self, z: Tensor, cfg: Tensor, image: Tensor, position: Tensor, draft: Tensor) -> HeadBatch:
        """Tokens [N] with their drafts x' fp32 [N, channels], after a first step with gamma = 1."""
        x = self.start[image, position]
        noise = self.noise[:, image, position]
        if self.first:
            sigma = torch.full_like(draft, self.log_sigma).exp()
            x = draft + sigma * (noise[0] * self.temperature)
        return HeadBatch(z, cfg, x, noise, self.table, draft, self.gamma, self.first, self.stop)


def sample(
    run: Run, transformer: Transformer, full: HeadBatch | None, guided: HeadBatch | None
) -> tuple[Tensor | None, Tensor | None]:
    """Tokens fp32 [N, channels] of the full and of the guided diffusion; None for a batch that is None."""
    # LazyMAR's cache of the head belongs to one batch.
    cached = any(transformer.caches_head(len(batch.table.steps)) for batch in (full, guided) if batch is not None)
    of_full: Tensor | None
    of_guided: Tensor | None
    if full is not None and guided is not None and not cached:
        of_full, of_guided = denoise_together(run, full, guided)
    else:
        of_full = None if full is None else transformer.denoise(run, full)
        of_guided = None if guided is None else transformer.denoise(run, guided)

    # With gamma = 1 in the last step, which has no noise, a token is its draft.
    if guided is not None and guided.gamma[-1] == 1:
        of_guided = guided.draft
    return of_full, of_guided


def denoise_together(run: Run, full: HeadBatch, guided: HeadBatch) -> tuple[Tensor, Tensor]:
    """Sample two batches in one loop, so that the sequential head calls are those of the longer one.

    The batch with fewer steps joins for the last ones of the other.
    """
    # 1. The first steps of the longer one, alone.
    together = min(len(range(len(batch.table.steps))[batch.first : batch.stop]) for batch in (full, guided))
    full = advanced(run, full, together)
    guided = advanced(run, guided, together)

    # 2. The steps of both.
    head = Head(run.model.net, full, guided)
    x = full.x
    y = guided.x
    steps = zip(ancestral_steps(run, full), ancestral_steps(run, guided), strict=True)
    for k, (full_step, guided_step) in enumerate(steps):
        out = head(k, torch.cat([x, y]))
        x, _, _ = full_step(x, out[:, : len(x)])
        y, _, _ = guided_step(y, out[:, len(x) :])
    run.report.add(head_calls=together, head_rows=together * head.branches * head.tokens)
    return x, y


def advanced(run: Run, batch: HeadBatch, left: int) -> HeadBatch:
    """A batch after all of its steps but the last ``left``."""
    stop = len(batch.table.steps) if batch.stop is None else batch.stop
    first = stop - left
    if first == batch.first:
        return batch
    return replace(batch, x=denoise(run, replace(batch, stop=first)), first=first)


def guidance_weights(schedule: str, steps: int) -> tuple[float, ...]:
    """gamma_t for t = T_g .. 1 (the order of execution). The paper gives a formula for cos only; the others follow from
    their names.
    """
    weight = {
        "cos": lambda t: math.sin(math.pi / 2 * (t / steps)) ** 2,  # 1 - cos^2(pi t / 2 T_g)
        "linear-down": lambda t: t / steps,
        "square": lambda t: (t / steps) * (t / steps),
        "linear-up": lambda t: 1 - (t - 1) / steps,
        "none": lambda t: 0.0,
    }[schedule]
    return tuple(weight(t) for t in range(steps, 0, -1))
