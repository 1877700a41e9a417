"""BitDance as a family: its models draw whole blocks of bits one after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...model_loaders.bitdance.loader import autoencoder_path, expect_bits, load_binary, load_bitdance
from ...model_loaders.catalogue.hub import Entry
from ...model_loaders.catalogue.official import official_binary
from ...model_loaders.files.wrappers import AUTO
from ...networks.binary import BinaryModel
from ...networks.bitdance import BitDanceClass, BlockModel, BlockNetwork, Marks
from ...samplers.blocks.checks import expect_device, expect_edit
from ...samplers.editing import Edit
from ..memory.blocks import estimate
from . import Family, network_of, token_a_word

# Published guidance scales of ImageNet: by width and tokens of a block, else by width.
_SCALES: dict[Any, float] = {(768, 4): 3.9, (768, 16): 6.1, 1024: 4.0, 1280: 4.55}
_SCALE = 3.2


class _BitDance(Family):
    kind = "blocks"
    socket = "FASTAR_BITDANCE"
    condition_help = (
        "What to generate: one label or prompt per image. For an ImageNet model, connect Class Label; for a 14B "
        "model, connect Prompt (FastAR)."
    )
    mask_help = (
        "The area to regenerate; all tokens outside it stay bit-identical. The blocks are decided row by row, so new "
        "tokens match the blocks above and to the left of them, but not the blocks below or to the right."
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
        expect_device(model, device, settings)

    def expect_edit(self, model: BlockModel, edit: Edit, settings: Any, images: int) -> None:
        expect_edit(model, edit, settings, images)

    def decoder_inside(self, path: Path, device: torch.device, **about: Any) -> BinaryModel | None:
        inside = autoencoder_path(path)
        return None if inside is None else load_binary(inside, AUTO, device, **about)

    def published(self, model: BlockModel) -> dict[str, Any]:
        if not isinstance(model.net, BitDanceClass):
            return {"diffusion_steps": 50, "cfg": 7.5, "cfg_schedule": "constant"}

        width = model.net.config.dim
        cfg = _SCALES.get((width, model.net.block), _SCALES.get(width, _SCALE))
        return {"diffusion_steps": 100, "cfg": cfg, "cfg_schedule": "linear"}

    def outlined(self, entry: Entry) -> BlockModel:
        """The ids of sizes do not matter here."""
        net: BlockNetwork = network_of(entry)
        model = BlockModel(net, entry.id, official_binary().stride)
        if isinstance(net, BitDanceClass):
            return model

        marks = Marks(begin=0, end=0, image=0, sizes=dict.fromkeys(range(1, 129), 0), queries=(0,) * (net.block - 1))
        return replace(model, tokenize=token_a_word, marks=marks)


FAMILY = _BitDance(
    name="bitdance",
    words="a BitDance",
    load_file=load_bitdance,
    files="bitdance",
    reads=("class", "prompt"),
    one_grid="because width and height set the grid of a BitDance",
    demo=("demo-bitdance",),
    usual_samplers=("bitdance",),
)
