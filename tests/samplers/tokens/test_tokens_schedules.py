"""Schedules: permutations of the grid, nothing looked at before it is written, steps by formula."""

import math

import numpy as np
import pytest
import torch
from fastar_nodes.samplers.tokens.cache_slots import serial_slots, window_slots
from fastar_nodes.samplers.tokens.looks import DeviceTable
from fastar_nodes.samplers.tokens.mulosd.drafting import draft_schedule
from fastar_nodes.samplers.tokens.par import ablation_schedule, par_schedule
from fastar_nodes.samplers.tokens.schedule import FedRow, Pass, Schedule, _stand_in, raster, schedule_table
from fastar_nodes.samplers.tokens.zipar import row_groups, zipar_schedule
from hypothesis import given
from hypothesis import strategies as st
from tokens_reference import decided_at
from tokens_reference import visible as visible_rows

grids = st.integers(1, 10)


@st.composite
def next_token(draw) -> Schedule:
    """Schedules for networks that predict the next cell."""
    grid = draw(grids)
    if draw(st.booleans()):
        return zipar_schedule(grid, draw(st.integers(1, 12)))
    if draw(st.booleans()):
        return ablation_schedule(grid, draw(st.integers(1, grid * grid)), True, draw(st.booleans()))
    m = draw(st.sampled_from([m for m in range(1, grid + 1) if grid % m == 0]))
    return ablation_schedule(grid, m * m, False, draw(st.booleans()))


@st.composite
def trained(draw) -> Schedule:
    """PAR's own schedules."""
    m = draw(st.integers(2, 4))
    return par_schedule(m * draw(st.integers(1, 4)), m * m, draw(st.booleans()))


@given(st.one_of(next_token(), trained()))
def test_every_cell_is_decided_once_and_the_picture_says_when(schedule):
    cells = [c for p in schedule.passes for c in p.cells]
    assert sorted(cells) == list(range(schedule.grid**2))
    for k, p in enumerate(schedule.passes):
        assert all(decided_at(schedule)[c] == k for c in p.cells)
        assert len(p.predicted_by) == len(p.cells)
    prefill = schedule.passes[0]
    assert not any(prefill.predicted_by) and not prefill.fed_rows, "the prefill predicts the first cells"
    assert [p.cfg_step for p in schedule.passes][:1] == [-1]


@given(st.one_of(next_token(), trained()))
def test_nothing_is_fed_before_it_is_known_or_visible_before_it_is_written(schedule):
    known, written = set(schedule.passes[0].cells), set()
    for p, visible in zip(schedule.passes[1:], visible_rows(schedule), strict=True):
        assert {row.cell for row in p.fed_rows if row.transition_token < 0} <= known
        places = {row.place for row in p.fed_rows}
        assert len(places) == len(p.fed_rows)
        written |= places
        for i, row in enumerate(p.fed_rows):
            visible_places = set(visible[i].nonzero()[0].tolist())
            assert row.place in visible_places and max(visible_places) <= row.last_visible
            assert visible_places == {place for place in written if place <= row.last_visible}
        known |= set(p.cells)


@given(next_token())
def test_the_row_before_a_cell_predicts_it_and_real_tokens_take_their_places_back(schedule):
    holds: dict[int, int] = {}
    known = set(schedule.passes[0].cells)
    for p in schedule.passes[1:]:
        assert [p.fed_rows[i].position + 1 for i in p.predicted_by] == list(p.cells)
        for row in p.fed_rows:
            assert row.position == row.place == row.last_visible, "places are cells, and rows are causal"
            assert row.is_stand_in == (row.cell != row.place)
            assert not row.is_stand_in or row.place not in known, "a stand-in only where there is no token yet"
            holds[row.place] = row.cell
        # Whatever was known before this pass is in its own place, but for what the last pass left to feed.
        assert all(holds[c] == c for c in known)
        known |= set(p.cells)


@given(st.integers(2, 4), st.integers(2, 5), st.booleans())
def test_pars_groups_predict_the_next_region_by_region(m, side, start):
    grid = m * side
    schedule = par_schedule(grid, m * m, start)

    def region(cell: int) -> tuple[int, int]:
        return cell // grid // side, cell % grid // side

    def within(cell: int) -> tuple[int, int]:
        return cell // grid % side, cell % side

    block = next(k for k, p in enumerate(schedule.passes) if any(row.transition_token >= 0 for row in p.fed_rows))
    transition_rows = [row for row in schedule.passes[block].fed_rows if row.transition_token >= 0]
    assert [row.transition_token for row in transition_rows] == list(range(m * m - 1))
    assert list(schedule.passes[block].fed_rows[1 - m * m :]) == transition_rows
    assert {row.position for row in transition_rows} == {-1}
    for p in schedule.passes[block:]:
        assert len({within(c) for c in p.cells}) == 1 and len({region(c) for c in p.cells}) == m * m
    for p in schedule.passes[block + 1 :]:
        assert [region(p.fed_rows[i].cell) for i in p.predicted_by] == [region(c) for c in p.cells]
        last = max(row.place for row in p.fed_rows)
        assert {row.last_visible for row in p.fed_rows} == {last}, "a group sees all of itself"
    # With the condition's slot as many as cells: the last group is never fed, and the transition tokens take its place.
    assert window_slots(schedule).count_without_padding == grid * grid - 1


