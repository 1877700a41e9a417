"""LazyMAR's cache within the diffusion head, as in the published code; the paper does not mention it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_loaders.networks.mar import HeadBlock
from .denoiser import Denoiser
from .diffusion import Tables, guide
from .loop import Conditions, Run


class CachedDenoiser(Denoiser):
    """Denoising with the reference's head cache.

    Of the diffusion steps, counted down to 0, the first and every multiple of ``period`` are computed in full. In between,
    for the class's rows only: blocks 1 to 4 together add what they added at the last full step; the MLPs of block 0 and of
    those from 5 on give what they gave then, under the present gate, but in the first tenth of the steps they are computed;
    and the null branch's noise differs from the class's as it did then.

    What a reused step adds to the embedded token does not depend on that token, so a whole period's is computed at once and
    such a step is two small products, whatever the depth.
    """

    def __init__(self, run: Run, table: Tables, period: int):
        super().__init__(run, table)
        steps, blocks = len(table), self.head.res_blocks
        self.own = [0, *range(5, len(blocks))]
        index = [steps - 1 - k for k in range(steps)]
        full = [k for k in range(steps) if k == 0 or index[k] % period == 0]
        self.segments: list[tuple[int, list[int], list[int]]] = []
        """(full step, steps that compute the own MLPs, steps that reuse them), each counted from the highest timestep."""
        for a, b in zip(full, [*full[1:], steps], strict=True):
            edge = [k for k in range(a + 1, b) if index[k] > 0.9 * steps]
            self.segments.append((a, edge, list(range(a + 1 + len(edge), b))))
        width = self.head.input_proj.out_features
        self.layers = [blocks[j].adaLN_modulation[1] for j in self.own]
        self.gates = [(layer.weight[2 * width :], layer.bias[2 * width :]) for layer in self.layers]

    def _spans(self, full: int, reused: int) -> list[list[tuple[int, list[int], list[int]]]]:
        """Segments whose modulations fit the budget together; rows of a full step and of a reused one."""
        width = self.head.input_proj.out_features
        layers, own = len(self.head.res_blocks), len(self.own)
        out: list[list[tuple[int, list[int], list[int]]]] = [[]]
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
        self,
        z: Conditions,
        scale: Tensor,
        first: Tensor,
        noise: Tensor,
        draft: Tensor | None = None,
        pull: tuple[float, ...] = (),
        space: str = "mean",
    ) -> Tensor:
        layers = [m for m in self.head.res_blocks if isinstance(m, HeadBlock)]
        head, n, channels = self.head, len(first), first.shape[1]
        last, dtype = head.final_layer, head.input_proj.weight.dtype
        guided = z.null is not None
        both = z.cond if z.null is None else torch.cat([z.cond, z.null])
        condition = head.cond_embed(both)
        into, out_of = head.input_proj.weight.t(), last.linear.weight.t()
        # The output's bias, and for guidance what lies between the class's noise and the guided one.
        bias = last.linear.bias.expand(n, -1).clone()
        x, noise = first, self.spread(noise)
        for span in self._spans(len(both), n):
            full = head.modulations(self.times[[a for a, _, _ in span], None] + condition)
            edges, rests = [k for _, edge, _ in span for k in edge], [k for _, _, rest in span for k in rest]
            if edges:
                active = F.silu(self.times[edges, None] + condition[:n])
                at_edge = [layer(active) for layer in (*self.layers, last.adaLN_modulation[1])]
            if rests:
                active = F.silu(self.times[rests, None] + condition[:n])
                gates = [F.linear(active, w, b) for w, b in self.gates]
                shift, grow = last.adaLN_modulation[1](active).chunk(2, dim=-1)
                shifts, grows = shift.unbind(0), (1 + grow).unbind(0)
            edge_at = rest_at = 0
            for f, (k, edge, rest) in enumerate(span):
                h = head.input_proj((torch.cat([x, x]) if guided else x).to(dtype))
                given: list[Tensor] = []  # by the own MLPs
                added: Tensor | float = 0.0  # by blocks 1 to 4
                for j, block in enumerate(layers):
                    if j == 1:
                        added = h[:n]
                    gate, out = block.branch(h, full[j][f])
                    h = torch.addcmul(h, gate, out)
                    if j in self.own:
                        given.append(out[:n])
                    elif j == 4 or j + 1 == len(head.res_blocks):
                        added = h[:n] - added
                out = last(h, full[-1][f])
                null = out[n:] if guided else None
                x = self.advance(k, x, *guide(out[:n], null, scale, channels), noise[k], draft, pull, space)
                if null is not None:
                    gap = (scale - 1) * (out[:n, :channels] - null[:, :channels])
                    bias[:, :channels] = last.linear.bias[:channels] + gap
                for k in edge:
                    h = head.input_proj(x.to(dtype))
                    given = []
                    for j, at in zip(self.own, at_edge[:-1], strict=True):
                        gate, out = head.res_blocks[j].branch(h, at[edge_at])
                        given.append(out)
                        h = torch.addcmul(h, gate, out)
                        h = h + added if j == 0 else h
                    shift, grow = at_edge[-1][edge_at].chunk(2, dim=-1)
                    h = torch.addcmul(shift, last.norm_final(h), 1 + grow)
                    eps, logits = torch.addmm(bias, h.to(bias.dtype), out_of).chunk(2, dim=1)
                    x = self.advance(k, x, eps, logits, noise[k], draft, pull, space)
                    edge_at += 1
                if rest:
                    ready: Tensor = head.input_proj.bias + added
                    for gate, out in zip(gates, given, strict=True):
                        ready = torch.addcmul(ready, gate[rest_at : rest_at + len(rest)], out)
                    for k, base in zip(rest, ready.unbind(0), strict=True):
                        h = last.norm_final(torch.addmm(base, x.to(dtype), into))
                        h = torch.addcmul(shifts[rest_at], h, grows[rest_at])
                        eps, logits = torch.addmm(bias, h.to(bias.dtype), out_of).chunk(2, dim=1)
                        x = self.advance(k, x, eps, logits, noise[k], draft, pull, space)
                        rest_at += 1
        steps, whole = len(self.table), len(self.segments)
        self.run.report.add(head_calls=steps, head_rows=whole * len(both) + (steps - whole) * n)
        return x
