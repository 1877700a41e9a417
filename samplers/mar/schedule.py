"""How many tokens each AR step decides, and in which order the tokens of an image are decided.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. GtR has a schedule of its own (``gtr/``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError


def masked_after(tokens: int, steps: int) -> list[int]:
    """Number of masked (undecided) tokens after each AR step s = 0 .. steps - 1:
    floor(tokens cos(pi/2 (s + 1) / steps)).

    Every step decides at least one token: where the formula would leave as many tokens as before, one less is left. The
    last step decides all tokens that are left, so the last number is 0. In the published code, the last step does the
    same, but the last number is 1.

    Raises:
        UserError: ``steps`` is below 1 or above ``tokens``.
    """
    if not 1 <= steps <= tokens:
        raise UserError(f"steps: {steps} is outside 1 to {tokens}, the number of tokens of the image.")

    left = tokens
    out = []
    for s in range(steps - 1):
        ratio = np.cos(math.pi / 2 * (s + 1) / steps)
        # The published code computes in fp32, so the product is rounded to fp32 before the floor.
        # At least steps - s - 1 tokens are left, one for each later step: the cosine is concave and lies above its
        # chord, so the product is above tokens (1 - (s + 1) / steps), and steps <= tokens.
        left = min(left - 1, int(np.floor(np.float32(tokens * ratio))))
        out.append(left)
    return [*out, 0]


def raster(random_orders: Tensor) -> Tensor:
    """Orders that decide the tokens row by row, int64 [B, L]. Only the shape of ``random_orders`` matters."""
    return torch.arange(random_orders.shape[1]).repeat(len(random_orders), 1)


@lru_cache(maxsize=64)
def halton_cells(grid: int) -> Tensor:
    """Row and column of all cells of a ``grid`` x ``grid`` image, int64 [L, 2]. The cells are in the order in which a
    Halton sequence with the bases 2 and 3 first reaches them.
    """
    cells: dict[tuple[int, int], None] = {}
    index = 1
    while len(cells) < grid * grid:
        cells.setdefault((int(grid * _radical_inverse(index, 2)), int(grid * _radical_inverse(index, 3))))
        index += 1

    return torch.tensor(list(cells))


def _radical_inverse(index: int, base: int) -> float:
    """Element ``index`` of the van der Corput sequence, from 0 to 1: the digits of ``index`` in base ``base``, mirrored
    at the radix point.
    """
    out = 0.0
    scale = 1.0
    while index:
        index, digit = divmod(index, base)
        scale /= base
        out += digit * scale
    return out


def halton(random_orders: Tensor) -> Tensor:
    """Orders that spread consecutive tokens evenly over the image, int64 [B, L] (Besnier et al. 2025, arXiv
    2503.17076). All images use the same Halton sequence, but each image shifts, transposes and flips it at random.
    """
    grid = math.isqrt(random_orders.shape[1])
    row, column = halton_cells(grid).unbind(1)

    # Two random numbers from 0 to L - 1 for each image: the last two entries of the image's random order.
    shift = random_orders[:, -1:]
    symmetry_bits = random_orders[:, -2:-1]  # its three lowest bits are used

    row = (row + shift // grid) % grid
    column = (column + shift % grid) % grid

    transposed, upside_down, mirrored = ((symmetry_bits >> bit) % 2 == 1 for bit in range(3))
    row, column = torch.where(transposed, column, row), torch.where(transposed, row, column)
    row = torch.where(upside_down, grid - 1 - row, row)
    column = torch.where(mirrored, grid - 1 - column, column)
    return row * grid + column


# For each value of the setting ``order``: the function that makes the images' orders from random orders. Both are int64
# [B, L].
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda random_orders: random_orders,
    "raster": raster,
    "halton": halton,
}
