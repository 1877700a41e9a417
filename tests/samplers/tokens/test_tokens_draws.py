"""Paired draws: any cell at any time, image by image, and that they are Gumbel numbers nobody shares."""

from __future__ import annotations

import math

import torch
from fastar_nodes.samplers.tokens.draws import PairedDraws
from hypothesis import given, settings
from hypothesis import strategies as st

EULER = 0.5772156649


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=4), st.permutations(range(6)))
def test_a_cell_has_its_own_draws_whatever_the_batch_and_the_order(seed, batch, order):
    draws = PairedDraws(seed, batch)
    together = draws.gumbel("token", torch.arange(6), 9)
    assert together.shape == (len(batch), 6, 9) and together.dtype == torch.float32 and len(draws) == len(batch)
    assert torch.equal(draws.gumbel("token", torch.tensor(order), 9), together[:, order])
    for row, image in enumerate(batch):
        assert torch.equal(PairedDraws(seed, (image,)).gumbel("token", torch.tensor([4]), 9)[0, 0], together[row, 4])
    # A larger vocabulary goes on where a smaller one ends.
    assert torch.equal(draws.gumbel("token", torch.arange(6), 5), together[..., :5])


def test_seeds_images_streams_cells_and_values_differ():
    a = PairedDraws(1, (0, 1)).gumbel("token", torch.arange(3), 40)
    assert not torch.equal(a[0], a[1]) and not torch.equal(a[0, 0], a[0, 1])
    assert not torch.equal(a[0], PairedDraws(2, (0,)).gumbel("token", torch.arange(3), 40)[0])
    assert not torch.equal(a[0], PairedDraws(1, (0,)).gumbel("other", torch.arange(3), 40)[0])
    # 120 draws of 32 bits: the probability of any two equal is 2e-6.
    assert len(PairedDraws(1, (0,)).uniform("token", torch.arange(3), 40).unique()) == 120


def test_uniform_numbers_are_uniform_and_neighbours_are_uncorrelated():
    """n = 400,000: moments within 4.4 standard errors (two-sided p = 1e-5 each), correlations likewise."""
    n = 400_000
    draws = PairedDraws(7, (0,))
    a = draws.uniform("token", torch.arange(400), 1000)[0].double()
    assert 0 <= float(a.min()) and float(a.max()) <= 1
    assert abs(a.mean() - 0.5) < 4.4 / math.sqrt(12 * n)
    assert abs(a.var() - 1 / 12) < 4.4 * math.sqrt(1 / 180 / n)
    centred = (a - 0.5) * math.sqrt(12)
    for b in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, -1), (0, 1))):
        assert abs((centred * b).mean()) < 4.4 / math.sqrt(n)
    for other in (PairedDraws(8, (0,)), PairedDraws(7, (1,))):
        b = (other.uniform("token", torch.arange(400), 1000)[0].double() - 0.5) * math.sqrt(12)
        assert abs((centred * b).mean()) < 4.4 / math.sqrt(n)
    # Chi-square over 256 bins of the low and of the high part; 99.999 % of a chi-square with 255 degrees is below 364.
    for part in (a, (a * 256) % 1):
        counts = torch.bincount((part.flatten() * 256).long().clamp(max=255), minlength=256).double()
        assert float(((counts - n / 256) ** 2).sum() / (n / 256)) < 364


def test_gumbel_numbers_have_gumbels_mean_variance_and_tail():
    n = 400_000
    g = PairedDraws(3, (0,)).gumbel("token", torch.arange(400), 1000).double()
    assert abs(g.mean() - EULER) < 4.4 * math.sqrt(math.pi**2 / 6 / n)
    assert abs(g.var() - math.pi**2 / 6) < 0.04
    # P(g > t) = 1 - exp(-exp(-t)): the large values decide. 4.4 standard errors of a count of about 1, 54 and 2960.
    for t in (12.5, 8.9, 4.9):
        expected = n * -math.expm1(-math.exp(-t))
        assert abs(int((g > t).sum()) - expected) < 4.4 * math.sqrt(expected) + 1


def test_the_largest_of_log_probabilities_and_noise_is_a_sample():
    """40,000 draws of 5 values: chi-square with 4 degrees of freedom; 99.999 % is below 28.5."""
    p = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    g = PairedDraws(11, (0,)).gumbel("token", torch.arange(40_000), 5)[0]
    counts = torch.bincount((p.log() + g).argmax(-1), minlength=5).double()
    assert float(((counts - 40_000 * p) ** 2 / (40_000 * p)).sum()) < 28.5
