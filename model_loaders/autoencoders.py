"""Decoder files to modules: the KL autoencoder whose latents a MAR's tokens are, the VQ tokenizer of LlamaGen and PAR."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import UserError
from . import checkpoint as ck
from .networks.gpt import TokenModel
from .networks.kl import KLAutoencoder, KLConfig, KLModel
from .networks.vq import HISTORY, VQAutoencoder, VQConfig, VQModel


def load_kl(path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu") -> KLModel:
    """Load a KL autoencoder (KL-16 or any other size) with the official parameter names.

    Only ``loss.*`` weights, which training leaves in the official file, are passed over. Metadata may give ``groups``
    (GroupNorm groups, default 32) and ``name`` (default the file's).

    Args:
        path: see :func:`.checkpoint.read`.
        dtype: "fp32", "bf16", "fp16" or "auto", which is fp32 everywhere: the autoencoder runs once a picture, and
            half precision would save little and show in smooth areas.
        device: where the weights go.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is no KL autoencoder, does not fit, or its metadata makes no sense.
    """
    compute = ck.choose_dtype("fp32" if dtype == "auto" else dtype, device)
    file = ck.read(path, "decoder")
    ck.expect(file, "kl")
    state = {name: tensor for name, tensor in file.state.items() if not name.startswith("loss.")}
    groups = ck.metadata_number(file, "groups", 32, 1, 1024, int)
    try:
        config = KLConfig.from_state_dict(state, groups)
        with torch.device("meta"):
            net = KLAutoencoder(config)
    except KeyError as e:
        raise file.complain(f"does not fit a KL autoencoder: {e.args[0]} is missing") from e
    except (ValueError, IndexError, ZeroDivisionError) as e:
        raise file.complain(
            f"does not fit a KL autoencoder with {groups} GroupNorm groups ({e})",
            "get an unchanged copy of the file, or give its metadata an entry 'groups'",
        ) from e
    ck.load_strictly(net, state, file.path, "a KL autoencoder", dtype=compute, device=device, field=file.field)
    return KLModel(net.eval().requires_grad_(False), ck.metadata_text(file, "name", file.path.stem))


def load_vq(path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu") -> VQModel:
    """Load a VQ tokenizer (VQ-16, VQ-8 or any other size) with the official parameter names.

    The shape follows from the weights. Only the record of codes used in training, which the official files hold, is
    passed over. Metadata may give ``groups`` (GroupNorm groups, default 32) and ``name`` (default the file's).

    Args:
        path: see :func:`.checkpoint.read`; in a training dump the moving average is preferred, as upstream does. A file
            that holds several networks is read under ``vq.``.
        dtype: as for :func:`load_kl`. The codebook is fp32 in any case, so that no code changes its neighbours.
        device: where the weights go.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is no VQ tokenizer, does not fit, or its metadata makes no sense.
    """
    compute = ck.choose_dtype("fp32" if dtype == "auto" else dtype, device)
    file = ck.part(ck.read(path, "decoder"), "vq.")
    ck.expect(file, "vq")
    state = {name: tensor for name, tensor in file.state.items() if name != HISTORY}
    groups = ck.metadata_number(file, "groups", 32, 1, 1024, int)
    try:
        config = VQConfig.from_state_dict(state, groups)
        with torch.device("meta"):
            net = VQAutoencoder(config)
    except KeyError as e:
        raise file.complain(f"does not fit a VQ autoencoder: {e.args[0]} is missing") from e
    except (ValueError, IndexError, ZeroDivisionError) as e:
        raise file.complain(
            f"does not fit a VQ autoencoder with {groups} GroupNorm groups ({e})",
            "get an unchanged copy of the file, or give its metadata an entry 'groups'",
        ) from e
    ck.load_strictly(
        net, state, file.path, "a VQ autoencoder", dtype=compute, fp32=("quantize.",), device=device, field=file.field
    )
    return VQModel(net.eval().requires_grad_(False), ck.metadata_text(file, "name", file.path.stem))


def expect_codes(vq: VQModel, model: TokenModel) -> None:
    """Nothing if the tokenizer has the codes that the model writes.

    Raises:
        UserError: it has more or fewer, so it is not the one the model was trained with.
    """
    has, writes = vq.net.config.codes, model.net.config.vocab
    if has != writes:
        raise UserError(
            f"decoder: {vq.name} has {has} codes, {model.name} writes {writes}; choose the decoder it was trained with."
        )
