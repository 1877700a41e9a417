"""Inpainting in an image of any size: the crop, the edge, the colours, and what stays."""

import math

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.runs import inpainting
from fastar_nodes.runs.images import resized, scaled
from fastar_nodes.runs.inpainting import Crop


def box(height: int, width: int, top: int, left: int, bottom: int, right: int) -> torch.Tensor:
    """A mask of a rectangle."""
    mask = torch.zeros(1, height, width)
    mask[:, top:bottom, left:right] = 1
    return mask


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        # A square with context, around the middle of the mask.
        (box(600, 900, 100, 200, 140, 280), Crop(190, 70, 100, 100)),
        # Moved into the image at its corner.
        (box(600, 900, 560, 860, 600, 900), Crop(850, 550, 50, 50)),
        # The context would be larger than the image: its shorter side.
        (box(600, 900, 100, 200, 600, 740), Crop(170, 0, 600, 600)),
        # The mask itself is longer: a rectangle with less context.
        (box(600, 900, 0, 100, 600, 801), Crop(64, 0, 772, 600)),
        (box(200, 900, 0, 0, 200, 900), Crop(0, 0, 900, 200)),
        # A thin one.
        (box(600, 900, 300, 250, 302, 650), Crop(200, 51, 500, 500)),
        (box(8, 8, 3, 4, 4, 5), Crop(3, 2, 2, 2)),
    ],
)
def test_the_crop_is_a_square_with_context_where_there_is_one(mask, wanted):
    crop = inpainting.crop_around(mask)
    assert crop == wanted
    assert crop.of(mask).sum() == mask.sum(), "the whole mask"
    assert crop.of(mask).shape == (1, wanted.height, wanted.width)


def test_masks_of_a_batch_have_one_crop_and_a_black_one_has_none():
    both = torch.cat([box(20, 20, 2, 2, 4, 4), box(20, 20, 8, 8, 10, 10)])
    assert inpainting.crop_around(both) == Crop(1, 1, 10, 10)
    assert inpainting.crop_around(0.01 * both) == Crop(1, 1, 10, 10), "a soft stroke is painted too"
    with pytest.raises(UserError, match="^mask: it is empty; paint over the area"):
        inpainting.crop_around(0.001 * both)


def test_a_thin_line_is_not_lost_in_a_smaller_image():
    mask = torch.zeros(1, 100, 100)
    mask[:, 51] = 1
    small = inpainting.fitted(mask, (10, 10))
    assert torch.equal(small[0, 5], torch.ones(10)) and float(small.sum()) == 10


@pytest.mark.parametrize("feather", [0, 1, 3])
def test_the_edge_falls_with_the_distance_from_the_mask(feather):
    generator = torch.Generator().manual_seed(feather)
    mask = (torch.rand(1, 12, 15, generator=generator) > 0.95).float()
    painted = mask[0].nonzero().tolist()
    assert painted
    wanted = torch.zeros(12, 15)
    for y in range(12):
        for x in range(15):
            away = min(max(abs(y - v), abs(x - u)) for v, u in painted)
            wanted[y, x] = max(0, feather + 1 - away) / (feather + 1)
    torch.testing.assert_close(inpainting.faded(mask, feather)[0], wanted)


@pytest.mark.parametrize("match_colours", [True, False])
@pytest.mark.parametrize("mask", [box(40, 60, 10, 20, 30, 40), box(40, 60, 0, 0, 40, 6), box(40, 60, 20, 5, 21, 55)])
def test_pixels_outside_the_mask_and_its_edge_stay_bit_for_bit(mask, match_colours):
    generator = torch.Generator().manual_seed(3)
    original, drawn = torch.rand(1, 3, 40, 60, generator=generator), torch.rand(2, 3, 16, 16, generator=generator)
    crop = inpainting.crop_around(mask)
    image = inpainting.put_back(original, drawn, mask, crop, 4, match_colours)

    assert image.shape == (2, 3, 40, 60) and 0 <= float(image.min()) and float(image.max()) <= 1
    outside = inpainting.faded(mask, 4)[0] == 0
    assert outside.any() and torch.equal(image[..., outside], original.expand_as(image)[..., outside])
    assert (image[..., mask[0] > 0] != original[..., mask[0] > 0]).any(0).all(), "all that is painted is replaced"


