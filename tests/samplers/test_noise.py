"""Paired noise: determinism, batch invariance, independence of streams, and that it is normal."""

from __future__ import annotations

import math

import torch
from fastar_nodes.samplers.noise import PairedNoise
from hypothesis import given, settings
from hypothesis import strategies as st

images = st.lists(st.integers(0, 2**40), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), images, st.integers(1, 20))
def test_an_image_has_its_own_noise_whatever_the_batch(seed, batch, tokens):
    noise = PairedNoise(seed, batch)
    for row, image in enumerate(batch):
        alone = PairedNoise(seed, (image,))
        assert torch.equal(noise.orders(tokens)[row], alone.orders(tokens)[0])
        assert torch.equal(noise.first("full", tokens, 3)[row], alone.first("full", tokens, 3)[0])
        assert torch.equal(noise.steps("full", 5, tokens, 3)[row], alone.steps("full", 5, tokens, 3)[0])


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 300))
def test_orders_are_permutations(seed, tokens):
    assert torch.equal(PairedNoise(seed, (0, 1)).orders(tokens).sort(1).values, torch.arange(tokens).expand(2, -1))


def test_seeds_images_and_streams_differ():
    a = PairedNoise(1, (0, 1)).first("full", 50, 4)
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a[0], PairedNoise(2, (0,)).first("full", 50, 4)[0])
    assert not torch.equal(a[0], PairedNoise(1, (0,)).first("guided", 50, 4)[0])


def test_noise_is_standard_normal_and_streams_are_uncorrelated():
    """n = 400,000: mean and variance within 4.4 standard errors (two-sided p = 1e-5 each), correlation likewise."""
    n = 400_000
    a = PairedNoise(7, (0,)).first("full", n // 4, 4).flatten().double()
    b = PairedNoise(7, (0,)).first("guided", n // 4, 4).flatten().double()
    assert abs(a.mean()) < 4.4 / math.sqrt(n)
    assert abs(a.var() - 1) < 4.4 * math.sqrt(2 / n)
    assert abs((a * b).mean()) < 4.4 / math.sqrt(n)
