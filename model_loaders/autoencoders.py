"""Loaders of image decoders: the KL autoencoder of MAR, and the VQ tokenizer of LlamaGen, PAR and Tar."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import UserError
from . import checkpoint as ck
from .families import expect
from .networks.autoencoder import HISTORY, KLAutoencoder, KLConfig, KLModel, VQAutoencoder, VQConfig, VQModel
from .networks.llama import TokenModel


def load_kl(path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu") -> KLModel:
    """Load a KL autoencoder (KL-16 or any other size) with the official parameter names.

    The shape is derived from the weights. ``loss.*`` weights of the official file are ignored. Metadata entries: ``groups``
    (GroupNorm groups, default 32) and ``name`` (default: the file's stem).

    Args:
        path: see :func:`.checkpoint.read`.
        dtype: "fp32", "bf16", "fp16" or "auto". "auto" is fp32 on every device: the autoencoder runs once per image, and
            half precision is visible in smooth areas.
        device: device of the weights.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is not a KL autoencoder, does not fit, or has invalid metadata.
    """
    compute = ck.choose_dtype("fp32" if dtype == "auto" else dtype, device)
    file = ck.read(path, "decoder")
    expect(file, "kl")
    file = file.filter(lambda name: not name.startswith("loss."))
    groups = file.number("groups", 32, 1, 1024, int)
    net = ck.build(file, "a KL autoencoder", lambda: KLAutoencoder(KLConfig.from_state_dict(file.state, groups)))
    return KLModel(ck.load_strictly(net, file, "a KL autoencoder", dtype=compute, device=device), file.name)


def load_vq(path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu") -> VQModel:
    """Load a VQ tokenizer (VQ-16, VQ-8 or any other size) with the official parameter names.

    The shape is derived from the weights. The code usage statistics of the official files are ignored. Metadata entries:
    ``groups`` (GroupNorm groups, default 32) and ``name`` (default: the file's stem).

    Args:
        path: see :func:`.checkpoint.read`; EMA weights are preferred, as upstream does. In a file with several networks
            the weights under ``vq.`` are read.
        dtype: as for :func:`load_kl`. The codebook is always fp32, so that nearest-neighbour codes do not change.
        device: device of the weights.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is not a VQ tokenizer, does not fit, or has invalid metadata.
    """
    return build_vq(ck.read(path, "decoder").section("vq."), dtype, device)


def build_vq(file: ck.Checkpoint, dtype: str, device: str | torch.device) -> VQModel:
    """The VQ tokenizer of a file; arguments and errors as :func:`load_vq`."""
    compute = ck.choose_dtype("fp32" if dtype == "auto" else dtype, device)
    expect(file, "vq")
    file = file.filter(lambda name: name != HISTORY)
    groups = file.number("groups", 32, 1, 1024, int)
    net = ck.build(file, "a VQ autoencoder", lambda: VQAutoencoder(VQConfig.from_state_dict(file.state, groups)))
    ck.load_strictly(net, file, "a VQ autoencoder", dtype=compute, fp32=("quantize.",), device=device)
    return VQModel(net, file.name)


def expect_codes(vq: VQModel, model: TokenModel) -> None:
    """Check that a tokenizer has as many codes as a model predicts.

    Raises:
        UserError: the numbers differ, so the model was trained with another tokenizer.
    """
    codes, vocab = vq.net.config.codes, model.net.config.vocab
    if codes != vocab:
        raise UserError(
            f"decoder: {vq.name} has {codes} codes, {model.name} writes {vocab}; choose the decoder it was trained with."
        )
