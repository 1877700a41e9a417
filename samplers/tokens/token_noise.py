"""Paired noise for discrete tokens: one random number for every (seed, image, stream, cell, token value).

The Gumbel-max trick: the argmax of log-probabilities plus Gumbel noise is a sample (Gumbel 1954). Two samplers that
share the noise therefore sample the same token where their probabilities are equal, and usually where they are close.
The numbers are counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): any cell can be
sampled at any time, on any device, without a table and without waiting for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...networks.torch_state import to_device
from ..noise import GOLDEN, CellNoise, stream_key


class TokenNoise:
    """The noise of B images, generated from one seed (0 to 2^64 - 1).

    ``images``: the index of every image of the batch.

    A derived class may take its numbers from elsewhere. It then overrides :meth:`stream`, which returns an object with
    a method ``gumbel`` like that of :class:`CellNoise`.
    """

    seed: int | None = None  # None in a derived class that takes its numbers from elsewhere

    def __init__(self, seed: int | None, images: Sequence[int]):
        self.seed = seed
        self.images = tuple(images)
        self._streams: dict[tuple[str, int, torch.device], CellNoise] = {}

    def __len__(self) -> int:
        return len(self.images)

    def of(self, images: Sequence[int]) -> TokenNoise:
        """The noise of some of the images; ``images`` are their indices in the batch.

        Raises:
            TypeError: a derived class that does not define its own ``of``.
        """
        if type(self) is not TokenNoise:
            raise TypeError(f"{type(self).__name__} draws other numbers; define its of(), which keeps some images.")
        return TokenNoise(self.seed, [self.images[i] for i in images])

    def stream(self, name: str, values: int, device: torch.device) -> CellNoise:
        """The noise of stream ``name`` for tokens with ``values`` possible values, on a device; made once per run."""
        key = (name, values, device)

        if key not in self._streams:
            seeds = [stream_key(self.seed, image, name) for image in self.images]
            keys = [int.from_bytes(seed, "little", signed=True) for seed in seeds]
            of_images = to_device(torch.tensor(keys, dtype=torch.int64), device).view(-1, 1, 1)
            of_values = torch.arange(values, dtype=torch.int64, device=device) * GOLDEN
            self._streams[key] = CellNoise(of_images, of_values)
        return self._streams[key]
