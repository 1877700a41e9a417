"""The draft model of CSpD (``cspd.py``): its AR steps, and what becomes of its work in the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...model_loaders.networks.mar import MARModel
from ...reports.record import ACCEPTED, PROMPT_COUNTS, REJECTED, Report
from .. import chain
from ..chain import Chains, spread
from ..conditioning import MaskedCondition
from ..coupling import Gaussian
from ..device import to_device
from .canvas import MARCanvas
from .heads import full_head
from .mar import places
from .transformer import FullTransformer, Transformer

# Counts of the report that are both models' together.
_BOTH = ("transformer_passes", "transformer_tokens", "head_calls", "head_rows", "cache_bytes", *PROMPT_COUNTS)


class Trace(NamedTuple):
    """The diffusion paths of N rows."""

    path: Tensor  # states fp32 [N, S + 1, channels], start noise first, token last
    # The learned kernel of each step, fp32 [N, S, channels], without the temperature. CSpD compares those of the last
    # step, which therefore has a std, although in MAR it adds no noise.
    kernel: Gaussian

    def split(self, sizes: Sequence[int]) -> list[Trace]:
        """Parts of so many rows each."""
        paths = self.path.split(sizes)
        means = self.kernel.mean.split(sizes)
        log_stds = self.kernel.log_std.split(sizes)
        parts = zip(paths, means, log_stds, strict=True)
        return [Trace(path, Gaussian(mean, log_std)) for path, mean, log_std in parts]


def noisy_last_step_table(canvas: MARCanvas) -> chain.StepTable:
    """The steps of a full pass for :func:`traced`: without the temperature, and with a std of the last one."""
    tables = canvas.tables(canvas.settings.diffusion_steps)
    return chain.step_table(tables.steps, canvas.time_embeddings(tables))


def traced(canvas: MARCanvas, rows: Chains, last_noise: bool = False) -> Trace:
    """Sample rows with the full diffusion head, and keep their paths. Their steps are :func:`noisy_last_step_table`'s.

    ``last_noise``: whether the last step adds its noise, as all others. MAR's does not.
    """
    net = canvas.model.net
    noise = rows.noise
    if not last_noise:
        noise = noise.clone()
        noise[-1] = 0
    rows = replace(rows, noise=noise, temperature=canvas.settings.temperature)

    states = [rows.x]
    means = []
    log_stds = []
    for advanced in chain.run_chain(net, rows, full_head(net, rows, canvas.report)):
        states.append(advanced.x)
        means.append(advanced.mean)
        log_stds.append(advanced.log_std)

    return Trace(torch.stack(states, 1), Gaussian(torch.stack(means, 1), torch.stack(log_stds, 1)))


def segment_chains(
    canvas: MARCanvas, first: int, zs: Sequence[Tensor], start: Tensor, noise: Tensor, table: chain.StepTable
) -> tuple[Chains, Tensor, Tensor]:
    """The tokens of the AR steps from ``first`` on as rows for the target's head, one AR step after another; and image
    and position of each, int64 [N].

    ``zs``: conditions [P, B, n, C] of each AR step; ``start`` and ``noise`` of every position, see :class:`Drafter`.
    """
    order = canvas.order
    where = [places(order.ahead(step)) for step in range(first, first + len(zs))]
    image = torch.cat([image for image, _ in where])
    position = torch.cat([position for _, position in where])
    z = torch.cat([z.flatten(1, 2) for z in zs], 1)
    cfg = order.scale[image, position, None]
    rows = Chains(z, cfg, start[image, position], noise[:, image, position], table, canvas.settings.temperature)
    return rows, image, position


class Drafter:
    """The draft model in a generation of the target: with the same tokens, noise and diffusion steps."""

    def __init__(
        self,
        canvas: MARCanvas,
        model: MARModel,
        condition: MaskedCondition,
        make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
        last_noise: bool = False,
    ):
        """``canvas``: the target's; ``last_noise``: see :func:`traced`; the other arguments are those of a sampler."""
        conditioning = condition.conditioning(model, canvas.guided)
        report = Report("draft", model.name, {}, None, canvas.images, canvas.report.device)

        self.report = canvas.report
        self.canvas = canvas.read_by(model, conditioning, report)
        self.table = noisy_last_step_table(self.canvas)
        self.transformer = make_transformer(self.canvas)
        self.last_noise = last_noise

    def step(self, step: int, start: Tensor, noise: Tensor) -> Trace:
        """Draft the tokens of an AR step, given the tokens so far, and write them on the canvas, undecided.

        ``start`` fp32 [B, L, channels] and ``noise`` fp32 [S, B, L, channels] are the noise of every position.
        """
        canvas = self.canvas
        order = canvas.order
        here = order.ahead(step)
        image, position = places(here)

        with canvas.clock.phase("draft"):
            z = self.transformer(step, here)

            cfg = order.scale[image, position, None]
            noises = spread(noise[:, image, position], len(self.table))
            rows = Chains(z.flatten(1, 2), cfg, start[image, position], noises, self.table)
            trace = traced(canvas, rows, self.last_noise)
            canvas.values[image, position] = trace.path[:, -1]

        self._move_counts()
        return trace

    def forget(self) -> None:
        """Discard features of tokens that the target has replaced."""
        self.transformer.forget()

    def _move_counts(self) -> None:
        """Move the work so far from the draft's report into the target's."""
        counts = self.canvas.report.counts
        both = {name: counts[name] for name in _BOTH if name in counts}
        self.report.add(**both)
        self.report.add(draft_passes=counts["transformer_passes"], draft_head_calls=counts["head_calls"])
        counts.clear()


def record_outcome(canvas: MARCanvas, positions: Tensor, accepted: Tensor) -> bool:
    """Record which drafts were accepted; whether all were.

    Args:
        canvas: whose outcome is written.
        positions: int64 [B, n] of the drafts.
        accepted: bool [B, n] on the host.
    """
    values = torch.where(accepted, ACCEPTED, REJECTED).to(torch.uint8)
    canvas.outcome.scatter_(1, positions, to_device(values, canvas.device))

    kept = int(accepted.sum())
    restarts = int((~accepted).any(1).sum())
    canvas.report.add(accepted=kept, rejected=accepted.numel() - kept, restarts=restarts)
    return kept == accepted.numel()
