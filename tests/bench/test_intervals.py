"""Figures against direct computations and known distributions."""

import math

import numpy as np
import pytest
from fastar_nodes.bench import statistics
from fastar_nodes.bench.statistics import Estimate, estimate, mean

pytestmark = pytest.mark.slow


def normal(n: int, d: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, d)) * scale + shift).astype(np.float32)


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3, 2, 400)
    found = estimate(mean(values), 400, 2000).figure()
    assert found.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / math.sqrt(400)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.08)
    assert (found.high + found.low) / 2 == pytest.approx(values.mean(), abs=half / 10)


def test_a_paired_difference_is_narrower_than_its_parts():
    base = np.random.default_rng(3).normal(size=500)
    other = base + 0.1 + 0.01 * np.random.default_rng(4).normal(size=500)
    a, b = (estimate(mean(x), 500, 300) for x in (other, base))
    difference, own = a.minus(b).figure(), a.figure()
    assert difference.low < 0.1 + 0.002 and difference.high > 0.1 - 0.002 and difference.low > 0
    assert difference.high - difference.low < (own.high - own.low) / 20
    assert a.minus(estimate(mean(base[:400]), 400, 300)) is None


def test_a_biased_statistic_is_shifted_to_its_figure():
    """A resample of n features has a Frechet distance as of about n / 2; the figure lies within its interval all the same."""
    x, y = normal(200, 8, 21), normal(5000, 8, 22)
    statistic = statistics.frechet(x, y)
    plain, shifted = (estimate(statistic, 200, 100, biased=b).figure() for b in (False, True))
    assert plain.value == shifted.value and plain.low > plain.value, "the resamples alone are all worse"
    assert shifted.low < shifted.value < shifted.high
    other = estimate(statistics.frechet(x + 0.1, y), 200, 100, biased=True)
    assert other.minus(estimate(statistic, 200, 100, biased=True)).biased


def test_infinite_ends_are_none():
    found = estimate(mean(np.array([0.0] * 9 + [1.0])), 10, 100).figure(statistics.to_psnr)
    assert found.value == pytest.approx(10 * math.log10(255**2 / 0.1))
    assert found.high is None and found.low < found.value


def test_shares_have_an_interval_where_all_images_agree():
    none = Estimate(0.0, np.zeros(10), 100).share()
    assert none.low == 0 and none.high == pytest.approx(0.0370, abs=1e-4)  # Wilson 1927, n = 100
    all_of_them = Estimate(1.0, np.ones(10), 100).share()
    assert all_of_them.high == 1 and all_of_them.low == pytest.approx(1 - none.high)
    half = Estimate(0.5, np.zeros(10), 100).share()
    assert (half.low, half.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))


def test_equal_and_small_pictures():
    a, b = np.random.default_rng(5).integers(0, 256, (2, 3, 16, 16, 3), dtype=np.uint8)
    a[1] = b[1]
    assert statistics.squared_errors(a, b)[1] == 0 and statistics.similarities(a, b)[1] == 1
    assert np.isnan(statistics.similarities(a[:1, :8], b[:1, :8])).all()
    assert statistics.to_psnr(0.0) == math.inf


def test_frechet_distance_against_the_definition():
    x, y = normal(300, 6, 8) @ normal(6, 6, 9), normal(200, 6, 10, shift=0.3)
    a, b = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    values = np.linalg.eigvals(a @ b)
    wanted = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a) + np.trace(b) - 2 * np.sqrt(values.real.clip(0)).sum()
    assert statistics.frechet(x, y)(np.ones(300)) == pytest.approx(wanted, rel=1e-6)


def test_weights_are_repetitions():
    x, y = normal(30, 4, 11), normal(50, 4, 12)
    weights = next(statistics.resamples(30, 1))
    repeated = np.repeat(x, weights.astype(int), axis=0)
    found = statistics.frechet(x, y)(weights)
    assert found == pytest.approx(statistics.frechet(repeated, y)(np.ones(30)), rel=1e-9)