def test_the_edge_ends_before_the_crop_does():
    """Of a small mask there is less around it than the feather asks for; a cut edge would show as a square."""
    mask = box(60, 60, 28, 28, 32, 32)
    crop = inpainting.crop_around(mask)
    assert crop == Crop(27, 27, 5, 5)
    image = inpainting.put_back(torch.zeros(1, 3, 60, 60), torch.ones(1, 3, 8, 8), mask, crop, 50, False)
    torch.testing.assert_close(image[0, 0], mask[0], msg="no pixel below, so no edge at all")

    crop = inpainting.crop_around(mask, 3.0)
    row = inpainting.put_back(torch.zeros(1, 3, 60, 60), torch.ones(1, 3, 8, 8), mask, crop, 50, False)[0, 0, 30]
    wanted = [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1, 1, 1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5]
    torch.testing.assert_close(row[24:36], torch.tensor(wanted))

    # The edge of the image is no edge of the crop.
    mask = box(60, 60, 0, 0, 60, 20)
    row = inpainting.put_back(torch.zeros(1, 3, 60, 60), torch.ones(1, 3, 8, 8), mask, Crop(0, 0, 60, 60), 9, False)
    assert float(row[0, 0, 5, 0]) == 1 and 0 < float(row[0, 0, 5, 28]) < float(row[0, 0, 5, 20]) < 1


def shift_by_pixel(drawn: torch.Tensor, around: torch.Tensor, painted: torch.Tensor) -> torch.Tensor:
    """``colour_shift``, a pixel and a place of the edge at a time, in fp64."""
    _, height, width = drawn.shape
    side, reach = max(height, width), inpainting.EDGE
    colour = drawn.double()
    edge = []
    for y in range(height):
        for x in range(width):
            window = (slice(max(0, y - reach), y + reach + 1), slice(max(0, x - reach), x + reach + 1))
            kept = ~painted[window]
            if painted[y, x] and kept.any():
                edge.append((y, x, around.double()[(slice(None), *window)][:, kept].mean(1)))
    assert 2 < len(edge) <= inpainting.MOST_OF_EDGE

    def alike(a: torch.Tensor, b: torch.Tensor) -> float:
        return math.exp(-float((a - b).square().sum()) / (2 * inpainting.ALIKE**2))

    typical = []
    for y, x, wanted in edge:
        pair = torch.cat([colour[:, y, x], wanted])
        typical.append((sum(alike(pair, torch.cat([colour[:, v, u], w])) for v, u, w in edge) / len(edge)) ** 2)

    shift = torch.zeros(3, height, width, dtype=torch.float64)
    for y in range(height):
        for x in range(width):
            near_sum, alike_sum, mean = 0.0, 0.0, torch.zeros(3, dtype=torch.float64)
            for (v, u, wanted), much in zip(edge, typical, strict=True):
                near = much / (((y - v) / side) ** 2 + ((x - u) / side) ** 2 + inpainting.NEAR**2)
                like = near * alike(colour[:, y, x], colour[:, v, u])
                near_sum, alike_sum = near_sum + near, alike_sum + like
                mean = mean + like * (wanted - colour[:, v, u])
            low, high = inpainting.SUBJECT, inpainting.BACKGROUND
            share = min(1.0, max(0.0, (alike_sum / near_sum - low) / (high - low)))
            shift[:, y, x] = share**2 * (3 - 2 * share) * mean / max(alike_sum, 1e-30)

    soft = torch.zeros_like(shift)
    for y in range(height):
        for x in range(width):
            soft[:, y, x] = shift[:, max(0, y - 1) : y + 2, max(0, x - 1) : x + 2].mean((1, 2))
    return soft


