"""Configurations and trainings of the demo's KL autoencoder and MAR.

The MARs are trained on the latents of the autoencoder. Every recipe writes one fp16 safetensors file whose metadata
holds the configuration that the state dict does not contain.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from ...networks.autoencoder import KLAutoencoder, KLConfig
from ...networks.mar import MAR, DiffusionHead, MARConfig
from ...samplers.mar.tables import Constants, constants
from . import picture_book
from .initialise import initialise_mar
from .picture_book import Scenes
from .training import Figures, Job, Schedule, generator, seeded, train

RESOLUTION = 64
TRAIN_SEED = 1

KL = KLConfig(ch=32, ch_mult=(1, 1, 2, 2), blocks=1, z_channels=8, groups=8)
KL_SCHEDULE = Schedule(steps=3400, batch=24, lr=2e-3, ema=0.997, weight_decay=0.0, decay=0.4)
KL_WEIGHT = 3e-3
# A second stage with a tenth of the KL weight restores small details.
KL_FINE_SCHEDULE = Schedule(steps=2200, batch=24, lr=1.5e-3, ema=0.997, weight_decay=0.0, decay=0.5)
KL_FINE_WEIGHT = 3e-4
# A third stage trains only the decoder, on latents (of unit variance) with noise of up to this std. Latents sampled by
# a MAR differ slightly from encoded ones; without this stage the difference is decoded as stains.
LATENT_NOISE = 0.4
# Training images of the autoencoder and of the MARs.
KL_PICTURES, MAR_PICTURES = 20_000, 30_000
KL_ROBUST_SCHEDULE = Schedule(steps=1500, batch=24, lr=1e-3, ema=0.997, weight_decay=0.0, decay=0.6)

TARGET = MARConfig(
    dim=128,
    encoder_depth=4,
    decoder_depth=4,
    heads=4,
    buffer=4,
    tokens=64,
    channels=8,
    classes=len(picture_book.LABELS),
    head_depth=3,
    head_width=192,
)
TARGET_SCHEDULE = Schedule(steps=15000, batch=64, lr=1e-3, muon_lr=2e-3, ema=0.9985, decay=0.4)
# Small heads diverge from t = 999 (samplers/mar/tables.py); the value is stored in the checkpoint.
T_MAX = 950
# Sampling defaults of these models, stored in the checkpoint. At temperature
# 1 a head of this size places some tokens between two colours of the book.
DEFAULTS = {"steps": 32, "diffusion_steps": 50, "cfg": 2.0, "temperature": 0.8}
DEFAULTS |= {"lookahead": 4, "threshold": 0.95, "guided_steps": 5}
NULL_LABELS = 0.1
HEAD_REPEATS = 3
# Scenes of a book that are rendered at once.
CHUNK = 500
# Largest std of the noise on known tokens. A sampler continues from its own tokens, which are inexact; a model trained
# on exact tokens continues an intermediate colour.
CONTEXT_NOISE = 0.5


def book(job: Job, count: int, side: int = RESOLUTION, seed: int = TRAIN_SEED) -> Iterator[tuple[Scenes, Tensor]]:
    """Scenes of a book and their images uint8 [n, 3, side, side], in chunks: all images together take gigabytes."""
    for at in range(0, count, CHUNK):
        s = picture_book.scenes(seed, min(CHUNK, count - at), at)
        yield s, torch.from_numpy(picture_book.render(s, side)[0]).permute(0, 3, 1, 2)
        if (at + CHUNK) % 10_000 == 0:
            job.log(f"rendering the picture book: {at + CHUNK}/{count}")


def pictures(job: Job, count: int, side: int = RESOLUTION) -> tuple[Tensor, Tensor]:
    """The first training images, uint8 [count, 3, side, side], and their labels int64 [count]."""
    images, labels = torch.empty(count, 3, side, side, dtype=torch.uint8), []
    for i, (s, rgb) in enumerate(book(job, count, side)):
        images[CHUNK * i : CHUNK * i + len(s)] = rgb
        labels.append(torch.from_numpy(s.label))
    return images, torch.cat(labels)


def to_signed(x: Tensor) -> Tensor:
    """uint8 0..255 to float32 -1..1."""
    return x.float() / 127.5 - 1


def to_rgb(y: Tensor) -> np.ndarray:
    """Decoder output [N, 3, H, W] in -1..1 to uint8 [N, H, W, 3]."""
    return ((y.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def save_checkpoint(net: nn.Module, path: Path, **metadata: object) -> None:
    """Write fp16 safetensors with string metadata. Equal weights and metadata give equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to("cpu", torch.float16).contiguous() for k, v in net.state_dict().items()}
    data = save(state, {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()})

    # safetensors writes the metadata in random order.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(end - 8)
    part = path.with_suffix(".part")
    part.write_bytes(data[:8] + text + data[end:])
    part.replace(path)


# ------------------------------------------------------------------------------------------------ autoencoder


