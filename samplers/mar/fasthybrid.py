"""FastHybrid: lookahead drafts, verification by similarity, guided few-step refinement.

Source: "FastHybrid: Accelerating Hybrid Autoregressive Image Generation with Lookahead and Guided Decoding" (CVPR 2026).
No code was published; choices that the paper leaves open are settings (see :class:`FastHybridSettings`).

At AR step s, with z the transformer's output for the positions of step s and of those up to the next multiple of k:

1. *verify*: a token of step s keeps its draft if cos(z', z) >= lambda, where z' is the condition its draft was made from;
2. *lookahead*: all other tokens of step s, and for their images all tokens of the following steps up to the next multiple
   of k, are sampled by a full diffusion pass of T steps; the latter are the drafts x' of these steps, with z' = z;
3. *refine*: accepted tokens are sampled by T_g guided diffusion steps, whose means are mixed with the draft:
   mu'_t = (1 - gamma_t) mu_t + gamma_t x'. A step with gamma_t = 1 does not depend on the head and skips it.

Lookaheads end at multiples of k, so that the images of a batch start their next ones together: the number of sequential head
calls of a batch then stays near that of one image. Guided steps have noise of their own: with entries of the noise that made the
draft, accepted tokens were no closer to plain MAR's. With ``lookahead_start``, which the paper does not have, the first AR steps
are plain MAR's. Nor does the paper have ``acceptance_target``, which takes the place of lambda: of the
drafts of an image, those of a step that are most similar are kept, as many as make up the share of all its drafts so far. This is
lambda as a quantile; a fixed lambda keeps all drafts of one image and none of another. The transformer runs at every AR step as in plain
MAR, so a restarted lookahead costs no further transformer pass.
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

    With ``lookahead`` 0 this is plain MAR bit for bit; with ``threshold`` above 1 every draft is rejected, and the result equals
    plain MAR within fp32 rounding.
    """
    transformer = transformer or FullTransformer()
    run, s = begin("fasthybrid", model, condition, settings, noise, seed, edit, transformer), settings
    if not s.lookahead:
        yield from plain_steps(run, transformer, annealed_tables(run, s))
        return run.finish()
    plan, (B, L, _), net = run.plan, run.tokens.shape, run.model.net
    tables = annealed_tables(run, s)
    few = run.table(s.guided_steps)
    gamma = guidance_weights(s.guidance_schedule, len(few))
    # A step with gamma = 1 gives x' + sigma noise, whatever the head predicts: the first one, or the last one of linear-up. The head is not
    # evaluated there, unless it has a cache, which starts with the first step. Sigma is the middle of the learned range.
    uncached = not transformer.caches_head(len(few))
    skips_first = uncached and gamma[0] == 1
    skips_last = uncached and gamma[-1] == 1 and len(few) > 1
    first_guided = int(skips_first)
    stop_guided = len(few) - int(skips_last)
    _, _, _, _, middle, _ = few.steps[0]
    sigma = s.temperature * math.exp(middle) if len(few) > 1 else 0.0  # the last step has no noise
    start, full_noise = run.draws("full", len(run.tables))
    guided_start, guided_noise = run.draws("guided", len(few))
    draft = torch.zeros_like(run.tokens)  # x'
    z_draft = torch.zeros(B, L, net.config.dim, device=draft.device)  # z', the condition that a draft was made from
    drafted = torch.zeros(B, L, dtype=torch.bool, device=draft.device)
    outcome = torch.full((B, L), PLAIN, dtype=torch.uint8, device=draft.device)
    similarities = []
    met = kept = torch.zeros(B, dtype=torch.int64, device=draft.device)  # drafts that were verified, and accepted
    for step in range(plan.steps):
        # Lookaheads end at multiples of k, so that the images of a batch start their next ones together.
        reach = 1 if step < s.lookahead_start else s.lookahead - step % s.lookahead
        here, ahead = plan.ahead(step), plan.ahead(step, reach)  # [B, n] and [B, m], the n first
        with run.clock.phase("transformer"):
            z = transformer(run, step, ahead)  # [P, B, m, C]
        with run.clock.phase("head"):
            # 1. Verify: a draft is accepted if cos(z', z) >= lambda.
            had, n = drafted.gather(1, here), here.shape[1]
            cosine = F.cosine_similarity(pick(z_draft, here), z[0, :, :n].float(), dim=-1)
            ok = had & (cosine >= s.threshold)
            if s.acceptance_target:
                met = met + had.sum(1)
                rank = cosine.masked_fill(~had, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
                ok = had & (rank < ((s.acceptance_target * met).round() - kept)[:, None])
                kept = kept + ok.sum(1)
            outcome.scatter_(1, here, torch.where(ok, ACCEPTED, torch.where(had, REDONE, PLAIN)).to(torch.uint8))
            ok, had = torch.stack([ok, had]).cpu()  # the host waits for the device here, and nowhere else
            similarities.append((cosine, had))
            # 2. Lookahead: full diffusion of all other tokens and, for their images, of all later steps in reach.
            full = guided = None
            rest = (~ok).any(1, keepdim=True).expand(-1, ahead.shape[1] - n)
            todo = torch.cat([~ok, rest], 1)
            if bool(todo.any()):
                b, c = to_device(todo.nonzero().T, draft.device)
                p = ahead[b, c]
                full = HeadBatch(z[:, b, c], plan.scale[b, p, None], start[b, p], full_noise[:, b, p], tables[step])
                full_at = (b, p)
                z_draft[b, p] = z[0, b, c].float()
                drafted[b, p] = True

            # 3. Refine: guided diffusion of the accepted tokens, mu' = (1 - gamma) mu + gamma x'.
            if bool(ok.any()) and s.accepted == "refine":
                b, c = to_device(ok.nonzero().T, draft.device)
                p = here[b, c]
                x = guided_start[b, p]
                if skips_first:  # gamma = 1
                    x = draft[b, p] + sigma * guided_noise[0, b, p]
                scale = plan.scale[b, p, None]
                guided = HeadBatch(
                    z[:, b, c], scale, x, guided_noise[:, b, p], few, draft[b, p], gamma, first_guided, stop_guided
                )
                guided_at = (b, p)

            # The tokens of both. With gamma = 1 in the last step, which has no noise, a refined token is its draft.
            of_full, of_guided = sample(run, transformer, full, guided)
            if of_full is not None:
                draft[full_at] = of_full
            if of_guided is not None and gamma[-1] < 1:
                draft[guided_at] = of_guided
            run.tokens.scatter_(1, here[..., None].expand(-1, -1, draft.shape[2]), pick(draft, here))
        redone = had & ~ok
        run.report.add(accepted=int(ok.sum()), rejected=int(redone.sum()), restarts=int(redone.any(1).sum()))
        with run.clock.paused():
            yield run.step(step)
    run.report.similarity = np.concatenate([cosine.cpu()[had].numpy() for cosine, had in similarities])
    return run.finish(outcome)


def sample(
    run: Run, transformer: Transformer, full: HeadBatch | None, guided: HeadBatch | None
) -> tuple[Tensor | None, Tensor | None]:
    """Tokens fp32 [N, channels] of the full and of the guided diffusion; None for a batch that is None."""
    if full is not None and guided is not None:
        if not any(transformer.caches_head(len(batch.table.steps)) for batch in (full, guided)):
            return denoise_together(run, full, guided)
    # LazyMAR's cache of the head belongs to one batch.
    of_full = None if full is None else transformer.denoise(run, full)
    of_guided = None if guided is None else transformer.denoise(run, guided)
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
    """gamma_t for t = T_g .. 1 (the order of execution). The paper gives a formula for cos only; the others follow from their names."""
    weight = {
        "cos": lambda t: math.sin(math.pi / 2 * (t / steps)) ** 2,  # 1 - cos^2(pi t / 2 T_g)
        "linear-down": lambda t: t / steps,
        "square": lambda t: (t / steps) * (t / steps),
        "linear-up": lambda t: 1 - (t - 1) / steps,
        "none": lambda t: 0.0,
    }[schedule]
    return tuple(weight(t) for t in range(steps, 0, -1))
