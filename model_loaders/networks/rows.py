"""What a batch is conditioned on, as a masked network reads it: class vectors here, prompts in ``prompts.py``.

A condition enters in two places: the vectors of the encoder's buffer rows, and whatever happens to the encoder's output before the
decoder reads it. For class labels the encoder has one set of rows per branch of guidance and its output is passed on unchanged.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .mar import MAR


class Work(NamedTuple):
    """Rows of a transformer pass, both branches of guidance together.

    Attributes:
        encoder: rows that the encoder's blocks computed.
        encoder_keys: rows that each of them attended to.
        decoder: rows that an average decoder block but the last computed.
        decoder_keys: rows that each of them attended to.
        last: rows that the last decoder block computed.
    """

    encoder: int
    encoder_keys: int
    decoder: int
    decoder_keys: int
    last: int


class Kept(Protocol):
    """Features between encoder and decoder that are kept from one AR step to the next (LazyMAR)."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors kept, for the memory count."""
        ...

    def extend(self, encoded: Tensor, new: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """The decoder's input rows that change.

        Args:
            encoded: [E, N + buffer, C], encoder output of new tokens, then of the buffer rows.
            new: int64 [B, N], positions of the new tokens.
            at: tokens known before.

        Returns:
            Rows [D, M, C] and their places in the decoder's input, int64 [D, M] (buffer rows from 0, then positions).
        """
        ...


class Rows(Protocol):
    """The condition of B images."""

    def __len__(self) -> int:
        """Number of images, B."""
        ...

    def vectors(self, guided: bool, count: int = 1) -> Tensor:
        """Vectors of the encoder's buffer rows for ``count`` copies of the batch.

        Returns:
            [E, C]: E is ``count`` B, or twice that where the branches of guidance differ in the encoder.
        """
        ...

    def fuse(self, encoded: Tensor, known: Tensor, guided: bool, padding_mask: Tensor | None = None) -> Tensor:
        """The decoder's input rows, both branches of guidance, the unconditional one last.

        Args:
            encoded: [E, buffer + K, C] from ``MAR.encode``.
            known: int64 [E, K], the positions of these tokens.
            padding_mask: bool [E, K], as for ``MAR.encode``.

        Returns:
            [D, buffer + K, C]: D is the number of images (copies included), twice that with guidance.
        """
        ...

    def keep(
        self, encoded: Tensor, known: Tensor, guided: bool, live: int, room: int, cached: bool
    ) -> tuple[Tensor, Kept]:
        """:meth:`fuse` whose features are kept for later AR steps.

        Args:
            encoded, known, guided: as for :meth:`fuse`.
            live: rows D of the decoder's input that later steps compute: B, or twice that.
            room: tokens and buffer rows that will have to fit.
            cached: whether old tokens' features are reused between encoder and decoder, or computed again at every step.
        """
        ...

    def work(self, work: Work) -> dict[str, int]:
        """Counts of a pass for the report, beyond the sum of the MAR's rows; {} for none."""
        ...


class ClassRows:
    """Class labels.

    Args:
        net: the network.
        labels: int64 [B].
    """

    def __init__(self, net: MAR, labels: Tensor):
        self.net, self.labels = net, labels

    def __len__(self) -> int:
        return len(self.labels)

    def vectors(self, guided: bool, count: int = 1) -> Tensor:
        rows = torch.cat([self.net.class_rows(self.labels, len(self))] * count)
        return torch.cat([rows, self.net.class_rows(None, len(rows))]) if guided else rows

    def fuse(self, encoded: Tensor, known: Tensor, guided: bool, padding_mask: Tensor | None = None) -> Tensor:
        return encoded

    def keep(
        self, encoded: Tensor, known: Tensor, guided: bool, live: int, room: int, cached: bool
    ) -> tuple[Tensor, Kept]:
        return encoded, _Nothing(self.net.config.buffer)

    def work(self, work: Work) -> dict[str, int]:
        return {}


class _Nothing:
    """Nothing is kept, and rows pass unchanged."""

    tensors: list[Tensor] = []

    def __init__(self, buffer: int):
        self.buffer = buffer

    def extend(self, encoded: Tensor, new: Tensor, at: int) -> tuple[Tensor, Tensor]:
        new = new.repeat(len(encoded) // len(new), 1)
        return encoded, places(new, self.buffer)


def places(new: Tensor, buffer: int) -> Tensor:
    """Places in the decoder's input of new tokens [R, N], then of the buffer rows; int64 [R, N + buffer]."""
    return torch.cat([new + buffer, torch.arange(buffer, device=new.device).expand(len(new), -1)], dim=1)
