"""LazyMAR's caches and head cache the slow plain way: an image
and a branch at a time, a row at a time where it matters.

Written from the paper and the published code's behaviour; shares nothing with the sampler but the networks' layers. It
stays forever; the fast path is compared with it.
"""

import math

import torch
import torch.nn.functional as F
from fastar_nodes.samplers.mar.transformer import Transformer
from mar_reference import cosine_tables, kernel
from torch import Tensor

# The published code's, by AR step of 64.
TABLE = [1.0] * 20 + [0.6] + [0.5] * 4 + [0.4] * 5 + [0.15] * 5 + [0.12] * 5 + [0.05] * 24


def share_of(step: int, steps: int, schedule: str, lowest: float) -> float:
    """Share of computed rows at an AR step between two refreshes, by each schedule."""
    if schedule == "constant":
        return lowest
    if schedule == "published":
        share = TABLE[step] if step < 64 else TABLE[-1]
    else:
        at = step / steps * 64
        low, high = TABLE[min(int(at), 63)], TABLE[min(int(at) + 1, 63)]
        share = low + (at - int(at)) * (high - low)
    return round(1 - (1 - lowest) * (1 - share) / 0.95, 9)


def computed_rows(
    strategy: str, tokens: range, now: set[int], last: set[int], predicted: set[int], cosine: list[float], count: int
) -> set[int]:
    """Rows that a strategy of the paper's Table 3 computes, which says what is cached.

    Rows are class rows and, behind them, ``tokens``. Of the four types of tokens (section 3.2.1) those decoded ``now``,
    in the ``last`` step, and ``predicted`` before it; the fourth are the rest. ``cosine``: of each row's values and
    those of the step before. ``count``: rows to compute, where the type does not tell.
    """
    always = now | last
    class_rows = set(range(tokens.start))
    unpredicted = set(tokens) - always - predicted
    free = class_rows | unpredicted | predicted

    if strategy == "decided":  # I: caching the unpredicted tokens
        cached = unpredicted | class_rows
    elif strategy == "undecided":  # II: only caching the predicted tokens; class rows carry no prediction of their own
        cached = predicted | class_rows
    elif strategy == "most-similar":  # IV: caching the tokens with the minimum cosine similarity
        cached = set(sorted(free, key=lambda row: (cosine[row], -row))[: len(free) + len(always) - count])
    else:  # V: caching the tokens with the maximum cosine similarity
        cached = set(sorted(free, key=lambda row: (-cosine[row], -row))[: len(free) + len(always) - count])
    return (always | free) - cached