def reconstruction_loss(y: Tensor, x: Tensor) -> Tensor:
    """L1 + 2 MSE + L1 of the gradients of a reconstruction and its image, [B,
    3, H, W] in -1..1; pixels are weighted up to 4-fold where ``x`` has detail.
    """
    detail = (x - F.avg_pool2d(x, 5, 1, 2, count_include_pad=False)).abs().mean(1, keepdim=True)
    weight = 1 + 3 * (4 * detail).clamp(max=1)
    plain = (weight * ((y - x).abs() + 2 * (y - x) ** 2)).mean()
    return plain + F.l1_loss(y.diff(dim=2), x.diff(dim=2)) + F.l1_loss(y.diff(dim=3), x.diff(dim=3))


def psnr(y: Tensor, x: Tensor) -> float:
    """PSNR in dB of images in -1..1."""
    return float(10 * torch.log10(4 / F.mse_loss(y.detach(), x)))


def _kl_stage(job: Job, net: KLAutoencoder, name: str, usual: Schedule, weight: float, seed: int, data: Tensor) -> None:
    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(seed, step)
        x = to_signed(data[torch.randint(len(data), (usual.batch,), generator=g)]).to(job.device)
        mean, std = module.encode(x)
        y = module.decode(mean + std * torch.randn(mean.shape, generator=g).to(job.device)).float()
        kl = 0.5 * (mean.float() ** 2 + std.float() ** 2 - 1 - 2 * std.float().log()).mean()
        figures = {"psnr": psnr(y, x), "sigma": std.mean(), "spread": mean.std()}
        return reconstruction_loss(y, x) + weight * kl, figures

    train(job, name, net, loss, usual)


def train_kl(job: Job, out: Path, start: KLAutoencoder | None = None) -> KLAutoencoder:
    """Train the autoencoder in two stages, normalise its latents
    per channel, train its decoder on noisy latents, write ``out``.

    Of ``start``, a trained autoencoder, only the decoder is trained further, so that its latents do not change.
    """
    data, _ = pictures(job, job.count(KL_PICTURES))
    net = seeded(3, lambda: KLAutoencoder(KL if start is None else start.config), start)
    if start is None:
        _kl_stage(job, net, "kl", KL_SCHEDULE, KL_WEIGHT, 11, data)
        _kl_stage(job, net, "kl-fine", KL_FINE_SCHEDULE, KL_FINE_WEIGHT, 12, data)
        normalise_latents(net, data[:4000], job.device)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g, batch = generator(15, step), KL_ROBUST_SCHEDULE.batch
        x = to_signed(data[torch.randint(len(data), (batch,), generator=g)]).to(job.device)
        with torch.no_grad():
            mean = module.encode(x)[0].float()
        off = LATENT_NOISE * torch.rand(batch, 1, 1, 1, generator=g) * torch.randn(mean.shape, generator=g)
        y = module.decode(mean + off.to(job.device)).float()
        return reconstruction_loss(y, x), {"psnr": psnr(y, x)}

    train(job, "kl-robust", net, loss, KL_ROBUST_SCHEDULE)
    save_checkpoint(net, out, family="kl", groups=net.config.groups, latent_scale=1.0, name="picture book KL, stride 8")

    return net


@torch.no_grad()
def latents(net: KLAutoencoder, data: Tensor, device: torch.device, chunk: int = 100) -> tuple[Tensor, Tensor]:
    """Posterior mean and std of images uint8 [N, 3, H, W], each fp32 [N, z, h, w] on the CPU."""
    parts = [net.encode(to_signed(data[i : i + chunk]).to(device)) for i in range(0, len(data), chunk)]
    return torch.cat([m.cpu() for m, _ in parts]), torch.cat([s.cpu() for _, s in parts])


@torch.no_grad()
def normalise_latents(net: KLAutoencoder, data: Tensor, device: torch.device) -> None:
    """Fold the per-channel mean and std of the latents into the two 1x1 convolutions; exact."""
    mean, _ = latents(net, data, device)
    shift, scale = (f(mean.transpose(0, 1).flatten(1), dim=1).to(device) for f in (torch.mean, torch.std))
    scale = scale.clamp(min=0.25 * float(scale.max()))  # channels that the KL term switched off stay small
    z = net.config.z_channels
    q, p = net.quant_conv, net.post_quant_conv
    p.bias += p.weight[:, :, 0, 0] @ shift
    p.weight *= scale[None, :, None, None]
    q.weight[:z] /= scale[:, None, None, None]
    q.bias[:z] = (q.bias[:z] - shift) / scale
    q.bias[z:] -= 2 * scale.log()


# ------------------------------------------------------------------------------------------------ MAR


