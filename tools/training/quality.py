"""Quality figures of generated images of the picture book.

*class*: the judge reads the requested label. *scene*: in addition, a rendering of the scene that the judge reads
matches the image over the object, as well as 99 % of the autoencoder's reconstructions do. *whole*: the judge
classifies the object as whole. *Frechet*: Frechet distance of the judge's features (as FID, with the judge as the
network); compare it with two floors, real images against other real images, and reconstructions against real images.

Images of prompts have *agreement* as in GenEval (Ghosh et al. 2023, arXiv 2310.11513): for every stated parameter,
whether the judge reads it in the image.
"""

from dataclasses import dataclass

import numpy as np

from ...bench import statistics
from .captions import UNSAID, Wishes
from .judge import Judge, read, redraw_error
from .picture_book import Scenes
from .recipes import RESOLUTION


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Squared Frechet distance of Gaussian fits to features [N, D] and [M, D] (Heusel et al. 2017)."""
    return statistics.frechet(a, b)(np.ones(len(a)))


@dataclass(frozen=True)
class Figures:
    """Figures of ``images`` images: fractions 0..1 by name (None: of no image), and the Frechet distance."""

    images: int
    shares: dict[str, float | None]
    frechet: float

    def cells(self) -> dict[str, str]:
        """Cells of a table row, by column heading."""
        shares = {f"{name} %": percent(share) for name, share in self.shares.items()}
        return {**shares, "Frechet": f"{self.frechet:.2f}"}


def percent(share: float | None) -> str:
    """A share 0..1 as a percentage for a table; "" for None."""
    return "" if share is None else f"{100 * share:.1f}"


def judged(
    judge: Judge, tolerance: float, rgb: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Features [N, 64] of images uint8 [N, 64, 64, 3] with requested
    ``labels`` [N], and by figure whether each has it, bool [N].
    """
    v = read(judge, rgb)
    right = v.scenes.label == labels
    scene = right & (redraw_error(rgb, v.scenes) <= tolerance)
    return v.features, {"class": right, "scene": scene, "whole": v.whole > 0.5}


def figures(judge: Judge, tolerance: float, rgb: np.ndarray, labels: np.ndarray, reference: np.ndarray) -> Figures:
    """Figures of images uint8 [N, 64, 64, 3] with requested ``labels`` [N], against reference features [M, 64]."""
    features, found = judged(judge, tolerance, rgb, labels)
    return Figures(len(rgb), {name: float(x.mean()) for name, x in found.items()}, frechet(features, reference))


def shrunk(rgb: np.ndarray) -> np.ndarray:
    """Images uint8 [N, H, H, 3], H a multiple of 64, averaged to
    the judge's 64 x 64 pixels. Raises ValueError for another shape.
    """
    side = rgb.shape[1] if rgb.ndim == 4 else 0
    if side < RESOLUTION or side % RESOLUTION or rgb.shape[2:] != (side, 3):
        raise ValueError(f"rgb: images are [N, H, H, 3] with H a multiple of {RESOLUTION}, not {list(rgb.shape)}.")
    factor = side // RESOLUTION
    if factor == 1:
        return rgb
    parts = rgb.reshape(-1, RESOLUTION, factor, RESOLUTION, factor, 3)

    return (parts.mean((2, 4), dtype=np.float32) + 0.5).astype(np.uint8)


def prompt_agreement(scenes: Scenes, wanted: Wishes) -> dict[str, float | None]:
    """Shares 0..1 of N images that match their prompt in a parameter,
    of those whose prompt states it; None if no prompt does.

    "thing" is the object; "both", object and colour, and "all", all parameters,
    are of all images: what a prompt does not state counts as right.

    Args:
        scenes: what the judge reads in the images.
        wanted: the requests of their prompts (``captions.wishes`` gives held-out ones).

    Raises:
        ValueError: no image, or another number of requests.
    """
    if not len(scenes) or len(scenes) != len(wanted):
        given = f"{len(wanted)} requests for {len(scenes)} images"
        raise ValueError(f"wanted: {given}; give one per image, and at least one.")

    right = wanted.fulfilled(scenes)

    def share(name: str) -> float | None:
        said = getattr(wanted, name) != UNSAID
        return float(right[name][said].mean()) if said.any() else None

    return {
        "thing": share("label"),
        "colour": share("colour"),
        "both": float((right["label"] & right["colour"]).mean()),
        **{name: share(name) for name in ("place", "size", "time")},
        "all": float(np.logical_and.reduce(list(right.values())).mean()),
    }
