"""Sampling with a diffusion head: a chain of Gaussian steps, for many rows at once.

A row is a token of MAR or NextStep, or a block of BitDance. At every step, the head makes a *prediction* from the row's
state x. From the prediction and x follows the *data*, an estimate of the row without noise. The next state is sampled
from a Gaussian around a mix of the state and the data:

    data = data_x x + data_out prediction
    x   <- N(x_coefficient x + data_coefficient data, exp(middle + slope logits)^2)

MAR's prediction is the noise in x (Li et al. 2024, arXiv 2406.11838, section 3.2), and its data is x0. x_coefficient
and data_coefficient are the factors of the posterior mean (coef2 and coef1 in the published code). MAR's head also
predicts the logits of a learned variance. BitDance's prediction (arXiv 2602.14041) is the data, so data_x is 0 and
data_out is 1. The variances of BitDance and NextStep (``nextstep/flow.py``) are fixed, so slope is 0. In MAR and
BitDance, the state after the last step is the data itself. With some of NextStep's solvers, the last step adds noise
like the other steps. States and steps are fp32, whatever the dtype of the network.

:func:`run_chain` is the loop. All rows may share the same steps, or each row may have its own steps. Only in the second
case, :class:`StepTable` has an axis for the rows. FastHybrid changes the means of some rows (:class:`MeanAdjustment`).
An edit with BitDance fixes some tokens of a row (:class:`FixedTokens`). ``speculation.py`` verifies several steps in
one call of the head.

Shapes: N rows of shape [*, c], with c numbers per token; * is the number of tokens in a row of BitDance, and is absent
in MAR and NextStep. "1 ..." stands for dimensions of size 1, which broadcast to [*, c]. There are S steps, and P
branches of guidance:

- P = 1 without guidance;
- P = 2 with guidance: the condition, and the null condition;
- P = 3 if a part of the condition has its own scale: the whole condition, the part, and the null condition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..networks.speed import Recordable, recorded
from ..networks.torch_state import to_device
from ..reports.record import Report

# BitDance and NextStep compute at most this many numbers of the head's modulations at once; see _HeadAtConditions.
MODULATION_BUDGET = 1 << 27


@dataclass(eq=False)
class DiffusionBatch:
    """N rows to sample, in their states before the first of S steps."""

    z: Tensor  # conditions [P, N, *, D] in the dtype of the head; with guidance, the null branch is last
    cfg: Tensor  # guidance scale, fp32 [N, 1 ...]; with three branches, two scales, [N, 1 ..., 2], see guide
    x: Tensor  # states before the first step, fp32 [N, *, c]
    noise: Tensor  # noise of the steps, fp32 [S, N, *, c], or [S - 1, ...] if the last step adds none
    table: StepTable
    temperature: float = 1.0  # factor of the stds
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


def guide(out: Tensor, cfg: Tensor, channels: int) -> tuple[Tensor, Tensor | None]:
    """The guided prediction, and the variance logits; [N, *, c] each. The logits are None if the head predicts none.

    Classifier-free guidance changes only the prediction. The logits come from the branch of the whole condition. With
    three branches, the guided prediction is null + scale_of_part (part - null) + scale (whole - part), as in
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


class StepAdjustment(NamedTuple):
    """A :class:`MeanAdjustment` at one step."""

    draft: Tensor  # fp32 [N, c]
    gamma: Tensor  # fp32 [], or [N, 1] if the rows have different values


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
    mean_x, mean_out, middle, slope = inputs.numbers
    prediction, logits = guide(out, inputs.cfg, inputs.x.shape[-1])
    mean = torch.addcmul(mean_x * inputs.x, mean_out, prediction)
    if inputs.mean_adjustment is not None:
        mean = torch.lerp(mean, inputs.mean_adjustment.draft, inputs.mean_adjustment.gamma)

    log_std = middle if logits is None else torch.addcmul(middle, slope, logits)
    return StepResult(torch.addcmul(mean, log_std.exp(), inputs.noise), mean, log_std)


