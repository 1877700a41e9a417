"""Loader of MuLo-SD's trained latent samplers; see ``networks/latent_samplers.py``.

``python -m fastar_nodes.lab train-latent-samplers`` writes these files. Metadata entry: ``name`` (default: the file's
stem). The file holds the codebook that the samplers were trained for, so that another tokenizer is refused.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...errors import UserError
from ...networks.autoencoder import VQModel
from ...networks.latent_samplers import LatentSamplers, LatentSamplersConfig, LatentSamplersModel
from ...networks.ops import TORCH, Operations
from ...networks.torch_state import in_own_state
from ..files import checkpoint as ck
from ..kinds import read
from .loader import same_codes


@in_own_state
def load_latent_samplers(
    path: str | Path, device: str | torch.device = "cpu", operations: Operations = TORCH
) -> LatentSamplersModel:
    """Load latent samplers in fp32, because they are small and their results are compared with a codebook.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    file = read(path, "latent-samplers")

    def make(operations: Operations) -> LatentSamplers:
        return LatentSamplers(LatentSamplersConfig.from_state_dict(file.state), operations)

    net = ck.load_strictly(file, make, operations=operations, dtype=torch.float32, device=device)
    return LatentSamplersModel(net, file.name)


def fits(samplers: LatentSamplersModel, vq: VQModel, ratio: int) -> bool:
    """Whether samplers are for the codebook of a tokenizer, and for grids of a ratio."""
    return samplers.ratio == ratio and same_codes(samplers.net.codebook, vq.net.quantize)


def expect_fitting(samplers: LatentSamplersModel, vq: VQModel, ratio: int) -> None:
    """Raise a UserError unless samplers fit a tokenizer and the ratio of the sides of two grids."""
    if samplers.ratio != ratio:
        raise UserError(
            f"latent_samplers: {samplers.name} enlarges the side of a draft by the factor {samplers.ratio}, but this "
            f"draft needs the factor {ratio}; choose different latent samplers, or a draft model whose images have "
            f"1/{samplers.ratio} of the side length of the target model's images."
        )
    if not same_codes(samplers.net.codebook, vq.net.quantize):
        raise UserError(
            f"latent_samplers: {samplers.name} was not trained for the codes of the tokenizer {vq.name}; train latent "
            "samplers for this tokenizer, or run MuLo-SD without latent samplers."
        )
