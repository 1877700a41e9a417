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
are plain MAR's.

The transformer runs at every AR step as in plain MAR, so a restarted lookahead costs no further transformer pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_loaders.networks.mar import MARModel, pick
from ...reports.record import ACCEPTED, PLAIN, REDONE
from ..conditioning import MaskedCondition
from ..noise import Noise, copied
from .denoiser import RowNoise
from .diffusion import Ancestral
from .disa import annealed_tables
from .editing import Edit
from .head import PlainHead, denoisers
from .loop import Conditions, Head, HeadRows, Run, Sampler, Transformer, begin, generate
from .settings import FastHybridSettings
from .transformer import FullTransformer


def guidance_weights(schedule: str, steps: int) -> tuple[float, ...]:
    """gamma_t for t = T_g .. 1 (the order of execution).

    cos: 1 - cos^2(pi t / 2 T_g); linear-down: t / T_g; square: (t / T_g)^2; linear-up: 1 - (t - 1) / T_g; none: 0.
    The first three start at 1. The paper gives a formula for cos only; the others follow from their names.
    """
    times = range(steps, 0, -1)
    forms = {
        "cos": lambda u, t: math.sin(math.pi / 2 * u) ** 2,
        "linear-down": lambda u, t: u,
        "square": lambda u, t: u * u,
        "linear-up": lambda u, t: 1 - (t - 1) / steps,
        "none": lambda u, t: 0.0,
    }
    return tuple(forms[schedule](t / steps, t) for t in times)


class Guided(Ancestral):
    """The guided step: mu' = (1 - gamma) mu + gamma x', or the same mixture of the predicted x0.

    Args:
        rule: the unguided step.
        draft: x', fp32 [N, channels].
        weights: gamma of every executed step, highest timestep first.
        space: "mean" (the paper's formula) or "x0".
    """

    def __init__(self, rule: Ancestral, draft: Tensor, weights: tuple[float, ...], space: str):
        self.take(rule)
        self.draft, self.weights, self.space = draft, weights, space

    def free(self, k: int) -> bool:
        """Whether gamma is 1 at executed step ``k``."""
        return self.weights[k] == 1

    def linear(self, k: int) -> tuple[float, float]:
        """Coefficients of x and eps in mu'."""
        recip, recipm1, coef1, coef2, _ = self.coefficients[k]
        own = 1 - self.weights[k]
        if self.space == "x0":  # x0' = (1 - gamma) x0 + gamma x'
            return own * coef1 * recip + coef2, own * coef1 * recipm1
        return own * (coef1 * recip + coef2), own * coef1 * recipm1  # mu' = (1 - gamma) mu + gamma x'

    def of_draft(self, k: int) -> float:
        """Coefficient of x' in mu'."""
        return self.weights[k] * (self.coefficients[k][2] if self.space == "x0" else 1)


