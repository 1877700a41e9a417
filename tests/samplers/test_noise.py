"""Paired noise: determinism, batch invariance, and independence
of streams. ``recorded_values.json`` has its first numbers.
"""

import math

import pytest
import torch
from fastar_nodes.samplers.noise import CounterRNG, PairedNoise, mix_, row_keys
from hypothesis import given
from hypothesis import strategies as st

images = st.lists(st.integers(0, 2**40), min_size=1, max_size=4)


@given(st.integers(0, 2**64 - 1), images, st.integers(1, 20))
def test_an_image_has_its_own_noise_whatever_the_batch(seed, batch, tokens):
    noise = PairedNoise(seed, batch)
    for row, image in enumerate(batch):
        alone = PairedNoise(seed, (image,))
        assert torch.equal(noise.orders(tokens)[row], alone.orders(tokens)[0])
        assert torch.equal(noise.start_noise("full", tokens, 3)[row], alone.start_noise("full", tokens, 3)[0])
        assert torch.equal(noise.step_noise("full", 5, tokens, 3)[row], alone.step_noise("full", 5, tokens, 3)[0])


# The first 8 bytes of sha256("fastar/7/3/<stream>"), little-endian, without the lowest bit: seeds of torch's generator.
# The generator itself uses the lower 32 bits of its seed only.
SEEDS = {"order": 0x1BB9FC9B8DD17F46, "full/first": 0x1AC478A65F6A67DD, "full/steps": 0x17A5F0AC0257D3DF}


def test_noise_is_drawn_from_torchs_generator_with_the_digests_seed():
    def generator(stream: str) -> torch.Generator:
        return torch.Generator().manual_seed(SEEDS[stream])

    noise = PairedNoise(7, (3,))
    assert torch.equal(noise.orders(16)[0], torch.randperm(16, generator=generator("order")))
    assert torch.equal(noise.start_noise("full", 4, 8)[0], torch.randn(4, 8, generator=generator("full/first")))
    assert torch.equal(noise.step_noise("full", 3, 4, 8)[0], torch.randn(3, 4, 8, generator=generator("full/steps")))
    assert not torch.equal(noise.start_noise("guided", 4, 8), noise.start_noise("full", 4, 8))


MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(x: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood 2014), in Python's integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def word(key: int, lane: int, i: int) -> int:
    """Number ``i`` of a row's lane, 64 bits."""
    return mixed(mixed(key + mixed(lane * GOLDEN & MASK) & MASK) + (i + 1) * GOLDEN & MASK)


def halves(x: int) -> tuple[float, float]:
    """Its upper and lower 32 bits, as numbers in (0, 1)."""
    return ((x >> 32) + 0.5) / 2**32, ((x & 0xFFFFFFFF) + 0.5) / 2**32


KEYS = (5, -(2**62) + 11, 2**63 - 1)


def test_splitmix64_is_the_published_one():
    """The first outputs of the published generator from the state 0."""
    state = torch.arange(1, 4) * (GOLDEN - 2**64)
    found = [x & MASK for x in mix_(state).tolist()]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert found == [mixed(i * GOLDEN & MASK) for i in (1, 2, 3)]


def test_counter_based_numbers_are_splitmix64_of_key_lane_and_number():
    rng = CounterRNG(torch.tensor(KEYS))
    for lane, first in ((0, 0), (3, 0), (2**20 + 1, 70_000)):
        expected = [[halves(word(key, lane, i))[0] for i in range(first, first + 3)] for key in KEYS]
        torch.testing.assert_close(rng.uniform(lane, first, 3), torch.tensor(expected), rtol=1e-6, atol=0)
    each = rng.uniform(torch.tensor([4, 5, 6]), 2)
    expected = [halves(word(key, lane, 2))[0] for key, lane in zip(KEYS, (4, 5, 6), strict=True)]
    torch.testing.assert_close(each[:, 0], torch.tensor(expected), rtol=1e-6, atol=0)


def test_normal_draws_take_the_radius_from_the_upper_and_the_angle_from_the_lower_half():
    """Draw d of c channels is numbers d c .. d c + c - 1: neighbouring draws share none, and none is left out."""
    found = CounterRNG(torch.tensor(KEYS)).normal(9, 5, 2, 3)
    for row, key in enumerate(KEYS):
        for draw in (0, 1):
            for channel in range(3):
                radius, angle = halves(word(key, 9, (5 + draw) * 3 + channel))
                expected = math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)
                assert float(found[row, draw, channel]) == pytest.approx(expected, abs=2e-5)


class TwoNumbers:
    """The noise of one token that a key is made of."""

    def __init__(self, *bits: int):
        self.bits = torch.tensor(bits, dtype=torch.int32)

    def start_noise(self, stream: str, tokens: int, channels: int) -> torch.Tensor:
        assert (tokens, channels) == (1, 2)
        return self.bits.view(torch.float32)[None, None]


def test_a_tokens_key_holds_all_bits_of_two_numbers():
    assert row_keys(TwoNumbers(0x3F800000, 0x40490FDB), "verify", 1).tolist() == [[0x3F80000040490FDB]]
    # A negative second number does not reach into the upper half.
    assert row_keys(TwoNumbers(0x3F800000, 0x40490FDB - 2**31), "verify", 1).tolist() == [[0x3F800000C0490FDB]]


def test_tokens_of_an_image_have_different_keys():
    keys = row_keys(PairedNoise(1, (0, 1)), "verify", 64)
    assert len(keys.unique()) == 128 and not torch.equal(keys, row_keys(PairedNoise(1, (0, 1)), "other", 64))
