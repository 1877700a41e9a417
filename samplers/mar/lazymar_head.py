"""LazyMAR's cache within the diffusion head.

It is in the published code and in the paper's speed-ups, but not in its text (Yan et al. 2025, arXiv 2503.12450).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_loaders.networks.diffusion_head import HeadBlock, modulated
from ...model_loaders.networks.ops import outputs
from ..noise import copied
from .denoiser import CAPTURED, Denoiser, Inputs
from .diffusion import Ancestral, Tables, guide
from .loop import Conditions, Denoise, HeadRows, Run

# (full step, steps that compute the own MLPs, steps that reuse them), each counted from the highest timestep.
_Segment = tuple[int, list[int], list[int]]


class _Modulations(NamedTuple):
    """adaLN modulations of a span.

    Attributes:
        full: of every layer, [full steps, R, w] each; see ``DiffusionHead.modulations``.
        edge: of every edge step, those of the own layers and of the last one.
        gates: of every own block, [reused steps, N, w].
        shifts, scales: of the last layer, a tensor [N, w] for every reused step; the scales with 1 added.
    """

    full: list[Tensor]
    edge: list[list[Tensor]]
    gates: list[Tensor]
    shifts: Sequence[Tensor]
    scales: Sequence[Tensor]


@dataclass(eq=False)
class _Kept:
    """What reused steps take from the last full or edge step.

    Attributes:
        bias: the last layer's, plus the guidance term, [N, 2 channels].
        mlps: outputs of the own MLPs, [N, w] each.
        middle: what blocks 1 to 4 added, [N, w]; 0 in a head of one block.
    """

    bias: Tensor
    mlps: list[Tensor] = field(default_factory=list)
    middle: Tensor | float = 0.0


class CachedDenoiser(Denoiser):
    """Denoising with the reference's head cache.

    Diffusion steps are counted down to 0. The first step and every multiple of ``period`` are evaluated in full. The steps in
    between evaluate the conditional rows only and reuse from the last full step: the sum of blocks 1 to 4; the MLP outputs of
    block 0 and of the blocks from 5 on ("own" below), with the current gate, except in the first tenth of the diffusion, where
    these MLPs are computed; and the difference between the conditional and the null branch's noise.

    What a reused step adds to the embedded token does not depend on that token. It is computed for a whole period at once,
    so that such a step takes two small matrix products, whatever the depth.
    """

    exact = False

    def __init__(self, run: Run, table: Tables, period: int):
        super().__init__(run, table)
        self.blocks = blocks = cast(list[HeadBlock], list(self.head.res_blocks))
        steps = len(table)
        self.own = [0, *range(5, len(blocks))]
        index = [steps - 1 - k for k in range(steps)]
        full = [k for k in range(steps) if k == 0 or index[k] % period == 0]
        self.segments: list[_Segment] = []
        for a, b in zip(full, [*full[1:], steps], strict=True):
            edge = [k for k in range(a + 1, b) if index[k] > 0.9 * steps]
            self.segments.append((a, edge, list(range(a + 1 + len(edge), b))))
        # Time embeddings of the steps of each kind, in their order, [steps, 1, w].
        kinds = ([a for a, _, _ in self.segments], self._listed(1), self._listed(2))
        order = copied(torch.tensor([k for kind in kinds for k in kind]), self.times.device)
        self.kinds = [part[:, None] for part in self.times[order].split([len(kind) for kind in kinds])]
        width = self.head.input_proj.out_features
        layers = [blocks[j].adaLN_modulation[1] for j in self.own]
        self.gates = [outputs(layer, 2 * width, 3 * width) for layer in layers]

    def _listed(self, kind: int) -> list[int]:
        """The edge steps (1) or reused steps (2) of all segments."""
        return [k for segment in self.segments for k in cast(list[int], segment[kind])]

    def _spans(self, full: int, reused: int) -> list[list[_Segment]]:
        """Segments whose modulations fit the budget together; rows of a full step and of a reused one."""
        width = self.head.input_proj.out_features
        layers, own = len(self.head.res_blocks), len(self.own)
        out: list[list[_Segment]] = [[]]
        used = 0
        for segment in self.segments:
            _, edge, rest = segment
            size = width * (full * (3 * layers + 2) + reused * (len(edge) * (3 * own + 2) + len(rest) * (own + 5)))
            if out[-1] and used + size > self.budget:
                out.append([])
                used = 0
            out[-1].append(segment)
            used += size
        return out

    def __call__(
        self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor, rule: Ancestral | None = None
    ) -> Tensor:
        """Denoise N rows; arguments and result as :meth:`Denoiser.__call__`."""
        rule = rule or self.rule
        given, graphs = Inputs.of(HeadRows(z, scale, first, noise), rule), self.run.model.net.captured()
        steps, whole, n = len(self.table), len(self.segments), len(first)
        self.run.report.add(head_calls=steps, head_rows=whole * n * (1 + z.guided) + (steps - whole) * n)
        if graphs is not None and n <= CAPTURED:
            lasting, kind, padded = cast(CachedDenoiser, self.alone()), rule.fresh(None), given.padded()
            present = [x is not None for x in padded]

            def function(*buffers: Tensor) -> tuple[Tensor, ...]:
                found = Inputs.rebuilt(iter(buffers), present)
                return (lasting.loop(found, kind.fresh(found.draft)),)

            key = (
                "cached diffusion",
                rule.key(),
                tuple(self.table.timestep_map.tolist()),
                str(self.segments),
                *present,
            )
            out = graphs.run(key, function, [x for x in padded if x is not None])
            if out is not None:
                return out[0][:n]
        return self.loop(given, rule)

    def loop(self, given: Inputs, rule: Ancestral) -> Tensor:
        """The loop over the diffusion steps; tokens fp32 [N, channels]."""
        x, noise, guided, channels = given.first, given.noise, given.null is not None, given.first.shape[1]
        n, scale, both = len(x), given.scale, given.cond if given.null is None else torch.cat([given.cond, given.null])
        condition, last = self.head.cond_embed(both), self.head.final_layer.linear
        kept, at = _Kept(last.bias.expand(n, -1).clone()), [0, 0, 0]
        for span in self._spans(len(both), n):
            modulations = self._modulations(span, at, condition, n)
            edges, done = iter(modulations.edge), 0
            for f, (k, edge, rest) in enumerate(span):
                # 1. A full evaluation of both branches; what the next steps reuse is kept.
                out = self._full(x, [m[f] for m in modulations.full], n, guided, kept)
                eps, logits = guide(out[:n], out[n:] if guided else None, scale, channels)
                x = rule(k, x, eps, logits, noise[k])
                if guided:
                    difference = (scale - 1) * (out[:n, :channels] - out[n:, :channels])
                    kept.bias[:, :channels] = last.bias[:channels] + difference
                # 2. In the first tenth of the diffusion: only blocks 1 to 4 are reused.
                for k in edge:
                    eps, logits = self._edge(x, next(edges), kept)
                    x = rule(k, x, eps, logits, noise[k])
                # 3. Afterwards: all MLPs are reused.
                reused = slice(done, done + len(rest))
                bases = self._bases([gate[reused] for gate in modulations.gates], kept) if rest else ()
                shifts, scales = modulations.shifts[reused], modulations.scales[reused]
                for k, base, shift, grow in zip(rest, bases, shifts, scales, strict=True):
                    eps, logits = self._reused(x, base, shift, grow, kept)
                    x = rule(k, x, eps, logits, noise[k])
                done += len(rest)
        return x

    def together(self, mine: HeadRows, other: Denoise, others: HeadRows) -> tuple[Tensor, Tensor]:
        """One after the other: the cache belongs to one table."""
        return self(*mine), other(*others)

    def _modulations(self, span: list[_Segment], at: list[int], condition: Tensor, n: int) -> _Modulations:
        """adaLN modulations of the steps of a span.

        Args:
            span: consecutive segments.
            at: number of steps of each kind before the span; those of the span are added.
            condition: the embedded z [R, w] of both branches.
            n: conditional rows.
        """
        times = []
        for i, count in enumerate(
            (len(span), sum(len(edge) for _, edge, _ in span), sum(len(rest) for *_, rest in span))
        ):
            times.append(self.kinds[i][at[i] : at[i] + count])
            at[i] += count
        full = self.head.modulations(times[0] + condition)
        edge: list[list[Tensor]] = []
        if len(times[1]):
            active = F.silu(times[1] + condition[:n])
            layers = (*(self.blocks[j] for j in self.own), self.head.final_layer)
            parts = [part for layer in layers for part in layer.modulation(active)]
            edge = [list(step) for step in zip(*parts, strict=True)]
        if not len(times[2]):
            return _Modulations(full, edge, [], (), ())
        active = F.silu(times[2] + condition[:n])
        gates = [gate(active) for gate in self.gates]
        shift, scale = self.head.final_layer.modulation(active)
        return _Modulations(full, edge, gates, shift.unbind(0), scale.unbind(0))

    def _full(self, x: Tensor, modulations: list[Tensor], n: int, guided: bool, kept: _Kept) -> Tensor:
        """Head output of all rows; fills ``kept`` with the conditional rows' MLP outputs."""
        h = self.head.input_proj((torch.cat([x, x]) if guided else x).to(self.head.input_proj.weight.dtype))
        kept.mlps = []
        before = h[:n]
        for j, block in enumerate(self.blocks):
            if j == 1:
                before = h[:n]
            shift, scale, gate = modulations[3 * j : 3 * j + 3]
            out = block.branch(h, shift, scale)
            h = torch.addcmul(h, gate, out)
            if j in self.own:
                kept.mlps.append(out[:n])
            elif j == 4 or j + 1 == len(self.blocks):
                kept.middle = h[:n] - before
        return self.head.final_layer(h, *modulations[-2:])

    def _edge(self, x: Tensor, modulations: list[Tensor], kept: _Kept) -> tuple[Tensor, Tensor]:
        """Noise and variance logits [N, channels]; computes the own MLPs, reuses blocks 1 to 4."""
        h = self.head.input_proj(x.to(self.head.input_proj.weight.dtype))
        kept.mlps = []
        for i, j in enumerate(self.own):
            shift, scale, gate = modulations[3 * i : 3 * i + 3]
            out = self.blocks[j].branch(h, shift, scale)
            kept.mlps.append(out)
            h = torch.addcmul(h, gate, out)
            h = h + kept.middle if j == 0 else h
        shift, scale = modulations[-2:]
        return self._output(h, shift, scale, kept)

    def _bases(self, gates: list[Tensor], kept: _Kept) -> tuple[Tensor, ...]:
        """For each reused step, everything that is added to the embedded token, [N, w]; gates [steps, N, w] a block."""
        base: Tensor = self.head.input_proj.bias + kept.middle
        for gate, out in zip(gates, kept.mlps, strict=True):
            base = torch.addcmul(base, gate, out)
        return base.unbind(0)

    def _reused(self, x: Tensor, base: Tensor, shift: Tensor, scale: Tensor, kept: _Kept) -> tuple[Tensor, Tensor]:
        """Noise and variance logits [N, channels] of a step that reuses all MLPs."""
        weight = self.head.input_proj.weight
        return self._output(torch.addmm(base, x.to(weight.dtype), weight.t()), shift, scale, kept)

    def _output(self, h: Tensor, shift: Tensor, scale: Tensor, kept: _Kept) -> tuple[Tensor, Tensor]:
        last = self.head.final_layer
        h = modulated(h, shift, scale)
        eps, logits = torch.addmm(kept.bias, h.to(kept.bias.dtype), last.linear.weight.t()).chunk(2, dim=1)
        return eps, logits
