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
from typing import NamedTuple

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
    transformer: Transformer | None = None,
    edit: Edit | None = None,
) -> Sampler:
    """FastHybrid on MAR; arguments and errors as of :func:`samplers.mar.mar.mar`.

    With ``lookahead`` 0 this is plain MAR bit for bit; with ``threshold`` above 1 every draft is rejected, and the
    result equals plain MAR within fp32 rounding.
    """
    transformer = transformer or FullTransformer()
    run = begin("fasthybrid", model, condition, settings, noise, edit, transformer)
    tables = annealed_tables(run, settings)
    if not settings.lookahead:
        yield from plain_steps(run, transformer, tables)
        return run.finish()

    start, full_noise = run.draws("full", len(run.tables.steps))
    guided = Guided(run, transformer, settings)
    drafts = Drafts(run, settings)
    cached = [transformer.caches_head(len(table.steps)) for table in tables]
    for step in range(run.plan.steps):
        # Lookaheads end at multiples of k, so that the images of a batch start their next ones together.
        k = settings.lookahead
        reach = 1 if step < settings.lookahead_start else k - step % k
        here = run.plan.ahead(step)  # [B, n]
        ahead = run.plan.ahead(step, reach)  # [B, m], the n first
        n = here.shape[1]
        with run.clock.phase("transformer"):
            z = transformer(run, step, ahead)  # [P, B, m, C]

        with run.clock.phase("head"):
            # 1. Verify: a draft is accepted if cos(z', z) >= lambda.
            ok = drafts.verify(here, z[0, :, :n].float())

            # 2. Lookahead: full diffusion of all other tokens and, for the images that have one, of all later steps in
            # reach.
            full = None
            restarts = (~ok).any(1, keepdim=True)
            todo = torch.cat([~ok, restarts.expand(-1, ahead.shape[1] - n)], 1)
            if bool(todo.any()):
                b, c = to_device(todo.nonzero().T, z.device)
                p = ahead[b, c]
                cfg = run.plan.scale[b, p, None]
                full = Placed(HeadBatch(z[:, b, c], cfg, start[b, p], full_noise[:, b, p], tables[step]), b, p)

            # 3. Refine: guided diffusion of the accepted tokens, mu' = (1 - gamma) mu + gamma x'.
            refined = guided.batch(z, here, ok, drafts.x)

            # 4. The tokens of both.
            sample(run, transformer, drafts, full, refined, cached[step] or guided.cached)
            run.tokens.scatter_(1, here[..., None].expand(-1, -1, drafts.x.shape[2]), pick(drafts.x, here))
        with run.clock.paused():
            yield run.step(step)

    run.report.similarity = drafts.similarity()
    return run.finish(drafts.outcome)


class Placed(NamedTuple):
    """N tokens to sample, and where they are."""

    batch: HeadBatch
    image: Tensor  # int64 [N]
    position: Tensor  # int64 [N]


class Drafts:
    """The drafts of all tokens, and which of them are accepted."""

    def __init__(self, run: Run, settings: FastHybridSettings):
        images, length, _ = run.tokens.shape
        device = run.tokens.device
        self.settings = settings
        self.report = run.report
        self.x = torch.zeros_like(run.tokens)  # x'
        # z', the condition that a draft was made from.
        self.z = torch.zeros(images, length, run.model.net.config.dim, device=device)
        self.made = torch.zeros(images, length, dtype=torch.bool, device=device)  # whether a token has a draft
        self.outcome = torch.full((images, length), PLAIN, dtype=torch.uint8, device=device)

        # Drafts of each image so far that were verified, and those that were accepted, int64 [B].
        self.verified = torch.zeros(images, dtype=torch.int64, device=device)
        self.accepted = torch.zeros_like(self.verified)
        # Of each AR step: cos(z', z) [B, n] on the device, and which tokens have a draft, bool [B, n] on the host.
        self._similarities: list[tuple[Tensor, Tensor]] = []

    def verify(self, here: Tensor, z: Tensor) -> Tensor:
        """Which tokens keep their drafts, bool [B, n] on the host: those with cos(z', z) >= lambda.

        ``here`` int64 [B, n] are the positions of an AR step, z fp32 [B, n, C] their conditions.
        """
        drafted = self.made.gather(1, here)
        cosine = F.cosine_similarity(pick(self.z, here), z, dim=-1)
        ok = drafted & (cosine >= self.settings.threshold)
        if self.settings.acceptance_target:
            ok = self._most_similar(drafted, cosine)

        outcome = torch.where(ok, ACCEPTED, torch.where(drafted, REDONE, PLAIN))
        self.outcome.scatter_(1, here, outcome.to(torch.uint8))
        ok, drafted = torch.stack([ok, drafted]).cpu()  # the host waits for the device here, and nowhere else
        self._similarities.append((cosine, drafted))

        redone = drafted & ~ok
        self.report.add(accepted=int(ok.sum()), rejected=int(redone.sum()), restarts=int(redone.any(1).sum()))
        return ok

    def _most_similar(self, drafted: Tensor, cosine: Tensor) -> Tensor:
        """Of each image the most similar drafts, as many as make up the share of all its drafts so far, bool [B, n]."""
        self.verified += drafted.sum(1)
        most = (self.settings.acceptance_target * self.verified).round() - self.accepted

        by_similarity = cosine.masked_fill(~drafted, -torch.inf).argsort(dim=1, descending=True, stable=True)
        rank = by_similarity.argsort(dim=1)
        ok = drafted & (rank < most[:, None])
        self.accepted += ok.sum(1)
        return ok

    def similarity(self) -> np.ndarray:
        """cos(z', z) of all verified drafts, fp32 [n]."""
        return np.concatenate([cosine.cpu()[drafted].numpy() for cosine, drafted in self._similarities])


