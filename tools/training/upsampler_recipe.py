"""Training of MuLo-SD's learned latent up-sampler on the picture book.

The up-sampler maps the codes of an image to those of the same image at twice the size. Source: "Multi-Scale Local Speculative
Decoding for Image Generation" (arXiv 2601.05149), with losses on decoded pixels. Two losses differ: features of the tokenizer's
encoder replace LPIPS, which needs another network, and there is no PatchGAN.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.networks.autoencoder import VQAutoencoder
from ...model_loaders.networks.upsampler import UpSampler, UpSamplerConfig, initialise
from . import picture_book
from .recipes import TRAIN_SEED, reconstruction_loss, save_checkpoint, to_signed
from .training import Schedule, generator, train

WIDTH, BLOCKS = 48, 4
SCHEDULE = Schedule(steps=2500, batch=16, lr=2e-3, ema=0.997, weight_decay=0.0, decay=0.5)
COUNT, LOW_GRID = 8000, 8
# Weights relative to the pixel loss: encoder features, vectors of the target codes, commitment to the nearest code.
FEATURES, CODES, COMMITMENT = 0.5, 1.0, 0.25


@torch.no_grad()
def code_pairs(
    vq: VQAutoencoder, count: int, grid: int, device: torch.device, log: Callable[[str], None] = print, chunk: int = 250
) -> tuple[Tensor, Tensor, Tensor]:
    """The training images at two sizes.

    Returns:
        Codes of the small images int16 [count, grid, grid], codes of the large ones int16 [count, 2 grid, 2 grid], and the
        large images uint8 [count, 3, H, H].
    """
    small, side = grid * vq.config.stride, 2 * grid * vq.config.stride
    low = torch.empty(count, grid, grid, dtype=torch.int16)
    high = torch.empty(count, 2 * grid, 2 * grid, dtype=torch.int16)
    rgb = torch.empty(count, 3, side, side, dtype=torch.uint8)
    for at in range(0, count, chunk):
        s = picture_book.scenes(TRAIN_SEED, min(chunk, count - at), at)
        end = at + len(s)
        for out, pixels in ((low, small), (high, side)):
            pictures = torch.from_numpy(picture_book.render(s, pixels)[0]).permute(0, 3, 1, 2)
            out[at:end] = torch.cat(
                [vq.encode(to_signed(part).to(device))[1].to("cpu", torch.int16) for part in pictures.split(50)]
            )
        rgb[at:end] = pictures
        if at % (20 * chunk) == 0:
            log(f"rendering and encoding the picture book at two sizes: {at}/{count}")
    return low, high, rgb


def upsampler_loss(
    net: nn.Module, vq: VQAutoencoder, low: Tensor, high: Tensor, pictures: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a batch, and figures to log.

    Args:
        low, high: codes int64 [B, h, w] and [B, 2 h, 2 w].
        pictures: the images of ``high``, fp32 [B, 3, H, W] in -1..1.
    """
    vectors = net(vq.vectors(low)).float()
    # bf16 cannot distinguish neighbouring codes.
    with torch.autocast(pictures.device.type, enabled=False):
        found = vq.codes(vectors.detach())
        chosen = vq.vectors(found)
    # Straight-through estimator: the decoder receives codes, the vectors its gradient.
    y = vq.render(vectors + (chosen - vectors).detach()).float()
    pixels = reconstruction_loss(y, pictures)
    features = F.mse_loss(F.normalize(vq.features(y).float(), dim=1), vq.vectors(high))
    towards, rest = F.mse_loss(vectors, vq.vectors(high)), F.mse_loss(vectors, chosen)
    psnr = 10 * torch.log10(4 / F.mse_loss(y.detach(), pictures))
    figures = {"psnr": float(psnr), "right": float((found == high).float().mean()), "rest": float(rest.detach())}
    return pixels + FEATURES * features + CODES * towards + COMMITMENT * rest, figures


def train_upsampler(
    vq: VQAutoencoder,
    work: Path,
    out: Path,
    device: torch.device,
    schedule: Schedule = SCHEDULE,
    count: int = COUNT,
    grid: int = LOW_GRID,
    log: Callable[[str], None] = print,
) -> UpSampler:
    """Train the up-sampler and write ``out``.

    Args:
        vq: the tokenizer, loaded from its fp16 file as shipped, on ``device``.
        work, device, schedule, log: see :func:`..training.train`.
        count: number of training images.
        grid: tokens along one side of the small images.
    """
    low, high, rgb = code_pairs(vq, count, grid, device, log)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(41)
        net = initialise(UpSampler(UpSamplerConfig(vq.config.code_channels, WIDTH, BLOCKS)))

    def loss(module: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        rows = torch.randint(count, (schedule.batch,), generator=generator(43, step))
        batch = (low[rows].long().to(device), high[rows].long().to(device), to_signed(rgb[rows]).to(device))
        return upsampler_loss(module, vq, *batch)

    train("upsampler", net, loss, schedule, work, device, log)
    save_checkpoint(net, out, family="upsampler", decoder="demo-vq", name="picture book up-sampler")
    return net
