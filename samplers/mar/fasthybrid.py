"""FastHybrid: draft a few AR steps ahead in one diffusion pass, verify each draft against the real condition, refine
the accepted ones in a few guided steps.

Source: "FastHybrid: Accelerating Hybrid Autoregressive Image Generation with Lookahead and Guided Decoding" (CVPR 2026).
No code was published; where the paper is silent the choice is a setting (see :class:`FastHybridSettings`).

A draft is stale, never wrong: at every AR step the transformer runs as in plain MAR, so the z that exposes a divergence
is also the z of the next lookahead and a restart costs no extra transformer pass.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_loaders.networks.mar import MARModel, pick
from ...reports.record import ACCEPTED, PLAIN, REDONE
from ..conditioning import Condition
from ..noise import Noise
from .denoiser import RowNoise
from .diffusion import tables
from .editing import Edit
from .loop import Conditions, Run, Sampler, Transformer, begin, generate, rows_of
from .mar import PlainHead
from .settings import FastHybridSettings
from .transformer import FullTransformer


def guidance_weights(schedule: str, steps: int) -> tuple[float, ...]:
    """gamma_t for t = T_g .. 1 (the order of execution).

    cos: 1 - cos^2(pi t / 2 T_g); linear-down: t / T_g; square: (t / T_g)^2; linear-up: 1 - (t - 1) / T_g; none: 0.
    The first three start at 1. The paper gives a formula for cos only; the others are read off their names.
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


class LookaheadHead:
    """The head plug: drafts, their conditions and the decision which to keep, for one generation."""

    def __init__(self, run: Run, transformer: Transformer):
        assert isinstance(run.settings, FastHybridSettings)
        self.settings = s = run.settings
        self.reach = s.lookahead
        few = tables(s.guided_steps, run.t_max)
        self.full, self.full_noise = transformer.denoiser(run, run.tables), RowNoise(run, "full", run.tables)
        self.few, self.few_noise = transformer.denoiser(run, few), RowNoise(run, "guided", few)
        self.pull = guidance_weights(s.guidance_schedule, len(few))
        batch, length = run.tokens.shape[:2]
        device = run.tokens.device
        self.draft = torch.zeros_like(run.tokens)  # x'
        self.seen: Tensor | None = None  # z', allocated with the first z
        self.has = torch.zeros(batch, length, dtype=torch.bool, device=device)
        self.outcome = torch.full((batch, length), PLAIN, dtype=torch.uint8, device=device)
        self.scale = torch.zeros(length, device=device)  # guidance scale of the row's own AR step, by reveal rank
        for step in range(run.plan.steps):
            self.scale[run.plan.starts[step] : run.plan.ends[step]] = run.plan.cfg[step]
        self.similarities: list[Tensor] = []

    def verify(self, run: Run, where: Tensor, z: Tensor) -> Tensor:
        """bool [B, n]: drafts at positions ``where`` whose condition is still close enough to ``z`` [B, n, C]."""
        if self.seen is None:
            self.seen = torch.zeros(*self.draft.shape[:2], z.shape[2], device=z.device)
        old, new = pick(self.seen, where), z.float()
        if self.settings.similarity == "without position":
            place = run.model.net.diffusion_pos_embed_learned.float().expand(len(z), -1, -1)
            old, new = old - pick(place, where), new - pick(place, where)
        cosine = F.cosine_similarity(old, new, dim=-1)
        has = self.has.gather(1, where)
        ok = has & (cosine >= self.settings.threshold)
        if self.settings.verify == "step":
            ok &= (ok | ~has).all(dim=1, keepdim=True)
        self.similarities.append(cosine[has])
        self.outcome.scatter_(1, where, torch.where(ok, ACCEPTED, torch.where(has, REDONE, PLAIN)).to(torch.uint8))
        return ok

    def lookahead(self, run: Run, step: int, z: Conditions, bad: Tensor) -> None:
        """Full diffusion of the ``bad`` [B, n] tokens and, for their images, of every later step in reach."""
        where = run.plan.ahead(step, self.reach)
        todo = bad.any(dim=1, keepdim=True).expand(-1, where.shape[1]).clone()
        todo[:, : bad.shape[1]] = bad
        image, column = todo.nonzero(as_tuple=True)
        position = where[image, column]
        rows = rows_of(z, image, column)
        scale = self.scale[run.plan.starts[step] + column][:, None]
        self.draft[image, position] = self.full(rows, scale, *self.full_noise(image, position))
        assert self.seen is not None
        self.seen[image, position] = rows.cond.float()
        self.has[image, position] = True

    def refine(self, run: Run, step: int, z: Conditions, ok: Tensor) -> None:
        """Guided few-step diffusion of the accepted tokens; each becomes its draft's successor."""
        image, column = ok.nonzero(as_tuple=True)
        position = run.plan.ahead(step)[image, column]
        scale = self.scale[run.plan.starts[step] + column][:, None]
        self.draft[image, position] = self.few(
            rows_of(z, image, column),
            scale,
            *self.few_noise(image, position),
            draft=self.draft[image, position],
            pull=self.pull,
            space=self.settings.guidance_space,
        )

    def __call__(self, run: Run, step: int, z: Conditions) -> Tensor:
        where = run.plan.ahead(step)
        had = self.has.gather(1, where)
        ok = self.verify(run, where, z.cond[:, : where.shape[1]])
        accepted, fresh = int(ok.sum()), int((~had).sum())
        rejected = ok.numel() - accepted - fresh
        run.report.add(accepted=accepted, rejected=rejected, restarts=int((had & ~ok).any(dim=1).sum()))
        if accepted < ok.numel():
            self.lookahead(run, step, z, ~ok)
        if accepted and self.settings.accepted == "refine":
            self.refine(run, step, z, ok)
        if step + 1 == run.plan.steps:
            grid = run.model.net.config.grid
            run.report.maps["outcome"] = self.outcome.view(-1, grid, grid).cpu().numpy()
            run.report.similarity = torch.cat(self.similarities).float().cpu().numpy().astype(np.float32)
        return pick(self.draft, where)


def fasthybrid(
    model: MARModel,
    condition: Condition,
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
        model, condition, noise, seed: as :func:`samplers.mar.mar`.
        settings: see :class:`FastHybridSettings`.
        transformer: how the networks are run; None for in full.
        edit: part of a picture to be drawn anew; None for a whole new one.
    """
    run = begin("fasthybrid", model, condition, settings, noise, seed, edit)
    transformer = transformer or FullTransformer()
    with torch.no_grad():
        head = LookaheadHead(run, transformer) if settings.lookahead else PlainHead(run, transformer)
    return (yield from generate(run, transformer, head))
