"""The picture book: a pure function of (seed, index), the same scene at every resolution, objects at their places."""

import numpy as np
import pytest
from fastar_nodes.lab.training import picture_book as book
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(0, 10**6), st.integers(1, 9))
def test_a_picture_does_not_depend_on_its_batch(seed, start, count):
    together = book.scenes(seed, count, start)
    rgb, mask = book.render(together, 32)
    i = count - 1
    alone = book.scenes(seed, 1, start + i)
    one, one_mask = book.render(alone, 32)
    assert together[i : i + 1].captions() == alone.captions()
    assert np.array_equal(rgb[i], one[0]) and np.array_equal(mask[i], one_mask[0])


def test_every_parameter_takes_all_its_values_evenly():
    s = book.scenes(4, 20_000)
    for field, n in (("label", 10), ("place", 3), ("size", 2), ("parts", 3)):
        share = np.bincount(getattr(s, field), minlength=n) / len(s)
        # 6 standard errors of a share of 1/n.
        assert np.abs(share - 1 / n).max() < 6 * np.sqrt(1 / n * (1 - 1 / n) / len(s)), field
    others = s.label != 0
    assert np.abs(np.bincount(s.colour[others]) / others.sum() - 1 / len(book.COLOURS)).max() < 0.02
    assert set(s.time[~others]) == {1}, "a sunset is at sunset"
    assert {book.COLOURS[c] for c in s.colour[~others]} == {"red", "yellow"}


@pytest.mark.parametrize("label", range(10), ids=book.LABELS)
def test_resolutions_show_the_same_scene(label):
    s = book.scenes(9, 6, labels=[label] * 6)
    small, _ = book.render(s, 64)
    for factor in (2, 4):
        large, _ = book.render(s, 64 * factor)
        shrunk = large.reshape(6, 64, factor, 64, factor, 3).mean((2, 4))
        assert np.abs(shrunk - small).mean() < 2.5, "of 255"


@pytest.mark.parametrize("label", range(10), ids=book.LABELS)
def test_the_thing_is_there_in_its_colour_and_place(label):
    s = book.scenes(5, 60, labels=[label] * 60)
    rgb, mask = book.render(s, 64)
    cover = mask / 255.0
    share = cover.mean((1, 2))
    assert 0.03 < share.min() and share.max() < 0.5
    centre = (cover * ((np.arange(64) + 0.5) / 32 - 1)).sum((1, 2)) / cover.sum((1, 2))
    assert np.corrcoef(centre, s.x)[0, 1] > 0.9
    # The object's colour covers a part of it: within 40 of 255 in every channel.
    ink = (book.RGB[s.colour] * 255)[:, None, None]
    near = (np.abs(rgb - ink).max(-1) < 40) & (mask > 200)
    assert (near.sum((1, 2)) / (mask > 200).sum((1, 2))).min() > 0.12
