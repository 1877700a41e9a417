"""Paired draws: any cell at any time, image by image, and that they are Gumbel numbers nobody shares."""

import math
from types import SimpleNamespace

import pytest
import torch
from fastar_nodes.samplers.tokens.sampling import allowed, entropy_factor, gumbel_max, tempered
from fastar_nodes.samplers.tokens.settings import TokenSampling
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from hypothesis import given, settings
from hypothesis import strategies as st
from test_noise import GOLDEN, MASK, halves, mixed
from token_numbers import gumbel_of, uniform_of


@settings(max_examples=30)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=4), st.permutations(range(6)))
def test_a_cell_has_its_own_draws_whatever_the_batch_and_the_order(seed, batch, order):
    draws = TokenNoise(seed, batch)
    together = gumbel_of(draws, "token", torch.arange(6), 9)
    assert together.shape == (len(batch), 6, 9) and together.dtype == torch.float32 and len(draws) == len(batch)
    assert torch.equal(gumbel_of(draws, "token", torch.tensor(order), 9), together[:, order])
    for row, image in enumerate(batch):
        assert torch.equal(gumbel_of(TokenNoise(seed, (image,)), "token", torch.tensor([4]), 9)[0, 0], together[row, 4])
    # A larger vocabulary goes on where a smaller one ends.
    assert torch.equal(gumbel_of(draws, "token", torch.arange(6), 5), together[..., :5])


def test_uniform_numbers_are_uniform_and_neighbours_are_uncorrelated():
    """n = 400,000: moments within 4.4 standard errors (two-sided p = 1e-5 each), correlations likewise."""
    n = 400_000
    draws = TokenNoise(7, (0,))
    a = uniform_of(draws, "token", torch.arange(400), 1000)[0].double()
    assert 0 < float(a.min()) and float(a.max()) < 1
    assert abs(a.mean() - 0.5) < 4.4 / math.sqrt(12 * n)
    assert abs(a.var() - 1 / 12) < 4.4 * math.sqrt(1 / 180 / n)
    centred = (a - 0.5) * math.sqrt(12)
    for b in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, -1), (0, 1))):
        assert abs((centred * b).mean()) < 4.4 / math.sqrt(n)
    for other in (TokenNoise(8, (0,)), TokenNoise(7, (1,))):
        b = (uniform_of(other, "token", torch.arange(400), 1000)[0].double() - 0.5) * math.sqrt(12)
        assert abs((centred * b).mean()) < 4.4 / math.sqrt(n)
    # Chi-square over 256 bins of the low and of the high part; 99.999 % of a chi-square with 255 degrees is below 364.
    for part in (a, (a * 256) % 1):
        counts = torch.bincount((part.flatten() * 256).long().clamp(max=255), minlength=256).double()
        assert float(((counts - n / 256) ** 2).sum() / (n / 256)) < 364


# The first 8 bytes of sha256("fastar/7/3/token"), little-endian.
KEY = 0x8544DD6AE90ECEB1


def number(cell: int, value: int) -> float:
    """The uniform number of a cell and a value: SplitMix64 at key + (2^32 cell + value) golden, its upper 32 bits."""
    return halves(mixed(KEY + (2**32 * cell + value) * GOLDEN & MASK))[0]


def test_a_draw_is_splitmix64_of_the_digest_the_cell_and_the_value():
    cells = (0, 1, 2**16, 2**20 + 5)
    found = uniform_of(TokenNoise(7, (3,)), "token", torch.tensor(cells), 4)[0]
    expected = torch.tensor([[number(cell, value) for value in range(4)] for cell in cells])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    gumbel = gumbel_of(TokenNoise(7, (3,)), "token", torch.tensor(cells), 4)[0]
    torch.testing.assert_close(
        gumbel, torch.tensor([[-math.log(-math.log1p(-number(c, v))) for v in range(4)] for c in cells])
    )
    (far,) = uniform_of(TokenNoise(7, (3,)), "token", torch.tensor([0]), 2**16 + 1)[0, :, -1].tolist()
    assert far == pytest.approx(number(0, 2**16), rel=1e-6), (
        "a large vocabulary does not run into the next cell's numbers"
    )


