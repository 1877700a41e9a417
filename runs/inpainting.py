"""Inpainting in an image of any size: a crop around the mask for the model, and its result put back into the image.

Images are floats [B, 3, H, W] in 0..1, masks floats [B, H, W], of which values from ``LEAST_MASKED`` on are painted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..samplers.editing import LEAST_MASKED
from .images import resized

# Side of a crop in sides of the mask's bounding box: enough to see what is around it, and little enough that a model
# which draws its subject as large as in a whole image draws it within the mask.
CONTEXT = 1.25
# The same if no square of the image holds the mask with its context, so the crop is scaled unevenly.
LEAST_CONTEXT = 1.1
# Pixels around the mask over which the inpainted area fades out.
FEATHER = 8

# Colours are compared in images of at most this side.
MATCHED_SIDE = 256
# Width of the edge inside the mask whose colours should be those around the mask, in pixels of these images.
EDGE = 5
# Pixels of this edge that are compared with every pixel.
MOST_OF_EDGE = 250
# Colours of about this distance count as alike.
ALIKE = 0.15
# Distance in sides of the crop below which all pixels of the edge count alike.
NEAR = 0.05
# For a pixel, the share of the edge near it that is like it: up to the first it keeps its colour, because it belongs to
# the subject; from the second on it takes the whole difference.
SUBJECT, BACKGROUND = 0.05, 0.35


@dataclass(frozen=True)
class Crop:
    """A rectangle within an image, in pixels."""

    left: int
    top: int
    width: int
    height: int

    def of(self, images: Tensor) -> Tensor:
        """This part of images or masks [..., H, W], as a view."""
        return images[..., self.top : self.top + self.height, self.left : self.left + self.width]


def fitted(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks [B, h, w] at another size (height, width), in 0..1; a pixel is painted if any part of it is."""
    return F.adaptive_max_pool2d(mask[:, None].float(), size)[:, 0].clamp(0, 1)


def crop_around(mask: Tensor, context: float = CONTEXT) -> Crop:
    """A square around what is painted in any of the masks [B, H, W], moved into the image at its edges.

    It is as high and wide as the mask's bounding box is long, times ``context``, or as the shorter side of the image
    if it would be larger. If the mask is longer than that too, it is a rectangle, which a model sees as a square.

    Raises:
        UserError: nothing is painted.
    """
    painted = (mask >= LEAST_MASKED).any(0)
    height, width = painted.shape
    rows, columns = painted.any(1).nonzero(), painted.any(0).nonzero()
    if not len(rows):
        raise UserError("mask: it is empty; paint over the area to regenerate.")

    top, bottom = int(rows[0]), int(rows[-1]) + 1
    left, right = int(columns[0]), int(columns[-1]) + 1
    longest = max(bottom - top, right - left)
    side = min(math.ceil(longest * context), max(min(height, width), math.ceil(longest * LEAST_CONTEXT)))

    wide, high = min(side, width), min(side, height)
    x = (left + right - wide) // 2
    y = (top + bottom - high) // 2
    return Crop(min(max(x, 0), width - wide), min(max(y, 0), height - high), wide, high)


def put_back(
    original: Tensor,
    inpainted: Tensor,
    mask: Tensor,
    crop: Crop,
    feather: int = FEATHER,
    match_colours: bool = True,
) -> Tensor:
    """The original [1 or B, 3, H, W] with what was drawn in its crop, [1 or B, 3, h, w] of any size.

    The painted area of the mask [1 or B, H, W] is replaced. Around it, the change fades out over ``feather`` pixels, or
    over what there is of the crop around the mask. All other pixels are the original's, bit for bit.
    """
    size = (crop.height, crop.width)
    below, area = crop.of(original), crop.of(mask)
    if match_colours:
        inpainted = matched(inpainted, below, area)

    weight = faded(area, min(feather, _margin(mask, crop)))[:, None]
    change = weight * (resized(inpainted, size).clamp(0, 1) - below)

    image = original.expand(len(change), -1, -1, -1).clone()
    crop.of(image).add_(change)
    return image


def faded(mask: Tensor, feather: int) -> Tensor:
    """Masks [B, H, W] with an edge around them that falls from 1 to 0 in ``feather`` equal steps of a pixel."""
    grown = torch.where(mask >= LEAST_MASKED, mask, 0)[:, None]
    total = grown
    for _ in range(feather):
        grown = F.max_pool2d(grown, 3, 1, 1)
        total = total + grown
    return total[:, 0] / (feather + 1)


def _margin(mask: Tensor, crop: Crop) -> int:
    """Pixels between what is painted in masks [B, H, W] and the sides of the crop within the image."""
    painted = (mask >= LEAST_MASKED).any(0)
    height, width = painted.shape
    rows, columns = painted.any(1).nonzero(), painted.any(0).nonzero()

    margins = [height, width]
    if crop.top > 0:
        margins.append(int(rows[0]) - crop.top)
    if crop.left > 0:
        margins.append(int(columns[0]) - crop.left)
    if crop.top + crop.height < height:
        margins.append(crop.top + crop.height - 1 - int(rows[-1]))
    if crop.left + crop.width < width:
        margins.append(crop.left + crop.width - 1 - int(columns[-1]))
    return min(margins)


