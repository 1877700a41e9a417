"""Editing: a crop of an image around a mask for the model, and its result put back into the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from comfy_api.v0_0_2 import io
from torch import Tensor

from ..errors import OfFastAR, UserError
from ..memory import enough_memory
from ..networks.torch_state import in_own_state
from ..runs import inpainting
from ..runs.images import to_rgb
from ..samplers.settings import Settings, knob, settings_from
from . import graph, host
from .schema import CROP, expect_image, expect_mask, output, schema, widgets
from .sockets import expect_kind_on


@dataclass(frozen=True)
class CropSettings(Settings):
    """Widgets of Crop around Mask."""

    context: float = knob(
        inpainting.CONTEXT,
        "Side of the crop divided by the mask's side; a larger crop shows the model more of your image, but the "
        "subject becomes smaller. Usual: 1.25.",
        low=inpainting.LEAST_CONTEXT,
        high=8.0,
        step=0.05,
    )


@dataclass(frozen=True)
class PasteSettings(Settings):
    """Widgets of Paste Inpainted Area."""

    feather: int = knob(
        inpainting.FEATHER,
        "Width in pixels of the border around the mask, over which the inpainted area fades out; a wider border "
        "hides the seam better and changes more of the original. Usual: 8; 0 gives a hard edge.",
        low=0,
        high=128,
        step=1,
        more="The border must fit into the crop, so the border around a small mask may be narrower than *feather*.",
    )
    match_colours: bool = knob(
        True,
        "Changes the colours of the new background (everything in the inpainted area except the subject) to the "
        "colours around the mask, so that no edge is visible. When this is off, the new background keeps the model's "
        "colours.",
        more="If the subject does not look like the background, for example a boat in front of the sky, the subject "
        "keeps its colours, except where it touches the edge of the mask.",
    )


@dataclass(frozen=True)
class Cropped(OfFastAR):
    """What Paste Inpainted Area needs of Crop around Mask."""

    kind: ClassVar[str] = "crop"
    fastar_version: ClassVar[int] = 1  # of its description in docs/sockets.md
    original: Tensor  # float [1 or B, 3, H, W]
    mask: Tensor  # float [1 or B, H, W]
    crop: inpainting.Crop


class CropAroundMask(io.ComfyNode):
    more = {
        "mask": "The soft edge of a stroke counts as part of the mask. All masks of a batch share one crop.",
    }
    more_of_outputs = {
        "image": "VAE Encode scales the crop to the size of the images that the model generates.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        image = io.Image.Input("image", tooltip="The image to change, of any size.")
        mask = io.Mask.Input("mask", tooltip="The area to replace (white), in any size.")

        return schema(
            node_id="FastARCropAroundMask",
            display_name="Crop around Mask",
            category="FastAR/sample",
            description="Crops a square around the mask from your own image, so that the model generates its subject "
            "at about the size of the mask. Paste Inpainted Area puts the result back.",
            search_aliases=["inpaint", "inpainting", "crop", "own image", "edit", "mask"],
            sockets=[image, mask],
            widgets=widgets(CropSettings),
            outputs=[
                output(io.Image, "image", "The crop. Connect it to VAE Encode."),
                output(io.Mask, "mask", "The mask of the crop. Connect it to the sampler's input mask."),
                output(
                    CROP,
                    "crop",
                    "Your image, its mask and the position of the crop. Connect it to Paste Inpainted Area.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, image: Any = None) -> bool | str:
        """Whether the image has a file: without one Load Image fails with words of the operating system."""
        title = graph.without_file(cls, "image")
        if title:
            return f"{title[:80]!r} has no file; choose or upload an image in that node, or switch that node off."

        graph.leave_unread(cls)
        return True

    @classmethod
    @in_own_state
    def execute(cls, image: Any, mask: Any, **values: Any) -> io.NodeOutput:
        context = settings_from(CropSettings, values).context
        original = to_rgb(expect_image(image, "image")).movedim(-1, 1).float()
        given = expect_mask(mask, "mask")
        _expect_batch({"image": original, "mask": given})

        with enough_memory("image: there is not enough memory to crop the image; use a smaller image."):
            area = inpainting.fitted(given.to(original), (original.shape[2], original.shape[3]))
            crop = inpainting.crop_around(area, context)

            cut = crop.of(original).movedim(1, -1).contiguous()
            return io.NodeOutput(host.devices.to_output(cut), crop.of(area).contiguous(), Cropped(original, area, crop))


class PasteInpaintedArea(io.ComfyNode):
    more_of_outputs = {
        "image": "Only the mask and the border around the mask (*feather*) change. All other pixels are "
        "bit-identical to the original.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        crop = CROP.Input("crop", tooltip="The crop that was inpainted, from Crop around Mask.")
        inpainted = io.Image.Input(
            "inpainted", tooltip="The decoded images of the sampler. FastAR scales them to the size of the crop."
        )

        return schema(
            node_id="FastARPasteInpaintedArea",
            display_name="Paste Inpainted Area",
            category="FastAR/sample",
            description="Puts the inpainted crop back into your own image, at its original size. Pixels outside the "
            "mask and the border around it (feather) stay unchanged.",
            search_aliases=["inpaint", "composite", "feather", "blend", "stitch", "put back", "keep original"],
            sockets=[crop, inpainted],
            widgets=widgets(PasteSettings),
            outputs=[
                output(io.Image, "image", "Your image with the inpainted area."),
                output(io.Image, "before_after", "Your image, the mask and the result, side by side in one image."),
            ],
        )

    @classmethod
    @in_own_state
    def execute(cls, crop: Any, inpainted: Any, **values: Any) -> io.NodeOutput:
        settings = settings_from(PasteSettings, values)
        cropped: Cropped = expect_kind_on(crop, (Cropped.kind,), "crop", "Crop around Mask")
        above = to_rgb(expect_image(inpainted, "inpainted")).movedim(-1, 1).to(cropped.original)
        original, mask = cropped.original, cropped.mask
        _expect_batch({"crop": original if len(original) > len(mask) else mask, "inpainted": above})

        with enough_memory("crop: there is not enough memory to paste the area into the image; use a smaller image."):
            image = inpainting.put_back(original, above, mask, cropped.crop, settings.feather, settings.match_colours)
            three = inpainting.before_mask_after(original, mask, image)
            return io.NodeOutput(*(host.devices.to_output(one.movedim(1, -1)) for one in (image, three)))


def _expect_batch(batches: Mapping[str, Tensor]) -> None:
    """Raise a UserError if an input of a node has neither one entry nor one for each image."""
    images = max(len(batch) for batch in batches.values())
    for name, batch in batches.items():
        if len(batch) not in (1, images):
            raise UserError(
                f"{name}: it holds {len(batch)} images, but the other input holds {images}; connect the same number of "
                "images to both inputs, or connect a single image to one of the inputs."
            )


NODES: list[type[io.ComfyNode]] = [CropAroundMask, PasteInpaintedArea]
