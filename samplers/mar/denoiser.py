"""Ancestral sampling with MAR's diffusion head, many tokens at once. Source: Li et al. 2024 (arXiv 2406.11838), section 3.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...model_loaders.networks.diffusion_head import DiffusionHead
from ...model_loaders.networks.graphs import Graphs, Input, rounded
from ...model_loaders.networks.speed import shared
from ..noise import copied
from .diffusion import Ancestral, Tables, advance, mixture
from .loop import Conditions, Denoise, HeadRows, Run
from .memory import BUDGET

# Most rows for which the head's kernels are used: every program of a kernel normalises its rows again.
_FEW = 64
# Most rows of a diffusion loop that is captured: beyond, a step takes longer than its launches.
CAPTURED = 512


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
        if net.kernels and net.on_device():
            from ...model_loaders.networks.head_kernels import denoise as few  # imports Triton

            self.few = few
        self.times = self.head.time_embed(table.timestep_map.flip(0).to(run.tokens.device))
        compiled = shared(advance) if net.compiles else None
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
        return self.looped(HeadRows(z, scale, first, noise, rule))[0]

    def looped(self, rows: HeadRows) -> tuple[Tensor, ...]:
        """:meth:`__call__`; tokens, and what the rule collected."""
        return self._loops([_Loop(self, rows)])[0]

    def alone(self) -> Denoiser:
        """A copy that refers to nothing of the generation, for functions that outlive it."""
        out = copy(self)
        del out.run
        return out

    def together(self, mine: HeadRows, other: Denoise, others: HeadRows) -> tuple[Tensor, Tensor]:
        """Denoise rows of two tables in one loop, so that the sequential head calls are those of the longer table.

        Args:
            mine: arguments of :meth:`__call__` for rows of this denoiser.
            other, others: another denoiser and its rows.
        """
        if not other.exact:  # its cache belongs to one table
            return self(*mine), other(*others)
        first, second = self._loops([_Loop(self, mine), _Loop(cast(Denoiser, other), others)])
        return first[0], second[0]

    def _loops(self, loops: Sequence[_Loop]) -> list[tuple[Tensor, ...]]:
        """Denoise the rows of one or more tables in one loop: of each its tokens, and what its rule collected.

        Args:
            loops: of this denoiser, then of others.
        """
        calls = [sum(loops[i].rows for i, k in call if not loops[i].rule.free(k)) for call in _calls(loops)]
        self.run.report.add(head_calls=sum(rows > 0 for rows in calls), head_rows=sum(calls))
        inputs, graphs = [loop.inputs() for loop in loops], self.run.model.net.captured()
        if graphs is not None and max(len(given.first) for given in inputs) <= CAPTURED:
            found = _captured(graphs, loops, inputs)
            if found is not None:
                return found
        return _denoise(loops, inputs)


class Inputs(NamedTuple):
    """Tensors of a diffusion loop of N rows.

    Attributes:
        cond: conditions [N, C].
        null: those of the null class, or None without guidance.
        scale: guidance scale fp32 [N, 1].
        first: start noise fp32 [N, channels].
        noise: step noise as :meth:`Ancestral.scaled` returns it, [S, N, channels].
        draft: see :class:`Ancestral`.
    """

    cond: Tensor
    null: Tensor | None
    scale: Tensor
    first: Tensor
    noise: Tensor
    draft: Tensor | None

    @staticmethod
    def of(given: HeadRows, rule: Ancestral) -> Inputs:
        """From a sampler's head rows."""
        return Inputs(given.z.cond, given.z.null, given.scale, given.first, rule.scaled(given.noise), rule.draft)

    @staticmethod
    def rebuilt(buffers: Iterator[Tensor], present: Sequence[bool]) -> Inputs:
        """From buffers in the order of the fields; ``present`` says which fields are not None."""
        return Inputs(*(next(buffers) if there else None for there in present))  # type: ignore[arg-type]

    def padded(self) -> list[Input | None]:
        """The inputs of a captured function, with as many rows as it is captured for."""
        rows = rounded(len(self.first))
        return [None if x is None else Input(x, int(x is self.noise), rows) for x in self]


