"""LazyMAR's cache of the diffusion head: what a diffusion step reuses from earlier diffusion steps.

Source: the published code of Yan et al. 2025, "LazyMAR" (ICCV 2025, arXiv 2503.12450). The paper's speed-ups include
this cache, but the paper does not describe it.

The file in reading order: the kinds of diffusion steps (:class:`CachedChainHead`), the shifts, scales and gates that
each kind needs (:class:`Modulations`), and the computation of a step of each kind (:func:`evaluate_full` and
:func:`evaluate_cached`).

Shapes: N tokens of c channels, w head width, P branches. P is 2 with guidance: first the conditional branch, then the
null branch, which does not read the class or prompt. P is 1 without guidance. A batch of the head has R rows, a row for
each token in each branch that the step computes. In this file, a step is a diffusion step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.mar import BUDGET, MAR, DiffusionHead, HeadBlock, modulated
from ....networks.speed import recorded
from ....networks.torch_state import to_device
from ....reports.record import Report
from ...chain import ChainHead, DiffusionBatch, HeadSampler, StepInputs, StepResult, advance, for_each_step
from .settings import CacheSettings, head_period

# Blocks 1 to 4 are the *middle* blocks of the head. The cache holds the sum of what they add to the head's features.
# Block 0 and the blocks from 5 on are the *outer* blocks. The cache holds the output of each outer block's MLP. A small
# head may have only some of these blocks.
MIDDLE = range(1, 5)


class StepKind(Enum):
    """Kinds of diffusion steps, see :class:`CachedChainHead`."""

    FULL = "full"
    EDGE = "edge"
    REUSED = "reused"


class HeadSchedule(NamedTuple):
    """What the head computes at each diffusion step. Step 0 has the highest timestep."""

    kinds: list[StepKind]  # the kind of each step
    steps_of_kind: dict[StepKind, Tensor]  # indices of the steps of each kind, int64 on the device
    uses_cache: bool  # whether the period is above 1; if it is 1, all steps are full


def head_schedule(steps: int, period: int, device: torch.device) -> HeadSchedule:
    """The schedule of ``steps`` diffusion steps. :class:`CachedChainHead` describes the kinds of steps.

    The first step is full. A step is also full if the number of steps left after it is 0 or another multiple of
    ``period``. Any other step is an edge step if more than 90 % of all steps are left after it, and otherwise reused.
    For example, :func:`head_period` is 4 for 50 steps. These are the first 11 steps (F for full, E for edge, R for
    reused)::

        step  0  1  2  3  4  5  6  7  8  9  10 ...
        left  49 48 47 46 45 44 43 42 41 40 39 ...
        kind  F  F  E  E  R  F  R  R  R  F  R  ...
    """
    kinds: list[StepKind] = []
    for k in range(steps):
        left = steps - 1 - k  # number of steps left after step k
        if k == 0 or left % period == 0:
            kind = StepKind.FULL
        elif left > 0.9 * steps:
            kind = StepKind.EDGE
        else:
            kind = StepKind.REUSED
        kinds.append(kind)

    steps_of_kind = {}
    for kind in StepKind:
        indices = [k for k in range(steps) if kinds[k] is kind]
        steps_of_kind[kind] = to_device(torch.tensor(indices, dtype=torch.int64), device)
    return HeadSchedule(kinds, steps_of_kind, uses_cache=period > 1)


class CachedChainHead:
    """The diffusion head with LazyMAR's cache, for :func:`...chain.run_chain`.

    There are three kinds of steps. A step computes a part of the head, or takes the result of the most recent step that
    computed this part ("cached")::

        part of the head                          full step   edge step   reused step
        guidance                                  computed    cached      cached
        sum of the middle blocks                  computed    cached      cached
        MLPs of the outer blocks                  computed    computed    cached
        gates of the outer blocks, last layer     computed    computed    computed

    The first line is what guidance adds to the noise that the conditional branch predicts. Only guidance needs the null
    branch, so all steps but full steps compute only the conditional branch.
    """

    cache: HeadCache | None = None  # None only before the first step, which is full

    def __init__(
        self,
        net: MAR,
        head: DiffusionHead,
        batch: DiffusionBatch,
        schedule: HeadSchedule,
        outer: Sequence[int],
        report: Report,
    ):
        """``outer``: indices of the outer blocks."""
        self.net = net
        self.head = head
        self.outer = outer
        self.schedule = schedule
        self.branches, self.tokens = batch.z.shape[:2]  # P, N
        self.report = report  # counts the work
        self.next_step = 0  # the step that the caller must take next

        # For each kind, an iterator over the modulations of its steps; see step. Only full steps compute all branches.
        all_branches = head.cond_embed(batch.z.flatten(0, 1))  # [P N, w], the conditional branch first
        self.modulations: dict[StepKind, Iterator[Modulations]] = {}
        for kind, steps in schedule.steps_of_kind.items():
            condition = all_branches if kind is StepKind.FULL else all_branches[: self.tokens]
            self.modulations[kind] = step_modulations(net, head, kind, outer, batch.table.times[steps], condition)

    def step(self, k: int, inputs: StepInputs) -> StepResult:
        """See :class:`...chain.ChainHead`. The caller must take the steps in the order 0, 1, 2, ..., because each call
        advances the iterator of its kind by one step.

        At a full step, the head's output is [P, N, 2 c], and :func:`...chain.guide` applies guidance. At all other
        steps, the output is [1, N, 2 c] and already contains guidance; ``guide`` does not change it.
        """
        assert k == self.next_step, "the modulations are in the order of the steps"
        self.next_step += 1
        kind = self.schedule.kinds[k]
        modulations = next(self.modulations[kind])

        if kind is StepKind.FULL:
            self.report.add(head_calls=1, head_rows=self.branches * self.tokens)
            result, self.cache = take_full_step(self.net, self.head, inputs, modulations, self.branches)
            return result

        assert self.cache is not None, "the first step is full"
        self.report.add(head_calls=1, head_rows=self.tokens, cached_calls=1)
        computes_mlps = kind is StepKind.EDGE
        result, new_cache = take_cached_step(
            self.net, self.head, inputs, modulations, self.outer, self.cache, computes_mlps
        )
        if new_cache is not None:
            self.cache = new_cache
        return result


class CachedHeadSampler(HeadSampler):
    """Makes heads with LazyMAR's cache, or without it if :func:`head_period` is 1."""

    # The base class sets these fields. Here they have the types of MAR.
    net: MAR
    head: DiffusionHead

    def __init__(self, net: MAR, report: Report, settings: CacheSettings):
        super().__init__(net, net.head, report, BUDGET)
        self.settings = settings
        self.outer = tuple(number for number in range(len(self.head.res_blocks)) if number not in MIDDLE)
        self._schedules: dict[int, HeadSchedule] = {}  # by number of diffusion steps

    def is_full(self, steps: int) -> bool:
        """See :meth:`.HeadSampler.is_full`."""
        return head_period(self.settings, steps) == 1

    def for_chain(self, batch: DiffusionBatch) -> ChainHead:
        """See :meth:`.HeadSampler.for_chain`."""
        steps = len(batch.table.times)
        if steps not in self._schedules:
            self._schedules[steps] = head_schedule(steps, head_period(self.settings, steps), batch.x.device)
        schedule = self._schedules[steps]
        if not schedule.uses_cache:
            return super().for_chain(batch)
        return CachedChainHead(self.net, self.head, batch, schedule, self.outer, self.report)


