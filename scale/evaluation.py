"""Quality figures of sets of pictures, with bootstrap intervals: functions of arrays, without files.

Every figure is a statistic of weights, one weight an image. Weights of one give the figure; weights that count how often each image
occurs in a sample of n images with replacement give its bootstrap distribution (Efron 1979). Two cells of a sweep hold the same indices
from the same noise, so that the same resamples of both give the distribution of their difference, which is much narrower than that of
either figure.

Intervals are percentiles of the resamples. Resampling with replacement biases Frechet distance and Inception score, because a resample
holds about 63 % of the images; their resamples are shifted so that their mean equals the figure. Shares of images have Wilson's interval,
and their differences a bootstrap interval.

Sources: Frechet distance: Heusel et al. 2017, arXiv 1706.08500. Inception score: Salimans et al. 2016, arXiv 1606.03498. KID: Binkowski
et al. 2018, arXiv 1801.01401, with the blocks of Zaremba et al. 2013, arXiv 1307.1954. Precision and recall: Kynkaanniemi et al. 2019,
arXiv 1904.06991.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..reports.quality import PEAK, ssim

RESAMPLES = 200
LEVEL = 0.95  # of intervals
# Inception score: parts of the images over which the score is averaged.
SPLITS = 10
# KID: most images of a block, and least blocks.
_BLOCK, _BLOCKS = 1000, 20
# Precision and recall: nearest neighbours of a ball.
NEIGHBOURS = 3
# Entries of a matrix of distances that is in memory at a time.
_ENTRIES = 1 << 26

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
    """A figure and its bootstrap distribution.

    Attributes:
        value: with all weights one.
        samples: float64 [R], of the resamples; two estimates from the same n and R share their resamples.
        images: n.
        biased: whether resampling biases the statistic, see above.
    """

    value: float
    samples: np.ndarray
    images: int
    biased: bool = False

    def figure(self, transform: Callable[[float], float] = float) -> Figure:
        """The figure with its interval, both transformed by a monotonic function."""
        samples = self.samples - self.samples.mean() + self.value if self.biased else self.samples
        tail = (1 - LEVEL) / 2
        ends = sorted(transform(float(np.quantile(samples, q))) for q in (tail, 1 - tail))
        return Figure(*(x if math.isfinite(x) else None for x in (transform(self.value), *ends)))

    def share(self) -> Figure:
        """A share 0..1 with Wilson's interval (1927), which is not empty where all images agree."""
        n, p = self.images, self.value
        z2 = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
        centre, half = p + z2 / (2 * n), math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n)))
        return Figure(p, max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n)))

    def minus(self, other: Estimate) -> Estimate | None:
        """The difference from an estimate of the same images; None if their numbers differ."""
        if self.images != other.images or len(self.samples) != len(other.samples):
            return None
        return Estimate(self.value - other.value, self.samples - other.samples, self.images, self.biased)


