"""CSpD's mode ``published``: the rule of the published code. Approximate (see ``cspd.py``).

Each model follows its own trajectory; Sigma is inverted; the last step's stds are multiplied by 42 in the acceptance test, but
not in redraws; drafts are judged given the tokens of the last verification, and all accepted ones are kept whatever happened
to those before; the guidance scale is that of the segment's last AR step; at most 100 redraws for a rejected token, and zero
if none is accepted."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...model_loaders.networks.mar import pick
from ...reports.record import DRAFTED
from .coupling import Gaussian
from .cspd_models import Models, Trace, TwoModels, exponent, redrawn
from .head import rows_at
from .loop import Run
from .settings import CSpDSettings

# Factor of the last step's stds in the published code.
INNER_TEMPERATURE = 42.0


class LastStep(NamedTuple):
    """The part of a diffusion path that the published code stores.

    Attributes:
        kernel: the last step's, fp32 [N, channels].
        rest: sum of the other steps' log stds, fp32 [N, channels].
    """

    kernel: Gaussian
    rest: Tensor


def last_step(trace: Trace, temperature: float = 1.0) -> LastStep:
    """The stored part of a path. The last step's stds include the temperature, although that step adds no noise."""
    mean, log_std = trace.kernel
    # At temperature 0 the published code divides 0 by 0; here all drafts are then rejected and the target's means taken.
    scaled = log_std[:, -1] + math.log(max(temperature, 1e-6))
    return LastStep(Gaussian(mean[:, -1], scaled), log_std[:, :-1].sum(1))


def published_ratio(token: Tensor, q: LastStep, p: LastStep, inner: float = INNER_TEMPERATURE) -> Tensor:
    """log of the published code's acceptance ratio, fp32 [N], of draft tokens [N, channels]; Sigma is inverted there."""
    widths = (p.rest - q.rest + q.kernel.log_std - p.kernel.log_std).sum(-1)
    return widths + exponent(token, p.kernel, inner) - exponent(token, q.kernel, inner)


def published_keep(token: Tensor, q: LastStep, p: LastStep) -> Tensor:
    """Probability fp32 [N] that the published code accepts a redraw [N, channels]: max(0, p - q / Sigma) / p."""
    return (1 - torch.exp(-published_ratio(token, q, p, 1.0))).clamp(min=0)


class Published(TwoModels):
    """Draft AR steps one by one, judge them a segment at a time, replace the rejected tokens."""

    def __init__(self, run: Run, settings: CSpDSettings, models: Models):
        super().__init__(run, settings, models)
        self.inner = self.settings.inner_temperature or INNER_TEMPERATURE
        self.first = self.prefill  # first AR step that is not verified yet
        self.kept = [torch.zeros_like(run.tokens) for _ in range(3)]  # the drafts' last steps

    def decide(self, run: Run, step: int) -> Tensor:
        where = run.plan.ahead(step)
        (mean, log_std), rest = last_step(self.draft(run, step).trace, self.settings.temperature)
        for all_of_it, new in zip(self.kept, (mean, log_std, rest), strict=True):
            all_of_it.scatter_(1, where[..., None].expand(-1, -1, new.shape[1]), new.view(*where.shape, -1))
        self.outcome.scatter_(1, where, DRAFTED)
        if step % self.settings.draft_length == 0 or step + 1 == run.plan.steps:
            self.verify(run, step)
        return pick(run.tokens, where)

    def verify(self, run: Run, step: int) -> None:
        """Judge all drafts since the last verification."""
        where = run.plan.ahead(self.first, step + 1 - self.first)
        with run.clock.phase("transformer"):
            z = self.transformer(run, self.first, where)
        self.first = step + 1
        with run.clock.phase("head"):
            rows = rows_at(where)
            trace = self.head.trace(z.flat(), self.scale(run, step, where.numel()), *self.own_noise(*rows))
            p = last_step(trace, self.settings.temperature)
            mean, log_std, rest = (pick(x, where).flatten(0, 1) for x in self.kept)
            q, tokens = LastStep(Gaussian(mean, log_std), rest), pick(run.tokens, where).flatten(0, 1)
            ok = published_ratio(tokens, q, p, self.inner) > self.draws.guess(*rows).log()
            # The host waits for the device here, and nowhere else. A GPU draws for all rows again, which is less work than to find
            # the rejected ones first.
            host = ok.cpu().view(where.shape)
            if not bool(host.all()):
                again = (~ok).nonzero()[:, 0] if ok.device.type == "cpu" else torch.arange(len(ok), device=ok.device)
                mine, theirs = (_wide(LastStep(Gaussian(*(x[again] for x in g.kernel)), g.rest[again])) for g in (q, p))
                drawn, found, _ = redrawn(
                    self.draws,
                    rows[0][again],
                    rows[1][again],
                    Gaussian(*(x[:, 0] for x in theirs.kernel)),
                    lambda token, uniforms: published_keep(token, mine, theirs) > uniforms,
                )
                drawn = torch.where(found[:, None], drawn, 0)
                tokens = torch.where(ok[:, None], tokens, torch.zeros_like(tokens).index_copy_(0, again, drawn))
        self.write(run, where, tokens.view(*where.shape, -1))
        if not self.record(run, where, ok.view(where.shape), host):
            self.draft_transformer.forget()


def _wide(step: LastStep) -> LastStep:
    """[N, 1, channels] of [N, channels], to be compared with several draws."""
    return LastStep(Gaussian(step.kernel.mean[:, None], step.kernel.log_std[:, None]), step.rest[:, None])
