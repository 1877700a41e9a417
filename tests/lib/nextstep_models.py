"""The recorded tiny NextStep and its autoencoder, as tests use them."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from fastar_nodes.model_loaders.nextstep.loader import autoencoder_path, load_nextstep, load_nextstep_ae
from fastar_nodes.networks.autoencoder import KLModel
from fastar_nodes.networks.nextstep import NextStepModel
from fastar_nodes.runs.loading import read_images
from fastar_nodes.runs.registry import FAMILIES
from fastar_nodes.samplers.conditioning import ImagePromptCondition
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "parity" / "nextstep"
EDITOR = "NextStep-1-Large-Edit tiny"
PROMPTS = ("a red house", "", "An old boat by the sea")


@cache
def tiny_nextstep(name: str = "tiny", side: int = 3) -> NextStepModel:
    """The network in fp32, for images of so many tokens along a side if nothing else is asked."""
    return replace(load_nextstep(FOLDER / "model", "fp32"), name=name, side=side)


@cache
def tiny_latents() -> KLModel:
    """The autoencoder of its tokens."""
    path = autoencoder_path(FOLDER / "model")
    assert path is not None
    return load_nextstep_ae(path, "fp32")


def edits_of(images: tuple[int, ...] = (0, 1, 2), side: int = 3) -> ImagePromptCondition:
    """Images with prompts, read: entry i is the same in every batch, and the prompts differ in length."""
    model = tiny_nextstep(EDITOR, side)
    pictures = tuple(_picture(i % 2) for i in images)
    condition = ImagePromptCondition(tuple(PROMPTS[i] for i in images), pictures)
    family = FAMILIES[model.family]
    return read_images(condition, family.own_reader(model, tiny_latents()), family)


@cache
def _picture(i: int) -> torch.Tensor:
    """A recorded image uint8 [H, W, 3]."""
    return torch.from_numpy(np.array(Image.open(FOLDER / f"input_{i}.png").convert("RGB")))
