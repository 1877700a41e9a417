"""What the passes of a MAR keep for later passes: keys and values of its blocks (LazyMAR).

Recorded functions write these tensors, so they stay at their addresses for a whole run, see :mod:`.graphs`.

Shapes: E entries of a batch (one for each branch of guidance of each image), N = buffer + L rows of the decoder, d
numbers of an attention head. A *store* holds the keys, then the values of a block, [2, E, heads, rows, d];
:func:`.mar.update` writes it.
"""

from __future__ import annotations

import torch

from .graphs import State
from .mar import MAR, DecoderCache
from .speed import COMPILE


class FeatureCache:
    """The tensors of a run."""

    encoder: State  # for each block a store for tokens and, after them, class rows; empty if ``room`` is 0
    decoder: DecoderCache | None

    def __init__(
        self, net: MAR, device: torch.device, entries: int, encoder_entries: int, room: int, block: int | None
    ):
        """Allocate the tensors.

        Args:
            entries: E of the decoder.
            encoder_entries: E of the encoder.
            room: how many rows a store of the encoder has; 0: there are no stores for the encoder.
            block: index of the decoder's measuring block, from 0; None: nothing is kept of the decoder.
        """
        c = net.config
        size = c.dim // c.heads
        rows = c.buffer + c.tokens
        shapes: list[tuple[int, ...]] = []
        if room:
            shapes += [(2, encoder_entries, c.heads, room, size)] * c.encoder_depth
        in_encoder = len(shapes)
        if block is not None:
            shapes += [(2, entries, c.heads, rows, size)] * (c.decoder_depth - block - 1)
            shapes += [(entries, c.heads, rows, size)]

        if shapes and net.speed == COMPILE:
            net.note_plain("blocks with LazyMAR's caches")
        like = torch.empty(0, dtype=net.decoder_norm.weight.dtype, device=device)
        if net.records and shapes:
            tensors = net.graphs.zeros(shapes, like)
            net.graphs.use(tensors, self)
        else:
            tensors = [like.new_empty(shape) for shape in shapes]

        self.encoder = State(tensors[:in_encoder])
        self.decoder = None
        if block is not None:
            self.decoder = DecoderCache(block, State(tensors[in_encoder:-1]), State(tensors[-1:]))

    def encoder_rows(self, size: int) -> State:
        """The first ``size`` rows of each store of the encoder."""
        return State(store[:, :, :, :size] for store in self.encoder)
