"""What the passes of a MAR keep for later ones: keys and values of its blocks (LazyMAR).

Recorded functions write these tensors, so they stay at their addresses for a whole run, see :mod:`.graphs`.

Shapes: E entries of a batch, each of one branch of guidance of one image, N = buffer + L rows of the decoder, d numbers
of an attention head. A *store* holds the keys, then the values of a block, [2, E, heads, rows, d]; :func:`.mar.update`
writes it.
"""

from __future__ import annotations

import torch

from .graphs import State
from .mar import MAR, DecoderCache
from .speed import COMPILE


class FeatureCache:
    """The tensors of a run."""

    encoder: State  # of every block a store for tokens and, after them, class rows; empty without room for them
    decoder: DecoderCache | None

    def __init__(
        self, net: MAR, device: torch.device, entries: int, encoder_entries: int, room: int, block: int | None
    ):
        """Allocate them.

        Args:
            entries: E of the decoder.
            encoder_entries: E of the encoder.
            room: rows of an encoder's store; 0 to keep none.
            block: the decoder's block that measures, from 0; None to keep nothing of the decoder.
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
