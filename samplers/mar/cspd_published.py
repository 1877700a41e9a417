"""CSpD, mode ``published``: the rule of the published code; approximate.

Part of ``cspd.py``, which names the source.

p is the target, q the draft, Sigma the product of sigma_q / sigma_p over all diffusion steps but the last. Each model
follows its own trajectory. The paper's equations, and what the code does instead:

- (5): a token is accepted with probability min(1, Sigma p(x) / q(x)). The code divides by Sigma, and p and q are the
  last diffusion step's densities with stds multiplied by ``inner_temperature``, 42.
- (11): a rejected token is drawn again from p, and a redraw is kept with probability max(0, 1 - q / (Sigma p)). The
  code multiplies by Sigma: max(0, 1 - Sigma q / p), stds as they are, at most 100 times. The token is zero if none is
  kept.
- Drafts are judged given the tokens of the last verification, and all accepted ones are kept whatever happened to those
  before; the guidance scale is that of the segment's last AR step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reports.record import DRAFTED
from ..chain import Chains
from ..coupling import Gaussian
from ..device import to_device
from ..engine import Sampler, passes
from ..noise import CounterRNG, row_keys
from .canvas import MARCanvas
from .drafting import Drafter, kernel_table, prefill_steps, record_outcome, traced
from .mar import Diffusion, places
from .settings import CSpDSettings
from .transformer import Transformer

# Redraws of a rejected token, of which so many are computed for all tokens, the others for those that need them.
TRIES = 100
_FIRST_TRIES = 10
# Lanes of a token's random numbers, after those of its diffusion steps (speculation.py).
_GUESS, _NORMAL, _UNIFORM = range(1 << 20, (1 << 20) + 3)


class RejectionDraws:
    """Random numbers of images and positions, int64 [N] each, of keys int64 [B, L]. A test injects recorded ones."""

    def __init__(self, keys: Tensor):
        self.keys = keys

    def guess(self, image: Tensor, position: Tensor) -> Tensor:
        """Uniform fp32 [N] to compare a draft's ratio with."""
        return CounterRNG(self.keys[image, position]).uniform(_GUESS)[:, 0]

    def again(self, image: Tensor, position: Tensor, first: int, count: int, channels: int) -> tuple[Tensor, Tensor]:
        """Redraws from number ``first`` on: standard normals fp32 [N, count, channels] and uniforms fp32 [N, count]."""
        rng = CounterRNG(self.keys[image, position])
        return rng.normal(_NORMAL, first, count, channels), rng.uniform(_UNIFORM, first, count)


class LastStep(NamedTuple):
    """The part of a diffusion path that the published code stores, fp32 [..., channels] each."""

    mean: Tensor  # of the last step
    log_std: Tensor
    rest: Tensor  # sum of the other steps' log stds

    def rows(self, *index: Any) -> LastStep:
        """The parts at an index."""
        return LastStep(self.mean[index], self.log_std[index], self.rest[index])

    def write(self, image: Tensor, position: Tensor, new: LastStep) -> None:
        """Replace those of some tokens, of parts [B, L, channels]."""
        self.mean[image, position] = new.mean
        self.log_std[image, position] = new.log_std
        self.rest[image, position] = new.rest


def last_step(kernel: Gaussian, temperature: float = 1.0) -> LastStep:
    """The stored part of a path's kernels. The last step's stds include the temperature, although it adds no noise."""
    # At temperature 0 the published code divides 0 by 0. Here all drafts are rejected and the target's means taken.
    log_temperature = math.log(max(temperature, 1e-6))
    mean, log_std = kernel
    return LastStep(mean[:, -1], log_std[:, -1] + log_temperature, log_std[:, :-1].sum(1))


def published_ratio(token: Tensor, q: LastStep, p: LastStep, inner: float) -> Tensor:
    """log of the published code's acceptance ratio p / (Sigma q), fp32 [...], of tokens [..., channels]."""

    def exponent(last: LastStep) -> Tensor:
        return -0.5 * (((token - last.mean) * torch.exp(-last.log_std) / inner) ** 2).sum(-1)

    return (p.rest - q.rest + q.log_std - p.log_std).sum(-1) + exponent(p) - exponent(q)


def published_keep(token: Tensor, q: LastStep, p: LastStep) -> Tensor:
    """Probability fp32 [...] that the published code accepts a redraw [..., channels]: max(0, 1 - Sigma q / p)."""
    return (1 - torch.exp(-published_ratio(token, q, p, 1.0))).clamp(min=0)


