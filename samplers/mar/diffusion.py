"""Ancestral sampling with MAR's diffusion head and its learned variance, many tokens at once.

Source: Nichol & Dhariwal 2021 (improved DDPM) as used by MAR (Li et al. 2024, arXiv 2406.11838, section 3.2); x0 is never clipped.
Everything is plain fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_loaders.networks.mar import BUDGET, DiffusionHead, HeadBlock, modulated
from ...model_loaders.networks.ops import outputs
from ..driver import to_device
from .loop import Run
from .tables import Tables


@dataclass(eq=False)
class HeadBatch:
    """N tokens to sample with the diffusion head."""

    z: Tensor  # conditions [P, N, C]; P = 2 with guidance, the null class's last
    cfg: Tensor  # guidance scale fp32 [N, 1]
    x: Tensor  # start noise fp32 [N, channels]
    # Step noise fp32 [T, N, channels], highest timestep first; the last step uses none. Step k of a table of S <= T steps takes
    # entry k T // S, so that pictures of fewer steps stay comparable.
    noise: Tensor
    table: Tables
    draft: Tensor | None = None  # x' fp32 [N, channels], which the mean is pulled to; None for none
    gamma: Sequence[float] = ()  # weight of the draft at every step, highest timestep first; () for none


def guide(out: Tensor, cfg: Tensor | float) -> tuple[Tensor, Tensor]:
    """Classifier-free guidance on the noise only: eps, and the conditional branch's variance logits, [N, channels] each.

    ``out``: head output [P, N, 2 channels], the null branch last; ``cfg``: guidance scale [N, 1] or a number.
    """
    eps, logits = out[0].chunk(2, -1)
    if len(out) == 2:
        null = out[1, :, : eps.shape[1]]
        eps = null + cfg * (eps - null)
    return eps, logits


def ancestral_step(
    numbers: Sequence[float] | Sequence[Tensor],
    x: Tensor,
    out: Tensor,
    cfg: Tensor,
    noise: Tensor,
    draft: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x_{t-1} = mu + sigma noise; returns it, mu and log sigma, [N, channels] each.

    With a draft x' of weight gamma: mu' = (1 - gamma) mu + gamma x'.

    Args:
        numbers: ``Tables.steps`` of the step, and gamma; tensors for the compiler, which treats other numbers as constants.
        x, noise, draft: [N, channels]; the noise includes the temperature.
        out, cfg: see :func:`guide`.
    """
    recip, recipm1, coef1, coef2, middle, slope, gamma = numbers
    eps, logits = guide(out, cfg)
    x0 = recip * x - recipm1 * eps
    mean = coef1 * x0 + coef2 * x
    if draft is not None:
        mean = (1 - gamma) * mean + gamma * draft
    log_std = middle + slope * logits
    return mean + log_std.exp() * noise, mean, log_std


