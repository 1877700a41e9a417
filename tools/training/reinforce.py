"""Last training stage of the large LlamaGen: policy gradients on its own samples.

Teacher forcing trains every token on a real prefix. In sampling, a model of this size continues its own prefix and contradicts
itself where an object begins (docs/benchmarks.md). In this stage it samples images, a *critic* predicts the scene that each
image shows, and the reward is the agreement of the image with that scene. The estimator is REINFORCE (Williams 1992) with the
mean reward of the other samples of the class as the baseline (Kool et al. 2019).

The gradient uses samples of the full distribution. Guidance and top-p make rare scenes rarer, so the frequency of scenes is
measured on further samples with the defaults of the checkpoint.

The critic has the architecture of the judge, with weights, seed and training images of its own. The judge that computes the
quality figures takes part in no training.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.networks.autoencoder import VQAutoencoder
from ...model_loaders.networks.llama import Llama, Positions, TokenModel
from ...samplers.conditioning import from_ids
from ...samplers.driver import finish
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.llamagen import llamagen
from ...samplers.tokens.settings import LlamaGenSettings
from . import picture_book
from .judge import Judge, attributes, placed, read, reading_loss, redraw_map
from .picture_book import Scenes
from .quality import shrunk
from .recipes import TRAIN_SEED, pictures, to_rgb, to_signed
from .token_recipes import Layout, TokenRecipe, code_book, defaults, save_gpt, sequence_logits
from .training import Figures, Job, Schedule, generator, seeded, train

CRITIC_SCHEDULE = Schedule(steps=5000, batch=64, lr=2e-3, ema=0.995, weight_decay=0.01, decay=0.5)
CRITIC_PICTURES = 5000
# Largest share of an image's tokens that is resampled from the model.
RESAMPLED = 0.4
SCHEDULE = Schedule(steps=1400, batch=160, lr=3e-4, warmup=20, decay=0.45, ema=0.98, weight_decay=0.0)
# Unit of the redraw error, about the judge's tolerance, and the largest error in this unit.
UNIT, MOST = 0.082, 3.0
# Reward weights relative to the error: a wrong class, a whole object, an attribute that is rarer in samples than in the book.
WRONG, WHOLE, VARIETY = 1.5, 1.2, 0.6
# Images per step that are sampled with the checkpoint's defaults, to count their attributes.
COUNTED = 40
# Real images per step, the weight of their cross-entropy, and the share without a label. They preserve the teacher-forced
# model and its unconditional prediction.
REAL_BATCH, REAL, NULL = 40, 0.3, 0.3
ADVANTAGE = 4.0
# Decay of the running attribute counts per step.
MEMORY = 0.95
ATTRIBUTES = {name: picture_book.VALUES[name] for name in ("colour", "time", "parts", "place", "size")}
# Effective number of images in the running counts: _SEEN.
_CLASSES, _SEEN = len(picture_book.LABELS), 300


# ------------------------------------------------------------------------------------------------ critic


@torch.no_grad()
def resampled(
    net: Llama, layout: Layout, places: Positions, labels: Tensor, codes: Tensor, most: float, g: torch.Generator
) -> Tensor:
    """Codes int64 [B, N], a share of them resampled from the model given the others, in two rounds; the share is uniform below ``most``."""
    share = most * torch.rand(len(codes), 1, generator=g).to(codes.device)
    for _ in range(2):
        logits = sequence_logits(net, layout, places, labels, codes)
        noise = torch.empty(logits.shape).exponential_(generator=g).log().to(codes.device)
        swap = torch.rand(codes.shape, generator=g).to(codes.device) < share / 2
        codes = torch.where(swap, (logits - noise).argmax(-1), codes)
    return codes


def with_exchanged_block(codes: Tensor, labels: Tensor, g: torch.Generator) -> Tensor:
    """Codes [N, G, G] in which a block of each image is replaced by that of another image of the class, if there is one."""
    n, side = len(codes), codes.shape[-1]
    out, other = codes.clone(), torch.arange(n)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=g)]
        other[rows] = rows.roll(1)
    for i in range(n):
        h, w = (int(v) for v in torch.randint(side // 5, side * 5 // 8 + 1, (2,), generator=g))
        # Below the first two rows, which are sky.
        top = int(torch.randint(min(2, side - h), side - h + 1, (1,), generator=g))
        left = int(torch.randint(0, side - w + 1, (1,), generator=g))
        out[i, top : top + h, left : left + w] = codes[other[i], top : top + h, left : left + w]
    return out


@torch.no_grad()
def decoded(vq: VQAutoencoder, codes: Tensor, chunk: int = 20) -> Tensor:
    """Images of codes int64 [N, G, G] at the judge's input size, uint8 [N, 3, 64, 64] on the CPU."""
    device = next(vq.parameters()).device
    rgb = np.concatenate([to_rgb(vq.decode_codes(part.to(device))) for part in codes.split(chunk)])
    return torch.from_numpy(shrunk(rgb)).permute(0, 3, 1, 2)