class Guided:
    """The guided diffusion of accepted tokens: T_g steps whose means are mixed with the draft."""

    def __init__(self, run: Run, transformer: Transformer, settings: FastHybridSettings):
        self.run = run
        self.refines = settings.accepted == "refine"
        self.table = run.table(settings.guided_steps)
        steps = len(self.table.steps)
        self.start, self.noise = run.draws("guided", steps)
        self.gamma = guidance_weights(settings.guidance_schedule, steps)

        # A step with gamma = 1 gives x' + sigma noise whatever the head predicts, so that the head is not evaluated:
        # the first step of most schedules, the last one of linear-up. A head with a cache starts with the first step
        # all the same.
        self.cached = transformer.caches_head(steps)
        self.first = 1 if not self.cached and self.gamma[0] == 1 else 0
        self.stop = steps - 1 if not self.cached and self.gamma[-1] == 1 and steps > 1 else steps

        # Log sigma of the first step: the middle of the learned range. The last step has no noise.
        self.log_sigma = self.table.steps[0].middle
        self.temperature = settings.temperature if steps > 1 else 0.0

    def batch(self, z: Tensor, here: Tensor, ok: Tensor, drafts: Tensor) -> Placed | None:
        """The accepted tokens, after a first step with gamma = 1; None if there are none or if they stay as drafted.

        Args:
            z: conditions [P, B, m, C], of which the first n are those of ``here``.
            here: int64 [B, n], the positions of an AR step.
            ok: bool [B, n] on the host, which of them are accepted.
            drafts: x' of all positions, fp32 [B, L, channels].
        """
        if not self.refines or not bool(ok.any()):
            return None

        image, column = to_device(ok.nonzero().T, z.device)
        position = here[image, column]
        draft = drafts[image, position]
        cfg = self.run.plan.scale[image, position, None]
        noise = self.noise[:, image, position]
        x = self.start[image, position]
        if self.first:
            sigma = torch.full_like(draft, self.log_sigma).exp()
            x = draft + sigma * (noise[0] * self.temperature)

        of_tokens = z[:, image, column]
        batch = HeadBatch(of_tokens, cfg, x, noise, self.table, draft, self.gamma, self.first, self.stop)
        return Placed(batch, image, position)


def sample(
    run: Run, transformer: Transformer, drafts: Drafts, full: Placed | None, refined: Placed | None, cached: bool
) -> None:
    """Sample the tokens of the full and of the guided diffusion, each None for none, and write them to the drafts.

    ``cached``: whether LazyMAR caches the head, in a cache that belongs to one batch.
    """
    placed = [tokens for tokens in (full, refined) if tokens is not None]
    made: tuple[Tensor, ...]
    if full is not None and refined is not None and not cached:
        made = denoise_together(run, full.batch, refined.batch)
    else:
        made = tuple(transformer.denoise(run, tokens.batch) for tokens in placed)
    for tokens, x in zip(placed, made, strict=True):
        drafts.x[tokens.image, tokens.position] = x

    # Of later AR steps' tokens these are the drafts, and their z is z'.
    if full is not None:
        drafts.z[full.image, full.position] = full.batch.z[0].float()
        drafts.made[full.image, full.position] = True

    # With gamma = 1 in the last step, which has no noise, a token is its draft.
    if refined is not None and refined.batch.draft is not None and refined.batch.gamma[-1] == 1:
        drafts.x[refined.image, refined.position] = refined.batch.draft


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
        # Without gaps, as the output for one batch, or the compiler would make graphs of their own for these.
        of_full = out[:, : len(x)].contiguous()
        of_guided = out[:, len(x) :].contiguous()
        x, _, _ = full_step(x, of_full)
        y, _, _ = guided_step(y, of_guided)
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
