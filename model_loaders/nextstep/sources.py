"""Images to change as the published code prepares them: scaled until the shorter side fits, and cut to a square.

Source: a helper of the published code: Pillow's box filter halves the image while its shorter side is at least twice as
long as wanted, then the bicubic filter scales it.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def cropped(pixels: Tensor, side: int) -> Tensor:
    """The middle of an image uint8 [H, W, 3] as a square uint8 [side, side, 3]."""
    image = Image.fromarray(pixels.numpy())

    # 1. Halve it.
    while min(image.size) >= 2 * side:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)

    # 2. Scale the shorter side.
    scale = side / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)

    # 3. Cut the middle.
    left = (image.width - side) // 2
    top = (image.height - side) // 2
    return torch.from_numpy(np.array(image.crop((left, top, left + side, top + side))))
