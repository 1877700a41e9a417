"""The picture book: an unlimited, seeded set of small coloured scenes with captions and known parameters.

A scene has one of ten objects, five colours, three places, two sizes, three times of day and three variants. An image is a
pure function of ``(seed, index)`` on every platform: the parameters come from a counter-based hash. A scene renders at any
resolution.
"""

from __future__ import annotations

import numpy as np

from .drawings import DRAW, Canvas
from .scenes import COLOURS, JITTER, LABELS, PARTS, PLACE_STEP, PLACES, SCALES, SIZES, TIMES, Scenes, scenes

__all__ = [
    "COLOURS",
    "JITTER",
    "LABELS",
    "PARTS",
    "PLACES",
    "PLACE_STEP",
    "SCALES",
    "SIZES",
    "TIMES",
    "Scenes",
    "render",
    "scenes",
]

# Of COLOURS. Far apart, so that a mixture of two is recognisable.
_RGB = np.array(
    [(0.89, 0.18, 0.18), (0.99, 0.86, 0.24), (0.24, 0.66, 0.30), (0.18, 0.40, 0.88), (0.97, 0.96, 0.93)],
    dtype=np.float32,
)


def render(s: Scenes, resolution: int = 64, objects: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Render scenes.

    Args:
        s: N scenes.
        resolution: side of the images in pixels, 8 or more.
        objects: False renders the background alone; the coverage is then zero.

    Returns:
        Images uint8 [N, resolution, resolution, 3] and the coverage of their objects, uint8 [N, resolution, resolution],
        255 = covered.

    Raises:
        ValueError: resolution below 8.
    """
    if resolution < 8:
        raise ValueError(f"resolution: {resolution} is too small; use 8 or more.")
    rgb = np.empty((len(s), resolution, resolution, 3), np.uint8)
    mask = np.empty((len(s), resolution, resolution), np.uint8)
    chunk = max(1, (1 << 19) // resolution**2)
    for label, draw in enumerate(DRAW):
        rows = np.flatnonzero(s.label == label)
        for at in range(0, len(rows), chunk):
            part = rows[at : at + chunk]
            c = Canvas(s[part], resolution, objects)
            draw(c, _RGB[c.s.colour])
            rgb[part] = (np.clip(c.rgb, 0, 1) * 255 + 0.5).astype(np.uint8)
            mask[part] = (np.clip(c.mask, 0, 1) * 255 + 0.5).astype(np.uint8)
    return rgb, mask
