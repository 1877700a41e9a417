"""FastHybrid: lookahead drafts, verification by similarity, guided few-step refinement.

Source: "FastHybrid: Accelerating Hybrid Autoregressive Image Generation with Lookahead and Guided Decoding" (CVPR
2026). No code was published; choices that the paper leaves open are settings (see :class:`FastHybridSettings`).

At AR step s, with z the transformer's output for the positions of steps s to s + k - 1:

1. *verify*: a token of step s keeps its draft if cos(z', z) >= lambda, where z' is the condition its draft was made
   from;
2. *lookahead*: all other tokens of step s, and for their images all tokens of the k - 1 following steps, are sampled by
   a full diffusion pass of T steps; the latter are the drafts x' of these steps, and their z is z';
3. *refine*: accepted tokens are sampled by T_g guided diffusion steps, whose means are mixed with the draft,
   mu'_t = (1 - gamma_t) mu_t + gamma_t x'. A step with gamma_t = 1 does not depend on the head and skips it. With
   ``accepted`` *renoise* noise is added to the draft instead, and removed in the last of T_g steps.

Guided steps have noise of their own: with entries of the noise that made the draft, accepted tokens were no closer to
plain MAR's. The transformer runs at every AR step as in plain MAR, so a restarted lookahead costs no further
transformer pass.

Not in the paper: with ``align_lookaheads`` every lookahead ends at the next multiple of k, so that the images of a
batch start their next ones together, which halves their sequential head calls. With ``lookahead_start`` the first AR
steps are plain MAR's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...networks.mar import MARModel, pick
from ...networks.ops import to_device
from ...networks.torch_state import in_own_state
from ...reports.record import ACCEPTED, PLAIN, REDONE
from ..chain import DiffusionBatch, MeanAdjustment, spread
from ..conditioning import MaskedCondition
from ..editing import Edit
from ..engine import Sampler, decode
from ..noise import PairedNoise
from .canvas import MARCanvas, TokenNoise, Tokens, mar_canvas
from .mar import Diffusion, FullTransformer, Transformer, annealed_tables
from .settings import FastHybridSettings


@in_own_state
@torch.no_grad()
def fasthybrid(
    model: MARModel,
    condition: MaskedCondition,
    settings: FastHybridSettings,
    noise: PairedNoise,
    make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
    edit: Edit | None = None,
) -> Sampler:
    """FastHybrid on MAR; see :func:`samplers.mar.mar.mar` for arguments and errors.

    With ``lookahead`` 0 this is plain MAR bit for bit; with ``threshold`` above 1 every draft is rejected, and the
    result equals plain MAR within fp32 rounding.
    """
    canvas = mar_canvas("fasthybrid", model, condition, settings, noise, edit)
    order = canvas.order
    transformer = make_transformer(canvas)
    heads = transformer.heads
    plain = Diffusion(canvas, heads, annealed_tables(canvas, settings))
    if not settings.lookahead:
        yield from decode(canvas, order.plan, transformer, plain)
        return canvas.finish()

    refinement = Refinement(canvas, settings)
    drafts = Drafts(canvas, settings)
    reach = [settings.reach(step) for step in range(order.steps)]  # AR steps of a lookahead that starts here

    for step in range(order.steps):
        here = order.ahead(step)  # [B, n]
        ahead = order.ahead(step, reach[step])  # [B, m], the n first
        n = here.shape[1]
        with canvas.clock.phase("transformer"):
            z = transformer(step, ahead)  # [P, B, m, C]

        with canvas.clock.phase("head"):
            # 1. Verify: a draft is accepted if cos(z', z) >= lambda.
            ok, outcome = drafts.verify(here, z[0, :, :n].float())

            # 2. Lookahead: full diffusion of the tokens of this step that are not accepted and, in an image that has
            # one, of all later steps in reach.
            restarts = (~ok).any(1, keepdim=True)
            not_accepted = Tokens.where(torch.cat([~ok, restarts.expand(-1, ahead.shape[1] - n)], 1), ahead)
            full = canvas.batch(plain.tables[step], not_accepted, z, plain.noise)

            # 3. Refine: guided diffusion of the accepted tokens, mu' = (1 - gamma) mu + gamma x'.
            accepted = Tokens.where(ok & refinement.refines, here)
            guided = refinement.batch(accepted, z, drafts.x)

            # 4. Both in one loop.
            sampled, refined = heads.sample_both(full, guided)
            drafts.x[not_accepted.index] = sampled
            drafts.z[not_accepted.index] = full.z[0].float()
            drafts.made[not_accepted.index] = True
            drafts.x[accepted.index] = refined

        canvas.decide(here, pick(drafts.x, here), step, outcome)
        yield from canvas.show(step + 1)

    canvas.report.similarity = drafts.similarity()
    return canvas.finish()


class Drafts:
    """The drafts of all tokens, and which of them are accepted."""

    def __init__(self, canvas: MARCanvas, settings: FastHybridSettings):
        images, length, _ = canvas.values.shape
        device = canvas.device
        self.settings = settings
        self.report = canvas.report
        self.x = torch.zeros_like(canvas.values)  # x', or the token after it was decided
        # z', the condition that a draft was made from.
        self.z = torch.zeros(images, length, canvas.model.net.config.dim, device=device)
        self.made = torch.zeros(images, length, dtype=torch.bool, device=device)  # whether a token has a draft

        # For each AR step cos(z', z) [B, n] on the device, and bool [B, n] on the host, whether a token had a draft.
        self._similarities: list[tuple[Tensor, Tensor]] = []

    def verify(self, here: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Accept drafts with cos(z', z) >= lambda. Returns which tokens are accepted, bool [B, n] on the host, and the
        outcome of each token, uint8 [B, n].

        ``here``: positions of an AR step, int64 [B, n]; ``z``: their conditions, fp32 [B, n, C].
        """
        drafted = self.made.gather(1, here)
        cosine = F.cosine_similarity(pick(self.z, here), z, dim=-1)
        ok = drafted & (cosine >= self.settings.threshold)

        outcome = torch.where(ok, ACCEPTED, torch.where(drafted, REDONE, PLAIN)).to(torch.uint8)
        ok, drafted = torch.stack([ok, drafted]).cpu()  # the host waits for the device here, and nowhere else
        self._similarities.append((cosine, drafted))

        redone = drafted & ~ok
        self.report.add(accepted=int(ok.sum()), rejected=int(redone.sum()), restarts=int(redone.any(1).sum()))
        return ok, outcome

    def similarity(self) -> np.ndarray:
        """cos(z', z) of all verified drafts, fp32 [n]."""
        return np.concatenate([cosine.cpu()[drafted].numpy() for cosine, drafted in self._similarities])


