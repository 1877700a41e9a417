"""Quality of generated images of the picture book, as the judge reads them.

*class*: the judge reads the requested label. *scene*: in addition, a rendering of the scene that the judge reads
matches the image over the object, as well as 99 % of the autoencoder's reconstructions do. *whole*: the judge
classifies the object as whole.

A model that generates one right image again and again has perfect shares, so variety stands beside them: the number of
distinct scenes, the values of a scene's parameters that never occur, and the distance to the nearest other image.
"""

import numpy as np

from . import picture_book
from .judge import Verdict, redraw_error
from .picture_book import Scenes
from .recipes import RESOLUTION

# The parameters of a scene that the judge reads.
PARAMETERS = ("label", "colour", "place", "size", "time", "parts")


def judged(verdict: Verdict, tolerance: float, rgb: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Whether each image fulfils a measure, bool [N], by measure.

    Args:
        verdict: what the judge reads in the images.
        tolerance: the largest difference from a rendering that counts as a match.
        rgb: uint8 [N, 64, 64, 3].
        labels: the requested classes, int64 [N].
    """
    right = verdict.scenes.label == labels
    scene = right & (redraw_error(rgb, verdict.scenes) <= tolerance)

    return {"class": right, "scene": scene, "whole": verdict.whole > 0.5}


def scene_numbers(scenes: Scenes) -> np.ndarray:
    """A number for each of N scenes, int64 [N]: equal for scenes whose :data:`PARAMETERS` are equal."""
    values = [getattr(scenes, name) for name in PARAMETERS]
    return np.ravel_multi_index(values, [picture_book.VALUES[name] for name in PARAMETERS])


def nearest(rgb: np.ndarray) -> np.ndarray:
    """Distance of each image to the nearest other one, float64 [N]: the root of the mean squared difference, 0 to 1.

    ``rgb`` is uint8 [N, H, W, 3], N of 2 or more.
    """
    flat = rgb.reshape(len(rgb), -1).astype(np.float32) / 255
    squares = np.square(flat).sum(1)

    found = np.empty(len(rgb))
    for at in range(0, len(rgb), 500):
        part = flat[at : at + 500]
        distance = squares[at : at + 500, None] + squares - 2 * part @ flat.T
        distance[np.arange(len(part)), at + np.arange(len(part))] = np.inf
        found[at : at + 500] = distance.min(1)

    return np.sqrt(found.clip(min=0) / flat.shape[1])


def shrunk(rgb: np.ndarray) -> np.ndarray:
    """Images uint8 [N, H, H, 3], H a multiple of 64, averaged to the judge's 64 x 64 pixels.

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
