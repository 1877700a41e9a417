"""Sampling with a diffusion head: a chain of Gaussian steps, for many rows at once.

A row is a token of MAR or NextStep, or a block of BitDance. At every step, the head makes a *prediction* from the row's
state x. The prediction and x determine the mean and the std of a Gaussian. The next state is sampled from this
Gaussian. ``diffusion_steps.py`` has the equations, and a table with their coefficients. All states are fp32, and so is
the arithmetic of the steps, whatever the dtype of the network.

:func:`run_chain` is the loop. FastHybrid changes the means of some rows (:class:`MeanAdjustment`). An edit with
BitDance fixes some tokens of a row (:class:`FixedTokens`). ``heads.py`` calls the head. ``speculation.py`` drafts
several steps and verifies them in one call of the head.

Shapes: N rows of shape [*, c], with c numbers per token. In BitDance, * is the number of tokens in a row; in MAR and
NextStep, this dimension is absent. "1 ..." stands for dimensions of size 1, which broadcast to [*, c]. There are S
steps, and P branches of guidance:

- P = 1 without guidance;
- P = 2 with guidance: the condition, and the null condition;
- P = 3 if a part of the condition has its own scale: the whole condition, the part, and the null condition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .diffusion_steps import MeanNumbers, StepTable


@dataclass(eq=False)
class DiffusionBatch:
    """N rows to sample, in their states before the first of S steps."""

    z: Tensor  # conditions [P, N, *, D] in the dtype of the head; with guidance, the null branch is last
    cfg: Tensor  # guidance scale, fp32 [N, 1 ...]; if P = 3, two scales, fp32 [N, 1 ..., 2], see guide
    x: Tensor  # states before the first step, fp32 [N, *, c]
    # Noise of the steps, fp32 [S, N, *, c]. If the last step adds no noise, its entry may be absent: [S - 1, N, *, c].
    # The step then reads the entry before. This has no effect, because the step multiplies the noise by a std of 0.
    noise: Tensor
    table: StepTable
    temperature: float = 1.0  # each std is multiplied by this number
    fixed_tokens: FixedTokens | None = None  # None if no token is fixed
    mean_adjustment: MeanAdjustment | None = None  # None if no mean changes

    def some_steps(self, first: int, stop: int) -> DiffusionBatch:
        """The same rows with only the steps ``first`` to ``stop - 1``. The rows must have no fixed tokens."""
        adjustment = self.mean_adjustment
        if adjustment is not None:
            adjustment = adjustment._replace(gamma=adjustment.gamma[first:stop])
        return replace(
            self,
            noise=self.noise[first:stop],
            table=self.table.some_steps(first, stop),
            mean_adjustment=adjustment,
        )


@dataclass(frozen=True, eq=False)
class FixedTokens:
    """The tokens that an edit fixes in the rows, and their values. During the diffusion, the state of a fixed token
    follows the path (1 - t) start + t value.
    """

    t: Tensor  # time before each step, fp32 [S]; 0 is noise, 1 is the token
    start: Tensor  # noise, fp32 [N, *, c]
    value: Tensor  # values of the fixed tokens, fp32 [N, *, c]
    free: Tensor  # bool, broadcasts to [N, *, c]: True for tokens that are not fixed

    def follow(self, x: Tensor, k: int) -> Tensor:
        """The states x [N, *, c] before step k, with each fixed token moved to its path."""
        t = self.t[k]
        return torch.where(self.free, x, (1 - t) * self.start + t * self.value)

    def follow_rows(self, x: Tensor, row: Tensor, k: Tensor) -> Tensor:
        """:meth:`follow` for R states x [R, *, c]. State i is row ``row[i]`` before step ``k[i]``, int64 [R] each."""
        t = self.t[k].view(-1, *(1,) * (x.ndim - 1))
        return torch.where(self.free[row], x, (1 - t) * self.start[row] + t * self.value[row])


class MeanAdjustment(NamedTuple):
    """Moves the mean of each step towards a draft: (1 - gamma) mean + gamma draft."""

    draft: Tensor  # fp32 [N, c]
    gamma: Tensor  # gamma of each step, fp32 [S], or [S, N, 1] if the rows have different values

    def at(self, k: int) -> StepAdjustment:
        """The adjustment at step k."""
        return StepAdjustment(self.draft, self.gamma[k])


class StepAdjustment(NamedTuple):
    """A :class:`MeanAdjustment` at one step."""

    draft: Tensor  # fp32 [N, c]
    gamma: Tensor  # fp32 [], or [N, 1] if the rows have different values


# ------------------------------------------------------------------------------------------------ a step


def guide(out: Tensor, cfg: Tensor, channels: int) -> tuple[Tensor, Tensor | None]:
    """The guided prediction, and the variance logits; [N, *, c] each. The logits are None if the head predicts none.

    Classifier-free guidance changes only the prediction. The logits come from the branch of the whole condition. If
    there are three branches, the guided prediction is null + scale_of_part (part - null) + scale (whole - part), as in
    InstructPix2Pix (Brooks et al. 2023, arXiv 2211.09800, equation 3). There, the part of the condition is the image.

    Args:
        out: the head's output [P, N, *, c or 2 c]. The branch of the whole condition is first, and with guidance the
            null branch is last. If there are three branches, the part's branch is between them.
        cfg: guidance scale, fp32 [N, 1 ...]; with three branches, ``scale`` and ``scale_of_part``, fp32 [N, 1 ..., 2].
        channels: c.
    """
    prediction = out[0]
    logits = None
    if out.shape[-1] > channels:
        prediction, logits = prediction.chunk(2, -1)
    if len(out) == 2:
        null = out[1, ..., :channels]
        prediction = torch.lerp(null, prediction, cfg)  # null + cfg (prediction - null)
    elif len(out) == 3:
        partial, null = out[1:, ..., :channels]
        scale, scale_of_part = cfg.split(1, -1)
        prediction = torch.lerp(null, partial, scale_of_part) + scale * (prediction - partial)
    return prediction, logits


class StepInputs(NamedTuple):
    """What a step needs besides the output of the head."""

    numbers: MeanNumbers
    cfg: Tensor  # guidance scale, see guide
    noise: Tensor  # fp32 [N, *, c], already multiplied by the temperature
    x: Tensor  # states before the step, fp32 [N, *, c]
    mean_adjustment: StepAdjustment | None  # None if no mean changes


class StepResult(NamedTuple):
    """The rows after a step, fp32 [N, *, c] each."""

    x: Tensor  # mean + temperature exp(log_std) noise
    mean: Tensor
    log_std: Tensor  # without the temperature; fp32 [] if the variance is fixed


def advance(inputs: StepInputs, out: Tensor) -> StepResult:
    """Take one step with all rows. The arguments hold only tensors, so torch.compile can compile this function.

    ``out``: the head's output for the states ``inputs.x``, see :func:`guide`.
    """
    mean_x, mean_per_prediction, log_std_middle, log_std_per_logit = inputs.numbers
    prediction, logits = guide(out, inputs.cfg, inputs.x.shape[-1])
    mean = torch.addcmul(mean_x * inputs.x, mean_per_prediction, prediction)  # the fused form of the mean
    if inputs.mean_adjustment is not None:
        mean = torch.lerp(mean, inputs.mean_adjustment.draft, inputs.mean_adjustment.gamma)

    log_std = log_std_middle if logits is None else torch.addcmul(log_std_middle, log_std_per_logit, logits)
    return StepResult(torch.addcmul(mean, log_std.exp(), inputs.noise), mean, log_std)


# ------------------------------------------------------------------------------------------------ all steps


class ChainHead(Protocol):
    """A diffusion head for the conditions of N rows, as :func:`run_chain` calls it."""

    def step(self, k: int, inputs: StepInputs) -> StepResult:
        """Call the head at step k, take the step with :func:`advance`, and add the work to the counts of the report.
        The caller takes the steps in the order k = 0, 1, 2, ...
        """


def run_chain(batch: DiffusionBatch, head: ChainHead) -> Iterator[StepResult]:
    """Take all steps with all rows, and yield each step's result. The states after the last step are the samples."""
    noise = batch.noise if batch.temperature == 1 else batch.noise * batch.temperature
    noises = noise.unbind()
    last_noise = len(noises) - 1

    x = batch.x
    adjustment = None
    for k, numbers in enumerate(batch.table.mean_numbers):
        if batch.fixed_tokens is not None:
            x = batch.fixed_tokens.follow(x, k)
        if batch.mean_adjustment is not None:
            adjustment = batch.mean_adjustment.at(k)

        result = head.step(k, StepInputs(numbers, batch.cfg, noises[min(k, last_noise)], x, adjustment))
        x = result.x
        yield result