# ------------------------------------------------------------------------------------------------ the modulations


class Modulations(NamedTuple):
    """The modulations of a step, [R, w] each. R is P N at a full step, and N at any other step.

    A modulation is a vector that shifts, scales or gates the features in a layer of the head. It depends on the
    timestep and on the condition z.
    """

    # A full step has a shift, a scale and a gate for each block. An edge step has them for each outer block. A reused
    # step has only a gate for each outer block, because it computes no MLP; then ``shifts`` and ``scales`` are empty.
    shifts: Sequence[Tensor]
    scales: Sequence[Tensor]
    gates: Sequence[Tensor]
    of_last_layer: tuple[Tensor, Tensor]  # shift and scale


def step_modulations(
    net: MAR, head: DiffusionHead, kind: StepKind, outer: Sequence[int], times: Tensor, condition: Tensor
) -> Iterator[Modulations]:
    """The modulations of all steps of one kind, one step after another. Many steps are computed together, so the head
    reads its weights only once for all these steps. :class:`Modulations` says which modulations each kind needs.

    Args:
        outer: indices of the outer blocks.
        times: embeddings of the timesteps of the steps of this kind, [number of steps, w]. All tokens have the same
            steps, because :meth:`.HeadSampler.sample_both` does not join batches if the head has a cache.
        condition: embeddings of the conditions z, [R, w].
    """
    blocks = [*head.res_blocks] if kind is StepKind.FULL else [head.res_blocks[number] for number in outer]
    per_block = 1 if kind is StepKind.REUSED else 3
    numbers_of_step = condition.numel() * (len(blocks) * per_block + 2)  # the last layer has 2 modulations
    steps_at_once = max(1, BUDGET // max(1, numbers_of_step))

    for some_times in times[:, None].split(steps_at_once):
        embedding = some_times + condition  # [steps_at_once, R, w]
        if kind is StepKind.REUSED:
            computed = [*head.gates(embedding, blocks), *head.modulations(embedding, ())]
            for *gates, shift, scale in for_each_step(net, computed):
                yield Modulations((), (), gates, (shift, scale))
        else:
            # Shift, scale and gate of the first block, then of the second block, and so on; then shift and scale of the
            # last layer.
            computed = head.modulations(embedding, blocks)
            for *of_blocks, shift, scale in for_each_step(net, computed):
                yield Modulations(of_blocks[0::3], of_blocks[1::3], of_blocks[2::3], (shift, scale))


# ------------------------------------------------------------------------------------------------ a step of each kind


class HeadCache(NamedTuple):
    """What the steps after a full step reuse, for the conditional branch."""

    mlps: list[Tensor]  # outputs of the outer blocks' MLPs, [N, w] each
    middle: Tensor  # sum of what blocks 1 to 4 added, [N, w]
    # What guidance adds to the head's output, plus the last layer's bias, fp32 [N, 2 c]. With the last layer's weight
    # W, out = h W^T + this; see evaluate_cached, part 2.
    guidance_and_bias: Tensor


# take_full_step and take_cached_step call the head (evaluate_full or evaluate_cached), and then take the diffusion step
# with the head's output (:func:`...chain.advance`).


@recorded
def take_full_step(
    net: MAR, head: DiffusionHead, inputs: StepInputs, modulations: Modulations, branches: int
) -> tuple[StepResult, HeadCache]:
    """Take a full step. Returns the result, and what the next steps reuse."""
    out, cache = net.compiled(evaluate_full, "diffusion head")(head, inputs, modulations, branches)
    return net.compiled(advance, "diffusion steps")(inputs, out), cache


@recorded
def take_cached_step(
    net: MAR,
    head: DiffusionHead,
    inputs: StepInputs,
    modulations: Modulations,
    outer: Sequence[int],
    cache: HeadCache,
    computes_mlps: bool,
) -> tuple[StepResult, HeadCache | None]:
    """Take an edge step or a reused step. Returns the result, and what the next steps reuse.

    After a reused step, the next steps reuse the same ``cache``, and the second result is None: a CUDA graph copies all
    tensors that it returns, so it should return only new tensors.
    """
    evaluate = net.compiled(evaluate_cached, "diffusion head")
    out, new_cache = evaluate(head, inputs, modulations, outer, cache, computes_mlps)
    return net.compiled(advance, "diffusion steps")(inputs, out), new_cache


def evaluate_full(
    head: DiffusionHead, inputs: StepInputs, modulations: Modulations, branches: int
) -> tuple[Tensor, HeadCache]:
    """Compute the head in full. Returns the head's output, [P, N, 2 c], and what the next steps reuse. The output has c
    channels of noise, then c channels of variance logits.

    Args:
        inputs: this function reads the tokens' states and guidance scales from them.
        modulations: the modulations of a full step.
        branches: P.
    """
    x = inputs.x
    n = len(x)  # N; the first N of the R = P N rows below are the conditional branch
    blocks = cast(Sequence[HeadBlock], head.res_blocks)
    shifts, scales, gates, of_last_layer = modulations

    # 1. All blocks. ``before_middle`` and ``after_middle`` are the features before and after the middle blocks. Without
    # middle blocks, they stay equal, so the cached sum is 0.
    h = head.input_proj(torch.cat([x] * branches).to(head.input_proj.weight.dtype))
    before_middle = after_middle = h
    mlps = []
    for number, (block, shift, scale, gate) in enumerate(zip(blocks, shifts, scales, gates, strict=True)):
        if number == MIDDLE.start:
            before_middle = h

        mlp = block.mlp(modulated(h, block.in_ln, shift, scale))
        h = torch.addcmul(h, gate, mlp)
        if number in MIDDLE:
            after_middle = h
        else:
            mlps.append(mlp[:n])
    middle = after_middle[:n] - before_middle[:n]

    # 2. The last layer.
    last = head.final_layer.linear
    out = last(modulated(h, head.final_layer.norm_final, *of_last_layer).to(last.weight.dtype))

    # 3. What guidance adds to the output of the conditional branch. The guided noise null + cfg (conditional - null)
    # equals conditional + (cfg - 1) (conditional - null). Guidance adds 0 to the variance logits, the last c channels.
    if branches == 1:
        guidance_and_bias = last.bias.repeat(n, 1)
    else:
        conditional, null = out[:n], out[n:]
        guidance = (inputs.cfg - 1) * (conditional - null)[:, : head.channels]
        guidance_and_bias = F.pad(guidance, (0, head.channels)) + last.bias
    return out.view(branches, n, -1), HeadCache(mlps, middle, guidance_and_bias)


def evaluate_cached(
    head: DiffusionHead,
    inputs: StepInputs,
    modulations: Modulations,
    outer: Sequence[int],
    cache: HeadCache,
    computes_mlps: bool,
) -> tuple[Tensor, HeadCache | None]:
    """Compute the head, but take the middle blocks and guidance from ``cache``. Returns the head's output, fp32
    [1, N, 2 c] (see :func:`evaluate_full`), and what the next steps reuse; None if this does not change.

    Args:
        inputs: this function reads only the tokens' states from them.
        modulations: the modulations of an edge step or a reused step.
        outer: indices of the outer blocks.
        cache: what the most recent steps stored.
        computes_mlps: True at an edge step. False at a reused step, which takes the outputs of the MLPs from ``cache``.
    """
    shifts, scales, gates, of_last_layer = modulations

    # 1. The outer blocks, and between them the cached sum of the middle blocks.
    h = head.input_proj(inputs.x.to(head.input_proj.weight.dtype))
    mlps = []
    for i, number in enumerate(outer):
        block = cast(HeadBlock, head.res_blocks[number])
        mlp = block.mlp(modulated(h, block.in_ln, shifts[i], scales[i])) if computes_mlps else cache.mlps[i]
        mlps.append(mlp)
        h = torch.addcmul(h, gates[i], mlp)
        if number + 1 == MIDDLE.start:  # the middle blocks come next
            h = h + cache.middle

    # 2. The last layer, plus the cached guidance.
    weight = head.final_layer.linear.weight
    h = modulated(h, head.final_layer.norm_final, *of_last_layer).to(weight.dtype)
    out = torch.addmm(cache.guidance_and_bias, h, weight.t())
    return out[None], cache._replace(mlps=mlps) if computes_mlps else None
