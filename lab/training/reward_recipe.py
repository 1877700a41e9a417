"""Reinforcement learning of the demo's LlamaGen of 16 x 16 tokens, on images that it draws itself.

A model that has only seen true images never learns to go on from its own mistakes: most of its wrong scenes are objects
whose colour or outline changes half way. So it samples with the settings of its file, a judge reads the scene of every
image, and the picture book draws that scene. Tokens of images that match it become likelier, the others less likely
(REINFORCE with a baseline, Williams 1992). Two things keep the images varied: an image is only compared with images of
scenes alike, so that no scene is preferred for being easy, and rare scenes have a larger reward.

The judge is not the one that measures: it was trained from another seed, on other scenes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...networks.autoencoder import VQAutoencoder
from ...networks.llama import Llama, TokenModel
from ...samplers.conditioning import from_ids
from ...samplers.engine import finish
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.llamagen import llamagen
from ...samplers.tokens.sampling import tempered
from ...samplers.tokens.settings import LlamaGenSettings
from . import picture_book, token_recipes
from .judge import Judge, read, redraw_map
from .picture_book import Scenes
from .quality import shrunk
from .recipes import to_rgb
from .token_recipes import GRID
from .training import Figures, Job, Schedule, generator, seeded, train


class Round(NamedTuple):
    """A part of the training, which keeps the model near what it was when the round began."""

    schedule: Schedule
    temperature: float  # of the images that are drawn
    rare: float  # weight of rare scenes in an image's reward


_FIRST_ROUND = Schedule(steps=150, batch=128, lr=2e-4, warmup=10, decay=0.0, ema=0.98, weight_decay=0.0)
# The first round makes scenes varied, the second one right. The shipped file had 146 and 130 steps, with restarts.
ROUNDS = (
    Round(_FIRST_ROUND, 0.7, 0.15),
    Round(replace(_FIRST_ROUND, steps=130, lr=1.5e-4, decay=0.8), 0.5, 0.05),
)
# Seed of the images, and what is added to the seeds of the judge that reads them.
SEED, JUDGE_SEED = 910_000_000, 5000
# A match is a little closer than the judge's tolerance.
STRICT = 0.95
# A pixel's colour may differ by so much from the scene's (mean absolute difference, 0 to 1) before it is a fault.
SLACK = 0.08
# Weights of an image's reward, and of the faults of its later tokens.
OF_IMAGE, OF_FAULTS = 0.5, 10.0
# Weight of a token that is not of the object.
BACKGROUND = 0.3
# Weight of the Kullback-Leibler divergence from the model as it was.
ANCHOR = 0.5
# What a step leaves of the weight of all images before it, in baselines and numbers of scenes.
MEMORY = 0.95
# The least share of failures that a class is drawn for: classes are drawn as often as they fail.
LEAST_FAILURES = 0.04
# Attributes of a scene, and the first column of each behind the one of the class.
ATTRIBUTES = ("colour", "place", "size", "time", "parts")
_FIRST = np.cumsum([1, *(picture_book.VALUES[name] for name in ATTRIBUTES)])
_CLASSES = len(picture_book.LABELS)


@dataclass(frozen=True)
class Reading:
    """What a judge reads in B images of N tokens, and how well they match it."""

    scenes: Scenes
    matches: Tensor  # bool [B]: the class is right, and the object looks as the picture book draws it
    reward: Tensor  # fp32 [B], without that of a rare scene
    faults: Tensor  # fp32 [B, N]: what each token adds to the object's error
    objects: Tensor  # bool [B, N]: tokens of the object, and their neighbours


class Pupil(nn.Module):
    """A GPT in training, and what images of each kind of scene got so far."""

    def __init__(self, net: Llama, tokens: int):
        super().__init__()
        self.net = net

        columns = _CLASSES * int(_FIRST[-1])
        self.register_buffer("products", torch.zeros(columns, columns))
        self.register_buffer("sums", torch.zeros(columns, 1 + tokens))
        self.register_buffer("seen", torch.ones(_CLASSES, int(_FIRST[-1])))
        self.register_buffer("failures", torch.full((_CLASSES,), 0.1))

    def labels(self, count: int, g: torch.Generator) -> Tensor:
        """Classes int64 [count], each as often as it fails."""
        often = self.failures.cpu().clamp(min=LEAST_FAILURES)
        return torch.multinomial(often, count, replacement=True, generator=g)

    @torch.no_grad()
    def count_failures(self, labels: Tensor, matches: Tensor) -> None:
        """Count the images that match, and those that do not, of the classes int64 [B]."""
        images = torch.bincount(labels, minlength=_CLASSES)
        failed = torch.bincount(labels[~matches], minlength=_CLASSES) / images.clamp(min=1)
        share = 1 - MEMORY ** images.clamp(max=20)
        self.failures.lerp_(failed.to(self.failures), share.to(self.failures))

    @torch.no_grad()
    def usual(self, kinds: Tensor, found: Tensor) -> Tensor:
        """What images of these kinds usually get, fp32 [B, K]: a ridge regression on the images so far.

        Args:
            kinds: fp32 [B, classes * columns] of :func:`kinds_of`.
            found: what these images got, fp32 [B, K].
        """
        self.products.mul_(MEMORY).add_((kinds.T @ kinds).to(self.products))
        self.sums.mul_(MEMORY).add_((kinds.T @ found).to(self.sums))

        # Differences of attributes are believed when there are enough images; the mean of a class is at once.
        ridge = torch.full((_CLASSES, int(_FIRST[-1])), 8.0)
        ridge[:, 0] = 1.0
        coefficients = torch.linalg.solve(self.products.cpu() + torch.diag(ridge.flatten()), self.sums.cpu())

        return kinds @ coefficients

    def shares(self) -> list[Tensor]:
        """Of each attribute the shares [classes, n] of its values."""
        seen = [self.seen[:, low:high].cpu() for low, high in zip(_FIRST[:-1], _FIRST[1:], strict=True)]
        return [counts / counts.sum(1, keepdim=True) for counts in seen]

    @torch.no_grad()
    def rarity(self, kinds: Tensor, labels: Tensor, matches: Tensor) -> Tensor:
        """By how many nats the attributes of each image are rarer than those of other images of its class, [B]."""
        own = kinds.view(len(kinds), _CLASSES, -1)[torch.arange(len(kinds)), labels]
        rarity = torch.zeros(len(kinds))

        for first, share in zip(_FIRST, self.shares(), strict=False):
            nats = -share.log()
            of_image = own[:, first : first + share.shape[1]]
            rarity += (of_image * nats[labels]).sum(1) - (share * nats).sum(1)[labels]

        counted = (kinds * matches[:, None]).view(len(kinds), _CLASSES, -1).sum(0)
        self.seen.mul_(MEMORY).add_((counted + 1e-3).to(self.seen))
        return rarity


def settings_of(part: Round) -> LlamaGenSettings:
    """What the images of a round are drawn with: the settings of the model's file, but for the temperature."""
    usual = {name: value for name, value in token_recipes.defaults(GRID).items() if name in token_recipes.DEFAULTS}
    return LlamaGenSettings(**{**usual, "temperature": part.temperature})


