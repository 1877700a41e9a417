"""Training of the part that lets a demo decoder draw images four times larger from the same latents.

A scene of the picture book renders at any resolution. Of the autoencoder no weight changes: the part is trained on the
features that its decoder computes, against the large rendering, and on latents with errors, because those of a sampler
are not quite those of an image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.files.checkpoint import read_metadata
from ...networks.autoencoder import KLAutoencoder, VQAutoencoder
from ...networks.binary import BinaryAutoencoder
from ...networks.enlarging import FACTOR, EnlargingConfig, read_levels
from .binary_recipe import FLIPS, flipped
from .recipes import LATENT_NOISE, RESOLUTION, pictures, psnr, reconstruction_loss, save_checkpoint, to_signed
from .token_recipes import SPREAD
from .training import Figures, Job, Schedule, generator, seeded, train

Autoencoder = KLAutoencoder | VQAutoencoder | BinaryAutoencoder
# Encoded latents and a generator to what the decoder reads.
Disturb = Callable[[Tensor, torch.Generator], Tensor]

_PART = EnlargingConfig(width=48, fine=16, blocks=(0, 1, 2, 1))
# The tokenizer draws images of up to four times as many pixels, so that its part has less to compute for each: it reads
# three of the decoder's four levels.
PARTS: dict[type[Autoencoder], EnlargingConfig] = {
    KLAutoencoder: _PART,
    VQAutoencoder: EnlargingConfig(width=48, fine=12, blocks=(0, 1, 0), rises=(32,)),
    BinaryAutoencoder: _PART,
}
# The decoders of the other two began as the KL autoencoder's, so that a part of the same shape needs less training.
_FIRST = Schedule(steps=1300, batch=8, lr=2e-3, ema=0.997, weight_decay=0.0, decay=0.55)
SCHEDULES: dict[type[Autoencoder], Schedule] = {
    KLAutoencoder: _FIRST,
    VQAutoencoder: replace(_FIRST, steps=18000, decay=0.7),
    BinaryAutoencoder: replace(_FIRST, steps=300, lr=1e-3, warmup=20, decay=0.7, ema=0.98),
}
# Number of training images by the side that is encoded. Steps alternate between the sides: a tokenizer's models draw
# images of both.
PICTURES: dict[type[Autoencoder], dict[int, int]] = {
    KLAutoencoder: {RESOLUTION: 4500},
    VQAutoencoder: {RESOLUTION: 2500, 2 * RESOLUTION: 800},
    BinaryAutoencoder: {RESOLUTION: 1000},
}


def train_enlarging(
    job: Job, path: Path, name: str, net: Autoencoder, start: KLAutoencoder | None = None
) -> Autoencoder:
    """Train the part for the autoencoder ``net`` of the file ``path``, and write the file with it.

    Args:
        name: of the training's state.
        net: an autoencoder without the part.
        start: a KL autoencoder with the part, from which the training begins.
    """
    net = net.to(job.device).eval().requires_grad_(False)
    data = {side: _encoded(job, net, side, job.count(count)) for side, count in PICTURES[type(net)].items()}
    sides = list(data)
    disturb = disturbing(net)
    whole = seeded(61, lambda: with_part(net)).to(job.device)
    part = initialised(whole.enlarge)
    if start is not None:
        begin_as(part, start.enlarge)
    schedule = SCHEDULES[type(net)]

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(67, step)
        side = sides[step % len(sides)]
        latents, images = data[side]

        # The same number of pixels per step at all sides.
        batch = max(1, schedule.batch * sides[0] ** 2 // side**2)
        rows = torch.randint(len(latents), (batch,), generator=g)
        with torch.no_grad():
            read = read_levels(whole, disturb(latents[rows].to(job.device), g))

        x = to_signed(images[rows]).to(job.device)
        y = module(*read).float()
        return reconstruction_loss(y, x), {f"psnr{FACTOR * side}": psnr(y, x)}

    train(job, name, part, loss, schedule)
    save_checkpoint(whole, path, **read_metadata(path))
    return whole.eval()


def with_part(net: Autoencoder) -> Autoencoder:
    """A copy of an autoencoder with a part of random weights."""
    whole = type(net)(replace(net.config, enlarging=PARTS[type(net)]))  # type: ignore[arg-type]
    whole.load_state_dict(net.state_dict(), strict=False)
    return whole


def without_part(net: Autoencoder) -> Autoencoder:
    """A copy of an autoencoder without the part: all other recipes train and read images of the encoder's size."""
    plain = type(net)(replace(net.config, enlarging=None))  # type: ignore[arg-type]
    own = plain.state_dict()
    plain.load_state_dict({name: value for name, value in net.state_dict().items() if name in own})
    return plain.eval().requires_grad_(False)


@torch.no_grad()
def initialised(part: nn.Module) -> nn.Module:
    """The part as it begins: blocks that change nothing, and the decoder's image, enlarged bilinearly, or grey."""
    for name, weight in part.named_parameters():
        if ".conv2." in name or name.startswith("paint."):
            weight.zero_()

    return part


def begin_as(part: nn.Module, other: nn.Module) -> None:
    """Give a part the weights that it has in common with another one."""
    own = part.state_dict()
    common = {name: w for name, w in other.state_dict().items() if name in own and own[name].shape == w.shape}
    part.load_state_dict({**own, **common})


def disturbing(net: Autoencoder) -> Disturb:
    """How the latents of an image become those of a sampler, as the decoder reads them."""
    if isinstance(net, KLAutoencoder):
        return lambda latents, g: net.post_quant_conv(latents + LATENT_NOISE * _spread(latents, g))
    if isinstance(net, BinaryAutoencoder):
        return lambda bits, g: flipped(bits, FLIPS, g)

    return lambda features, g: net.decoder_input(net.codes(features + SPREAD[0] * _spread(features, g)))


def _spread(latents: Tensor, g: torch.Generator) -> Tensor:
    """Noise with a random std of up to 1 per image."""
    share = torch.rand(len(latents), 1, 1, 1, generator=g)
    return (share * torch.randn(latents.shape, generator=g)).to(latents.device)


@torch.no_grad()
def encode(net: Autoencoder, images: Tensor) -> Tensor:
    """What :func:`disturbing` reads of images [B, 3, H, W] in -1..1: means, unit features, or bits."""
    if isinstance(net, VQAutoencoder):
        return F.normalize(net.features(images).float(), dim=1)

    return net.encode(images)[0].float()


def _encoded(job: Job, net: Autoencoder, side: int, count: int) -> tuple[Tensor, Tensor]:
    """Encoded training images of a side, [N, c, h, w], and their large renderings uint8 [N, 3, 4 side, 4 side]."""
    small, _ = pictures(job, count, side)
    latents = torch.cat([encode(net, to_signed(part).to(job.device)).cpu() for part in small.split(50)])
    large, _ = pictures(job, count, FACTOR * side)
    return latents, large
