"""Training of MuLo-SD's learned latent up-sampler on the picture book.

The up-sampler maps the codes of an image to those of the same image at twice the size. Source: "Multi-Scale Local Speculative
Decoding for Image Generation" (arXiv 2601.05149), with losses on decoded pixels. Two losses differ: features of the tokenizer's
encoder replace LPIPS, which needs another network, and there is no PatchGAN.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.networks.autoencoder import VQAutoencoder
from ...model_loaders.networks.upsampler import UpSampler, UpSamplerConfig, initialise
from .recipes import pictures, psnr, reconstruction_loss, save_checkpoint, to_signed
from .token_recipes import LOW_GRID, code_book
from .training import Job, Schedule, generator, seeded, train

WIDTH, BLOCKS = 48, 4
SCHEDULE = Schedule(steps=2500, batch=16, lr=2e-3, ema=0.997, weight_decay=0.0, decay=0.5)
COUNT = 8000
# Weights relative to the pixel loss: encoder features, vectors of the target codes, commitment to the nearest code.
FEATURES, CODES, COMMITMENT = 0.5, 1.0, 0.25


def code_pairs(job: Job, vq: VQAutoencoder, count: int, grid: int) -> tuple[Tensor, Tensor, Tensor]:
    """The training images at two sizes.

    Returns:
        Codes of the small images int16 [count, grid, grid], codes of the large ones int16 [count, 2 grid, 2 grid], and the
        large images uint8 [count, 3, H, H].
    """
    low, high = (code_book(job, vq, count, side)[0].unflatten(1, (side, side)) for side in (grid, 2 * grid))
    return low, high, pictures(job, count, 2 * grid * vq.config.stride)[0]


def upsampler_loss(
    net: nn.Module, vq: VQAutoencoder, low: Tensor, high: Tensor, large: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a batch, and figures to log.

    Args:
        low, high: codes int64 [B, h, w] and [B, 2 h, 2 w].
        large: the images of ``high``, fp32 [B, 3, H, W] in -1..1.
    """
    vectors = net(vq.vectors(low)).float()
    # bf16 cannot distinguish neighbouring codes.
    with torch.autocast(large.device.type, enabled=False):
        found = vq.codes(vectors.detach())
        chosen = vq.vectors(found)
    # Straight-through estimator: the decoder receives codes, the vectors its gradient.
    y = vq.render(vectors + (chosen - vectors).detach()).float()
    pixels = reconstruction_loss(y, large)
    features = F.mse_loss(F.normalize(vq.features(y).float(), dim=1), vq.vectors(high))
    towards, rest = F.mse_loss(vectors, vq.vectors(high)), F.mse_loss(vectors, chosen)
    figures = {"psnr": psnr(y, large), "right": float((found == high).float().mean()), "rest": float(rest.detach())}
    return pixels + FEATURES * features + CODES * towards + COMMITMENT * rest, figures


def train_upsampler(job: Job, out: Path, vq: VQAutoencoder, grid: int = LOW_GRID) -> UpSampler:
    """Train the up-sampler for small images of ``grid`` x ``grid`` tokens of the tokenizer, and write ``out``."""
    count = job.count(COUNT)
    low, high, rgb = code_pairs(job, vq, count, grid)
    net = seeded(41, lambda: initialise(UpSampler(UpSamplerConfig(vq.config.code_channels, WIDTH, BLOCKS))))

    def loss(module: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        rows = torch.randint(count, (SCHEDULE.batch,), generator=generator(43, step))
        codes = (low[rows].long().to(job.device), high[rows].long().to(job.device))
        return upsampler_loss(module, vq, *codes, to_signed(rgb[rows]).to(job.device))

    train(job, "upsampler", net, loss, SCHEDULE)
    save_checkpoint(net, out, family="upsampler", decoder="demo-vq", name="picture book up-sampler")
    return net
