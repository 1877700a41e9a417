"""Thumbnails of the templates: what is in workflows/ is what the templates draw today."""

from pathlib import Path

import numpy as np
import pytest
from fastar_nodes.lab.docs import thumbnails
from PIL import Image

PATHS = sorted(thumbnails.FOLDER.glob("*.json"))
# A comparison and the sign; others are slow.
FAST = ("08", "17", "18")


def pixels(image) -> np.ndarray:
    return np.asarray(image.convert("RGB"), float)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB."""
    return 10 * np.log10(255**2 / max(1e-9, ((a - b) ** 2).mean()))


def saved(path: Path) -> np.ndarray:
    with Image.open(path.with_suffix(".jpg")) as image:
        return pixels(image)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem.startswith(FAST) else [pytest.mark.slow])
        for path in PATHS
    ],
)
def test_a_thumbnail_is_what_the_template_draws(path):
    """Within a JPEG's error. Another class, seed or sampler is below 20 dB."""
    assert psnr(saved(path), pixels(thumbnails.drawing(path))) > 30, "draw it again with lab thumbnails"
