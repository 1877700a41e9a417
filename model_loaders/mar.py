"""Loader of MAR checkpoints."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from . import checkpoint as ck
from .families import expect
from .networks.mar import MAR, MARConfig, MARModel
from .networks.ops import quantize

OFFICIAL_LATENT_SCALE = 0.2325
OFFICIAL_T_MAX = 999
IMAGENET_CLASSES = 1000
# The first diffusion step (t = 999) multiplies rounding errors of this layer by hundreds (samplers/mar/tables.py).
FP32_WEIGHTS = ("diffloss.net.final_layer.linear.",)


def load_mar(
    path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", heads: int | None = None
) -> MARModel:
    """Load a MAR of any size with the official parameter names.

    The shape is derived from the weights. The head count is ``heads``, the metadata entry ``heads``, or that of the official
    model of the same width. Other metadata entries: ``latent_scale`` (default 0.2325), ``t_max`` (last diffusion timestep,
    999), ``patch`` (patch size of a token, 1), ``label_set`` ("imagenet-1k" for 1000 classes) and ``name`` (the file's stem).

    Args:
        path: see :func:`.checkpoint.read`.
        dtype: "auto", "fp32", "bf16", "fp16" or "int8", see :func:`.checkpoint.choose_dtype`. The last layer of the
            diffusion head is always fp32.
        device: device of the weights.
        heads: attention heads, for files whose metadata and width do not determine them.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is not a MAR, does not fit, or has invalid metadata.
    """
    compute = ck.choose_dtype(dtype, device)
    file = ck.read(path)
    expect(file, "mar")
    config = _config(file, heads or file.number("heads", None, 1, 1024, int))
    stated = latent_metadata(file, config.channels)
    net = ck.build(file, "a MAR", lambda: MAR(config))
    ck.load_strictly(net, file, "a MAR", dtype=compute, fp32=FP32_WEIGHTS, device=device)
    return MARModel(
        net=quantize(net) if dtype == ck.INT8 else net,
        name=file.name,
        **stated,
        label_set=file.text("label_set", "imagenet-1k" if config.classes == IMAGENET_CLASSES else ""),
    )


def latent_metadata(file: ck.Checkpoint, channels: int) -> dict[str, Any]:
    """Latent scale, last diffusion timestep and patch size of a model whose tokens have so many channels.

    Raises:
        UserError: an entry is out of range, or tokens are not patches of that size.
    """
    patch = file.number("patch", 1, 1, 64, int)
    if channels % patch**2:
        raise file.error(f"states patch = {patch} in its metadata, but its tokens have {channels} channels")
    return {
        "latent_scale": file.number("latent_scale", OFFICIAL_LATENT_SCALE, 1e-4, 1e4, float),
        "t_max": file.number("t_max", OFFICIAL_T_MAX, 1, OFFICIAL_T_MAX, int),
        "patch": patch,
    }


def _config(file: ck.Checkpoint, heads: int | None) -> MARConfig:
    with ck.shape_errors(file, "a MAR"):
        config = MARConfig.from_state_dict(file.state, heads)
    if min(astuple(config)) < 1:
        raise file.error("does not fit a MAR: a part of it is missing or empty")
    return config