def train_critic(job: Job, net: Llama, grid: int, vq: VQAutoencoder) -> Judge:
    """Train a critic: it predicts the scenes of clean images, of reconstructions, and of images with codes resampled
    from ``net``. Images with a block of another image train the output ``whole``."""
    count, batch = job.count(CRITIC_PICTURES), CRITIC_SCHEDULE.batch
    codes, labels = code_book(job, vq, count, grid)
    layout, places, g = Layout.of(grid).to(job.device), net.positions(grid, 1), generator(71, 0)

    def resample(rows: slice) -> Tensor:
        what, kept = labels[rows].to(job.device), codes[rows].long().to(job.device)
        return resampled(net, layout, places, what, kept, RESAMPLED, g).cpu()

    whole = codes.long().unflatten(1, (grid, grid))
    parts = [slice(at, at + 100) for at in range(0, count, 100)]
    kinds = [whole, *(torch.cat([resample(rows) for rows in parts]).view_as(whole) for _ in range(2))]
    job.log("critic: codes resampled")
    scenes, (clean, _) = picture_book.scenes(TRAIN_SEED, count), pictures(job, count)
    good = torch.stack([clean, *(decoded(vq, kind) for kind in kinds)])
    broken = decoded(vq, with_exchanged_block(whole, labels, g))
    job.log("critic: images decoded")
    truth, where = attributes(scenes), placed(scenes)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(72, step)
        row = torch.randint(count, (batch,), generator=g)
        kind = torch.randint(len(good), (batch,), generator=g)
        corrupted = torch.arange(batch) % 4 == 3
        x = torch.where(corrupted[:, None, None, None], broken[row], good[kind, row])
        _, out = module(to_signed(x).to(job.device))
        known, readable = {k: t[row].to(job.device) for k, t in truth.items()}, ~corrupted.to(job.device)
        return reading_loss(out, known, where[row].to(job.device), readable, readable)

    return train(job, "critic", seeded(505, Judge), loss, CRITIC_SCHEDULE)


# ------------------------------------------------------------------------------------------------ rewards


@dataclass(frozen=True)
class Marks:
    """A critic's predictions for B images: redraw error by grid row fp32 [B, G] in :data:`UNIT`, at most
    :data:`MOST` an image; rows whose tokens can affect the object, which extends to them or to the one above;
    whether the class is right and the object whole; scenes."""

    errors: Tensor
    live: Tensor
    right: Tensor
    whole: Tensor
    scenes: Scenes


def marks(critic: Judge, rgb: np.ndarray, labels: Tensor, grid: int) -> Marks:
    """The critic's predictions for images uint8 [B, 64, 64, 3] of ``grid`` token rows, requested as ``labels`` int64 [B]."""
    verdict = read(critic, rgb)
    error, cover = (torch.from_numpy(m).unflatten(1, (grid, -1)).sum((2, 3)) for m in redraw_map(rgb, verdict.scenes))
    errors = error / cover.sum(1, keepdim=True).clamp(min=1) / UNIT
    errors = errors * (MOST / errors.sum(1, keepdim=True).clamp(min=MOST))
    right = torch.from_numpy(verdict.scenes.label) == labels
    live = _from_above((cover > 1).flip(1).cummax(1).values.flip(1))
    return Marks(errors, live, right, torch.from_numpy(verdict.whole), verdict.scenes)


def _from_above(rows: Tensor) -> Tensor:
    """Rows [B, G] shifted down by one; the first stays. The decoder's receptive field reaches the row above a token."""
    return torch.cat([rows[:, :1], rows[:, :-1]], 1)


def from_row_on(errors: Tensor) -> Tensor:
    """Sum of errors [B, G] from each row on, the row above included, [B, G]."""
    return _from_above(errors.flip(1).cumsum(1).flip(1))


def values(s: Scenes) -> Tensor:
    """Concatenated one-hot attributes of N scenes, fp32 [N, values of all attributes]."""
    return torch.cat([F.one_hot(torch.from_numpy(getattr(s, name)), n) for name, n in ATTRIBUTES.items()], 1).float()


def counted(labels: Tensor, s: Scenes) -> Tensor:
    """Counts of every attribute value by class, fp32 [classes, values]."""
    return F.one_hot(labels, _CLASSES).float().T @ values(s)


def log_shares(counts: Tensor) -> Tensor:
    """Logarithm of the smoothed share of every value within its attribute, [classes, values]."""
    parts = counts.split(list(ATTRIBUTES.values()), 1)
    return torch.cat([(part / part.sum(1, keepdim=True).clamp(min=1e-6) + 0.003).log() for part in parts], 1)


