"""The images of docs/gallery.md: the graph inside each draws it again."""

import json

import numpy as np
import pytest
from comfy_host import ROOT
from fastar_nodes.lab.docs import gallery
from PIL import Image

FIRST = [(model, gallery.COLUMNS * row) for row, model in enumerate(gallery.MODELS)]


@pytest.mark.parametrize(("model", "seed"), FIRST, ids=[model.checkpoint for model in gallery.MODELS])
def test_the_graph_inside_an_image_draws_it(comfy, model, seed):
    path = ROOT / "docs" / "gallery" / gallery.name(model, seed)
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGB")).astype(float)
        prompt = json.loads(image.text["prompt"])

    found = np.asarray(comfy.picture(comfy.run(prompt)["5"]["images"][0])).astype(float)
    assert found.shape == expected.shape
    assert np.abs(found - expected).mean() < 1, "another processor may round otherwise, but draws the same image"
