"""Copies from the host to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(x: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """A tensor or array of the host on a device. A GPU copies it from pinned memory, so that the host does not wait."""
    x = torch.as_tensor(x)
    if device.type != "cuda":
        return x.to(device)

    return x.pin_memory().to(device, non_blocking=True)
