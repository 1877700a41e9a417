"""Figures of the demo's images that are independent of the judge, and so of the reward of the large LlamaGen:

    python -m fastar_nodes.tools.ablations.independent --images 1000

The large LlamaGen was trained by reinforcement with the scene error of a critic of the judge's architecture
(``training/reinforce.py``). The judge's scene figure is therefore close to the reward. The figures here are not:

- A classifier of another architecture, a patch transformer without convolutions, is trained on rendered images of the picture
  book only. **class %**: it predicts the requested class. **confident %**: the least of its six confidences (class, colour,
  place, size, time of day, variant) is above the 1 % quantile of real images; an image that mixes two scenes fails.
  **agreement %**: its six predictions are the judge's; an image that only the judge recognises fails.
- **scenes**: number of different predicted scenes (combinations of the six attributes); depends on the number of images.
- **precision %, recall %**: improved precision and recall by k-nearest-neighbour manifolds, k = 3 (Kynkaanniemi et al. 2019,
  arXiv 1904.06991). Precision is the share of generated images within the manifold of real images, recall the share of real
  images within the manifold of the generated ones.
- **copies %**: share of images whose nearest neighbour among N training images and N new images is a training image. 50 %
  without memorisation.

Precision, recall and copies are computed in the classifier's features and in pixels (RGB, 32 x 32). Every set of real images
has a seed of its own. Neither the sampling seed nor any setting was chosen by these figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UserError
from ...model_loaders.autoencoders import load_kl, load_vq
from ...model_loaders.checkpoint import read_metadata
from ...model_loaders.llamagen import load_llamagen
from ...model_loaders.mar import load_mar
from ...samplers.driver import finish
from ...samplers.noise import PairedNoise
from ...samplers.registry import find
from ...samplers.settings import make
from ...samplers.tokens.draws import PairedDraws
from ..training import judge as judges
from ..training import picture_book
from ..training.picture_book import Scenes
from ..training.quality import percent, shrunk
from ..training.recipes import RESOLUTION, TRAIN_SEED, to_rgb
from ..training.training import Schedule, generator, train
from .tables import BATCH, Ground, from_rgb

SEED = 90210
# Seeds of the picture books. No training of the demo and no other table uses them.
CLASSIFIER_BOOK, CALIBRATION_BOOK, REFERENCE_BOOK, REPORTED_BOOK, FRESH_BOOK = range(90211, 90216)
CLASSIFIER_IMAGES, CALIBRATION_IMAGES, COMPARED = 12000, 2000, 20000
SCHEDULE = Schedule(steps=1800, batch=64, lr=1e-3, muon_lr=4e-3, ema=0.995, weight_decay=0.02, decay=0.5)
NEIGHBOURS = 3
# Row title, sampler, checkpoint, autoencoder.
ROWS = (
    ("MAR", "mar", "mar", "kl"),
    ("LlamaGen, 8 x 8", "llamagen", "llamagen-low", "vq"),
    ("PAR, 4 regions, 8 x 8", "par", "par", "vq"),
    ("LlamaGen, 16 x 16 (reinforced)", "llamagen", "llamagen", "vq"),
)
# Rows of real images that pass through an autoencoder: title, autoencoder, side.
REBUILT = (("KL-rebuilt", "kl", 64), ("VQ-rebuilt, 8 x 8", "vq", 64), ("VQ-rebuilt, 16 x 16", "vq", 128))
_CHUNK = 25


# ------------------------------------------------------------------------------------------------ classifier

ATTRIBUTES = {
    "label": len(picture_book.LABELS),
    "colour": len(picture_book.COLOURS),
    "place": len(picture_book.PLACES),
    "size": len(picture_book.SIZES),
    "time": len(picture_book.TIMES),
    "parts": picture_book.PARTS,
}
# The background of a planet does not depend on the time of day.
_UNTIMED = picture_book.LABELS.index("planet")


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Images [B, 3, 64, 64] in -1..1 to features [B, width] and logits of each attribute, by name."""

    def __init__(self, width: int = 96, depth: int = 4, heads: int = 4, patch: int = 8):
        super().__init__()
        tokens = (RESOLUTION // patch) ** 2
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, width)
        self.position_emb = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, sum(ATTRIBUTES.values()))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        patches = F.pixel_unshuffle(x, self.patch).flatten(2).transpose(1, 2)
        f = self.norm(self.blocks(self.embed(patches) + self.position_emb).mean(1))
        return f, dict(zip(ATTRIBUTES, self.output(f).split(list(ATTRIBUTES.values()), 1), strict=True))


