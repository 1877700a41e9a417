"""LazyMAR's cache of the diffusion head: what one diffusion step reuses from earlier steps.

Source: the published code of Yan et al. 2025, "LazyMAR" (ICCV 2025, arXiv 2503.12450). The paper's speed-ups include
this cache, but the paper does not describe it.

Shapes: N tokens of c channels, w head width, P branches of guidance. P is 2 with guidance (the conditional branch, then
the null branch, which does not read the class or prompt) and 1 without guidance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ....networks.mar import BUDGET, MAR, DiffusionHead, HeadBlock, modulated
from ....networks.speed import recorded
from ....networks.torch_state import to_device
from ....reports.record import Report
from ...chain import ChainHead, DiffusionBatch, StepInputs, StepResult, advance
from ..mar import HeadEvaluation
from .settings import CacheSettings, head_period

# Kinds of diffusion steps, see CachedHead.
FULL = "full"
EDGE = "edge"
REUSED = "reused"

# The middle blocks of the head. The cache holds one sum of what they add to the head's features. All other blocks,
# block 0 and the blocks from 5 on, are *outer* blocks. The cache holds the output of each outer block's MLP.
MIDDLE = range(1, 5)

# Modulations are vectors by which the diffusion step and the condition z change a layer. The head returns them as a
# flat list: shift, scale and gate of each block, then shift and scale of the last layer. At a reused step, only the
# gates of the outer blocks and the modulations of the last layer are computed.
_MODULATIONS_PER_BLOCK = 3
_MODULATIONS_OF_LAST_LAYER = 2


class HeadSchedule(NamedTuple):
    """How the head is evaluated at each diffusion step. Step 0 has the highest timestep."""

    kinds: list[str]  # FULL, EDGE or REUSED for each step
    steps_of_kind: dict[str, Tensor]  # numbers of the steps of each kind, int64 on the device
    uses_cache: bool  # whether any step reuses something


def head_schedule(steps: int, period: int, device: torch.device) -> HeadSchedule:
    """The kind of each of ``steps`` diffusion steps, see :class:`CachedHead`.

    The first step is full, and so is every step after which a multiple of ``period`` steps is left, for example 0. Of
    the other steps, those with more than 0.9 ``steps`` left are edge steps, and the rest are reused steps.
    """
    full = {steps - 1, *range(0, steps, period)}
    kinds = []
    for left in range(steps - 1, -1, -1):  # number of steps left after this one
        if left in full:
            kinds.append(FULL)
        else:
            kinds.append(EDGE if left > 0.9 * steps else REUSED)

    steps_of_kind = {}
    for kind in (FULL, EDGE, REUSED):
        which = [k for k in range(steps) if kinds[k] == kind]
        steps_of_kind[kind] = to_device(torch.tensor(which, dtype=torch.int64), device)
    return HeadSchedule(kinds, steps_of_kind, uses_cache=period > 1)


class CachedHead:
    """The diffusion head with LazyMAR's cache, for :func:`...chain.run_chain`.

    What a step of each kind computes, and what it reuses from the most recent step that computed it ("kept"):

    =======================  ========  ========  ========
    part                     full      edge      reused
    =======================  ========  ========  ========
    guidance [1]             computed  kept      kept
    sum of blocks 1 to 4     computed  kept      kept
    MLPs of outer blocks     computed  computed  kept
    gates, last layer        computed  computed  computed
    =======================  ========  ========  ========

    [1] What guidance adds to the noise that the conditional branch predicts. It needs the null branch.
    """

    cache: HeadCache | None = None  # None only before the first step, which is full

    def __init__(
        self,
        head: DiffusionHead,
        net: MAR,
        batch: DiffusionBatch,
        schedule: HeadSchedule,
        outer: Sequence[int],
        report: Report,
    ):
        """``outer``: numbers of the outer blocks."""
        self.net = net
        self.head = head
        self.outer = outer
        self.kinds = schedule.kinds
        self.branches, self.tokens = batch.z.shape[:2]
        self.report = report  # counts the work

        condition = head.cond_embed(batch.z.flatten(0, 1))
        self.modulations = {}  # an iterator for each kind, because run_chain takes the steps in order
        for kind, which in schedule.steps_of_kind.items():
            computed = condition if kind == FULL else condition[: self.tokens]
            self.modulations[kind] = step_modulations(head, net, kind, outer, batch.table.times[which], computed)

    def step(self, k: int, inputs: StepInputs) -> StepResult:
        """See :class:`...chain.ChainHead`.

        At a full step, the head's output is [P, N, 2 c], and :func:`...chain.guide` applies guidance. At other steps it
        is [1, N, 2 c] and already contains guidance; ``guide`` adds none to an output of one branch.
        """
        kind = self.kinds[k]
        modulations = next(self.modulations[kind])

        if kind == FULL:
            self.report.add(head_calls=1, head_rows=self.branches * self.tokens)
            result, self.cache = full_step_to_cache(self.net, self.head, self.branches, modulations, inputs)
            return result

        assert self.cache is not None
        self.report.add(head_calls=1, head_rows=self.tokens, cached_calls=1)
        result, cache = step_from_cache(self.net, self.head, self.outer, self.cache, kind == EDGE, modulations, inputs)
        if cache is not None:
            self.cache = cache
        return result


class CachedHeadEvaluation(HeadEvaluation):
    """Evaluates the diffusion head with LazyMAR's cache, or in full where :func:`head_period` is 1."""

    def __init__(self, net: MAR, report: Report, settings: CacheSettings):
        super().__init__(net, report)
        self.settings = settings
        self.outer = tuple(j for j in range(len(self.denoiser.res_blocks)) if j not in MIDDLE)
        self._schedules: dict[int, HeadSchedule] = {}  # by number of diffusion steps

    def is_full(self, steps: int) -> bool:
        return head_period(self.settings, steps) == 1

    def for_chain(self, batch: DiffusionBatch) -> ChainHead:
        steps = len(batch.table.times)
        if steps not in self._schedules:
            self._schedules[steps] = head_schedule(steps, head_period(self.settings, steps), batch.x.device)
        schedule = self._schedules[steps]
        if not schedule.uses_cache:
            return super().for_chain(batch)
        return CachedHead(self.denoiser, self.net, batch, schedule, self.outer, self.report)