def diffusion_loss(
    out: Tensor, x0: Tensor, x: Tensor, noise: Tensor, t: Tensor, full: Constants, most: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Noise MSE, and the variational bound (nats) that trains the variance logits with the mean detached.

    Args:
        out: head output [N, 2 C]; x0, x, noise: [N, C]; t: int64 [N] in 0..999; full: the 1000-step tables.
        most: the MSE has the weight max(1, 1 / SNR), at most this; 1: none.
    """
    c = x0.shape[1]
    eps, logits = out[:, :c].float(), out[:, c:].float()

    def at(table: Tensor) -> Tensor:
        return table.to(torch.float32)[t.cpu()].to(x.device)[:, None]

    low, high = at(full.posterior_log_variance_clipped), at(full.betas.log())
    logvar = low + (logits + 1) / 2 * (high - low)
    true_mean = at(full.posterior_mean_coef1) * x0 + at(full.posterior_mean_coef2) * x
    guess = at(full.sqrt_recip_alphas_cumprod) * x - at(full.sqrt_recipm1_alphas_cumprod) * eps.detach()
    mean = at(full.posterior_mean_coef1) * guess + at(full.posterior_mean_coef2) * x
    bound = 0.5 * (logvar - low - 1 + (low - logvar).exp() + (true_mean - mean) ** 2 * (-logvar).exp())
    if most == 1:
        return F.mse_loss(eps, noise), bound.clamp(max=20).mean()
    a = at(full.alphas_cumprod)

    return (((1 - a) / a).clamp(1, most) * (eps - noise) ** 2).mean(), bound.clamp(max=20).mean()


def divided(tokens: int, batch: int, g: torch.Generator, power: float = 1.5) -> tuple[Tensor, Tensor]:
    """Random masked and known positions, int64 [B, M] and [B, L - M], the known ones ascending.

    The share of masked tokens is 1 - 0.95 u^power with u uniform,
    so early AR steps, which decide the layout, are most frequent.
    """
    masked = max(1, round(tokens * (1 - 0.95 * float(torch.rand((), generator=g)) ** power)))
    order = torch.rand(batch, tokens, generator=g).argsort(1)
    return order[:, :masked], order[:, masked:].sort(1).values


def inexact(tokens: Tensor, g: torch.Generator) -> Tensor:
    """Tokens [B, L, C] with noise of a random std up to :data:`CONTEXT_NOISE` per image."""
    off = CONTEXT_NOISE * torch.rand(len(tokens), 1, 1, generator=g) * torch.randn(tokens.shape, generator=g)
    return tokens + off.to(tokens.device)


def head_loss(
    head: DiffusionHead,
    z: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    full: Constants,
    g: torch.Generator,
    repeats: int = HEAD_REPEATS,
    most: float = 1.0,
    lowest: int = 0,
) -> tuple[Tensor, Tensor]:
    """:func:`diffusion_loss` of the masked tokens ``hidden`` int64
    [B, M] with conditions z [B, M, C], each at ``repeats`` timesteps.
    """
    device = tokens.device
    x0 = tokens.gather(1, hidden[..., None].expand(-1, -1, tokens.shape[2])).flatten(0, 1).repeat(repeats, 1)
    t = torch.randint(lowest, 1000, (len(x0),), generator=g)
    noise = torch.randn(x0.shape, generator=g).to(device)
    a = full.alphas_cumprod.float()[t].to(device)[:, None]
    x = a.sqrt() * x0 + (1 - a).sqrt() * noise
    embedding = head.time_embed(t.to(device)) + head.cond_embed(z.flatten(0, 1)).repeat(repeats, 1)

    return diffusion_loss(head.denoise(x, head.modulations(embedding)), x0, x, noise, t, full, most)


def train_mar(job: Job, out: Path, kl: KLAutoencoder, start: MAR | None = None) -> MAR:
    """Train the MAR on the latents of the autoencoder, loaded from its fp16 file as shipped, and write ``out``."""
    count, n, b, full = job.count(MAR_PICTURES), TARGET.tokens, TARGET_SCHEDULE.batch, constants()
    data, labels = pictures(job, count)
    job.log("encoding the picture book")

    # The posterior mean, not a sample: the decoder is robust to noise, so the MAR need not reproduce it.
    encoded = latents(kl, data, job.device)[0].flatten(2).transpose(1, 2).contiguous()
    net = seeded(7, lambda: initialise_mar(MAR(TARGET)), start)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(13, step)
        rows = torch.randint(count, (b,), generator=g)
        tokens = encoded[rows].to(job.device)
        hidden, known = (places.to(job.device) for places in divided(n, b, g))
        null = (torch.rand(b, 1, generator=g) < NULL_LABELS).to(job.device)
        rows_c = torch.where(null, module.fake_latent, module.class_emb(labels[rows].to(job.device)))
        z = module.decode(module.encode(inexact(tokens, g), known, rows_c), known, hidden)
        mse, bound = head_loss(module.head, z, tokens, hidden, full, g)

        return mse + bound, {"mse": mse, "bound": bound}

    train(job, "mar", net, loss, TARGET_SCHEDULE)
    save_mar(net, out, "mar")

    return net


def save_mar(net: MAR, out: Path, name: str) -> None:
    """Write a MAR with its metadata."""
    about = {"heads": net.config.heads, "latent_scale": 1.0, "t_max": T_MAX, "label_set": "picture-book"}
    about |= {"decoder": "demo-kl", "name": f"picture book {name}", "defaults": DEFAULTS}
    save_checkpoint(net, out, family="mar", **about)
