"""Configuration and training of the demo's binary autoencoder.

BitDance (arXiv 2602.14041) publishes no code for its tokenizer's training. The losses here are those of the KL demo,
and of binary tokenizers: straight-through signs, and an entropy loss over groups of bits (lookup-free quantisation, Yu
et al. 2023, arXiv 2310.05737).
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...networks.autoencoder import KLAutoencoder
from ...networks.binary import BinaryAutoencoder, BinaryConfig, to_bits
from .recipes import KL_PICTURES, book, pictures, psnr, reconstruction_loss, save_checkpoint, to_signed
from .training import Figures, Job, Schedule, generator, seeded, train

BINARY = BinaryConfig(widths=(32, 32, 64, 64), blocks=2, z_channels=16, groups=8)
BINARY_SCHEDULE = Schedule(steps=1416, batch=48, lr=2e-3, ema=0.997, weight_decay=0.0, decay=0.5)
# A second stage trains only the decoder, on bits of which a share of up to FLIPS is wrong. Bits drawn by a generator
# are not all those of an image; without this stage a wrong one is decoded as a stain.
ROBUST_SCHEDULE = replace(BINARY_SCHEDULE, steps=378, lr=1e-3, decay=0.6)
FLIPS = 0.04

# Weights of the entropy loss and of the commitment loss, bits of a group, and the slope of a bit's probability.
ENTROPY = 0.05
COMMITMENT = 0.1
GROUP = 4
SLOPE = 4.0


def entropy_loss(features: Tensor) -> Tensor:
    """Mean entropy of the groups' codes given an image's features, minus the entropy of their mean, in nats.

    Small if every bit is certain and all codes of a group are equally frequent. ``features``: fp32 [B, C, h, w].
    """
    rows = features.permute(0, 2, 3, 1).flatten(0, 2).unflatten(1, (-1, GROUP))  # [N, groups, GROUP]
    on = torch.sigmoid(SLOPE * rows)
    joint = torch.ones_like(on[..., :1])
    for bit in range(GROUP):
        share = on[..., bit, None]
        joint = torch.cat([joint * (1 - share), joint * share], -1)

    certain = -(joint * joint.clamp_min(1e-9).log()).sum(-1).mean()
    mean = joint.mean(0)
    spread = -(mean * mean.clamp_min(1e-9).log()).sum(-1).mean()
    return certain - spread


def straight_through(features: Tensor) -> Tensor:
    """The bits, with the features' gradient."""
    return features + (to_bits(features) - features).detach()


def flipped(bits: Tensor, most: float, g: torch.Generator) -> Tensor:
    """Bits [B, ...] of which each changes its sign with a probability of ``most`` u, with u uniform per image."""
    share = most * torch.rand(len(bits), *[1] * (bits.ndim - 1), generator=g)
    wrong = torch.rand(bits.shape, generator=g) < share
    return torch.where(wrong.to(bits.device), -bits, bits)


@torch.no_grad()
def initialise_from_kl(net: BinaryAutoencoder, kl: KLAutoencoder) -> BinaryAutoencoder:
    """Initialise an autoencoder with the convolutions of a KL autoencoder of the same widths.

    What the KL autoencoder has not (the last blocks of the encoder's levels, and the adaptive norms) begins as the
    identity. Its biases and its attention are left out; the layers next to the bits stay random.
    """
    state = net.state_dict()
    source = kl.state_dict()
    ours = {".mid.block_1.": ".mid_block.0.", ".mid.block_2.": ".mid_block.1.", ".downsample.conv.": ".downsample."}

    for name, value in source.items():
        for theirs, own in ours.items():
            name = name.replace(theirs, own)

        if name.endswith(".upsample.conv.weight"):
            target = name.replace(".conv.", ".conv1.")
            state[target].copy_(_enlarging(value))
        elif name.endswith(".downsample.weight"):
            # The KL autoencoder pads at the right and at the bottom, this one on all sides.
            state[name].zero_()
            state[name][..., 1:, 1:] = value[..., :-1, :-1]
        elif name in state and state[name].shape == value.shape:
            state[name].copy_(value)

    for name, value in state.items():
        is_further = name.startswith("encoder.down.") and ".block.0." not in name
        if is_further and name.endswith(".conv2.weight") or ".adaptive." in name:
            value.fill_(name.endswith(".gamma.bias"))

    return net


def _enlarging(kernel: Tensor) -> Tensor:
    """The kernel [4 n, n, 3, 3] that equals nearest-neighbour enlargement and then ``kernel`` [n, n, 3, 3].

    Of the even row of a pair, the first tap reads the row before and the others its own; of the odd row, the last one
    reads the row after it.
    """
    even = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    odd = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    parity = torch.stack([even, odd]).to(kernel.device)  # [row of the pair, read row, tap]
    phases = torch.einsum("ayk,bxl,oikl->aboiyx", parity, parity, kernel.float())
    return phases.flatten(0, 2)


def train_binary(job: Job, out: Path, kl: KLAutoencoder) -> BinaryAutoencoder:
    """Train the autoencoder, then its decoder on bits with errors, and write ``out``; ``kl`` initialises it."""
    data, _ = pictures(job, job.count(KL_PICTURES))
    net = initialise_from_kl(seeded(41, lambda: BinaryAutoencoder(BINARY)), kl)

    def batch(step: int, seed: int) -> tuple[Tensor, torch.Generator]:
        g = generator(seed, step)
        rows = torch.randint(len(data), (BINARY_SCHEDULE.batch,), generator=g)
        return to_signed(data[rows]).to(job.device), g

    def whole(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        x, _ = batch(step, 43)
        features = module.encoder(x).float()
        y = module.decoder(straight_through(features)).float()

        entropy = entropy_loss(features)
        commitment = F.mse_loss(features, to_bits(features).detach())
        on = (features.detach() > 0).float().mean((0, 2, 3))
        figures = {"psnr": psnr(y, x), "entropy": entropy, "off": commitment, "least": on.min(), "most": on.max()}
        return reconstruction_loss(y, x) + ENTROPY * entropy + COMMITMENT * commitment, figures

    def robust(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        x, g = batch(step, 47)
        with torch.no_grad():
            bits = to_bits(module.encoder(x).float())
        y = module.decoder(flipped(bits, FLIPS, g)).float()
        return reconstruction_loss(y, x), {"psnr": psnr(y, x)}

    train(job, "binary", net, whole, BINARY_SCHEDULE)
    train(job, "binary-robust", net, robust, ROBUST_SCHEDULE)
    about = {"groups": BINARY.groups, "name": "picture book binary autoencoder, stride 8"}
    save_checkpoint(net, out, family="bitdance-ae", **about)
    log_figures(job, net)

    return net


@torch.no_grad()
def log_figures(job: Job, net: BinaryAutoencoder, seed: int = 3, count: int = 500) -> None:
    """Log PSNR and the shares of bits that are on, on images that were not trained on."""
    error = 0.0
    on = torch.zeros(net.config.z_channels)
    for _, rgb in book(job, count, seed=seed):
        for part in rgb.split(50):
            x = to_signed(part).to(job.device)
            bits, _ = net.encode(x)
            error += float(F.mse_loss(net.decode(bits).float().clamp(-1, 1), x)) * len(part)
            on += (bits > 0).float().mean((2, 3)).sum(0).cpu()

    decibels = 10 * torch.log10(torch.tensor(4 * count / error))
    shares = (on / count).tolist()
    job.log(f"binary: {decibels:.2f} dB; bits on in {min(shares):.0%} to {max(shares):.0%} of the cells")
