"""What the modes of CSpD share: their base class, the batches for the target's head, and the outcomes of drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED, REJECTED
from ...chain import DiffusionBatch, StepTable
from ...engine import Verdict
from ...noise import row_keys
from ..canvas import MARCanvas, StreamNoise, Tokens
from ..mar import Transformer
from .draft import MARDrafter


class Mode(ABC):
    """How the target verifies drafts. A segment is the AR steps that are drafted before the target verifies them."""

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        """``noise``: the noise of the target's full diffusion; the draft model samples with the same noise."""
        self.canvas = canvas
        self.transformer = transformer
        self.drafter = drafter
        self.noise = noise
        # Keys of the random numbers with which drafts are verified, int64 [B, L].
        self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    @abstractmethod
    def segment(self, first: int) -> Iterator[Verdict]:
        """Draft and verify the AR steps from ``first`` on. Yields one verdict for every AR step that it decides."""


class TargetBatch(NamedTuple):
    """The tokens of some AR steps, one AR step after another, as a batch for the target's head to sample."""

    batch: DiffusionBatch
    tokens: Tokens
    sizes: list[int]  # number of tokens of each AR step, in all images together


def target_batches(
    canvas: MARCanvas, transformer: Transformer, steps: range, noise: StreamNoise, table: StepTable
) -> Iterator[TargetBatch]:
    """Yield batches of the tokens of ``steps``, in which each AR step is given all drafts before it. There is a batch
    for every pass of the target's transformer, and each pass evaluates all AR steps that it can.

    A transformer with caches may read only final tokens. So ask for a batch only after the tokens of the previous batch
    are final.
    """
    conditions = transformer.each_step(steps.start, len(steps))
    step = steps.start
    for zs in canvas.clock.timed("transformer", conditions):  # conditions [P, B, n, C] of each AR step of a pass
        with canvas.clock.phase("head"):
            tokens = Tokens.step_by_step([canvas.order.positions_from(step + i) for i in range(len(zs))])
            batch = canvas.batch(table, tokens, torch.cat(zs, 2), noise)
        yield TargetBatch(batch, tokens, [z.shape[1] * z.shape[2] for z in zs])
        step += len(zs)


def count_outcomes(canvas: MARCanvas, accepted: Tensor) -> Tensor:
    """Add drafts to the counts of the report, in which each image with a rejected draft is a restart. Returns the
    outcome of each draft, ACCEPTED or REJECTED, uint8 [B, n] on the device. ``accepted``: bool [B, n] on the host.
    """
    accepted_count = int(accepted.sum())
    restarts = int((~accepted).any(1).sum())
    canvas.report.add(accepted=accepted_count, rejected=accepted.numel() - accepted_count, restarts=restarts)
    return to_device(torch.where(accepted, ACCEPTED, REJECTED).to(torch.uint8), canvas.device)
