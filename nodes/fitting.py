"""Checks and shapes of the inputs of decoders and upscale models."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError

# Kind of autoencoder to the models whose latents it decodes.
KL, VQ = "kl", "vq"
_MAKERS = {KL: "a MAR", VQ: "a LlamaGen, a PAR or a Tar de-tokenizer"}


def mark(samples: Tensor, kind: str) -> Tensor:
    """Note on a tensor which autoencoder decodes it. Operations on the tensor lose the note, and then nothing is checked: the two
    kinds of latents may have equally many channels."""
    samples.fastar_latents = kind  # type: ignore[attr-defined]
    return samples


def kind_of(samples: Any) -> str:
    """The kind of autoencoder that :func:`mark` noted, "" if it is unknown."""
    return str(getattr(samples, "fastar_latents", ""))


def checked_latents(samples: Any, channels: int, name: str, kind: str = "") -> Tensor:
    """Latents [B, C, h, w] from [B, C, h, w] or [B, C, 1, h, w].

    Args:
        samples: the input.
        channels: latent channels of the decoder.
        name: name of the decoder, for messages.
        kind: of the decoder, :data:`KL` or :data:`VQ`; "" checks nothing.

    Raises:
        UserError: another shape, another number of channels, or latents marked for another kind of decoder.
    """
    made = kind_of(samples)
    if kind and made not in ("", kind):
        raise UserError(
            f"samples: these latents are of {_MAKERS[made]}, the decoder {name} is for those of {_MAKERS[kind]}; connect the VAE of the "
            "loader that made them."
        )
    if not isinstance(samples, Tensor) or samples.ndim not in (4, 5):
        raise UserError(f"samples: {name} decodes latents [B, C, h, w]; connect a LATENT made for it.")
    latents = samples[:, :, 0] if samples.ndim == 5 else samples
    if latents.shape[1] != channels:
        raise UserError(
            f"samples: these latents have {latents.shape[1]} channels, the decoder {name} reads {channels}; connect the VAE of the "
            "loader that made them."
        )
    return latents


def whole_strides(pictures: Any, stride: int) -> Tensor:
    """Pictures [B, H, W, C] to [B, 3, H', W'], where H' and W' are multiples of ``stride``.

    A larger side is cropped around its centre; a side below one stride is padded with its edge.

    Raises:
        UserError: another shape, or an empty tensor.
    """
    if not isinstance(pictures, Tensor) or pictures.ndim != 4 or 0 in pictures.shape:
        raise UserError("pixels: VAE Encode needs pictures; connect an IMAGE.")
    x = pictures.expand(*pictures.shape[:3], 3) if pictures.shape[3] == 1 else pictures[..., :3]
    x = x.movedim(-1, 1)
    for dim in (2, 3):
        size = x.shape[dim]
        if size >= stride:
            x = x.narrow(dim, size % stride // 2, size // stride * stride)
        else:
            x = F.pad(x, (0, stride - size, 0, 0) if dim == 3 else (0, 0, 0, stride - size), mode="replicate")
    return x


def is_upscale_model(value: Any) -> bool:
    """Whether a value is an UPSCALE_MODEL for colour pictures."""
    scale = getattr(value, "scale", None)
    colours = {getattr(value, name, 3) for name in ("input_channels", "output_channels")}
    works = callable(value) and isinstance(getattr(value, "model", None), nn.Module)
    return works and isinstance(scale, (int, float)) and scale > 0 and colours == {3}