def joined(first: DiffusionBatch, second: DiffusionBatch) -> DiffusionBatch:
    """The rows of two batches in one batch. Each row keeps the coefficients of its steps. The assertions say which
    batches can be joined.

    Only ``second`` may have a :class:`MeanAdjustment`. In the joined batch, gamma is 0 for the rows of ``first``, so
    their means do not change.
    """
    assert len(first.table) == len(second.table)
    assert first.temperature == second.temperature
    assert not first.table.ends_with_noise and not second.table.ends_with_noise
    assert first.fixed_tokens is None and second.fixed_tokens is None
    assert first.mean_adjustment is None

    parts = (first, second)
    columns = [part.table.numbers[:, :, None, None].expand(-1, -1, len(part.x), -1) for part in parts]
    times = [part.table.times[:, None].expand(-1, len(part.x), -1) for part in parts]

    adjustment = None
    if second.mean_adjustment is not None:
        draft = torch.cat([torch.zeros_like(first.x), second.mean_adjustment.draft])
        gamma = torch.zeros(len(second.mean_adjustment.gamma), len(draft), 1, device=draft.device)
        gamma[:, len(first.x) :] = second.mean_adjustment.gamma[:, None, None]
        adjustment = MeanAdjustment(draft, gamma)

    return DiffusionBatch(
        z=torch.cat([part.z for part in parts], 1),
        cfg=torch.cat([part.cfg for part in parts]),
        x=torch.cat([part.x for part in parts]),
        noise=torch.cat([part.noise for part in parts], 1),
        table=StepTable(torch.cat(columns, 2), torch.cat(times, 1), first.table.learns_variance),
        temperature=first.temperature,
        mean_adjustment=adjustment,
    )
