"""Ancestral sampling with MAR's diffusion head, many tokens at once. Source: Li et al. 2024 (arXiv 2406.11838), section 3.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ...model_loaders.networks.diffusion_head import DiffusionHead
from ...model_loaders.networks.speed import KERNELS, PLAIN, shared
from ..noise import copied
from .diffusion import Ancestral, Tables, advance, mixture
from .loop import Conditions, Denoise, HeadRows, Run
from .memory import BUDGET

# Most rows for which the head's kernels are used: every program of a kernel normalises its rows again.
_FEW = 64


class Denoiser:
    """Samples tokens from their conditions. A row is one token with its own condition, guidance scale and noise.

    The modulations of several diffusion steps are computed in one matrix product (see ``DiffusionHead.modulations``), at
    most ``budget`` numbers at a time.

    Attributes:
        table: diffusion tables, S steps.
        times: time embeddings [S, w], highest timestep first.
        rule: the sampler's step.
        exact: whether every diffusion step is evaluated.
    """

    budget = BUDGET
    exact = True

    def __init__(self, run: Run, table: Tables):
        self.run, self.head, self.table, net = run, run.model.net.head, table, run.model.net
        self.evaluate = net.region(evaluate)
        self.few: Callable[[DiffusionHead, Tensor, list[Tensor]], Tensor] | None = None
        if net.speed == KERNELS and net.on_device():
            from ...model_loaders.networks.head_kernels import denoise as few  # imports Triton

            self.few = few
        self.times = self.head.time_embed(table.timestep_map.flip(0).to(run.tokens.device))
        compiled = shared(advance) if net.speed != PLAIN else None
        self.rule = Ancestral(table, run.settings.temperature, run.tokens.device, compiled)

    def __call__(
        self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor, rule: Ancestral | None = None
    ) -> Tensor:
        """Denoise N rows.

        Args:
            z: conditions [N, C].
            scale: guidance scale fp32 [N, 1].
            first: start noise fp32 [N, channels].
            noise: step noise fp32 [S, N, channels], highest timestep first; the last entry is not used.
            rule: the step; None for :attr:`rule`.

        Returns:
            fp32 [N, channels].
        """
        return _denoise([_Rows(self, z, scale, first, noise, rule or self.rule)])[0]

    def together(self, mine: HeadRows, other: Denoise, others: HeadRows) -> tuple[Tensor, Tensor]:
        """Denoise rows of two tables in one loop, so that the sequential head calls are those of the longer table.

        Args:
            mine: arguments of :meth:`__call__` for rows of this denoiser.
            other, others: another denoiser and its rows.
        """
        if not other.exact:  # its cache belongs to one table
            return self(*mine), other(*others)
        pairs = ((self, mine), (cast(Denoiser, other), others))
        first, second = _denoise([_Rows(d, r.z, r.scale, r.first, r.noise, r.rule or d.rule) for d, r in pairs])
        return first, second


class _Rows:
    """N rows of one diffusion table in the middle of their denoising. With guidance every row is evaluated twice, P = 2: for its
    condition, then for the null class.

    Attributes:
        x: states fp32 [N, P, channels], the same for both.
        mix: see :func:`mixture`.
        noise: scaled step noise [S, N, 1, channels].
    """

    def __init__(self, denoiser: Denoiser, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor, rule: Ancestral):
        self.denoiser, self.rule, self.branches = denoiser, rule, 1 + z.guided
        self.mix = mixture(scale, z.guided)
        self.x, self.noise = first[:, None].repeat(1, self.branches, 1), rule.scaled(noise)[:, :, None]
        both = z.cond if z.null is None else torch.stack([z.cond, z.null], 1).flatten(0, 1)
        self.condition = denoiser.head.cond_embed(both)
        self.steps = len(denoiser.table)
        width = self.condition.shape[1] * (3 * len(denoiser.head.res_blocks) + 2)
        self.chunk = max(1, denoiser.budget // max(1, len(self.condition) * width))
        self.start, self.modulations = -self.chunk, [self.condition]  # of steps start .. start + chunk - 1

    def inputs(self, k: int) -> tuple[Tensor, list[Tensor]]:
        """Head inputs of executed step ``k``: tokens [N, P, channels], and the modulations."""
        if k >= self.start + self.chunk or k < self.start:
            self.start = k - k % self.chunk
            times = self.denoiser.times[self.start : self.start + self.chunk, None]
            self.modulations = self.denoiser.head.modulations(times + self.condition)
        return self.x, [m[k - self.start] for m in self.modulations]

    def step(self, k: int, out: Tensor) -> None:
        """Advance by executed step ``k`` with the head's output [N, P, 2 channels]."""
        self.x = self.rule.branches(k, self.x, out, self.mix, self.noise[k])

    def skip(self, k: int) -> None:
        """Advance by executed step ``k``, whose rule does not use the head."""
        zero = torch.zeros_like(self.x)
        self.x = self.rule(k, self.x, zero, zero, self.noise[k])


