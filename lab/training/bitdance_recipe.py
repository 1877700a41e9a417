"""Configuration and training of the demo's BitDance, on the bits of the binary autoencoder.

The loss is that of the published code (train_parallel.py): every block of an image is denoised from a few random times,
given the blocks before it, some bits of which are wrong.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ...networks.binary import BinaryAutoencoder
from ...networks.bitdance import CLASS_HEAD_DIM, BitDanceClass, BitDanceConfig, HeadConfig
from ...networks.llama import CLASS
from . import picture_book
from .binary_recipe import BINARY, flipped
from .initialise import initialise_bitdance
from .recipes import MAR_PICTURES, NULL_LABELS, RESOLUTION, book, save_checkpoint, to_signed
from .training import Figures, Job, Schedule, generator, seeded, train

SIDE = RESOLUTION // BINARY.stride
BITDANCE = BitDanceConfig(
    dim=192,
    depth=6,
    heads=6,
    kv_heads=6,
    hidden=512,
    vocab=0,
    condition=CLASS,
    condition_size=len(picture_book.LABELS),
    tied=True,
    eps=1e-6,
    rows=4,
    block=4,
    tokens=SIDE**2,
)
# A tanh bounds the prediction, as in the text models.
HEAD = HeadConfig(
    channels=BINARY.z_channels,
    condition=BITDANCE.dim,
    width=128,
    depth=3,
    modulations=1,
    heads=128 // CLASS_HEAD_DIM,
    bounded=True,
)
SCHEDULE = Schedule(steps=2631, batch=128, lr=1e-3, muon_lr=2e-3, ema=0.9985, decay=0.4)
# Largest share of fed bits that are wrong, and times at which every block is denoised.
FED_FLIPS = 0.1
REPEATS = 4
# Mean and std of the logit of the time, and the floor of 1 - t.
TIMES = (-0.8, 0.8)
FLOOR = 0.05
# Sampling defaults, stored in the checkpoint.
DEFAULTS = {"diffusion_steps": 25, "cfg": 2.0, "cfg_schedule": "linear"}


def denoising_loss(net: BitDanceClass, conditions: Tensor, tokens: Tensor, g: torch.Generator) -> Tensor:
    """Mean squared error of the velocity: that of the tokens, divided by (1 - t)^2.

    Args:
        net: the network.
        conditions: rows [N, P, D] of blocks.
        tokens: their bits, fp32 [N, P, C].
        g: draws times and noise.
    """
    mean, std = TIMES
    t = torch.sigmoid(mean + std * torch.randn(len(tokens), generator=g)).to(tokens.device)
    noise = torch.randn(tokens.shape, generator=g).to(tokens.device)
    share = t[:, None, None]
    prediction = net.denoiser((1 - share) * noise + share * tokens, t, conditions)
    return (((tokens - prediction) / (1 - share).clamp_min(FLOOR)) ** 2).mean()


@torch.no_grad()
def encoded_book(job: Job, binary: BinaryAutoencoder, order: Tensor) -> Mapping[str, Tensor]:
    """Bits int8 [count, L, C] in the order of the blocks and labels int64 [count] of the training images.

    They are kept in the folder of the job, because rendering and encoding take minutes.
    """
    path = job.folder / "bitdance-bits.pt"
    count = job.count(MAR_PICTURES)
    if path.exists():
        kept = torch.load(path, weights_only=True)
        if len(kept["bits"]) == count:
            return kept

    job.log("encoding the picture book")
    bits, labels = [], []
    for scenes, rgb in book(job, count):
        for part in rgb.split(50):
            found, _ = binary.encode(to_signed(part).to(job.device))
            bits.append(found.flatten(2).transpose(1, 2)[:, order].to("cpu", torch.int8))
        labels.append(torch.from_numpy(scenes.label))

    made = {"bits": torch.cat(bits), "labels": torch.cat(labels)}
    job.folder.mkdir(parents=True, exist_ok=True)
    torch.save(made, path)
    return made


def train_bitdance(job: Job, out: Path, binary: BinaryAutoencoder, start: BitDanceClass | None = None) -> BitDanceClass:
    """Train the network on the bits of the autoencoder, loaded from its fp16 file as shipped, and write ``out``."""
    net = seeded(53, lambda: initialise_bitdance(BitDanceClass(BITDANCE, HEAD)), start).to(job.device)
    grid = (SIDE, SIDE)
    data = encoded_book(job, binary, net.order(grid))
    size = BITDANCE.block

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(59, step)
        rows = torch.randint(len(data["bits"]), (SCHEDULE.batch,), generator=g)
        null = torch.rand(len(rows), generator=g) < NULL_LABELS
        labels = data["labels"][rows].masked_fill(null, BITDANCE.condition_size).to(job.device)
        tokens = data["bits"][rows].float().to(job.device)

        # 1. Conditions of all blocks, given the blocks before them with some bits wrong.
        prefix, first = module.class_rows(labels)
        places = module.places(grid)
        fed = module.embed(flipped(tokens, FED_FLIPS, g)[:, :-size], places[:-size])
        conditions = module.predictors(prefix, torch.cat([first, fed], 1), grid) + places

        # 2. Every block from a few random times.
        blocks = conditions.unflatten(1, (-1, size)).flatten(0, 1).repeat(REPEATS, 1, 1)
        targets = tokens.unflatten(1, (-1, size)).flatten(0, 1).repeat(REPEATS, 1, 1)
        value = denoising_loss(module, blocks, targets, g)
        return value, {}

    train(job, "bitdance", net, loss, SCHEDULE)
    about = {"heads": BITDANCE.heads, "stride": BINARY.stride, "bounded": "1", "label_set": "picture-book"}
    about |= {"decoder": "demo-binary", "name": "picture book BitDance", "defaults": DEFAULTS}
    save_checkpoint(net, out, family="bitdance", **about)

    return net
