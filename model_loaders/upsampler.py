"""Files of the learned latent up-sampler to :class:`UpSamplerModel`."""

from __future__ import annotations

from pathlib import Path

import torch

from . import checkpoint as ck
from .networks.upsampler import UpSampler, UpSamplerConfig, UpSamplerModel


def load_upsampler(path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu") -> UpSamplerModel:
    """Load a latent up-sampler. Metadata may give ``name`` (default the file's).

    Args:
        path: see :func:`.checkpoint.read`.
        dtype: "fp32", "bf16", "fp16" or "auto", which is fp32 everywhere: it is small, and near codes lie close together.
        device: where the weights go.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is no up-sampler, or does not fit.
    """
    compute = ck.choose_dtype("fp32" if dtype == "auto" else dtype, device)
    file = ck.read(path, "up_sampler")
    try:
        config = UpSamplerConfig.from_state_dict(file.state)
        with torch.device("meta"):
            net = UpSampler(config)
    except (KeyError, ValueError) as e:
        raise file.complain("holds no weights of a latent up-sampler", "choose a file that its training wrote") from e
    ck.load_strictly(net, file.state, file.path, "a latent up-sampler", dtype=compute, device=device, field=file.field)
    return UpSamplerModel(net.eval().requires_grad_(False), ck.metadata_text(file, "name", file.path.stem))
