"""Loader of the learned latent up-sampler."""

from __future__ import annotations

from pathlib import Path

import torch

from . import checkpoint as ck
from .networks.upsampler import UpSampler, UpSamplerConfig, UpSamplerModel


def load_upsampler(path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu") -> UpSamplerModel:
    """Load a latent up-sampler. Metadata entry: ``name`` (default: the file's stem).

    Args:
        path: see :func:`.checkpoint.read`.
        dtype: "fp32", "bf16", "fp16" or "auto". "auto" is fp32 on every device: the network is small, and rounding changes
            the choice between similar codes.
        device: device of the weights.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is not an up-sampler, or does not fit.
    """
    compute = ck.choose_dtype("fp32" if dtype == "auto" else dtype, device)
    file = ck.read(path, "up_sampler")
    try:
        config = UpSamplerConfig.from_state_dict(file.state)
    except (KeyError, ValueError) as e:
        raise file.error(
            "holds no weights of a latent up-sampler, or blocks without order", "choose a file that its training wrote"
        ) from e
    net = ck.build(file, "a latent up-sampler", lambda: UpSampler(config))
    net = ck.load_strictly(net, file, "a latent up-sampler", dtype=compute, device=device)
    return UpSamplerModel(net, file.name)
