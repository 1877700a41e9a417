"""Quality figures: exact values where possible, and sensitivity of the committed judge."""

import dataclasses

import numpy as np
import pytest
from fastar_nodes.lab.files import checkpoint
from fastar_nodes.lab.training import picture_book as book
from fastar_nodes.lab.training.judge import load_judge, read, redraw_error
from fastar_nodes.lab.training.quality import judged, nearest, scene_numbers, shrunk

pytestmark = pytest.mark.slow

JUDGE = checkpoint("judge")


def test_redraw_error_is_zero_for_the_scene_itself_and_grows_with_damage():
    s = book.scenes(6, 40)
    rgb, _ = book.render(s)
    assert redraw_error(rgb, s).max() < 1e-6
    moved = dataclasses.replace(s, x=s.x + 0.25)
    recoloured = dataclasses.replace(s, colour=(s.colour + 2) % len(book.COLOURS))
    assert np.median(redraw_error(rgb, moved)) > 0.1 and np.median(redraw_error(rgb, recoloured)) > 0.05


@pytest.fixture(scope="module")
def judge():
    return load_judge(JUDGE)


@pytest.fixture(scope="module")
def real():
    s = book.scenes(77, 300)
    return s, book.render(s)[0]


def test_the_judge_sees_a_torn_thing(judge, real):
    """Left half of one image, right half of another of the same class."""
    s, rgb = real
    order = np.argsort(s.label, kind="stable")
    partner = np.empty_like(order)
    partner[order] = np.roll(order, 1)
    torn = rgb.copy()
    torn[:, :, 32:] = rgb[partner][:, :, 32:]
    net, tolerance = judge
    whole = judged(read(net, rgb), tolerance, rgb, s.label)
    broken = judged(read(net, torn), tolerance, torn, s.label)
    for name in ("scene", "whole"):
        assert broken[name].mean() < whole[name].mean() - 0.25


def test_the_judge_reads_how_various_the_book_is(judge):
    """Of 400 images, 40 of each class: the scenes that it reads are those that were rendered, nearly all."""
    s = book.scenes(20261129, 400, labels=np.arange(400) % 10)
    rgb, _ = book.render(s)
    seen = read(judge[0], rgb).scenes

    assert 350 <= len(set(scene_numbers(s))) <= 372
    assert (scene_numbers(seen) == scene_numbers(s)).mean() > 0.97
    assert 0.125 < nearest(rgb).mean() < 0.14


def test_the_same_image_again_and_again_has_no_variety(judge):
    """Ten scenes forty times each."""
    s = book.scenes(3, 10, labels=np.arange(10))[np.arange(400) % 10]
    rgb, _ = book.render(s)

    assert len(set(scene_numbers(s))) == 10
    assert nearest(rgb).max() < 1e-3


def test_large_pictures_are_averaged_exactly():
    rng = np.random.default_rng(1)
    rgb = rng.integers(0, 256, (2, 128, 128, 3), np.uint8)
    wanted = rgb.reshape(2, 64, 2, 64, 2, 3).astype(float).mean((2, 4))
    assert np.abs(shrunk(rgb) - wanted).max() <= 0.5 and shrunk(rgb).dtype == np.uint8
    assert np.array_equal(shrunk(rgb[:, ::2, ::2]), rgb[:, ::2, ::2])
    for shape in ((2, 96, 96, 3), (2, 128, 64, 3), (2, 32, 32, 3), (128, 128, 3)):
        with pytest.raises(ValueError, match="rgb"):
            shrunk(np.zeros(shape, np.uint8))
