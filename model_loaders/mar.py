"""MAR files to :class:`MARModel`."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import torch

from . import checkpoint as ck
from .networks.mar import MAR, MARConfig, MARModel

OFFICIAL_LATENT_SCALE = 0.2325
OFFICIAL_T_MAX = 999
IMAGENET_CLASSES = 1000
# At t = 999 what this layer gets wrong is multiplied by hundreds (samplers/diffusion.py).
FP32_WEIGHTS = ("diffloss.net.final_layer.linear.",)


def load_mar(
    path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", heads: int | None = None
) -> MARModel:
    """Load a MAR of any size with the official parameter names.

    The shape follows from the weights. The head count follows from ``heads``, the metadata entry of that name, or the
    width of the official sizes. Metadata may also give ``latent_scale`` (default 0.2325), ``t_max`` (999), ``patch``
    (1), ``label_set`` ("imagenet-1k" if there are 1000 classes) and ``name`` (the file's).

    Args:
        path: see :func:`.checkpoint.read`.
        dtype: "auto", "fp32", "bf16" or "fp16", see :func:`.checkpoint.choose_dtype`. The diffusion head's last layer
            is fp32 in any case.
        device: where the weights go.
        heads: attention heads, for files that do not say.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is no MAR, does not fit, or its metadata makes no sense.
    """
    compute = ck.choose_dtype(dtype, device)
    file = ck.read(path)
    ck.expect(file, "mar")
    config = _config(file, heads or ck.metadata_number(file, "heads", None, 1, 1024, int))
    patch = ck.metadata_number(file, "patch", 1, 1, 64, int)
    if config.channels % patch**2:
        raise file.complain(f"says patch = {patch} in its metadata, but its tokens have {config.channels} channels")
    latent_scale = ck.metadata_number(file, "latent_scale", OFFICIAL_LATENT_SCALE, 1e-4, 1e4, float)
    t_max = ck.metadata_number(file, "t_max", OFFICIAL_T_MAX, 1, OFFICIAL_T_MAX, int)
    with torch.device("meta"):
        net = MAR(config)
    ck.load_strictly(net, file.state, file.path, "a MAR", dtype=compute, fp32=FP32_WEIGHTS, device=device)
    return MARModel(
        net=net.eval().requires_grad_(False),
        name=ck.metadata_text(file, "name", file.path.stem),
        latent_scale=latent_scale,
        t_max=t_max,
        patch=patch,
        label_set=ck.metadata_text(file, "label_set", "imagenet-1k" if config.classes == IMAGENET_CLASSES else ""),
    )


def _config(file: ck.Checkpoint, heads: int | None) -> MARConfig:
    try:
        config = MARConfig.from_state_dict(file.state, heads)
    except KeyError as e:
        raise file.complain(f"does not fit a MAR: {e.args[0]} is missing") from e
    except ValueError as e:
        raise file.complain(f"cannot be used: {e}") from e
    except IndexError as e:
        raise file.complain("does not fit a MAR: its embeddings are misshaped") from e
    if min(astuple(config)) < 1:
        raise file.complain("does not fit a MAR: a part of it is missing or empty")
    return config
