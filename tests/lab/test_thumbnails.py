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


def test_thumbnails_differ_from_each_other():
    """So that a gallery can be read."""
    found = [saved(path) for path in PATHS]
    for k, one in enumerate(found):
        for other in found[:k]:
            assert psnr(one, other) < 20


COLOURS = [(250, 20, 20), (20, 250, 20), (20, 20, 250), (250, 250, 20), (20, 250, 250)]
IMAGES = [np.full((8, 8, 3), colour, np.uint8) for colour in COLOURS]


def test_images_fill_the_square_above_their_figure():
    """One fills the width, the second of two lies over the first, four stand in two rows, more are a contact sheet."""
    one = thumbnails._arranged(IMAGES[:1], "57 passes")
    assert one.size == (512, 512) and one.getpixel((0, 0)) == one.getpixel((511, 400)) == COLOURS[0]

    two = thumbnails._arranged(IMAGES[:2], "57 passes")
    assert two.getpixel((10, 10)) == COLOURS[0] and two.getpixel((256, 256)) == two.getpixel((500, 410)) == COLOURS[1]

    four = thumbnails._arranged(IMAGES[:4], "57 passes")
    assert [four.getpixel(place) for place in [(100, 100), (400, 100), (100, 350), (400, 350)]] == COLOURS[:4]

    five = thumbnails._arranged(IMAGES, "57 passes")
    assert [five.getpixel((x, 80)) for x in (80, 256, 430)] == COLOURS[:3]


@pytest.mark.parametrize("text", ["57 passes, not 256", "43 passes of the large model, not 256"])
def test_the_figure_is_written_below_the_images_and_fits(text):
    drawn = pixels(thumbnails._arranged(IMAGES[:1], text))
    written = np.argwhere((np.abs(drawn - COLOURS[0]).sum(2) > 200) & (drawn.min(2) > 150))
    assert len(written) > 500 and written[:, 0].min() > 380
    assert written[:, 1].min() >= 4 and written[:, 1].max() < 508


def test_figures_are_the_same_on_every_machine():
    """Of the comparisons, which are told by their seconds too."""
    (path,) = [path for path in PATHS if path.stem.startswith("08 ")]
    assert thumbnails._line(thumbnails.Template(path)) == "19 passes, not 64"
