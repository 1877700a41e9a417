"""Are two samples from one distribution? Kolmogorov-Smirnov and the energy distance, without scipy."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ks(x: Tensor, y: Tensor) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test of x [n] and y [m], by the asymptotic distribution.

    Source: Stephens 1970, as in Numerical Recipes, section 14.3.
    """
    x, y = x.double().sort().values, y.double().sort().values
    pooled = torch.cat([x, y])
    gap = torch.searchsorted(x, pooled, right=True) / len(x) - torch.searchsorted(y, pooled, right=True) / len(y)
    root = math.sqrt(len(x) * len(y) / (len(x) + len(y)))
    t = (root + 0.12 + 0.11 / root) * float(gap.abs().max())
    return (
        min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * t) ** 2) for k in range(1, 101))))
        if t > 0.2
        else 1.0
    )


def least_ks(x: Tensor, y: Tensor) -> float:
    """The least p-value over the dimensions of x [n, d] and y [m, d], times their number (Bonferroni)."""
    return min(1.0, x.shape[1] * min(ks(a, b) for a, b in zip(x.T, y.T, strict=True)))


def energy(
    x: Tensor, y: Tensor, permutations: int = 999, directions: int = 12, blocks: int = 250, grid: int = 200
) -> float:
    """Permutation p-value of the energy distance 2 E|x - y| - E|x - x'| - E|y - y'| of x and y, both [n, d].

    In one dimension it is 2 times the integral of (F - G)^2, in d a constant times the mean of that over all directions
    (Szekely & Rizzo 2013). Here it is the mean over some directions and the integral over some quantiles, so that every
    sample is used; what is permuted are blocks of samples.
    """
    g = torch.Generator().manual_seed(0)
    size = max(1, len(x) // blocks)
    n = len(x) // size * size
    pooled = torch.cat([x[:n], y[:n]]).double()
    pooled = (pooled - pooled.mean(0)) / pooled.std(0).clamp(min=1e-9)
    labels = torch.cat([torch.ones(n // size), -torch.ones(n // size)])
    draws = torch.stack([labels, *(labels[torch.randperm(len(labels), generator=g)] for _ in range(permutations))])
    total = torch.zeros(1 + permutations)
    for _ in range(directions):
        along = (pooled @ torch.randn(pooled.shape[1], generator=g, dtype=torch.float64)).float()
        points = along.sort().values[torch.linspace(0, len(along) - 1, grid + 1).long()]
        cell = torch.searchsorted(points, along).clamp(max=grid)  # number of points below
        counts = torch.zeros(len(labels), grid + 1).scatter_add_(1, cell.view(-1, size), torch.ones(len(labels), size))
        below = counts.cumsum(1)[:, :-1]
        total += (draws @ below).square() @ (points[1:] - points[:-1])
    return float((total >= total[0] * (1 - 1e-6)).double().mean())
