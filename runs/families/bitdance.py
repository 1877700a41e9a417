"""BitDance as a family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...model_loaders.bitdance.loader import autoencoder_path, load_binary, load_bitdance
from ...model_loaders.catalogue.hub import Entry
from ...model_loaders.catalogue.official import official_binary
from ...model_loaders.files.wrappers import AUTO
from ...networks.binary import BinaryModel
from ...networks.bitdance import BitDanceClass, BlockModel, BlockNetwork, Marks
from . import network_of, token_a_word
from .blocks import BlockFamily

# Published guidance scales of ImageNet: by width and tokens of a block, else by width.
_SCALES: dict[Any, float] = {(768, 4): 3.9, (768, 16): 6.1, 1024: 4.0, 1280: 4.55}
_SCALE = 3.2


class _BitDance(BlockFamily):
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
    one_grid="width and height set that of a BitDance",
    demo=("demo-bitdance",),
    usual_samplers=("bitdance",),
)
