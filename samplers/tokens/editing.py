"""Editing: tokens outside the mask are given, those inside are drawn again.

A given token stands in its cell whatever is drawn for it. Samplers draw in raster order or near it, so that a token sees the given ones
before it, and not those after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError
from ...reports.record import GIVEN, Report
from ..editing import masked_tokens
from .draws import Draws


@dataclass(frozen=True, eq=False)
class EditDraws:
    """Draws of B images with given tokens; in the place of the draws of LlamaGen, PAR and ZipAR.

    Attributes:
        draws: of the other tokens.
        given: int64 [B, N + 1], tokens by cell, -1 where they are drawn; the last column receives padding.
    """

    draws: Draws
    given: Tensor

    def __len__(self) -> int:
        return len(self.draws)

    def of(self, images: Sequence[int]) -> EditDraws:
        return EditDraws(self.draws.of(images), self.given[list(images)])

    def gumbel(self, stream: str, cells: Tensor, values: int) -> Tensor:
        return self.draws.gumbel(stream, cells, values)

    def keep(self, tokens: Tensor, cells: Tensor) -> Tensor:
        """Drawn tokens int64 [B, m] of cells int64 [m] or [B, m], with the given ones in their places."""
        given = self.given.to(cells.device)
        given = given[:, cells] if cells.ndim == 1 else given.gather(1, cells)
        return torch.where(given >= 0, given, tokens)

    def mark(self, report: Report) -> None:
        """Mark the given tokens in the maps "step" and "outcome" of a report."""
        step, outcome = report.maps["step"], report.maps["outcome"]
        given = (self.given[:, :-1] >= 0).view(step.shape).cpu().numpy()
        step[given], outcome[given] = -1, GIVEN


def given_tokens(codes: Tensor, mask: Tensor, grid: int, images: int) -> Tensor:
    """The tokens to keep, int64 [B, N + 1] of :class:`EditDraws`.

    Args:
        codes: int64 [1 or B, G, G], of the picture.
        mask: [1 or B, h, w] of any size, 0..1. A token is drawn again if any mask value over it is above 0.5.
        grid: side G of the model.
        images: number of images B.

    Raises:
        UserError: codes of another size, batches that do not fit, a mask that is empty or not finite.
    """
    if tuple(codes.shape[1:]) != (grid, grid):
        raise UserError(
            f"latent: it has {codes.shape[1]} x {codes.shape[2]} tokens, the model draws {grid} x {grid}; encode a picture of the model's "
            "own size with VAE Encode and the vae of the same loader."
        )
    again = masked_tokens(codes, mask, grid, images, codes.device)
    given = torch.where(again, -1, codes.flatten(1))
    return F.pad(given, (0, 1), value=-1)
