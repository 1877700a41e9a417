"""Editing: the inpainted area of an image, pasted into the original."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from comfy_api.latest import io

from ..errors import UserError
from ..memory import enough_memory
from ..samplers.settings import Settings, knob, make
from . import graph, host
from .images import scaled, to_rgb
from .schema import expect_image, expect_mask, output, schema, widgets


@dataclass(frozen=True)
class PasteSettings(Settings):
    """Widgets of Paste Inpainted Area."""

    feather: int = knob(
        8,
        "Pixels inside the mask over which the inpainted area fades in; more hides the seam and keeps more of the "
        "original. Usual: 8 for 512 pixels; 0 is a hard edge.",
        low=0,
        high=128,
        step=1,
    )


class PasteInpaintedArea(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        original = io.Image.Input(
            "original", tooltip="The image before the edit, of any size; the result has the same size."
        )
        inpainted = io.Image.Input(
            "inpainted",
            tooltip="The decoded images of the sampler; they are scaled to the size of the original.",
        )
        mask = io.Mask.Input("mask", tooltip="The mask of the edit, of any size; white is replaced.")

        return schema(
            node_id="FastARPasteInpaintedArea",
            display_name="Paste Inpainted Area",
            category="FastAR/sample",
            description="Puts the inpainted area into the original image, which may have any size. Decoding changes "
            "all pixels; after this node, those outside the mask are the original's.",
            search_aliases=["inpaint", "composite", "feather", "blend", "stitch", "keep original"],
            sockets=[original, inpainted, mask],
            widgets=widgets(PasteSettings),
            outputs=[output(io.Image, "image", "The original with the inpainted area.")],
        )

    @classmethod
    def validate_inputs(cls, original: Any = None) -> bool | str:
        """Whether the original has a file: without one Load Image fails with words of the operating system."""
        title = graph.without_file(cls, "original")
        if title:
            return f"{title[:80]!r} has no file; choose or upload an image there, or switch it off."
        return True

    @classmethod
    def execute(cls, original: Any, inpainted: Any, mask: Any, **values: Any) -> io.NodeOutput:
        feather = make(PasteSettings, values).feather
        below = to_rgb(expect_image(original, "original")).movedim(-1, 1).float()
        above = to_rgb(expect_image(inpainted, "inpainted")).movedim(-1, 1).float()
        area = expect_mask(mask, "mask")[:, None]

        images = max(len(below), len(above))
        for name, batch in {"original": below, "inpainted": above, "mask": area}.items():
            count = len(batch)
            if count not in (1, images):
                raise UserError(f"{name}: its batch has {count} entries, not 1 or {images}; connect those of one run.")

        with enough_memory("original: memory is insufficient to paste into it; use a smaller image."):
            size = (below.shape[2], below.shape[3])
            inside = F.interpolate(area.to(below), size, mode="nearest-exact")

            # A weight of 1 begins ``feather`` pixels inside the mask; the image's edge is no edge of the mask.
            weight = inside / (feather + 1)
            for _ in range(feather):
                inside = 1 - F.max_pool2d(1 - inside, 3, 1, 1)
                weight = weight + inside / (feather + 1)

            fitted = scaled(above.to(below), size)
            image = below + weight * (fitted - below)
        return io.NodeOutput(host.to_output(image.movedim(1, -1)))


NODES: list[type[io.ComfyNode]] = [PasteInpaintedArea]
