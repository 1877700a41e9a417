"""Contact sheets and comparison grids: geometry, order, numbers and errors."""

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports import drawing
from fastar_nodes.reports import grid as p
from fastar_nodes.reports.record import Report
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


@given(n=st.integers(1, 9), columns=st.integers(0, 5), gap=st.integers(0, 3))
@settings(max_examples=40)
def test_a_sheet_holds_every_picture_at_its_place(n, columns, gap):
    batch = np.random.default_rng(n).integers(0, 256, (n, 3, 5, 3), dtype=np.uint8)
    sheet = p.contact_sheet(batch, columns, gap)
    across = min(n, columns) if columns else int(np.ceil(np.sqrt(n)))
    down = -(-n // across)
    assert sheet.shape == (down * (3 + gap) - gap, across * (5 + gap) - gap, 3)
    for i in range(n):
        y, x = i // across * (3 + gap), i % across * (5 + gap)
        assert (sheet[y : y + 3, x : x + 5] == batch[i]).all()


def test_cells_stand_in_a_row_and_are_equally_wide():
    grid = p.compare_grid([flat(RED), flat(GREEN), flat(BLUE)], ["a", "b", "c"], [None] * 3)
    boxes = [where(grid, colour) for colour in (RED, GREEN, BLUE)]
    assert all(box[:2] == boxes[0][:2] for box in boxes)  # one height
    widths = {right - left for *_, left, right in boxes}
    assert widths == {384} and boxes[0][1] - boxes[0][0] == 384  # 64 px, enlarged six times
    assert boxes[1][2] - boxes[0][2] == boxes[2][2] - boxes[1][2]
    assert grid.dtype == np.uint8 and grid.shape[1] == boxes[2][3] + boxes[0][2]  # the same margin left and right
    assert grid[0, 0].max() < 40  # a dark canvas


def test_the_baseline_is_first_and_marked():
    args = [flat(RED), flat(GREEN)], ["a", "b"]
    reports = [report("a", 4.0), report("b", 1.0)]
    first, second = (p.compare_grid(*args, reports, baseline=b) for b in (0, 1))
    assert where(first, RED)[2] < where(first, GREEN)[2]
    assert where(second, GREEN)[2] < where(second, RED)[2]
    edge = np.array(p.Ink.ACCENT)
    (frame,) = {y for y in range(200) if (first[y, 30:200] == edge).all()}
    assert not (first[frame, -200:-30] == edge).any()
    unmarked = p.compare_grid(*args, [None, None])
    assert not (unmarked == edge).all(-1).any()


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
    assert (bottom - top, right - left) == (700, 500)  # large images are not touched
    assert where(grid, GREEN)[1] - where(grid, GREEN)[0] == 512  # twice as large is closer to 400
    assert where(grid, BLUE)[0] == top > where(grid, RED)[0] == where(grid, GREEN)[0]  # two rows, aligned at the top


def _ink(grid: np.ndarray) -> int:
    """Pixels of bright text."""
    return int((grid.min(-1) > 150).sum())


def test_numbers_appear_only_where_known():
    whole = report(transformer_passes=32, head_calls=3200, accepted=3, rejected=1)
    some = report(transformer_passes=32)
    bare, some, full = (p.compare_grid([flat(RED)], ["a"], [told]) for told in (None, some, whole))
    assert bare.shape[0] < some.shape[0] < full.shape[0]
    assert _ink(bare) < _ink(some) < _ink(full)
    lines = p._numbers(whole, report(seconds=5.0))
    names = ("passes", "diffusion calls", "drafts accepted", "seconds", "speed-up")
    values = ("32", "3,200", "75 %", "2.00", "about 2.50x")
    assert lines == list(zip(names, values, strict=True))
    assert p._numbers(report(), None) == [("seconds", "2.00")]

    cached = report(transformer_passes=32, transformer_tokens=2808, cached_tokens=1074)
    plain = report(transformer_passes=32, transformer_tokens=6108)
    assert ("computed tokens", "46 %") in p._numbers(cached, plain)
    assert ("computed tokens", "2,808") in p._numbers(cached, None)
    assert "computed tokens" not in dict(p._numbers(plain, cached))


def test_the_result_stands_above_its_cells():
    """Larger than all other text, and in smaller letters, then in two lines, if it is long."""
    plain, fast = report("llamagen", transformer_passes=256), report("llamagen", transformer_passes=57)
    cells, labels = [flat(RED), flat(RED)], ["one by one", "parallel"]
    without = p.compare_grid(cells, labels, [plain, fast], baseline=[None, None])
    told = p.compare_grid(cells, labels, [plain, fast])
    large = p._Sheet(2, 384, p._text_scale(2, 1, 1, 384), "")._large("57 passes instead of 256")
    assert where(told, RED)[0] - where(without, RED)[0] == large.height > p.line_height(large.size) > 0
    assert _ink(told[: large.height]) > _ink(without[: large.height])

    sheet = p._Sheet(2, 512, 1.0, "")
    short, long, longer = (sheet._large(" ".join(["passes"] * words)) for words in (3, 7, 30))
    assert (short.size, len(short.lines)) == (p._HEADLINE, 1)
    assert p._LEAST_HEADLINE <= long.size < p._HEADLINE and len(long.lines) == 1
    assert (longer.size, len(longer.lines)) == (p._LEAST_HEADLINE, 2)
    assert sheet._large("") == ([], 0, 0)


def test_long_labels_wrap_and_are_shortened():
    words = "a really long label that goes on and on until it cannot possibly fit into two lines of one narrow cell"
    short, long = (p.compare_grid([flat(RED)], [text], [None]) for text in ("short", words))
    label = round(p._LABEL * p._text_scale(1, 1, 1, 384))
    assert long.shape[1] == short.shape[1] and long.shape[0] == short.shape[0] + p.line_height(label)
    lines = p.wrap(words, 18, 380, 2)
    assert len(lines) == 2 and lines[1].endswith("...") and all(p.text_width(t, 18) <= 380 for t in lines)
    assert p.wrap("x" * 500, 18, 380, 2)[0].endswith("...")
    titled = p.compare_grid([flat(RED)], ["short"], [None], title="cat, seed 7")
    assert titled.shape[0] > short.shape[0]


def test_more_images_than_a_sheet_holds():
    with pytest.raises(UserError, match="^images: "):
        p.compare_grid([flat(RED)] * 300, ["x"] * 300, [None] * 300, 1)


@pytest.mark.parametrize("shape", [(300, 2), (3000, 2), (2, 3000), (100_000, 1), (1, 100_000), (2200, 2200)])
@pytest.mark.fast_cases(3)
def test_elongated_and_large_pictures_are_fitted(shape) -> None:
    out = p.compare_grid([flat(RED, 1, *shape), flat(BLUE)], ["a", "b"], [None, None])
    assert max(out.shape[:2]) <= drawing.LONGEST and (out == np.array(BLUE)).all(-1).any()
    top, bottom, left, right = where(out, RED)
    assert max(bottom - top, right - left) <= 4096
    assert shape[0] != 300 or (bottom - top, right - left) == (5 * 300, 5 * 2), "both sides by the same integer"


@pytest.mark.slow
@pytest.mark.parametrize(("cells", "columns"), [(60, 60), (26, 1), (60, 0)])
def test_many_cells_are_reduced_to_fit(cells: int, columns: int) -> None:
    colours = [(i, 255 - i, 7) for i in range(cells)]
    out = p.compare_grid([flat(colour) for colour in colours], ["x"] * cells, [None] * cells, columns)
    assert max(out.shape[:2]) <= drawing.LONGEST
    assert {*colours} <= {tuple(c) for c in np.unique(out.reshape(-1, 3), axis=0).tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x" * 1_000_000, "x " * 500_000, "\u200b" * 100_000])
def test_endless_labels_are_shortened(text: str) -> None:
    out = p.compare_grid([flat(RED)], [text], [None], title=text)
    assert out.shape[1] < 1000
    assert drawing.shorten(text, 15, 200).endswith("...") and len(drawing.shorten(text, 15, 200)) <= 1003


def test_images_are_enlarged_smoothly():
    image = np.zeros((2, 2, 3), np.uint8)
    image[0, 0] = 255
    assert drawing.resize(image, 2, 2) is image
    for width, height in ((6, 4), (6, 5), (5, 6), (3, 3)):
        resized = drawing.resize(image, width, height)
        assert resized.shape == (height, width, 3)
        assert len(np.unique(resized)) > 2


def test_only_cells_that_others_are_compared_with_are_tagged():
    """A lonely cell that refers to itself is drawn as one without a baseline."""
    reports = [Report("mar", "tiny", {}, 7, 1, "cpu", seconds) for seconds in (4.0, 2.0)]
    images = [np.zeros((1, 8, 8, 3), np.uint8)] * 2
    alone, none = (p.compare_grid(images, ["a", "b"], reports, baseline=b) for b in ([0, 1], [None, None]))
    assert np.array_equal(alone, none)
    together = p.compare_grid(images, ["a", "b"], reports, baseline=[0, 0])
    assert together.shape != none.shape or not np.array_equal(together, none)
