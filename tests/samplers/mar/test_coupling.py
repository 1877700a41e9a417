"""Couplings of Gaussians: the right distribution comes out, as often as possible unchanged."""

import math

import pytest
import torch
from fastar_nodes.samplers.coupling import ROUNDING, Coupled, Gaussian, Proposals, couple, couple_means, couple_stds
from fastar_nodes.samplers.noise import CounterRNG
from hypothesis import given, settings
from hypothesis import strategies as st
from two_samples import energy, ks

N = 20_000


def phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def rng(n: int = N, seed: int = 0) -> CounterRNG:
    return CounterRNG(torch.randint(-(2**62), 2**62, (n,), generator=torch.Generator().manual_seed(seed)))


def proposals(keys: CounterRNG, channels: int, count: int = 16) -> Proposals:
    return Proposals(keys.normal(7, 0, count, channels), keys.uniform(8, 0, count))


def with_proposals(make, keys: CounterRNG, channels: int) -> Coupled:
    """A coupling with as many proposals as are needed; ``make``: of an index of rows and their proposals."""
    out = make(slice(None), proposals(keys, channels))
    value, found = out.value.clone(), out.is_sample.clone()
    for count in (256, 4096, 1 << 16, 1 << 18):
        some = (~found).nonzero()[:, 0]
        if len(some):
            again = make(some, proposals(keys.for_rows(some), channels, count))
            value[some], found[some] = again.value, again.is_sample
    assert bool(found.all())
    return out._replace(value=value, is_sample=found)


def coupled(draft, q: Gaussian, p: Gaussian, uniforms, keys: CounterRNG) -> Coupled:
    """The coupling with as many proposals as are needed."""

    def make(rows, more: Proposals) -> Coupled:
        return couple(draft[rows], q.at(rows), p.at(rows), uniforms[rows], more)

    return with_proposals(make, keys, draft.shape[1])


def drafts(mean: list[float], std: list[float], seed: int = 1) -> tuple[torch.Tensor, Gaussian]:
    q = Gaussian(torch.tensor(mean).expand(N, -1), torch.tensor(std).log().expand(N, -1))
    noise = torch.randn(N, len(mean), generator=torch.Generator().manual_seed(seed))
    return q.mean + q.log_std.exp() * noise, q


def is_standard(x: torch.Tensor) -> None:
    """x [N, c] is standard normal: every channel, and all of them together."""
    fresh = torch.randn(x.shape, generator=torch.Generator().manual_seed(99))
    assert min(ks(a, b) for a, b in zip(x.T, fresh.T, strict=True)) > 0.001
    assert energy(x, fresh) > 0.001


