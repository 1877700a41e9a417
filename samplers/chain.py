"""Sampling with a diffusion head: a chain of Gaussian steps, for many rows at once.

A row is a token of MAR or NextStep, or a block of BitDance. At every step, the head makes a *prediction* from the row's
state x. The prediction and x determine the mean and the std of a Gaussian. The next state is sampled from this
Gaussian. ``diffusion_steps.py`` has the equations, and a table with their coefficients. All states are fp32, and so is
the arithmetic of the steps, whatever the dtype of the network.

The file has these parts:

- :class:`DiffusionBatch`, the rows to sample. FastHybrid changes the means of some rows (:class:`MeanAdjustment`). An
  edit with BitDance fixes some tokens of a row (:class:`FixedTokens`).
- :func:`advance`, one step of all rows.
- The objects that call the head's network (:class:`HeadNetwork`) for a batch: :class:`FullChainHead` takes one step
  after another with all rows, and :class:`SpeculationHead` accepts any states at any steps (``speculation.py``). Both
  compute the whole network. LazyMAR's head, in ``mar/lazy/head.py``, reuses cached results.
- :func:`run_chain`, the loop over the steps.
- :class:`HeadSampler`, which makes the objects for a batch. MAR's samplers also run the loop with it. BitDance and
  NextStep use ``speculation.take_steps`` instead.

Shapes: N rows of shape [*, c]. In BitDance, * is the number of tokens in a row; in MAR and NextStep, this dimension is
absent. "1 ..." stands for dimensions of size 1, so that a tensor broadcasts to the rows. w and w' are the widths of
embeddings and of modulations. There are S steps, and P branches of guidance:

- P = 1 without guidance;
- P = 2 with guidance: the condition, and the null condition;
- P = 3 if a part of the condition has its own scale: the whole condition, the part, and the null condition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..networks.speed import Recordable, recorded
from ..reports.record import Report
from .diffusion_steps import MeanNumbers, StepTable

# BitDance and NextStep compute at most this many numbers of modulations at once; see budget in HeadSampler. MAR's
# samplers have a budget of their own, BUDGET in networks/mar.py.
MODULATION_BUDGET = 1 << 27

# ------------------------------------------------------------------------------------------------ a batch


@dataclass(eq=False)
class DiffusionBatch:
    """N rows to sample, in their states before the first of S steps."""

    z: Tensor  # conditions [P, N, *, D] in the dtype of the head; with guidance, the null branch is last
    cfg: Tensor  # guidance scale, fp32 [N, 1 ...]; if P = 3, two scales, fp32 [N, 1 ..., 2], see guide
    x: Tensor  # states before the first step, fp32 [N, *, c]
    # Noise of the steps, fp32 [S, N, *, c]. If the last step adds no noise, its entry may be absent: [S - 1, N, *, c].
    # The last step then reads the previous step's entry. This has no effect, because the last step's std is 0.
    noise: Tensor
    table: StepTable
    temperature: float = 1.0  # each std is multiplied by this number
    fixed_tokens: FixedTokens | None = None  # None if no token is fixed
    mean_adjustment: MeanAdjustment | None = None  # None if no mean changes

    def some_steps(self, first: int, stop: int) -> DiffusionBatch:
        """The same rows with only the steps ``first`` to ``stop - 1``. The rows must have no fixed tokens."""
        assert self.fixed_tokens is None, "this method does not select the steps of FixedTokens.t"
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

    def follow_rows(self, x: Tensor, row: Tensor, step: Tensor) -> Tensor:
        """:meth:`follow` for M states x [M, *, c]. State i is a state of row ``row[i]`` before step ``step[i]``, both
        int64 [M].
        """
        t = self.t[step].view(-1, *(1,) * (x.ndim - 1))
        return torch.where(self.free[row], x, (1 - t) * self.start[row] + t * self.value[row])


class MeanAdjustment(NamedTuple):
    """Moves the mean of each step towards a draft: (1 - gamma) mean + gamma draft."""

    draft: Tensor  # fp32 [N, c]
    gamma: Tensor  # gamma of each step, fp32 [S]; [S, N, 1] in a batch that ``joined`` made

    def at(self, k: int) -> StepAdjustment:
        """The adjustment at step k."""
        return StepAdjustment(self.draft, self.gamma[k])


class StepAdjustment(NamedTuple):
    """A :class:`MeanAdjustment` at one step."""

    draft: Tensor  # fp32 [N, c]
    gamma: Tensor  # fp32 []; [N, 1] in a batch that ``joined`` made


def noise_for_steps(noise: Tensor, count: int) -> Tensor:
    """Noise [count, ...] for ``count`` steps, picked from the noise [T, ...] of T steps.

    Step k takes entry k T // count. So early steps take early entries, late steps take late entries, and images with
    different numbers of steps stay similar.
    """
    if count != len(noise):
        k = torch.arange(count, device=noise.device)
        noise = noise[k * len(noise) // count]

    return noise.contiguous()


# ------------------------------------------------------------------------------------------------ a step


def guide(out: Tensor, cfg: Tensor, channels: int) -> tuple[Tensor, Tensor | None]:
    """The guided prediction, and the variance logits; [N, *, c] each. The logits are None if the head predicts none.

    Classifier-free guidance changes only the prediction. The logits come from the branch of the whole condition. If
    there are three branches, the guided prediction is null + scale_of_part (part - null) + scale (whole - part), as in
    InstructPix2Pix (Brooks et al. 2023, arXiv 2211.09800, equation 3). There, the part of the condition is the image.

    Args:
        out: the head's output [P, N, *, c or 2 c], with the branches of the conditions z: first the whole condition,
            then the part if there are three branches, and with guidance the null branch last. A cached step of LazyMAR
            gives a single branch, which contains guidance already.
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


