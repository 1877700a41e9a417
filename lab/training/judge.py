"""The judge: a small network that predicts the scene parameters of an image and whether its object is whole.

It predicts class, colour, time of day, variant, place and size. A quarter of its training images has the background of
another scene, so that it reads the object. Another quarter is corrupted as token models fail: blocks of latents
exchanged with another scene of the class, noise on some latents, or no object.

``quality.py`` computes the quality figures. A second judge, of patches and attention, is trained on other scenes: what
both say does not depend on one network.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from ...networks.autoencoder import KLAutoencoder
from . import picture_book
from .picture_book import Scenes
from .recipes import RESOLUTION, TRAIN_SEED, latents, save_checkpoint, to_rgb, to_signed
from .training import Figures, Job, Schedule, generator, seeded, train

WIDTHS = (24, 48, 64, 96)
FEATURES = 64
SCHEDULE, COUNT = Schedule(steps=1600, batch=64, lr=2e-3, ema=0.995, weight_decay=0.01, decay=0.5), 8000
# Of the second judge: its schedule, the seed of its scenes and weights, the side of a patch in pixels, its width, heads
# and blocks.
PATCH_SCHEDULE, PATCH_SEED = Schedule(steps=3600, batch=64, lr=1e-3, ema=0.997, weight_decay=0.01, decay=0.6), 1000
PATCH, PATCH_WIDTH, PATCH_HEADS, PATCH_BLOCKS = 8, 96, 4, 4
# Outputs: class, colour, time, variant, (x, y, scale), whole.
_SIZES = {"label": 10, "colour": len(picture_book.COLOURS), "time": 3, "parts": 3, "where": 3, "whole": 1}
# Normalisation of x, y (in units of half an image) and scale to about unit variance.
_CENTRE, _SPREAD = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.3, 0.03, 0.17])


class Judge(nn.Module):
    """Images [B, 3, 64, 64] in -1..1 to features [B, 64] and outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        c = 3

        for width in WIDTHS:
            layers += [nn.Conv2d(c, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
            c = width

        self.body = nn.Sequential(*layers)
        self.features = nn.Linear(c * 16, FEATURES)
        self.out = nn.Linear(FEATURES, sum(_SIZES.values()))

    def forward(self, x: Tensor) -> tuple[Tensor, Figures]:
        f = self.features(self.body(x).flatten(1))
        parts = self.out(F.silu(f)).split(list(_SIZES.values()), dim=1)
        return f, dict(zip(_SIZES, parts, strict=True))


class PatchJudge(nn.Module):
    """As :class:`Judge`, by attention among patches: another architecture, which fails in other ways."""

    def __init__(self) -> None:
        super().__init__()
        count = (RESOLUTION // PATCH) ** 2
        self.patches = nn.Conv2d(3, PATCH_WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(count, PATCH_WIDTH))

        block = nn.TransformerEncoderLayer(
            PATCH_WIDTH, PATCH_HEADS, 2 * PATCH_WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, PATCH_BLOCKS, enable_nested_tensor=False)
        self.features = nn.Linear(PATCH_WIDTH, FEATURES)
        self.out = nn.Linear(FEATURES, sum(_SIZES.values()))

    def forward(self, x: Tensor) -> tuple[Tensor, Figures]:
        rows = self.patches(x).flatten(2).transpose(1, 2) + self.places
        f = self.features(self.blocks(rows).mean(1))
        parts = self.out(F.silu(f)).split(list(_SIZES.values()), dim=1)
        return f, dict(zip(_SIZES, parts, strict=True))


AnyJudge = Judge | PatchJudge
# By the file's name.
JUDGES: dict[str, type[AnyJudge]] = {"judge": Judge, "judge-patches": PatchJudge}


@dataclass(frozen=True)
class Verdict:
    """Predictions for N images: features [N, 64], scenes (``drift`` is not predicted and 0.5), and the probability
    of a whole object [N]."""

    features: np.ndarray
    scenes: Scenes
    whole: np.ndarray


@torch.no_grad()
def read(judge: AnyJudge, rgb: np.ndarray) -> Verdict:
    """Predictions for images uint8 [N, 64, 64, 3]."""
    device = next(judge.parameters()).device
    features, outs = [], []

    for at in range(0, len(rgb), 250):
        x = to_signed(torch.from_numpy(rgb[at : at + 250]).permute(0, 3, 1, 2)).to(device)
        f, out = judge(x)
        features.append(f.cpu())
        outs.append({k: v.cpu() for k, v in out.items()})

    out = {}
    for name in _SIZES:
        out[name] = torch.cat([o[name] for o in outs])
    best = {k: out[k].argmax(1).numpy() for k in ("label", "colour", "time", "parts")}
    x, y, scale = (out["where"] * _SPREAD + _CENTRE).numpy().T
    place = np.clip(np.round(x / picture_book.PLACE_STEP) + 1, 0, 2).astype(np.int64)
    size = (scale > sum(picture_book.SCALES) / 2).astype(np.int64)
    drift = np.full(len(x), 0.5, np.float32)
    scenes = Scenes(**best, place=place, size=size, x=x, y=y, scale=scale, drift=drift)

    return Verdict(torch.cat(features).numpy(), scenes, out["whole"].sigmoid().numpy()[:, 0])


def _soften(x: np.ndarray) -> np.ndarray:
    """3 x 3 box filter of [N, H, W, C]; tolerates a misplacement of half a pixel."""
    p = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    h, w = x.shape[1:3]
    return sum(p[:, i : i + h, j : j + w] for i in range(3) for j in range(3)) / 9


def redraw_map(rgb: np.ndarray, scenes: Scenes) -> tuple[np.ndarray, np.ndarray]:
    """Mean absolute colour difference of images uint8 [N, H, H, 3] from renderings of scenes, times the coverage of
    the object, and the coverage; float32 [N, H, H] in 0..1."""
    drawn, mask = picture_book.render(scenes, rgb.shape[1])
    difference = np.abs(_soften(rgb.astype(np.float32) / 255) - _soften(drawn.astype(np.float32) / 255)).mean(-1)
    weight = mask.astype(np.float32) / 255
    return difference * weight, weight


def redraw_error(rgb: np.ndarray, scenes: Scenes) -> np.ndarray:
    """Mean redraw error over the object's pixels, 0 to 1, float [N]; arguments as in :func:`redraw_map`."""
    error, weight = redraw_map(rgb, scenes)
    return error.sum((1, 2)) / np.maximum(weight.sum((1, 2)), 1)


def _corrupted(z: Tensor, label: Tensor, g: torch.Generator) -> Tensor:
    """Latents [N, c, 8, 8] with a corrupted block each: one of another image of the class, or noise."""
    z = z.clone()
    n, _, side, _ = z.shape
    jitter = torch.rand(n, generator=g)
    rank = (label.float() + jitter).argsort()
    other = torch.empty(n, dtype=torch.int64)
    other[rank] = rank.roll(1)  # the next image of the class, except at class boundaries
    kind = torch.rand(n, generator=g)

    for i in range(n):
        h, w = (int(v) for v in torch.randint(2, 6, (2,), generator=g))
        top = int(torch.randint(1, side - h + 1, (1,), generator=g))
        left = int(torch.randint(0, side - w + 1, (1,), generator=g))
        block = (slice(None), slice(top, min(side, top + h)), slice(left, left + w))
        if kind[i] < 0.65:
            z[i][block] = z[other[i]][block]
        else:
            z[i][block] += torch.randn(z[i][block].shape, generator=g) * (0.6 + float(kind[i]))

    return z


def _decoded(kl: KLAutoencoder, z: Tensor, device: torch.device) -> Tensor:
    """Images uint8 [N, 3, 64, 64] of latents."""
    parts = [torch.from_numpy(to_rgb(kl.decode(part.to(device)))) for part in z.split(100)]
    return torch.cat(parts).permute(0, 3, 1, 2).contiguous()


@torch.no_grad()
def _training_images(job: Job, kl: KLAutoencoder, count: int, seed: int) -> tuple[Scenes, list[Tensor]]:
    """Scenes, and their images clean, reconstructed, with another
    background, and corrupted; uint8 [count, 3, 64, 64] each.
    """
    s = picture_book.scenes(TRAIN_SEED + seed + 100, count)
    rgb, mask = picture_book.render(s, RESOLUTION)
    backgrounds, _ = picture_book.render(picture_book.scenes(TRAIN_SEED + seed + 200, count), RESOLUTION, objects=False)
    cover = mask[..., None].astype(np.float32) / 255
    mixed = (rgb * cover + backgrounds * (1 - cover)).astype(np.uint8)
    few = s[: count // 8]
    bare, _ = picture_book.render(few, RESOLUTION, objects=False)  # without an object the target of `whole` is 0
    clean, mixed_, bare_ = (torch.from_numpy(x).permute(0, 3, 1, 2).contiguous() for x in (rgb, mixed, bare))
    job.log("judge: images rendered")
    g = generator(17 + seed, 0)

    with torch.autocast(job.device.type, torch.bfloat16, enabled=job.device.type != "mps"):
        z = latents(kl, clean, job.device)[0].float()
        rebuilt = _decoded(kl, z + 0.1 * torch.randn(z.shape, generator=g), job.device)
        corrupted = _corrupted(z, torch.from_numpy(s.label), g)
        corrupted[: len(few)] = latents(kl, bare_, job.device)[0].float()
        broken = _decoded(kl, corrupted, job.device)

    job.log("judge: reconstructed and corrupted images decoded")

    return s, [clean, rebuilt, mixed_, broken]


def reading_loss(
    out: dict[str, Tensor], truth: dict[str, Tensor], where: Tensor, readable: Tensor, timed: Tensor
) -> tuple[Tensor, Figures]:
    """Loss of a judge on B images, and its accuracy by parameter. Images that are not ``readable`` only train the
    output ``whole``; the background of those that are ``timed`` shows the time of day."""
    o = {k: v.float() for k, v in out.items()}
    total = F.binary_cross_entropy_with_logits(o["whole"][:, 0], readable.float())
    accuracy = {}

    for k, t in truth.items():
        keep = timed if k == "time" else readable
        total = total + F.cross_entropy(o[k][keep], t[keep])
        accuracy[k] = float((o[k].argmax(1) == t)[keep].float().mean())

    accuracy["whole"] = float(((o["whole"][:, 0] > 0) == readable).float().mean())

    return total + 2 * F.smooth_l1_loss(o["where"][readable], where[readable], beta=0.1), accuracy


def attributes(s: Scenes) -> dict[str, Tensor]:
    """Class, colour, time and variant of N scenes, int64 [N], by name."""
    return {k: torch.from_numpy(getattr(s, k)) for k in ("label", "colour", "time", "parts")}


def placed(s: Scenes) -> Tensor:
    """Normalised place and size of N scenes, fp32 [N, 3] of about unit variance."""
    return (torch.from_numpy(np.stack([s.x, s.y, s.scale], 1)) - _CENTRE) / _SPREAD


def train_judge(job: Job, out: Path, kl: KLAutoencoder, name: str = "judge") -> AnyJudge:
    """Train a judge, set its redraw tolerance on held-out images (``quality.py``) and write ``out``.

    ``name`` is one of :data:`JUDGES`.
    """
    schedule, seed = (SCHEDULE, 0) if name == "judge" else (PATCH_SCHEDULE, PATCH_SEED)
    count, b = job.count(COUNT), schedule.batch
    scenes, images = _training_images(job, kl, count, seed)
    truth, where = attributes(scenes), placed(scenes)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        row = torch.randint(count, (b,), generator=generator(19 + seed, step))
        kind = torch.arange(b) // 2 % 4  # of `images`
        x = torch.stack([images[k][i] for k, i in zip(kind, row, strict=True)])
        _, o = module(to_signed(x).to(job.device))
        readable, own = (kind < 3).to(job.device), (kind < 2).to(job.device)
        labels = {k: t[row].to(job.device) for k, t in truth.items()}
        return reading_loss(o, labels, where[row].to(job.device), readable, own)

    judge = train(job, name, seeded(5 + seed, JUDGES[name]), loss, schedule)
    rgb, _ = picture_book.render(picture_book.scenes(TRAIN_SEED + seed + 300, 2000), RESOLUTION)

    with torch.no_grad():
        z, _ = latents(kl, torch.from_numpy(rgb).permute(0, 3, 1, 2), job.device)
        rebuilt = _decoded(kl, z, job.device).permute(0, 2, 3, 1).numpy()

    errors = redraw_error(rebuilt, read(judge, rebuilt).scenes)
    tolerance = float(np.quantile(errors, 0.99))
    job.log(f"{name}: redraw error of reconstructions: median {np.median(errors):.4f}, 99 % {tolerance:.4f}")
    save_checkpoint(judge, out, family="judge", tolerance=tolerance, name="picture book judge")

    return judge


def load_judge(path: Path) -> tuple[AnyJudge, float]:
    """The judge and its redraw tolerance (mean absolute colour error, 0..1)."""
    with safe_open(path, "pt") as f:
        state = {k: f.get_tensor(k).float() for k in f.keys()}  # noqa: SIM118 - safe_open is not a mapping
        tolerance = float(json.loads(f.metadata()["tolerance"]))
    judge = JUDGES[path.stem]()
    judge.load_state_dict(state)
    return judge.eval(), tolerance
