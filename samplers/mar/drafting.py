"""The draft model of CSpD (``cspd.py``): its AR steps, and what becomes of its work in the report."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...model_loaders.networks.mar import MARModel
from ...reports.record import ACCEPTED, PROMPT_COUNTS, REJECTED, Report
from ..conditioning import MaskedCondition
from ..driver import to_device
from .coupling import Gaussian
from .diffusion import Head, HeadBatch, ancestral_steps
from .loop import Run, Transformer

# Counts of the report that are both models' together.
_BOTH = ("transformer_passes", "transformer_tokens", "head_calls", "head_rows", *PROMPT_COUNTS)


class Trace(NamedTuple):
    """The diffusion paths of N rows."""

    path: Tensor  # states fp32 [N, S + 1, channels], start noise first, token last
    # The learned kernel of each step, fp32 [N, S, channels], without the temperature. The last step has a std, too,
    # although it adds no noise.
    kernel: Gaussian


def traced(run: Run, batch: HeadBatch) -> Trace:
    """Sample a batch with the diffusion head, which is never cached, and keep its paths."""
    head = Head(run.model.net, batch)
    steps = ancestral_steps(run, batch)

    states = [batch.x]
    means = []
    log_stds = []
    for k, step in enumerate(steps):
        x, mean, log_std = step(states[-1], head(k, states[-1]))
        states.append(x)
        means.append(mean)
        log_stds.append(log_std)

    run.report.add(head_calls=len(steps), head_rows=len(steps) * head.branches * head.tokens)
    return Trace(torch.stack(states, 1), Gaussian(torch.stack(means, 1), torch.stack(log_stds, 1)))


class Drafter:
    """The draft model in a generation of the target: with the same tokens, noise and diffusion steps."""

    def __init__(self, run: Run, model: MARModel, condition: MaskedCondition, transformer: Transformer):
        rows = condition.rows(model, run.guided)
        report = Report("draft", model.name, {}, None, run.report.images, run.report.device)

        self.target = run
        self.run = replace(run, model=model, rows=rows, report=report)
        self.transformer = transformer
        transformer.begin(self.run)

    def step(self, step: int, start: Tensor, noise: Tensor) -> Trace:
        """Draft the tokens of an AR step, given the tokens so far, and write them to the target's.

        ``start`` fp32 [B, L, channels] and ``noise`` fp32 [S, B, L, channels] are the noise of every position.
        """
        run = self.run
        plan = self.target.plan
        here = plan.ahead(step)
        image, position = places(here)

        with run.clock.phase("draft"):
            run.tokens = self.target.tokens
            z = self.transformer(run, step, here)

            cfg = plan.scale[image, position, None]
            batch = HeadBatch(z.flatten(1, 2), cfg, start[image, position], noise[:, image, position], run.tables)
            trace = traced(run, batch)
            run.tokens[image, position] = trace.path[:, -1]

        self._count()
        return trace

    def forget(self) -> None:
        """Discard features of tokens that the target has replaced."""
        self.transformer.forget()

    def _count(self) -> None:
        """Move the work so far into the target's report."""
        counts = self.run.report.counts
        both = {name: counts[name] for name in _BOTH if name in counts}
        self.target.report.add(**both)
        self.target.report.add(draft_passes=counts["transformer_passes"], draft_head_calls=counts["head_calls"])
        counts.clear()


def places(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Image and position, int64 [B n] each, of positions int64 [B, n], one image after another."""
    image = torch.arange(len(positions), device=positions.device).repeat_interleave(positions.shape[1])
    return image, positions.flatten()


def prefill_steps(ar_steps: int, ratio: float) -> int:
    """AR steps of the target alone at the beginning: steps 0 .. S ratio, as the reference."""
    return min(ar_steps, int(ar_steps * ratio) + 1)


def judged(run: Run, outcome: Tensor, positions: Tensor, accepted: Tensor) -> bool:
    """Record which drafts were accepted; whether all were.

    Args:
        outcome: uint8 [B, L], the outcome of every token, written in place.
        positions: int64 [B, n] of the drafts.
        accepted: bool [B, n] on the host.
    """
    values = torch.where(accepted, ACCEPTED, REJECTED).to(torch.uint8)
    outcome.scatter_(1, positions, to_device(values, outcome.device))

    kept = int(accepted.sum())
    restarts = int((~accepted).any(1).sum())
    run.report.add(accepted=kept, rejected=accepted.numel() - kept, restarts=restarts)
    return kept == accepted.numel()
