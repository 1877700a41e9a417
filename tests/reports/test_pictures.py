"""The grid's geometry and the maps' colours, pixel by pixel where it matters."""

from __future__ import annotations

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports import pictures as p
from fastar_nodes.reports.record import ACCEPTED, CACHED, DRAFTED, GIVEN, PLAIN, REDONE, REJECTED, Report
from hypothesis import given, settings
from hypothesis import strategies as st


def report(sampler="mar", seconds=2.0, images=1, **counts) -> Report:
    out = Report(sampler, "tiny", {}, 7, images, "cpu", seconds)
    out.add(**counts)
    return out


def flat(colour, n=1, h=64, w=64) -> np.ndarray:
    return np.full((n, h, w, 3), colour, np.uint8)


RED, GREEN, BLUE, WHITE = (200, 10, 10), (10, 200, 10), (10, 10, 200), (250, 250, 250)


def where(canvas: np.ndarray, colour) -> tuple[int, int, int, int]:
    """Bounding box (top, bottom, left, right), ends exclusive, of exactly this colour."""
    ys, xs = np.nonzero((canvas == np.array(colour)).all(-1))
    return ys.min(), ys.max() + 1, xs.min(), xs.max() + 1


# ------------------------------------------------------------------------------------------------ contact sheet


@given(n=st.integers(1, 9), columns=st.integers(0, 5), gap=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_sheet_holds_every_picture_at_its_place(n, columns, gap):
    batch = np.random.default_rng(n).integers(0, 256, (n, 3, 5, 3), dtype=np.uint8)
    sheet = p.contact_sheet(batch, columns, gap)
    across = min(n, columns) if columns else int(np.ceil(np.sqrt(n)))
    down = -(-n // across)
    assert sheet.shape == (down * (3 + gap) - gap, across * (5 + gap) - gap, 3)
    for i in range(n):
        y, x = i // across * (3 + gap), i % across * (5 + gap)
        assert (sheet[y : y + 3, x : x + 5] == batch[i]).all()


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((0, 4, 4, 3), np.uint8),
        np.zeros((1, 4, 4, 3)),
        np.zeros((4, 4, 3), np.uint8),
        np.zeros((1, 4, 4, 4), np.uint8),
        [1, 2],
    ],
)
def test_what_is_no_picture_is_refused(bad):
    with pytest.raises(UserError, match="^pictures: it holds"):
        p.contact_sheet(bad, 1)


# ------------------------------------------------------------------------------------------------ grid


def test_cells_stand_in_a_row_and_are_equally_wide():
    grid = p.compare_grid([flat(RED), flat(GREEN), flat(BLUE)], ["a", "b", "c"], [None] * 3)
    boxes = [where(grid, colour) for colour in (RED, GREEN, BLUE)]
    assert all(box[:2] == boxes[0][:2] for box in boxes)  # one height
    widths = {right - left for *_, left, right in boxes}
    assert widths == {384} and boxes[0][1] - boxes[0][0] == 384  # 64 px, enlarged six times
    assert boxes[1][2] - boxes[0][2] == boxes[2][2] - boxes[1][2]
    assert grid.dtype == np.uint8 and grid.shape[1] == boxes[2][3] + boxes[0][2]  # the same margin left and right
    assert grid[0, 0].max() < 40  # a dark canvas


def test_small_pictures_stay_crisp():
    picture = np.random.default_rng(0).integers(60, 256, (1, 32, 32, 3), dtype=np.uint8)
    grid = p.compare_grid([picture], ["noise"], [None])
    factor = 11
    large = picture[0].repeat(factor, 0).repeat(factor, 1)
    starts = [
        (y, x)
        for y in range(20, 80)
        for x in range(20, 60)
        if (grid[y, x : x + 352] == large[0]).all() and (grid[y : y + 352, x : x + 352] == large).all()
    ]
    assert len(starts) == 1


def test_the_baseline_is_first_and_marked():
    args = [flat(RED), flat(GREEN)], ["a", "b"]
    reports = [report("a", 4.0), report("b", 1.0)]
    first, second = (p.compare_grid(*args, reports, baseline=b) for b in (0, 1))
    assert where(first, RED)[2] < where(first, GREEN)[2]
    assert where(second, GREEN)[2] < where(second, RED)[2]
    edge = np.array(p.ACCENT)
    assert (first[20, 30:200] == edge).all() and not (first[20, -200:-30] == edge).any()
    unmarked = p.compare_grid(*args, [None, None], marked=False)
    assert not (unmarked[20] == edge).all(-1).any()


