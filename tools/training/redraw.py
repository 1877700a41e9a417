"""Redraw error: the colour difference between an image and a rendering of the scene that was read from it."""

from __future__ import annotations

import numpy as np

from . import picture_book
from .picture_book import Scenes


def _soften(x: np.ndarray) -> np.ndarray:
    """3 x 3 box filter of [N, H, W, C]; tolerates a misplacement of half a pixel."""
    p = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    h, w = x.shape[1:3]
    return sum(p[:, i : i + h, j : j + w] for i in range(3) for j in range(3)) / 9


def redraw_map(rgb: np.ndarray, scenes: Scenes) -> tuple[np.ndarray, np.ndarray]:
    """Redraw error per pixel.

    Args:
        rgb: images, uint8 [N, H, H, 3].
        scenes: the N scenes to render.

    Returns:
        The mean absolute colour difference (0 to 1) times the coverage of the object, and the coverage (0 to 1); both
        float32 [N, H, H].
    """
    drawn, mask = picture_book.render(scenes, rgb.shape[1])
    difference = np.abs(_soften(rgb.astype(np.float32) / 255) - _soften(drawn.astype(np.float32) / 255)).mean(-1)
    weight = mask.astype(np.float32) / 255
    return difference * weight, weight


def redraw_error(rgb: np.ndarray, scenes: Scenes) -> np.ndarray:
    """Mean redraw error over the object's pixels, 0 to 1, float [N]; arguments as in :func:`redraw_map`."""
    error, weight = redraw_map(rgb, scenes)
    return error.sum((1, 2)) / np.maximum(weight.sum((1, 2)), 1)
