"""Checks of a run's inputs: the image that an edit starts from, and the device.

``bitdance.py`` explains the shapes.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.bitdance import BlockModel
from ..editing import Edit
from .settings import BlockSettings

# FastAR refuses to run a diffusion head with at least this many weights on a CPU. The head of the largest ImageNet
# model has less than half as many weights.
LARGE_HEAD = 1_000_000_000


def start_tokens(model: BlockModel, edit: Edit, grid: tuple[int, int], device: torch.device) -> Tensor:
    """The tokens of the image that an edit starts from, -1 or 1, fp32 [1 or B, L, c], in raster order.

    Raises:
        UserError: the latents have a wrong number of channels, or their size is not the size of the image to generate.
    """
    start = edit.start
    channels = model.net.channels
    if start.ndim != 4 or start.shape[1] != channels:
        raise UserError(
            f"latent_image: its shape is {list(start.shape)}, but {model.name} has latents of {channels} channels; "
            "encode an image with VAE Encode and the vae of the model's loader."
        )
    if tuple(start.shape[2:]) != grid:
        height, width = (side * model.stride for side in grid)
        own_height, own_width = (side * model.stride for side in start.shape[2:])
        remedy = f"encode an image of {width} x {height} with VAE Encode"
        with suppress(UserError):
            model.grid(own_height, own_width)  # raises for a size that the model does not generate
            remedy = f"set width to {own_width} and height to {own_height}, or {remedy}"
        raise UserError(
            f"latent_image: this image has {own_width} x {own_height} pixels, but the image to generate has {width} x "
            f"{height}; {remedy}."
        )

    bits = torch.where(start.to(device, torch.float32) > 0, 1.0, -1.0)
    return bits.flatten(2).transpose(1, 2)


def expect_edit(model: BlockModel, edit: Edit, settings: BlockSettings, images: int) -> None:
    """Check an edit of ``images`` images, before a run loads anything.

    Raises:
        UserError: see :func:`start_tokens` and :meth:`.Edit.token_mask`.
    """
    grid = model.grid(settings.height, settings.width)
    device = edit.start.device
    start_tokens(model, edit, grid, device)
    edit.token_mask(grid, images, device)


def expect_device(model: BlockModel, device: torch.device, settings: BlockSettings) -> None:
    """Raise a UserError if ``device`` is a CPU and the diffusion head is too large for a CPU, see LARGE_HEAD."""
    weights = sum(weight.numel() for weight in model.net.denoiser.parameters())
    if device.type != "cpu" or weights < LARGE_HEAD:
        return

    height, width = model.grid(settings.height, settings.width)
    branches = 2 if settings.uses_guidance else 1
    calls = settings.diffusion_steps + 1
    work = 2 * weights * height * width * branches * calls
    raise UserError(
        f"model: the diffusion head of {model.name} alone needs about {work / 1e15:.1f} PFLOP per image, too much for "
        "a CPU; use a GPU, or choose a BitDance-ImageNet model."
    )
