"""Paired noise: all randomness of an image is drawn from (seed, image index), per token position.

Two samplers with one seed therefore start from the same picture, and image i is the same alone or in a batch. Drawn on
the CPU with own generators, so that the picture does not depend on the device and no global state is touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


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
        return torch.stack([torch.randn(count, tokens, channels, generator=g) for g in self._generators(f"{stream}/steps")])
