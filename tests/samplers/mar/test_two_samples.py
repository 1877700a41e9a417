"""The two-sample tests: right p-values where nothing differs, small ones where something does."""

import pytest
import torch
from two_samples import energy, hotelling, ks, least_ks, p_values

pytestmark = pytest.mark.slow


def normal(seed: int, n: int = 2000, d: int = 3) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_ks_of_a_known_gap():
    """n = m = 100 and D = 0.2: t = (sqrt(50) + 0.12 + 0.11 /
    sqrt(50)) 0.2 = 1.4413, p = 2 (e^(-2 t^2) - e^(-8 t^2) + ...).
    """
    x = torch.arange(100).float()
    assert ks(x, x + 20) == pytest.approx(0.0314, abs=1e-4)
    assert ks(x, x) == 1.0


@pytest.mark.parametrize(
    "test", [hotelling, lambda x, y: energy(x, y, permutations=99), lambda x, y: ks(x[:, 0], y[:, 0])]
)
def test_p_values_are_uniform_without_a_difference(test):
    p = torch.tensor([test(normal(2 * i), normal(2 * i + 1)) for i in range(60)])
    assert ks(p, (torch.arange(1000) + 0.5) / 1000) > 0.01


@pytest.mark.parametrize(
    ("change", "blind"),
    [
        (lambda x: x + 0.2, ()),
        (lambda x: 1.3 * x, ()),
        # The correlation alone: every marginal distribution stays.
        (lambda x: torch.cat([x[:, :2], (0.3 * x[:, :1] + (1 - 0.09) ** 0.5 * x[:, 2:])], 1), ("KS",)),
        # Mean and covariance stay: a mixture of two Gaussians.
        (lambda x: (1 - 0.81) ** 0.5 * x + 0.9 * x.roll(1, 0).sign(), ()),
    ],
    ids=["mean", "variance", "dependence", "shape"],
)
def test_a_difference_is_found(change, blind):
    p = p_values(normal(1), change(normal(2)))
    assert {name for name, value in p.items() if value > 0.002} == set(blind)


def test_least_ks_counts_its_dimensions():
    x, y = normal(1), normal(2)
    single = min(ks(a, b) for a, b in zip(x.T, y.T, strict=True))
    assert least_ks(x, y) == pytest.approx(min(1.0, 3 * single))
