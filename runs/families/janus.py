"""Janus as a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model_loaders.catalogue.hub import Entry
from ...model_loaders.files.wrappers import AUTO
from ...model_loaders.janus.loader import load_janus, load_janus_vq
from ...model_loaders.janus.squares import squared
from ...networks.autoencoder import VQModel
from ...networks.janus import JanusModel, Template, edits
from ...networks.janus_vision import ImageReader
from . import network_of, token_a_word
from .tokens import TokenFamily


class _Janus(TokenFamily):
    answers = True
    takes_freedom = True

    def prepared(self, image: Tensor, reader: ImageReader) -> Tensor:
        return squared(image, reader.side, reader.least)

    def further_uses(self, name: str) -> str:
        return ", edits and describes images" if edits(name) else ", describes images"

    def decoder_inside(self, path: Path, device: torch.device, **about: Any) -> VQModel:
        return load_janus_vq(path, AUTO, device, **about)

    def outlined(self, entry: Entry) -> JanusModel:
        return JanusModel(
            network_of(entry),
            entry.id,
            entry.grid,
            tokenize=token_a_word,
            template=Template(begin=0, image=1),
        )


FAMILY = _Janus(
    name="janus",
    words="a Janus",
    load_file=load_janus,
    files="janus",
    reads=("prompt", "image prompt"),
    usual_samplers=("llamagen", "zipar"),
)
