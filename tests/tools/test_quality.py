"""Quality figures: exact values where possible, and sensitivity of the committed judge."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fastar_nodes.tools.files import checkpoint
from fastar_nodes.tools.training import picture_book as book
from fastar_nodes.tools.training.captions import UNSAID, Wishes
from fastar_nodes.tools.training.judge import load_judge, read, redraw_error
from fastar_nodes.tools.training.quality import figures, frechet, prompt_agreement, shrunk

pytestmark = pytest.mark.slow

JUDGE = checkpoint("judge")


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
    """The same objects over the backgrounds of scenes of other classes."""
    s, rgb = real
    _, mask = book.render(s)
    strange, _ = book.render(book.scenes(78, 300, labels=(s.label + 5) % 10), objects=False)
    cover = mask[..., None] / 255.0
    swapped = (rgb * cover + strange * (1 - cover)).astype(np.uint8)
    v = read(judge[0], swapped)
    assert (v.scenes.label == s.label).mean() > 0.9
    bare, _ = book.render(s, objects=False)
    alone = read(judge[0], bare)
    assert (alone.whole < 0.5).mean() > 0.9, "no thing, so no whole thing"
    assert (alone.scenes.label == s.label).mean() < 0.4, "the background gives the class away"


def test_the_judge_sees_a_torn_thing(judge, real):
    """Left half of one image, right half of another of the same class."""
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


def asked(s: book.Scenes, **changes: np.ndarray) -> Wishes:
    return Wishes(
        **{name: changes.get(name, getattr(s, name)) for name in ("label", "colour", "size", "place", "time")}
    )


def test_real_pictures_agree_with_their_prompts(judge, real):
    s, rgb = real
    a = prompt_agreement(judge[0], rgb, asked(s))
    assert a.images == 300 and min(a.thing, a.colour, a.place, a.size, a.time, a.both) > 0.95 and a.everything > 0.9
    large = prompt_agreement(judge[0], book.render(s[:100], 128)[0], asked(s[:100]))
    assert large.images == 100 and min(large.both, large.place, large.time) > 0.93, "large pictures are judged too"


def test_what_was_not_asked_for_is_not_judged(judge, real):
    s, rgb = real
    nothing, half = np.full(300, UNSAID), np.arange(300) < 150
    a = prompt_agreement(judge[0], rgb, asked(s, size=nothing, place=nothing, colour=np.where(half, s.colour, UNSAID)))
    assert a.size is a.place is None and a.colour > 0.95 and a.both > 0.95 and a.everything > 0.9


def test_each_wrong_wish_shows_in_its_own_share(judge, real):
    s, rgb = real
    sizes = {"label": 10, "colour": 5, "size": 2, "place": 3, "time": 3}
    shares = {"label": "thing", "colour": "colour", "size": "size", "place": "place", "time": "time"}
    half = np.arange(300) % 2
    for name, count in sizes.items():
        a = prompt_agreement(judge[0], rgb, asked(s, **{name: (getattr(s, name) + half) % count}))
        for other, share in shares.items():
            assert (0.45 < getattr(a, share) < 0.55) if other == name else getattr(a, share) > 0.95, (name, other)
        assert a.everything < 0.55 and (a.both < 0.55) == (name in ("label", "colour"))


def test_large_pictures_are_averaged_exactly():
    rng = np.random.default_rng(1)
    rgb = rng.integers(0, 256, (2, 128, 128, 3), np.uint8)
    wanted = rgb.reshape(2, 64, 2, 64, 2, 3).astype(float).mean((2, 4))
    assert np.abs(shrunk(rgb) - wanted).max() <= 0.5 and shrunk(rgb).dtype == np.uint8
    assert np.array_equal(shrunk(rgb[:, ::2, ::2]), rgb[:, ::2, ::2])
    for shape in ((2, 96, 96, 3), (2, 128, 64, 3), (2, 32, 32, 3), (128, 128, 3)):
        with pytest.raises(ValueError, match="rgb"):
            shrunk(np.zeros(shape, np.uint8))


def test_every_image_needs_a_request(judge, real):
    s, rgb = real
    for pictures, count in ((rgb[:3], 2), (rgb[:0], 0)):
        with pytest.raises(ValueError, match="requests"):
            prompt_agreement(judge[0], pictures, asked(s[:count]))