class LookaheadHead:
    """The head plug: drafts x', the conditions z' they were made from, and their verification, for one generation."""

    def __init__(self, run: Run, transformer: Transformer, settings: FastHybridSettings):
        self.settings = s = settings
        self.tables, few = annealed_tables(run, s), run.table(s.guided_steps, run.t_max)
        self.full, self.few = denoisers(run, transformer, self.tables), transformer.denoiser(run, few)
        self.full_noise, self.few_noise = RowNoise(run, "full", run.tables), RowNoise(run, "guided", few)
        self.weights = guidance_weights(s.guidance_schedule, len(few))
        batch, length = run.tokens.shape[:2]
        device = run.tokens.device
        self.draft = torch.zeros_like(run.tokens)  # x'
        self.z_draft: Tensor | None = None  # z', allocated with the first z
        self.has = torch.zeros(batch, length, dtype=torch.bool, device=device)
        self.outcome = torch.full((batch, length), PLAIN, dtype=torch.uint8, device=device)
        self.scale = torch.zeros(length, device=device)  # guidance scale of the row's own AR step, by reveal rank
        for step in range(run.plan.steps):
            self.scale[run.plan.starts[step] : run.plan.ends[step]] = run.plan.cfg[step]
        self.similarities: list[tuple[Tensor, Tensor]] = []  # cosines of a step, and which are those of drafts

    def reach(self, step: int) -> int:
        """AR steps up to the next multiple of k: the images of a batch restart their lookaheads together there.

        1 before ``lookahead_start``: such a step drafts nothing.
        """
        k = self.settings.lookahead
        return 1 if step < self.settings.lookahead_start else k - step % k

    def __call__(self, run: Run, step: int, z: Conditions) -> Tensor:
        """Tokens [B, n, channels] of an AR step."""
        where = run.plan.ahead(step)
        had = self.has.gather(1, where)
        # 1. verify. The only time in an AR step that the host waits for the device.
        ok, old = torch.stack([self.verify(run, where, z.cond[:, : where.shape[1]]), had]).cpu().numpy()
        accepted, fresh = int(ok.sum()), int((~old).sum())
        rejected = ok.size - accepted - fresh
        run.report.add(accepted=accepted, rejected=rejected, restarts=int((old & ~ok).any(axis=1).sum()))
        full = self.lookahead(run, step, z, ~ok) if accepted < ok.size else None
        few = self.refine(run, step, z, ok) if accepted and self.settings.accepted == "refine" else None
        # 2. lookahead and 3. refine, in one loop where both are due
        made: tuple[Tensor, ...]
        if full and few:
            made = self.full[step].together(full.rows, self.few, few.rows)
        else:
            made = tuple(d(*due.rows) for d, due in ((self.full[step], full), (self.few, few)) if due)
        for due, tokens in zip(filter(None, (full, few)), made, strict=True):
            self.draft[due.image, due.position] = tokens
        if step + 1 == run.plan.steps:
            grid = run.model.net.config.grid
            run.report.maps["outcome"] = self.outcome.view(-1, grid, grid).cpu().numpy()
            cosine, drafted = (torch.cat([x.flatten() for x in part]) for part in zip(*self.similarities, strict=True))
            run.report.similarity = cosine.float().cpu().numpy().astype(np.float32)[drafted.cpu().numpy()]
        return pick(self.draft, where)

    def verify(self, run: Run, where: Tensor, z: Tensor) -> Tensor:
        """bool [B, n]: tokens at positions ``where`` whose draft is kept, cos(z', z) >= lambda, for z [B, n, C]."""
        if self.z_draft is None:
            self.z_draft = torch.zeros(*self.draft.shape[:2], z.shape[2], device=z.device)
        old, new = pick(self.z_draft, where), z.float()
        if self.settings.similarity == "without position":
            place = run.model.net.diffusion_pos_embed_learned.float().expand(len(z), -1, -1)
            old, new = old - pick(place, where), new - pick(place, where)
        cosine = F.cosine_similarity(old, new, dim=-1)
        has = self.has.gather(1, where)
        ok = has & (cosine >= self.settings.threshold)
        if self.settings.verify == "step":
            ok &= (ok | ~has).all(dim=1, keepdim=True)
        self.similarities.append((cosine, has))
        self.outcome.scatter_(1, where, torch.where(ok, ACCEPTED, torch.where(has, REDONE, PLAIN)).to(torch.uint8))
        return ok

    def lookahead(self, run: Run, step: int, z: Conditions, bad: np.ndarray) -> _Due:
        """Full diffusion of the ``bad`` [B, n] tokens and, for their images, of every later step in reach."""
        where = run.plan.ahead(step, self.reach(step))
        todo = np.repeat(bad.any(axis=1, keepdims=True), where.shape[1], axis=1)
        todo[:, : bad.shape[1]] = bad
        image, column = _places(todo, where.device)
        position, rows = where[image, column], z.at(image, column)
        assert self.z_draft is not None
        self.z_draft[image, position] = rows.cond.float()
        self.has[image, position] = True
        scale = self.scale[run.plan.starts[step] + column][:, None]
        noise = self.full_noise.spaced(image, position, len(self.tables[step]))
        return _Due(image, position, HeadRows(rows, scale, *noise))

    def refine(self, run: Run, step: int, z: Conditions, ok: np.ndarray) -> _Due:
        """Guided diffusion of the accepted tokens ``ok`` [B, n] from their drafts."""
        image, column = _places(ok, z.cond.device)
        position = run.plan.ahead(step)[image, column]
        scale = self.scale[run.plan.starts[step] + column][:, None]
        noise = self.few_noise(image, position)
        rule = Guided(self.few.rule, self.draft[image, position], self.weights, self.settings.guidance_space)
        return _Due(image, position, HeadRows(z.at(image, column), scale, *noise, rule))


def _places(mask: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Image and column, int64 [N] each, of the true entries of bool [B, n]."""
    image, column = copied(torch.from_numpy(np.stack(mask.nonzero())), device)
    return image, column


class _Due(NamedTuple):
    """Tokens to denoise: image and position int64 [N], and their head rows."""

    image: Tensor
    position: Tensor
    rows: HeadRows


def fasthybrid(
    model: MARModel,
    condition: MaskedCondition,
    settings: FastHybridSettings,
    noise: Noise,
    seed: int | None = None,
    transformer: Transformer | None = None,
    edit: Edit | None = None,
) -> Sampler:
    """FastHybrid on MAR.

    With ``lookahead`` 0 this is plain MAR bit for bit; with ``threshold`` above 1 every draft is made and thrown away,
    and the result equals plain MAR within fp32 rounding.

    Args:
        model, condition, noise, seed: as :func:`samplers.mar.mar.mar`.
        settings: see :class:`FastHybridSettings`.
        transformer: how the transformer is evaluated; None for in full.
        edit: part of a picture to sample again; None for a whole new one.
    """
    run = begin("fasthybrid", model, condition, settings, noise, seed, edit)
    transformer = transformer or FullTransformer()
    with torch.no_grad():
        if settings.lookahead:
            head: Head = LookaheadHead(run, transformer, settings)
        else:
            head = PlainHead(run, transformer, annealed_tables(run, settings))
    return (yield from generate(run, transformer, head))
