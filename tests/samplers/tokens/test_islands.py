"""Geometry of local repair against plain loops, and acceptance against hand-made numbers."""

import numpy as np
import pytest
import torch
from fastar_nodes.networks.autoencoder import Codebook
from fastar_nodes.samplers.tokens.mulosd import islands as geometry
from fastar_nodes.samplers.tokens.mulosd import verification as judge
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from islands_reference import plain_expansion, plain_islands, plain_waves


def listed(numbers: np.ndarray, first: int) -> list[list[int]]:
    """Cells of every number of one grid."""
    last = int(numbers.max(initial=first - 1))
    return [np.flatnonzero(numbers.ravel() == n).tolist() for n in range(first, last + 1)]


grids = arrays.arrays(
    bool, st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), elements=st.booleans() | st.just(False)
)
radii, windows = st.integers(0, 4), st.none() | st.integers(1, 10)


@settings(max_examples=150)
@given(grids, radii, windows)
def test_equals_plain_loops_image_by_image(down, radius, window):
    region = geometry.expand(down, radius)
    numbered = geometry.find_islands(region)
    wave = geometry.waves_of_islands(numbered, reach=window or down.shape[2])
    behind = geometry.suffix(down)
    assert region.dtype == behind.dtype == bool and numbered.dtype == wave.dtype == np.int32
    for i in range(len(down)):
        hit = np.flatnonzero(down[i])
        assert np.flatnonzero(behind[i]).tolist() == list(range(hit[0] if len(hit) else down[i].size, down[i].size))
        cells = plain_expansion(down[i], radius) if down[i].any() else set()
        assert set(np.flatnonzero(region[i]).tolist()) == cells
        parts = plain_islands(cells, down.shape[2])
        assert listed(numbered[i], 1) == parts
        assert listed(wave[i], 0) == plain_waves(parts, down.shape[2], window)


def test_without_a_window_an_island_is_in_order_and_islands_go_on_together():
    """What the text of resample_window says of 0."""
    numbered = np.array([[[1, 1, 0, 2], [1, 1, 0, 2]]])
    assert geometry.waves_of_islands(numbered, reach=4).tolist() == [[[0, 1, -1, 0], [2, 3, -1, 1]]]


def test_a_window_lets_the_next_row_start_early():
    """The example of waves_of_islands."""
    numbered = np.array([[[1, 1, 1, 0], [1, 0, 1, 1]]], np.int32)
    assert geometry.waves_of_islands(numbered, reach=2).tolist() == [[[0, 1, 2, -1], [2, -1, 3, 4]]]


def test_a_long_winding_island_is_one():
    snake = np.ones((1, 31, 31), bool)
    snake[0, 1::2] = False
    snake[0, 1::4, -1] = snake[0, 3::4, 0] = True
    assert geometry.find_islands(snake).max() == 1
    assert np.array_equal(geometry.find_islands(snake[:, ::-1, ::-1]) > 0, snake[:, ::-1, ::-1])


def vectors(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30)
@given(st.integers(2, 40), st.data())
def test_neighbours_are_the_nearest(count, data):
    k = data.draw(st.integers(0, count - 1))
    codes = vectors(count, data.draw(st.integers(0, 99)))
    table = judge.nearest_codes(codes, k)
    assert table.dtype == torch.int32 and table.shape == (count, k + 1)
    distance = torch.cdist(codes.double(), codes.double())
    assert table[:, 0].tolist() == list(range(count))
    for row, near in enumerate(table.long()):
        assert len(set(near.tolist())) == k + 1
        assert torch.allclose(distance[row, near], distance[row].sort().values[: k + 1], atol=1e-3)


def test_a_code_held_twice_is_its_own_first():
    codes = vectors(6)
    codes[4] = codes[1]
    table = judge.nearest_codes(codes, 1)
    assert table[1].tolist() == [1, 4] and table[4].tolist() == [4, 1]


