"""LazyMAR's cache within the diffusion head.

It is in the published code and in the paper's speed-ups, but not in its text (Yan et al. 2025, arXiv 2503.12450).

Diffusion steps are counted down to 0. The first step and every multiple of the period are evaluated in full. The steps in between
evaluate the conditional rows only and reuse from the last full step: the sum of blocks 1 to 4; the MLP outputs of block 0 and of the
blocks from 5 on ("own" below), with the current gate, except in the first tenth of the diffusion, where these MLPs are computed; and the
difference between the conditional and the null branch's noise.

What a reused step adds to the embedded token does not depend on that token. It is computed for a whole period at once, so that such a
step takes two small matrix products, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_loaders.networks.mar import DiffusionHead, HeadBlock, modulated
from ...model_loaders.networks.ops import outputs
from ..noise import copied


class Segment(NamedTuple):
    """A full step, the steps after it that compute the own MLPs, and those that reuse them; from the highest timestep on."""

    full: int
    edge: list[int]
    reused: list[int]


def segments(steps: int, period: int) -> list[Segment]:
    """The diffusion steps by kind."""
    index = [steps - 1 - k for k in range(steps)]
    full = [k for k in range(steps) if k == 0 or index[k] % period == 0]
    out = []
    for a, b in zip(full, [*full[1:], steps], strict=True):
        edge = [k for k in range(a + 1, b) if index[k] > 0.9 * steps]
        out.append(Segment(a, edge, list(range(a + 1 + len(edge), b))))
    return out


def spans(all_segments: list[Segment], full: int, edge: int, reused: int, budget: int) -> list[list[Segment]]:
    """Consecutive segments whose modulations fit the budget together; numbers that a step of each kind needs."""
    out: list[list[Segment]] = [[]]
    used = 0
    for segment in all_segments:
        size = full + len(segment.edge) * edge + len(segment.reused) * reused
        if out[-1] and used + size > budget:
            out.append([])
            used = 0
        out[-1].append(segment)
        used += size
    return out


def cached_head(
    head: DiffusionHead, z: Tensor, cfg: Tensor, timesteps: Tensor, period: int, budget: int
) -> Generator[Tensor, Tensor, None]:
    """The head's outputs at all diffusion steps: is sent the state fp32 [N, channels] of every step and yields its output.

    The output is [P, N, 2 channels] at a full step, else [1, N, 2 channels] with the guidance in it.

    Args:
        head: the head.
        z: conditions [P, N, C]; P = 2 with guidance.
        cfg: guidance scale fp32 [N, 1].
        timesteps: int64 [S], ascending.
        period: diffusion steps from one full evaluation to the next.
        budget: modulations computed at once, in numbers.
    """
    blocks, last = cast(list[HeadBlock], list(head.res_blocks)), head.final_layer.linear
    (branches, n), channels, width = z.shape[:2], head.channels, head.input_proj.out_features
    own = [0, *range(5, len(blocks))]
    gate_layers = [outputs(blocks[j].adaLN_modulation[1], 2 * width, 3 * width) for j in own]
    condition = head.cond_embed(z.flatten(0, 1))
    times = head.time_embed(timesteps.flip(0).to(z.device))[:, None]

    def embedded(steps: list[int], rows: Tensor) -> Tensor:
        return times[copied(torch.tensor(steps, dtype=torch.int64), z.device)] + rows

    bias = last.bias.expand(n, -1).clone()  # the last layer's, plus the guidance term
    sizes = width * branches * n * (3 * len(blocks) + 2), width * n * (3 * len(own) + 2), width * n * (len(own) + 5)
    x = yield bias  # the first state
    for span in spans(segments(len(timesteps), period), *sizes, budget):
        # 1. Modulations of the span's steps.
        full = zip(*head.modulations(embedded([s.full for s in span], condition)), strict=True)
        edge_steps, reused_steps = [k for s in span for k in s.edge], [k for s in span for k in s.reused]
        if edge_steps:
            edges = zip(*head.modulations(embedded(edge_steps, condition[:n]), (blocks[j] for j in own)), strict=True)
        if reused_steps:
            embedding = embedded(reused_steps, condition[:n])
            gates = [layer(F.silu(embedding)) for layer in gate_layers]
            shifts, scales = head.modulations(embedding, ())
        done = 0
        for segment in span:
            # 2. A full evaluation of all branches; what the next steps reuse is kept.
            modulations, mlps, middle = next(full), [], 0.0
            h = before = head.input_proj(torch.cat([x] * branches).to(head.input_proj.weight.dtype))
            for j, block in enumerate(blocks):
                shift, scale, gate = modulations[3 * j : 3 * j + 3]
                out = block(h, shift, scale)
                before = h[:n] if j == 1 else before
                h = torch.addcmul(h, gate, out)
                if j in own:
                    mlps.append(out[:n])
                elif j == 4 or j + 1 == len(blocks):
                    middle = h[:n] - before  # what blocks 1 to 4 added
            out = head.final_layer(h, *modulations[-2:]).view(branches, n, -1)
            if branches == 2:
                bias[:, :channels] = last.bias[:channels] + (cfg - 1) * (out[0] - out[1])[:, :channels]
            x = yield out
            # 3. In the first tenth of the diffusion: only blocks 1 to 4 are reused.
            for _ in segment.edge:
                modulations, mlps = next(edges), []
                h = head.input_proj(x.to(head.input_proj.weight.dtype))
                for i, j in enumerate(own):
                    shift, scale, gate = modulations[3 * i : 3 * i + 3]
                    mlps.append(blocks[j](h, shift, scale))
                    h = torch.addcmul(h, gate, mlps[-1])
                    h = h + middle if j == 0 else h
                x = yield _last_layer(head, h, modulations[-2], modulations[-1], bias)
            # 4. Afterwards: all MLPs are reused; what they add to the embedded token is the same for any token.
            if segment.reused:
                some = slice(done, done + len(segment.reused))
                base = head.input_proj.bias + middle
                for gate, out in zip(gates, mlps, strict=True):
                    base = torch.addcmul(base, gate[some], out)
                weight = head.input_proj.weight
                for added, shift, scale in zip(base.unbind(0), shifts[some], scales[some], strict=True):
                    h = torch.addmm(added, x.to(weight.dtype), weight.t())
                    x = yield _last_layer(head, h, shift, scale, bias)
                done = some.stop


def _last_layer(head: DiffusionHead, h: Tensor, shift: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Output [1, N, 2 channels] of rows h [N, w] with a bias of their own."""
    h = modulated(h, shift, scale)
    return torch.addmm(bias, h.to(bias.dtype), head.final_layer.linear.weight.t())[None]
