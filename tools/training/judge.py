"""The judge: a small network that predicts the scene parameters of an image and whether its object is whole.

It predicts class, colour, time of day, variant, place and size. A quarter of its training images has the background of
another scene, so that it reads the object. Another quarter is corrupted as token models fail: blocks of latents exchanged
with another scene of the class, noise on some latents, or no object.

``quality.py`` computes the quality figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from ...model_loaders.networks.autoencoder import KLAutoencoder
from . import picture_book
from .picture_book import Scenes
from .recipes import RESOLUTION, TRAIN_SEED, latents, save_checkpoint, to_rgb, to_signed
from .redraw import redraw_error
from .training import Schedule, generator, train

WIDTHS = (24, 48, 64, 96)
FEATURES = 64
SCHEDULE = Schedule(steps=1600, batch=64, lr=2e-3, ema=0.995, weight_decay=0.01, decay=0.5)
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

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        f = self.features(self.body(x).flatten(1))
        parts = self.out(F.silu(f)).split(list(_SIZES.values()), dim=1)
        return f, dict(zip(_SIZES, parts, strict=True))


@dataclass(frozen=True)
class Verdict:
    """Predictions for N images.

    Attributes:
        features: float32 [N, 64].
        scenes: the predicted parameters; ``drift`` is not predicted and 0.5.
        whole: float32 [N], probability that the object is whole.
    """

    features: np.ndarray
    scenes: Scenes
    whole: np.ndarray


@torch.no_grad()
def read(judge: Judge, rgb: np.ndarray) -> Verdict:
    """Predictions for images uint8 [N, 64, 64, 3]."""
    device = next(judge.parameters()).device
    features, outs = [], []
    for at in range(0, len(rgb), 250):
        x = to_signed(torch.from_numpy(rgb[at : at + 250]).permute(0, 3, 1, 2)).to(device)
        f, out = judge(x)
        features.append(f.cpu())
        outs.append({k: v.cpu() for k, v in out.items()})
    out = {k: torch.cat([o[k] for o in outs]) for k in _SIZES}
    best = {k: out[k].argmax(1).numpy() for k in ("label", "colour", "time", "parts")}
    x, y, scale = (out["where"] * _SPREAD + _CENTRE).numpy().T
    place = np.clip(np.round(x / picture_book.PLACE_STEP) + 1, 0, 2).astype(np.int64)
    size = (scale > sum(picture_book.SCALES) / 2).astype(np.int64)
    scenes = Scenes(
        best["label"],
        best["colour"],
        place,
        size,
        best["time"],
        best["parts"],
        x,
        y,
        scale,
        np.full(len(x), 0.5, np.float32),
    )
    return Verdict(torch.cat(features).numpy(), scenes, out["whole"].sigmoid().numpy()[:, 0])


# ------------------------------------------------------------------------------------------------ training


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
        top, left = (
            int(torch.randint(1, side - h + 1, (1,), generator=g)),
            int(torch.randint(0, side - w + 1, (1,), generator=g)),
        )
        block = (slice(None), slice(top, min(side, top + h)), slice(left, left + w))
        if kind[i] < 0.65:
            z[i][block] = z[other[i]][block]
        else:
            z[i][block] += torch.randn(z[i][block].shape, generator=g) * (0.6 + float(kind[i]))
    return z


@dataclass(frozen=True)
class _Data:
    clean: Tensor
    rebuilt: Tensor
    broken: Tensor
    mixed: Tensor
    scenes: Scenes


@torch.no_grad()
def _data(kl: KLAutoencoder, count: int, device: torch.device, log: Callable[[str], None]) -> _Data:
    """Clean, reconstructed, corrupted images and images with another background, each uint8 [count, 3, 64, 64]."""
    s = picture_book.scenes(TRAIN_SEED + 100, count)
    rgb, mask = picture_book.render(s, RESOLUTION)
    log("judge: images rendered")
    backgrounds, _ = picture_book.render(picture_book.scenes(TRAIN_SEED + 200, count), RESOLUTION, objects=False)
    cover = mask[..., None].astype(np.float32) / 255
    mixed = (rgb * cover + backgrounds * (1 - cover)).astype(np.uint8)
    clean = torch.from_numpy(rgb).permute(0, 3, 1, 2).contiguous()
    fast = torch.autocast(device.type, torch.bfloat16, enabled=device.type != "mps")
    with fast:
        z = latents(kl, clean, device)[0].float()
    log("judge: latents encoded")

    def draw(z: Tensor) -> Tensor:
        with fast:
            parts = [kl.decode(z[i : i + 100].to(device)).float().cpu() for i in range(0, count, 100)]
        return ((torch.cat(parts) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    g = generator(17, 0)
    rebuilt = draw(z + 0.1 * torch.randn(z.shape, generator=g))
    corrupted = _corrupted(z, torch.from_numpy(s.label), g)
    few = s[: count // 8]
    bare, _ = picture_book.render(few, RESOLUTION, objects=False)  # without an object the target of `whole` is 0
    with fast:
        corrupted[: len(few)] = latents(kl, torch.from_numpy(bare).permute(0, 3, 1, 2), device)[0].float()
    broken = draw(corrupted)
    log("judge: reconstructed and corrupted images decoded")
    return _Data(clean, rebuilt, broken, torch.from_numpy(mixed).permute(0, 3, 1, 2).contiguous(), s)


def reading_loss(
    out: dict[str, Tensor], truth: dict[str, Tensor], where: Tensor, readable: Tensor, timed: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a judge on B images, and its accuracy by parameter.

    Args:
        out: its outputs by name.
        truth: class, colour, time and variant, int64 [B], by name.
        where: normalised place and size of :func:`placed`, fp32 [B, 3].
        readable: bool [B], images of a whole object; the others only train the output ``whole``.
        timed: bool [B], images whose background shows the time of day.
    """
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


