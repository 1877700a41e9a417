"""Quality figures: exact values where possible, and sensitivity of the committed judge."""

import dataclasses

import numpy as np
import pytest
from fastar_nodes.tools.files import checkpoint
from fastar_nodes.tools.training import picture_book as book
from fastar_nodes.tools.training.captions import SAID, UNSAID, Wishes
from fastar_nodes.tools.training.judge import load_judge, read, redraw_error
from fastar_nodes.tools.training.quality import figures, prompt_agreement, shrunk

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
    reference = read(judge[0], book.render(book.scenes(79, 300))[0]).features
    whole, broken = (figures(*judge, x, s.label, reference) for x in (rgb, torn))
    assert all(broken.shares[name] < whole.shares[name] - 0.25 for name in ("scene", "whole"))
    assert broken.frechet > 2 * whole.frechet


def asked(s: book.Scenes, **changes: np.ndarray) -> Wishes:
    return Wishes(**{name: changes.get(name, getattr(s, name)) for name in SAID})


def test_real_pictures_agree_with_their_prompts(judge, real):
    s, rgb = real
    found = prompt_agreement(read(judge[0], rgb).scenes, asked(s))
    assert list(found) == ["thing", "colour", "both", "place", "size", "time", "all"]
    assert min(found.values()) > 0.9 and min(found[name] for name in list(found)[:-1]) > 0.95
    large = prompt_agreement(read(judge[0], shrunk(book.render(s[:100], 128)[0])).scenes, asked(s[:100]))
    assert min(large[name] for name in ("both", "place", "time")) > 0.93, "large images are judged too"


def test_shares_are_of_the_stated_parameters(real):
    s, _ = real
    nothing, half = np.full(300, UNSAID), np.arange(300) < 150
    found = prompt_agreement(s, asked(s, size=nothing, place=nothing, colour=np.where(half, s.colour, UNSAID)))
    assert found == dict(thing=1, colour=1, both=1, place=None, size=None, time=1, all=1)
    sizes = {"label": 10, "colour": 5, "size": 2, "place": 3, "time": 3}
    for name, count in sizes.items():  # every second one is wrong
        found = prompt_agreement(s, asked(s, **{name: (getattr(s, name) + np.arange(300) % 2) % count}))
        wrong = {"thing" if name == "label" else name, "all"} | ({"both"} if name in ("label", "colour") else set())
        assert found == {share: 0.5 if share in wrong else 1 for share in found}


def test_large_pictures_are_averaged_exactly():
    rng = np.random.default_rng(1)
    rgb = rng.integers(0, 256, (2, 128, 128, 3), np.uint8)
    wanted = rgb.reshape(2, 64, 2, 64, 2, 3).astype(float).mean((2, 4))
    assert np.abs(shrunk(rgb) - wanted).max() <= 0.5 and shrunk(rgb).dtype == np.uint8
    assert np.array_equal(shrunk(rgb[:, ::2, ::2]), rgb[:, ::2, ::2])
    for shape in ((2, 96, 96, 3), (2, 128, 64, 3), (2, 32, 32, 3), (128, 128, 3)):
        with pytest.raises(ValueError, match="rgb"):
            shrunk(np.zeros(shape, np.uint8))
