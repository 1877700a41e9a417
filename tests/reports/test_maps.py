"""Token maps: colours, legends, numbers and errors."""

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports import maps as p
from fastar_nodes.reports.record import ACCEPTED, EXPANDED, GIVEN, PLAIN, REDONE, REJECTED, Report


def mapped(**maps) -> Report:
    out = Report("fasthybrid", "tiny", {}, 7, 1, "cpu", 2.0)
    out.maps.update(maps)
    return out


# Blue, orange, vermillion of the published palette.
OKABE_ITO = {ACCEPTED: (0, 114, 178), REDONE: (230, 159, 0), REJECTED: (213, 94, 0)}


def centres(picture) -> list[tuple[int, ...]]:
    """Colours of a map of 2 x 2 cells of 32 pixels."""
    return [tuple(picture[y, x].tolist()) for y in (16, 48) for x in (16, 48)]


def ramp(*places: float) -> list[tuple[int, ...]]:
    return [tuple(colour) for colour in p.ramp(np.array(places)).tolist()]


def test_outcome_colours():
    grid = np.array([[[ACCEPTED, REDONE], [GIVEN, REJECTED]]], np.uint8)
    (picture,) = p.token_map(mapped(outcome=grid), "outcome", size=64)
    assert picture.shape[1] == 64 and picture.shape[0] > 96
    found = {int(grid[0, y, x]): tuple(picture[32 * y + 16, 32 * x + 16]) for y in range(2) for x in range(2)}
    assert {value: found[value] for value in OKABE_ITO} == OKABE_ITO
    assert len(set(found.values())) == 4


def test_the_backdrop_shines_through_without_its_own_hue():
    grid = np.full((1, 2, 2), ACCEPTED, np.uint8)
    backdrop = np.zeros((1, 64, 64, 3), np.uint8)
    backdrop[:, :, 32:] = (255, 0, 0)
    r = mapped(outcome=grid)
    none, some, full = (p.token_map(r, "outcome", backdrop, opacity, 64)[0] for opacity in (0.0, 0.6, 1.0))
    assert tuple(none[16, 16]) == (0, 0, 0) and tuple(none[16, 48]) == (255, 0, 0)
    assert tuple(full[16, 16]) == tuple(full[16, 48]) == (0, 114, 178)
    left, right = some[16, 16].astype(int), some[16, 48].astype(int)
    assert right.sum() > left.sum() and np.ptp(right - left) <= 1  # lighter, not redder


@pytest.mark.parametrize("value", [ACCEPTED, REDONE, REJECTED, EXPANDED])
def test_one_outcome_alone_and_its_share(value):
    name, colour = p.OUTCOMES[value]
    assert colour == OKABE_ITO.get(value, OKABE_ITO[REDONE])  # what is expanded is drawn like what is redone
    grid = np.array([[[value, value], [PLAIN, GIVEN]]], np.uint8)
    (picture,) = p.token_map(mapped(outcome=grid), name, size=64)
    assert tuple(picture[16, 16]) == tuple(picture[16, 48]) == colour
    assert all(tuple(picture[y, x]) == p.Ink.BACKGROUND for y, x in ((48, 16), (48, 48)))
    rows = [(f"{name} 2 (50 %)", colour), ("of 4 tokens", p.Ink.BACKGROUND)]
    assert p._colour_outcomes(name, grid[0], 0, 7)[2] == rows
    legend = [text for text, _ in p._colour_outcomes("outcome", grid[0], 0, 7)[2]]
    assert legend == [f"{name} 2 (50 %)", "plain 1 (25 %)", "given 1 (25 %)"]


def test_drafts_of_earlier_versions_are_drawn_as_plain():
    """They had the value 3."""
    now = np.array([[[ACCEPTED, PLAIN], [PLAIN, GIVEN]]], np.uint8)
    earlier = np.array([[[ACCEPTED, 3], [PLAIN, GIVEN]]], np.uint8)
    for what in ("outcome", "accepted"):
        old, new = (p.token_map(mapped(outcome=grid), what, size=64) for grid in (earlier, now))
        assert np.array_equal(old, new)


def test_steps_run_along_the_ramp():
    """Its colours are in tests/recorded_values.json."""
    grid = np.array([[[0, 1], [2, 3]]], np.int32)
    (picture,) = p.token_map(mapped(step=grid), "fixed at step", size=64)
    assert centres(picture) == ramp(0, 1 / 3, 2 / 3, 1)
    (numbered,) = p.token_map(mapped(step=grid), "order", size=64)
    changed = (numbered != picture).any(-1)
    assert changed[:64].any() and not changed[64:].any()  # numbers in the map, the same legend


def test_given_tokens_are_blank_in_every_map():
    blank = p.OUTCOMES[GIVEN][1]
    # Nearly black, and no other grey.
    assert max(blank) < 50 and np.abs(np.subtract(blank, p.OUTCOMES[PLAIN][1])).min() > 20
    step = np.array([[[-1, 4], [-1, 9]]], np.int32)
    (picture,) = p.token_map(mapped(step=step), "fixed at step", size=64)
    # The ramp runs over the tokens that were decided, however late the first of them.
    assert centres(picture) == [blank, ramp(0)[0], blank, ramp(1)[0]]
    (numbered,) = p.token_map(mapped(step=step), "order", size=64)
    changed = (numbered != picture).any(-1)
    assert changed[:64, 33:].any() and not changed[:, :32].any()  # no number on what was given
    (outcome,) = p.token_map(mapped(outcome=np.array([[[GIVEN, ACCEPTED]]], np.uint8)), "outcome", size=64)
    assert tuple(outcome[16, 16]) == blank and tuple(outcome[16, 48]) == OKABE_ITO[ACCEPTED]
    nothing = p.token_map(mapped(step=np.full((2, 2, 2), -1, np.int32)), "fixed at step", size=64)
    assert (nothing[:, 16, 16] == blank).all()


