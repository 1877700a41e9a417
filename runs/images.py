"""Images, masks and latents as they are given to nodes, the command line and Python, checked.

Python and the command line give PIL images, files and arrays; the nodes of ComfyUI give tensors: IMAGE, float
[B, H, W, C] in 0..1 with 1, 3 or 4 channels, MASK, float [B, H, W], and LATENT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from ..errors import UserError, amount, first_line
from ..networks.precision import is_finite
from ..samplers.editing import LARGEST_LATENT

# An image, or a batch of them: a PIL image, the path of an image file, pixels uint8 [H, W, 3] or [B, H, W, 3], or
# latents or codes as a sampler returns them. PIL images and files are read as viewers show them: turned as their EXIF
# data says, and with white at 65535 if they have 16 bits.
AnyImage = Image.Image | str | Path | np.ndarray | Tensor


# -------------------------------------------------------------------------------- PIL images, files and arrays


def batch_of(image: Any) -> np.ndarray:
    """An image, or several of one size, as uint8 [B, H, W, 3]. Raises UserError: see :func:`images_of`."""
    found = images_of(image)
    if not found:
        raise UserError("image: the list is empty; give at least one image.")

    shapes = {one.shape for one in found}
    if len(shapes) > 1:
        raise UserError(f"image: the images have different shapes, {sorted(shapes)}; give images of one size.")
    return np.stack(found)


def one_for_each(image: Any, prompts: int) -> list[Tensor]:
    """Images to edit, uint8 [H, W, 3] of any size, one for each of the prompts; a single one is for all.

    Raises:
        UserError: another number of images; see :func:`images_of`.
    """
    found = [torch.tensor(one) for one in images_of(image)]
    if len(found) == 1:
        found *= prompts

    if len(found) != prompts:
        raise UserError(
            f"image: there are {len(found)} images for {amount(prompts, 'prompts')}; give one image for all prompts, "
            "or one image for each prompt."
        )
    return found


def masks_given(mask: Any) -> Tensor:
    """A mask, or several of one size, as floats of 0 to 1, [1 or B, h, w]. Raises UserError: see :func:`_read`."""
    if not isinstance(mask, list | tuple):
        return _masks_in(mask)

    if not mask:
        raise UserError("mask: the list is empty; give at least one mask.")
    found = [_masks_in(one) for one in mask]
    shapes = {tuple(one.shape[1:]) for one in found}
    if len(shapes) > 1:
        raise UserError(f"mask: the masks have different shapes, {sorted(shapes)}; give masks of one size.")
    return torch.cat(found)


def images_of(image: Any) -> list[np.ndarray]:
    """Images, each uint8 [H, W, 3] of any size: of PIL images, files or pixels, one or several in a list.

    Raises:
        UserError: pixels of another form; see :func:`_read`.
    """
    found: list[np.ndarray] = []
    for one in image if isinstance(image, list | tuple) else [image]:
        given = _read(one, "image", _colours)
        batch = given[None] if given.ndim == 3 else given
        is_array = isinstance(batch, np.ndarray) and batch.dtype == np.uint8 and batch.size > 0
        if not is_array or batch.ndim != 4 or batch.shape[3] != 3:
            raise UserError(
                f"image: the array has the dtype {given.dtype} and the shape {list(given.shape)}; give a PIL image, "
                "the path of an image, or a uint8 array [height, width, 3]."
            )
        found.extend(batch)

    return found


def _masks_in(mask: Any) -> Tensor:
    """A mask or an array of several, as :func:`masks_given` returns them."""
    given = _read(mask, "mask", _greys)
    values = given if isinstance(given, Tensor) else torch.tensor(given)
    masks = None if values.is_complex() else _as_mask_batch(values)
    if masks is None:
        raise UserError(
            f"mask: the array has the dtype {values.dtype} and the shape {list(values.shape)}; give either a grey "
            "image, or an array [height, width] for all images, or one such array for each image."
        )

    numbers = masks.float().contiguous()  # a view may be larger than memory
    if values.dtype == torch.uint8:
        return numbers / 255
    if values.dtype == torch.uint16:
        return numbers / 65535
    if values.dtype == torch.bool or values.is_floating_point():
        return numbers
    return numbers / _white(float(numbers.abs().max()), "mask")


def _read(given: Any, field: str, values_of: Callable[[Image.Image], np.ndarray]) -> np.ndarray | Tensor:
    """The values of an image or a mask. All entrances of Python and the command line read theirs here.

    Args:
        given: an array or a tensor, which is returned unchanged, a PIL image or the path of a file.
        field: name of the argument, for messages.
        values_of: makes the values of a PIL image, which stands upright and has 8 bits per channel.

    Raises:
        UserError: a file or a PIL image that cannot be read, or another value.
    """
    if isinstance(given, np.ndarray) and given.dtype.kind in "buif" and given.dtype.itemsize <= 8:
        # torch reads no array with a negative stride or the other byte order.
        return np.ascontiguousarray(given, given.dtype.newbyteorder("="))
    if isinstance(given, Tensor):
        return given

    if not isinstance(given, Image.Image | str | Path):
        kind = f"an array of {given.dtype}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
        raise UserError(f"{field}: it is {kind}; give an image, the path of an image, or an array.")

    try:
        if isinstance(given, Image.Image):
            return values_of(_as_shown(given, field))
        with Image.open(given) as file:
            return values_of(_as_shown(file, field))
    except (MemoryError, UserError):
        raise
    except Exception as problem:  # a damaged file can raise any exception
        name = f"a PIL image of the mode {given.mode}" if isinstance(given, Image.Image) else given
        raise UserError(
            f"{field}: {name} cannot be read as an image ({first_line(problem)}); give either an image file (for "
            "example, a PNG) or a PIL image of the mode RGB."
        ) from None


def _as_shown(image: Image.Image, field: str) -> Image.Image:
    """An image as viewers show it: upright, as its EXIF data states, and with 8 bits per channel.

    Raises:
        UserError: numbers without a known white.
    """
    upright = ImageOps.exif_transpose(image)
    if upright.mode not in ("I", "F") and not upright.mode.startswith("I;16"):
        return upright

    values = np.asarray(upright)
    # PNG and PGM files with 16 bits may have the mode I.
    if values.dtype.itemsize == 2 or image.format in ("PNG", "PPM"):
        white = 65535
    else:
        white = _white(float(np.abs(values.astype(np.float64)).max()), field)
    return Image.fromarray((values / white * 255).clip(0, 255).round().astype(np.uint8))


def _white(largest: float, field: str) -> int:
    """The value of white among numbers whose type states no range: 1, 255 or 65535, whichever fits the largest number.

    A filter that enlarges an image can exceed white, but not reach twice its value.
    """
    for white in (1, 255, 65535):
        if largest < 2 * white:
            return white

    raise UserError(
        f"{field}: it holds numbers up to {largest:g}, but the largest possible value is 65535 (white); give an 8-bit "
        "or 16-bit image."
    )


def _colours(image: Image.Image) -> np.ndarray:
    """The pixels of an image, uint8 [H, W, 3]."""
    return np.asarray(image.convert("RGB"))


def _greys(mask: Image.Image) -> np.ndarray:
    """The values of a mask, uint8 [H, W]; where it is transparent, nothing is painted.

    Raises:
        UserError: it is transparent, and what is visible of it is black.
    """
    if not mask.has_transparency_data:
        return np.asarray(mask.convert("L"))

    layer = mask.convert("RGBA")
    black = Image.new("RGBA", layer.size, "black")
    greys = np.asarray(Image.alpha_composite(black, layer).convert("L"))
    if np.asarray(layer)[..., 3].any() and not greys.any():
        raise UserError(
            "mask: the mask is black wherever it is not transparent, so nothing would be regenerated; paint white over "
            "the area to regenerate."
        )
    return greys


# ------------------------------------------------------------------------------------------------ tensors of nodes


# Nodes that give them, for messages.
IMAGE_SOURCE = "a node that gives an IMAGE, such as VAE Decode"
MASK_SOURCE = "a node that gives a MASK"
LATENT_SOURCE = "the LATENT of a sampler or of VAE Encode"

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def _finite(tensor: Tensor, field: str, source: str, more: Sequence[torch.dtype] = ()) -> Tensor:
    """Check that a tensor holds finite floating-point numbers, and return it; fp8 is returned as fp32.

    Other packs may pass tensors of any kind: sparse, nested, without data (meta), of integers, complex or quantised.
    ``more``: dtypes that are accepted too, and returned as fp32.
    """
    converted = (*_SMALL_FLOATS, *more)
    accepted = (*_FLOATS, *converted)
    dense = tensor.layout == torch.strided and not tensor.is_nested
    if not dense or tensor.is_meta or tensor.dtype not in accepted:
        kind = str(tensor.dtype).removeprefix("torch.")
        if not dense:
            kind = f"sparse or nested {kind}"
        elif tensor.is_meta:
            kind = f"{kind} without data"
        raise UserError(
            f"{field}: the tensor is {kind}, but must be dense and hold floating-point data; connect {source}."
        )

    if tensor.dtype in converted:
        tensor = tensor.float()

    if not is_finite(tensor):
        raise UserError(
            f"{field}: some values are not finite (NaN or infinity), often because a model or a decoder in fp16 "
            "computed them; choose bf16 or fp32 on the loader of that model or decoder."
        )
    return tensor


def image_tensor(tensor: Tensor, field: str) -> Tensor:
    """Check an IMAGE: finite images [B, H, W, C], 1, 3 or 4 channels."""
    image = _finite(tensor, field, IMAGE_SOURCE)

    if image.ndim != 4 or image.shape[3] not in (1, 3, 4) or 0 in image.shape:
        raise UserError(
            f"{field}: it got a tensor of the shape {list(image.shape)}; connect images of the shape "
            "[batch, height, width, 3]."
        )
    return image


def mask_tensor(tensor: Tensor, field: str) -> Tensor:
    """Check a MASK and return it as floats [B, H, W]; nodes make [H, W], [B, 1, H, W] and bool too."""
    mask = _finite(tensor, field, MASK_SOURCE, more=[torch.bool])

    masks = _as_mask_batch(mask)
    if masks is None:
        raise UserError(
            f"{field}: its shape is {list(mask.shape)}; connect a MASK of the shape [batch, height, width]."
        )
    return masks


def _as_mask_batch(values: Tensor) -> Tensor | None:
    """Masks [H, W], [B, H, W] or [B, 1, H, W] as [B, H, W]; None for any other shape, or if a dimension has size 0."""
    if 0 in values.shape:
        return None
    if values.ndim == 2:
        return values[None]
    if values.ndim == 4 and values.shape[1] == 1:
        return values[:, 0]
    return values if values.ndim == 3 else None


def latent_tensor(tensor: Tensor, field: str) -> Tensor:
    """Check the tensor of a LATENT and return it as [B, C, h, w]: finite, and with one frame if it is [B, C, T, h, w].

    ComfyUI's VAE of an image model decodes the first frame of a video's latents and silently drops all other frames.
    """
    latents = _finite(tensor, field, LATENT_SOURCE)

    shape = list(latents.shape)
    if latents.ndim not in (4, 5) or 0 in shape:
        raise UserError(
            f"{field}: its shape is {shape}; connect latents of the shape [batch, channels, height, width]. None of "
            "these four numbers may be 0."
        )

    has_frames = latents.ndim == 5
    if has_frames and shape[2] != 1:
        raise UserError(
            f"{field}: this latent is a video of {shape[2]} frames, but the model generates single images; insert "
            "Latent Cut To Batch (dim t, slice_size 1), which turns the frames into a batch."
        )
    return latents[:, :, 0] if has_frames else latents


def expect_usual_size(latents: Tensor, field: str) -> None:
    """Raise a UserError if the numbers of finite latents are larger than the latents of any image."""
    largest = float(latents.abs().max())
    if largest > LARGEST_LATENT:
        raise UserError(
            f"{field}: it holds values up to {largest:.3g}, but latents of an image stay below {LARGEST_LATENT}; "
            "connect latents from a FastAR sampler, or from VAE Encode with the vae of the model's loader."
        )


def to_rgb(images: Tensor) -> Tensor:
    """Images [B, H, W, C] of 1, 3 or 4 channels to [B, H, W, 3]: grey is repeated, alpha dropped."""
    if images.shape[3] == 1:
        batch, height, width, _ = images.shape
        return images.expand(batch, height, width, 3)

    return images[..., :3]


def to_bytes(images: Tensor) -> np.ndarray:
    """Finite images [B, H, W, C] in 0..1 to uint8 [B, H, W, 3], rounded."""
    rgb = to_rgb(images.detach().float().clamp(0, 1))
    return (rgb * 255).round().to(torch.uint8).cpu().numpy()


def scaled(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Images [B, C, H, W] in 0..1 at another size (height, width), bicubic."""
    return images if images.shape[2:] == size else resized(images.float(), size).clamp(0, 1)


def resized(values: Tensor, size: tuple[int, int]) -> Tensor:
    """Values [B, C, H, W] at another size (height, width), bicubic: beside an edge they exceed those around it."""
    return values if values.shape[2:] == size else F.interpolate(values, size, mode="bicubic", antialias=True)
