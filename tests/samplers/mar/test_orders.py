"""Orders of the AR steps."""

from __future__ import annotations

import pytest
import torch
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.schedule import ORDERS, halton_cells
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = sorted(ORDERS)


def random_orders(grid: int, images: int, seed: int) -> torch.Tensor:
    return PairedNoise(seed, range(images)).orders(grid * grid)


@pytest.mark.parametrize("grid", range(1, 33))
@pytest.mark.parametrize("name", NAMES)
def test_every_order_is_a_permutation(name, grid):
    # One token has no second entry to take flips from.
    orders = ORDERS[name](random_orders(grid, 3, grid)) if grid > 1 or name != "halton" else torch.zeros(3, 1)
    assert torch.equal(orders.sort(1).values, torch.arange(grid * grid).expand(3, -1).to(orders.dtype))


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 12), st.integers(0, 99), st.sampled_from(NAMES))
def test_an_image_has_its_order_in_any_batch(grid, seed, name):
    together = ORDERS[name](random_orders(grid, 4, seed))
    for i in range(4):
        assert torch.equal(ORDERS[name](PairedNoise(seed, (i,)).orders(grid * grid))[0], together[i])


def test_random_is_the_noises_own_order():
    orders = random_orders(8, 2, 1)
    assert ORDERS["random"](orders) is orders


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 16), st.integers(0, 99))
def test_the_first_half_of_a_checkerboard_has_no_neighbours(grid, seed):
    reveal = ORDERS["checkerboard"](random_orders(grid, 1, seed)).flip(1)[0]
    first = {divmod(int(p), grid) for p in reveal[: (grid * grid + 1) // 2]}
    assert not any((r + 1, c) in first or (r, c + 1) in first for r, c in first)


def test_halton_points_cover_the_grid_evenly():
    """The first quarter of the cells has one in almost every 2 x 2 block; random orders leave a third of them empty."""
    cells = halton_cells(16)[:64] // 2
    assert len({(int(r), int(c)) for r, c in cells}) >= 48


@pytest.mark.parametrize("order", ["halton", "checkerboard"])
def test_an_image_is_the_same_alone_and_in_a_batch(model, order):
    few = MARSettings(ar_steps=5, diffusion_steps=6, cfg=2.0, order=order)
    together = finish(mar(model, from_ids((1, 4)), few, PairedNoise(5, (0, 1)))).latents
    alone = finish(mar(model, from_ids((4,)), few, PairedNoise(5, (1,)))).latents
    torch.testing.assert_close(together[1:], alone, rtol=1e-4, atol=1e-4)
    assert bool(together.isfinite().all())