@pytest.fixture
def ends(monkeypatch):
    """Texts at the ends of the ramps that are drawn."""
    found, strip = [], p._ramp_strip
    monkeypatch.setattr(p, "_ramp_strip", lambda *a: found.append(a[2:]) or strip(*a))
    return found


def test_cached_is_a_ramp_from_seldom_to_often(ends):
    cached = np.array([[[0, 3], [6, 12]]], np.int32)
    (picture,) = p.token_map(mapped(cached=cached), "cached", size=64)
    assert centres(picture) == ramp(0, 0.25, 0.5, 1)
    never = p.token_map(mapped(cached=np.zeros((2, 2, 2), np.int32)), "cached", size=64)
    assert (never[:, 16, 16] == p.ramp(np.array(0.0))).all()
    assert ends == [("cached 0 times", "12"), ("cached 0 times", "0"), ("cached 0 times", "0")]


def test_every_image_of_a_batch_has_its_own_backdrop():
    grid = np.full((3, 2, 2), PLAIN, np.uint8)
    backdrop = np.stack([np.full((64, 64, 3), level, np.uint8) for level in (10, 120, 240)])
    maps = p.token_map(mapped(outcome=grid), "outcome", backdrop, 0.0, 64)
    assert [tuple(shown[16, 16]) for shown in maps] == [(10, 10, 10), (120, 120, 120), (240, 240, 240)]


STEP = np.zeros((2, 2, 2), np.int32)


MISTAKES = [
    *(("what", what, {}) for what in ("outcome", "cached", "islands", "colourful")),
    ("image", "order", {"image": np.zeros((3, 64, 64, 3), np.uint8)}),
]


@pytest.mark.parametrize("field, what, options", MISTAKES)
def test_map_errors(field, what, options):
    with pytest.raises(UserError, match=f"^{field}: "):
        p.token_map(mapped(step=STEP), what, **options)


def test_a_report_without_maps_and_too_many_large_maps():
    for field, r in (("what", mapped()), ("size", mapped(step=np.zeros((64, 2, 2), np.int32)))):
        with pytest.raises(UserError, match=f"^{field}: "):
            p.token_map(r, "fixed at step", size=4096)


def corner(picture: np.ndarray, y: int, x: int, cell: int = 32) -> tuple[int, ...]:
    """Colour near the lower right of a cell, beside any number."""
    return tuple(picture[cell * y + cell - 4, cell * x + cell - 4].tolist())


def test_every_island_has_a_hue_and_its_number():
    grid = np.zeros((1, 4, 4), np.int32)
    grid[0, 0, :2], grid[0, 2:, 3], grid[0, 3, 0] = 1, 2, 3
    (picture,) = p.token_map(mapped(islands=grid), "islands", size=128)
    found = [corner(picture, *at) for at in ((0, 0), (2, 3), (3, 0))]
    assert found == [tuple(c) for c in p.hues(np.array([1, 2, 3])).tolist()] and len(set(found)) == 3
    assert corner(picture, 0, 1) == found[0] and corner(picture, 3, 3) == found[1]
    assert corner(picture, 1, 1) == p.Ink.BACKGROUND
    # A number on exactly one cell of each island, and on no other.
    cells = picture[:128].reshape(4, 32, 4, 32, 3)[:, 2:30, :, 2:30]
    bright = (cells.min(-1) > 225).any((1, 3))
    assert all(bright[grid[0] == n].sum() == 1 for n in (1, 2, 3)) and not bright[grid[0] == 0].any()
    assert p._colour_islands(grid[0], 0, 3)[2] == [("3 islands, 5 of 16 tokens (31 %)", p.Ink.BACKGROUND)]
    assert p._colour_islands(grid[0] * 0, 0, 0)[2] == [("0 islands, 0 of 16 tokens (0 %)", p.Ink.BACKGROUND)]


def test_waves_run_from_dark_to_light_and_leave_the_rest_blank(ends):
    (picture,) = p.token_map(mapped(waves=np.array([[[-1, 0], [1, 4]]], np.int32)), "waves", size=64)
    assert centres(picture) == [p.OUTCOMES[GIVEN][1], *ramp(0, 0.25, 1)]
    p.token_map(mapped(waves=np.full((1, 2, 2), -1, np.int32)), "waves", size=64)
    assert ends == [("wave 1", "5"), ("no waves", "")]


def test_elongated_and_large_maps_are_bounded() -> None:
    tall = p.token_map(mapped(step=np.zeros((1, 900, 1), np.int32)), "fixed at step", size=64)
    assert tall.shape[1] <= 4096 + 100 and tall.shape[2] == 64
    assert p.token_map(mapped(step=np.zeros((1, 1, 900), np.int32)), "fixed at step", size=64).shape[1] < 100
