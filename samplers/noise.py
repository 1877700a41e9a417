"""Paired noise: the seed, the stream, the image's index and the token's cell determine every random number.

A *stream* is a named sequence of random numbers. Different streams are independent. Two samplers with the same seed
start from the same noise. Image i has the same noise whether FastAR generates the image alone or in a batch.

- :class:`PairedNoise`: noise for diffusion. Generators on the CPU compute the noise, so it does not depend on the
  device. These generators leave PyTorch's global generator unchanged.
- :class:`CounterRNG`: random numbers for the verification of drafts. It is not known in advance how many numbers
  a rejected draft needs, so each number is computed from a counter when it is needed.
- :class:`CellNoise`: random numbers for sampling discrete tokens, also from counters; see ``tokens/token_noise.py``.

The counters follow SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): a counter
advances in steps of :data:`GOLDEN`, and :func:`mix_` hashes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..networks.torch_state import to_device

# SplitMix64's constants as signed numbers, because torch computes in int64. Products wrap around modulo 2^64, as
# SplitMix64 requires.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_FACTOR_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_FACTOR_2 = 0x94D049BB133111EB - (1 << 64)
# Difference between the counters of two consecutive cells: 2^32 times GOLDEN, modulo 2^64.
_CELL_STRIDE = (GOLDEN & 0xFFFFFFFF) << 32
# The largest fp32 number below 1.
_BELOW_ONE = 1 - 2**-24


def mix_(x: Tensor) -> Tensor:
    """Turn int64 counters into random bits, in place."""
    _fold_(x, 30).mul_(_MIX_FACTOR_1)
    _fold_(x, 27).mul_(_MIX_FACTOR_2)
    return _fold_(x, 31)


def _fold_(x: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift, in place. The shift is logical: torch's own shift of int64 would repeat the sign bit."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def stream_key(seed: int | None, image: int, stream: str) -> bytes:
    """Eight bytes that determine the random numbers of ``stream`` for a seed and the image with the index ``image``."""
    return hashlib.sha256(f"fastar/{seed}/{image}/{stream}".encode()).digest()[:8]


class PairedNoise:
    """The noise of B images, all from one seed (0 to 2^64 - 1).

    ``images``: for each of the B images, its index in the whole batch of the run.
    """

    seed: int | None = None  # None in a derived class whose noise does not come from a seed

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
        """A permutation of the cells for each image, int64 [B, tokens]. The sampler goes through a permutation
        backwards: it begins with the cell in the last entry. ``mar/prepare.py`` therefore reverses the permutations
        before it divides them among the AR steps.
        """
        return torch.stack([torch.randperm(tokens, generator=g) for g in self._generators("order")])

    def start_noise(self, stream: str, tokens: int, channels: int) -> Tensor:
        """The noise from which the diffusion of each token starts, fp32 [B, tokens, channels]."""
        return torch.stack([torch.randn(tokens, channels, generator=g) for g in self._generators(f"{stream}/first")])

    def step_noise(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        """The noise of ``count`` diffusion steps, fp32 [B, count, tokens, channels]. Entry 0 is for the first step,
        which starts from the state with the most noise.
        """
        generators = self._generators(f"{stream}/steps")
        return torch.stack([torch.randn(count, tokens, channels, generator=g) for g in generators])


class StreamNoise(NamedTuple):
    """The noise of one stream for every token, fp32. For example, MAR's diffusion reads the stream "full"."""

    start: Tensor  # the state before the first diffusion step, [B, L, c]
    steps: Tensor  # the noise of each diffusion step, [S, B, L, c]


def stream_noise(
    noise: PairedNoise, stream: str, steps: int, tokens: int, channels: int, device: torch.device
) -> StreamNoise:
    """The noise of ``stream`` on ``device``. In the shapes of :class:`StreamNoise`, S is ``steps``, L is ``tokens``
    and c is ``channels``.
    """
    start = noise.start_noise(stream, tokens, channels)
    of_steps = noise.step_noise(stream, steps, tokens, channels)
    return StreamNoise(to_device(start, device), to_device(of_steps, device).transpose(0, 1))


def noise_bytes(images: int, streams: Mapping[str, int], numbers_per_step: int) -> int:
    """How many bytes the noise of a batch takes in fp32.

    Args:
        images: number of images in the batch.
        streams: the number of diffusion steps of every stream, see :meth:`.Guarantees.streams`.
        numbers_per_step: number of random numbers that one image needs in one step.
    """
    # In each stream: the start, the steps, and one entry as a margin, because the estimate shall not be too low.
    entries = sum(count + 2 for count in streams.values())
    return 4 * images * entries * numbers_per_step


