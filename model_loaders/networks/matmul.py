"""Products with a transposed weight matrix, with a faster path for few rows on a CPU.

A decode step multiplies large matrices by a handful of rows, and its time goes into reading the weights. CPU libraries
read them inefficiently for x W^T of that shape: W x^T with contiguous rows of x takes half the time. A single row takes half
the time as a batch of two half matrices. Small weights, and many or long rows, are faster with ``F.linear``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Fewest elements of a weight that exceeds the caches; most rows, and the row length below which 3 or 4 rows still gain.
LARGE_WEIGHT, FEW_ROWS, WIDE = 1 << 18, 4, 1024


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times the transposed weight [out, in], to [..., out]; the result may be strided."""
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS or weight.numel() < LARGE_WEIGHT or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight)
    columns = x.reshape(rows, -1).contiguous().T
    if rows == 1 and not len(weight) % 2:
        out = torch.bmm(weight.view(2, -1, weight.shape[1]), columns.expand(2, -1, -1)).view(-1, 1)
    elif rows == 2 or rows > 2 and weight.shape[1] < WIDE:
        out = weight @ columns
    else:
        return F.linear(x, weight)
    return out.T.view(*x.shape[:-1], len(weight))


class Linear(nn.Linear):
    """``nn.Linear`` without bias, computed by :func:`linear`."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]; the result may be strided."""
        return linear(x, self.weight)