def test_small_numbers_keep_their_last_bits():
    """The 40 smallest of a million numbers, where the half that keeps them above 0 and the lowest bit count."""
    found = uniform_of(TokenNoise(7, (3,)), "token", torch.arange(64), 2**14)[0].flatten()
    small = found.topk(40, largest=False)
    expected = [number(*divmod(i, 2**14)) for i in small.indices.tolist()]
    assert max(expected) < 1e-4 and small.values.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_number_that_rounds_to_one_stays_below_it():
    """At seed 0, cell 766 and value 15172 the upper 32 bits are within 128 of 2^32, which fp32 rounds to 1."""
    cell = torch.tensor([766])
    draws = TokenNoise(0, (0,))
    uniform = uniform_of(draws, "token", cell, 15173)[0, 0, -1]
    assert float(uniform) == 1 - 2**-24
    # -log(-log(1 - u)) of u = 1 - 2^-24 is -log(24 log 2).
    gumbel = gumbel_of(draws, "token", cell, 15173)
    assert float(gumbel[0, 0, -1]) == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)

    logits = torch.zeros(1, 1, 15173)
    logits[..., -1] = 1e-4
    noise = draws.stream("token", 15173, cell.device)
    for greedy in ({"top_k": 1}, {"temperature": 0.0, "top_k": 0}, {"top_k": 0, "top_p": 0.0}):
        assert int(gumbel_max(logits, TokenSampling(**greedy), noise, cell)) == 15172, greedy


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1])
def test_noise_is_finite_whatever_the_bits(monkeypatch, bits):
    signed = (bits << 32) - (1 << 64 if bits >= 1 << 31 else 0)
    monkeypatch.setattr("fastar_nodes.samplers.noise.mix_", lambda x: torch.full_like(x, signed))
    uniform = uniform_of(TokenNoise(1, (0,)), "token", torch.tensor([0]), 1)
    assert 0 < float(uniform) < 1 and float(uniform) == pytest.approx((bits + 0.5) / 2**32, rel=1e-7)
    assert gumbel_of(TokenNoise(1, (0,)), "token", torch.tensor([0]), 1).isfinite().all()


def test_at_temperature_zero_the_likeliest_value_has_the_whole_probability():
    logits = torch.tensor([[2.0, 2.0 + 1e-6, 1.0]])
    p = tempered(logits, TokenSampling(temperature=0.0)).softmax(-1)
    assert p.tolist() == [[0.0, 1.0, 0.0]]


P = torch.tensor([0.15, 0.5, 0.05, 0.3])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3]),
        (0, 0.97, [0, 1, 2, 3]),
        (0, 0.9, [0, 1, 3]),  # 0.5, then 0.8, then 0.95: the third crosses 0.9 and stays
        (0, 0.6, [1, 3]),
        (0, 0.4, [1]),  # the first crosses it
        (1, 1.0, [1]),
        (3, 1.0, [0, 1, 3]),
        (4, 1.0, [0, 1, 2, 3]),
        (2, 0.6, [1]),  # of the two that remain the first has 0.5 / 0.8
        (2, 0.7, [1, 3]),
    ],
)
def test_what_top_k_and_top_p_keep(top_k, top_p, kept):
    found = allowed(P.log()[None], top_k, top_p)[0]
    assert found.isfinite().nonzero()[:, 0].tolist() == kept
    assert torch.equal(found[kept], P.log()[kept])


def test_top_p_that_is_reached_exactly_keeps_the_next_value_too():
    """LlamaGen removes values whose sum *before* them is above p."""
    found = allowed(torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]), 0, 0.5)[0]
    assert found.tolist() == [0.0, -torch.inf, 0.0, -torch.inf]


def test_ties_of_the_last_kept_value_are_kept_by_top_k():
    assert allowed(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), 2, 1.0)[0].tolist() == [1.0, 3.0, 1.0, -torch.inf]


def test_at_temperature_zero_no_noise_is_computed():
    """The stand-in for the noise has no numbers at all."""
    logits = torch.tensor([[[2.0, 3.0, 1.0]]])
    assert int(gumbel_max(logits, TokenSampling(temperature=0.0), SimpleNamespace(), torch.tensor([0]))) == 1


