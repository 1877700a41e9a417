"""Quality figures of pictures of the book: does the thing asked for stand there whole, and are the pictures as varied?

*class*: the judge reads the label that was asked for. *scene*: the scene read off the picture, drawn again, matches the
picture where the thing is, as well as 99 % of the autoencoder's rebuilt pictures do. *whole*: the judge calls it whole.
*Frechet*: distance between Gaussian fits of the judge's features (as FID, on this judge), always beside two floors:
real against other real pictures, and rebuilt against real ones.

For pictures of prompts, *agreement* in the manner of GenEval (Ghosh et al. 2023, arXiv 2310.11513): a program, here the
judge, says of each thing that was asked for whether the picture shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .captions import UNSAID, Wishes
from .judge import Judge, read
from .recipes import RESOLUTION
from .redraw import redraw_error


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
    """Fractions 0..1 and a distance; see the module's text."""

    images: int
    label: float
    scene: float
    whole: float
    frechet: float

    def cells(self) -> dict[str, str]:
        """A table's columns: heading to cell."""
        shares = {"class %": self.label, "scene %": self.scene, "whole %": self.whole}
        return {**{heading: percent(share) for heading, share in shares.items()}, "Frechet": f"{self.frechet:.2f}"}


def percent(share: float | None) -> str:
    """A share 0..1 as a table writes it; "" for None."""
    return "" if share is None else f"{100 * share:.1f}"


def figures(judge: Judge, tolerance: float, rgb: np.ndarray, labels: np.ndarray, reference: np.ndarray) -> Figures:
    """Figures of pictures uint8 [N, 64, 64, 3] asked for as ``labels`` [N], against reference features [M, 64]."""
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
    """Shares 0..1 of the pictures whose prompt says so that show what was asked for; None where no prompt says it.

    Attributes:
        images: pictures in all.
        thing, colour: the right thing stands there; it has the right colour.
        both: thing and colour, of all pictures; what a prompt leaves open counts as right.
        place, size, time: where it stands, how large it is, and the time of day.
        everything: all that the prompt says.
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
    """Pictures uint8 [N, H, H, 3], H a multiple of 64, averaged to uint8 [N, 64, 64, 3], as the judge reads them.

    Raises:
        ValueError: another shape.
    """
    side = rgb.shape[1] if rgb.ndim == 4 else 0
    if side < RESOLUTION or side % RESOLUTION or rgb.shape[2:] != (side, 3):
        raise ValueError(f"rgb: pictures are [N, H, H, 3] with H a multiple of {RESOLUTION}, not {list(rgb.shape)}.")
    factor = side // RESOLUTION
    if factor == 1:
        return rgb
    parts = rgb.reshape(-1, RESOLUTION, factor, RESOLUTION, factor, 3)
    return (parts.mean((2, 4), dtype=np.float32) + 0.5).astype(np.uint8)


def prompt_agreement(judge: Judge, rgb: np.ndarray, wanted: Wishes) -> Agreement:
    """Whether pictures show what their prompts ask for, as far as the judge reads it.

    Args:
        judge: see ``judge.py``.
        rgb: uint8 [N, H, H, 3], H = 64 or a multiple.
        wanted: what each prompt asks for (``captions.wishes`` makes prompts that no training has read).

    Raises:
        ValueError: no picture, another shape, or another number of wishes.
    """
    if not len(rgb) or len(rgb) != len(wanted):
        raise ValueError(f"wanted: {len(wanted)} wishes for {len(rgb)} pictures; give one a picture, and at least one.")
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