class CounterRNG:
    """Counter-based random numbers for N rows. Each row has a key.

    A row has independent sequences of numbers, called lanes. Number i of a lane is a hash of (key, lane, i). This
    object has no state besides the keys, so the numbers of a row depend neither on other rows nor on earlier calls. The
    device that holds the keys computes the numbers.

    ``keys``: int64 [N], one key per row, see :func:`row_keys`.
    """

    def __init__(self, keys: Tensor):
        self.keys = keys

    def for_rows(self, rows: Tensor) -> CounterRNG:
        """The random numbers of the rows with the indices ``rows``, int64 [M]."""
        return CounterRNG(self.keys[rows])

    def _halves(self, lane: Tensor | int, start_index: int, count: int) -> tuple[Tensor, Tensor]:
        """Two uniform random numbers for each index ``start_index .. start_index + count - 1`` of a lane: one from the
        upper and one from the lower 32 bits of the hash. Both results are fp32 [N, count], above 0 and at most 1.
        """
        if isinstance(lane, int):
            lane = torch.full_like(self.keys, lane)

        start = mix_(self.keys + mix_(lane * GOLDEN))
        number = torch.arange(start_index + 1, start_index + count + 1, device=self.keys.device)
        bits = mix_(start[:, None] + number * GOLDEN)

        upper = (bits >> 32) & 0xFFFFFFFF
        lower = bits & 0xFFFFFFFF
        return (upper.float() + 0.5) / 2**32, (lower.float() + 0.5) / 2**32

    def uniform(self, lane: Tensor | int, start_index: int = 0, count: int = 1) -> Tensor:
        """The uniform numbers ``start_index .. start_index + count - 1`` of a lane, fp32 [N, count], above 0 and at
        most 1.

        ``lane``: one number, or int64 [N] if the rows have different lanes.
        """
        return self._halves(lane, start_index, count)[0]

    def normal(self, lane: Tensor | int, start_index: int, count: int, channels: int) -> Tensor:
        """The vectors ``start_index .. start_index + count - 1`` of a lane, fp32 [N, count, channels]. A vector has
        ``channels`` standard normal numbers. ``lane``: see :meth:`uniform`.

        Source: Box & Muller 1958.
        """
        upper, lower = self._halves(lane, start_index * channels, count * channels)

        z = (-2 * upper.log()).sqrt() * (2 * math.pi * lower).cos()  # a radius times the cosine of an angle
        return z.view(len(z), count, channels)


def row_keys(noise: PairedNoise, stream: str, tokens: int) -> Tensor:
    """The keys of :class:`CounterRNG`, int64 [B, tokens]: one for every token (or block) of every image. A key consists
    of the bits of two fp32 numbers of ``stream``.
    """
    bits = noise.start_noise(stream, tokens, 2).float().contiguous().view(torch.int32).to(torch.int64)
    return (bits[..., 0] << 32) ^ (bits[..., 1] & 0xFFFFFFFF)


class CellNoise(NamedTuple):
    """The random numbers of a stream: one number for each of B images, each cell and each of V token values.

    The class holds only tensors, so a function that is recorded as a CUDA graph can take the object as an argument.
    """

    image_counters: Tensor  # int64 [B, 1, 1], the counter of every image at cell 0 and token value 0
    value_offsets: Tensor  # int64 [V], what each token value adds to the image's counter: value * GOLDEN

    def uniform(self, cells: Tensor) -> Tensor:
        """Uniform numbers, fp32 [B, n, V], above 0 and below 1. Their resolution is highest near 0.

        ``cells``: int64 [n], or [B, n] if the images have different cells.
        """
        # The counter is image_counter + (cell * 2^32 + value) * GOLDEN; int64 arithmetic wraps around.
        bits = mix_(self.image_counters + (cells * _CELL_STRIDE)[..., None] + self.value_offsets)
        upper = (bits >> 32).bitwise_and_((1 << 32) - 1)

        # Without the clamp, numbers near 1 would round to 1, where the Gumbel noise is -inf.
        return upper.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)

    def gumbel(self, cells: Tensor) -> Tensor:
        """Gumbel(0, 1) noise, fp32 [B, n, V]; ``cells``: see :meth:`uniform`."""
        # The noise is -log(-log(1 - u)), with 1 - u instead of the usual u. Large noise, which decides the argmax,
        # therefore comes from u near 0, where the resolution of u is highest.
        log = self.uniform(cells).neg_().log1p_()  # log(1 - u)
        return log.neg_().log_().neg_()
