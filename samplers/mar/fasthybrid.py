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

import numpy as np
import torch
import torch.nn.functional as F

from ...model_loaders.networks.mar import MARModel, pick
from ...reports.record import ACCEPTED, PLAIN, REDONE
from ..conditioning import MaskedCondition
from ..driver import to_device
from ..editing import Edit
from ..noise import PairedNoise
from .diffusion import HeadBatch, denoise
from .loop import FullTransformer, Sampler, Transformer, begin
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
    full, few = annealed_tables(run, s), run.table(s.guided_steps)
    gamma = guidance_weights(s.guidance_schedule, len(few))
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
            batches, places = [], []
            rest = (~ok).any(1, keepdim=True).expand(-1, ahead.shape[1] - n)
            todo = torch.cat([~ok, rest], 1)
            if bool(todo.any()):
                b, c = to_device(todo.nonzero().T, draft.device)
                p = ahead[b, c]
                batches.append(
                    HeadBatch(z[:, b, c], plan.scale[b, p, None], start[b, p], full_noise[:, b, p], full[step])
                )
                z_draft[b, p], drafted[b, p] = z[0, b, c].float(), True
                places.append((b, p))
            # 3. Refine: guided diffusion of the accepted tokens, mu' = (1 - gamma) mu + gamma x'.
            if bool(ok.any()) and s.accepted == "refine":
                b, c = to_device(ok.nonzero().T, draft.device)
                p = here[b, c]
                of = (z[:, b, c], plan.scale[b, p, None], guided_start[b, p], guided_noise[:, b, p], few)
                batches.append(HeadBatch(*of, draft[b, p], gamma))
                places.append((b, p))
            for (b, p), made in zip(places, denoise(run, *batches) if batches else [], strict=True):
                draft[b, p] = made
            run.tokens.scatter_(1, here[..., None].expand(-1, -1, draft.shape[2]), pick(draft, here))
        redone = had & ~ok
        run.report.add(accepted=int(ok.sum()), rejected=int(redone.sum()), restarts=int(redone.any(1).sum()))
        with run.clock.paused():
            yield run.step(step)
    run.report.similarity = np.concatenate([cosine.cpu()[had].numpy() for cosine, had in similarities])
    return run.finish(outcome)


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
