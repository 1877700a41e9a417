"""Figures of sets of images with bootstrap intervals: functions of arrays.

Every figure is a statistic of weights, one weight an image. Weights of one give the figure; weights that count how
often each image occurs in a sample of n images with replacement give its bootstrap distribution (Efron 1979). Two cells
of a sweep hold the same indices from the same noise, so the same resamples of both give the distribution of their
difference, which is much narrower than that of either figure.

Intervals are percentiles of the resamples. Resampling with replacement biases Frechet distance and Inception score,
because a resample holds about 63 % of the images; their resamples are shifted so that their mean equals the figure.
Shares of images have Wilson's interval.

Source of the Frechet distance: Heusel et al. 2017, arXiv 1706.08500.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...reports.quality import PEAK, ssim

RESAMPLES = 200
LEVEL = 0.95  # of intervals

# From weights [n], which sum to n, to a figure.
Statistic = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class Figure:
    """A figure and its interval; an end that is not finite is None."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Estimate:
    """A figure and its bootstrap distribution. Two estimates with the same n and R share their resamples."""

    value: float  # with all weights one
    samples: np.ndarray  # float64 [R], of the resamples
    images: int  # n
    biased: bool = False  # whether resampling biases the statistic, see above

    def figure(self, transform: Callable[[float], float] = float) -> Figure:
        """The figure with its interval, both transformed by a monotonic function."""
        samples = self.samples
        if self.biased:
            samples = samples - samples.mean() + self.value

        tail = (1 - LEVEL) / 2
        low, high = sorted(transform(float(np.quantile(samples, q))) for q in (tail, 1 - tail))

        return Figure(_finite(transform(self.value)), _finite(low), _finite(high))

    def share(self) -> Figure:
        """A share 0..1 with Wilson's interval (1927), which is not empty where all images agree."""
        n = self.images
        p = self.value
        z2 = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2

        centre = p + z2 / (2 * n)
        half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n)))
        low = (centre - half) / (1 + z2 / n)
        high = (centre + half) / (1 + z2 / n)

        return Figure(p, max(0.0, low), min(1.0, high))

    def minus(self, other: Estimate) -> Estimate | None:
        """The difference from an estimate of the same images; None if their numbers differ."""
        if self.images != other.images or len(self.samples) != len(other.samples) or not len(self.samples):
            return None

        return Estimate(self.value - other.value, self.samples - other.samples, self.images, self.biased)


def _finite(value: float) -> float | None:
    """A value; None if it is not finite."""
    return value if math.isfinite(value) else None


def resamples(n: int, count: int) -> Iterator[np.ndarray]:
    """``count`` bootstrap weights float64 [n]: how often each of n images occurs among n drawn with replacement."""
    generator = np.random.default_rng(0)

    for _ in range(count):
        drawn = generator.integers(n, size=n)
        yield np.bincount(drawn, minlength=n).astype(np.float64)