def test_columns_and_rows():
    cells = [flat(c) for c in (RED, GREEN, BLUE)]
    column = p.compare_grid(cells, ["a", "b", "c"], [None] * 3, columns=1)
    assert where(column, RED)[1] < where(column, GREEN)[0] and where(column, RED)[2] == where(column, BLUE)[2]
    two = p.compare_grid(cells, ["a", "b", "c"], [None] * 3, columns=2)
    assert where(two, BLUE)[2] == where(two, RED)[2] and where(two, BLUE)[0] > where(two, GREEN)[1]
    many = p.compare_grid([flat(RED)] * 9, list("abcdefghi"), [None] * 9)
    assert many.shape[1] < 4 * 430 + 20  # at most four a row


def test_unequal_sizes_and_counts_fit():
    cells = [flat(RED, 5), flat(GREEN, 1, 256, 256), flat(BLUE, 2, 40, 90), flat(WHITE, 1, 700, 500)]
    grid = p.compare_grid(cells, ["a", "b", "c", "d"], [report(seconds=1.0), None, report("x", 3.0, accepted=1), None])
    top, bottom, left, right = where(grid, WHITE)
    assert (bottom - top, right - left) == (700, 500)  # large pictures are not touched
    assert where(grid, GREEN)[1] - where(grid, GREEN)[0] == 256
    assert {box[0] for box in (where(grid, c) for c in (RED, GREEN, BLUE, WHITE))} == {top}  # aligned at the top


def _ink(grid: np.ndarray) -> int:
    """Pixels of bright text."""
    return int((grid.min(-1) > 150).sum())


def test_numbers_appear_only_where_known():
    bare = p.compare_grid([flat(RED)], ["a"], [None])
    some = p.compare_grid([flat(RED)], ["a"], [report(transformer_passes=32)])
    full = p.compare_grid([flat(RED)], ["a"], [report(transformer_passes=32, head_calls=3200, accepted=3, rejected=1)])
    assert bare.shape[0] < some.shape[0] < full.shape[0]
    assert _ink(bare) < _ink(some) < _ink(full)
    line = round(p._BODY * 1.4)
    assert full.shape[0] - some.shape[0] == 2 * line
    lines = p._numbers(report(transformer_passes=32, head_calls=3200, accepted=3, rejected=1), report(seconds=5.0))
    assert lines == [
        ("speed-up", "2.50x"),
        ("seconds", "2.00"),
        ("transformer passes", "32"),
        ("head calls", "3,200"),
        ("acceptance", "75.0 %"),
    ]
    assert p._numbers(report(), None) == [("seconds", "2.00")]


def test_long_labels_wrap_and_are_shortened():
    words = "a really long label that goes on and on until it cannot possibly fit into two lines of one narrow cell"
    short, long = (p.compare_grid([flat(RED)], [text], [None]) for text in ("short", words))
    assert long.shape[1] == short.shape[1] and long.shape[0] == short.shape[0] + round(p._LABEL * 1.4)
    lines = p._wrap(words, p._LABEL, 380, 2)
    assert len(lines) == 2 and lines[1].endswith("...") and all(p._width(t, p._LABEL) <= 380 for t in lines)
    assert p._wrap("x" * 500, p._LABEL, 380, 2)[0].endswith("...")
    titled = p.compare_grid([flat(RED)], ["short"], [None], title="cat, seed 7")
    assert titled.shape[0] > short.shape[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (([], [], []), "nothing to compare"),
        (([flat(RED)], [], [None]), "0 labels"),
        (([flat(RED)], ["a"], []), "0 reports"),
        (([flat(RED)], ["a"], [None], 0, 1), "baseline: 1"),
        (([flat(RED).astype(float)], ["a"], [None]), "picture 1: it holds float64"),
    ],
)
def test_grid_errors(args, words):
    with pytest.raises(UserError, match=words):
        p.compare_grid(*args)


# ------------------------------------------------------------------------------------------------ token maps

OKABE_ITO = {  # blue, orange, sky blue, vermillion of the published palette
    ACCEPTED: (0, 114, 178),
    REDONE: (230, 159, 0),
    DRAFTED: (86, 180, 233),
    REJECTED: (213, 94, 0),
}


def mapped(**maps) -> Report:
    out = report("fasthybrid")
    out.maps.update(maps)
    return out


