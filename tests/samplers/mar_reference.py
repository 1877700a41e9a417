"""The slow plain path: MAR one image and one token at a time, straight from the paper's formulas.

Nothing here is shared with the samplers but the network's own forward passes on full sequences. It stays forever; the
fast path is compared with it.
"""

from __future__ import annotations

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


def diffuse(
    net, z: Tensor, z_null: Tensor | None, scale: float, first: Tensor, noise: Tensor, timesteps, temperature: float
) -> Tensor:
    """One token [channels] by ancestral sampling with learned-range variance."""
    c = net.config.channels
    table = cosine_tables(timesteps)
    x = first
    for i in reversed(range(len(table))):
        t, beta, abar = table[i]
        before = table[i - 1][2] if i else 1.0
        out = net.head(x[None], torch.tensor([t]), z[None])[0]
        eps, v = out[:c], out[c:]
        if z_null is not None:
            null = net.head(x[None], torch.tensor([t]), z_null[None])[0][:c]
            eps = null + scale * (eps - null)
        x0 = (x - math.sqrt(1 - abar) * eps) / math.sqrt(abar)
        mean = x0 * (beta * math.sqrt(before) / (1 - abar)) + x * ((1 - before) * math.sqrt(1 - beta) / (1 - abar))
        if i == 0:
            return mean
        low = math.log(beta * (1 - before) / (1 - abar))
        logvar = (v + 1) / 2 * math.log(beta) + (1 - (v + 1) / 2) * low
        x = mean + (0.5 * logvar).exp() * noise[len(table) - 1 - i] * temperature
    raise AssertionError


@torch.no_grad()
def reference_mar(model, labels, settings, noise, timesteps) -> Tensor:
    """Latents [B, C, H, W] of plain MAR."""
    net = model.net
    c = net.config
    orders = noise.orders(c.tokens)
    first = noise.first("full", c.tokens, c.channels)
    steps = noise.steps("full", len(timesteps), c.tokens, c.channels)
    pictures = []
    for b, label in enumerate(labels):
        tokens, known, left = torch.zeros(c.tokens, c.channels), [], c.tokens
        reveal = orders[b].flip(0).tolist()
        for s in range(settings.ar_steps):
            after = max(1, min(left - 1, math.floor(c.tokens * math.cos(math.pi / 2 * (s + 1) / settings.ar_steps))))
            now = reveal[len(known) :] if s + 1 == settings.ar_steps else reveal[len(known) : c.tokens - after]
            scale = (
                settings.cfg
                if settings.cfg_schedule == "constant"
                else 1 + (settings.cfg - 1) * (c.tokens - after) / c.tokens
            )
            z = full_z(net, tokens, known, net.class_emb.weight[label])
            null = full_z(net, tokens, known, net.fake_latent[0]) if settings.cfg != 1 else None
            new = {
                p: diffuse(
                    net,
                    z[p],
                    None if null is None else null[p],
                    scale,
                    first[b, p],
                    steps[b, :, p],
                    timesteps,
                    settings.temperature,
                )
                for p in now
            }
            for p, token in new.items():
                tokens[p] = token
            known, left = known + now, after
        pictures.append(model.to_latents(tokens[None]))
    return torch.cat(pictures)
