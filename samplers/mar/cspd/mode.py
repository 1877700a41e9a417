"""What the modes of CSpD share: how the target reads drafts, and how the report counts their outcomes.

Shapes: B images of L tokens; n tokens of an image in an AR step; C, the width of the transformer; P branches of
guidance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ....networks.mar import BUDGET
from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED, PLAIN, REJECTED
from ...chain import DiffusionBatch, HeadFactory
from ...diffusion_steps import StepTable
from ...noise import StreamNoise, row_keys
from ..canvas import MARCanvas, TokenIndex
from ..transformer import Transformer
from .draft import MARDrafter


class TargetBatch(NamedTuple):
    """A batch for the target's head: the tokens of the AR steps of a pass, one AR step after another."""

    batch: DiffusionBatch
    tokens: TokenIndex
    sizes: list[int]  # number of tokens in each AR step, for all images together


class Mode(ABC):
    """How the target verifies drafts. The draft model drafts all AR steps of a *segment* before the target verifies
    them.

    All images of a batch are always at the same AR step. In the modes *paper* and *lossless*, a rejection in one image
    therefore discards the later drafts of all images. For the images without a rejection, the draft model makes the
    same drafts again, from the same noise. The target then verifies them with the same random numbers. So the tokens of
    an image do not depend on its batch.
    """

    # Whether the last diffusion step of a path adds noise, as all other steps do; see :class:`.Paths`.
    adds_last_noise: ClassVar[bool] = False
    table: StepTable  # the diffusion steps of the target; each subclass sets them

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        """``noise``: the noise of the target's full diffusion. The draft model samples with it too."""
        self.canvas = canvas
        self.transformer = transformer
        self.drafter = drafter
        self.noise = noise
        # The target's head is computed in full, even if the transformer has caches.
        net = canvas.model.net
        self.heads = HeadFactory(net, net.head, canvas.report, BUDGET)
        # Keys of the random numbers with which drafts are verified, int64 [B, L].
        self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    @abstractmethod
    def segment(self, first: int) -> Iterator[int]:
        """Draft and verify a segment that starts at AR step ``first``, and decide its tokens.

        After each AR step, yields the index of the next AR step, so that the caller can show a partial result. The next
        segment starts at the last of these indices. For example, a segment that decides the AR steps 4 and 5 yields 5
        and 6. In mode *published*, an AR step counts as soon as it is drafted.
        """

    def passes(self, ar_steps: range) -> list[range]:
        """The AR steps that each pass of the target's transformer evaluates: all ``ar_steps`` in one pass or, if the
        transformer has caches, one AR step in each pass. A transformer with caches may read only final tokens, so the
        caller must decide the AR steps of a pass before it runs the next pass.
        """
        if self.transformer.allows_different_steps:
            return [ar_steps]
        return [range(step, step + 1) for step in ar_steps]

    def run_target(self, ar_steps: range) -> TargetBatch:
        """Run a pass of the target's transformer over ``ar_steps``, which :meth:`passes` chose. Each AR step reads the
        tokens and drafts of all earlier AR steps. Returns the batch for the target's head.
        """
        canvas = self.canvas
        with canvas.clock.phase("transformer"):
            zs = self.transformer.for_ar_steps(ar_steps)  # for each AR step, z [P, B, n, C]

        with canvas.clock.phase("head"):
            tokens = TokenIndex.step_by_step([canvas.order.positions_from(step) for step in ar_steps])
            batch = canvas.batch(self.table, tokens, torch.cat(zs, 2), self.noise)
        return TargetBatch(batch, tokens, [z.shape[1] * z.shape[2] for z in zs])

    def count_outcomes(self, accepted: Tensor, uses_draft: Tensor | None = None) -> Tensor:
        """Count the drafts of an AR step, or of a whole segment, in the report. Each image with a rejected draft counts
        as a restart.

        Args:
            accepted: bool [B, n] on the host, whether the target accepts each draft.
            uses_draft: bool [B] on the host, the images whose drafts count; None for all images. In an image without
                counted drafts, all tokens are the target's own.

        Returns:
            The outcome of each token, ACCEPTED, REJECTED or PLAIN, uint8 [B, n] on the device.
        """
        outcome = torch.where(accepted, ACCEPTED, REJECTED)
        if uses_draft is not None:
            outcome = outcome.where(uses_draft[:, None], PLAIN)
        rejected = outcome == REJECTED
        counts = {"accepted": int((outcome == ACCEPTED).sum()), "rejected": int(rejected.sum())}
        self.canvas.report.add(**counts, restarts=int(rejected.any(1).sum()))
        return to_device(outcome.to(torch.uint8), self.canvas.device)