def step_modulations(
    modulations: Callable[[Tensor], list[Tensor]], times: Tensor, condition: Tensor, size: int
) -> Iterator[tuple[Tensor, ...]]:
    """The head's modulations at every diffusion step, of time embeddings [S, w] and condition embeddings [R, w].

    Those of many steps are one product, which reads the weights once. ``modulations`` makes ``size`` tensors [..., w] of embeddings.
    """
    at_once = max(1, BUDGET // max(1, condition.numel() * size))
    for some in times[:, None].split(at_once):
        yield from zip(*modulations(some + condition), strict=True)


def denoise(run: Run, *batches: HeadBatch, trace: list[tuple[Tensor, Tensor, Tensor]] | None = None) -> list[Tensor]:
    """Sample the tokens fp32 [N, channels] of one or two batches by ancestral steps; the report of ``run`` counts the head's work.

    Two batches run in one loop, in which the one with fewer diffusion steps joins for the last ones: the sequential head calls are those
    of the longer table. A step with gamma 1 does not depend on the head, which is not evaluated. ``trace`` receives x, mu and log sigma
    (without temperature) of every step of a single batch; the head is then never cached.
    """
    net, head, xs = run.model.net, run.model.net.head, [b.x for b in batches]
    evaluate, advance = net.region(type(head).denoise), net.region(ancestral_step)
    numbers: list[Any] = []
    noises, cached, modulations = [], {}, {}
    for i, b in enumerate(batches):
        count, noise = len(b.table.steps), b.noise * run.settings.temperature
        noise[-1] = 0  # the last step adds none; a view like the others, so that the compiler treats them alike
        noises.append([noise[k * len(noise) // count] for k in range(count - 1)] + [noise[-1]])
        plain = [(*step, gamma) for step, gamma in zip(b.table.steps, b.gamma or [0.0] * count, strict=True)]
        compiled = advance is not ancestral_step
        numbers.append([row.unbind() for row in to_device(torch.tensor(plain), b.x.device)] if compiled else plain)
        period = run.head_period(count) if run.head_share and trace is None else 1
        if period > 1:
            cached[i] = cached_head(head, b.z, b.cfg, b.table, period)
            next(cached[i])
        else:
            times, size = head.time_embed(b.table.timestep_map.flip(0)), 3 * len(head.res_blocks) + 2
            modulations[i] = step_modulations(head.modulations, times, head.cond_embed(b.z.flatten(0, 1)), size)
    longest, calls, rows = max(map(len, noises)), 0, 0
    for call in range(longest):
        due = [(i, b, k) for i, b in enumerate(batches) if (k := call - longest + len(noises[i])) >= 0]
        # 1. The head, once for all batches whose step depends on it; LazyMAR's head cache belongs to one batch.
        outs = {i: cached[i].send(xs[i]) for i, _, _ in due if i in cached}
        calls, rows = calls + len(outs), rows + sum(len(out) * out.shape[1] for out in outs.values())
        inputs = {i: (torch.cat([xs[i]] * len(b.z)), *next(modulations[i])) for i, b, _ in due if i in modulations}
        asked = {i: inputs[i] for i, b, k in due if i in inputs and not (b.gamma and b.gamma[k] == 1)}
        if asked:
            x, *modulation = (t[0] if len(asked) == 1 else torch.cat(t) for t in zip(*asked.values(), strict=True))
            parts = evaluate(head, x, modulation).split([len(batches[i].z) * len(xs[i]) for i in asked])
            outs |= {i: out.view(-1, len(xs[i]), 2 * head.channels) for i, out in zip(asked, parts, strict=True)}
            calls, rows = calls + 1, rows + len(x)
        # 2. The ancestral step of every batch.
        for i, b, k in due:
            out = outs[i] if i in outs else b.x.new_zeros(1, len(b.x), 2 * head.channels)
            x, mean, log_std = advance(numbers[i][k], xs[i], out, b.cfg, noises[i][k], b.draft)
            if trace is not None:
                trace.append((xs[i], mean, log_std))
            xs[i] = x
    run.report.add(head_calls=calls, head_rows=rows)
    return xs


def cached_head(
    head: DiffusionHead, z: Tensor, cfg: Tensor, table: Tables, period: int
) -> Generator[Tensor, Tensor, None]:
    """The head with LazyMAR's cache: is sent the state fp32 [N, channels] of every diffusion step and yields the head's output.

    The cache is in the published code and in the paper's speed-ups, but not in its text (Yan et al. 2025, arXiv 2503.12450). Diffusion
    steps are counted down to 0. The first one and every multiple of the period are evaluated in full. The others evaluate the conditional
    rows only and reuse from the last full step: the sum of blocks 1 to 4; the MLP outputs of the other blocks ("own"), with the current
    gate, except in the first tenth of the diffusion, where these MLPs are computed; and the difference between the conditional and the
    null branch's noise. The output is [P, N, 2 channels] at a full step, else [1, N, 2 channels] with the guidance in it.
    """
    blocks, final, last = cast(list[HeadBlock], list(head.res_blocks)), head.final_layer, head.final_layer.linear
    (branches, n), channels, width = z.shape[:2], head.channels, head.input_proj.out_features
    own = [0, *range(5, len(blocks))]
    # 1. The kind of every diffusion step, highest timestep first.
    steps = len(table.steps)
    full = {steps - 1, *range(0, steps, period)}
    kinds = ["full" if t in full else "edge" if t > 0.9 * steps else "reused" for t in range(steps - 1, -1, -1)]
    # 2. The modulations of each kind; a reused step needs gates and the last layer's only.
    gates = [outputs(blocks[j].adaLN_modulation[1], 2 * width, 3 * width) for j in own]
    times, condition = head.time_embed(table.timestep_map.flip(0)), head.cond_embed(z.flatten(0, 1))

    def at(kind: str, make: Callable[[Tensor], list[Tensor]], rows: int, size: int) -> Iterator[tuple[Tensor, ...]]:
        """The modulations of one kind of step, in order of the steps."""
        which = torch.tensor([k for k in range(steps) if kinds[k] == kind], dtype=torch.int64)
        return step_modulations(make, times[to_device(which, z.device)], condition[:rows], size)

    def of_gates(embedding: Tensor) -> list[Tensor]:
        return [*(gate(F.silu(embedding)) for gate in gates), *head.modulations(embedding, ())]

    modulations_of = {
        "full": at("full", head.modulations, len(condition), 3 * len(blocks) + 2),
        "edge": at("edge", lambda e: head.modulations(e, (blocks[j] for j in own)), n, 3 * len(own) + 2),
        "reused": at("reused", of_gates, n, len(own) + 2),
    }
    bias = last.bias.expand(n, -1).clone()  # the last layer's, plus the guidance term
    x = yield bias  # the first state
    for kind in kinds:
        modulations = next(modulations_of[kind])
        if kind == "full":
            # 3. A full evaluation of all branches; what the next steps reuse is kept.
            mlps, middle = [], 0.0
            h = before = head.input_proj(torch.cat([x] * branches).to(head.input_proj.weight.dtype))
            for j, block in enumerate(blocks):
                shift, scale, gate = modulations[3 * j : 3 * j + 3]
                out = block.mlp(modulated(h, block.in_ln, shift, scale))
                before = h[:n] if j == 1 else before
                h = torch.addcmul(h, gate, out)
                if j in own:
                    mlps.append(out[:n])
                elif j == 4 or j + 1 == len(blocks):
                    middle = h[:n] - before  # what blocks 1 to 4 added
            out = last(modulated(h, final.norm_final, *modulations[-2:]).to(last.weight.dtype)).view(branches, n, -1)
            if branches == 2:
                bias[:, :channels] = last.bias[:channels] + (cfg - 1) * (out[0] - out[1])[:, :channels]
        else:
            # 4. Only the conditional rows; the own MLPs are computed in the first tenth of the diffusion.
            h = head.input_proj(x.to(head.input_proj.weight.dtype))
            for i, j in enumerate(own):
                gate = modulations[i]
                if kind == "edge":
                    shift, scale, gate = modulations[3 * i : 3 * i + 3]
                    mlps[i] = blocks[j].mlp(modulated(h, blocks[j].in_ln, shift, scale))
                h = torch.addcmul(h, gate, mlps[i])
                if j == 0:
                    h = h + middle
            h = modulated(h, final.norm_final, *modulations[-2:])
            out = torch.addmm(bias, h.to(bias.dtype), last.weight.t())[None]
        x = yield out
