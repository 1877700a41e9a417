"""The canvas of discrete tokens, which holds the tokens of a run's images. Functions that start a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError
from ...networks.janus import JanusModel
from ...networks.llama import TokenModel
from ...networks.tar import TarModel
from ...reports.record import Clock
from ..conditioning import AnyCondition, ImagePromptCondition
from ..editing import Edit, edit_digests
from ..engine import Canvas, start_report
from .prepare import PreparedCondition, prepare
from .settings import TokenSampling, TokenSettings, sampling_of
from .token_noise import TokenNoise


@dataclass(eq=False)
class TokenCanvas(Canvas):
    """The tokens of B images, int64 [B, L + 1]. After the L cells of each image comes one more cell that is not part of
    the image::

        cell      0  1  2  ...  L - 1 | L
        image 0   5  9  0  ...      0 | 3
        image 1   2  0  0  ...      0 | 9

    A pass may decide fewer cells of one image than of another image. The pass then writes padding to cell L of the
    image with fewer decided cells. No result depends on cell L. Cells that are not decided may hold drafts.
    """

    model: TokenModel | TarModel
    noise: TokenNoise
    phases: tuple[str, str] = ("transformer", "sampling")
    sampling: TokenSampling = field(kw_only=True)  # the settings; a published value replaces every None
    # The tokens that an edit fixes, int64 [B, L + 1]; -1 at all other cells. None without an edit.
    fixed_tokens: Tensor | None = field(default=None, kw_only=True)

    def to_latents(self, values: Tensor) -> Tensor:
        if self.fixed_tokens is not None:
            fixed_tokens = self.fixed_tokens[:, : self.cells]
            values = torch.where(fixed_tokens >= 0, fixed_tokens, values)
        return super().to_latents(values)


def token_canvas(
    name: str,
    model: TokenModel,
    condition: AnyCondition,
    settings: TokenSettings,
    noise: TokenNoise,
    edit: Edit | None = None,
) -> tuple[TokenCanvas, PreparedCondition]:
    """Check the inputs. Returns the canvas of a run, and the condition in tensors. ``name``: name of the sampler.

    If ``cfg`` or ``top_k`` is None, the canvas and the report hold the model's published value instead.

    Raises:
        UserError: the inputs do not fit the model or one another.
    """
    clock = Clock(model.device)
    prepared = prepare(model, condition, model.device)
    sampling = sampling_of(settings, model)
    settings = replace(settings, cfg=sampling.cfg, top_k=sampling.top_k)

    report = start_report(name, model, condition, settings, noise)
    if isinstance(condition, ImagePromptCondition) and cast(JanusModel, model).edits is None:
        report.remark(f"{model.name} is not known to have been trained to edit; the model may ignore the image")

    fixed_tokens = None
    regenerated = None
    if edit is not None:
        fixed_tokens = fixed_tokens_of(edit, model.grid, len(condition)).to(model.device)
        regenerated = fixed_tokens[:, : model.tokens] < 0
        report.edits = edit_digests(fixed_tokens, fixed_tokens < 0)

    canvas = TokenCanvas(
        model,
        settings,
        noise,
        grid=(model.grid, model.grid),
        values=blank_tokens(len(noise), model.grid, model.device),
        report=report,
        regenerated=regenerated,
        sampling=sampling,
        fixed_tokens=fixed_tokens,
        clock=clock,
    )
    return canvas, prepared


def blank_tokens(images: int, side: int, device: torch.device) -> Tensor:
    """The values of a new :class:`TokenCanvas`: zeros, int64 [B, L + 1]. ``images``: B. L is ``side`` * ``side``."""
    return torch.zeros(images, side**2 + 1, dtype=torch.int64, device=device)


def fixed_tokens_of(edit: Edit, side: int, images: int) -> Tensor:
    """The tokens that an edit fixes, int64 [B, L + 1], see ``fixed_tokens`` of :class:`TokenCanvas`.

    ``edit``: must start from codes, not from latents. ``side``: number of tokens along a side of the image.

    Raises the errors of :func:`tokens_to_regenerate`.
    """
    codes = edit.start
    regenerated = tokens_to_regenerate(edit, side, images, codes.device)
    return F.pad(torch.where(regenerated, -1, codes.flatten(1)), (0, 1), value=-1)


def tokens_to_regenerate(edit: Edit, side: int, images: int, device: torch.device) -> Tensor:
    """The tokens that an edit regenerates, bool [B, L] on ``device``. The edit starts from codes or their latents.

    Raises:
        UserError: the edit's images do not have ``side`` x ``side`` tokens. :meth:`Edit.token_mask` states more errors.
    """
    height, width = edit.start.shape[-2:]
    if (height, width) != (side, side):
        raise UserError(
            f"latent_image: it has {height} x {width} tokens, but the model generates {side} x {side}; encode an image "
            "of the model's own size with VAE Encode and the vae of the same loader."
        )

    return edit.token_mask(side, images, device)
