"""Ancestral sampling with MAR's diffusion head and its learned variance, many tokens at once.

Source: Nichol & Dhariwal 2021 (improved DDPM) as used by MAR (Li et al. 2024, arXiv 2406.11838, section 3.2); x0 is
never clipped. The head's last layer and the steps are fp32, whatever the dtype of the network.

The diffusion is one loop: ``out = head(k, x)`` at diffusion step k, from 0 at the highest timestep, then
:func:`ancestral_step`. Here the head is evaluated in full at every step; ``lazymar.py`` has one with a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...model_loaders.networks.mar import BUDGET, MAR, MARModel
from ...reports.record import Report
from ..driver import to_device
from .settings import MARBase
from .tables import Tables


class Generation(Protocol):
    """What the diffusion reads of a run, see ``loop.py``."""

    model: MARModel
    settings: MARBase
    report: Report


@dataclass(eq=False)
class HeadBatch:
    """N tokens to sample with the diffusion head."""

    z: Tensor  # conditions [P, N, C]; P = 2 with guidance, the null class's last
    cfg: Tensor  # guidance scale fp32 [N, 1]
    x: Tensor  # state before the first step, fp32 [N, channels]: noise, unless the sampler has made the first step
    # Step noise fp32 [T, N, channels], highest timestep first; the last step uses none. Step k of a table of S <= T
    # steps takes entry k T // S, so that images of fewer steps stay comparable.
    noise: Tensor
    table: Tables
    draft: Tensor | None = None  # x' fp32 [N, channels], which the mean is pulled to; None for none
    gamma: Sequence[float] = ()  # weight of the draft at every step of the table, highest timestep first; () for none
    # The steps of the table to make, from 0 at the highest timestep: the first one, and the one to stop before; None
    # for the end.
    first: int = 0
    stop: int | None = None


def guide(out: Tensor, cfg: Tensor | float) -> tuple[Tensor, Tensor]:
    """Classifier-free guidance on the noise only: eps, and the conditional branch's variance logits, [N, channels]
    each.

    ``out``: head output [P, N, 2 channels], the null branch last; ``cfg``: guidance scale [N, 1] or a number.
    """
    eps, logits = out[0].chunk(2, -1)
    if len(out) == 2:
        null = out[1, :, : eps.shape[1]]
        eps = torch.lerp(null, eps, cfg)  # null + cfg (eps - null)
    return eps, logits


def ancestral_step(
    numbers: Sequence[Tensor],
    cfg: Tensor,
    noise: Tensor,
    draft: Tensor | None,
    x: Tensor,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """x_{t-1} = mu + sigma noise; returns it, mu and log sigma, [N, channels] each.

    With a draft x' of weight gamma: mu' = (1 - gamma) mu + gamma x'.

    Args:
        numbers: of a step the factors with which mu = of_x x - of_eps eps, its ``middle`` and ``slope``
            of :class:`StepNumbers`, and gamma; fp32 [] each.
        noise, draft, x: fp32 [N, channels]; the noise includes the temperature.
        cfg, out: see :func:`guide`.
    """
    of_x, of_eps, middle, slope, gamma = numbers
    eps, logits = guide(out, cfg)
    mean = torch.addcmul(of_x * x, of_eps, eps, value=-1)
    if draft is not None:
        mean = torch.lerp(mean, draft, gamma)
    log_std = torch.addcmul(middle, slope, logits)
    return torch.addcmul(mean, log_std.exp(), noise), mean, log_std


def ancestral_steps(
    run: Generation, batch: HeadBatch
) -> list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """The steps of a batch as functions of x and the head's output, see :func:`ancestral_step`."""
    count = len(batch.table.steps)
    steps = range(count)[batch.first : batch.stop]

    # The last step of a table adds no noise. Its zeros are a view like the others, so that the compiler treats them
    # alike.
    noise = batch.noise * run.settings.temperature
    noise[-1] = 0
    noise_of = [noise[k * len(noise) // count] if k + 1 < count else noise[-1] for k in steps]

    rows = []
    for k in steps:
        step = batch.table.steps[k]
        # The mean without x0: coef1 (recip x - recipm1 eps) + coef2 x = of_x x - of_eps eps.
        of_x = step.coef1 * step.recip + step.coef2
        of_eps = step.coef1 * step.recipm1
        gamma = batch.gamma[k] if batch.gamma else 0.0
        rows.append((of_x, of_eps, step.middle, step.slope, gamma))
    numbers = to_device(torch.tensor(rows), batch.x.device)
    advance = run.model.net.region(ancestral_step, "diffusion steps")

    return [
        partial(advance, step_numbers.unbind(), batch.cfg, step_noise, batch.draft)
        for step_numbers, step_noise in zip(numbers, noise_of, strict=True)
    ]


class Head:
    """The diffusion head, evaluated in full: ``out = head(k, x)`` at step k, from 0 on, one more at every call.

    Several batches of equally many steps share its evaluations; their tokens stand one behind the other.
    """

    def __init__(self, net: MAR, *batches: HeadBatch):
        head = self._head = net.head
        self._evaluate = net.region(type(head).denoise, "diffusion head")

        # Condition embeddings [P, N, w] and time embeddings [S, 1, 1 or N, w].
        z = [batch.z for batch in batches]
        timesteps = [batch.table.timestep_map.flip(0)[batch.first : batch.stop] for batch in batches]
        times = [head.time_embed(t)[:, None, None] for t in timesteps]
        if len(batches) > 1:
            z = [torch.cat(z, 1)]
            times = [torch.cat([t.expand(-1, -1, len(b.x), -1) for t, b in zip(times, batches, strict=True)], 2)]
        self.branches, self.tokens = z[0].shape[:2]
        self._condition = head.cond_embed(z[0].flatten(0, 1)).unflatten(0, z[0].shape[:2])
        self._times = times[0]

        # The modulations of many steps are one product, which reads the weights once.
        numbers = self._condition.numel() * (3 * len(head.res_blocks) + 2)
        self._at_once = max(1, BUDGET // max(1, numbers))
        self._modulations: list[tuple[Tensor, ...]] = []

    def __call__(self, k: int, x: Tensor) -> Tensor:
        """Noise and variance logits [P, N, 2 channels] of the states x fp32 [N, channels]."""
        place = k % self._at_once
        if place == 0:
            embedding = self._times[k : k + self._at_once] + self._condition
            self._modulations = list(zip(*self._head.modulations(embedding), strict=True))
        return self._evaluate(self._head, x, self._modulations[place])


def denoise(run: Generation, batch: HeadBatch) -> Tensor:
    """Sample the tokens fp32 [N, channels] of a batch; the report of ``run`` counts the head's work."""
    head = Head(run.model.net, batch)
    steps = ancestral_steps(run, batch)
    x = batch.x
    for k, step in enumerate(steps):
        x, _, _ = step(x, head(k, x))
    run.report.add(head_calls=len(steps), head_rows=len(steps) * head.branches * head.tokens)
    return x
