"""Loader of MAR checkpoints."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...networks.mar import MAR, OFFICIAL_HEADS, MARConfig, MARModel
from ...networks.ops import FAST, Operations
from ...networks.torch_state import in_own_state
from ..files import checkpoint as ck
from ..files.wrappers import AUTO
from ..kinds import Precision, choose_bits, choose_dtype, read
from ..llamagen.loader import HEADS, IMAGENET, expect_heads, note_defaults

OFFICIAL_T_MAX = 999
# The first diffusion step (t = 999) multiplies rounding errors of this layer by hundreds (samplers/mar/tables.py).
FP32_WEIGHTS = ("diffloss.net.final_layer.linear.",)


@in_own_state
def load_mar(
    path: str | Path,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    heads: int | None = None,
    weights: str = AUTO,
    operations: Operations = FAST,
) -> MARModel:
    """Load a MAR of any size with the official parameter names. Shared arguments and errors: see :mod:`.checkpoint`.

    The last layer of the diffusion head is always fp32.

    Args:
        path: the file.
        dtype: see :func:`.kinds.choose_dtype`.
        device: of the weights.
        heads: attention heads; None takes the metadata's, or those of the training's arguments, else those
            of the official model of that width.
        weights: "ema" for averaged weights, "trained" for the others, "auto" for
            averaged ones where a file holds both.
        operations: of which the network is built, see :class:`.ops.Operations`.

    Other metadata entries: ``latent_scale`` (default 0.2325); ``t_max`` (last diffusion timestep, 999); ``patch``
    (patch size of a token, 1; also read from ``args.patch_size``); ``label_set`` ("imagenet-1k" for 1000 classes);
    ``name`` (the file's stem). What is assumed stands in ``note`` of the model and in its reports.
    """
    compute = choose_dtype(dtype, device, "mar")
    file = read(path, "mar", weights=weights)
    heads = heads or file.stated("heads", 1, 1024, HEADS)
    expect_heads(file, heads, file.state.get("class_emb.weight"), OFFICIAL_HEADS)

    with ck.misfits(file):
        config = MARConfig.from_state_dict(file.state, heads)
    if min(astuple(config)) < 1:
        raise file.error("does not fit a MAR: a part of the model is missing or empty")

    stated = latent_metadata(file, config.channels)
    note_defaults(file, "mar", heads, config.heads, config.classes)
    if file.number("label_drop_prob", None, 0.0, 1.0, file.arguments) == 0:
        file.assume("the training never dropped labels (label_drop_prob 0), so guidance (cfg) has no meaning")

    net = ck.load_strictly(
        file,
        partial(MAR, config),
        operations=operations,
        dtype=compute,
        fp32=FP32_WEIGHTS,
        device=device,
        bits=choose_bits(dtype, device),
    )
    return MARModel(
        net=net,
        name=file.name,
        **stated,
        label_set=file.text("label_set", "imagenet-1k" if config.classes == IMAGENET else ""),
        assumed=file.note,
    )


def latent_metadata(file: ck.Checkpoint, channels: int) -> dict[str, Any]:
    """Latent scale, last diffusion timestep and patch size of a model whose tokens have this many channels."""
    patch = file.stated("patch", 1, 64, ("patch_size",)) or 1
    if channels % patch**2:
        raise file.error(
            f"states a patch size of {patch}, which does not fit tokens of {channels} channels",
            "correct the patch size",
        )

    return {
        "latent_scale": file.number("latent_scale", 0.2325, 1e-4, 1e4),
        "t_max": file.number("t_max", OFFICIAL_T_MAX, 1, OFFICIAL_T_MAX),
        "patch": patch,
    }