def test_colours_are_shifted_as_by_a_loop_over_pixels_and_the_edge():
    generator = torch.Generator().manual_seed(11)
    drawn = 0.5 + 0.1 * torch.randn(3, 13, 16, generator=generator)
    around = torch.rand(3, 13, 16, generator=generator)
    painted = box(13, 16, 3, 4, 11, 16)[0] > 0
    shift = inpainting.colour_shift(drawn, around, painted)
    wanted = shift_by_pixel(drawn, around, painted)
    assert float(wanted.abs().max()) > 0.05
    torch.testing.assert_close(shift.double(), wanted, rtol=1e-3, atol=1e-4)


def scene(sky: float, sail: float) -> torch.Tensor:
    """A grey sky [1, 3, 64, 64] with a square sail in the middle."""
    image = torch.full((1, 3, 64, 64), sky)
    image[:, :, 26:38, 26:38] = sail
    return image


def test_a_sky_takes_the_colour_around_it_and_the_sail_before_it_keeps_its_own():
    mask, drawn = box(64, 64, 12, 12, 52, 52), scene(0.2, 1.0)
    made = inpainting.matched(drawn, torch.full((1, 3, 64, 64), 0.6), mask)
    assert torch.allclose(made[..., 14:24, 14:50], torch.tensor(0.6), atol=1e-4)
    assert torch.equal(made[..., 28:36, 28:36], torch.ones(1, 3, 8, 8))


def test_colours_that_agree_and_a_mask_of_everything_change_nothing():
    drawn = scene(0.4, 0.9)
    assert torch.equal(inpainting.matched(drawn, drawn, torch.ones(1, 64, 64)), drawn)
    same = inpainting.matched(scene(0.4, 0.4), torch.full((1, 3, 64, 64), 0.4), box(64, 64, 12, 12, 52, 52))
    torch.testing.assert_close(same, scene(0.4, 0.4))


def test_something_that_crosses_the_edge_does_not_stain_the_rest():
    """A red post in the original at the mask's edge: the sky beside it takes the sky's colour."""
    original = torch.full((1, 3, 64, 64), 0.6)
    original[:, 0, 30:34, :20], original[:, 1:, 30:34, :20] = 0.9, 0.1
    made = inpainting.matched(scene(0.2, 1.0), original, box(64, 64, 12, 12, 52, 52))
    assert float((made[..., 14:24, 14:50] - 0.6).abs().max()) < 0.05


@pytest.mark.parametrize(("height", "width", "shape"), [(40, 90, (40, 272)), (60, 60, (60, 182)), (90, 40, (90, 122))])
def test_before_mask_and_after_are_side_by_side(height, width, shape):
    original, image, mask = (
        torch.zeros(1, 3, height, width),
        torch.ones(2, 3, height, width),
        torch.zeros(1, height, width),
    )
    mask[:, 3, 5] = 1
    three = inpainting.before_mask_after(original, mask, image)
    assert three.shape[2:] == shape
    assert torch.equal(three[..., :height, :width], original.expand(2, -1, -1, -1))
    assert torch.equal(three[..., -height:, -width:], image)
    left = (shape[1] - width) // 2
    middle = three[..., left : left + width]
    assert middle[:, :, 3, 5].any() and int((middle != 0).any(1).sum()) == 2


def test_colours_beyond_black_and_white_survive_a_change_of_size():
    """Of an image larger than those whose colours are compared: what the drawn area lacks is negative where it is too
    bright, and a bicubic filter exceeds white beside an edge.
    """
    around = torch.full((1, 3, 2 * inpainting.MATCHED_SIDE, 2 * inpainting.MATCHED_SIDE), 0.25)
    mask = torch.zeros(1, *around.shape[2:])
    mask[:, 64:-64, 64:-64] = 1
    drawn = torch.full_like(around, 0.75)
    inside = inpainting.matched(drawn, around, mask)[..., 100:-100, 100:-100]
    assert float(inside.max()) < 0.3

    edge = torch.cat([torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)], 3)
    assert float(resized(edge, (16, 32)).max()) > 1.01 and float(scaled(edge, (16, 32)).max()) == 1
