"""Training of MuLo-SD's up-sampler U_r and down-sampler D_r in latents (``networks/latent_samplers.py``).

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149), "Loss & Training":
a token loss, then the losses of pixels, MSE and LPIPS, then a PatchGAN. The paper gives no weights, sizes or steps, so
those are this project's own. LPIPS is a network of another package; its place takes the same distance of features of
the tokenizer's encoder, without the weights that LPIPS learnt from people's judgements.

A pair is an image's codes, and the codes of the image at 1/r the side (averaged areas). A target that was trained on
codes of its own choice finds the encoder's codes unlikely. For such a target, the large codes of the pairs are those
that it finds likely. Each network is trained in two stages, the first with the token loss, the second with the chosen
losses. The chosen losses may be the token loss again, which is the control of an ablation: as many steps, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ...networks.autoencoder import VQAutoencoder
from ...networks.latent_samplers import LatentSamplers, LatentSamplersConfig
from . import picture_book
from .recipes import TRAIN_SEED, psnr, save_checkpoint, to_signed
from .token_recipes import LikelyCodes
from .training import Figures, Job, Schedule, generator, seeded, train

# Losses of the second stage: the token loss again, or those of pixels, each with the ones before it.
TOKEN, PIXEL, PERCEPTUAL, PATCHGAN = LOSSES = ("token", "pixel", "perceptual", "patchgan")
# Scale of similarities, whose softmax is the distribution of codes of the token loss.
TEMPERATURE = 0.07
# Weights of the losses of the second stage; the token loss keeps some, because the target model reads tokens.
TOKEN_WEIGHT, PIXEL_WEIGHT, PERCEPTUAL_WEIGHT, PATCHGAN_WEIGHT = 0.3, 16.0, 4.0, 0.1
# Largest std of the noise on code vectors that a network reads, per image. Sampled codes are not those of an encoder.
NOISE = 0.12
# The demo's file, and its number of training images.
NAME, COUNT = "latent-samplers", 9000
# Held-out images for the figures of a training.
HELD_OUT = 60
# Pixels of images that are encoded at once.
_PIXELS = 1 << 19


class Images(Protocol):
    """Square training images."""

    side: int  # pixels

    def __len__(self) -> int: ...

    def read(self, rows: Tensor) -> Tensor:
        """The images of int64 [n], uint8 [n, 3, side, side]."""
        ...


@dataclass(frozen=True)
class BookImages:
    """The first images of the picture book."""

    count: int
    side: int

    def __len__(self) -> int:
        return self.count

    def read(self, rows: Tensor) -> Tensor:
        """As :class:`Images`."""
        scenes = picture_book.scenes(TRAIN_SEED, self.count)[rows.numpy()]
        return torch.from_numpy(picture_book.render(scenes, self.side)[0]).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Recipe:
    """Sizes of the networks, and the lengths of their trainings.

    Attributes:
        width, up_small, up_large, down_small: see :class:`LatentSamplersConfig`.
        first: schedule of the token loss.
        second: schedule of the chosen losses.
        crop: cells per side of the part of an image that the losses of pixels decode; a whole image takes more time.
    """

    width: int = 96
    up_small: int = 5
    up_large: int = 1
    down_small: int = 4
    first: Schedule = Schedule(steps=3000, batch=16, lr=3e-3, ema=0.995, weight_decay=1e-4, warmup=40, decay=0.7)
    second: Schedule = Schedule(steps=200, batch=8, lr=6e-4, ema=0.98, weight_decay=1e-4, warmup=20, decay=0.8)
    crop: int = 8

    def config(self, vq: VQAutoencoder, ratio: int) -> LatentSamplersConfig:
        """The shape of the networks for a tokenizer."""
        codes, channels = vq.config.codes, vq.config.code_channels
        sizes = (self.width, self.up_small, self.up_large, self.width, self.down_small)
        return LatentSamplersConfig(ratio, codes, channels, *sizes)


DEMO = Recipe()


class Pairs(NamedTuple):
    """Codes of images at two sizes, int16 or int32 [N, h, w] and [N, h * ratio, w * ratio]."""

    small: Tensor
    large: Tensor


def train_latent_samplers(
    job: Job,
    out: Path,
    vq: VQAutoencoder,
    images: Images,
    ratio: int,
    recipe: Recipe,
    losses: str,
    name: str,
    likely: LikelyCodes | None = None,
) -> LatentSamplers:
    """Train both networks and write ``out``.

    Args:
        job: folder of the resumable state, device, steps.
        out: the file.
        vq: the tokenizer of draft and target, without a part that enlarges.
        images: at the target's size; their side is a multiple of the tokenizer's stride times ``ratio``.
        ratio: r, the target's side over the draft's.
        losses: the last of :data:`LOSSES` that the second stage has.
        name: display name, which the file states.
        likely: chooses the large codes; None takes the encoder's.
    """
    # bf16 cannot distinguish neighbouring codes, and the networks are small.
    job = replace(job, fp32=True)
    vq = vq.to(job.device).eval().requires_grad_(False)
    pairs = cached_pairs(job, vq, images, ratio, likely)
    net = seeded(71, lambda: LatentSamplers(recipe.config(vq, ratio))).to(job.device)
    net.codebook.embedding.weight.data.copy_(vq.quantize.unit())
    net.codebook.requires_grad_(False)

    trainings = [_Training(job, part, net, vq, pairs, images, recipe, losses) for part in ("up", "down")]
    for training in trainings:
        training.first_stage()
    for training in trainings:
        training.second_stage()
        job.log(f"{training.part}: {held_out_figures(net, training.part, vq, pairs)}")

    save_checkpoint(net, out, family="latent-samplers", name=name)
    return net.eval()


@dataclass(frozen=True)
class _Training:
    """The training of one of the two networks, in place."""

    job: Job
    part: str  # "up" or "down"
    net: LatentSamplers  # both
    vq: VQAutoencoder
    pairs: Pairs
    images: Images
    recipe: Recipe
    losses: str

    @property
    def network(self) -> nn.Module:
        """The one that is trained."""
        return self.net.up_sampler if self.part == "up" else self.net.down_sampler

    def first_stage(self) -> None:
        """Train it with the token loss."""

        def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
            _, vectors, codes = self._batch(self.recipe.first, step, 73)
            value, right = token_loss(self.net, module(vectors), codes)
            return value, {"right": right}

        train(self.job, self.part, self.network, loss, self.recipe.first)

    def second_stage(self) -> None:
        """Train it with the chosen losses."""
        stage = seeded(83, lambda: _SecondStage(self.network)).to(self.job.device)
        train(self.job, f"{self.part}-{self.losses}", stage, self._second_loss, self.recipe.second)

    def _second_loss(self, stage: _SecondStage, step: int) -> tuple[Tensor, Figures]:
        rows, vectors, codes = self._batch(self.recipe.second, step, 79)
        made = stage.net(vectors)
        token, right = token_loss(self.net, made, codes)
        if self.losses == TOKEN:
            return token, {"right": right}

        # A part of the image, and the same part of its codes.
        cells, pixels = crop(made.shape[-1], self.recipe.crop, self.vq.config.stride, generator(89, step))
        drawn, wanted = decoded(self.vq, self.net, made[cells]), self._wanted(rows)[pixels]

        value = TOKEN_WEIGHT * token + PIXEL_WEIGHT * F.mse_loss(drawn, wanted)
        if self.losses != PIXEL:
            value = value + PERCEPTUAL_WEIGHT * perceptual_distance(self.vq, drawn, wanted)
        if self.losses == PATCHGAN:
            value = value + stage.adversarial_loss(drawn, wanted)
        return value, {"right": right, "psnr": psnr(drawn, wanted)}

    def _batch(self, schedule: Schedule, step: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows int64 [B] of the pairs, the unit vectors that the network reads, and the codes that it should make."""
        g = generator(seed, step)
        source, result = self.pairs if self.part == "up" else reversed(self.pairs)
        rows = torch.randint(len(source) - HELD_OUT, (schedule.batch,), generator=g)
        vectors = disturbed(self.net, source[rows].to(self.job.device).long(), g)
        return rows, vectors, result[rows].to(self.job.device).long()

    def _wanted(self, rows: Tensor) -> Tensor:
        """Images [B, 3, H, W] in -1..1 at the size that the network makes codes of."""
        images = to_signed(self.images.read(rows)).to(self.job.device)
        return images if self.part == "up" else F.avg_pool2d(images, self.net.config.ratio)