@torch.no_grad()
def published_steps(
    canvas: MARCanvas,
    transformer: Transformer,
    drafter: Drafter,
    settings: CSpDSettings,
    draws: RejectionDraws | None = None,
) -> Sampler:
    """Draft AR steps one by one, judge them a segment at a time, replace rejected tokens.

    ``draws`` None: those of the noise.
    """
    order = canvas.order
    table = kernel_table(canvas)
    temperature = settings.temperature
    tables = [canvas.table(settings.diffusion_steps)] * order.steps
    plain = Diffusion(canvas, transformer.heads, tables, settings.speculation)
    target_start = start = plain.start
    target_noise = noise = plain.noise
    if not settings.alignment:
        target_start, target_noise = canvas.draws("target", len(table))
    draws = draws or RejectionDraws(to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device))

    # 0. Prefill: the first AR steps are the target's alone.
    first = prefill_steps(order.steps, settings.prefill_ratio)  # the first AR step that is not verified yet
    yield from passes(canvas, {step: order.ahead(step) for step in range(first)}, transformer, plain)

    drafted = LastStep(*torch.zeros(3, *canvas.values.shape, device=canvas.device))
    for step in range(first, order.steps):
        # 1. Draft an AR step.
        trace = drafter.step(step, start, noise)
        newest = order.ahead(step)
        image, position = places(newest)
        drafted.write(image, position, last_step(trace.kernel, temperature))
        canvas.outcome.scatter_(1, newest, DRAFTED)
        canvas.fixed_at.scatter_(1, newest, step)

        if step % settings.draft_length == 0 or step + 1 == order.steps:
            # 2. The target's own paths of all tokens since the last verification, given those before it.
            here = order.ahead(first, step + 1 - first)
            image, position = places(here)
            with canvas.clock.phase("transformer"):
                z = transformer(first, here).flatten(1, 2)
            with canvas.clock.phase("head"):
                cfg = torch.full((len(image), 1), order.cfg[step], device=z.device)
                noises = target_noise[:, image, position]
                target = traced(canvas, Chains(z, cfg, target_start[image, position], noises, table))

                # 3. Accept drafts, and draw the others again.
                q = drafted.rows(image, position)
                p = last_step(target.kernel, temperature)
                inner = settings.inner_temperature
                drafts = canvas.values[image, position]
                tokens, accepted = accept_or_redraw(drafts, q, p, inner, draws, image, position)
                canvas.values[image, position] = tokens
            if not record_outcome(canvas, here, accepted.view(here.shape)):
                drafter.forget()
            first = step + 1

        with canvas.clock.paused():
            yield canvas.step(step + 1)
    return canvas.finish()


def accept_or_redraw(
    drafts: Tensor, q: LastStep, p: LastStep, inner: float, draws: RejectionDraws, image: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens fp32 [N, channels] in place of drafts, and which drafts were accepted, bool [N] on the host.

    Reads from the device once.
    """
    # 1. Accept with probability min(1, ratio).
    accepted = published_ratio(drafts, q, p, inner) > draws.guess(image, position).log()

    # 2. The first redraws, of all tokens.
    redraw, found = redrawn(draws, image, position, q, p, 0, _FIRST_TRIES)
    tokens = torch.where(accepted[:, None], drafts, redraw)

    # 3. The others, of rejected tokens of which none was kept yet.
    ok, done = torch.stack([accepted, accepted | found]).cpu()
    missing = (~done).nonzero()[:, 0]
    if len(missing):
        i = to_device(missing, drafts.device)
        more = TRIES - _FIRST_TRIES
        tokens[i], _ = redrawn(draws, image[i], position[i], q.rows(i), p.rows(i), _FIRST_TRIES, more)
    return tokens, ok


def redrawn(
    draws: RejectionDraws, image: Tensor, position: Tensor, q: LastStep, p: LastStep, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """The first redraw that is kept of N tokens, fp32 [N, channels], zero where none is; and where one is, bool [N].

    Redraws ``first .. first + count - 1`` of p's kernel are tried.
    """
    normals, uniforms = draws.again(image, position, first, count, p.mean.shape[1])
    q = q.rows(slice(None), None)
    p = p.rows(slice(None), None)
    drawn = p.mean + p.log_std.exp() * normals
    kept = published_keep(drawn, q, p) > uniforms

    found = kept.any(1)
    row = torch.arange(len(image), device=image.device)
    value = drawn[row, kept.to(torch.uint8).argmax(1)]
    return torch.where(found[:, None], value, 0.0), found
