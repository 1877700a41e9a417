"""Training of the demo's TA-Tok on the picture book.

The official TA-Tok (Tar, arXiv 2506.18898) starts from an image encoder that was trained with text (SigLIP 2) and is
trained to reconstruct its features from the codes. The demo has no such encoder. Two auxiliary heads on the decoded
features replace it: one predicts the scene parameters from the mean feature, so that the codes contain what a caption
states; the other predicts a thumbnail, each feature its own patch, so that they contain positions. The heads are
discarded. The three scales are trained together and share one codebook.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.tar.loader import SCALES
from ...networks.ta_tok import TATok, TATokConfig
from . import picture_book
from .recipes import TRAIN_SEED, book, save_checkpoint
from .token_recipes import perplexity
from .training import Figures, Job, Schedule, generator, seeded, train

# 48 pixels in patches of 8: grids of 6, 3 and 2 codes per side, for the official 27, 13 and 9.
TA_TOK = TATokConfig(
    width=96, code_width=32, codes=256, depth=2, heads=4, hidden=256, places=6, encoder_depth=3, encoder_heads=4,
    encoder_hidden=256, patch=8, side=6, input_size=48,
)  # fmt: skip
SCHEDULE = Schedule(steps=4500, batch=64, lr=1e-3, muon_lr=2e-3, ema=0.998, decay=0.45)
COUNT = 40000
# Seed and number of the held-out images.
HELD_SEED, HELD = TRAIN_SEED + 400, 1000
# Predicted parameters and their numbers of values.
PARAMETERS = picture_book.VALUES
# Side of the thumbnail, a multiple of every grid's side, and the weight of its loss.
THUMBNAIL, PAINTING = 12, 10.0
# Weights of the commitment loss and of the codebook's entropy loss, and the softmax temperature of the latter.
COMMITMENT, SPREAD, SOFTNESS = 0.25, 0.2, 0.05


class TATokTrainer(nn.Module):
    """A TA-Tok in training: the network and the auxiliary heads."""

    def __init__(self, net: TATok):
        super().__init__()
        c = net.config
        self.net, self.sides = net, tuple(c.side // (scale + 1) for scale in range(SCALES))
        self.output_read = nn.Linear(c.width, sum(PARAMETERS.values()))
        self.output_paint = nn.ModuleList(nn.Linear(c.width, 3 * (THUMBNAIL // side) ** 2) for side in self.sides)

    def forward(self, images: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
        """Predictions from the codes of images fp32 [B, 3, H, W] in 0..1: by scale, concatenated logits of the
        parameters [B, 26], thumbnails [B, 3, 12, 12] in 0..1, and codes int64 [B, n]; and the loss of the codebook."""
        encoded = self.net.encode(images)
        read, painted, codes = [], [], []
        quantisation, uncertainty, probabilities = encoded.new_zeros(()), encoded.new_zeros(()), []

        for scale, side in enumerate(self.sides):
            targets = self.net.bottleneck.in_linear(pool(self.net, encoded, scale))
            # bf16 cannot distinguish neighbouring codes.
            with torch.autocast(images.device.type, enabled=False):
                targets = F.normalize(targets.float(), dim=-1)
                codebook = self.net.bottleneck.regularizer
                table = codebook.unit(codebook.embedding.weight)
                similarity = targets @ table.T
                code = similarity.argmax(-1)
                chosen = table[code]
                gap = _gap(chosen, targets.detach()) + COMMITMENT * _gap(targets, chosen.detach())
                quantisation = quantisation + gap
                probability = F.softmax(similarity / SOFTNESS, dim=-1)
                uncertainty = uncertainty + _entropy(probability).mean()
                probabilities.append(probability.flatten(0, 1).mean(0))
                # Straight-through estimator: the heads receive codes, the features their gradient.
                straight = targets + (chosen - targets).detach()
            features = self.net.finish(self.net.bottleneck.out_linear(straight))
            read.append(self.output_read(features.mean(1)).float())
            part = THUMBNAIL // side
            rows = self.output_paint[scale](features).float().view(-1, side, side, 3, part, part)
            painted.append(rows.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, THUMBNAIL, THUMBNAIL))
            codes.append(code)

        spread = _entropy(torch.stack(probabilities).mean(0))

        return read, painted, codes, quantisation + SPREAD * (uncertainty / SCALES - spread)


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared distance of vectors [..., D]."""
    return (a - b).square().sum(-1).mean()


def _entropy(probabilities: Tensor) -> Tensor:
    """Entropy in nats of probabilities [..., K]."""
    return -(probabilities * probabilities.clamp(min=1e-9).log()).sum(-1)


def pool(net: TATok, encoded: Tensor, scale: int) -> Tensor:
    """Pooled features [B, n, C] of a scale before quantisation, from
    encoder features [B, side * side, C]; as :meth:`TATok.pooled`.
    """
    if scale:
        side = net.config.side
        encoded = F.avg_pool2d(encoded.transpose(1, 2).unflatten(2, (side, side)), scale + 1).flatten(2).transpose(1, 2)
    return net.encode_task_layer(encoded)


