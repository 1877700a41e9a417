"""The demo's models draw various images: a model that draws one right image again and again fails here.

Ten images of each class at the models' own settings. The book itself has 98 or 99 distinct scenes among 100, and a
distance of about 0.15 to the nearest other image.
"""

import fastar_nodes
import numpy as np
import pytest
from fastar_nodes.lab.files import checkpoint
from fastar_nodes.lab.training import picture_book
from fastar_nodes.lab.training.judge import load_judge, read
from fastar_nodes.lab.training.quality import nearest, scene_numbers, shrunk

pytestmark = pytest.mark.slow

# The least number of distinct scenes of 100, and the least mean distance to the nearest other image.
LEAST = {
    "demo": (90, 0.13),
    "demo-hybrid": (90, 0.13),
    "demo-llamagen-low": (90, 0.13),
    "demo-llamagen": (88, 0.12),
    "demo-par": (90, 0.13),
    "demo-bitdance": (88, 0.13),
    "demo-dtok": (90, 0.13),
}


@pytest.mark.parametrize("model", LEAST)
def test_a_hundred_images_show_many_scenes(model):
    pipe = fastar_nodes.load(model, device="cpu")
    judge, _ = load_judge(checkpoint("judge"))

    pictures = []
    for label in picture_book.LABELS:
        images, _ = pipe([label] * 10, seed=20261129)
        pictures.append(shrunk(np.asarray(images)))
    rgb = np.concatenate(pictures)

    scenes, distance = LEAST[model]
    found = len(set(scene_numbers(read(judge, rgb).scenes)))
    away = nearest(rgb).mean()
    print(f"{model}: {found} distinct scenes of 100, {away:.3f} to the nearest image")
    assert found >= scenes and away >= distance
