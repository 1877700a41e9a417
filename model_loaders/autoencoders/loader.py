"""Loaders of image decoders: the KL autoencoder of MAR, and the VQ tokenizer of LlamaGen, PAR and Tar.

Metadata entries: ``groups`` (GroupNorm groups, default 32) and ``name`` (default: the file's stem). The dtype "auto" is
fp32, because half precision is visible in smooth areas. A file may hold one part that no official layout has, which
draws larger images from the same latents, see :mod:`.networks.enlarging`; the name then says so.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...errors import UserError
from ...networks.autoencoder import (
    HISTORY,
    Codebook,
    KLAutoencoder,
    KLConfig,
    KLModel,
    VQAutoencoder,
    VQConfig,
    VQModel,
)
from ...networks.enlarging import said
from ...networks.llama import TokenModel
from ...networks.ops import TORCH, Operations
from ...networks.torch_state import in_own_state
from ..files import checkpoint as ck
from ..files.wrappers import AUTO
from ..kinds import choose_dtype, read

# Code vectors from two loaders of one file are equal; from two files of one tokenizer they differ by rounding.
_SAME_CODE = 1e-2


@in_own_state
def load_kl(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    weights: str = AUTO,
    operations: Operations = TORCH,
) -> KLModel:
    """Load a KL autoencoder (KL-16 or any other size) with the official parameter names; see :mod:`.checkpoint`.

    ``weights``: "ema" for averaged weights, "trained" for the others, "auto" for averaged ones where a file holds
    both. The network is built of ``operations``, see :class:`.ops.Operations`.
    """
    compute = choose_dtype(dtype, device, "kl")
    file = read(path, "kl", weights=weights).filter(lambda name: not name.startswith("loss."))
    groups = file.number("groups", 32, 1, 1024)

    def make(operations: Operations) -> KLAutoencoder:
        return KLAutoencoder(KLConfig.from_state_dict(file.state, groups), operations)

    net = ck.load_strictly(file, make, operations=operations, dtype=compute, device=device)
    return KLModel(net, said(file.name, net.config))


@in_own_state
def load_vq(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    weights: str = AUTO,
    operations: Operations = TORCH,
) -> VQModel:
    """Load a VQ tokenizer (VQ-16, VQ-8 or any other size) with the official parameter names; see :mod:`.checkpoint`.

    ``weights``: "ema" for averaged weights, "trained" for the others, "auto" for averaged ones where a file
    holds both, as upstream. Code usage statistics are ignored. The codebook is always fp32, so that
    nearest-neighbour codes do not change. The network is built of ``operations``, see :class:`.ops.Operations`.
    """
    compute = choose_dtype(dtype, device, "vq")
    return build_vq(read(path, "vq", weights=weights), compute, device, operations)


def build_vq(
    file: ck.Checkpoint, compute: torch.dtype, device: str | torch.device, operations: Operations = TORCH
) -> VQModel:
    """The VQ tokenizer of a file that was read; see :func:`load_vq`."""
    file = file.filter(lambda name: name != HISTORY)
    groups = file.number("groups", 32, 1, 1024)

    def make(operations: Operations) -> VQAutoencoder:
        return VQAutoencoder(VQConfig.from_state_dict(file.state, groups), operations)

    net = ck.load_strictly(file, make, operations=operations, dtype=compute, fp32=("quantize.",), device=device)
    return VQModel(net, said(file.name, net.config))


def expect_codes(vq: VQModel, model: TokenModel) -> None:
    """Raise a UserError if a tokenizer has another number of codes than a model predicts."""
    codes = vq.net.config.codes
    vocab = model.net.config.vocab
    if codes == vocab:
        return

    raise UserError(
        f"decoder: {vq.name} has {codes} codes, but {model.name} has {vocab}; choose the decoder that the model was "
        "trained with."
    )


def expect_same_codes(target: VQModel, draft: VQModel, model: str) -> None:
    """Raise a UserError if two tokenizers have different codebooks; ``model`` names the target model."""
    if not same_codes(target.net.quantize, draft.net.quantize):
        raise UserError(
            f"draft: the decoder of the draft model ({draft.name}) and the decoder of {model} ({target.name}) have "
            "different codebooks; load both models with the same decoder."
        )


def same_codes(one: Codebook, other: Codebook) -> bool:
    """Whether two codebooks are equal up to rounding; they may lie on different devices."""
    if one.embedding.weight.shape != other.embedding.weight.shape:
        return False

    return torch.allclose(one.unit().cpu(), other.unit().cpu(), rtol=0, atol=_SAME_CODE)