def kinds_of(scenes: Scenes, labels: Tensor) -> Tensor:
    """Ones where an image has a class, and an attribute with that class; fp32 [B, classes * columns]."""
    rows = torch.arange(len(labels))
    kinds = torch.zeros(len(labels), _CLASSES, int(_FIRST[-1]))
    kinds[rows, labels, 0] = 1

    for name, first in zip(ATTRIBUTES, _FIRST, strict=False):
        kinds[rows, labels, int(first) + torch.from_numpy(getattr(scenes, name))] = 1

    return kinds.flatten(1)


def read_images(judge: Judge, tolerance: float, rgb: np.ndarray, labels: Tensor) -> Reading:
    """Read images uint8 [B, 64, 64, 3] that should show these classes int64 [B]."""
    with torch.autocast(next(judge.parameters()).device.type, enabled=False):
        verdict = read(judge, rgb)
    error, weight = redraw_map(rgb, verdict.scenes)
    area = np.maximum(weight.sum((1, 2)), 1)
    whole = error.sum((1, 2)) / area

    right = verdict.scenes.label == labels.numpy()
    matches = right & (whole <= STRICT * tolerance)
    reward = matches + 0.5 * verdict.whole - 2 * np.minimum(whole, 0.3) - 0.5 * ~right

    pixels = rgb.shape[1] // GRID
    faults = np.maximum(error - SLACK * weight, 0) / area[:, None, None]
    faults = faults.reshape(len(rgb), GRID, pixels, GRID, pixels).sum((2, 4))
    cover = F.max_pool2d(torch.from_numpy(weight)[:, None], pixels)

    return Reading(
        scenes=verdict.scenes,
        matches=torch.from_numpy(matches),
        reward=torch.from_numpy(reward).float(),
        faults=torch.from_numpy(faults).float().flatten(1),
        objects=(F.max_pool2d(cover, 3, 1, 1) > 0.02).flatten(1),
    )


