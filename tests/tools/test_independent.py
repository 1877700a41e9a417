"""The independent figures: exact on points whose neighbours are known, and repeatable."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.tools import files
from fastar_nodes.tools.ablations import independent
from fastar_nodes.tools.ablations.independent import (
    ATTRIBUTES,
    Classifier,
    Figures,
    Measure,
    book,
    copied,
    different_scenes,
    drawn,
    inside,
    nearest,
    pixels,
    predict,
    rebuilt,
    same_scene,
    to_markdown,
    train_classifier,
)
from fastar_nodes.tools.ablations.tables import Ground
from fastar_nodes.tools.training.training import Schedule


def points(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_neighbours_on_a_line():
    among = points(0, 1, 2, 3, 10)
    assert nearest(points(0.4, 7, 10), among).tolist() == pytest.approx([0.4, 3, 0])
    # Distances to the third neighbours: 3, 2, 2, 3, 9.
    assert inside(points(-2.9, 5.9, 18.9), among, 3) == 1.0
    assert inside(points(-3.1, 19.1), among, 3) == 0.0
    assert inside(among, among) == 1.0
    assert copied(points(0, 1, 5), points(0.1, 6), points(1.2, 4.5)) == pytest.approx(1 / 3)


def test_a_memorised_image_is_a_copy():
    g = torch.Generator().manual_seed(0)
    old, new, other = (torch.randn(500, 8, generator=g) for _ in range(3))
    near = old[:200] + 0.01 * torch.randn(200, 8, generator=g)
    assert copied(near, old, new) == 1.0
    assert copied(other, old, new) == pytest.approx(0.5, abs=0.08)


def test_pixels_are_averages_of_four():
    rgb = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    blocks = rgb.reshape(2, 32, 2, 32, 2, 3).mean((2, 4)).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(pixels(rgb).numpy(), blocks.reshape(2, -1) / 127.5 - 1, atol=1e-5)


def test_two_planets_have_no_time_of_day():
    scene = {name: np.array([6, 7]) if name == "label" else np.zeros(2, np.int64) for name in ATTRIBUTES}
    assert same_scene(scene, {**scene, "time": np.array([2, 2])}).tolist() == [True, False]
    assert same_scene(scene, {**scene, "colour": np.array([0, 1])}).tolist() == [True, False]


def test_different_scenes_are_counted():
    scene = {name: np.array([6, 6, 7, 7, 7]) if name == "label" else np.zeros(5, np.int64) for name in ATTRIBUTES}
    assert different_scenes(scene) == 2
    assert different_scenes({**scene, "time": np.array([0, 2, 0, 0, 2])}) == 3
    assert different_scenes({**scene, "parts": np.arange(5)}) == 5


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return train_classifier(64, Schedule(steps=3, batch=8, lr=1e-3), log=lambda text: None)


def test_training_is_repeatable_and_leaves_the_global_generator_alone(classifier):
    before = torch.get_rng_state()
    again = train_classifier(64, Schedule(steps=3, batch=8, lr=1e-3), log=lambda text: None)
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in classifier.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_the_classifier_has_no_convolution(classifier):
    assert not any("Conv" in type(module).__name__ for module in classifier.modules())


def test_a_prediction(classifier):
    _, rgb = book(1, 30)
    prediction = predict(classifier, rgb)
    assert prediction.features.shape == (30, 96) and set(prediction.attributes) == set(ATTRIBUTES)
    assert all(
        0 <= prediction.attributes[name].min() <= prediction.attributes[name].max() < n
        for name, n in ATTRIBUTES.items()
    )
    assert (prediction.confidence > 0).all() and (prediction.confidence <= 1).all()
    assert torch.equal(predict(classifier, rgb[3:7]).features, prediction.features[3:7]) or torch.allclose(
        predict(classifier, rgb[3:7]).features, prediction.features[3:7], atol=1e-5
    )


def test_figures_of_the_reference_itself(classifier, monkeypatch):
    monkeypatch.setattr(independent, "CALIBRATION_IMAGES", 100)
    ground = Ground(100)
    measure = Measure(ground, classifier, compared=50)
    reference = book(independent.REFERENCE_BOOK, 100, ground.labels)[1]
    figures = measure(reference)
    assert figures.precision == figures.recall == figures.precision_pixels == figures.recall_pixels == 1.0
    noise = measure(np.random.default_rng(0).integers(0, 256, reference.shape, np.uint8))
    assert noise.precision_pixels == noise.recall_pixels == 0.0
    training = measure(book(independent.TRAIN_SEED, 100)[1][:50].repeat(2, 0))
    assert training.copies_pixels == 1.0


def test_images_of_the_demo():
    """Two images of a token model and of a MAR, and two rebuilt ones."""
    ground = SimpleNamespace(
        images=2,
        labels=np.array([0, 1]),
        file=files.checkpoint,
        condition=lambda images: from_ids([0, 1]),
    )
    low = drawn(ground, "llamagen", "llamagen-low", "vq", 5)
    assert low.shape == (2, 64, 64, 3) and np.array_equal(low, drawn(ground, "llamagen", "llamagen-low", "vq", 5))
    assert not np.array_equal(low, drawn(ground, "llamagen", "llamagen-low", "vq", 6))
    real = book(independent.REPORTED_BOOK, 2, ground.labels, 128)[1].astype(float)
    assert np.abs(rebuilt(ground, "vq", 128) - real).mean() < 12 and rebuilt(ground, "kl", 64).shape == (2, 64, 64, 3)


def test_the_table_has_a_column_a_figure():
    lines = to_markdown({"MAR": Figures(0.0, 0.1, 0.2, 765, *(0.1 * i for i in range(6)))}).splitlines()
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| MAR | 0.0 | 10.0 | 20.0 | 765 | 0.0 | 10.0 |")