# ------------------------------------------------------------ pairs of codes


def cached_pairs(job: Job, vq: VQAutoencoder, images: Images, ratio: int, likely: LikelyCodes | None = None) -> Pairs:
    """The pairs of all images, from the job's folder if they were made before."""
    chooser = "" if likely is None else likely.key
    about = sha256(f"{images} {ratio} {vq.quantize.unit().sum(0).tolist()} {chooser}".encode()).hexdigest()
    path = job.folder / f"pairs-{about[:16]}.pt"
    if path.is_file():
        return Pairs(*torch.load(path, weights_only=True))

    job.folder.mkdir(parents=True, exist_ok=True)
    made = Pairs(*(torch.cat(parts) for parts in zip(*_encoded(job, vq, images, ratio, likely), strict=True)))
    torch.save(tuple(made), path)
    return made


@torch.no_grad()
def _encoded(job: Job, vq: VQAutoencoder, images: Images, ratio: int, likely: LikelyCodes | None) -> Iterator[Pairs]:
    """Pairs of some images at a time."""
    kept = torch.int16 if vq.config.codes < 1 << 15 else torch.int32
    at_once = max(1, _PIXELS // images.side**2)
    for at in range(0, len(images), at_once):
        rows = torch.arange(at, min(at + at_once, len(images)))
        x = to_signed(images.read(rows)).to(job.device)
        small = vq.encode(F.avg_pool2d(x, ratio))[1]
        large = vq.encode(x)[1] if likely is None else likely(F.normalize(vq.features(x).float(), dim=1))
        yield Pairs(small.to("cpu", kept), large.to("cpu", kept))
        if at % (20 * at_once) == 0:
            job.log(f"encoding images: {at}/{len(images)}")


def disturbed(net: LatentSamplers, codes: Tensor, g: torch.Generator) -> Tensor:
    """Unit vectors [B, C, h, w] of the codes that are nearest to the vectors of ``codes`` with noise of a random std of
    up to :data:`NOISE` per image.
    """
    vectors = net.vectors(codes)
    std = NOISE * torch.rand(len(codes), 1, 1, 1, generator=g)
    noise = (std * torch.randn(vectors.shape, generator=g)).to(vectors)
    return net.vectors(net.nearest(vectors + noise))


# ------------------------------------------------------------ losses


def token_loss(net: LatentSamplers, made: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of codes int64 [B, h, w] under unit vectors ``made`` [B, C, h, w], and the share of them that are
    nearest. A code's logit is its similarity over :data:`TEMPERATURE`.
    """
    logits = torch.einsum("bchw,kc->bkhw", made, net.codebook.unit()) / TEMPERATURE
    return F.cross_entropy(logits, codes), (logits.detach().argmax(1) == codes).float().mean()


def crop(grid: int, side: int, stride: int, g: torch.Generator) -> tuple[Any, Any]:
    """The indices of a random square of ``side`` x ``side`` cells, or of all: in maps of cells, and in images."""
    side = min(side, grid)
    row, column = torch.randint(grid - side + 1, (2,), generator=g).tolist()
    cells = (..., slice(row, row + side), slice(column, column + side))
    pixels = (..., slice(row * stride, (row + side) * stride), slice(column * stride, (column + side) * stride))
    return cells, pixels


def decoded(vq: VQAutoencoder, net: LatentSamplers, made: Tensor) -> Tensor:
    """Images [B, 3, H, W] of the codes nearest to ``made``, with the gradient of the vectors (straight-through, van
    den Oord et al. 2017).
    """
    chosen = net.vectors(net.nearest(made.detach()))
    through = made + (chosen - made).detach()
    return vq.decoder(vq.post_quant_conv(through)).float()


def perceptual_distance(vq: VQAutoencoder, drawn: Tensor, wanted: Tensor) -> Tensor:
    """LPIPS's distance (Zhang et al. 2018, arXiv 1801.03924) in features of the tokenizer's encoder, with weights of 1:
    the squared differences of features of unit length, averaged over positions and added over levels.
    """
    with torch.no_grad():
        of_wanted = list(encoder_features(vq, wanted))
    distances = []
    for a, b in zip(encoder_features(vq, drawn), of_wanted, strict=True):
        distances.append((F.normalize(a, dim=1) - F.normalize(b, dim=1)).pow(2).sum(1).mean())
    return torch.stack(distances).sum()


def encoder_features(vq: VQAutoencoder, images: Tensor) -> Iterator[Tensor]:
    """The features of the encoder's levels, the highest resolution first, of images [B, 3, H, W]."""
    x = vq.encoder.conv_in(images)
    for level in vq.encoder.down:
        x = level(x)
        yield x
        x = level.downsample(x)


class PatchGAN(nn.Module):
    """A small discriminator (Isola et al. 2017, arXiv 1611.07004): a logit for each patch of 22 x 22 pixels."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4, 1, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class _SecondStage(nn.Module):
    """A network and its discriminator, which one optimiser trains."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.discriminator = PatchGAN()

    def adversarial_loss(self, drawn: Tensor, wanted: Tensor) -> Tensor:
        """The sum of both hinge losses. The discriminator is a constant in the network's loss, and the image is one in
        the discriminator's.
        """
        of_drawn = self.discriminator(drawn.detach())
        of_wanted = self.discriminator(wanted)
        own = F.relu(1 + of_drawn).mean() + F.relu(1 - of_wanted).mean()

        constant = {name: weight.detach() for name, weight in self.discriminator.named_parameters()}
        fooled: Tensor = functional_call(self.discriminator, constant, (drawn,))
        return own - PATCHGAN_WEIGHT * fooled.mean()


# ------------------------------------------------------------ figures


@torch.no_grad()
def held_out_figures(net: LatentSamplers, part: str, vq: VQAutoencoder, pairs: Pairs) -> str:
    """The share of codes of held-out images that ``up`` or ``down`` makes of the others, and the PSNR of its images."""
    small, large = (codes[-HELD_OUT:].to(net.codebook.embedding.weight.device).long() for codes in pairs)
    made, wanted = (net.up(small), large) if part == "up" else (net.down(large), small)
    decibels = psnr(vq.decode_codes(made).clamp(-1, 1), vq.decode_codes(wanted).clamp(-1, 1))
    return f"{float((made == wanted).float().mean()):.1%} of the codes, {decibels:.2f} dB"