def test_temperature_divides_the_logits():
    """A difference of 1 in the logits is 2 at temperature 0.5, which a difference of 1.5 in the noise does not turn."""
    # At 2 a difference of 1 is 0.5, which 0.7 outweighs; at 0 no noise counts.
    for gap, noise, temperature, token in (
        *((1.0, 1.5, *case) for case in ((1.0, 0), (0.5, 1), (0.7, 0), (0.0, 1))),
        (1.0, 0.7, 2.0, 0),
        (1.0, 0.7, 1.0, 1),
        (2e-4, 25.0, 0.0, 1),
        (1e-6, torch.inf, 0.0, 1),
    ):
        logits, gumbel = torch.tensor([[[0.0, gap]]]), torch.tensor([[[noise, 0.0]]])
        fixed = SimpleNamespace(gumbel=lambda cells, numbers=gumbel: numbers)
        assert int(gumbel_max(logits, TokenSampling(temperature=temperature), fixed, torch.tensor([0]))) == token


@pytest.mark.parametrize(
    ("equal", "factor"),
    # Of n equal values exp(-H / 3) is the inverse of n's cube root, so the factor is 2.5 / cube root + 0.6.
    [(1, 3.1), (8, 1.85), (64, 1.225), (512, 0.9125), (4096, 0.75625)],
)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_factor_of_a_temperature_by_entropy(equal, factor, strength):
    logits = torch.full((2, 3, 5000), -torch.inf)
    logits[..., :equal] = -7.0
    found = entropy_factor(logits, strength)
    assert found.shape == (2, 3, 1)
    expected = 1 + strength * (factor - 1)
    torch.testing.assert_close(found, torch.full((2, 3, 1), expected), rtol=1e-5, atol=0)


def test_the_factor_of_unequal_values():
    """H of 1/2, 1/4, 1/8 and 1/8 is 1.75 ln 2, in nats, and exp(-H / 3) is 2 to the power of -0.58333, 0.667420."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log() + 3.0
    assert float(entropy_factor(logits, 1.0)) == pytest.approx(2.5 * 0.667420 + 0.6, rel=1e-5)


@pytest.mark.parametrize(
    ("temperature", "cut"),
    [
        *((temperature, {"top_k": 4}) for temperature in (0.5, 1.0, 2.0)),
        # At these temperatures the fourth value crosses the sum, and the fifth is left out.
        (0.5, {"top_k": 0, "top_p": 0.95}),
        (1.0, {"top_k": 0, "top_p": 0.93}),
        (2.0, {"top_k": 0, "top_p": 0.88}),
    ],
)
def test_the_entropy_is_that_of_the_values_that_may_be_drawn_before_the_temperature(temperature, cut):
    """Of 8 : 4 : 2 : 2 : 1 the first four stay, 1/2, 1/4, 1/8 and 1/8 of their sum: 1.75 ln 2 at every temperature."""
    logits = torch.tensor([8.0, 4.0, 2.0, 2.0, 1.0]).log()
    factor = 2.5 * 0.667420 + 0.6

    chosen = TokenSampling(temperature=temperature, entropy_temperature=1.0, **cut)
    found = tempered(logits[None], chosen)[0]
    assert float(found[4]) == -torch.inf
    torch.testing.assert_close(found[:4], logits[:4] / (factor * temperature), rtol=1e-5, atol=0)


def test_the_temperature_by_entropy_does_not_depend_on_other_positions():
    logits = 3 * torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1))
    chosen = TokenSampling(entropy_temperature=1.0, top_k=20)
    together = tempered(logits, chosen)
    for image in range(2):
        for cell in range(5):
            alone = tempered(logits[image, cell][None, None], chosen)
            assert torch.equal(alone[0, 0], together[image, cell])


def test_a_class_with_other_numbers_says_which_are_those_of_some_images():
    assert TokenNoise(3, (4, 5, 6)).of([0, 2]).images == (4, 6)

    class Other(TokenNoise):
        def gumbel(self, stream, cells, values):
            return torch.zeros(len(self), len(cells), values)

    with pytest.raises(TypeError, match=r"Other takes its random numbers from elsewhere; override of\(\)"):
        Other(3, (4, 5, 6)).of([0, 2])
