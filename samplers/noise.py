"""Paired noise: all randomness of an image is drawn from (seed, image index), per token position.

Two samplers with one seed therefore start from the same picture, and image i is the same alone or in a batch. Drawn on
the CPU with own generators, so that the picture does not depend on the device and no global state is touched.

What a verification draws is not known beforehand (a rejection draws until something is kept), so it is counted and not
drawn in turn: :class:`CounterRNG`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# Written as signed numbers: torch counts in int64, whose products wrap around as they should.
GOLDEN, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_STAGES = ((30, _FIRST), (27, _SECOND), (31, 1))


def mix_(x: Tensor) -> Tensor:
    """Turn counters int64 into random bits, in place."""
    for shift, factor in _STAGES:
        # A shift that brings in zeros, which int64's own does not.
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            x.mul_(factor)
    return x


class Noise(Protocol):
    """Where a sampler's randomness comes from; tests inject recorded noise of the same shape."""

    def orders(self, tokens: int) -> Tensor:
        """int64 [B, tokens]: a permutation an image; tokens are revealed from its end."""
        ...

    def first(self, stream: str, tokens: int, channels: int) -> Tensor:
        """fp32 [B, tokens, channels]: the noise a token's diffusion starts from."""
        ...

    def steps(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        """fp32 [B, count, tokens, channels]: noise of every diffusion step, entry 0 for the highest timestep."""
        ...


class PairedNoise:
    """Noise of the images ``images`` of ``seed``.

    Args:
        seed: 0 to 2^64 - 1.
        images: image indices, one a batch entry.
    """

    def __init__(self, seed: int, images: Sequence[int]):
        self.seed, self.images = seed, tuple(images)

    def _generators(self, stream: str) -> list[torch.Generator]:
        out = []
        for image in self.images:
            digest = hashlib.sha256(f"fastar/{self.seed}/{image}/{stream}".encode()).digest()
            out.append(torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1))
        return out

    def orders(self, tokens: int) -> Tensor:
        return torch.stack([torch.randperm(tokens, generator=g) for g in self._generators("order")])

    def first(self, stream: str, tokens: int, channels: int) -> Tensor:
        return torch.stack([torch.randn(tokens, channels, generator=g) for g in self._generators(f"{stream}/first")])

    def steps(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        return torch.stack(
            [torch.randn(count, tokens, channels, generator=g) for g in self._generators(f"{stream}/steps")]
        )


# ------------------------------------------------------------------------------------------------ counted numbers


class CounterRNG:
    """Endless random numbers of rows: number i of a row's lane is a hash of (key, lane, i).

    Nothing is remembered between calls, so a row's numbers depend neither on its batch nor on what else was asked for,
    and asking again gives the same. They are computed on the keys' device.

    Args:
        keys: int64 [N], one a row; see :func:`row_keys`.
    """

    def __init__(self, keys: Tensor):
        self.keys = keys

    def of(self, rows: Tensor) -> CounterRNG:
        """The rng of some rows, int64 [M]."""
        return CounterRNG(self.keys[rows])

    def _halves(self, lane: Tensor | int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Two fp32 [N, count] of 32 bits each, above 0 and at most 1."""
        start = mix_(self.keys + mix_(torch.as_tensor(lane, device=self.keys.device) * GOLDEN))
        at = torch.arange(first + 1, first + count + 1, device=self.keys.device)
        bits = mix_(start[:, None] + at * GOLDEN)
        upper, lower = (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
        return (upper.float() + 0.5) / 2**32, (lower.float() + 0.5) / 2**32

    def uniform(self, lane: Tensor | int, first: int = 0, count: int = 1) -> Tensor:
        """fp32 [N, count], above 0 and at most 1: numbers ``first ..`` of a lane (a number, or int64 [N])."""
        return self._halves(lane, first, count)[0]

    def normal(self, lane: Tensor | int, first: int, count: int, channels: int) -> Tensor:
        """fp32 [N, count, channels], standard normal (Box & Muller 1958): draws ``first ..`` of ``channels`` numbers each."""
        radius, angle = self._halves(lane, first * channels, count * channels)
        z = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
        return z.view(len(z), count, channels)


def row_keys(noise: Noise, stream: str, tokens: int) -> Tensor:
    """A key for the :class:`CounterRNG` of every token position, int64 [B, tokens]: the bits of two of its noises."""
    bits = noise.first(stream, tokens, 2).float().contiguous().view(torch.int32).to(torch.int64)
    return (bits[..., 0] << 32) ^ (bits[..., 1] & 0xFFFFFFFF)
