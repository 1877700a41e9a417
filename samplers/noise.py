"""Paired noise: all randomness of an image is drawn from (seed, image index), per token position.

With one seed two samplers start from the same noise, and image i is the same alone or in a batch.

- :class:`PairedNoise`: noise for diffusion. It is drawn on the CPU with its own generators, so the image does not
  depend on the device, and the global RNG is not used.
- :class:`CounterRNG`: numbers of a verification. How many of them a rejected draft needs is not known beforehand, so
  they are computed from a counter.
- :class:`CellNoise`: numbers of discrete tokens, from a counter too; see ``tokens/draws.py``.

The counters are SplitMix64's (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): they
advance in steps of :data:`GOLDEN` and are hashed by :func:`mix_`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# SplitMix64's constants as signed numbers, because torch computes in int64. Products wrap around as required.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
# The step from the numbers of a cell to the numbers of the next cell: 2^32 of GOLDEN's steps, modulo 2^64.
_CELL = (GOLDEN & 0xFFFFFFFF) << 32
# The largest fp32 number below 1.
_BELOW_ONE = 1 - 2**-24


def mix_(x: Tensor) -> Tensor:
    """Turn counters int64 into random bits, in place."""
    _fold_(x, 30).mul_(_FIRST)
    _fold_(x, 27).mul_(_SECOND)
    return _fold_(x, 31)


def _fold_(x: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift, in place. The shift is logical, where int64's own would repeat the sign."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def stream_key(seed: int | None, image: int, stream: str) -> bytes:
    """Eight bytes that a stream of an image of a seed starts from."""
    return hashlib.sha256(f"fastar/{seed}/{image}/{stream}".encode()).digest()[:8]


class PairedNoise:
    """Noise of B images of a seed (0 to 2^64 - 1); ``images`` are image indices, one per batch entry."""

    seed: int | None = None  # None in derived classes, whose noise does not come from a seed

    def __init__(self, seed: int, images: Sequence[int]):
        self.seed = seed
        self.images = tuple(images)

    def __len__(self) -> int:
        return len(self.images)

    def _generators(self, stream: str) -> list[torch.Generator]:
        out = []
        for image in self.images:
            key = int.from_bytes(stream_key(self.seed, image, stream), "little") >> 1
            out.append(torch.Generator("cpu").manual_seed(key))
        return out

    def orders(self, tokens: int) -> Tensor:
        """int64 [B, tokens]: a permutation per image, whose last entry is decided first."""
        return torch.stack([torch.randperm(tokens, generator=g) for g in self._generators("order")])

    def first(self, stream: str, tokens: int, channels: int) -> Tensor:
        """fp32 [B, tokens, channels]: the noise from which a token's diffusion starts."""
        return torch.stack([torch.randn(tokens, channels, generator=g) for g in self._generators(f"{stream}/first")])

    def steps(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        """fp32 [B, count, tokens, channels]: noise of every diffusion step, entry 0 for the highest timestep."""
        generators = self._generators(f"{stream}/steps")
        return torch.stack([torch.randn(count, tokens, channels, generator=g) for g in generators])


def noise_bytes(images: int, streams: Mapping[str, int], numbers: int) -> int:
    """Bytes of the noise of a batch, fp32.

    Args:
        streams: diffusion steps of every stream, see :meth:`.Guarantees.streams`.
        numbers: of one image in one step.
    """
    steps = sum(count + 2 for count in streams.values())
    return 4 * images * steps * numbers


class CounterRNG:
    """Counter-based random numbers of rows: number i of a row's lane is a hash of (key, lane, i).

    There is no state, so a row's numbers depend neither on its batch nor on other calls. They are computed on the
    device of the keys, int64 [N], one per row; see :func:`row_keys`.
    """

    def __init__(self, keys: Tensor):
        self.keys = keys

    def of(self, rows: Tensor) -> CounterRNG:
        """The generator of rows int64 [M]."""
        return CounterRNG(self.keys[rows])

    def _halves(self, lane: Tensor | int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Numbers ``first .. first + count - 1`` of a lane as two halves, fp32 [N, count] above 0 and at most 1."""
        if isinstance(lane, int):
            lane = torch.full_like(self.keys, lane)

        start = mix_(self.keys + mix_(lane * GOLDEN))
        number = torch.arange(first + 1, first + count + 1, device=self.keys.device)
        bits = mix_(start[:, None] + number * GOLDEN)

        upper = (bits >> 32) & 0xFFFFFFFF
        lower = bits & 0xFFFFFFFF
        return (upper.float() + 0.5) / 2**32, (lower.float() + 0.5) / 2**32

    def uniform(self, lane: Tensor | int, first: int = 0, count: int = 1) -> Tensor:
        """Numbers ``first .. first + count - 1`` of a lane (a number, or int64 [N]), fp32 [N, count] in (0, 1]."""
        return self._halves(lane, first, count)[0]

    def normal(self, lane: Tensor | int, first: int, count: int, channels: int) -> Tensor:
        """Draws ``first .. first + count - 1`` of ``channels`` numbers each, standard normal fp32 [N, count, channels].

        Source: Box & Muller 1958.
        """
        radius, angle = self._halves(lane, first * channels, count * channels)

        z = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
        return z.view(len(z), count, channels)


def row_keys(noise: PairedNoise, stream: str, tokens: int) -> Tensor:
    """A key for the :class:`CounterRNG` of every token position, int64 [B, tokens]: the bits of two of its noises."""
    bits = noise.first(stream, tokens, 2).float().contiguous().view(torch.int32).to(torch.int64)
    return (bits[..., 0] << 32) ^ (bits[..., 1] & 0xFFFFFFFF)


class CellNoise(NamedTuple):
    """The random numbers of a stream, a function of cell and token value: tensors only, which a recorded function can
    take.
    """

    keys: Tensor  # int64 [B, 1, 1], the counter of every image at cell 0 and value 0
    steps: Tensor  # int64 [V], the steps from there to each value

    def uniform(self, cells: Tensor) -> Tensor:
        """Uniform numbers fp32 [B, n, V] of int64 cells [n], or [B, n] if images differ.

        They are above 0 and below 1, and finest near 0.
        """
        # The counter is cell * 2^32 + value, in steps of GOLDEN; int64 arithmetic wraps around.
        bits = mix_(self.keys + (cells * _CELL)[..., None] + self.steps)
        upper = (bits >> 32).bitwise_and_((1 << 32) - 1)

        # The numbers nearest to 1 would be rounded to it, which makes the Gumbel noise -inf.
        return upper.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)

    def gumbel(self, cells: Tensor) -> Tensor:
        """Gumbel(0, 1) noise fp32 [B, n, V] of int64 cells [n], or [B, n] if images differ."""
        # Large values of the noise, which decide the argmax, are computed from the finest end of the uniform numbers.
        return self.uniform(cells).neg_().log1p_().neg_().log_().neg_()