def test_outcome_colours():
    grid = np.array([[[ACCEPTED, REDONE], [DRAFTED, REJECTED], [CACHED, PLAIN]]], np.uint8)
    (picture,) = p.token_map(mapped(outcome=grid), "outcome", size=64)
    assert picture.shape[1] == 64 and picture.shape[0] > 96
    centres = {int(grid[0, y, x]): tuple(picture[32 * y + 16, 32 * x + 16]) for y in range(3) for x in range(2)}
    for value, colour in OKABE_ITO.items():
        assert centres[value] == colour
    grey = np.array([centres[CACHED], centres[PLAIN]], int)
    assert (np.ptp(grey, axis=1) < 10).all() and grey[0, 0] - grey[1, 0] > 60  # two greys, told apart
    assert len(set(centres.values())) == 6


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


def test_one_outcome_alone_and_its_share():
    grid = np.array([[[ACCEPTED, ACCEPTED], [ACCEPTED, REDONE]]], np.uint8)
    (accepted,) = p.token_map(mapped(outcome=grid), "accepted", size=64)
    (redone,) = p.token_map(mapped(outcome=grid), "redone", size=64)
    assert tuple(accepted[16, 16]) == (0, 114, 178) and tuple(accepted[48, 48]) == p.BACKGROUND
    assert tuple(redone[48, 48]) == (230, 159, 0) and tuple(redone[16, 16]) == p.BACKGROUND
    _, _, legend = p._swatches(grid[0], "accepted")
    assert legend[0] == ("accepted 3 (75 %)", (0, 114, 178))
    _, _, legend = p._swatches(grid[0], "outcome")
    assert [text for text, _ in legend] == ["accepted 3 (75 %)", "redone 1 (25 %)"]


def test_steps_run_from_dark_to_light_evenly():
    colours = p.ramp(np.linspace(0, 1, 64)).astype(float) / 255
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    lightness = 116 * np.cbrt(luminance) - 16
    steps = np.diff(lightness)
    assert (steps > 0).all() and steps.max() < 2.2 * steps.min()  # CIE lightness, another measure than the one built on
    grid = np.array([[[0, 1], [2, 3]]], np.int32)
    (picture,) = p.token_map(mapped(step=grid), "fixed at step", size=64)
    centres = [tuple(picture[y, x]) for y, x in ((16, 16), (16, 48), (48, 16), (48, 48))]
    assert centres == [tuple(c) for c in p.ramp(np.array([0, 1 / 3, 2 / 3, 1]))]
    assert (p.token_map(mapped(step=grid), "step", size=64)[0] == picture).all()
    (numbered,) = p.token_map(mapped(step=grid), "order", size=64)
    changed = (numbered != picture).any(-1)
    assert changed[:64].any() and not changed[64:].any()  # numbers in the map, the same legend


def test_given_tokens_are_blank_in_every_map():
    blank = p.OUTCOMES[GIVEN][1]
    assert (
        max(blank) < 50 and np.abs(np.subtract(blank, p.OUTCOMES[PLAIN][1])).min() > 20
    )  # nearly black, and no other grey
    step = np.array([[[-1, 4], [-1, 9]]], np.int32)
    (picture,) = p.token_map(mapped(step=step), "fixed at step", size=64)
    assert tuple(picture[16, 16]) == tuple(picture[48, 16]) == blank
    # The ramp runs over the tokens that were decided, however late the first of them.
    first, last = p.ramp(np.array([0.0, 1.0]))
    assert tuple(picture[16, 48]) == tuple(first) and tuple(picture[48, 48]) == tuple(last)
    (numbered,) = p.token_map(mapped(step=step), "order", size=64)
    changed = (numbered != picture).any(-1)
    assert changed[:64, 33:].any() and not changed[:, :32].any()  # no number on what was given
    (outcome,) = p.token_map(mapped(outcome=np.array([[[GIVEN, ACCEPTED]]], np.uint8)), "outcome", size=64)
    assert tuple(outcome[16, 16]) == blank and tuple(outcome[16, 48]) == OKABE_ITO[ACCEPTED]
    nothing = p.token_map(mapped(step=np.full((2, 2, 2), -1, np.int32)), "fixed at step", size=64)
    assert (nothing[:, 16, 16] == blank).all()


