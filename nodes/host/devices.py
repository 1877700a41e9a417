"""The devices that ComfyUI chose for networks, text encoders, decoders and results."""

from __future__ import annotations

import comfy.model_management as mm
import torch
from torch import Tensor


def get_compute_device() -> torch.device:
    """Device of image networks while they compute."""
    return mm.get_torch_device()


def get_offload_device() -> torch.device:
    """Device of image networks that are not in use."""
    return mm.unet_offload_device()


def get_text_device() -> torch.device:
    """Device of text encoders while they compute."""
    return mm.text_encoder_device()


def get_text_offload_device() -> torch.device:
    """Device of text encoders that are not in use."""
    return mm.text_encoder_offload_device()


def get_vae_device() -> torch.device:
    """Device of decoders while they compute."""
    return mm.vae_device()


def get_vae_offload_device() -> torch.device:
    """Device of decoders that are not in use."""
    return mm.vae_offload_device()


def get_output_device() -> torch.device:
    """Device of the tensors that nodes exchange."""
    return mm.intermediate_device()


def to_output(x: Tensor) -> Tensor:
    """A tensor as nodes exchange it: fp32 on the output device."""
    return x.to(get_output_device(), torch.float32)


def device_name() -> str:
    """The compute device with its model, "cuda:0 NVIDIA ..." for example."""
    return str(mm.get_torch_device_name(get_compute_device()))
