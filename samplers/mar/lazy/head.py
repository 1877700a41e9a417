"""LazyMAR's cache of the diffusion head: what is reused from one diffusion step to the next.

Source: the published code of Yan et al. 2025, "LazyMAR" (ICCV 2025, arXiv 2503.12450). The paper's speed-ups contain
this cache, its text does not. The cache of the transformer is in ``lazymar.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....model_loaders.networks.mar import BUDGET, MAR, DiffusionHead, HeadBlock, modulated
from ....model_loaders.networks.ops import outputs
from ....model_loaders.networks.speed import Regional
from ....reports.record import Report
from ...chain import ChainHead, Chains
from ...device import to_device
from ..network import Heads
from ..settings import CacheSettings


class CachedHeads(Heads):
    """The diffusion head with LazyMAR's cache, where the settings use one."""

    def __init__(self, settings: CacheSettings):
        self.settings = settings
        self._plans: dict[int, HeadPlan] = {}  # by number of diffusion steps

    def period(self, steps: int) -> int:
        """Diffusion steps from one full evaluation to the next: a share of them all, on which the error depends."""
        s = self.settings
        if s.refresh_period == 1 or not s.head_cache:
            return 1
        return math.ceil(s.head_period * steps / 100)

    def whole(self, steps: int) -> bool:
        return self.period(steps) == 1

    def head(self, net: MAR, rows: Chains, report: Report) -> ChainHead:
        steps = len(rows.table)
        if self.whole(steps):
            return super().head(net, rows, report)

        if steps not in self._plans:
            self._plans[steps] = head_plan(steps, self.period(steps), rows.x.device)
        return CachedHead(net, rows, self._plans[steps], report)


FULL = "full"
EDGE = "edge"
REUSED = "reused"

# The head's blocks whose outputs are reused as one sum; of the *outer* ones, blocks 0 and 5 on, each block's MLP output
# is reused by itself.
MIDDLE = range(1, 5)


class HeadPlan(NamedTuple):
    """How the head is evaluated at every diffusion step, highest timestep first."""

    kinds: list[str]
    of_kind: dict[str, Tensor]  # the steps of each kind, int64 on the device


def head_plan(steps: int, period: int, device: torch.device) -> HeadPlan:
    """Diffusion steps are counted down to 0: the first one and every multiple of the period are evaluated in full.

    Of the others, those in the first tenth of the diffusion are "edge", the rest "reused"; see :class:`CachedHead`.
    """
    full = {steps - 1, *range(0, steps, period)}
    kinds = []
    for left in range(steps - 1, -1, -1):  # steps left after this one
        if left in full:
            kinds.append(FULL)
        else:
            kinds.append(EDGE if left > 0.9 * steps else REUSED)

    of_kind = {}
    for kind in (FULL, EDGE, REUSED):
        which = [k for k in range(steps) if kinds[k] == kind]
        of_kind[kind] = to_device(torch.tensor(which, dtype=torch.int64), device)
    return HeadPlan(kinds, of_kind)


class CachedHead:
    """The diffusion head with LazyMAR's cache, for :func:`..chain.run_chain`.

    What a step computes, and what it keeps of the last step that computed it:

    =======================  ========  ========  ======
    part                     full      edge      reused
    =======================  ========  ========  ======
    null branch's noise [1]  computed  kept      kept
    sum of blocks 1 to 4     computed  kept      kept
    MLPs of outer blocks     computed  computed  kept
    gates, last layer        computed  computed  computed
    =======================  ========  ========  ======

    [1] as its difference to the conditional branch's.
    """

    kept: Kept | None = None  # of the last step that computed it; the first step is a full one

    def __init__(self, net: MAR, batch: Chains, plan: HeadPlan, report: Report):
        self.head = net.head
        self.cfg = batch.cfg
        self.kinds = plan.kinds
        self.branches, self.tokens = batch.z.shape[:2]
        self.outer = tuple(j for j in range(len(net.head.res_blocks)) if j not in MIDDLE)
        self.report = report  # counts the work
        self.modulations = modulations_by_kind(net, self.outer, batch, plan)

    def at(self, k: int) -> FullStep | ReusedStep:
        """See :class:`..chain.ChainHead`. The output is [P, N, 2 channels] at a full step. After it steps reuse
        :class:`Kept`, and their output [1, N, 2 channels] has the guidance in it: of one branch, :func:`..chain.guide`
        adds none.
        """
        kind = self.kinds[k]
        modulations = next(self.modulations[kind])
        if kind == FULL:
            self.report.add(head_calls=1, head_rows=self.branches * self.tokens)
            return FullStep(self.head, self.cfg, self.branches, modulations)

        assert self.kept is not None
        self.report.add(head_calls=1, head_rows=self.tokens)
        return ReusedStep(self.head, self.outer, self.kept, kind == EDGE, modulations)


class FullStep(NamedTuple):
    """The head in full, see :func:`evaluate_full`."""

    head: DiffusionHead
    cfg: Tensor
    branches: int
    modulations: tuple[Tensor, ...]

    def __call__(self, net: Regional, x: Tensor) -> tuple[Tensor, Kept]:
        evaluate = net.compiled(evaluate_full, "diffusion head")
        out, kept = evaluate(self.head, self.cfg, torch.cat([x] * self.branches), self.modulations)
        return out.view(self.branches, len(x), -1), kept


class ReusedStep(NamedTuple):
    """The head from what was kept, see :func:`evaluate_from_kept`."""

    head: DiffusionHead
    outer: tuple[int, ...]
    kept: Kept
    edge: bool
    modulations: tuple[Tensor, ...]

    def __call__(self, net: Regional, x: Tensor) -> tuple[Tensor, Kept | None]:
        evaluate = net.compiled(evaluate_from_kept, "diffusion head")
        out, newer = evaluate(self.head, self.outer, self.kept, self.edge, x, self.modulations)
        return out[None], newer if self.edge else None


