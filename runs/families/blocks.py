"""What families share whose models draw blocks of bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...model_loaders.bitdance.loader import expect_bits, load_binary
from ...networks.binary import BinaryModel
from ...networks.bitdance import BlockModel
from ...samplers.blocks.canvas import expect_edit, expect_suited
from ...samplers.editing import Edit
from ..memory.blocks import estimate
from . import Family


class BlockFamily(Family):
    """Models that draw whole blocks of bits one after another."""

    kind = "blocks"
    socket = "FASTAR_BITDANCE"
    condition_help = (
        "What to draw, one entry per image: from Class Label for an ImageNet model, from Prompt (FastAR) for a 14B."
    )
    mask_help = (
        "The area to regenerate; all other tokens stay bit-identical. New tokens match the blocks above and to the "
        "left of them, but not the blocks below."
    )
    decoder = "bitdance-ae"
    load_decoder = staticmethod(load_binary)

    def expect_decoder(self, decoder: BinaryModel, model: BlockModel) -> None:
        expect_bits(decoder, model)

    def classes(self, model: BlockModel) -> int:
        return model.net.config.condition_size

    def grid(self, model: BlockModel, settings: Any = None) -> tuple[int, int]:
        if settings is None:
            return model.grid(None, None)
        return model.grid(settings.height, settings.width)

    def sizes(self, model: BlockModel, stride: int) -> tuple[tuple[int, int], ...]:
        return model.sizes or (model.usual_size,)

    def step_numbers(self, model: BlockModel, settings: Any) -> int:
        height, width = self.grid(model, settings)
        return height * width * model.net.channels

    def memory(
        self, model: BlockModel, condition: Any, settings: Any, edited: bool = False, **more: Any
    ) -> dict[str, int]:
        return estimate(model, condition, settings, edited)

    def own_values(self, model: BlockModel, settings: Any) -> dict[str, Any]:
        height, width = model.usual_size
        return {"width": width, "height": height}

    def short(self, settings: Any) -> Any:
        """Two diffusion steps of a block."""
        return replace(settings, diffusion_steps=2)

    def expect_device(self, model: BlockModel, device: torch.device, settings: Any) -> None:
        expect_suited(model, device, settings)

    def expect_edit(self, model: BlockModel, edit: Edit, settings: Any, images: int) -> None:
        expect_edit(model, edit, settings, images)
