"""The recorded tiny Janus that reads images, as tests use it."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from fastar_nodes.model_loaders.janus.loader import load_janus, load_janus_vision, load_janus_vq
from fastar_nodes.networks.janus import JanusModel
from fastar_nodes.networks.janus_vision import ImageReader
from fastar_nodes.runs.loading import read_images
from fastar_nodes.runs.registry import FAMILIES, JANUS
from fastar_nodes.samplers.conditioning import ImagePromptCondition
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "parity" / "janus_images"
GRID = 4
PROMPTS = ("make it night", "turn the apple into a blue ball", "make it night")
# The image of each prompt: the first and the last are the same pair.
PICTURES = (0, 1, 0)


@lru_cache
def tiny_editor(dtype: str = "fp32") -> JanusModel:
    """The network on its grid."""
    return replace(load_janus(FOLDER / "model", dtype), grid=GRID)


@lru_cache
def tiny_reader(dtype: str = "fp32") -> ImageReader:
    """What reads images for it."""
    vq = load_janus_vq(FOLDER / "model", dtype)
    return load_janus_vision(FOLDER / "model", vq, dtype)


@lru_cache
def picture(i: int) -> Tensor:
    """A recorded image uint8 [H, W, 3]."""
    return torch.from_numpy(np.array(Image.open(FOLDER / f"edit/input_{i}.png").convert("RGB")))


def one_file(path: Path, name: str = "Janus-4o tiny") -> Path:
    """The network with everything in the metadata of one file."""
    texts = {}
    for about in ("config", "tokenizer", "preprocessor_config"):
        texts[about] = (FOLDER / f"model/{about}.json").read_text(encoding="utf-8")
    metadata = {**texts, "grid": str(GRID), "name": name}
    save_file(load_file(FOLDER / "model/model.safetensors"), path, metadata=metadata)
    return path


def edits_of(images: tuple[int, ...] = (0, 1, 2), freedom: float = 5.0) -> ImagePromptCondition:
    """Images with prompts, read: entry i is the same in every batch, and the prompts differ in length."""
    texts = tuple(PROMPTS[i] for i in images)
    pictures = tuple(picture(PICTURES[i]) for i in images)
    return read_images(ImagePromptCondition(texts, pictures, freedom), tiny_reader(), FAMILIES[JANUS])