def estimate(
    statistic: Statistic,
    n: int,
    count: int = RESAMPLES,
    biased: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Estimate:
    """The value of a statistic of n images and its bootstrap distribution.

    Args:
        progress: gets (resamples done, all) after each.
    """
    if n < 2:
        raise UserError(
            f"images: the number of images is {n}, but a measure with an interval needs at least 2; generate more "
            "images."
        )

    value = statistic(np.ones(n))
    samples = np.empty(count)
    for i, weights in enumerate(resamples(n, count)):
        samples[i] = statistic(weights)
        progress(i + 1, count)

    return Estimate(value, samples, n, biased)


def mean(values: np.ndarray) -> Statistic:
    """The mean of one value an image, [n]."""
    values = np.asarray(values, np.float64)
    return lambda w: float(w @ values / w.sum())


def distinct(kinds: np.ndarray) -> Statistic:
    """The number of different kinds among n images, divided by n; ``kinds`` int64 [n]. It is lower for more images."""
    _, kinds = np.unique(kinds, return_inverse=True)
    return lambda w: float((np.bincount(kinds, w) > 0).sum() / len(kinds))


def squared_errors(pictures: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """Mean squared error of every pair of uint8 [N, H, W, 3], float64 [N]; 0 where a pair is equal."""
    errors = [np.square(a.astype(np.float64) - b).mean() for a, b in zip(pictures, baseline, strict=True)]
    return np.array(errors)


def similarities(pictures: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """SSIM of every pair of uint8 [N, H, W, 3], float64 [N]; NaN for images below 11 pixels."""
    found = [ssim(a[None], b[None]) for a, b in zip(pictures, baseline, strict=True)]
    return np.array([math.nan if value is None else value for value in found])


def to_psnr(error: float) -> float:
    """Peak signal-to-noise ratio in dB of a mean squared error of uint8 images; infinite for 0 and below."""
    return 10 * math.log10(PEAK**2 / error) if error > 0 else math.inf


def moments(features: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [D] and unbiased covariance [D, D] of features [N, D] with weights [N] that sum to N."""
    centre = weights @ features / len(features)
    centred = features - centre
    covariance = (centred * weights[:, None]).T @ centred / (len(features) - 1)

    return centre, covariance


def frechet(features: np.ndarray, reference: np.ndarray, device: torch.device | None = None) -> Statistic:
    """Squared Frechet distance of the Gaussian fit to features [N, D] from that to a reference [M, D]."""
    y = torch.from_numpy(np.asarray(reference, np.float64)).to(device or "cpu")
    centre, covariance = moments(y, torch.ones(len(y), dtype=y.dtype, device=y.device))

    return frechet_from(features, (centre.cpu().numpy(), covariance.cpu().numpy()), device)


def frechet_from(
    features: np.ndarray, reference: tuple[np.ndarray, np.ndarray], device: torch.device | None = None
) -> Statistic:
    """Squared Frechet distance of the Gaussian fit to features [N, D] from that of a mean [D] and covariance [D, D].

    The trace of sqrt(A B) is the sum of the roots of the eigenvalues of a symmetric matrix. With fewer images than
    features that is a matrix [N, N], most of which does not depend on the weights; otherwise it is a matrix [D, D].
    """
    x = torch.from_numpy(np.asarray(features, np.float64)).to(device or "cpu")
    target, covariance = (torch.from_numpy(np.asarray(part, np.float64)).to(x.device) for part in reference)

    if len(x) < x.shape[1]:
        cross = _cross_of_images(x, covariance)
    else:
        cross = _cross_of_features(x, covariance)

    def distance(weights: np.ndarray) -> float:
        w = torch.from_numpy(weights).to(x.device)
        centre = w @ x / len(x)

        # The trace of the covariance of the features, without the covariance.
        own = w @ (x - centre).square().sum(1) / (len(x) - 1)

        return float((centre - target).square().sum() + own + covariance.trace() - 2 * cross(w))

    return distance


def _cross_of_features(x: Tensor, covariance: Tensor) -> Callable[[Tensor], Tensor]:
    """From weights [N] to tr sqrt(A B): A is the weighted covariance of x [N, D], B ``covariance`` [D, D].

    A B has the eigenvalues of the symmetric sqrt(B) A sqrt(B).
    """
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T

    def cross(weights: Tensor) -> Tensor:
        _, own = moments(x, weights)
        return torch.linalg.eigvalsh(root @ own @ root).clamp_min(0).sqrt().sum()

    return cross


def _cross_of_images(x: Tensor, covariance: Tensor) -> Callable[[Tensor], Tensor]:
    """As :func:`_cross_of_features`, by the Gram matrix of the images.

    With C the centred features [N, D] and W the diagonal matrix of the weights, A = C^T W C / (N - 1). The eigenvalues
    of A B that are not zero are those of sqrt(W) C B C^T sqrt(W) / (N - 1). C = (1 - 1 w^T / N) X for weights w, so
    that C B C^T comes from X B X^T alone.
    """
    n = len(x)
    around = x - x.mean(0)  # the result does not depend on the origin, and rounding is least here
    gram = around @ covariance @ around.T

    def cross(weights: Tensor) -> Tensor:
        of_mean = gram @ weights / n
        centred = gram - of_mean[:, None] - of_mean[None, :] + weights @ of_mean / n

        kept = weights > 0  # an image that a resample lacks has a row of zeros
        root = weights[kept].sqrt()
        small = root[:, None] * centred[kept][:, kept] * root[None, :] / (n - 1)

        return torch.linalg.eigvalsh(small).clamp_min(0).sqrt().sum()

    return cross


# Parts of an Inception score, and the seed of the order in which images are divided, as in torch-fidelity.
_PARTS = 10
_SHUFFLED = 2020


def inception_score(logits: np.ndarray) -> Statistic:
    """The Inception score of Inception's logits [N, C]: the mean of ten parts (Salimans et al. 2016)."""
    rows = torch.from_numpy(np.asarray(logits, np.float64)).log_softmax(1)

    def score(weights: np.ndarray) -> float:
        drawn = np.repeat(np.arange(len(rows)), weights.astype(int))
        drawn = drawn[np.random.RandomState(_SHUFFLED).permutation(len(drawn))]

        found = []
        for part in np.array_split(drawn, _PARTS):
            own = rows[part]
            mean = own.exp().mean(0, keepdim=True)
            found.append((own.exp() * (own - mean.log())).sum(1).mean().exp().item())
        return float(np.mean(found))

    return score
