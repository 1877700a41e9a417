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
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...networks.mar import MARModel, pick
from ...networks.torch_state import in_own_state
from ...reports.record import ACCEPTED, PLAIN, REDONE
from ..chain import DiffusionBatch, MeanAdjustment
from ..conditioning import MaskedCondition
from ..device import to_device
from ..editing import Edit
from ..engine import Sampler, Verdict, decode, verified
from ..noise import PairedNoise
from .canvas import MARCanvas, Tokens, mar_canvas
from .mar import Diffusion, annealed_tables
from .network import FullTransformer, Transformer
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
        return (yield from decode(canvas, order.plan, transformer, plain))

    refinement = Refinement(canvas, settings)
    drafts = Drafts(canvas, settings)

    def segment(step: int) -> Iterator[Verdict]:
        """An AR step."""
        here = order.ahead(step)  # [B, n]
        ahead = order.ahead(step, settings.reach(step))  # [B, m], the n first
        n = here.shape[1]
        with canvas.clock.phase("transformer"):
            z = transformer(step, ahead)  # [P, B, m, C]

        with canvas.clock.phase("head"):
            # 1. Verify: a draft is accepted if cos(z', z) >= lambda.
            ok, outcome = drafts.verify(here, z[0, :, :n].float())

            # 2. Lookahead: full diffusion of the tokens of this step that are not accepted and, in an image that has
            # one, of all later steps in reach.
            restarts = (~ok).any(1, keepdim=True)
            redo = Tokens.where(torch.cat([~ok, restarts.expand(-1, ahead.shape[1] - n)], 1), ahead)
            z_redo = redo.conditions(z)
            full = canvas.chains(plain.tables[step], redo, z_redo, plain.noise)

            # 3. Refine: guided diffusion of the accepted tokens, mu' = (1 - gamma) mu + gamma x'.
            keep = Tokens.where(ok & refinement.refines, here)
            guided = refinement.chains(keep, z, drafts.x)

            # 4. Both in one loop.
            x_redo, x_keep = heads.sample_both(canvas.model.net, full, guided, canvas.report)
            drafts.renew(redo, x_redo, z_redo[0])
            keep.write(drafts.x, x_keep)
        yield Verdict(here, pick(drafts.x, here), step, outcome)

    yield from verified(canvas, 0, segment)
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

    def renew(self, tokens: Tokens, x: Tensor, z: Tensor) -> None:
        """Write values x fp32 [N, c] of tokens with conditions z [N, C]. Values for later AR steps are drafts."""
        tokens.write(self.x, x)
        tokens.write(self.z, z.float())
        self.made[tokens.image, tokens.position] = True

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
        self.temperature = settings.temperature
        self.table = canvas.table(settings.guided_steps)
        steps = len(self.table)
        self.noise = canvas.draws("guided")

        weights = guidance_weights(settings.guidance_schedule, steps)
        self.gamma = to_device(torch.tensor(weights), canvas.device)
        # The first step that evaluates the head; first_states makes the state before it without the head.
        if self.renoises:
            # Rounded down, as pipelines that draw from an image count their steps: 13 of 15 * 0.9.
            self.first_step = steps - int(round(steps * settings.denoise, 6))
            ends_in_drafts = False
        else:
            # A step with gamma = 1 gives x' + sigma noise whatever the head predicts: the first step of most schedules.
            self.first_step = 1 if weights[0] == 1 else 0
            # The last step has no noise: if its gamma is 1, as with linear-up or a single step, a token is its draft.
            ends_in_drafts = weights[-1] == 1

        # Without a step an accepted draft stays as it is.
        self.refines = settings.accepted != "keep" and not ends_in_drafts and self.first_step < steps

    def chains(self, tokens: Tokens, z: Tensor, drafts: Tensor) -> DiffusionBatch:
        """Accepted tokens in their states before the first step that needs the head.

        Args:
            z: conditions [P, B, m, C] of the positions from which the tokens were chosen.
            drafts: x' of all positions, fp32 [B, L, channels].
        """
        rows = self.canvas.chains(self.table, tokens, tokens.conditions(z), self.noise)
        draft = tokens.of(drafts)
        x = self.first_states(draft, rows.x, rows.noise)
        pull = None if self.renoises else MeanAdjustment([(draft, gamma) for gamma in self.gamma])
        return replace(rows, x=x, change=pull).part(self.first_step, len(self.table))

    def first_states(self, draft: Tensor, start: Tensor, noise: Tensor) -> Tensor:
        """States before the first step that needs the head, fp32 [N, channels].

        ``draft``, ``start``: drafts and the noise of the start, fp32 [N, channels]; ``noise``: of the steps, fp32
        [S, N, channels].
        """
        if not self.refines:
            return draft  # of no tokens

        if self.renoises:
            # x_t = sqrt(abar_t) x' + sqrt(1 - abar_t) noise; the table has 1 / sqrt(abar) and -sqrt(1 / abar - 1).
            numbers = self.table.columns()
            return (draft - numbers.data_out[self.first_step] * start) / numbers.data_x[self.first_step]

        if self.first_step:
            # Sigma of a step whose logits are not computed: the middle of the learned range, with the temperature.
            log_sigma = self.table.columns().middle[0]
            return draft + log_sigma.exp() * self.temperature * noise[0]

        return start


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
