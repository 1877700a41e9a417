"""Two-sample tests: Kolmogorov-Smirnov, a permutation test of
the sliced energy distance, and Hotelling's test of features.
"""

import math

import torch
from torch import Tensor


def ks(x: Tensor, y: Tensor) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test of x [n] and y [m].

    The asymptotic distribution with Stephens' (1970) correction
    for finite samples, as in Numerical Recipes, section 14.3.
    """
    x, y = x.double().sort().values, y.double().sort().values
    pooled = torch.cat([x, y])
    gap = torch.searchsorted(x, pooled, right=True) / len(x) - torch.searchsorted(y, pooled, right=True) / len(y)
    root = math.sqrt(len(x) * len(y) / (len(x) + len(y)))
    t = (root + 0.12 + 0.11 / root) * float(gap.abs().max())
    if t <= 0.2:
        return 1.0

    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * t) ** 2) for k in range(1, 101))))


def least_ks(x: Tensor, y: Tensor) -> float:
    """Smallest p-value of :func:`ks` over the dimensions of x [n, d] and y [m, d], times d (Bonferroni)."""
    return min(1.0, x.shape[1] * min(ks(a, b) for a, b in zip(x.T, y.T, strict=True)))


def energy(
    x: Tensor, y: Tensor, permutations: int = 999, directions: int = 12, blocks: int = 250, grid: int = 200
) -> float:
    """Permutation p-value of the sliced energy distance between x and y, both [n, d].

    The energy distance 2 E|x - y| - E|x - x'| - E|y - y'| is, up to a constant, the mean over all directions of the
    integral of (F - G)^2, F and G being the distribution functions of the projections (Szekely & Rizzo 2013). Here the
    mean is over some random directions, and the integral over quantiles of the pooled sample. Blocks of draws are
    permuted, so that the cost does not grow with permutations x n. The smallest p-value is 1 / (permutations + 1).
    """
    g = torch.Generator().manual_seed(0)
    size = max(1, len(x) // blocks)
    n = len(x) // size * size
    pooled = torch.cat([x[:n], y[:n]]).double()
    pooled = (pooled - pooled.mean(0)) / pooled.std(0).clamp(min=1e-9)
    signs = torch.cat([torch.ones(n // size), -torch.ones(n // size)])
    signs = torch.stack([signs, *(signs[torch.randperm(len(signs), generator=g)] for _ in range(permutations))])
    total = torch.zeros(1 + permutations)

    for _ in range(directions):
        along = (pooled @ torch.randn(pooled.shape[1], generator=g, dtype=torch.float64)).float()
        points = along.sort().values[torch.linspace(0, len(along) - 1, grid + 1).long()]
        cell = torch.searchsorted(points, along).clamp(max=grid)  # number of points below a draw
        ones = torch.ones(signs.shape[1], size)
        below = torch.zeros(signs.shape[1], grid + 1).scatter_add_(1, cell.view(-1, size), ones).cumsum(1)[:, :-1]
        total += (signs @ below).square() @ (points[1:] - points[:-1])

    # The order of summation differs between equal statistics, hence the tolerance.
    return float((total >= total[0] * (1 - 1e-6)).double().mean())


def hotelling(x: Tensor, y: Tensor, frequencies: int = 12) -> float:
    """p-value of Hotelling's T^2 test that features of x [n, d] and y [m, d] have the same mean.

    The features are all coordinates, all their products (second moments), and cosine and sine of random projections at
    some frequencies (a smooth characteristic function test, Chwialkowski et al. 2015, arXiv 1506.04725). The
    distribution is the asymptotic one, chi-squared with d + d (d + 1) / 2 + 2 ``frequencies`` degrees of freedom, so n
    has to be some thousands.
    """
    x, y = x.double(), y.double()
    centre, std = x.mean(0), x.std(0).clamp(min=1e-9)
    g = torch.Generator().manual_seed(1)
    directions = torch.randn(x.shape[1], frequencies, generator=g, dtype=torch.float64)
    upper = torch.triu_indices(x.shape[1], x.shape[1])

    def features(rows: Tensor) -> Tensor:
        rows = (rows - centre) / std
        waves = rows @ directions
        return torch.cat([rows, rows[:, upper[0]] * rows[:, upper[1]], waves.cos(), waves.sin()], 1)

    a, b = features(x), features(y)
    gap, spread = a.mean(0) - b.mean(0), torch.cov(a.T) / len(a) + torch.cov(b.T) / len(b)
    t2 = gap @ torch.linalg.solve(spread, gap)

    return float(torch.special.gammaincc(torch.tensor(len(gap) / 2, dtype=torch.float64), t2 / 2))


def p_values(x: Tensor, y: Tensor) -> dict[str, float]:
    """p-values of all tests of x and y, both [n, d], by name."""
    return {"Hotelling": hotelling(x, y), "energy": energy(x, y), "KS": least_ks(x, y)}