def qkv(block, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of rows x [N, C], each [N, heads, d]."""
    n, c = x.shape
    out = block.attn.qkv(block.norm1(x)).view(n, 3, block.attn.heads, c // block.attn.heads)
    return out[:, 0], out[:, 1], out[:, 2]


def finish_rows(block, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weight = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    mixed = torch.einsum("hqk,khd->qhd", weight.softmax(-1), v).flatten(1)
    x = x + block.attn.proj(mixed)
    return x + block.mlp(block.norm2(x))


class OneBranch:
    """Encoder and decoder of one image with one class vector."""

    def __init__(self, net, row: Tensor, settings, block: int, spare: int):
        self.net, self.row, self.s, self.block, self.spare = net, row, settings, block, spare
        self.known: set[int] = set()  # tokens whose encoder keys and values are below, [blocks, tokens, heads, d]
        heads = net.encoder_blocks[0].attn.heads
        shape = len(net.encoder_blocks), net.config.tokens, heads, net.config.dim // heads
        self.encoder_keys, self.encoder_values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.inputs: Tensor | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.left_out = torch.zeros(net.config.tokens, dtype=torch.int32)

    def encode(self, tokens: Tensor, places: list[int]) -> None:
        """Class rows and tokens ``places`` through the encoder and onto the canvas."""
        net, c = self.net, self.net.config
        x = torch.cat([self.row.expand(c.buffer, -1), net.z_proj(tokens[places])])
        at = list(range(c.buffer)) + [c.buffer + p for p in places]
        x = net.z_proj_ln(x + net.encoder_pos_embed_learned[0][at])
        self.known |= set(places)
        every = sorted(self.known)
        for j, block in enumerate(net.encoder_blocks):
            q, k, v = qkv(block, x)
            self.encoder_keys[j, places], self.encoder_values[j, places] = k[c.buffer :], v[c.buffer :]
            keys = torch.cat([k[: c.buffer], self.encoder_keys[j, every]])
            values = torch.cat([v[: c.buffer], self.encoder_values[j, every]])
            x = finish_rows(block, x, q, keys, values)
        assert self.inputs is not None
        self.inputs[at] = net.decoder_embed(net.encoder_norm(x)) + net.decoder_pos_embed_learned[0][at]

    def blank(self) -> None:
        net, c = self.net, self.net.config
        self.known = set()
        self.inputs = net.mask_token[0].expand(c.buffer + c.tokens, -1) + net.decoder_pos_embed_learned[0]

    def full(self, tokens: Tensor, known: list[int]) -> Tensor:
        """Output of the last block, all rows; everything is cached."""
        self.blank()
        self.encode(tokens, sorted(known))
        return self.decode_all()

    def decode_all(self) -> Tensor:
        x, self.keys, self.values = self.inputs, [], []
        for block in self.net.decoder_blocks:
            q, k, v = qkv(block, x)
            self.keys.append(k.clone())
            self.values.append(v.clone())
            x = finish_rows(block, x, q, k, v)
        return x

    def lazy(self, tokens, known, new, wanted, share, follow=None) -> Tensor:
        """Output of the last block, NaN where a row is left out.

        ``follow`` are rows that were chosen elsewhere: as good as our own, or
        an assertion fails. Similarities often differ by less than rounding. Random rows (III) are always chosen there.
        """
        net, c, s = self.net, self.net.config, self.s
        if s.encoder_cache:
            self.encode(tokens, list(new))
        else:
            self.blank()
            self.encode(tokens, sorted(known))
        if not s.token_cache or self.block >= c.decoder_depth - 1:
            return self.decode_all()
        x = self.inputs
        for block in net.decoder_blocks[: self.block]:
            x = finish_rows(block, x, *qkv(block, x))
        block = net.decoder_blocks[self.block]
        q, k, v = qkv(block, x)
        before = self.values[self.block]
        cosine = (
            (torch.nn.functional.cosine_similarity(v, before, dim=-1).mean(-1) * 2**17).round().tolist()
        )  # ties stay ties
        now, last = {c.buffer + p for p in wanted}, {c.buffer + p for p in new}
        predicted = {c.buffer + p for p in known} - last
        must = now | last
        total = c.buffer + c.tokens
        n = min(total, max(len(must) + self.spare, int(total * share)))
        keep = computed_rows(s.selection, range(c.buffer, total), now, last, predicted, cosine, n)
        if follow is not None:
            theirs = set(follow)
            assert must <= theirs and len(theirs) == len(keep)
            if theirs != keep and s.selection != "random":
                assert s.selection in ("least-similar", "most-similar")
                sign = 1 if s.selection == "least-similar" else -1
                left = [sign * cosine[r] for r in range(total) if r not in theirs]
                assert max(sign * cosine[r] for r in theirs - must) <= min(left) + 2  # as rounded
            keep = theirs
        keep = sorted(keep)
        for r in range(c.buffer, total):
            self.left_out[r - c.buffer] += r not in keep
        self.values[self.block] = v.clone()
        out = torch.full_like(x, torch.nan)
        x = finish_rows(block, x[keep], q[keep], k, v)
        for j in range(self.block + 1, c.decoder_depth):
            q, k, v = qkv(net.decoder_blocks[j], x)
            self.keys[j][keep], self.values[j][keep] = k, v
            x = finish_rows(net.decoder_blocks[j], x, q, self.keys[j], self.values[j])
        out[keep] = x
        return out


class SlowLazy(Transformer):
    """The transformer. ``block`` counts from 0; the head stays as it is. ``follow``: rows chosen
    elsewhere, by AR step.
    """

    def __init__(self, canvas, settings, block: int, spare: int, follow: dict[int, Tensor] | None = None):
        super().__init__(canvas)
        self.s, self.follow = settings, follow or {}
        self.last = -1
        self.refreshed: list[int] = []

        net = canvas.model.net
        labels = canvas.conditioning.labels
        self.cond = [OneBranch(net, net.class_emb.weight[i], settings, block, spare) for i in labels]
        self.null = [OneBranch(net, net.fake_latent[0], settings, block, spare) for _ in labels]
        self.residual = [torch.empty(0)] * len(self.cond)

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        canvas, s = self.canvas, self.s
        order, net, c = canvas.order, canvas.model.net, canvas.model.net.config
        due = {t for t in range(order.steps) if t < s.start_step or (t - s.start_step) % s.refresh_period == 0}
        fresh = self.last < 0 or any(t in due for t in range(self.last + 1, step + 1))
        if fresh:
            self.refreshed.append(step)
        share = share_of(step, order.steps, s.ratio_schedule, s.computed_ratio)
        cond, null = [], []
        for b in range(canvas.images):
            tokens, known = canvas.values[b], order.decision_order[b, : order.count_before[step]].tolist()
            first, stop = (order.count_before[s] for s in (self.last, step))
            new = [] if fresh else order.decision_order[b, first:stop].tolist()
            asked, chosen = wanted[b].tolist(), self.follow.get(step)
            rows = [None, None] if chosen is None else [chosen[b].tolist(), chosen[b - canvas.images].tolist()]
            if fresh:
                own = self.cond[b].full(tokens, known)
                other = self.null[b].full(tokens, known) if canvas.guided else own
                self.residual[b] = other - own
            else:
                own = self.cond[b].lazy(tokens, known, new, asked, share, rows[0])
                if not canvas.guided:
                    other = own
                elif s.condition_cache:
                    other = own + self.residual[b]
                else:
                    other = self.null[b].lazy(tokens, known, new, asked, share, rows[1])
            place = net.diffusion_pos_embed_learned[0][asked]
            for out, x in ((cond, own), (null, other)):
                out.append(net.decoder_norm(x[c.buffer :][asked]) + place)
        self.last = step
        return torch.stack([torch.stack(branch) for branch in ((cond, null) if canvas.guided else (cond,))])

    def forget(self) -> None:
        self.last = -1


def slow_head(
    net,
    z: list[Tensor],
    scale: float,
    first: Tensor,
    noise: Tensor,
    timesteps: list[int],
    period: int,
    temperature: float,
) -> Tensor:
    """One token [channels] by the head cache, diffusion index counted down, everything by the head's own layers.

    ``z``: of the class, and of the null class with guidance.
    """
    head, c, table = net.head, net.config.channels, cosine_tables(timesteps)
    steps = len(table)
    x = first
    given: dict[int, Tensor] = {}
    added: dict[int, Tensor] = {}
    apart = torch.zeros(c)

    def layers(x: Tensor, t: int, z: Tensor, keep: bool, reuse: bool, edge: bool) -> Tensor:
        y = torch.nn.functional.silu(head.time_embed(torch.tensor([t])) + head.cond_embed(z[None]))
        h = head.input_proj(x[None])
        for j, block in enumerate(head.res_blocks):
            shift, scaling, gate = block.adaLN_modulation[1](y).chunk(3, -1)
            if reuse and 1 <= j <= 4:
                h = h + added[j]
                continue
            if reuse and not edge:
                out = given[j]
            else:
                out = block.mlp(block.in_ln(h) * (1 + scaling) + shift)
                if keep or edge:
                    given[j] = out
            if keep:
                added[j] = gate * out
            h = h + gate * out
        shift, scaling = head.final_layer.adaLN_modulation[1](y).chunk(2, -1)
        return head.final_layer.linear(F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scaling) + shift)[0]

    for i in reversed(range(steps)):
        (t, _, abar), full = table[i], i == steps - 1 or i % period == 0
        out = layers(x, t, z[0], keep=full, reuse=not full, edge=not full and i > 0.9 * steps)
        eps = out[:c]
        if len(z) == 2:
            if full:
                apart = eps - layers(x, t, z[1], keep=False, reuse=False, edge=False)[:c]
            null = eps - apart
            eps = null + scale * (eps - null)
        mean, std = kernel(table, i, x, (x - math.sqrt(1 - abar) * eps) / math.sqrt(abar), out[c:])
        x = mean + temperature * std * noise[steps - 1 - i]
    return x