def run_chain(batch: DiffusionBatch, head: ChainHead) -> Iterator[StepResult]:
    """Take all steps, each with all rows, and yield each result. The states after the last step are the samples."""
    noise = batch.noise if batch.temperature == 1 else batch.noise * batch.temperature
    # If the last step has no noise of its own, it reads the added entry. The std of such a step is 0, so the value of
    # the entry does not matter.
    noises = (*noise, noise[-1])

    x = batch.x
    adjustment = None
    for k, numbers in enumerate(batch.table.mean_numbers):
        if batch.fixed_tokens is not None:
            x = batch.fixed_tokens.follow(x, k)
        if batch.mean_adjustment is not None:
            adjustment = StepAdjustment(batch.mean_adjustment.draft, batch.mean_adjustment.gamma[k])

        result = head.step(k, StepInputs(numbers, batch.cfg, noises[k], x, adjustment))
        x = result.x
        yield result


def joined(first: DiffusionBatch, second: DiffusionBatch) -> DiffusionBatch:
    """The rows of two batches in one batch. Each row keeps the numbers of its steps.

    Both batches must have the same number of steps and the same temperature. Neither batch may have fixed tokens, or a
    last step with noise of a fixed variance. Only ``second`` may have a :class:`MeanAdjustment`. In the joined batch,
    the rows of ``first`` have gamma = 0.
    """
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


# ------------------------------------------------------------------------------------------------ numbers of the steps


class DiffusionStep(NamedTuple):
    """The numbers of a step. The names are those in the equations at the top of this file."""

    data_x: float
    data_out: float
    x_coefficient: float
    data_coefficient: float
    middle: float  # minus infinity for no noise
    slope: float  # 0 for a fixed variance


class StepNumbers(NamedTuple):
    """The numbers of many steps as tensors: the fields of :class:`DiffusionStep`, then mean_x and mean_out. The mean of
    a step is mean_x x + mean_out prediction.
    """

    data_x: Tensor
    data_out: Tensor
    x_coefficient: Tensor
    data_coefficient: Tensor
    middle: Tensor
    slope: Tensor
    mean_x: Tensor
    mean_out: Tensor


class MeanNumbers(NamedTuple):
    """The numbers of one step that determine mean and std of the next state, fp32 [] or [N, 1 ...] each."""

    mean_x: Tensor
    mean_out: Tensor
    middle: Tensor
    slope: Tensor


@dataclass(frozen=True, eq=False)
class StepTable:
    """The numbers of S steps, on the device. The step with the most noise is first."""

    # fp32 [S, 8], one column for each field of StepNumbers; [S, 8, N, 1 ...] if each row has its own steps.
    numbers: Tensor
    times: Tensor  # embeddings of the steps' times, [S, w], or [S, N, w] if each row has its own steps
    learns_variance: bool  # whether the head predicts logits of the variance
    ends_with_noise: bool = False  # whether the last step adds noise of a fixed variance; usually it adds none

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def mean_numbers(self) -> list[MeanNumbers]:
        """The numbers that :func:`advance` takes, for each step."""
        *_, middle, slope, mean_x, mean_out = self.numbers.unbind(1)
        return list(map(MeanNumbers, mean_x, mean_out, middle, slope))

    def columns(self) -> StepNumbers:
        """The numbers of all steps, fp32 [S] or [S, N, 1 ...] each."""
        return StepNumbers(*self.numbers.unbind(1))

    def some_steps(self, first: int, stop: int) -> StepTable:
        """The steps ``first`` to ``stop - 1``."""
        return replace(self, numbers=self.numbers[first:stop], times=self.times[first:stop])


