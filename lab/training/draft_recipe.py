"""Configuration and training of the demo's draft MAR for CSpD, which imitates its target.

CSpD accepts a draft the more often, the more alike the distributions of the two models are. So the draft is not trained
on images but on its target: for the same known tokens and the same noisy token, its diffusion head learns the outputs
of the target's (distillation; Hinton et al. 2015, arXiv 1503.02531). It costs a seventh of its target.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...networks.autoencoder import KLAutoencoder
from ...networks.mar import MAR, DiffusionHead
from ...samplers.mar.tables import Constants, constants
from .initialise import initialise_mar
from .recipes import MAR_PICTURES, NULL_LABELS, TARGET, divided, inexact, latents, pictures, save_mar
from .training import Figures, Job, Schedule, generator, seeded, train

DRAFT = replace(TARGET, dim=96, encoder_depth=1, decoder_depth=1, head_depth=1, head_width=128)
SCHEDULE = Schedule(steps=4000, batch=64, lr=1.5e-3, muon_lr=3e-3, ema=0.998, decay=0.5)
# Noisy tokens of a masked one.
REPEATS = 3


def conditions(net: MAR, tokens: Tensor, known: Tensor, hidden: Tensor, rows: Tensor) -> Tensor:
    """The head's conditions [B, M, dim] of the masked tokens, given the known ones of ``tokens`` [B, L, channels]."""
    return net.decode(net.encode(tokens, known, rows), known, hidden)


def head_output(head: DiffusionHead, z: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """The head's output [N, 2 channels] for noisy tokens [N, channels] at timesteps int64 [N]."""
    return head.denoise(x, head.modulations(head.time_embed(t) + head.cond_embed(z)))


def imitation_loss(own: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared differences of the predicted noises and of the variance logits; outputs [N, 2 channels]."""
    noise, logits = own.float().chunk(2, 1)
    target_noise, target_logits = target.float().chunk(2, 1)
    return F.mse_loss(noise, target_noise), F.mse_loss(logits, target_logits)


def noisy(x0: Tensor, full: Constants, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [N, channels] at random timesteps of the forward process, and these, int64 [N]."""
    t = torch.randint(1000, (len(x0),), generator=g)
    noise = torch.randn(x0.shape, generator=g).to(x0.device)
    a = full.alphas_cumprod.float()[t].to(x0.device)[:, None]
    return a.sqrt() * x0 + (1 - a).sqrt() * noise, t.to(x0.device)


def train_draft(job: Job, out: Path, kl: KLAutoencoder, target: MAR, start: MAR | None = None) -> MAR:
    """Train a draft for ``target`` on the latents of the autoencoder and write ``out``."""
    count, batch, full = job.count(MAR_PICTURES), job.schedule(SCHEDULE).batch, constants()
    data, labels = pictures(job, count)
    job.log("encoding the picture book")
    encoded = latents(kl, data, job.device)[0].flatten(2).transpose(1, 2).contiguous()

    target = target.to(job.device).eval().requires_grad_(False)
    net = seeded(7, lambda: initialise_mar(MAR(DRAFT)), start)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(43, step)
        rows = torch.randint(count, (batch,), generator=g)
        tokens = encoded[rows].to(job.device)
        hidden, known = (places.to(job.device) for places in divided(DRAFT.tokens, batch, g))
        null = (torch.rand(batch, 1, generator=g) < 2 * NULL_LABELS).to(job.device)
        context, what = inexact(tokens, g), labels[rows].to(job.device)

        masked = tokens.gather(1, hidden[..., None].expand(-1, -1, DRAFT.channels)).flatten(0, 1)
        x, t = noisy(masked.repeat(REPEATS, 1), full, g)

        def output(own: MAR) -> Tensor:
            label = torch.where(null, own.fake_latent, own.class_emb(what))
            z = conditions(own, context, known, hidden, label)
            return head_output(own.head, z.flatten(0, 1).repeat(REPEATS, 1), x, t)

        with torch.no_grad():
            taught = output(target)
        noise, logits = imitation_loss(output(module), taught)

        return noise + 0.1 * logits, {"noise": noise, "logits": logits}

    train(job, "mar-draft", net, loss, SCHEDULE)
    save_mar(net, out, "mar-draft")

    return net
