"""Maps of islands and waves: a hue and a number each, and what is in none steps back."""

from __future__ import annotations

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports import pictures as p
from fastar_nodes.reports.record import ACCEPTED, EXPANDED, GIVEN, REJECTED, Report


def mapped(**maps) -> Report:
    out = Report("mulosd", "tiny", {}, 7, 1, "cpu", 1.0)
    out.maps.update(maps)
    return out


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
    assert corner(picture, 1, 1) == p.BACKGROUND
    # A number on exactly one cell of each island, and on no other.
    cells = picture[:128].reshape(4, 32, 4, 32, 3)[:, 2:30, :, 2:30]
    bright = (cells.min(-1) > 225).any((1, 3))
    assert all(bright[grid[0] == n].sum() == 1 for n in (1, 2, 3)) and not bright[grid[0] == 0].any()
    assert p._island_swatches(grid[0])[2] == [("3 islands, 5 of 16 tokens (31 %)", p.BACKGROUND)]
    assert p._island_swatches(grid[0] * 0)[2] == [("0 islands, 0 of 16 tokens (0 %)", p.BACKGROUND)]


def test_many_islands_are_told_apart():
    colours = p.hues(np.arange(1, 13)).astype(int)
    apart = [np.abs(a - b).sum() for i, a in enumerate(colours) for b in colours[:i]]
    assert min(apart) > 30 and all(np.abs(a - b).sum() > 90 for a, b in zip(colours, colours[1:], strict=False))


def test_waves_run_from_dark_to_light_and_leave_the_rest_blank(monkeypatch):
    told = []
    strip = p._ramp_strip
    monkeypatch.setattr(
        p, "_ramp_strip", lambda w, h, left, right: told.append((left, right)) or strip(w, h, left, right)
    )
    (picture,) = p.token_map(mapped(waves=np.array([[[-1, 0], [1, 4]]], np.int32)), "waves", size=64)
    assert corner(picture, 0, 0) == p.OUTCOMES[GIVEN][1]
    assert [corner(picture, *at) for at in ((0, 1), (1, 0), (1, 1))] == [
        tuple(c) for c in p.ramp(np.array([0, 0.25, 1])).tolist()
    ]
    p.token_map(mapped(waves=np.full((1, 2, 2), -1, np.int32)), "waves", size=64)
    assert told == [("wave 1", "5"), ("no waves", "")]


def test_expanded_is_redones_colour():
    grid = np.array([[[ACCEPTED, REJECTED], [EXPANDED, EXPANDED]]], np.uint8)
    (picture,) = p.token_map(mapped(outcome=grid), "expanded", size=64)
    assert corner(picture, 1, 0) == (230, 159, 0) and corner(picture, 0, 0) == p.BACKGROUND
    assert [text for text, _ in p._swatches(grid[0], "outcome")[2]] == [
        "accepted 1 (25 %)",
        "rejected 1 (25 %)",
        "expanded 2 (50 %)",
    ]


def test_a_report_without_islands_says_so():
    with pytest.raises(UserError, match="no map for 'islands'; its maps: outcome"):
        p.token_map(mapped(outcome=np.zeros((1, 2, 2), np.uint8)), "islands")
