"""What the modes of CSpD share: how the target reads drafts, and how the report counts their outcomes.

Shapes: B images of L tokens; n tokens of an image in an AR step; C, the width of the transformer; P branches of
guidance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED, PLAIN, REJECTED
from ...chain import DiffusionBatch
from ...diffusion_steps import StepTable
from ...engine import Verdict
from ...noise import StreamNoise, row_keys
from ..canvas import MARCanvas
from ..tokens import TokenIndex
from ..transformer import Transformer
from .draft import MARDrafter


class TargetBatch(NamedTuple):
    """A batch for the target's head: the tokens of several AR steps, one AR step after another."""

    batch: DiffusionBatch
    tokens: TokenIndex
    sizes: list[int]  # number of tokens in each AR step, for all images together


class DecidedStep(NamedTuple):
    """An AR step that the target has decided."""

    verdict: Verdict
    has_rejection: np.ndarray  # bool [B], the images with a rejected draft


class Mode(ABC):
    """How the target verifies drafts. The draft model drafts all AR steps of a *segment* before the target verifies
    them.

    All images of a batch are always at the same AR step. In the modes *paper* and *lossless*, a rejection in one image
    therefore discards the later drafts of all images. For the images without a rejection, the draft model makes the
    same drafts again, from the same noise. The target then verifies them with the same random numbers. So the tokens of
    an image do not depend on its batch.
    """

    table: StepTable  # the diffusion steps of the target; each subclass sets them

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        """``noise``: the noise of the target's full diffusion. The draft model samples with it too."""
        self.canvas = canvas
        self.transformer = transformer
        self.drafter = drafter
        self.noise = noise
        # Keys of the random numbers with which drafts are verified, int64 [B, L].
        self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    @abstractmethod
    def segment(self, first: int) -> Iterator[Verdict]:
        """Draft and verify AR steps from ``first`` on. Yields one verdict for every AR step of the segment that it
        decides.
        """

    def target_batches(self, ar_steps: range) -> Iterator[TargetBatch]:
        """Yield a batch for every pass of the target's transformer over ``ar_steps``. The transformer reads all drafts
        of earlier AR steps. One pass evaluates all ``ar_steps`` or, if the transformer has caches, a single AR step.

        A transformer with caches may read only final tokens. So ask for a batch only after the tokens of the previous
        batch are final.
        """
        canvas = self.canvas
        conditions = self.transformer.each_step(ar_steps.start, len(ar_steps))
        step = ar_steps.start
        for zs in canvas.clock.timed("transformer", conditions):  # for each AR step of a pass, z [P, B, n, C]
            with canvas.clock.phase("head"):
                tokens = TokenIndex.step_by_step([canvas.order.positions_from(step + i) for i in range(len(zs))])
                batch = canvas.batch(self.table, tokens, torch.cat(zs, 2), self.noise)
            yield TargetBatch(batch, tokens, [z.shape[1] * z.shape[2] for z in zs])
            step += len(zs)

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