def evaluate(head: DiffusionHead, x: Tensor, modulations: list[Tensor]) -> Tensor:
    """Head output [N, P, 2 channels] of tokens [N, P, channels]."""
    return head.denoise(x.flatten(0, 1), modulations).unflatten(0, x.shape[:2])


def _evaluate(denoiser: Denoiser, x: Tensor, modulations: list[Tensor]) -> Tensor:
    """:func:`evaluate`, as the model's ``speed`` says."""
    if denoiser.few is not None and x.shape[0] * x.shape[1] <= _FEW:
        return denoiser.few(denoiser.head, x.flatten(0, 1), modulations).unflatten(0, x.shape[:2])
    # The compiler takes a single row for a shape of its own.
    return (denoiser.evaluate if len(x) > 1 else evaluate)(denoiser.head, x, modulations)


def _denoise(parts: list[_Rows]) -> list[Tensor]:
    """Denoise rows of one or more tables in one loop; shorter tables join for the last calls. Tokens of each part."""
    longest = max(part.steps for part in parts)
    first = parts[0].denoiser
    report = first.run.report
    for call in range(longest):
        active = [(part, call - longest + part.steps) for part in parts if call >= longest - part.steps]
        for part, k in active:
            if part.rule.free(k):
                part.skip(k)
        active = [(part, k) for part, k in active if not part.rule.free(k)]
        if not active:
            continue
        inputs = [part.inputs(k) for part, k in active]
        x, modulations = inputs[0]
        if len(inputs) > 1:
            x = torch.cat([x for x, _ in inputs])
            modulations = [torch.cat(layer) for layer in zip(*(m for _, m in inputs), strict=True)]
        out = _evaluate(first, x, modulations).split([len(x) for x, _ in inputs])
        for (part, k), rows in zip(active, out, strict=True):
            part.step(k, rows)
        report.add(head_calls=1, head_rows=x.shape[0] * x.shape[1])
    return [part.x[:, 0] for part in parts]


class RowNoise:
    """Noise of one stream on the device, indexed by (image, position)."""

    def __init__(self, run: Run, stream: str, table: Tables):
        c, device = run.model.net.config, run.tokens.device
        self.first = copied(run.noise.first(stream, c.tokens, c.channels), device)
        self.steps = copied(run.noise.steps(stream, len(table), c.tokens, c.channels), device)

    def __call__(self, image: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Start noise [N, channels] and step noise [S, N, channels] of N rows, int64 [N] each."""
        return self.first[image, position], self.steps[image, :, position].transpose(0, 1)

    def spaced(self, image: Tensor, position: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """The same for a table of at most S steps: evenly spaced entries, so that pictures stay comparable."""
        first, noise = self(image, position)
        kept = [k * len(noise) // steps for k in range(steps)]
        return first, noise if len(kept) == len(noise) else noise[kept]
