"""Loader of MAR checkpoints."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from . import checkpoint as ck
from .families import INT8, choose_dtype, read
from .networks.mar import MAR, MARConfig, MARModel

OFFICIAL_T_MAX = 999
# The first diffusion step (t = 999) multiplies rounding errors of this layer by hundreds (samplers/mar/tables.py).
FP32_WEIGHTS = ("diffloss.net.final_layer.linear.",)


def load_mar(
    path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", heads: int | None = None
) -> MARModel:
    """Load a MAR of any size with the official parameter names. Shared arguments and errors: see :mod:`.checkpoint`.

    The last layer of the diffusion head is always fp32. ``heads`` None takes the metadata entry, else those of the official model of that
    width. Other metadata entries: ``latent_scale`` (default 0.2325); ``t_max`` (last diffusion timestep, 999); ``patch`` (patch size of a
    token, 1); ``label_set`` ("imagenet-1k" for 1000 classes); ``name`` (the file's stem).
    """
    compute = choose_dtype(dtype, device, "mar")
    file = read(path, "mar")
    with ck.misfits(file):
        config = MARConfig.from_state_dict(file.state, heads or file.number("heads", None, 1, 1024))
    if min(astuple(config)) < 1:
        raise file.error("does not fit a MAR: a part of it is missing or empty")
    stated = latent_metadata(file, config.channels)
    return MARModel(
        net=ck.load_strictly(
            file, lambda: MAR(config), dtype=compute, fp32=FP32_WEIGHTS, device=device, int8=dtype == INT8
        ),
        name=file.name,
        **stated,
        label_set=file.text("label_set", "imagenet-1k" if config.classes == 1000 else ""),
    )


def latent_metadata(file: ck.Checkpoint, channels: int) -> dict[str, Any]:
    """Latent scale, last diffusion timestep and patch size of a model whose tokens have so many channels."""
    patch = file.number("patch", 1, 1, 64)
    if channels % patch**2:
        raise file.error(f"states patch = {patch} in its metadata, but its tokens have {channels} channels")
    return {
        "latent_scale": file.number("latent_scale", 0.2325, 1e-4, 1e4),
        "t_max": file.number("t_max", OFFICIAL_T_MAX, 1, OFFICIAL_T_MAX),
        "patch": patch,
    }