def train_judge(
    kl: KLAutoencoder,
    work: Path,
    out: Path,
    device: torch.device,
    schedule: Schedule = SCHEDULE,
    count: int = 8000,
    log: Callable[[str], None] = print,
) -> Judge:
    """Train the judge, set its redraw tolerance on held-out images (``quality.py``) and write ``out``."""
    d = _data(kl, count, device, log)
    truth, where = attributes(d.scenes), placed(d.scenes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        judge = Judge()

    def loss(module: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        g = generator(19, step)
        b = schedule.batch
        row = torch.randint(count, (b,), generator=g)
        kind = torch.arange(b) % 8  # 0-1 clean, 2-3 reconstructed, 4-5 another background, 6-7 corrupted
        x = torch.where((kind < 2)[:, None, None, None], d.clean[row], d.rebuilt[row])
        x = torch.where(((kind == 4) | (kind == 5))[:, None, None, None], d.mixed[row], x)
        x = torch.where((kind > 5)[:, None, None, None], d.broken[row], x)
        _, o = module(to_signed(x).to(device))
        readable, own = (kind < 6).to(device), (kind < 4).to(device)
        labels = {k: t[row].to(device) for k, t in truth.items()}
        return reading_loss(o, labels, where[row].to(device), readable, own)

    train("judge", judge, loss, schedule, work, device, log)
    held = picture_book.scenes(TRAIN_SEED + 300, 2000)
    rgb, _ = picture_book.render(held, RESOLUTION)
    z, _ = latents(kl, torch.from_numpy(rgb).permute(0, 3, 1, 2), device)
    with torch.no_grad():
        parts = [kl.decode(z[i : i + 100].to(device)).cpu() for i in range(0, len(z), 100)]
    rebuilt = to_rgb(torch.cat(parts))
    errors = redraw_error(rebuilt, read(judge, rebuilt).scenes)
    tolerance = float(np.quantile(errors, 0.99))
    log(f"judge: redraw error of reconstructions: median {np.median(errors):.4f}, 99 % {tolerance:.4f}")
    save_checkpoint(judge, out, family="judge", tolerance=tolerance, name="picture book judge")
    return judge


def load_judge(path: Path) -> tuple[Judge, float]:
    """The judge and its redraw tolerance (mean absolute colour error, 0..1)."""
    with safe_open(path, "pt") as f:
        state = {k: f.get_tensor(k).float() for k in f.keys()}  # noqa: SIM118 - safe_open is not a mapping
        tolerance = float(json.loads(f.metadata()["tolerance"]))
    judge = Judge()
    judge.load_state_dict(state)
    return judge.eval(), tolerance