def step_table(steps: Sequence[DiffusionStep], times: Tensor) -> StepTable:
    """The table of ``steps``. ``times``: embeddings of the steps' times, [S, w]."""
    rows = []
    for step in steps:
        mean_x = step.data_coefficient * step.data_x + step.x_coefficient
        mean_out = step.data_coefficient * step.data_out
        rows.append((*step, mean_x, mean_out))

    learns_variance = any(step.slope for step in steps)
    ends_with_noise = not learns_variance and steps[-1].middle > -math.inf
    return StepTable(to_device(torch.tensor(rows), times.device), times, learns_variance, ends_with_noise)


def noise_for_steps(noise: Tensor, count: int) -> Tensor:
    """Noise [count, ...] for ``count`` steps, picked from the noise [T, ...] of T steps.

    Step k takes entry k T // count. So a stage of the diffusion uses the same noise whatever the number of steps,
    and images stay comparable.
    """
    if count != len(noise):
        k = torch.arange(count, device=noise.device)
        noise = noise[k * len(noise) // count]

    return noise.contiguous()


# ------------------------------------------------------------------------------------------------ particular rows


@dataclass(frozen=True, eq=False)
class FixedTokens:
    """The tokens of the rows that an edit fixes, with their values. During the diffusion, the state of a fixed token
    follows the path (1 - t) start + t value.
    """

    t: Tensor  # time before each step, fp32 [S]
    start: Tensor  # noise, fp32 [N, *, c]
    value: Tensor  # fp32 [N, *, c]
    free: Tensor  # bool, broadcasts to [N, *, c]: True for tokens that are not fixed

    def follow(self, x: Tensor, k: int) -> Tensor:
        """The states x [N, *, c] before step k, with each fixed token moved to its path."""
        t = self.t[k]
        return torch.where(self.free, x, (1 - t) * self.start + t * self.value)

    def follow_rows(self, x: Tensor, row: Tensor, k: Tensor) -> Tensor:
        """:meth:`follow` for R states x [R, *, c]; state i is row ``row[i]`` before step ``k[i]``, int64 [R] each."""
        t = self.t[k].view(-1, *(1,) * (x.ndim - 1))
        return torch.where(self.free[row], x, (1 - t) * self.start[row] + t * self.value[row])


class MeanAdjustment(NamedTuple):
    """Moves the mean of each step towards a draft: (1 - gamma) mean + gamma draft."""

    draft: Tensor  # fp32 [N, c]
    gamma: Tensor  # gamma of each step, fp32 [S], or [S, N, 1] if the rows have different values


# ------------------------------------------------------------------------------------------------ the head


class HeadNetwork(Protocol):
    """A diffusion head, see ``networks/mar.py`` and ``networks/bitdance.py``. Its *modulations* are the scales, shifts
    and gates of its layers. They depend on a condition and a time, but not on the state.
    """

    cond_embed: Any  # a layer that turns conditions [..., D] into embeddings [..., w]

    @property
    def modulation_numbers(self) -> int:
        """How many numbers the modulations of one token contain in total."""

    def modulations(self, embedding: Tensor) -> list[Tensor]:
        """Modulations [..., w'] for embeddings [..., w]. Each of these embeddings is the embedding of a condition plus
        the embedding of a time.
        """

    def denoise(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """Predictions, followed by variance logits if the head learned them, fp32 [P, N, *, c or 2 c].

        ``x``: states, fp32 [N, *, c]. ``modulations``: [P, N, *, w'] each.
        """


class ChainHead(Protocol):
    """A diffusion head for the conditions of N rows, for :func:`run_chain`."""

    def step(self, k: int, inputs: StepInputs) -> StepResult:
        """Call the head at step k, :func:`advance` all rows with the head's output, and add the work to the report's
        counts. The caller takes the steps in the order k = 0, 1, 2, ...
        """


class _HeadAtConditions:
    """The whole diffusion head, without LazyMAR's cache, for the conditions of N rows. The report counts the work.

    One matrix product computes the modulations of many steps, so the weights are read only once for all these steps.

    Args:
        budget: how many numbers of modulations one product may compute. One step (in :class:`HeadAtStates`, one state)
            is computed at once even if its modulations exceed the budget.
    """

    def __init__(self, net: Recordable, head: HeadNetwork, batch: DiffusionBatch, report: Report, budget: int):
        self._net = net
        self._head = head
        self._report = report
        self._condition = head.cond_embed(batch.z)

        # Embeddings of the steps' times, [S, 1, 1 or N, 1 ..., w].
        times = batch.table.times
        ones = (1,) * (batch.z.ndim - 3)
        self._times = times.view(len(times), 1, -1, *ones, times.shape[-1])

        # How many rows at one step fit the budget, and how many steps of all rows.
        branches, rows, *tokens, _ = batch.z.shape
        numbers_of_row = branches * math.prod(tokens) * head.modulation_numbers
        self._rows_at_once = max(1, budget // numbers_of_row)
        self._steps_at_once = max(1, budget // max(1, numbers_of_row * rows))


class ChainedHead(_HeadAtConditions):
    """Calls the whole head one step after another, for :func:`run_chain`."""

    # The modulations from the newest product: for each step, a tuple of tensors [P, N, *, w'].
    _newest: Sequence[tuple[Tensor, ...]] = ()

    def step(self, k: int, inputs: StepInputs) -> StepResult:
        """See :class:`ChainHead`."""
        at_once = self._steps_at_once
        if k % at_once == 0:
            modulations = self._head.modulations(self._times[k : k + at_once] + self._condition)
            if self._net.records:  # a function recorded as a CUDA graph copies contiguous tensors fastest
                modulations = [m.contiguous() for m in modulations]
            self._newest = list(zip(*modulations, strict=True))

        self._report.add(head_calls=1, head_rows=self._condition.shape[:-1].numel())
        return full_step(self._net, self._head, self._newest[k % at_once], inputs)


@recorded
def full_step(net: Recordable, head: HeadNetwork, modulations: Sequence[Tensor], inputs: StepInputs) -> StepResult:
    """Call the whole head, and :func:`advance` all rows with the head's output."""
    out = net.compiled(type(head).denoise, "diffusion head")(head, inputs.x, modulations)
    return net.compiled(advance, "diffusion steps")(inputs, out)


class HeadAtStates(_HeadAtConditions):
    """Calls the whole head for any states of N rows, for speculation. The states may be at different steps."""

    def __init__(self, net: Recordable, head: HeadNetwork, batch: DiffusionBatch, report: Report, budget: int):
        super().__init__(net, head, batch, report, budget)
        self._denoise = net.compiled(type(head).denoise, "diffusion head")

        # The modulations of all rows at all steps, [P, S, N, *, w'] each; None if they exceed the budget.
        self._all_modulations: list[Tensor] | None = None
        if len(batch.table) <= self._steps_at_once:
            self._all_modulations = [m.transpose(0, 1) for m in head.modulations(self._times + self._condition)]

    def at_states(self, row: Tensor, k: Tensor, x: Tensor) -> Tensor:
        """The head's output [P, M, *, c or 2 c] for M states x, fp32 [M, *, c], in calls that fit the budget.

        State i belongs to row ``row[i]`` at step ``k[i]``, int64 [M] each on the device. All rows have the same steps.
        """
        most = self._rows_at_once
        parts = []
        for rows, steps, states in zip(row.split(most), k.split(most), x.split(most), strict=True):
            out = self._denoise(self._head, states, self._modulations_at(rows, steps))
            self._report.add(head_calls=1, head_rows=out.shape[:-1].numel())
            parts.append(out)

        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _modulations_at(self, row: Tensor, k: Tensor) -> list[Tensor]:
        """The modulations [P, M, *, w'] for the rows and steps of :meth:`at_states`."""
        if self._all_modulations is not None:
            return [m[:, k, row] for m in self._all_modulations]

        times = self._times[k, :, 0].transpose(0, 1)  # [1, M, 1 ..., w]: all rows have the same steps
        return self._head.modulations(times + self._condition[:, row])