def resamples(n: int, count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """``count`` bootstrap weights float64 [n]: how often each of n images occurs among n drawn with replacement."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield np.bincount(generator.integers(n, size=n), minlength=n).astype(np.float64)


def estimate(statistic: Statistic, n: int, count: int = RESAMPLES, biased: bool = False) -> Estimate:
    """The value of a statistic of n images and its bootstrap distribution.

    Args:
        count: number of resamples.
        biased: whether resampling biases the statistic.

    Raises:
        UserError: fewer than two images.
    """
    if n < 2:
        raise UserError(f"images: {n} is too few for a figure with an interval; draw 2 or more.")
    value = statistic(np.ones(n))
    return Estimate(value, np.array([statistic(w) for w in resamples(n, count)]), n, biased)


def mean(values: np.ndarray) -> Statistic:
    """The mean of one value an image, [n]."""
    values = np.asarray(values, np.float64)
    return lambda w: float(w @ values / w.sum())


# ------------------------------------------------------------------------------------------------ pairs of pictures


def squared_errors(pictures: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """Mean squared error of every pair of uint8 [N, H, W, 3], float64 [N]; 0 where a pair is equal."""
    return np.array(
        [np.square(a.astype(np.float64) - b).mean() for a, b in zip(pictures, baseline, strict=True)], np.float64
    )


def similarities(pictures: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """SSIM of every pair of uint8 [N, H, W, 3], float64 [N]; NaN for pictures below 11 pixels."""
    out = np.ones(len(pictures))
    for i in range(len(pictures)):
        if not np.array_equal(pictures[i], baseline[i]):
            found = ssim(pictures[i : i + 1], baseline[i : i + 1])
            out[i] = math.nan if found is None else found
    return out


def to_psnr(error: float) -> float:
    """Peak signal-to-noise ratio in dB of a mean squared error of uint8 pictures; infinite for 0 and below."""
    return 10 * math.log10(PEAK**2 / error) if error > 0 else math.inf


# ------------------------------------------------------------------------------------------------ features


@dataclass(frozen=True)
class Gaussian:
    """Mean [D] and covariance [D, D] of features, float64."""

    mean: Tensor
    covariance: Tensor

    @staticmethod
    def of(features: Tensor, weights: Tensor | None = None) -> Gaussian:
        """The fit to features [N, D] with weights [N] that sum to N; the covariance is unbiased as that of ``numpy.cov``."""
        n = len(features)
        if weights is None:
            mean = features.mean(0)
            centred = features - mean
            return Gaussian(mean, centred.T @ centred / (n - 1))
        mean = weights @ features / n
        centred = features - mean
        return Gaussian(mean, (centred * weights[:, None]).T @ centred / (n - 1))


def frechet(features: np.ndarray, reference: Gaussian) -> Statistic:
    """Squared Frechet distance of the Gaussian fit to features [N, D] from a reference.

    Raises:
        UserError: the features have another width than the reference.
    """
    device = reference.mean.device
    x = torch.from_numpy(np.asarray(features, np.float64)).to(device)
    if x.shape[1] != len(reference.mean):
        raise UserError(
            f"reference: its statistics have {len(reference.mean)} features, the extractor {x.shape[1]}; give the "
            "reference's pictures instead, or another extractor."
        )
    values, vectors = torch.linalg.eigh(reference.covariance)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    trace = reference.covariance.trace()

    def distance(w: np.ndarray) -> float:
        own = Gaussian.of(x, torch.from_numpy(w).to(device))
        # tr sqrt(A B) from the eigenvalues of the symmetric sqrt(A) B sqrt(A).
        cross = torch.linalg.eigvalsh(root @ own.covariance @ root).clamp_min(0).sqrt().sum()
        away = (own.mean - reference.mean).square().sum()
        return float(away + own.covariance.trace() + trace - 2 * cross)

    return distance


def kernel_distances(features: np.ndarray, reference: np.ndarray, device: torch.device | None = None) -> np.ndarray:
    """KID of blocks of features [N, D] and [M, D], float64 [blocks]: the unbiased squared MMD with the kernel (x.y / D + 1)^3.

    The mean over the blocks is an unbiased estimate of the whole. There are 20 blocks or more, of at most 1000 images each. Block k
    takes every ``blocks``-th image from image k on, so that classes in turn are spread over all blocks.

    Raises:
        UserError: fewer than 40 images on a side.
    """
    least = min(len(features), len(reference))
    if least < 2 * _BLOCKS:
        raise UserError(
            f"kid: {least} images are too few; it takes {2 * _BLOCKS} or more of the cell and of the reference."
        )
    size = min(_BLOCK, least // _BLOCKS)
    blocks = least // size
    out = np.empty(blocks)
    for k in range(blocks):
        sides = (features[k::blocks][:size], reference[k::blocks][:size])
        x, y = (torch.from_numpy(np.asarray(s, np.float64)).to(device or "cpu") for s in sides)
        xx, yy, xy = ((a @ b.T / x.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
        within = (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / (size * (size - 1))
        out[k] = float(within - 2 * xy.mean())
    return out


def inception_score(logits: np.ndarray) -> Statistic:
    """Inception score of logits [N, C], the mean over ten parts; part k holds every tenth image from image k on.

    Raises:
        UserError: fewer than 20 images.
    """
    if len(logits) < 2 * SPLITS:
        raise UserError(f"is: {len(logits)} images are too few for {SPLITS} parts; draw {2 * SPLITS} or more.")
    log_p = torch.from_numpy(np.asarray(logits, np.float64)).log_softmax(1).numpy()
    p = np.exp(log_p)
    negative_entropy = (p * log_p).sum(1)

    def score(w: np.ndarray) -> float:
        parts = []
        for k in range(SPLITS):
            own = w[k::SPLITS]
            if not own.sum():
                continue
            q = own @ p[k::SPLITS] / own.sum()
            divergence = own @ negative_entropy[k::SPLITS] / own.sum() - (q * np.log(np.maximum(q, 1e-300))).sum()
            parts.append(math.exp(divergence))
        return float(np.mean(parts))

    return score


def covered(features: np.ndarray, manifold: np.ndarray, device: torch.device | None = None) -> np.ndarray:
    """Whether each of features [N, D] is within the estimated manifold of features [M, D], bool [N].

    The manifold is the union of balls around its features, each with the distance of the third nearest other feature as its radius.
    Precision is the share of generated images within the manifold of the reference, recall the share of the reference's within that of
    the generated images.

    Raises:
        UserError: fewer than four images in the manifold.
    """
    if len(manifold) <= NEIGHBOURS:
        raise UserError(f"precision: {len(manifold)} images are too few; it takes more than {NEIGHBOURS}.")
    own, other = (torch.from_numpy(np.asarray(f, np.float32)).to(device or "cpu") for f in (features, manifold))
    rows = max(1, _ENTRIES // len(other))
    radii = torch.cat([torch.cdist(part, other).kthvalue(NEIGHBOURS + 1).values for part in other.split(rows)])
    inside = [(torch.cdist(part, other) <= radii).any(1) for part in own.split(rows)]
    return torch.cat(inside).cpu().numpy()