def minus_class_mean(returns: Tensor, labels: Tensor) -> Tensor:
    """Returns [B, G] minus the mean of the other images of the class in the batch; 0 for the only image of a class."""
    by = F.one_hot(labels, _CLASSES).float()
    others = (by.sum(0) - 1)[labels, None]
    rest = (by.T @ returns)[labels] - returns
    return torch.where(others > 0, returns - rest / others.clamp(min=1), 0.0)


class Learner(nn.Module):
    """A GPT and exponentially decaying counts of every attribute value of its samples, fp32 [classes, values]."""

    def __init__(self, net: Llama):
        super().__init__()
        self.net = net
        s = picture_book.scenes(TRAIN_SEED, 20_000)
        book = counted(torch.from_numpy(s.label), s)
        self.register_buffer("book", log_shares(book), persistent=False)
        self.register_buffer("seen", book * (_SEEN / len(s)))

    def count(self, labels: Tensor, s: Scenes) -> float:
        """Add scenes sampled for ``labels`` int64 [B]; the KL divergence of the samples' attributes from the book's, in nats."""
        self.seen.mul_(MEMORY).add_(counted(labels, s).to(self.seen.device) * ((1 - MEMORY) * _SEEN / len(labels)))
        return float((self.book.exp() * (self.book - log_shares(self.seen))).sum(1).mean())

    @torch.no_grad()
    def advantages(self, m: Marks, labels: Tensor) -> Tensor:
        """Advantage of every token row fp32 [B, G], of about unit variance; 0 in rows that cannot affect the object."""
        rare = (self.book - log_shares(self.seen)).cpu()
        variety = (values(m.scenes) * rare.clamp(-1.5, 1.5)[labels]).sum(1)
        once = WHOLE * m.whole - WRONG * (~m.right).float() + VARIETY * variety
        live = m.live.float()
        advantage = minus_class_mean(once[:, None] - from_row_on(m.errors), labels) * live
        spread = (advantage.square().sum() / live.sum().clamp(min=1)).sqrt().clamp(min=1e-6)
        return (advantage / spread).clamp(-ADVANTAGE, ADVANTAGE)


# ------------------------------------------------------------------------------------------------ training


def reinforce(job: Job, out: Path, recipe: TokenRecipe, start: Llama, vq: VQAutoencoder, critic: Judge) -> Llama:
    """Train a copy of ``start``, a LlamaGen after teacher forcing, on its own samples and on real images, and write ``out``."""
    grid, config, device, count = recipe.grid, recipe.config, job.device, job.count(recipe.count)
    codes, kinds = code_book(job, vq, count, grid)
    net = Llama(config).to(device)
    net.load_state_dict(start.state_dict())
    layout, places = Layout.of(grid).to(device), net.positions(grid, 1)
    plain = LlamaGenSettings(cfg=1.0, temperature=1.0, top_k=0, top_p=1.0)  # the full distribution
    usual = LlamaGenSettings(**{name: value for name, value in defaults(grid).items() if name != "window"})
    labels, few = torch.arange(SCHEDULE.batch) % _CLASSES, torch.arange(COUNTED) % _CLASSES

    def own(net: Llama, what: Tensor, settings: LlamaGenSettings, seed: int, step: int) -> tuple[Tensor, Marks]:
        """Codes [B, G, G] of new samples of the classes ``what``, and the critic's predictions."""
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            draws = PairedDraws(seed, range(step * len(what), (step + 1) * len(what)))
            model = TokenModel(net, recipe.title, grid)
            codes = finish(llamagen(model, from_ids(what.tolist()), settings, draws)).codes
            return codes, marks(critic, decoded(vq, codes).permute(0, 2, 3, 1).numpy(), what, grid)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        _, asked = own(module.net, few, usual, 917, step)
        apart = module.count(few, asked.scenes)
        own_codes, m = own(module.net, labels, plain, 911, step)
        advantage = module.advantages(m, labels)
        tokens, weight = own_codes.flatten(1), advantage.repeat_interleave(grid, 1).to(device)
        g = generator(913, step)
        rows = torch.randint(count, (REAL_BATCH,), generator=g)
        null = torch.rand(REAL_BATCH, generator=g) < NULL
        real, what = codes[rows].long().to(device), kinds[rows].masked_fill(null, config.condition_size).to(device)

        def nats(what: Tensor, tokens: Tensor) -> Tensor:
            logits = sequence_logits(module.net, layout, places, what, tokens)
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)

        known = nats(what, real).mean()
        value = (weight * nats(labels.to(device), tokens)).mean() + REAL * known
        good, better = (marked.right & (marked.errors.sum(1) <= 1) for marked in (m, asked))
        shares = {"right": m.right.float(), "scenes": good.float(), "whole": m.whole, "as asked": better.float()}
        return value, {name: share.mean() for name, share in shares.items()} | {"apart": apart, "nats": known}

    learner = Learner(net)
    train(job, f"{recipe.name}-reinforce", learner, loss, SCHEDULE)
    save_gpt(recipe, learner.net, out)
    return learner.net
