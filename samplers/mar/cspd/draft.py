"""The draft model of CSpD: its AR steps, and how the report counts its work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....networks.mar import MARModel
from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED, PROMPT_COUNTS, REJECTED, Report
from ... import chain
from ...chain import DiffusionBatch
from ...conditioning import MaskedCondition
from ...coupling import Gaussian
from ...engine import Verdict
from ...noise import row_keys
from ..canvas import MARCanvas, TokenNoise, Tokens
from ..mar import FullTransformer, Heads, Transformer

# Counts of the report that include both models.
_BOTH = ("transformer_passes", "transformer_tokens", "head_calls", "head_rows", "cache_bytes", *PROMPT_COUNTS)


class Trace(NamedTuple):
    """The diffusion paths of N rows."""

    path: Tensor  # states, fp32 [N, S + 1, channels], start noise first, token last
    # The learned kernel of each step, fp32 [N, S, channels], without the temperature. CSpD compares the distributions
    # of the last step, which therefore has a std, although in MAR it adds no noise.
    kernel: Gaussian

    def tokens(self, positions: Tensor) -> Tensor:
        """The tokens at which the paths end, fp32 [B, n, channels], if the rows belong to positions int64 [B, n]."""
        return self.path[:, -1].view(*positions.shape, -1)

    def split(self, sizes: Sequence[int]) -> list[Trace]:
        """Parts with ``sizes`` rows."""
        paths = self.path.split(sizes)
        means = self.kernel.mean.split(sizes)
        log_stds = self.kernel.log_std.split(sizes)
        parts = zip(paths, means, log_stds, strict=True)
        return [Trace(path, Gaussian(mean, log_std)) for path, mean, log_std in parts]


def noisy_last_step_table(canvas: MARCanvas) -> chain.StepTable:
    """The diffusion steps for :func:`traced`: the stds leave out the temperature, and the last step has a std too."""
    tables = canvas.tables(canvas.settings.diffusion_steps)
    return chain.step_table(tables.steps, canvas.time_embeddings(tables))


def traced(canvas: MARCanvas, batch: DiffusionBatch, last_noise: bool = False) -> Trace:
    """Sample a batch with the full diffusion head and the steps of :func:`noisy_last_step_table`, and keep their paths.

    ``last_noise``: whether the last step adds noise, as all other steps do. MAR's does not.
    """
    noise = batch.noise
    if not last_noise:
        noise = noise.clone()
        noise[-1] = 0
    batch = replace(batch, noise=noise)

    head = Heads(canvas.model.net, canvas.report).head(batch)
    states = [batch.x]
    means = []
    log_stds = []
    for result in chain.run_chain(batch, head):
        states.append(result.x)
        means.append(result.mean)
        log_stds.append(result.log_std)

    return Trace(torch.stack(states, 1), Gaussian(torch.stack(means, 1), torch.stack(log_stds, 1)))


class TargetBatch(NamedTuple):
    """The tokens of some AR steps, one AR step after another, as a batch that the target's head has not sampled yet."""

    batch: DiffusionBatch
    tokens: Tokens
    sizes: list[int]  # for each AR step B n, the number of its tokens in all images


def target_batches(
    canvas: MARCanvas, transformer: Transformer, steps: range, noise: TokenNoise, table: chain.StepTable
) -> Iterator[TargetBatch]:
    """The tokens of AR steps as the target's head will sample them, given the drafts. Yields a batch for every pass of
    the target's transformer, and each pass evaluates as many AR steps as it can.

    A transformer with caches reads final tokens only: ask for a batch when the tokens of the previous batch are final.
    """
    conditions = transformer.each_step(steps.start, len(steps))
    step = steps.start
    for zs in canvas.clock.timed("transformer", conditions):  # [P, B, n, C] of some AR steps
        with canvas.clock.phase("head"):
            tokens = Tokens.joined([Tokens.all(canvas.order.ahead(step + i)) for i in range(len(zs))])
            z = torch.cat([z.flatten(1, 2) for z in zs], 1)
            batch = canvas.batch(table, tokens, z, noise)
        yield TargetBatch(batch, tokens, [z.shape[1] * z.shape[2] for z in zs])
        step += len(zs)


class Drafter:
    """The draft model while the target generates images. It shares the target's tokens, noise and diffusion steps."""

    def __init__(
        self,
        canvas: MARCanvas,
        model: MARModel,
        condition: MaskedCondition,
        make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
        last_noise: bool = False,
    ):
        """``canvas``: the target's; ``last_noise``: see :func:`traced`; the other arguments are a sampler's."""
        conditioning = condition.conditioning(model, canvas.guided)
        report = Report("draft", model.name, {}, None, canvas.images, canvas.report.device)

        self.target = canvas
        self.canvas = canvas.with_model(model, conditioning, report)
        self.table = noisy_last_step_table(self.canvas)
        self.transformer = make_transformer(self.canvas)
        self.last_noise = last_noise

    def step(self, step: int, noise: TokenNoise) -> Trace:
        """Draft the tokens of an AR step, given the tokens so far, and write them on the canvas, undecided."""
        canvas = self.canvas
        here = canvas.order.ahead(step)
        tokens = Tokens.all(here)

        with canvas.clock.phase("draft"):
            z = self.transformer(step, here)
            trace = traced(canvas, canvas.batch(self.table, tokens, z, noise), self.last_noise)
            self.target.draft(here, trace.tokens(here))

        self._move_counts()
        return trace

    def forget(self) -> None:
        """Discard features of tokens that the target has replaced."""
        self.transformer.forget()

    def _move_counts(self) -> None:
        """Move the work so far from the draft's report into the target's."""
        counts = self.canvas.report.counts
        both = {name: counts[name] for name in _BOTH if name in counts}
        self.target.report.add(**both)
        self.target.report.add(draft_passes=counts["transformer_passes"], draft_head_calls=counts["head_calls"])
        counts.clear()


class Mode(ABC):
    """How the target verifies drafts, a segment of AR steps at a time."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: Drafter, noise: TokenNoise):
        """``noise``: the noise of the target's full diffusion, from which the draft model samples too."""
        self.canvas = canvas
        self.transformer = transformer
        self.drafter = drafter
        self.noise = noise
        # Keys of the random numbers with which drafts are verified, int64 [B, L].
        self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    @abstractmethod
    def segment(self, first: int) -> Iterator[Verdict]:
        """Draft AR steps from ``first`` on and verify them; yields a verdict for every AR step."""


def outcome_of(canvas: MARCanvas, accepted: Tensor) -> Tensor:
    """The outcome of each draft, ACCEPTED or REJECTED, uint8 [B, n] on the device, from ``accepted``, bool [B, n] on
    the host. The report counts them.
    """
    kept = int(accepted.sum())
    restarts = int((~accepted).any(1).sum())
    canvas.report.add(accepted=kept, rejected=accepted.numel() - kept, restarts=restarts)
    return to_device(torch.where(accepted, ACCEPTED, REJECTED).to(torch.uint8), canvas.device)