@given(st.integers(1, 30), st.integers(1, 40))
def test_a_window_as_wide_as_a_row_is_the_raster(grid, more):
    wide = zipar_schedule(grid, grid + more - 1)
    assert wide.passes == raster(grid).passes
    assert [p.cells for p in raster(grid).passes] == [(c,) for c in range(grid * grid)]


@given(st.integers(2, 24), st.integers(1, 23))
def test_a_row_starts_when_the_row_above_is_a_window_ahead(grid, window):
    window = min(window, grid - 1)
    filled = [0] * grid
    for k, group in enumerate(row_groups(grid, window, grid)):
        before = list(filled)
        for c in group:
            row, column = divmod(c, grid)
            assert filled[row] == column, "rows grow from the left"
            needed = grid if row == 1 else min(window + column, grid)  # the first row is never overlapped
            assert row == 0 or before[row - 1] >= needed, (k, row, column)
            filled[row] += 1
    assert filled == [grid] * grid


@pytest.mark.parametrize(
    ("grid", "window", "passes"),
    [(16, 3, 74), (16, 8, 144), (24, 4, 136), (24, 12, 312), (24, 16, 400), (32, 4, 184), (32, 16, 544)],
)
def test_zipars_passes(grid, window, passes):
    assert len(zipar_schedule(grid, window).passes) == passes == grid + (grid - 2) * window + grid
    assert max(len(p.fed_rows) for p in zipar_schedule(grid, window).passes) <= math.ceil(grid / window) + 1


@pytest.mark.parametrize(
    ("grid", "n", "passes"), [(24, 4, 147), (24, 16, 51), (16, 4, 67), (16, 16, 31), (8, 4, 19), (8, 16, 19)]
)
def test_pars_passes(grid, n, passes):
    """n + (G * G - n) / n; the paper's table says 40 where this and the authors' code say 51."""
    assert len(par_schedule(grid, n).passes) == passes == n + (grid * grid - n) // n
    assert len(par_schedule(grid, n, sequential_start=False).passes) == 1 + (grid * grid - n) // n
    for adjacent in (False, True):
        assert len(ablation_schedule(grid, n, adjacent, True).passes) == passes
        assert len(ablation_schedule(grid, n, adjacent, False).passes) == passes - n + 1


def test_guidance_counts_as_published():
    assert [p.cfg_step for p in raster(3).passes] == [-1, 0, 1, 2, 3, 4, 5, 6, 7]
    assert [p.cfg_step for p in par_schedule(4, 4).passes] == [-1, 0, 1, 2, 0, 4, 8]
    assert [p.cfg_step for p in par_schedule(4, 4, False).passes] == [-1, 0, 4, 8]
    assert [p.cfg_step for p in ablation_schedule(4, 4, True, False).passes] == [-1, 0, 4, 8]
    # After the first row: tokens decided since, 1, 2, 1 + 1 ... a pass.
    assert [p.cfg_step for p in zipar_schedule(4, 2).passes] == [-1, 0, 1, 2, 0, 1, 2, 4, 6, 8, 10, 11]


def test_a_stand_in_is_from_the_row_above_or_the_nearest_of_all():
    for position, decided, wanted in (
        (5, {0, 2}, 0),  # the first of two at one distance
        (9, {4, 8}, 4),  # in the row above, though a neighbour is nearer
        (9, {7, 4, 8}, 4),
        (9, {3, 8}, 8),
        (2, {0, 7}, 7),  # no row above
        (15, {0, 3}, 3),
    ):
        assert _stand_in(position, decided, 4) == wanted, (position, decided)


def test_known_cells_belong_to_no_pass():
    """One row of three is known; the first pass is empty."""
    assert decided_at(draft_schedule(3, 0, 1, 2, 0)).tolist() == [-1, -1, -1, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("grid", [2, 5, 96])
def test_a_raster_schedule_needs_no_mask_and_no_more_memory_than_its_cells(grid):
    """A mask of all rows and slots would take 85 MB at 96 x 96; the loaders allow 128 x 128."""
    count = grid * grid
    schedule = raster(grid)
    slots = serial_slots(schedule)
    values = [*vars(schedule_table(schedule)).values(), *vars(slots).values()]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    assert len(arrays) > 10 and max(array.size for array in arrays) <= count + 2
    on_device = DeviceTable(schedule, slots, 3, torch.device("cpu"))
    for k in (*range(min(4, count)), count // 2, count - 1):
        rows, _ = on_device.pass_rows(k)
        assert rows.mask is None and rows.cache_end == 3 + k
        fed = [k - 1] if k else []
        assert rows.cell.tolist() == rows.position.tolist() == fed
        assert rows.cache_slot.tolist() == [3 + cell for cell in fed]


def test_one_row_behind_slots_that_are_not_written_has_a_mask():
    """Cell 0 is fed at position 2 before the slots 0 and 1 are written."""
    ahead_of_others = FedRow(position=2, place=2, last_visible=2, cell=0)
    passes = (Pass(cells=(0,), predicted_by=(0,)), Pass(cells=(3,), predicted_by=(0,), fed_rows=(ahead_of_others,)))
    schedule = Schedule(2, passes)
    rows, _ = DeviceTable(schedule, window_slots(schedule), 1, torch.device("cpu")).pass_rows(1)
    assert rows.mask.int().tolist() == [[1, 0, 0, 0, 1]] and rows.cache_end == 5, "a slot of its own"