# ------------------------------------------------------------------------------------------------ the head


class HeadNetwork(Protocol):
    """The network of a diffusion head, see ``networks/mar.py`` and ``networks/bitdance.py``. The *modulations* are the
    scales, shifts and gates of the head's layers. They depend on a condition and a time, but not on the state.
    """

    cond_embed: Any  # a layer that turns conditions [..., D] into embeddings [..., w]

    @property
    def modulation_numbers(self) -> int:
        """How many numbers the modulations of one token contain, at one time and in one branch."""

    def modulations(self, embedding: Tensor) -> list[Tensor]:
        """Modulations [..., w'] for embeddings [..., w]. Each embedding is the sum of a condition's and a time's
        embedding.
        """

    def denoise(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """The predictions, fp32 [P, N, *, c]; or fp32 [P, N, *, 2 c] if c variance logits follow the c predictions.

        ``x``: states, fp32 [N, *, c]. ``modulations``: [P, N, *, w'] each.
        """


class ChainHead(Protocol):
    """A diffusion head for the conditions of N rows, as :func:`run_chain` calls it."""

    def step(self, k: int, inputs: StepInputs) -> StepResult:
        """Call the head at step k, take the step with :func:`advance`, and add the work to the counts of the report.
        The caller takes the steps in the order k = 0, 1, 2, ...
        """


class _FullHead:
    """What :class:`FullChainHead` and :class:`SpeculationHead` share: the whole diffusion head for the conditions of N
    rows. The report counts the calls. For ``budget`` see :class:`HeadSampler`.

    One matrix product computes the modulations of many steps, so it reads the weights only once for all these steps.
    """

    def __init__(self, net: Recordable, head: HeadNetwork, batch: DiffusionBatch, report: Report, budget: int):
        self._net = net
        self._head = head
        self._report = report
        self._condition = head.cond_embed(batch.z)  # embeddings of the conditions, [P, N, *, w]

        # Embeddings of the steps' times, in a shape that broadcasts to [S, P, N, *, w]: [S, 1, N, 1 ..., w], or
        # [S, 1, 1, 1 ..., w] if all rows share the same steps.
        branches, rows, *tokens, _ = batch.z.shape
        times = batch.table.times
        rows_of_times = 1 if times.ndim == 2 else rows
        ones = (1,) * len(tokens)
        self._times = times.view(len(times), 1, rows_of_times, *ones, times.shape[-1])

        # The budget allows ``_rows_at_once`` rows at one step, or ``_steps_at_once`` steps of all rows.
        numbers_of_row = branches * math.prod(tokens) * head.modulation_numbers
        self._rows_at_once = max(1, budget // numbers_of_row)
        self._steps_at_once = max(1, budget // max(1, numbers_of_row * rows))  # the batch may have no rows


class FullChainHead(_FullHead):
    """Calls the whole head one step after another, for :func:`run_chain`."""

    # The modulations from the newest product: for each step of the product, a tuple of tensors [P, N, *, w'].
    _newest: Sequence[tuple[Tensor, ...]] = ()

    def step(self, k: int, inputs: StepInputs) -> StepResult:
        """See :class:`ChainHead`."""
        at_once = self._steps_at_once
        if k % at_once == 0:  # steps come in order (ChainHead), so a new product starts here
            modulations = self._head.modulations(self._times[k : k + at_once] + self._condition)
            self._newest = for_each_step(self._net, modulations)

        self._report.add(head_calls=1, head_rows=self._condition.shape[:-1].numel())
        return full_step(self._net, self._head, self._newest[k % at_once], inputs)


def for_each_step(net: Recordable, modulations: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Divide the modulations of many steps, [number of steps, ...] each, into one tuple per step, [...] each."""
    if net.records:  # a function recorded as a CUDA graph copies contiguous tensors fastest
        modulations = [m.contiguous() for m in modulations]
    return list(zip(*modulations, strict=True))


@recorded
def full_step(net: Recordable, head: HeadNetwork, modulations: Sequence[Tensor], inputs: StepInputs) -> StepResult:
    """Call the whole head, and :func:`advance` all rows with the head's output."""
    out = net.compiled(type(head).denoise, "diffusion head")(head, inputs.x, modulations)
    return net.compiled(advance, "diffusion steps")(inputs, out)


class SpeculationHead(_FullHead):
    """Calls the whole head for any states of N rows, for speculation. The states may be at different steps. All rows of
    the batch must share the same steps.
    """

    def __init__(self, net: Recordable, head: HeadNetwork, batch: DiffusionBatch, report: Report, budget: int):
        super().__init__(net, head, batch, report, budget)
        self._denoise = net.compiled(type(head).denoise, "diffusion head")
        assert batch.table.times.ndim == 2, "all rows share the same steps"
        self._shared_times = batch.table.times  # [S, w]

        # The modulations of all rows at all steps, [P, S, N, *, w'] each; None if they exceed the budget.
        self._all_modulations: list[Tensor] | None = None
        if len(batch.table) <= self._steps_at_once:
            by_step = head.modulations(self._times + self._condition)  # [S, P, N, *, w'] each
            self._all_modulations = [m.transpose(0, 1) for m in by_step]

    def at_states(self, row: Tensor, step: Tensor, x: Tensor) -> Tensor:
        """The head's output [P, M, *, c or 2 c] for M states x, fp32 [M, *, c]. State i belongs to row ``row[i]`` at
        step ``step[i]``, int64 [M] each on the device. Each call of the head fits the budget.
        """
        most = self._rows_at_once  # a state takes as many modulations as a row at one step
        parts = []
        for rows, steps, states in zip(row.split(most), step.split(most), x.split(most), strict=True):
            out = self._denoise(self._head, states, self._modulations_at(rows, steps))
            self._report.add(head_calls=1, head_rows=out.shape[:-1].numel())
            parts.append(out)

        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _modulations_at(self, row: Tensor, step: Tensor) -> list[Tensor]:
        """The modulations [P, M, *, w'] for the rows and steps of :meth:`at_states`."""
        if self._all_modulations is not None:
            return [m[:, step, row] for m in self._all_modulations]

        ones = (1,) * (self._condition.ndim - 3)
        times = self._shared_times[step].view(1, len(step), *ones, self._condition.shape[-1])  # [1, M, 1 ..., w]
        return self._head.modulations(times + self._condition[:, row])  # from embeddings [P, M, *, w]


# ------------------------------------------------------------------------------------------------ all steps


def run_chain(batch: DiffusionBatch, head: ChainHead) -> Iterator[StepResult]:
    """Take all steps with all rows, and yield each step's result. The states after the last step are the samples."""
    # To multiply the noise by the temperature is the same as to multiply each std.
    noise = batch.noise if batch.temperature == 1 else batch.noise * batch.temperature
    noises = noise.unbind()
    last_noise = len(noises) - 1  # the last step may have no entry of its own, see DiffusionBatch.noise

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
    """The rows of two batches in one batch: first the rows of ``first``, then the rows of ``second``. Each row keeps
    the coefficients of its steps. In FastHybrid, ``first`` has the full diffusions, and ``second`` has the refinements.
    The assertions say which batches can be joined.
    """
    parts = (first, second)
    assert len(first.table) == len(second.table)
    assert first.x.ndim == second.x.ndim == 2, "a row has the shape [c], as in MAR"
    assert all(part.table.numbers.ndim == 2 for part in parts), "within a part, all rows share the same steps"
    assert first.temperature == second.temperature
    assert not first.table.ends_with_noise and not second.table.ends_with_noise
    assert first.fixed_tokens is None and second.fixed_tokens is None
    assert first.mean_adjustment is None

    # In the joined table, each row has its own steps: numbers [S, 8, N, 1] and times [S, N, w]. The rows of a part all
    # have the numbers and times of the part.
    numbers = [part.table.numbers[:, :, None, None].expand(-1, -1, len(part.x), -1) for part in parts]
    times = [part.table.times[:, None].expand(-1, len(part.x), -1) for part in parts]

    # Each row has its own gamma, too. It is 0 for the rows of ``first``, so their means do not change.
    adjustment = None
    if second.mean_adjustment is not None:
        draft_of_second, gamma_of_second = second.mean_adjustment
        assert gamma_of_second.ndim == 1, "within a part, all rows share the same gamma"
        draft = torch.cat([torch.zeros_like(first.x), draft_of_second])
        gamma = torch.zeros(len(gamma_of_second), len(draft), 1, device=draft.device)  # [S, N, 1]
        gamma[:, len(first.x) :] = gamma_of_second[:, None, None]
        adjustment = MeanAdjustment(draft, gamma)

    return DiffusionBatch(
        z=torch.cat([part.z for part in parts], 1),
        cfg=torch.cat([part.cfg for part in parts]),
        x=torch.cat([part.x for part in parts]),
        noise=torch.cat([part.noise for part in parts], 1),
        table=StepTable(torch.cat(numbers, 2), torch.cat(times, 1), first.table.learns_variance),
        temperature=first.temperature,
        mean_adjustment=adjustment,
    )


class HeadSampler:
    """The sampler of a diffusion head. It has two jobs:

    - :meth:`for_chain` and :meth:`for_speculation` wrap the head's network for one batch.
    - :meth:`sample` and :meth:`sample_both` run :func:`run_chain` on the wrapped network. Only MAR's samplers call
      these two.

    The wrapped network computes the head *in full*: every step computes all layers in all branches. In the derived
    class in ``mar/lazy/head.py``, :meth:`for_chain` wraps the network with LazyMAR's cache, which reuses results.
    """

    def __init__(self, net: Recordable, head: HeadNetwork, report: Report, budget: int):
        """
        Args:
            net: the network that ``head`` is a part of.
            report: counts the calls.
            budget: how many numbers of modulations one matrix product may compute at most. A product always computes at
                least one step (in :class:`SpeculationHead`, one state), even if this one exceeds the budget.
        """
        self.net = net
        self.head = head
        self.report = report
        self.budget = budget

    def is_full(self, steps: int) -> bool:
        """Whether a diffusion of ``steps`` steps computes the head in full at every step."""
        return True

    def for_chain(self, batch: DiffusionBatch) -> ChainHead:
        """The object for a batch whose rows all take each step together; see :func:`run_chain`."""
        return FullChainHead(self.net, self.head, batch, self.report, self.budget)

    def for_speculation(self, batch: DiffusionBatch) -> SpeculationHead:
        """The object for a batch with speculation. This object always computes the head in full."""
        return SpeculationHead(self.net, self.head, batch, self.report, self.budget)

    def sample(self, batch: DiffusionBatch) -> Tensor:
        """Sample the N tokens of a batch: fp32 [N, c]. Without tokens or steps, the result is ``batch.x``."""
        x = batch.x
        if len(batch.x) and len(batch.table.times):
            for result in run_chain(batch, self.for_chain(batch)):
                x = result.x
        return x

    def sample_both(self, first: DiffusionBatch, second: DiffusionBatch) -> tuple[Tensor, Tensor]:
        """Sample the tokens of two batches, fp32 [N, c] for each batch, in one loop.

        The batch with more steps starts alone, and the other batch joins for the last steps. So the number of calls
        of the head is the number of steps of the longer diffusion. In this example, ``first`` has 5 steps, and
        ``second`` has 3 steps::

            head call        0  1  2  3  4
            step of first    0  1  2  3  4
            step of second         0  1  2

        A cache of the head can serve only one diffusion at a time, so with a cache the diffusions run one after the
        other.
        """
        # Number of steps that both batches take together.
        together = min(len(first.table), len(second.table)) if len(first.x) and len(second.x) else 0
        if not together or not (self.is_full(len(first.table)) and self.is_full(len(second.table))):
            return self.sample(first), self.sample(second)

        # 1. The first ``alone`` steps of the longer diffusion. For the shorter diffusion, ``alone`` is 0.
        remaining = []
        for batch in (first, second):
            alone = len(batch.table) - together
            x = self.sample(batch.some_steps(0, alone))
            remaining.append(replace(batch.some_steps(alone, len(batch.table)), x=x))

        # 2. The remaining steps, of both diffusions together.
        x = self.sample(joined(*remaining))
        return x[: len(first.x)], x[len(first.x) :]
