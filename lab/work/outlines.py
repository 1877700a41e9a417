"""Models of the catalogue without weights: for what depends on shapes only, and needs no file."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...model_loaders.catalogue import hub, official
from ...networks.bitdance import BlockModel, Marks
from ...networks.llama import Llama, TokenModel
from ...networks.mar import MAR, MARModel
from ...networks.ops import shapes_only
from ...runs.loading import Ready, listed_family, official_blocks
from ...runs.registry import BITDANCE, HYBRID
from ...samplers.conditioning import PromptCondition
from .sizes import random_hybrid

# Semantic codes along a side of an image of Tar at the finest of its scales.
SEMANTIC_SIDE = 27
# Pixels along a side of a token of every published autoencoder that the catalogue's models are decoded with.
STRIDE = 16


def outlined(entry: hub.Entry) -> Ready:
    """A catalogue entry that draws images, or writes the codes of one, as a model in bf16 on the device "meta"."""
    family = listed_family(entry.id) if entry.family != "tar" else entry.family
    assert family is not None, f"{entry.id} draws nothing"

    if entry.family == HYBRID:
        return Ready(family, random_hybrid(entry.network, torch.bfloat16, "meta"), choice=entry.id)
    if entry.family == BITDANCE:
        return Ready(family, _blocks(entry), choice=entry.id)

    with shapes_only():
        net = official.NETWORKS[entry.network](entry.network).to(torch.bfloat16).requires_grad_(False)

    if isinstance(net, MAR):
        return Ready(family, MARModel(net, entry.id), choice=entry.id)
    assert isinstance(net, Llama), f"{entry.id} draws nothing"
    return Ready(family, TokenModel(net, entry.id, side_of(entry)), choice=entry.id)


def _blocks(entry: hub.Entry) -> BlockModel:
    """A BitDance. One that reads prompts takes a token a word; the ids do not matter here."""
    model = official_blocks(entry)
    model.net.to(torch.bfloat16).requires_grad_(False)
    if model.condition != PromptCondition.kind:
        return model

    sides = dict.fromkeys(range(1, 129), 0)
    marks = Marks(begin=0, end=0, image=0, sizes=sides, queries=(0,) * (model.net.block - 1))
    return replace(model, tokenize=lambda text: [0] * len(text.split()), marks=marks)


def side_of(entry: hub.Entry) -> int:
    """Tokens per side of what a token model draws: pixels of its name by 16, or of 384 pixels."""
    if entry.family == "tar":
        return SEMANTIC_SIDE

    pixels = entry.id.rpartition("-")[2]
    return int(pixels) // STRIDE if pixels.isdigit() else 24
