"""Images as the models that read them were trained: scaled to a square without stretching, and padded.

Source: the published processor of Janus, ``VLMImageProcessor``.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...networks.janus_vision import LEAST_SIDE

# What fills the square beside the image: 0.5 of 255, cut off.
_GREY = (127, 127, 127)


def box_of(width: int, height: int, side: int, least: int = LEAST_SIDE) -> tuple[int, int, int, int]:
    """Where an image lies in the padded square of ``side`` pixels: left, top, right, bottom.

    The longer side of the image takes the whole square, in enlargement too; the shorter one has ``least`` pixels or
    more. Where the margins are odd, the left or upper one is the smaller.
    """
    longer = max(width, height)
    new_width = max(int(width / longer * side), least)
    new_height = max(int(height / longer * side), least)
    left = (side - new_width) // 2
    top = (side - new_height) // 2
    return left, top, left + new_width, top + new_height


def squared(pixels: Tensor, side: int, least: int = LEAST_SIDE) -> Tensor:
    """An image uint8 [H, W, 3] as a square uint8 [side, side, 3]: scaled, not stretched, and padded with grey.

    Pillow's bicubic filter on 8 bits, which the models were trained with; torch's differs in up to 12 % of the values.
    """
    height, width, _ = pixels.shape
    left, top, right, bottom = box_of(width, height, side, least)
    scaled = Image.fromarray(pixels.numpy()).resize((right - left, bottom - top), Image.Resampling.BICUBIC)

    square = Image.new("RGB", (side, side), _GREY)
    square.paste(scaled, (left, top))
    return torch.from_numpy(np.array(square))
