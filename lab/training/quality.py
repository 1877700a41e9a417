"""Quality of generated images of the picture book, as the judge reads them.

*class*: the judge reads the requested label. *scene*: in addition, a rendering of the scene that the judge reads
matches the image over the object, as well as 99 % of the autoencoder's reconstructions do. *whole*: the judge
classifies the object as whole.
"""

import numpy as np

from .judge import Judge, read, redraw_error
from .recipes import RESOLUTION


def judged(
    judge: Judge, tolerance: float, rgb: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The judge's features of images, fp32 [N, 64], and by measure whether each image fulfils it, bool [N].

    Args:
        tolerance: the largest difference from a rendering that counts as a match.
        rgb: uint8 [N, 64, 64, 3].
        labels: the requested classes, int64 [N].
    """
    v = read(judge, rgb)
    right = v.scenes.label == labels
    scene = right & (redraw_error(rgb, v.scenes) <= tolerance)

    return v.features, {"class": right, "scene": scene, "whole": v.whole > 0.5}


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
