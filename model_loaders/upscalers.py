"""Super-resolution models, which enlarge MuLo-SD's drafts: files of ComfyUI's models/upscale_models.

They are read by spandrel, as ComfyUI's Load Upscale Model reads them. It is imported only when a file is named.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, first_line
from ..networks.torch_state import in_own_state


@in_own_state
def load_upscaler(path: Path, device: torch.device) -> tuple[Callable[[Tensor], Tensor], str]:
    """The function of a super-resolution model's file, and its name. It enlarges images fp32 [B, 3, H, W] in 0..1.

    Args:
        path: of the file.
        device: of its weights, which stay in fp32.

    Raises:
        UserError: spandrel is not installed, the file cannot be read, or it holds no model that enlarges RGB images.
    """
    if not path.is_file():
        raise UserError(
            f"upscale_model: there is no file {str(path)[:200]}; give the path of a "
            "super-resolution model or of latent samplers. Without this option, FastAR uses the built-in latent "
            "samplers if they fit, and enlarges images bicubically otherwise."
        )

    try:
        spandrel = import_module("spandrel")
    except (ImportError, RuntimeError) as e:  # a torchvision that does not fit torch raises the latter
        raise UserError(
            f"upscale_model: FastAR reads super-resolution models with the package spandrel, which cannot be imported "
            f"({first_line(e)}); install spandrel, and the version of torchvision that fits your torch."
        ) from None

    try:
        model = spandrel.ModelLoader(device=device).load_from_file(path)
    except Exception as e:  # spandrel raises what the file's format raises
        raise UserError(
            f"upscale_model: {path.name} holds no super-resolution model that spandrel can read ({first_line(e)}); "
            "choose a different file."
        ) from None
    if not enlarges_rgb(model):
        raise UserError(f"upscale_model: {path.name} does not enlarge RGB images; choose a model that does.")

    model.eval()

    @torch.inference_mode()
    def enlarge(images: Tensor) -> Tensor:
        enlarged: Tensor = model(images.to(device))
        return enlarged.to(images.device)

    return enlarge, upscaler_name(model)


def enlarges_rgb(value: Any) -> bool:
    """Whether a value is a model of spandrel, an UPSCALE_MODEL of ComfyUI, that enlarges RGB images."""
    if not callable(value) or not isinstance(getattr(value, "model", None), nn.Module):
        return False

    scale = getattr(value, "scale", None)
    enlarges = isinstance(scale, (int, float)) and scale > 0
    colour = getattr(value, "input_channels", 3) == 3 and getattr(value, "output_channels", 3) == 3
    return enlarges and colour


def upscaler_name(model: Any) -> str:
    """Architecture and factor of such a model, for reports."""
    architecture = getattr(model, "architecture", None)
    kind = getattr(architecture, "name", None) or type(model.model).__name__

    return f"{kind} x{model.scale:g}"
