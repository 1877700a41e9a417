"""CSpD, mode ``published``: the rule of the published code; approximate.

Part of ``cspd.py``, which names the source; ``rejection.py`` has the rule and its symbols. Each model follows its own
trajectory. The paper's equations, and what the code does instead:

- (5): a token is accepted with probability min(1, Sigma p(x) / q(x)). The code divides by Sigma, and p and q are the
  last diffusion step's densities with stds multiplied by ``inner_temperature``, 42.
- (11): a rejected token is drawn again from p, and a redraw is kept with probability max(0, 1 - q / (Sigma p)). The
  code multiplies by Sigma: max(0, 1 - Sigma q / p), stds as they are, at most 100 times. The token is zero if none is
  kept.
- Drafts are judged given the tokens of the last verification, and all accepted ones are kept whatever happened to those
  before; the guidance scale is that of the segment's last AR step.
"""

from __future__ import annotations

import torch

from ...reports.record import DRAFTED
from ..chain import Chains
from ..device import to_device
from ..engine import Sampler, passes
from ..noise import row_keys
from .canvas import MARCanvas
from .drafting import Drafter, noisy_last_step_table, record_outcome, traced
from .mar import Diffusion, places
from .rejection import LastStep, RejectionDraws, Rule, accept_or_redraw, last_step
from .settings import CSpDSettings
from .transformer import Transformer


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
    table = noisy_last_step_table(canvas)
    temperature = settings.temperature
    tables = [canvas.table(settings.diffusion_steps)] * order.steps
    plain = Diffusion(canvas, transformer.heads, tables)
    if settings.alignment:
        target_start, target_noise = plain.start, plain.noise
    else:
        target_start, target_noise = canvas.draws("target", len(table))
    draws = draws or RejectionDraws(to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device))

    # 0. Prefill: the first AR steps are the target's alone.
    first = settings.prefill(order.steps)  # the first AR step that is not verified yet
    yield from passes(canvas, {step: order.ahead(step) for step in range(first)}, transformer, plain)

    drafted = LastStep(*torch.zeros(3, *canvas.values.shape, device=canvas.device))
    for step in range(first, order.steps):
        # 1. Draft an AR step.
        trace = drafter.step(step, plain.start, plain.noise)
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
                rule = published_rule(settings)
                judged = accept_or_redraw(canvas.values[image, position], q, p, rule, draws, image, position)
                canvas.values[image, position] = judged.tokens
                canvas.report.add(**judged.counts())
            if not record_outcome(canvas, here, judged.accepted.view(here.shape)):
                drafter.forget()
            first = step + 1

        with canvas.clock.paused():
            yield canvas.step(step + 1)
    return canvas.finish()


def published_rule(settings: CSpDSettings) -> Rule:
    """The published code's r: Sigma inverted, and wider densities for drafts."""
    return Rule(power=-1, inner_temperature=settings.inner_temperature)
