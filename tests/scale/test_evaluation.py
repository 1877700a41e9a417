"""Figures against direct computations and known distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.reports import quality
from fastar_nodes.scale import evaluation
from fastar_nodes.scale.evaluation import Estimate, Gaussian, estimate, mean


def normal(n: int, d: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, d)) * scale + shift).astype(np.float32)


def gaussian(features: np.ndarray) -> Gaussian:
    return Gaussian.of(torch.from_numpy(features.astype(np.float64)))


# ------------------------------------------------------------------------------------------------ intervals


def test_resamples_are_counts_and_repeatable():
    drawn = list(evaluation.resamples(20, 5))
    assert all(w.sum() == 20 and (w >= 0).all() and (w == w.astype(int)).all() for w in drawn)
    again = list(evaluation.resamples(20, 5))
    assert all(np.array_equal(a, b) for a, b in zip(drawn, again, strict=True))
    assert not np.array_equal(drawn[0], drawn[1])


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3, 2, 400)
    found = estimate(mean(values), 400, 2000).figure()
    assert found.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / math.sqrt(400)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.08)
    assert (found.high + found.low) / 2 == pytest.approx(values.mean(), abs=half / 10)


def test_intervals_contain_the_truth_in_95_of_100_cases():
    within = 0
    for seed in range(200):
        found = estimate(mean(np.random.default_rng([2, seed]).normal(size=100)), 100, 200).figure()
        within += found.low <= 0 <= found.high
    assert 180 <= within <= 199


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
    statistic = evaluation.frechet(x, gaussian(y))
    plain, shifted = (estimate(statistic, 200, 100, biased=b).figure() for b in (False, True))
    assert plain.value == shifted.value and plain.low > plain.value, "the resamples alone are all worse"
    assert shifted.low < shifted.value < shifted.high
    other = estimate(evaluation.frechet(x + 0.1, gaussian(y)), 200, 100, biased=True)
    assert other.minus(estimate(statistic, 200, 100, biased=True)).biased


def test_infinite_ends_are_none():
    found = estimate(mean(np.array([0.0] * 9 + [1.0])), 10, 100).figure(evaluation.to_psnr)
    assert (
        found.value == pytest.approx(10 * math.log10(255**2 / 0.1)) and found.high is None and found.low < found.value
    )


def test_shares_have_an_interval_where_all_images_agree():
    none = Estimate(0.0, np.zeros(10), 100).share()
    assert none.low == 0 and none.high == pytest.approx(0.0370, abs=1e-4)  # Wilson 1927, n = 100
    all_of_them = Estimate(1.0, np.ones(10), 100).share()
    assert all_of_them.high == 1 and all_of_them.low == pytest.approx(1 - none.high)
    half = Estimate(0.5, np.zeros(10), 100).share()
    assert (half.low, half.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))


def test_one_image_has_no_figure():
    with pytest.raises(UserError, match="images: 1 is too few"):
        estimate(mean(np.ones(1)), 1)


# ------------------------------------------------------------------------------------------------ pairs


def test_pairs_agree_with_the_quality_of_compare():
    generator = np.random.default_rng(5)
    a, b = generator.integers(0, 256, (2, 3, 16, 16, 3), dtype=np.uint8)
    a[1] = b[1]
    errors = evaluation.squared_errors(a, b)
    assert errors[1] == 0 and evaluation.to_psnr(float(errors.mean())) == pytest.approx(quality.psnr(a, b))
    assert evaluation.similarities(a, b).mean() == pytest.approx(quality.ssim(a, b))
    assert evaluation.similarities(a, b)[1] == 1
    assert np.isnan(evaluation.similarities(a[:1, :8], b[:1, :8])).all()
    assert evaluation.to_psnr(0.0) == math.inf


# ------------------------------------------------------------------------------------------------ features


def test_frechet_distance_of_known_gaussians():
    """Of N(0, 1) and N(m, s^2) in one dimension it is m^2 + (1 - s)^2."""
    x, y = normal(200_000, 1, 6), normal(200_000, 1, 7, shift=2.0, scale=3.0)
    assert evaluation.frechet(x, gaussian(y))(np.ones(len(x))) == pytest.approx(4 + 4, rel=0.02)
    assert evaluation.frechet(x, gaussian(x))(np.ones(len(x))) == pytest.approx(0, abs=1e-9)


def test_frechet_distance_against_the_definition():
    x, y = normal(300, 6, 8) @ normal(6, 6, 9), normal(200, 6, 10, shift=0.3)
    a, b = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    values = np.linalg.eigvals(a @ b)
    wanted = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a) + np.trace(b) - 2 * np.sqrt(values.real.clip(0)).sum()
    assert evaluation.frechet(x, gaussian(y))(np.ones(300)) == pytest.approx(wanted, rel=1e-6)


def test_weights_are_repetitions():
    x, y = normal(30, 4, 11), normal(50, 4, 12)
    weights = next(evaluation.resamples(30, 1))
    repeated = np.repeat(x, weights.astype(int), axis=0)
    found = evaluation.frechet(x, gaussian(y))(weights)
    assert found == pytest.approx(evaluation.frechet(repeated, gaussian(y))(np.ones(30)), rel=1e-9)


def test_statistics_of_another_extractor_are_refused():
    with pytest.raises(UserError, match="statistics have 5 features, the extractor 4"):
        evaluation.frechet(normal(10, 4, 1), gaussian(normal(20, 5, 2)))


def test_kernel_distance_against_a_direct_sum():
    x, y = normal(40, 3, 13), normal(40, 3, 14, shift=0.5)
    found = evaluation.kernel_distances(x, y)
    assert len(found) == 20

    def k(a: np.ndarray, b: np.ndarray) -> float:
        return (float(a.astype(np.float64) @ b) / 3 + 1) ** 3

    p, q = x[3::20], y[3::20]  # block 3
    wanted = sum(k(p[i], p[j]) + k(q[i], q[j]) for i in range(2) for j in range(2) if i != j) / 2
    wanted -= 2 * sum(k(a, b) for a in p for b in q) / 4
    assert found[3] == pytest.approx(wanted)


def test_kernel_distance_is_unbiased():
    """Of one distribution it is 0 on average, though each block is small."""
    same = evaluation.kernel_distances(normal(4000, 3, 15), normal(4000, 3, 16))
    assert abs(same.mean()) < 3 * same.std() / math.sqrt(len(same))
    apart = evaluation.kernel_distances(normal(4000, 3, 15), normal(4000, 3, 16, shift=0.5))
    assert apart.mean() > 10 * apart.std() / math.sqrt(len(apart))
    with pytest.raises(UserError, match="kid: 39 images are too few"):
        evaluation.kernel_distances(normal(39, 3, 1), normal(100, 3, 2))


def test_inception_score_of_certain_and_uncertain_classes():
    certain = np.full((1000, 10), -100.0)
    certain[np.arange(1000), np.arange(1000) // 10 % 10] = 0  # each part of every tenth image holds all ten classes
    assert evaluation.inception_score(certain)(np.ones(1000)) == pytest.approx(10)
    assert evaluation.inception_score(np.zeros((100, 10)))(np.ones(100)) == pytest.approx(1)
    with pytest.raises(UserError, match="is: 19 images"):
        evaluation.inception_score(np.zeros((19, 10)))


def test_covered_against_a_direct_search(monkeypatch):
    monkeypatch.setattr(evaluation, "_ENTRIES", 200)  # several parts
    x, y = normal(50, 2, 17, scale=2.0), normal(60, 2, 18)
    wanted = []
    radii = [sorted(np.linalg.norm(y - other, axis=1))[3] for other in y]
    for one in x:
        wanted.append(any(np.linalg.norm(one - other) <= r for other, r in zip(y, radii, strict=True)))
    assert evaluation.covered(x, y).tolist() == wanted and 0 < sum(wanted) < 50
    with pytest.raises(UserError, match="precision: 3 images"):
        evaluation.covered(x, y[:3])


# ------------------------------------------------------------------------------------------------ torch-fidelity


def test_figures_equal_those_of_torch_fidelity():
    """Only where torch-fidelity is installed."""
    pytest.importorskip("torch_fidelity", exc_type=ImportError)
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_isc import isc_features_to_metric
    from torch_fidelity.metric_kid import kid_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric

    x, y = normal(2000, 16, 19), normal(2000, 16, 20, shift=0.2)
    own, other = torch.from_numpy(x), torch.from_numpy(y)
    statistics = [fid_features_to_statistics(side.double()) for side in (own, other)]
    fid = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert evaluation.frechet(x, gaussian(y))(np.ones(2000)) == pytest.approx(fid, rel=1e-6)
    score = isc_features_to_metric(own, splits=10, shuffle=False)["inception_score_mean"]
    parts = np.concatenate([np.arange(k, 2000, 10) for k in range(10)])
    ordered = np.empty_like(x)
    ordered[parts] = x  # theirs are consecutive parts
    assert evaluation.inception_score(ordered)(np.ones(2000)) == pytest.approx(score, rel=1e-6)
    options = {"kid_subsets": 100, "kid_subset_size": 1000, "kid_degree": 3, "kid_gamma": None, "kid_coef0": 1}
    kid = kid_features_to_metric(own, other, rng_seed=1, verbose=False, **options)
    blocks = evaluation.kernel_distances(x, y)
    error = math.hypot(kid["kernel_inception_distance_std"], blocks.std() / math.sqrt(len(blocks)))
    assert abs(blocks.mean() - kid["kernel_inception_distance_mean"]) < 3 * error
    both = prc_features_to_metric(own, other, prc_neighborhood=3, prc_batch_size=500, save_cpu_ram=True, verbose=False)
    assert evaluation.covered(x, y).mean() == pytest.approx(both["precision"], abs=1e-3)
    assert evaluation.covered(y, x).mean() == pytest.approx(both["recall"], abs=1e-3)