@recorded
def full_step_to_cache(
    net: MAR, head: DiffusionHead, branches: int, modulations: HeadModulations, inputs: StepInputs
) -> tuple[StepResult, HeadCache]:
    """A full step: :func:`evaluate_full`, then :func:`...chain.advance`. Returns the tokens' states after the step, and
    what the next steps reuse.
    """
    out, cache = net.compiled(evaluate_full, "diffusion head")(head, inputs.cfg, branches, modulations, inputs.x)
    return net.compiled(advance, "diffusion steps")(inputs, out), cache


@recorded
def step_from_cache(
    net: MAR,
    head: DiffusionHead,
    outer: Sequence[int],
    cache: HeadCache,
    edge: bool,
    modulations: HeadModulations,
    inputs: StepInputs,
) -> tuple[StepResult, HeadCache | None]:
    """A step between two full steps: :func:`evaluate_from_cache`, then :func:`...chain.advance`. Returns the tokens'
    states after the step, and what the next steps reuse, or None if they reuse the same as this step.
    """
    out, changed = net.compiled(evaluate_from_cache, "diffusion head")(head, outer, cache, edge, modulations, inputs.x)
    return net.compiled(advance, "diffusion steps")(inputs, out), changed


class HeadModulations(NamedTuple):
    """The modulations of a step, [R, w] each. R is P N at a full step and N at other steps.

    At a full step, they are the modulations of all blocks; at an edge step, of the outer blocks.
    """

    shifts: Sequence[Tensor]  # one for each block; empty at a reused step
    scales: Sequence[Tensor]  # as ``shifts``
    gates: Sequence[Tensor]  # one for each block; at a reused step, one for each outer block
    of_last_layer: Sequence[Tensor]  # shift and scale