def test_cached_is_a_ramp_from_seldom_to_often(monkeypatch):
    told = []
    strip = p._ramp_strip
    monkeypatch.setattr(
        p, "_ramp_strip", lambda w, h, left, right: told.append((left, right)) or strip(w, h, left, right)
    )
    cached = np.array([[[0, 3], [6, 12]]], np.int32)
    (picture,) = p.token_map(mapped(cached=cached), "cached", size=64)
    centres = [tuple(picture[y, x]) for y, x in ((16, 16), (16, 48), (48, 16), (48, 48))]
    assert centres == [tuple(c) for c in p.ramp(np.array([0, 0.25, 0.5, 1]))]
    never = p.token_map(mapped(cached=np.zeros((2, 2, 2), np.int32)), "cached", size=64)
    assert (never[:, 16, 16] == p.ramp(np.array(0.0))).all()
    assert told == [("cached 0 times", "12"), ("cached 0 times", "0"), ("cached 0 times", "0")]
    with pytest.raises(UserError, match="no map for 'cached'; its maps: step"):
        p.token_map(mapped(step=cached), "cached")


@pytest.mark.parametrize(("what", "value"), [("rejected", REJECTED), ("drafted", DRAFTED)])
def test_rejected_and_drafted_alone(what, value):
    grid = np.array([[[value, ACCEPTED], [PLAIN, GIVEN]]], np.uint8)
    (picture,) = p.token_map(mapped(outcome=grid), what, size=64)
    assert tuple(picture[16, 16]) == OKABE_ITO[value]
    assert all(tuple(picture[y, x]) == p.BACKGROUND for y, x in ((16, 48), (48, 16), (48, 48)))
    assert p._swatches(grid[0], what)[2] == [(f"{what} 1 (25 %)", OKABE_ITO[value]), ("of 4 tokens", p.BACKGROUND)]


def test_the_menu_only_grows():
    assert p.WHAT[:8] == ("fixed at step", "outcome", "accepted", "redone", "order", "cached", "rejected", "drafted")


def test_grid_lines_are_thin():
    grid = np.full((1, 4, 4), ACCEPTED, np.uint8)
    (picture,) = p.token_map(mapped(outcome=grid), "outcome", size=64)
    other = (picture[:64] != np.array((0, 114, 178))).any(-1)
    assert list(np.flatnonzero(other[8])) == [16, 32, 48] and list(np.flatnonzero(other[:, 8])) == [16, 32, 48]


def test_a_batch_and_one_backdrop_for_all():
    grid = np.random.default_rng(0).integers(0, 3, (3, 5, 7)).astype(np.uint8)
    maps = p.token_map(mapped(outcome=grid), "outcome", flat(RED), size=210)
    assert maps.shape[0] == 3 and maps.shape[2] == 210 and maps.dtype == np.uint8
    assert maps.shape[1] > 150  # 210 * 5 / 7 and the legend


def test_an_old_pillow_draws_with_its_one_small_font(monkeypatch):
    scalable = p.ImageFont.load_default

    def old(*size):
        if size:
            raise TypeError("load_default() takes no arguments")
        return p.ImageFont.load_default_imagefont() if hasattr(p.ImageFont, "load_default_imagefont") else scalable()

    monkeypatch.setattr(p.ImageFont, "load_default", old)
    p._font.cache_clear()
    try:
        grid = p.compare_grid([flat(RED)], ["a rather long label " * 9], [report(head_calls=3)])
        assert where(grid, RED)[3] - where(grid, RED)[2] == 384 and _ink(grid) > 20
        maps = p.token_map(mapped(step=np.arange(4).reshape(1, 2, 2)), "order", size=64)
        assert maps.shape[2] == 64
    finally:
        p._font.cache_clear()


@pytest.mark.parametrize(
    ("r", "what", "options", "words"),
    [
        (mapped(step=np.zeros((1, 2, 2))), "outcome", {}, "no map for 'outcome'; its maps: step"),
        (report(), "fixed at step", {}, "none at all"),
        (mapped(), "colourful", {}, "'colourful' is no token map; there are fixed at step, outcome"),
        (mapped(step=np.zeros((2, 2, 2))), "step", {"image": flat(RED, 3)}, "holds 3 pictures, the report is of 2"),
        (mapped(step=np.zeros((1, 2, 2))), "step", {"opacity": 1.5}, "opacity: 1.5"),
        (mapped(step=np.zeros((1, 2, 2))), "step", {"opacity": float("nan")}, "opacity: nan"),
        (mapped(step=np.zeros((1, 2, 2))), "step", {"size": 8}, "size: 8"),
    ],
)
def test_map_errors(r, what, options, words):
    with pytest.raises(UserError, match=words):
        p.token_map(r, what, **options)