def modulations_by_kind(
    net: MAR, outer: Sequence[int], batch: Chains, plan: HeadPlan
) -> dict[str, Iterator[tuple[Tensor, ...]]]:
    """The modulations of each kind of step. A reused step needs the gates of its ``outer`` blocks and those of the last
    layer only.
    """
    head = net.head
    blocks = [cast(HeadBlock, head.res_blocks[j]) for j in outer]
    width = head.input_proj.out_features
    gates = []
    for block in blocks:
        modulation = cast(nn.Linear, block.adaLN_modulation[1])
        gates.append(outputs(modulation, 2 * width, 3 * width))

    def of_edge(embedding: Tensor) -> list[Tensor]:
        return head.modulations(embedding, blocks)

    def of_reused(embedding: Tensor) -> list[Tensor]:
        active = F.silu(embedding)
        return [*(gate(active) for gate in gates), *head.modulations(embedding, ())]

    times = batch.table.times
    condition = head.conditions(batch.z.flatten(0, 1))
    conditional = condition[: batch.z.shape[1]]
    at = {kind: times[which] for kind, which in plan.of_kind.items()}
    # Three modulations a block, and two of the last layer; a reused step has one gate a block.
    return {
        FULL: step_modulations(net, head.modulations, at[FULL], condition, 3 * len(head.res_blocks) + 2),
        EDGE: step_modulations(net, of_edge, at[EDGE], conditional, 3 * len(outer) + 2),
        REUSED: step_modulations(net, of_reused, at[REUSED], conditional, len(outer) + 2),
    }


def of_block(modulations: Sequence[Tensor], i: int) -> Sequence[Tensor]:
    """Shift, scale and gate of block i."""
    return modulations[3 * i : 3 * i + 3]


class Kept(NamedTuple):
    """What the steps after a full one reuse, of N tokens."""

    mlps: list[Tensor]  # outputs of the outer blocks' MLPs, [N, w] each
    middle: Tensor  # what blocks 1 to 4 added, [N, w]
    guided_bias: Tensor  # of the last layer, plus the guidance, fp32 [N, 2 channels]


def evaluate_full(head: DiffusionHead, cfg: Tensor, x: Tensor, modulations: Sequence[Tensor]) -> tuple[Tensor, Kept]:
    """The head in full: noise and variance logits [P N, 2 channels], and what the next steps reuse.

    ``cfg`` [N, 1] is the guidance scale, x fp32 [P N, channels] are the states of all branches of guidance.
    """
    n = len(cfg)
    blocks = cast(Sequence[HeadBlock], head.res_blocks)
    h = head.input_proj(x.to(head.input_proj.weight.dtype))
    before: Tensor | None = None  # what enters the middle blocks
    middle = torch.zeros_like(h[:n])  # 0 in a head without middle blocks
    mlps = []
    for j, block in enumerate(blocks):
        shift, scale, gate = of_block(modulations, j)
        out = block.mlp(modulated(h, block.in_ln, shift, scale))
        if j == MIDDLE[0]:
            before = h[:n]
        h = torch.addcmul(h, gate, out)
        if j not in MIDDLE:
            mlps.append(out[:n])
        elif j == MIDDLE[-1] or j + 1 == len(blocks):
            assert before is not None
            middle = h[:n] - before

    last = head.final_layer.linear
    out = last(modulated(h, head.final_layer.norm_final, *modulations[-2:]).to(last.weight.dtype))

    # The conditional branch's rows come first, the null one's last. Without guidance they are the same.
    guidance = (cfg - 1) * (out[:n] - out[-n:])[:, : head.channels]
    guided_bias = last.bias + F.pad(guidance, (0, head.channels))
    return out, Kept(mlps, middle, guided_bias)


def evaluate_from_kept(
    head: DiffusionHead, outer: Sequence[int], kept: Kept, edge: bool, x: Tensor, modulations: Sequence[Tensor]
) -> tuple[Tensor, Kept]:
    """The head from what was kept: noise and variance logits fp32 [N, 2 channels], and what the next steps reuse.

    x fp32 [N, channels] are the states of the conditional branch. At an edge step the outer blocks' MLPs are computed.
    """
    h = head.input_proj(x.to(head.input_proj.weight.dtype))
    mlps = []
    for i, j in enumerate(outer):
        block = cast(HeadBlock, head.res_blocks[j])
        if edge:
            shift, scale, gate = of_block(modulations, i)
            mlps.append(block.mlp(modulated(h, block.in_ln, shift, scale)))
        else:
            gate = modulations[i]
            mlps.append(kept.mlps[i])
        h = torch.addcmul(h, gate, mlps[i])
        if j + 1 == MIDDLE[0]:  # the middle blocks follow
            h = h + kept.middle

    h = modulated(h, head.final_layer.norm_final, *modulations[-2:])
    out = torch.addmm(kept.guided_bias, h.to(kept.guided_bias.dtype), head.final_layer.linear.weight.t())
    return out, kept._replace(mlps=mlps)


def step_modulations(
    net: MAR, modulations: Callable[[Tensor], list[Tensor]], times: Tensor, condition: Tensor, size: int
) -> Iterator[tuple[Tensor, ...]]:
    """The head's modulations at every diffusion step, of time embeddings [S, w] and condition embeddings [R, w].

    Those of many steps are one product, which reads the weights once. ``modulations`` makes ``size`` tensors [..., w]
    of embeddings.
    """
    at_once = max(1, BUDGET // max(1, condition.numel() * size))
    for some in times[:, None].split(at_once):
        yield from zip(*net.laid_out(modulations(some + condition)), strict=True)
