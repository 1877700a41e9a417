"""MAR and FastHybrid the slow plain way, one image and one token at a time, straight from the papers' formulas.

Nothing here is shared with the samplers but the network's own forward passes on full sequences. It stays forever; the
fast path is compared with it.
"""

import math

import torch
from torch import Tensor


def full_z(net, tokens: Tensor, known: list[int], row: Tensor) -> Tensor:
    """z [L, C] of one image from first principles: mask by selection, blocks over whole sequences."""
    c = net.config
    x = torch.cat([row[None].expand(c.buffer, -1), net.z_proj(tokens)]) + net.encoder_pos_embed_learned[0]
    keep = list(range(c.buffer)) + [c.buffer + k for k in sorted(known)]
    x = net.z_proj_ln(x)[keep][None]
    for block in net.encoder_blocks:
        x = block(x)
    x = net.decoder_embed(net.encoder_norm(x))[0]
    full = net.mask_token[0, 0].expand(c.buffer + c.tokens, -1).clone()
    full[keep] = x
    x = (full + net.decoder_pos_embed_learned[0])[None]
    for block in net.decoder_blocks:
        x = block(x)
    return net.decoder_norm(x)[0, c.buffer :] + net.diffusion_pos_embed_learned[0]


def cosine_tables(timesteps: list[int]) -> list[tuple[int, float, float]]:
    """(timestep, beta, abar) of a respaced cosine schedule, float64, ascending."""
    f = [math.cos((i / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(1001)]
    abar, out, last = 1.0, [], 1.0
    for t in range(1000):
        abar *= 1 - min(1 - f[t + 1] / f[t], 0.999)
        if t in timesteps:
            out.append((t, 1 - abar / last, abar))
            last = abar
    return out


def kernel(
    table: list[tuple[int, float, float]], i: int, x: Tensor, x0: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and std of x_{t-1} at entry ``i``, with learned-range variance; the last step has no noise."""
    _, beta, abar = table[i]
    before = table[i - 1][2] if i else 1.0
    mean = x0 * (beta * math.sqrt(before) / (1 - abar)) + x * ((1 - before) * math.sqrt(1 - beta) / (1 - abar))
    if not i:
        return mean, torch.zeros_like(mean)
    low = math.log(beta * (1 - before) / (1 - abar))
    return mean, torch.exp(0.5 * (low + (logits + 1) / 2 * (math.log(beta) - low)))


def diffuse(
    net,
    z: list[Tensor],
    scale: float,
    first: Tensor,
    noise: Tensor,
    timesteps,
    temperature,
    draft=None,
    pull=(),
) -> Tensor:
    """One token [channels] by ancestral sampling with learned-range variance.

    ``z``: of the class, and of the null class with guidance. ``pull``: weights of ``draft``, highest timestep first; or
    the number of steps that are left out, whose noise is added to the draft.
    """
    c = net.config.channels
    table = cosine_tables(timesteps)
    skip, weights = (pull, [0] * len(table)) if isinstance(pull, int) else (0, pull)
    x = first
    for k, i in enumerate(reversed(range(len(table)))):
        t, _, abar = table[i]
        if k < skip:
            continue
        if isinstance(pull, int) and k == skip:
            x = math.sqrt(abar) * draft + math.sqrt(1 - abar) * first
        gamma = weights[k] if draft is not None else 0.0
        out, *null = (net.head(x[None], torch.tensor([t]), row[None])[0] for row in z)
        eps = out[:c]
        if null:
            eps = null[0][:c] + scale * (eps - null[0][:c])
        x0 = (x - math.sqrt(1 - abar) * eps) / math.sqrt(abar)
        mean, std = kernel(table, i, x, x0, out[c:])
        if gamma:
            mean = (1 - gamma) * mean + gamma * draft
        x = mean + temperature * std * noise[k]
    return x


def schedule(tokens: int, settings) -> list[tuple[int, int, float]]:
    """First entry, last entry + 1 and guidance scale of every AR step, in the order of decision."""
    out, left = [], tokens
    for s in range(settings.steps):
        after = max(1, min(left - 1, math.floor(tokens * math.cos(math.pi / 2 * (s + 1) / settings.steps))))
        last = s + 1 == settings.steps
        linear = settings.cfg_schedule == "linear"
        scale = 1 + (settings.cfg - 1) * (tokens - after) / tokens if linear else settings.cfg
        out.append((tokens - left, tokens if last else tokens - after, scale))
        left = after
    return out


@torch.no_grad()
def reference(model, labels, settings, noise, timesteps, few=(), gamma=()) -> tuple[Tensor, Tensor]:
    """Latents [B, C, H, W] and outcomes [B, L]: 0 plain, 1 accepted, 2 redone.

    Plain MAR, or with ``few`` timesteps of the guided steps and their weights ``gamma`` FastHybrid: a lookahead drafts
    the K steps from the first one that diverges; ``gamma`` may also be the number of steps that *renoise* leaves out.
    """
    net, s = model.net, settings
    c, k = net.config, s.lookahead if few else 1
    draws = {name: noise.start_noise(name, c.tokens, c.channels) for name in ("full", "guided")}
    steps = {n: noise.step_noise(n, len(t), c.tokens, c.channels) for n, t in (("full", timesteps), ("guided", few))}
    plan, pictures, outcomes = schedule(c.tokens, s), [], torch.zeros(len(labels), c.tokens, dtype=torch.uint8)
    for b, reveal in enumerate(noise.orders(c.tokens).flip(1).tolist()):
        tokens, drafts = torch.zeros(c.tokens, c.channels), dict[int, tuple[Tensor, Tensor]]()
        classes = [net.class_emb.weight[labels[b]]] + [net.fake_latent[0]] * (s.cfg != 1)

        def draw(p, z, scale, stream, times, *more, b=b):
            start, noises = draws[stream][b, p], steps[stream][b, :, p]
            return diffuse(net, [row[p] for row in z], scale, start, noises, times, s.temperature, *more)

        for at, (start, end, scale) in enumerate(plan):
            z, now = [full_z(net, tokens, reveal[:start], row) for row in classes], reveal[start:end]

            def alike(p, z=z, drafts=drafts):
                pair = torch.stack([drafts[p][1], z[0][p]])
                return float(pair[0] @ pair[1] / pair.norm(dim=1).prod()) >= s.threshold

            had = [p for p in now if p in drafts]
            kept = [p for p in had if alike(p)]
            made = {p: draw(p, z, scale, "full", timesteps) for p in now if p not in kept}
            for p in kept:
                more = drafts[p][0], gamma
                made[p] = draw(p, z, scale, "guided", few, *more) if s.accepted != "keep" else drafts[p][0]
            outcomes[b, kept], outcomes[b, [p for p in had if p not in kept]] = 1, 2
            end = at + k
            starts = few and len(kept) < len(now) and at >= s.lookahead_start
            for first, last, ahead in plan[at + 1 : end] if starts else []:
                for p in reveal[first:last]:
                    drafts[p] = draw(p, z, ahead, "full", timesteps), z[0][p]
            for p, token in made.items():
                tokens[p] = token
        pictures.append(model.to_latents(tokens[None]))
    return torch.cat(pictures), outcomes
