"""Which tokens a diffusion samples, an argument of :meth:`.MARCanvas.batch`.

Shapes: B images of L tokens. A position is the index of a token in its image, counted row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Images and positions of N tokens that are chosen from a batch of images, without the tokens' values. The number
    of chosen tokens may differ between the images.

    In this example, a mask chooses three tokens from three positions in each of two images. Each line of ``positions``
    and of ``mask`` is an image. The fields ``index`` (image and position) and ``column`` are on the right::

        positions    5 2 7        mask    0 1 0        image       0 1 1
                     4 0 1                1 0 1        position    2 4 1
                                                       column      1 0 2
    """

    # Image and position of each token, int64 [N] each. If ``values`` [B, L, ...] are values of all tokens of the
    # images, ``values[tokens.index]`` are the values of the N chosen tokens.
    index: tuple[Tensor, Tensor]
    # The column of each token in ``positions``, counted from 0, int64 [N]. None if all tokens of ``positions`` were
    # chosen, one image after another.
    column: Tensor | None = None

    @staticmethod
    def all(positions: Tensor) -> TokenIndex:
        """All tokens at ``positions``, int64 [B, n], one image after another."""
        image = torch.arange(len(positions), device=positions.device).repeat_interleave(positions.shape[1])
        return TokenIndex((image, positions.flatten()))

    @staticmethod
    def in_columns(columns: Tensor, positions: Tensor) -> TokenIndex:
        """The tokens in the ``columns``, int64 [B, m], of ``positions``, int64 [B, n], one image after another."""
        image = torch.arange(len(columns), device=columns.device).repeat_interleave(columns.shape[1])
        column = columns.flatten()
        return TokenIndex((image, positions[image, column]), column)

    @staticmethod
    def step_by_step(positions: Sequence[Tensor]) -> TokenIndex:
        """All tokens of several AR steps: one AR step after another, and within each AR step one image after another.

        ``positions``: int64 [B, n] for each AR step. A column of the result is a column of all these tensors side by
        side.
        """
        side_by_side = torch.cat([*positions], 1)
        columns = torch.arange(side_by_side.shape[1], device=side_by_side.device).expand_as(side_by_side)
        columns_of_steps = columns.split([step_positions.shape[1] for step_positions in positions], 1)

        image = torch.cat([TokenIndex.all(step_positions).index[0] for step_positions in positions])
        column = torch.cat([part.flatten() for part in columns_of_steps])
        return TokenIndex((image, side_by_side[image, column]), column)

    def __len__(self) -> int:
        return len(self.index[0])

    @property
    def index_by_column(self) -> tuple[Tensor, Tensor]:
        """Image and column of each token, int64 [N] each. If ``values`` [B, n, ...] are values of the tokens at
        ``positions``, in the same columns, ``values[tokens.index_by_column]`` are the values of the N chosen tokens.
        """
        assert self.column is not None
        return self.index[0], self.column