def build_ta_tok(config: TATokConfig = TA_TOK) -> TATokTrainer:
    """A randomly initialised TA-Tok with its auxiliary heads; the codebook starts as random directions."""

    def make() -> TATokTrainer:
        trainer = TATokTrainer(TATok(config))
        for name, p in trainer.named_parameters():
            if p.ndim < 2:
                (nn.init.ones_ if "norm" in name and name.endswith("weight") else nn.init.zeros_)(p)
            elif "position_embedding" in name:
                nn.init.normal_(p, std=config.width**-0.5)
            elif "embedding_proj" in name:
                nn.init.eye_(p)
            elif "regularizer.embedding" in name:
                nn.init.normal_(p)
            else:
                nn.init.xavier_uniform_(p.data.flatten(1))

        return trainer

    return seeded(47, make)


def ta_tok_book(job: Job, count: int, seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Images uint8 [count, 3, size, size] of the book ``seed``
    and their parameters int64 [count, 6] (:data:`PARAMETERS`).
    """
    images, truth = [], []
    for s, rgb in book(job, count, seed=seed):
        images.append(F.interpolate(rgb.float(), (size, size), mode="bilinear", antialias=True).round().to(torch.uint8))
        truth.append(torch.from_numpy(np.stack([getattr(s, name) for name in PARAMETERS], 1)))
    return torch.cat(images), torch.cat(truth)


def ta_tok_loss(trainer: nn.Module, images: Tensor, truth: Tensor) -> tuple[Tensor, Figures]:
    """Loss of images uint8 [B, 3, H, W] with parameters int64 [B, 6], and figures to log."""
    x = images.float() / 255
    small = F.adaptive_avg_pool2d(x, THUMBNAIL)
    read, painted, _, book = trainer(x)
    loss, figures = book, {"book": book}

    for scale, (logits, picture) in enumerate(zip(read, painted, strict=True)):
        parts = logits.split(list(PARAMETERS.values()), dim=1)
        nats = torch.stack([F.cross_entropy(part, truth[:, i]) for i, part in enumerate(parts)]).sum()
        error = F.mse_loss(picture, small)
        loss = loss + nats + PAINTING * error
        figures |= {f"nats{scale}": nats, f"error{scale}": error}

    return loss, figures


@torch.no_grad()
def semantic_codes(net: TATok, images: Tensor) -> list[Tensor]:
    """Codes int64 [B, n] of images [B, 3, H, W] in 0..1 at every scale, the finest first, from one encoder pass."""
    encoded = net.encode(images)
    return [net.bottleneck.codes(pool(net, encoded, scale)) for scale in range(SCALES)]


@torch.no_grad()
def log_figures(job: Job, trainer: TATokTrainer, images: Tensor, truth: Tensor) -> None:
    """Log for every scale, on images uint8 [N, 3, H, W] with parameters
    int64 [N, 6], the accuracy by parameter and the used codes.
    """
    parts = [trainer(x.to(job.device).float() / 255) for x in images.split(250)]
    for scale, side in enumerate(trainer.sides):
        logits = torch.cat([read[scale].cpu() for read, *_ in parts]).split(list(PARAMETERS.values()), dim=1)
        right = (torch.stack([part.argmax(1) for part in logits], 1) == truth).float().mean(0).tolist()
        shares = "  ".join(f"{name} {share:.3f}" for name, share in zip(PARAMETERS, right, strict=True))
        counts = torch.cat([codes[scale].flatten().cpu() for _, _, codes, _ in parts]).bincount().float()
        used = f"{int((counts > 0).sum())} codes used, perplexity {perplexity(counts):.0f}"
        job.log(f"ta-tok: {side**2} codes: accuracy: {shares}; {used}")


def save_ta_tok(trainer: TATokTrainer, out: Path) -> None:
    """Write the network without its auxiliary heads."""
    c = trainer.net.config
    about = {"encoder_heads": c.encoder_heads, "decoder_heads": c.heads, "input_size": c.input_size}
    save_checkpoint(trainer.net, out, family="ta-tok", **about, name="picture book TA-Tok")


def train_ta_tok(job: Job, out: Path, config: TATokConfig = TA_TOK) -> TATok:
    """Train a TA-Tok with an image encoder, write ``out``, and log figures on images of another book."""
    count = job.count(COUNT)
    images, truth = ta_tok_book(job, count, TRAIN_SEED, config.input_size)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        rows = torch.randint(count, (SCHEDULE.batch,), generator=generator(53, step))
        return ta_tok_loss(module, images[rows].to(job.device), truth[rows].to(job.device))

    trainer = train(job, "ta-tok", build_ta_tok(config), loss, SCHEDULE)
    save_ta_tok(trainer, out)
    held = ta_tok_book(job, min(HELD, count), HELD_SEED, config.input_size)
    log_figures(job, trainer, *held)

    return trainer.net