class Refinement:
    """The few-step diffusion of accepted tokens: T_g steps whose means are mixed with the draft, or with *renoise* the
    last of T_g steps, from the draft with noise.
    """

    def __init__(self, canvas: MARCanvas, settings: FastHybridSettings):
        self.canvas = canvas
        self.renoises = settings.accepted == "renoise"
        table = canvas.table(settings.guided_steps)
        steps = len(table)
        noise = canvas.draws("guided")

        # 1. How many steps are skipped, because the state after them follows without the head.
        weights = guidance_weights(settings.guidance_schedule, steps)
        if self.renoises:
            # Rounded down, as pipelines that start from an image count their steps: 13 of 15 * 0.9 are run.
            skipped = steps - int(round(steps * settings.denoise, 6))
            ends_in_drafts = False
        else:
            # A step with gamma = 1 gives x' + sigma noise whatever the head predicts: the first step of most schedules.
            skipped = 1 if weights[0] == 1 else 0
            # The last step has no noise: if its gamma is 1, as with linear-up or a single step, a token is its draft.
            ends_in_drafts = weights[-1] == 1
        self.skips = skipped > 0
        # Without a step an accepted draft stays as it is.
        self.refines = settings.accepted != "keep" and not ends_in_drafts and skipped < steps

        # 2. The steps that are run.
        of_steps = spread(noise.steps, steps)
        self.table = table.part(skipped, steps)
        self.noise = TokenNoise(noise.start, of_steps[skipped:])
        self.gamma = to_device(torch.tensor(weights[skipped:]), canvas.device)

        # 3. What the state before them is made of, see batch().
        numbers = table.columns()
        self.first_noise = of_steps[0]
        # Sigma of a step whose logits are not computed: the middle of the learned range, with the temperature.
        self.first_std = numbers.middle[0].exp() * settings.temperature
        first = min(skipped, steps - 1)
        self.data_x = numbers.data_x[first]  # 1 / sqrt(abar_t)
        self.data_out = numbers.data_out[first]  # -sqrt(1 / abar_t - 1)

    def batch(self, tokens: Tokens, z: Tensor, drafts: Tensor) -> DiffusionBatch:
        """Accepted tokens in their states before the first step that needs the head.

        Args:
            z: conditions [P, B, m, C] of the positions from which the tokens were chosen.
            drafts: x' of all positions, fp32 [B, L, channels].
        """
        batch = self.canvas.batch(self.table, tokens, z, self.noise)
        draft = drafts[tokens.index]
        if self.renoises:
            # x_t = sqrt(abar_t) x' + sqrt(1 - abar_t) noise
            return replace(batch, x=(draft - self.data_out * batch.x) / self.data_x)

        x = batch.x
        if self.skips:
            x = draft + self.first_std * self.first_noise[tokens.index]
        return replace(batch, x=x, change=MeanAdjustment(draft, self.gamma))


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
