"""Thumbnails of the templates: what is in workflows/ is what the templates draw today."""

from pathlib import Path

import numpy as np
import pytest
from fastar_nodes.tools import thumbnails
from PIL import Image

PATHS = sorted(path for path in thumbnails.FOLDER.glob("*.json") if not path.stem.endswith(".app"))
# A comparison and the sign; others are slow.
FAST = ("10", "13", "14 Edit")


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
    assert psnr(saved(path), pixels(thumbnails.drawing(path))) > 30, "draw it again with tools.thumbnails"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_an_app_has_the_thumbnail_of_its_template(path):
    app = path.with_name(f"{path.stem}.app.json")
    assert not app.is_file() or app.with_suffix(".jpg").read_bytes() == path.with_suffix(".jpg").read_bytes()


def test_thumbnails_differ_from_each_other():
    """So that a gallery of fourteen can be read. Of a template and its App they are the same."""
    found = [saved(path) for path in PATHS]
    for k, one in enumerate(found):
        for other in found[:k]:
            assert psnr(one, other) < 20


def test_images_fill_the_square():
    """One fills it, the second of two lies over the first, four stand in two rows."""
    colours = [(250, 20, 20), (20, 250, 20), (20, 20, 250), (250, 250, 20)]
    images = [np.full((8, 8, 3), colour, np.uint8) for colour in colours]

    one = thumbnails._arranged(images[:1])
    assert one.size == (512, 512) and one.getpixel((0, 0)) == one.getpixel((511, 511)) == colours[0]

    two = thumbnails._arranged(images[:2])
    assert two.getpixel((10, 10)) == colours[0] and two.getpixel((256, 256)) == two.getpixel((500, 500)) == colours[1]

    four = thumbnails._arranged(images)
    places = [(100, 100), (400, 100), (100, 400), (400, 400)]
    assert [four.getpixel(place) for place in places] == colours
