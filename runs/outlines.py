"""Models of the catalogue without weights: for what depends on shapes only, and needs no file."""

from __future__ import annotations

from typing import Any

import torch

from ..model_loaders.catalogue import hub
from ..networks.llama import TokenModel
from .families import network_of
from .loading import LANGUAGE, Ready
from .registry import family_of_files

# Semantic codes along a side of an image of Tar at the finest of its scales.
SEMANTIC_SIDE = 27
# Pixels along a side of a token of every published autoencoder that the catalogue's models are decoded with.
STRIDE = 16


def outlined(entry: hub.Entry) -> Ready:
    """A catalogue entry that draws images, or writes the codes of one, as a model in bf16 on the device "meta"."""
    if entry.family == LANGUAGE:
        net = network_of(entry).to(torch.bfloat16).requires_grad_(False)
        return Ready(LANGUAGE, TokenModel(net, entry.id, entry.grid), choice=entry.id)

    family = family_of_files(entry.family)
    assert family is not None, f"{entry.id} draws nothing"
    model: Any = family.outlined(entry)
    family.network(model).to(torch.bfloat16).requires_grad_(False)
    return Ready(family.name, model, choice=entry.id)