class _Loop:
    """A diffusion loop of one table.

    Attributes:
        rows: head rows, those of the null class too.
        steps: S.
    """

    def __init__(self, denoiser: Denoiser, given: HeadRows):
        self.denoiser, self.given, self.rule = denoiser, given, given.rule or denoiser.rule
        self.rows, self.steps = len(given.first) * (1 + given.z.guided), len(denoiser.table)

    def inputs(self) -> Inputs:
        return Inputs.of(self.given, self.rule)

    def alone(self) -> _Loop:
        """A copy that refers to nothing of the generation."""
        out = copy(self)
        out.denoiser, out.rule = self.denoiser.alone(), self.rule.fresh(None)
        del out.given
        return out


class _Rows:
    """N rows of one diffusion table in the middle of their denoising. With guidance every row is evaluated twice, P = 2: for its
    condition, then for the null class.

    Attributes:
        x: states fp32 [N, P, channels], the same for both.
        mix: see :func:`mixture`.
        noise: scaled step noise [S, N, 1, channels].
    """

    def __init__(self, denoiser: Denoiser, rule: Ancestral, given: Inputs):
        self.denoiser, self.rule, guided = denoiser, rule, given.null is not None
        self.mix = mixture(given.scale, guided)
        self.x, self.noise = given.first[:, None].repeat(1, 1 + guided, 1), given.noise[:, :, None]
        both = given.cond if given.null is None else torch.stack([given.cond, given.null], 1).flatten(0, 1)
        self.condition = denoiser.head.cond_embed(both)
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


def _calls(loops: Sequence[_Loop]) -> Iterator[list[tuple[int, int]]]:
    """At every call the loops that take part, with their executed steps: (index, step). Shorter tables join for the last calls."""
    longest = max(loop.steps for loop in loops)
    for call in range(longest):
        yield [(i, call - longest + loop.steps) for i, loop in enumerate(loops) if call >= longest - loop.steps]


def _denoise(loops: Sequence[_Loop], given: Sequence[Inputs]) -> list[tuple[Tensor, ...]]:
    """The loops, together: of each tokens fp32 [N, channels], and what its rule collected."""
    first = loops[0].denoiser
    parts = [_Rows(loop.denoiser, loop.rule.fresh(x.draft), x) for loop, x in zip(loops, given, strict=True)]
    for call in _calls(loops):
        for i, k in call:
            if parts[i].rule.free(k):
                parts[i].skip(k)
        active = [(parts[i], k) for i, k in call if not parts[i].rule.free(k)]
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
    return [(part.x[:, 0], *part.rule.collected()) for part in parts]


def _captured(graphs: Graphs, loops: Sequence[_Loop], given: Sequence[Inputs]) -> list[tuple[Tensor, ...]] | None:
    """:func:`_denoise` as a captured function; None if that failed. The padding's results are not returned."""
    lasting, padded = [loop.alone() for loop in loops], [x.padded() for x in given]
    present = tuple(tuple(x is not None for x in row) for row in padded)

    def function(*buffers: Tensor) -> tuple[Tensor, ...]:
        left = iter(buffers)
        found = [Inputs.rebuilt(left, row) for row in present]
        return tuple(x for part in _denoise(lasting, found) for x in part)

    tables = tuple((loop.rule.key(), tuple(loop.denoiser.table.timestep_map.tolist())) for loop in lasting)
    key = ("diffusion", tables, present)
    out = graphs.run(key, function, [x for row in padded for x in row if x is not None])
    if out is None:
        return None
    left = iter(out)
    return [
        tuple(next(left)[: len(x.first)] for _ in range(1 + loop.rule.collects))
        for loop, x in zip(loops, given, strict=True)
    ]


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
        if steps == len(noise):
            return first, noise
        return first, noise[copied(torch.arange(steps) * len(noise) // steps, noise.device)]