def advantages(pupil: Pupil, reading: Reading, labels: Tensor, rare: float) -> Tensor:
    """How much better than usual each token was, fp32 [B, N] of mean square 1.

    A token answers for its image, and for the faults from its own place on, not for those before it. ``rare``: see
    :class:`Round`.
    """
    to_come = reading.faults.flip(1).cumsum(1).flip(1)
    found = torch.cat([reading.reward[:, None], -to_come], 1)
    kinds = kinds_of(reading.scenes, labels)
    better = found - pupil.usual(kinds, found)

    rarity = pupil.rarity(kinds, labels, reading.matches).clamp(-2, 2) * reading.matches
    of_image = OF_IMAGE * (better[:, :1] + rare * rarity[:, None])
    advantage = of_image + OF_FAULTS * better[:, 1:].clamp(-0.3, 0.3)

    advantage = advantage * torch.where(reading.objects, 1.0, BACKGROUND)
    return (advantage / advantage.square().mean().sqrt().clamp(min=1e-6)).clamp(-4, 4)


def telling(matches: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """The images to learn from: those that do not match, bool [B], and as many of the others, which count for all.

    Returns their rows int64 [n] and weights fp32 [n].
    """
    bad, good = (~matches).nonzero()[:, 0], matches.nonzero()[:, 0]
    kept = good[torch.randperm(len(good), generator=g)[: max(len(bad), len(good) // 5)]]
    weight = torch.cat([torch.ones(len(bad)), torch.full((len(kept),), len(good) / max(1, len(kept)))])
    return torch.cat([bad, kept]), weight


def log_probabilities(cond: Tensor, null: Tensor, tokens: Tensor, settings: LlamaGenSettings) -> Tensor:
    """Log-probabilities fp32 [B, N] with which tokens int64 [B, N] are drawn, from both branches' logits [B, N, V].

    It is 0 for a token that only rounding let in.
    """
    guided = torch.lerp(null.float(), cond.float(), settings.cfg)
    found = tempered(guided, settings).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return torch.where(found.isinf(), 0.0, found)


def divergence(logits: Tensor, before: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence in nats of a token, from the distribution of the logits ``before``."""
    new, old = logits.float().log_softmax(-1), before.float().log_softmax(-1)
    return (new.exp() * (new - old)).sum(-1).mean()


@torch.no_grad()
def sampled(net: Llama, labels: Tensor, settings: LlamaGenSettings, seed: int) -> Tensor:
    """Tokens int64 [B, N] that a network draws for classes int64 [B]."""
    device = next(net.parameters()).device
    model, images = TokenModel(net, "pupil", GRID), PairedDraws(seed, range(len(labels)))

    # Without a backward pass fused attention is the faster one.
    fused = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with fused, torch.autocast(device.type, enabled=False):
        codes = finish(llamagen(model, from_ids(labels.tolist()), settings, images)).latents

    return codes.flatten(1).clone()  # the sampler's own tensors do not take part in a backward pass


@torch.no_grad()
def small_images(vq: VQAutoencoder, tokens: Tensor) -> np.ndarray:
    """Images uint8 [B, 64, 64, 3] of tokens int64 [B, N]."""
    parts = tokens.view(-1, GRID, GRID).split(50)
    return shrunk(np.concatenate([to_rgb(vq.decode_codes(part).clamp(-1, 1)) for part in parts]))


class _Lesson:
    """The loss of a round's step, see :func:`train_reward`."""

    def __init__(self, job: Job, part: Round, vq: VQAutoencoder, judge: Judge, tolerance: float, net: Llama):
        self.part = part
        self.settings = settings_of(part)
        self.layout = token_recipes.Layout.of(GRID).to(job.device)
        self.places = net.positions(GRID, 1)
        self.vq, self.judge, self.tolerance, self.before = vq, judge, tolerance, net

        # Images are drawn in the precision of the training.
        self.drawing = Llama(net.config).to(job.device, torch.float32 if job.fp32 else torch.bfloat16).eval()

    def __call__(self, module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(SEED, step)

        # 1. Images by the model as it is now.
        labels = module.labels(self.part.schedule.batch, g)
        self.drawing.load_state_dict(module.net.state_dict())
        tokens = sampled(self.drawing, labels, self.settings, SEED + step)

        # 2. What they are worth.
        reading = read_images(self.judge, self.tolerance, small_images(self.vq, tokens), labels)
        advantage = advantages(module, reading, labels, self.part.rare)
        module.count_failures(labels, reading.matches)

        # 3. The better tokens become likelier, and the model stays near what it was.
        rows, weight = telling(reading.matches, g)
        labels, tokens = labels[rows], tokens[rows]
        gained = (weight[:, None] * advantage[rows]).to(tokens.device)
        with torch.no_grad():
            before = self._branches(self.before, labels, tokens)
        now = self._branches(module.net, labels, tokens)
        gain = (gained * log_probabilities(*now, tokens, self.settings)).sum() / advantage.numel()
        change = 0.5 * (divergence(now[0], before[0]) + divergence(now[1], before[1]))

        variety = sum(torch.special.entr(share).sum(1).mean() for share in module.shares())
        return ANCHOR * change - gain, {"scene": reading.matches.float().mean(), "change": change, "variety": variety}

    def _branches(self, net: Llama, labels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V] with the labels, and without."""
        rows = torch.cat([labels, torch.full_like(labels, net.config.condition_size)]).to(tokens.device)
        logits = token_recipes.sequence_logits(net, self.layout, self.places, rows, tokens.repeat(2, 1))
        cond, null = logits.chunk(2)
        return cond, null


def train_reward(job: Job, out: Path, vq: VQAutoencoder, judge: Judge, tolerance: float, net: Llama) -> Llama:
    """Train a LlamaGen further on images of its own and write ``out``.

    Args:
        vq: the tokenizer, without the part that enlarges.
        judge: reads the images; ``tolerance`` is its own.
        net: the LlamaGen.
    """
    vq, judge = vq.to(job.device), judge.to(job.device)

    for number, part in enumerate(ROUNDS, 1):
        before = net.to(job.device).eval().requires_grad_(False)
        lesson = _Lesson(job, part, vq, judge, tolerance, before)
        pupil = Pupil(seeded(31, lambda: Llama(net.config), before), GRID**2)  # noqa: B023 - called at once
        net = train(job, f"{token_recipes.GPT_HIGH.name}-reward-{number}", pupil, lesson, part.schedule).net

    token_recipes.save_gpt(token_recipes.GPT_HIGH, net, out)
    return net
