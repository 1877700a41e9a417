"""Quality figures of generated images of the picture book.

*class*: the judge reads the requested label. *scene*: in addition, a rendering of the scene that the judge reads matches the
image over the object, as well as 99 % of the autoencoder's reconstructions do. *whole*: the judge classifies the object as
whole. *Frechet*: Frechet distance of the judge's features (as FID, with the judge as the network); compare it with two floors,
real images against other real images, and reconstructions against real images.

Images of prompts have *agreement* as in GenEval (Ghosh et al. 2023, arXiv 2310.11513): for every stated parameter, whether
the judge reads it in the image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .captions import UNSAID, Wishes
from .judge import Judge, read, redraw_error
from .recipes import RESOLUTION


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Squared Frechet distance of Gaussian fits to features [N, D] and [M, D] (Heusel et al. 2017), float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # tr sqrt(ca cb) from the eigenvalues of the symmetric sqrt(ca) cb sqrt(ca).
    values, vectors = np.linalg.eigh(ca)
    root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    cross = np.sqrt(np.clip(np.linalg.eigvalsh(root @ cb @ root), 0, None)).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca) + np.trace(cb) - 2 * cross)


@dataclass(frozen=True)
class Figures:
    """Fractions 0..1 and a Frechet distance, as the module documentation defines them."""

    images: int
    label: float
    scene: float
    whole: float
    frechet: float

    def cells(self) -> dict[str, str]:
        """Cells of a table row, by column heading."""
        shares = {"class %": self.label, "scene %": self.scene, "whole %": self.whole}
        return {**{heading: percent(share) for heading, share in shares.items()}, "Frechet": f"{self.frechet:.2f}"}


def percent(share: float | None) -> str:
    """A share 0..1 as a percentage for a table; "" for None."""
    return "" if share is None else f"{100 * share:.1f}"


def figures(judge: Judge, tolerance: float, rgb: np.ndarray, labels: np.ndarray, reference: np.ndarray) -> Figures:
    """Figures of images uint8 [N, 64, 64, 3] with requested ``labels`` [N], against reference features [M, 64]."""
    v = read(judge, rgb)
    right = v.scenes.label == labels
    scene = right & (redraw_error(rgb, v.scenes) <= tolerance)
    return Figures(
        len(rgb),
        float(right.mean()),
        float(scene.mean()),
        float((v.whole > 0.5).mean()),
        frechet(v.features, reference),
    )


# ------------------------------------------------------------------------------------------------ prompts


@dataclass(frozen=True)
class Agreement:
    """Shares 0..1 of images that match their prompt in a parameter, of those whose prompt states it; None if no prompt does.

    Attributes:
        images: number of images.
        thing, colour: the object; its colour.
        both: object and colour, of all images; an unstated parameter counts as right.
        place, size, time: place and size of the object, and the time of day.
        everything: all stated parameters.
    """

    images: int
    thing: float | None
    colour: float | None
    both: float
    place: float | None
    size: float | None
    time: float | None
    everything: float


def shrunk(rgb: np.ndarray) -> np.ndarray:
    """Images uint8 [N, H, H, 3], H a multiple of 64, averaged to the judge's input size: uint8 [N, 64, 64, 3].

    Raises:
        ValueError: another shape.
    """
    side = rgb.shape[1] if rgb.ndim == 4 else 0
    if side < RESOLUTION or side % RESOLUTION or rgb.shape[2:] != (side, 3):
        raise ValueError(f"rgb: images are [N, H, H, 3] with H a multiple of {RESOLUTION}, not {list(rgb.shape)}.")
    factor = side // RESOLUTION
    if factor == 1:
        return rgb
    parts = rgb.reshape(-1, RESOLUTION, factor, RESOLUTION, factor, 3)
    return (parts.mean((2, 4), dtype=np.float32) + 0.5).astype(np.uint8)


def prompt_agreement(judge: Judge, rgb: np.ndarray, wanted: Wishes) -> Agreement:
    """Agreement of images with their prompts, as read by the judge.

    Args:
        judge: see ``judge.py``.
        rgb: uint8 [N, H, H, 3], H = 64 or a multiple.
        wanted: the requests of the prompts (``captions.wishes`` gives held-out ones).

    Raises:
        ValueError: no image, another shape, or another number of requests.
    """
    if not len(rgb) or len(rgb) != len(wanted):
        raise ValueError(f"wanted: {len(wanted)} requests for {len(rgb)} images; give one per image, and at least one.")
    right = wanted.fulfilled(read(judge, shrunk(rgb)).scenes)

    def share(name: str) -> float | None:
        said = getattr(wanted, name) != UNSAID
        return float(right[name][said].mean()) if said.any() else None

    return Agreement(
        len(rgb),
        share("label"),
        share("colour"),
        float((right["label"] & right["colour"]).mean()),
        share("place"),
        share("size"),
        share("time"),
        float(np.logical_and.reduce(list(right.values())).mean()),
    )