def book(seed: int, count: int, labels: np.ndarray | None = None, side: int = RESOLUTION) -> tuple[Scenes, np.ndarray]:
    """Scenes of a picture book and their images, uint8 [count, side, side, 3]."""
    scenes = picture_book.scenes(seed, count, labels=labels)
    return scenes, picture_book.render(scenes, side)[0]


def train_classifier(
    images: int = CLASSIFIER_IMAGES, schedule: Schedule = SCHEDULE, log: Callable[[str], None] = print
) -> Classifier:
    """Train the classifier on real images. Seeded; 7 to 9 minutes on one core."""
    scenes, rgb = book(CLASSIFIER_BOOK, images)
    x = torch.from_numpy(rgb).permute(0, 3, 1, 2)
    truth = {name: torch.from_numpy(getattr(scenes, name)) for name in ATTRIBUTES}
    truth["time"] = torch.where(truth["label"] == _UNTIMED, -100, truth["time"])  # cross_entropy ignores -100
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(CLASSIFIER_BOOK)
        classifier = Classifier()

    def loss(module: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        g = generator(CLASSIFIER_BOOK, step)
        row = torch.randint(images, (schedule.batch,), generator=g)
        signed = x[row].float() / 127.5 - 1
        # Decoded images have small errors, rendered ones have none.
        noise = 0.1 * torch.rand(len(row), 1, 1, 1, generator=g) * torch.randn(signed.shape, generator=g)
        _, out = module(signed + noise)
        losses = {name: F.cross_entropy(logits.float(), truth[name][row]) for name, logits in out.items()}
        return sum(losses.values(), torch.zeros(())), {k: float(v.detach()) for k, v in losses.items()}

    with TemporaryDirectory() as folder:
        train("classifier", classifier, loss, schedule, Path(folder), torch.device("cpu"), log)
    return classifier


@dataclass(frozen=True)
class Prediction:
    """Predictions for N images.

    Attributes:
        features: fp32 [N, width].
        attributes: int64 [N] each, by name.
        confidence: fp32 [N], probability of the least confident attribute's value.
    """

    features: Tensor
    attributes: dict[str, np.ndarray]
    confidence: np.ndarray


@torch.no_grad()
def predict(classifier: Classifier, rgb: np.ndarray) -> Prediction:
    """Predictions for images uint8 [N, 64, 64, 3]."""
    parts = [classifier(part) for part in from_rgb(rgb).split(250)]
    logits = {name: torch.cat([out[name] for _, out in parts]) for name in ATTRIBUTES}
    best = {name: v.argmax(1).numpy() for name, v in logits.items()}
    sure = {name: v.softmax(1).amax(1).numpy() for name, v in logits.items()}
    sure["time"] = np.where(best["label"] == _UNTIMED, 1.0, sure["time"])
    return Prediction(torch.cat([f for f, _ in parts]), best, np.minimum.reduce(list(sure.values())))


def same_scene(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> np.ndarray:
    """bool [N]: all attributes are equal; the time of day of two planets is not compared."""
    untimed = (a["label"] == _UNTIMED) & (b["label"] == _UNTIMED)
    return np.logical_and.reduce([(a[k] == b[k]) | (untimed if k == "time" else False) for k in ATTRIBUTES])


def different_scenes(attributes: dict[str, np.ndarray]) -> int:
    """Number of different combinations; the time of day of a planet does not count."""
    time = np.where(attributes["label"] == _UNTIMED, 0, attributes["time"])
    return len(np.unique(np.stack(list({**attributes, "time": time}.values())), axis=1).T)


# ------------------------------------------------------------------------------------------------ neighbours


def pixels(rgb: np.ndarray) -> Tensor:
    """Images uint8 [N, 64, 64, 3] as points fp32 [N, 3 x 32 x 32]."""
    return torch.cat([F.avg_pool2d(part, 2).flatten(1) for part in from_rgb(rgb).split(250)])


def nearest(points: Tensor, among: Tensor) -> Tensor:
    """Distance of points [N, d] to the nearest of [M, d]; [N]."""
    return torch.cat([torch.cdist(part, among).amin(1) for part in points.split(250)])


def inside(points: Tensor, among: Tensor, k: int = NEIGHBOURS) -> float:
    """Share of points [N, d] within the manifold of [M, d]: within the distance of one of these to its k-th neighbour."""
    radii = torch.cat([torch.cdist(part, among).kthvalue(k + 1, 1).values for part in among.split(250)])
    hits = [(torch.cdist(part, among) <= radii).any(1) for part in points.split(250)]
    return float(torch.cat(hits).float().mean())


def copied(points: Tensor, training: Tensor, fresh: Tensor) -> float:
    """Share of points [N, d] that are nearer to a training image than to all of as many fresh ones."""
    return float((nearest(points, training) < nearest(points, fresh)).float().mean())


# ------------------------------------------------------------------------------------------------ figures


@dataclass(frozen=True)
class Figures:
    """Number of scenes and shares 0..1 of a row's images; see the module's docstring."""

    label: float
    confident: float
    agreement: float
    scenes: int
    precision: float
    recall: float
    copies: float
    precision_pixels: float
    recall_pixels: float
    copies_pixels: float


HEADINGS = (
    "class %",
    "confident %",
    "agreement %",
    "scenes",
    "precision %",
    "recall %",
    "copies %",
    "precision %, pixels",
    "recall %, pixels",
    "copies %, pixels",
)


class Measure:
    """The classifier, the judge and the real images that all rows are compared with.

    Args:
        ground: labels and judge.
        classifier: see :func:`train_classifier`.
        compared: training images, and as many fresh ones, that copies are looked for among.
    """

    def __init__(self, ground: Ground, classifier: Classifier, compared: int = COMPARED):
        self.ground, self.classifier = ground, classifier
        calibration = predict(classifier, book(CALIBRATION_BOOK, CALIBRATION_IMAGES)[1])
        self.threshold = float(np.quantile(calibration.confidence, 0.01))
        self.reference = self.points(book(REFERENCE_BOOK, ground.images, ground.labels)[1])
        self.training, self.fresh = (self.points(book(seed, compared)[1]) for seed in (TRAIN_SEED, FRESH_BOOK))

    def points(self, rgb: np.ndarray) -> tuple[Tensor, Tensor]:
        """Features and pixels of images uint8 [N, 64, 64, 3]."""
        return predict(self.classifier, rgb).features, pixels(rgb)

    def __call__(self, rgb: np.ndarray) -> Figures:
        """Figures of images uint8 [images, S, S, 3] of the ground's labels; larger ones are averaged to 64 pixels."""
        rgb = shrunk(rgb)
        prediction = predict(self.classifier, rgb)
        scenes = judges.read(self.ground.judge, rgb).scenes
        judged = {name: getattr(scenes, name) for name in ATTRIBUTES}
        shares: list[float] = []
        for mine, real, old, new in zip(
            (prediction.features, pixels(rgb)), self.reference, self.training, self.fresh, strict=True
        ):
            shares += [inside(mine, real), inside(real, mine), copied(mine, old, new)]
        return Figures(
            float((prediction.attributes["label"] == self.ground.labels).mean()),
            float((prediction.confidence >= self.threshold).mean()),
            float(same_scene(prediction.attributes, judged).mean()),
            different_scenes(prediction.attributes),
            *shares,
        )


# ------------------------------------------------------------------------------------------------ rows


@torch.no_grad()
def rebuilt(ground: Ground, coder: str, side: int) -> np.ndarray:
    """The reported real images, uint8 [images, side, side, 3], through an autoencoder."""
    real = from_rgb(book(REPORTED_BOOK, ground.images, ground.labels, side)[1]).split(_CHUNK)
    if coder == "kl":
        kl = load_kl(ground.file(coder)).net
        return np.concatenate([to_rgb(kl.decode(kl.encode(part)[0])) for part in real])
    vq = load_vq(ground.file(coder)).net
    return np.concatenate([to_rgb(vq.decode_codes(vq.encode(part)[1])) for part in real])


@torch.no_grad()
def drawn(ground: Ground, sampler: str, checkpoint: str, coder: str, seed: int) -> np.ndarray:
    """A sampler's images, uint8 [images, S, S, 3], with the settings that the checkpoint asks for."""
    entry, path = find(sampler), ground.file(checkpoint)
    stated = json.loads(read_metadata(path).get("defaults", "{}"))
    known = {f.name for f in fields(entry.settings)}
    settings = make(entry.settings, {name: value for name, value in stated.items() if name in known})
    cpu, of_mar = torch.device("cpu"), coder == "kl"
    model: Any = load_mar(path, "fp32", cpu) if of_mar else load_llamagen(path, "fp32", cpu)
    net: Any = (load_kl if of_mar else load_vq)(ground.file(coder)).net
    every, parts = range(ground.images), []
    for images in (every[at : at + BATCH] for at in range(0, len(every), BATCH)):
        noise = PairedNoise(seed, images) if of_mar else PairedDraws(seed, images)
        done: Any = finish(entry.run(model, ground.condition(images), settings, noise, seed))
        tokens, decode = (done.latents, net.decode) if of_mar else (done.codes, net.decode_codes)
        parts += [to_rgb(decode(part)) for part in tokens.split(_CHUNK)]
    return np.concatenate(parts)


def rows(ground: Ground, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Title and images of every row."""
    yield "*real, held out*", book(REPORTED_BOOK, ground.images, ground.labels)[1]
    for title, coder, side in REBUILT:
        yield f"*{title}*", rebuilt(ground, coder, side)
    for title, sampler, checkpoint, coder in ROWS:
        yield title, drawn(ground, sampler, checkpoint, coder, seed)


def to_markdown(table: dict[str, Figures]) -> str:
    """A Markdown table, one line a row."""
    lines = [f"| images | {' | '.join(HEADINGS)} |", "|---" * (1 + len(HEADINGS)) + "|"]
    for title, figures in table.items():
        cells = (str(value) if isinstance(value, int) else percent(value) for value in asdict(figures).values())
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train the classifier, draw all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000, metavar="N", help="images of every row; default 1000")
    parser.add_argument("--seed", type=int, default=SEED, help=f"sampling seed; default {SEED}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args(argv)
    try:
        ground = Ground(options.images)
    except UserError as e:
        parser.error(str(e))

    def log(text: str) -> None:
        print(text, flush=True)

    # Sums are rounded in another order with another number of threads.
    torch.set_num_threads(1)
    measure = Measure(ground, train_classifier(log=log))
    table = {}
    for title, rgb in rows(ground, options.seed):
        table[title] = measure(rgb)
        log(f"{title}: {table[title]}")
    log(to_markdown(table))
    report = {"images": options.images, "seed": options.seed, "rows": {k: asdict(v) for k, v in table.items()}}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
