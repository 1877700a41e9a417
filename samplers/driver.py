"""What all samplers share: running one to its end, and copies to its device.

Every sampler is a generator that yields after each step and returns its result.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

R = TypeVar("R")


def finish(sampler: Generator[Any, None, R]) -> R:
    """Run a sampler to its end, ignoring the steps; returns its result."""
    while True:
        try:
            next(sampler)
        except StopIteration as end:
            return end.value


def to_device(x: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """A tensor or array of the host on a device. A GPU copies it from pinned memory, so that the host does not wait."""
    x = torch.as_tensor(x)
    if device.type != "cuda":
        return x.to(device)

    return x.pin_memory().to(device, non_blocking=True)
