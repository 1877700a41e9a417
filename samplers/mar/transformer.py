"""The look of MAR: a transformer computes a condition z for each token that an AR step decides.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. :class:`FullTransformer` computes everything in every pass;
``lazy/transformer.py`` reuses features of earlier passes.

Shapes: B images of L tokens, c channels of a token, D transformer width, and P branches. P is 2 with guidance: first
the conditional branch, which reads the class or prompt, then the null branch, which does not. P is 1 without guidance.

A *row* is one vector of the encoder or decoder. *Buffer rows* stand in front of the rows of an image's tokens. In class
models, the buffer rows hold the class. A position is the index of a token in its image. A *snapshot* is an image at an
AR step, with the tokens that were decided before this AR step. A pass reads Q snapshots, and several of them may be of
the same image. In each snapshot, it reads K known (decided) tokens, and computes z of M wanted tokens. An entry of a
batch is a snapshot in one branch::

    batch of       size       when
    the decoder    P Q        always
    the encoder    F = P Q    the encoder reads the class
    the encoder    F = Q      otherwise, because all branches share the encoder's output
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...networks.mar import BUDGET, Conditioning
from ...networks.torch_state import to_device
from ..chain import HeadSampler
from .canvas import MARCanvas


class Snapshots(NamedTuple):
    """The Q snapshots that a pass reads. Snapshot i is image ``images[i]`` at AR step ``steps[i]``."""

    images: Sequence[int]
    steps: Sequence[int]


class Transformer(ABC):
    """Computes the conditions z from the decided tokens. The base of :class:`FullTransformer` and LazyMAR's
    :class:`.LazyTransformer`.
    """

    # Calls the diffusion head. This is a field of the transformer, so a sampler's argument ``make_transformer`` chooses
    # LazyMAR's caches of the transformer and also LazyMAR's cache of the head.
    heads: HeadSampler
    # Whether a pass may read snapshots of different AR steps. If so, the class overrides :meth:`for_snapshots`.
    allows_different_steps = False

    def __init__(self, canvas: MARCanvas):
        net = canvas.model.net
        self.canvas = canvas
        self.heads = HeadSampler(net, net.head, canvas.report, BUDGET)

    @abstractmethod
    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        """Compute z [P, B, M, D] at the positions ``wanted``, int64 [B, M]. The transformer reads the tokens that were
        decided before AR step ``step``.
        """

    def for_snapshots(self, snapshots: Snapshots, wanted: Tensor) -> Tensor:
        """Compute z [P, Q, M, D] of Q snapshots at the positions ``wanted``, int64 [Q, M]."""
        raise NotImplementedError("this transformer reads all images at the same AR step")

    def for_ar_steps(self, ar_steps: range) -> list[Tensor]:
        """Compute z of several AR steps in one pass. Each AR step reads the tokens and drafts of all AR steps before
        it. If :attr:`allows_different_steps` is False, ``ar_steps`` must be a single AR step.

        Returns z [P, B, n, D] of each AR step, at the n positions that this AR step decides.
        """
        images = self.canvas.images
        order = self.canvas.order
        if len(ar_steps) == 1:  # every transformer can do this, also without for_snapshots
            (step,) = ar_steps
            return [self(step, order.positions_from(step))]

        # 1. The snapshots. Below, snapshot = AR step x images + image, if AR steps are counted from the first of
        #    ``ar_steps``.
        steps = [step for step in ar_steps for _ in range(images)]
        snapshots = Snapshots([*range(images)] * len(ar_steps), steps)

        # 2. The positions that each AR step decides. A pass needs the same number of positions for all snapshots, so
        #    shorter lists of positions are padded with their first position.
        sizes = [order.sizes[step] for step in ar_steps]
        wanted = []
        for step in ar_steps:
            positions = order.positions_from(step)
            padding = positions[:, :1].expand(-1, max(sizes) - positions.shape[1])
            wanted.append(torch.cat([positions, padding], 1))

        # 3. Run the pass, and split z [P, Q, M, D] into the AR steps, without the padding.
        z = self.for_snapshots(snapshots, torch.cat(wanted))
        return [part[:, :, :n] for part, n in zip(z.split(images, 1), sizes, strict=True)]

    def discard_features(self) -> None:  # noqa: B027 (optional for subclasses)
        """Discard all cached features, if there are any. Call this after decided tokens have been resampled."""


class FullTransformer(Transformer):
    """Computes all rows of the encoder and the decoder in every pass. One batch holds both branches of guidance."""

    allows_different_steps = True

    def __init__(self, canvas: MARCanvas):
        super().__init__(canvas)
        self.branches = 2 if canvas.guided else 1  # P
        # How many branches the encoder computes; 1 if all branches share its output.
        self.encoder_branches = self.branches if canvas.conditioning.read_by_encoder else 1
        # For the encoder's buffer rows in :meth:`__call__`, [F, D]. There each image is one snapshot, so Q is B.
        self.buffer_vectors = canvas.conditioning.vectors(canvas.guided)

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        canvas = self.canvas
        known = canvas.order.decided_before(step)
        return self._pass(canvas.conditioning, self.buffer_vectors, canvas.values, wanted, known)

    def for_snapshots(self, snapshots: Snapshots, wanted: Tensor) -> Tensor:
        """One pass for any snapshots. Except for rounding in padded attention, z equals the z of :meth:`__call__`."""
        canvas = self.canvas
        index = to_device(torch.tensor(snapshots.images), canvas.device)
        known, mask = canvas.order.decided_before_each(index, snapshots.steps)
        conditioning = canvas.conditioning.of(snapshots.images)
        buffer_vectors = conditioning.vectors(canvas.guided)
        return self._pass(conditioning, buffer_vectors, canvas.values[index], wanted, known, mask)

    def _pass(
        self,
        conditioning: Conditioning,
        buffer_vectors: Tensor,
        tokens: Tensor,
        wanted: Tensor,
        known: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Compute z [P, Q, M, D] of Q snapshots.

        Args:
            conditioning: the classes or prompts of the snapshots.
            buffer_vectors: [F, D], the vectors for the encoder's buffer rows.
            tokens: [Q, L, c], the tokens of each snapshot's image; only the ones at ``known`` are read.
            wanted: int64 [Q, M], the positions whose z is returned.
            known: int64 [Q, K], the positions whose tokens the encoder reads, ascending.
            mask: bool [Q, K], False on the padding of ``known``; None if ``known`` has no padding.
        """
        canvas = self.canvas
        net = canvas.model.net
        branches = self.branches
        encoder_branches = self.encoder_branches

        # 1. The encoder reads the known tokens. ``fuse`` makes the decoder's input from its output; in models with
        #    prompts, this is a language model, which reads the prompts.
        known_of_encoder = known.repeat(encoder_branches, 1)
        mask_of_encoder = None if mask is None else mask.repeat(encoder_branches, 1)
        encoded = net.encode(tokens.repeat(encoder_branches, 1, 1), known_of_encoder, buffer_vectors, mask_of_encoder)
        fused = conditioning.fuse(encoded, known_of_encoder, canvas.guided, mask_of_encoder)

        # 2. The decoder computes z in all branches.
        mask_of_decoder = None if mask is None else mask.repeat(branches, 1)
        z = net.decode(fused, known.repeat(branches, 1), wanted.repeat(branches, 1), mask_of_decoder)

        encoder_rows = encoded.shape[0] * encoded.shape[1]
        decoder_rows = len(z) * (net.config.buffer + net.config.tokens)
        canvas.report.add(**conditioning.counts(encoder_rows, decoder_rows))
        return z.unflatten(0, (branches, -1))