@pytest.mark.parametrize("shift", [0.05, 0.7, 3.0])
@pytest.mark.fast_cases("0.7")
def test_reflection_is_exact_and_accepts_as_often_as_any_coupling_can(shift):
    direction = [0.6, -0.8 * 0.6, 0.8 * 0.8]
    y, q = drafts([1 + 0.5 * shift * d for d in direction], [0.5] * 3)
    p = Gaussian(torch.ones(N, 3), q.log_std)
    out = couple_means(y, q.mean, p, rng().uniform(3)[:, 0])
    assert float(out.accepted.float().mean()) == pytest.approx(2 * phi(-shift / 2), abs=4 * 0.5 / math.sqrt(N))
    assert torch.equal(out.value[out.accepted], y[out.accepted])
    is_standard((out.value - 1) / 0.5)
    # A rejected draft keeps its noise but for the mirrored direction.
    e = torch.tensor(direction)
    across = lambda x, mean: (x - mean) / 0.5 - ((x - mean) / 0.5 @ e)[:, None] * e  # noqa: E731
    torch.testing.assert_close(
        across(out.value, p.mean)[~out.accepted], across(y, q.mean)[~out.accepted], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("wide", [0.5, 0.9, 1.02, 1.6])
@pytest.mark.fast_cases("0.5", "1.6")
def test_reshaping_is_exact_and_accepts_as_often_as_any_coupling_can(wide):
    y, q = drafts([2.0], [1.0])
    keys = rng()
    log_std, uniform = torch.full((N, 1), math.log(wide)), keys.uniform(3)[:, 0]

    def make(rows, more: Proposals) -> Coupled:
        return couple_stds(y[rows], q.at(rows), log_std[rows], uniform[rows], more)

    out = with_proposals(make, keys, 1)
    # Two Gaussians of one mean cross at +-c.
    c = math.sqrt(2 * math.log(wide) / (1 - 1 / wide**2))
    overlap = 1 - abs(2 * (phi(c) - phi(c / wide)))
    assert float(out.accepted.float().mean()) == pytest.approx(overlap, abs=4 * 0.5 / math.sqrt(N))
    assert torch.equal(out.value[out.accepted], y[out.accepted])
    is_standard((out.value - 2) / wide)


def test_any_two_gaussians_exactly():
    y, q = drafts([0.3, -1.0, 2.0, 0.0], [0.5, 1.0, 0.2, 3.0])
    p = Gaussian(
        torch.tensor([0.5, -1.2, 2.0, 1.0]).expand(N, -1), torch.tensor([0.6, 0.9, 0.21, 3.0]).log().expand(N, -1)
    )
    keys = rng()
    uniforms = keys.uniform(3, count=2)
    out = coupled(y, q, p, uniforms, keys)
    assert 0.4 < float(out.accepted.float().mean()) < 0.9
    assert torch.equal(out.value[out.accepted], y[out.accepted])
    is_standard((out.value - p.mean) / p.log_std.exp())
    # Proposals change neither which drafts are accepted nor what replaces the others' noise.
    without = couple(y, q, p, uniforms)
    assert torch.equal(without.accepted, out.accepted)
    assert torch.equal(without.value[without.is_sample], out.value[without.is_sample])
    # What is accepted and what is not are far from the target each: only together they are it.
    with pytest.raises(AssertionError):
        is_standard(((out.value - p.mean) / p.log_std.exp())[out.accepted][: N // 3])


def one(mean: list[float], log_std: list[float]) -> Gaussian:
    """Rows of one channel."""
    return Gaussian(torch.tensor(mean)[:, None], torch.tensor(log_std)[:, None])


def test_five_couplings_by_hand():
    """Equal distributions; no noise; p / q = 2 at 0 and 2 e^-6 at 2
    for stds 1 and 1/2; e^-1.5 at -1 for means 0 and 1, mirrored to 2.
    """
    half = -math.log(2)
    q = one([0.0, 5.0, 0.0, 0.0, 0.0], [0.0, -math.inf, 0.0, 0.0, 0.0])
    p = one([0.0, 6.0, 0.0, 0.0, 1.0], [0.0, -math.inf, half, half, 0.0])
    draft, uniforms = torch.tensor([3.0, 5.0, 0.0, 2.0, -1.0])[:, None], torch.full((5, 2), 0.5)
    out = couple(draft, q, p, uniforms)
    assert out.accepted.tolist() == [True, False, True, False, False]
    assert out.is_sample.tolist() == [True, True, True, False, True]
    assert out.value[out.is_sample, 0].tolist() == [3.0, 6.0, 0.0, 2.0]


def test_the_first_redraw_that_is_kept_by_hand():
    """Of N(0, 1/2) and N(0, 1), q / p at n / 2 is e^(0.375 n^2) / 2: 0.5076 at 0.2, 0.531 at -0.4."""
    q, p = one([0.0], [0.0]), one([0.0], [-math.log(2)])
    normals = torch.tensor([[[0.2], [-0.4], [1.0]]])
    for uniforms, value, found in (
        ([0.505], 0.1, False),
        ([0.505, 0.53], -0.2, False),  # the last one, where none is kept
        ([0.505, 0.54], -0.2, True),
        ([0.505, 0.54, 1.0], -0.2, True),
    ):
        proposals = Proposals(normals[:, : len(uniforms)], torch.tensor([uniforms]))
        out = couple(torch.tensor([[2.0]]), q, p, torch.full((1, 2), 0.5), proposals)
        assert float(out.value) == pytest.approx(value) and out.is_sample.tolist() == [found]
        assert out.accepted.tolist() == [False]


def test_equal_up_to_rounding_is_equal():
    y, q = drafts([0.3, -1.0], [0.006, 1.0])
    p = Gaussian(q.mean + 0.9 * ROUNDING, q.log_std + 0.9 * ROUNDING)
    none = torch.full((N, 2), 1.0)
    assert bool(couple(y, q, p, none).accepted.all())
    # 1e-5 (1 + |mean|) of the mean, and 1e-5 of the log std, above which u = 1 rejects a draft at the mean.
    for mean, distance, wider, equal in (
        (0.0, 0.9e-5, 0.0, True),
        (0.0, 1.2e-5, 0.0, False),
        (-3.0, 3.8e-5, 0.0, True),
        (-3.0, 4.3e-5, 0.0, False),
        (0.0, 0.0, 0.9e-5, True),
        (0.0, 0.0, 1.2e-5, False),
    ):
        p, ones = Gaussian(torch.full((1, 2), mean), torch.zeros(1, 2)), torch.ones(1, 2)
        q = Gaussian(p.mean + distance, p.log_std - wider)
        assert couple(q.mean, q, p, ones).accepted.tolist() == [equal]


def test_without_noise_only_the_mean_itself_is_accepted():
    still = torch.full((2, 3), -math.inf)
    q = Gaussian(torch.tensor([[1.0, 2, 3], [1.0, 2, 3]]), still)
    p = Gaussian(torch.tensor([[1.0, 2, 3], [1.0, 2.5, 3]]), still)
    out = couple(q.mean, q, p, torch.ones(2, 2), proposals(rng(2), 3))
    assert bool(out.is_sample.all()), "no redraw is needed"
    assert out.accepted.tolist() == [True, False]
    assert torch.equal(out.value, p.mean)


def test_what_is_not_a_number_passes_through():
    """A head that blew up is seen in the image and asks for no further proposals."""
    y, q = drafts([0.0, 1.0], [1.0, 1.0])
    bad = torch.where(torch.arange(N)[:, None] % 2 == 0, torch.nan, 0.5).expand(-1, 2)
    for p in (Gaussian(bad, q.log_std), Gaussian(q.mean, bad), Gaussian(bad, bad)):
        out = couple(y, q, p, rng().uniform(0, count=2), proposals(rng(), 2))
        assert bool(out.value[1::2].isfinite().all()) and not bool(out.value[::2].isfinite().any())
        assert bool(out.is_sample[::2].all())


@settings(max_examples=50)
@given(st.floats(-6, 6), st.floats(-3, 3), st.floats(0.01, 50), st.integers(0, 999))
def test_always_a_number_and_accepted_as_often_as_promised(shift, log_ratio, std, seed):
    """At least 1 - TV(shapes) - TV(shifts): each step's promise."""
    n = 400
    q = Gaussian(torch.full((n, 1), shift * std), torch.full((n, 1), math.log(std)))
    p = Gaussian(torch.zeros(n, 1), q.log_std + log_ratio)
    y = q.mean + std * torch.randn(n, 1, generator=torch.Generator().manual_seed(seed))
    keys = rng(n, seed)
    out = coupled(y, q, p, keys.uniform(0, count=2), keys)
    assert bool(out.value.isfinite().all())
    wide = math.exp(log_ratio)
    c = math.sqrt(2 * log_ratio / (1 - wide**-2)) if abs(log_ratio) > 1e-3 else 1.0
    promise = 2 * phi(-abs(shift) / wide / 2) - abs(2 * (phi(c) - phi(c / wide)))
    assert float(out.accepted.float().mean()) >= promise - 0.12
