"""Paired noise for discrete tokens: one random number for each seed, image, stream, cell and token value.

The noise is for the Gumbel-max trick (Gumbel 1954): if Gumbel noise is added to the log-probabilities of all values,
the value with the largest sum is a sample from the distribution. If two samplers use the same noise, they sample the
same token where their probabilities are equal, and usually also where the probabilities are close. A *stream* is a
named set of random numbers.

Each number is computed from a counter (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Any cell can
therefore be sampled at any time and on any device, without a table of numbers and without waiting for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...networks.torch_state import to_device
from ..noise import GOLDEN, CellNoise, stream_key


class TokenNoise:
    """The noise of B images, generated from one seed (0 to 2^64 - 1).

    ``images``: for each of the B images, its index in the whole batch, of which the B images may be a part.

    A derived class may take its numbers from elsewhere. It then overrides :meth:`of` and :meth:`stream`. Its ``stream``
    must return an object with the method ``gumbel`` of :class:`CellNoise`.
    """

    seed: int | None = None  # None in a derived class that takes its numbers from elsewhere

    def __init__(self, seed: int | None, images: Sequence[int]):
        self.seed = seed
        self.images = tuple(images)
        self._streams: dict[tuple[str, int, torch.device], CellNoise] = {}

    def __len__(self) -> int:
        return len(self.images)

    def of(self, images: Sequence[int]) -> TokenNoise:
        """The noise of some of these B images. ``images``: their indices, from 0 to B - 1.

        Raises:
            TypeError: the object is of a derived class that does not override this method.
        """
        if type(self) is not TokenNoise:
            raise TypeError(f"{type(self).__name__} takes its random numbers from elsewhere; override of().")
        return TokenNoise(self.seed, [self.images[i] for i in images])

    def stream(self, name: str, values: int, device: torch.device) -> CellNoise:
        """The noise of the stream ``name`` for tokens with ``values`` possible values, on a device.

        The object stores the result, so the host computes the keys of a stream only once.
        """
        key = (name, values, device)

        if key not in self._streams:
            seeds = [stream_key(self.seed, image, name) for image in self.images]
            keys = [int.from_bytes(seed, "little", signed=True) for seed in seeds]
            image_counters = to_device(torch.tensor(keys, dtype=torch.int64), device).view(-1, 1, 1)
            value_offsets = torch.arange(values, dtype=torch.int64, device=device) * GOLDEN
            self._streams[key] = CellNoise(image_counters, value_offsets)
        return self._streams[key]