def matched(inpainted: Tensor, original: Tensor, mask: Tensor) -> Tensor:
    """Inpainted images [B, 3, h, w] in the colours of the originals [1 or B, 3, H, W] around their masks, not clamped.

    A model continues an image in its own colours, which shows at the mask's edge. As in cloning by mean-value
    coordinates (Farbman et al. 2009), the differences along this edge are spread over the area by their distance, here
    by its inverse square. Two more factors are ours. Differences count where the new colour is like the edge's. So a
    sky takes the colour of the sky around it, and a sail in front of it stays white. They also count as far as they are
    typical of the edge, so something that crosses the edge does not stain the rest.
    """
    longest = max(inpainted.shape[2:])
    shrunk = min(1.0, MATCHED_SIDE / longest)
    size = (max(1, round(inpainted.shape[2] * shrunk)), max(1, round(inpainted.shape[3] * shrunk)))
    drawn, around = resized(inpainted, size), resized(original, size)
    painted = fitted(mask, size) >= LEAST_MASKED

    images = max(len(drawn), len(around), len(painted))
    parts = [part.expand(images, *part.shape[1:]) for part in (drawn, around, painted)]
    shifts = torch.stack([colour_shift(*one) for one in zip(*parts, strict=True)])
    return inpainted + resized(shifts, (inpainted.shape[2], inpainted.shape[3]))


def colour_shift(drawn: Tensor, around: Tensor, painted: Tensor) -> Tensor:
    """What :func:`matched` adds to one image: [3, h, w] of a drawn and a surrounding image [3, h, w], mask [h, w]."""
    # 1. The edge: painted pixels with unpainted pixels near them, and the mean colour of the unpainted ones.
    kept = (~painted).float()[None]
    share = F.avg_pool2d(kept, 2 * EDGE + 1, 1, EDGE)
    mean = F.avg_pool2d(around * kept, 2 * EDGE + 1, 1, EDGE) / share.clamp(min=1e-6)

    edge = ((share[0] > 0) & painted).nonzero()
    if not len(edge):
        return torch.zeros_like(drawn)
    edge = edge[torch.linspace(0, len(edge) - 1, min(MOST_OF_EDGE, len(edge))).long()]

    # 2. Colours drawn there, what they lack, and how typical both are of the edge.
    colours = drawn[:, edge[:, 0], edge[:, 1]].T
    wanted = mean[:, edge[:, 0], edge[:, 1]].T
    both = torch.cat([colours, wanted], 1)
    typical = _alike(both, both).mean(1) ** 2

    # 3. Every pixel takes the mean difference of what is near it and like it.
    height, width = painted.shape
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float() / max(height, width)
    edge_places = edge.float() / max(height, width)
    values = drawn.flatten(1).T

    rows: list[Tensor] = []
    for place, value in zip(places.split(8192), values.split(8192), strict=True):
        near = typical / (_squared(place, edge_places) + NEAR**2)
        weight = near * _alike(value, colours)

        alike = weight.sum(1, keepdim=True)
        share = (alike / near.sum(1, keepdim=True) - SUBJECT) / (BACKGROUND - SUBJECT)
        share = share.clamp(0, 1)
        rows.append(share**2 * (3 - 2 * share) * (weight @ (wanted - colours)) / alike.clamp(min=1e-30))
    shift = torch.cat(rows).T.unflatten(1, (height, width))

    # 4. An outline is drawn softly; a pixel between two colours takes part of each shift.
    return F.avg_pool2d(shift[None], 3, 1, 1, count_include_pad=False)[0]


def _alike(a: Tensor, b: Tensor) -> Tensor:
    """How alike the colours [N, C] and [M, C] are, [N, M] in 0..1."""
    return torch.exp(_squared(a, b) / (-2 * ALIKE**2))


def _squared(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances of points [N, C] and [M, C], [N, M]."""
    return torch.cdist(a, b).square()


# Colour of what is painted, and its opacity, in the image of the three.
_PAINT = (0.91, 0.18, 0.48)
_OPACITY = 0.6


def before_mask_after(original: Tensor, mask: Tensor, image: Tensor) -> Tensor:
    """Before, the mask over it, and after, side by side in one image [B, 3, H, ...].

    Args:
        original: [1 or B, 3, H, W].
        mask: [1 or B, H, W].
        image: [B, 3, H, W].
    """
    images, _, height, width = image.shape
    before = original.expand(images, -1, -1, -1)
    paint = torch.tensor(_PAINT).view(1, 3, 1, 1)
    painted = before + mask[:, None] * _OPACITY * (paint - before)

    gap = image.new_ones(images, 3, height, max(1, round(max(height, width) / 80)))
    return torch.cat([before, gap, painted, gap, image], 3)