def test_the_table_of_a_codebook_is_of_its_unit_vectors_and_follows_its_weights():
    book = Codebook(9, 4)
    book.requires_grad_(False)
    first = judge.cached_neighbours(book, 3, torch.device("cpu"))
    assert torch.equal(first, judge.nearest_codes(book.unit(), 3))
    assert judge.cached_neighbours(book, 3, torch.device("cpu")) is first
    book.embedding.weight.mul_(torch.rand(9, 1) + 0.5)  # lengths do not matter
    assert torch.equal(judge.cached_neighbours(book, 3, torch.device("cpu")), first)
    book.embedding.weight.copy_(book.embedding.weight.flip(0) ** 3)
    assert not torch.equal(judge.cached_neighbours(book, 3, torch.device("cpu")), first)
    assert judge.cached_neighbours(book, 2, torch.device("cpu")).shape == (9, 3)


def test_neighbours_of_a_codebook_that_was_loaded_in_inference_mode():
    """ComfyUI loads and runs in it, and its tensors keep no count of their changes."""
    with torch.inference_mode():
        torch.manual_seed(0)
        book = Codebook(9, 4)
        first = judge.cached_neighbours(book, 3, torch.device("cpu"))
        assert judge.cached_neighbours(book, 3, torch.device("cpu")) is first
        assert torch.equal(first, judge.nearest_codes(book.unit(), 3))
        book.embedding.weight.copy_(torch.randn(9, 4))
        assert torch.equal(judge.cached_neighbours(book, 3, torch.device("cpu")), judge.nearest_codes(book.unit(), 3))


def test_pooling_adds_the_neighbours_probabilities():
    table = judge.nearest_codes(vectors(7), 2)
    p = torch.rand(2, 5, 7).softmax(-1)
    codes = torch.randint(7, (2, 5))
    pool = judge.pooled(p, codes, table)
    for i in range(2):
        for j in range(5):
            assert float(pool[i, j]) == pytest.approx(float(p[i, j, table[codes[i, j]].long()].sum()), abs=1e-6)
    alone = judge.nearest_codes(vectors(7), 0)
    assert torch.equal(judge.pooled(p, codes, alone), p.gather(-1, codes[..., None])[..., 0])


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 20), st.floats(0, 1))
def test_a_target_rate_is_met_by_every_image_alone(images, count, rate):
    pool = torch.rand(images, count)
    down = judge.reject_all_but_share(pool, rate, pool, tokens_before=0)
    assert ((~down).sum(1) == round(rate * count)).all()
    for i in range(images):
        one = pool[i : i + 1]
        assert torch.equal(judge.reject_all_but_share(one, rate, one, tokens_before=0)[0], down[i])
        assert not down[i].any() or down[i].all() or pool[i][down[i]].max() <= pool[i][~down[i]].min() + 1e-4


def test_of_tied_probabilities_those_of_the_likeliest_tokens_are_kept():
    """Sums over a whole distribution are 1 but for rounding: a share of them is kept, not all."""
    pool = torch.tensor([[1.0, 0.2, 1 - 1e-6, 1 + 1e-6, 1.0]])
    own = torch.tensor([[0.1, 0.9, 0.4, 0.0, 0.1]])
    for share, kept in ((0.2, [2]), (0.4, [0, 2]), (0.6, [0, 2, 4]), (0.8, [0, 2, 3, 4]), (1.0, [0, 1, 2, 3, 4])):
        down = judge.reject_all_but_share(pool, share, own, tokens_before=0)[0]
        assert torch.nonzero(~down).flatten().tolist() == kept
    tied = torch.tensor([[0.5, 0.2, 0.5, 0.5]])
    assert judge.reject_all_but_share(tied, 0.5, tied, tokens_before=0).tolist() == [[False, True, False, True]]


def test_equal_probabilities_are_kept_in_raster_order():
    pool = torch.full((2, 100), 0.25)
    down = judge.reject_all_but_share(pool, 0.6, pool, tokens_before=0)
    assert torch.equal(down, (torch.arange(100) >= 60).expand(2, -1))
    pool[:, 70] = 0.5
    down = judge.reject_all_but_share(pool, 0.01, pool, tokens_before=0)
    assert not down[:, 70].any() and down.sum() == 198