def step_modulations(
    head: DiffusionHead, net: MAR, kind: str, outer: Sequence[int], times: Tensor, condition: Tensor
) -> Iterator[HeadModulations]:
    """Yield the head's modulations of each of the S steps of a kind.

    One matrix product computes the modulations of many steps, so the weights are read only once for all these steps.

    Args:
        outer: numbers of the outer blocks.
        times: time embeddings of the steps, [S, w].
        condition: embeddings of the conditions z, [R, w].
    """
    blocks = head.res_blocks if kind == FULL else [head.res_blocks[j] for j in outer]

    # How many steps one matrix product computes; ``count`` is the number of modulations of one step.
    count = len(blocks) * (1 if kind == REUSED else _MODULATIONS_PER_BLOCK) + _MODULATIONS_OF_LAST_LAYER
    steps_at_once = max(1, BUDGET // max(1, condition.numel() * count))
    for times_of_product in times[:, None].split(steps_at_once):
        embedding = times_of_product + condition
        if kind == REUSED:
            modulations = head.gates(embedding, blocks) + head.modulations(embedding, ())
        else:
            modulations = head.modulations(embedding, blocks)
        if net.records:  # a recorded function copies contiguous tensors fastest
            modulations = [m.contiguous() for m in modulations]
        for of_step in zip(*modulations, strict=True):
            of_blocks, of_last_layer = of_step[:-_MODULATIONS_OF_LAST_LAYER], of_step[-_MODULATIONS_OF_LAST_LAYER:]
            if kind == REUSED:
                yield HeadModulations((), (), of_blocks, of_last_layer)
            else:
                shifts, scales, gates = (of_blocks[i::_MODULATIONS_PER_BLOCK] for i in range(_MODULATIONS_PER_BLOCK))
                yield HeadModulations(shifts, scales, gates, of_last_layer)


class HeadCache(NamedTuple):
    """What the steps after a full step reuse; all tensors are for the conditional branch."""

    mlps: list[Tensor]  # outputs of the outer blocks' MLPs, [N, w] each
    middle: Tensor  # sum of what blocks 1 to 4 added, [N, w]
    guided_bias: Tensor  # the last layer's bias plus what guidance adds to the output, fp32 [N, 2 c]


def evaluate_full(
    head: DiffusionHead, cfg: Tensor, branches: int, modulations: HeadModulations, x: Tensor
) -> tuple[Tensor, HeadCache]:
    """Evaluate the head in full. Returns noise, then variance logits, [P, N, 2 c], and what the next steps reuse.

    ``cfg``: the guidance scale, [N, 1]; ``branches``: P; ``x``: the tokens' states, fp32 [N, c].
    """
    n = len(x)
    blocks = cast(Sequence[HeadBlock], head.res_blocks)
    h = head.input_proj(torch.cat([x] * branches).to(head.input_proj.weight.dtype))
    states = [h]  # the features before each block, and after the last block
    mlps = []
    shifts, scales, gates, of_last_layer = modulations
    for j, block in enumerate(blocks):
        out = block.mlp(modulated(h, block.in_ln, shifts[j], scales[j]))
        h = torch.addcmul(h, gates[j], out)
        states.append(h)
        if j not in MIDDLE:
            mlps.append(out[:n])

    # The sum of what the middle blocks added; 0 if the head has no middle blocks.
    first = min(MIDDLE.start, len(blocks))
    after = min(MIDDLE.stop, len(blocks))
    middle = states[after][:n] - states[first][:n]

    last = head.final_layer.linear
    out = last(modulated(h, head.final_layer.norm_final, *of_last_layer).to(last.weight.dtype))

    # The first N rows are the conditional branch, the last N the null branch. Without guidance both are the same rows.
    guidance = (cfg - 1) * (out[:n] - out[-n:])[:, : head.channels]
    guided_bias = last.bias + F.pad(guidance, (0, head.channels))
    return out.view(branches, n, -1), HeadCache(mlps, middle, guided_bias)


def evaluate_from_cache(
    head: DiffusionHead, outer: Sequence[int], cache: HeadCache, edge: bool, modulations: HeadModulations, x: Tensor
) -> tuple[Tensor, HeadCache | None]:
    """Evaluate the head with the cache. Returns noise, then variance logits, fp32 [1, N, 2 c], and what the next
    steps reuse, or None if this is still ``cache``.

    ``x``: the tokens' states, fp32 [N, c]. At an ``edge`` step, the MLPs of the outer blocks are computed.
    """
    h = head.input_proj(x.to(head.input_proj.weight.dtype))
    shifts, scales, gates, of_last_layer = modulations
    mlps = [] if edge else cache.mlps
    for i, j in enumerate(outer):
        if edge:
            block = cast(HeadBlock, head.res_blocks[j])
            mlps.append(block.mlp(modulated(h, block.in_ln, shifts[i], scales[i])))
        h = torch.addcmul(h, gates[i], mlps[i])
        if j + 1 == MIDDLE[0]:  # the middle blocks follow
            h = h + cache.middle

    h = modulated(h, head.final_layer.norm_final, *of_last_layer)
    out = torch.addmm(cache.guided_bias, h.to(cache.guided_bias.dtype), head.final_layer.linear.weight.t())
    return out[None], cache._replace(mlps=mlps) if edge else None
