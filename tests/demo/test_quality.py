"""The judge's figures: exact where they can be, and able to see what they are for (with the shipped judge)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fastar_nodes
import numpy as np
import pytest
from fastar_nodes.demo import picture_book as book
from fastar_nodes.demo.judge import load_judge, read
from fastar_nodes.demo.quality import figures, frechet, redraw_error

JUDGE = Path(fastar_nodes.__file__).parent / "demo" / "checkpoints" / "judge.safetensors"


def test_frechet_of_gaussians_is_the_closed_form():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(200_000, 3)) * (1, 2, 3)
    b = rng.normal(size=(200_000, 3)) * (2, 2, 1) + (1, 0, 0)
    # |mean difference|^2 + sum (s1 - s2)^2 = 1 + 1 + 0 + 4; sampling error about 0.03.
    assert frechet(a, b) == pytest.approx(6, abs=0.15)
    assert frechet(a, a) == pytest.approx(0, abs=1e-6)


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


def test_the_judge_reads_real_pictures(judge, real):
    s, rgb = real
    v = read(judge[0], rgb)
    for name in ("label", "colour", "time", "place", "size"):
        assert (getattr(v.scenes, name) == getattr(s, name)).mean() > 0.95, name
    assert (v.whole > 0.5).mean() > 0.9
    assert (redraw_error(rgb, v.scenes) <= judge[1]).mean() > 0.95


def test_the_judge_looks_at_the_thing_not_the_background(judge, real):
    """The same things over the backgrounds of scenes of other classes."""
    s, rgb = real
    _, mask = book.render(s)
    strange, _ = book.render(book.scenes(78, 300, labels=(s.label + 5) % 10), things=False)
    cover = mask[..., None] / 255.0
    swapped = (rgb * cover + strange * (1 - cover)).astype(np.uint8)
    v = read(judge[0], swapped)
    assert (v.scenes.label == s.label).mean() > 0.9
    bare, _ = book.render(s, things=False)
    alone = read(judge[0], bare)
    assert (alone.whole < 0.5).mean() > 0.9, "no thing, so no whole thing"
    assert (alone.scenes.label == s.label).mean() < 0.4, "the background gives the class away"


def test_the_judge_sees_a_torn_thing(judge, real):
    """Left half of one picture, right half of another of the same class."""
    s, rgb = real
    order = np.argsort(s.label, kind="stable")
    partner = np.empty_like(order)
    partner[order] = np.roll(order, 1)
    torn = rgb.copy()
    torn[:, :, 32:] = rgb[partner][:, :, 32:]
    reference = read(judge[0], book.render(book.scenes(79, 300))[0]).features
    whole, broken = (figures(*judge, x, s.label, reference) for x in (rgb, torn))
    assert broken.scene < whole.scene - 0.25 and broken.whole < whole.whole - 0.25
    assert broken.frechet > 2 * whole.frechet
