"""The sockets latent_image and mask of a sampler: an image to inpaint, or a size; and places of images in a batch."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from ..errors import UserError
from ..memory import enough_memory
from ..runs.images import expect_usual_size
from ..runs.registry import family_of
from ..samplers.conditioning import AnyCondition
from ..samplers.editing import Edit
from .host.loaded import Loaded
from .schema import describe, expect_latents, expect_mask
from .vae import kind_of

C = TypeVar("C", bound=AnyCondition)

# Where ComfyUI's empty latents note their pixels per position; latents of older nodes have 8.
PIXELS_PER_LATENT = "downscale_ratio_spacial"
_USUAL_PIXELS = 8
# Where ComfyUI's nodes note which images of a batch a latent holds: Rebatch Latents, Latent From Batch.
BATCH_INDEX = "batch_index"


def asked(
    condition: C, latent: Any, mask: Any, first_image: int, loaded: Loaded[Any], settings: Any
) -> tuple[C, Edit | None, Sequence[int]]:
    """The condition and the edit of the images to draw, and their numbers, which the noise depends on.

    Args:
        condition: what the condition socket asks for.
        latent, mask: as they arrive on ``latent_image`` and ``mask``; None where nothing is connected.
        first_image: the number of the first image, of the node's widget.
        loaded: the model.
        settings: of the run.

    Raises:
        UserError: an image, a mask or a size that do not fit the model or the condition.
    """
    edit = None
    if _is_size(latent, mask):
        _expect_size(latent, loaded, settings)
    else:
        edit = _checked_edit(latent, mask, family_of(loaded.model).decoder)

    condition, edit, numbers = _in_batch(condition, edit, latent)
    if first_image and knows_places(latent):
        raise UserError(
            f"first_image: the value is {first_image}, but latent_image already states the positions of its images in "
            "the batch; set first_image to 0."
        )
    return condition, edit, [first_image + number for number in numbers]


def knows_places(latent: Any) -> bool:
    """Whether a latent says which images of a batch it holds."""
    return isinstance(latent, Mapping) and BATCH_INDEX in latent


def _checked_edit(latent: Any, mask: Any, kind: str) -> Edit | None:
    """The edit of the sockets ``latent_image`` and ``mask``, None if both are unconnected.

    ``kind``: of the latents, see ``vae``.
    """
    if latent is None and mask is None:
        return None

    if latent is None:
        raise UserError(
            "latent_image: there is a mask but no image to inpaint; connect the output of VAE Encode, or disconnect "
            "mask."
        )
    if not isinstance(latent, dict) or "samples" not in latent:
        raise UserError(f"latent_image: it got {describe(latent)}; connect the output of VAE Encode.")
    if kind_of(latent["samples"]) not in ("", kind):
        raise UserError(
            "latent_image: this latent belongs to a different family of models; encode the image with VAE Encode and "
            "the vae of the model's loader."
        )

    if mask is None:
        mask = latent.get("noise_mask")
    if mask is None:
        raise UserError("mask: inpainting needs a mask; connect a mask, or disconnect latent_image.")

    with enough_memory(
        "mask: there is not enough memory for this image and its mask; connect a smaller image and mask."
    ):
        start = expect_latents(latent["samples"], "latent_image")
        expect_usual_size(start, "latent_image")
        return Edit(start, expect_mask(mask, "mask"))


def _is_size(latent: Any, mask: Any) -> bool:
    """Whether ``latent_image`` is no image but a size, as Empty Latent Image makes it: zeros, without a mask here or on
    the latent. ComfyUI's samplers take zeros for an empty latent too.
    """
    if mask is not None or not isinstance(latent, dict) or "samples" not in latent:
        return False
    if latent.get("noise_mask") is not None:
        return False

    with enough_memory("latent_image: there is not enough memory to read this latent; connect a smaller one."):
        return not bool(expect_latents(latent["samples"], "latent_image").any())


def _expect_size(latent: Mapping[str, Any], loaded: Loaded[Any], settings: Any) -> None:
    """Check that an empty latent has the size of the images that a run draws: decoded, as VAE Encode reads them, or, if
    it does not say its pixels, in positions of the model's own latents.
    """
    vae = loaded.vae
    rows, columns = latent["samples"].shape[-2:]
    height, width = family_of(loaded.model).latents(loaded.model, settings)
    if PIXELS_PER_LATENT not in latent and (rows, columns) == (height, width):
        return

    pixels = latent.get(PIXELS_PER_LATENT, _USUAL_PIXELS)
    asked = (rows * pixels, columns * pixels)
    if any(asked == (height * ratio, width * ratio) for ratio in (vae.upscale_ratio, vae.downscale_ratio)):
        return

    drawn = (width * vae.upscale_ratio, height * vae.upscale_ratio)
    remedy = f"set width to {drawn[0]} and height to {drawn[1]} on Empty Latent Image"
    if asked in vae.sizes:  # a model of several sizes, one of which the sampler sets
        remedy = f"set width to {asked[1]} and height to {asked[0]} on the sampler"
    raise UserError(
        f"latent_image: the empty latent asks for {asked[1]} x {asked[0]} pixels, but {loaded.model.name} generates "
        f"{drawn[0]} x {drawn[1]} pixels with these settings; {remedy}, or disconnect latent_image."
    )


def _in_batch(condition: C, edit: Edit | None, latent: Any) -> tuple[C, Edit | None, Sequence[int]]:
    """The condition and the edit of the images to draw, and the numbers that their noise depends on.

    A single entry of a condition is for all images of the latent, as in core.

    A latent that is part of a batch says which of its images it holds: each is drawn as in the whole batch. Its number
    is its place there. If a condition or a mask has more entries than the latent, the latent gets the entry of its
    place; if the numbers are equal, the entries belong to the latent's images in their order.
    """
    if latent is None:
        return condition, edit, range(len(condition))

    count = len(latent["samples"])
    if len(condition) == 1:
        condition = cast(C, condition.for_images([0] * count))
    images = len(condition)
    if edit is None and images != count and (images < count or count > 1 and BATCH_INDEX not in latent):
        raise UserError(
            f"latent_image: the batch_size of the empty latent is {count}, but the condition asks for {images} "
            f"images; on the node that makes the empty latent, set batch_size to 1 or {images}."
        )
    if BATCH_INDEX not in latent:
        return condition, edit, range(images)

    places = _places(latent[BATCH_INDEX], count)
    if images > count:
        if max(places) >= images:
            raise UserError(
                "condition: latent_image holds a part of a larger batch. One of its images is image number "
                f"{max(places) + 1} of that batch, but the condition has only {images} entries; connect a condition "
                "with one entry for each image in latent_image, or for each image of the larger batch."
            )
        condition = cast(C, condition.for_images(places))

    if edit is not None and len(edit.mask) > count and max(places) < len(edit.mask):
        edit = replace(edit, mask=edit.mask[places])
    return condition, edit, places


def _places(value: Any, count: int) -> list[int]:
    """The places of ``count`` latents in their batch, checked: another pack may have made them."""
    try:
        places = [operator.index(place) for place in value]
    except TypeError:
        places = []

    if len(places) != count or min(places) < 0:
        raise UserError(
            f"latent_image: batch_index must state a position, counted from 0, for each of the {count} latents; make "
            "the latent again, for example with Latent From Batch."
        )
    return places
