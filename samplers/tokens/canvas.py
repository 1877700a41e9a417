"""The canvas of discrete tokens, and the checks before a generation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError
from ...networks.janus import JanusModel
from ...networks.llama import TokenModel
from ...reports.record import Clock, Report
from ..conditioning import AnyCondition, ImagePromptCondition
from ..editing import Edit, edit_digests
from ..engine import Canvas, start_report
from .defaults import sampling_of
from .prepare import PreparedCondition, prepare
from .settings import TokenSampling, TokenSettings
from .token_noise import TokenNoise


@dataclass(eq=False)
class TokenCanvas(Canvas):
    """The tokens of L cells, and of one more cell that is not part of the image, int64 [B, L + 1]::

        cell      0  1  2  ...  L - 1 | L
        image 0   5  9  0  ...      0 | 3
        image 1   2  0  0  ...      0 | 9

    A pass may decide fewer cells of one image than of another. In the image with fewer cells, the pass then writes to
    cell L instead, as padding, and nobody reads the token there. Cells that are not decided may hold drafts.
    """

    phases: tuple[str, str] = ("transformer", "sampling")
    sampling: TokenSampling = field(kw_only=True)  # how the model's tokens are sampled with the settings
    given: Tensor | None = field(default=None, kw_only=True)  # int64 [B, L + 1], tokens that an edit fixes, else -1

    def to_latents(self, values: Tensor) -> Tensor:
        if self.given is not None:
            given = self.given[:, : self.cells]
            values = torch.where(given >= 0, given, values)
        return super().to_latents(values)


def token_canvas(
    name: str,
    model: TokenModel,
    condition: AnyCondition,
    settings: TokenSettings,
    noise: TokenNoise,
    edit: Edit | None = None,
) -> tuple[TokenCanvas, PreparedCondition]:
    """Check the inputs. Returns the canvas of a generation, and the packed condition.

    In the canvas' settings and in the report, the model's own values replace None for ``cfg`` and ``top_k``.
    """
    clock = Clock(model.device)
    prepared = prepare(model, condition, model.device)
    sampling = sampling_of(settings, model)
    settings = replace(settings, cfg=sampling.cfg, top_k=sampling.top_k)

    report = start_report(name, model, condition, settings, noise)
    if isinstance(condition, ImagePromptCondition) and cast(JanusModel, model).edits is None:
        report.remark(f"{model.name} is not known to have been trained to edit; the model may ignore the image")

    given = None
    if edit is not None:
        given = given_tokens(edit, model.grid, len(condition)).to(model.device)
        report.edits = edit_digests(given, given < 0)

    canvas = blank_canvas(model, model.grid, settings, sampling, noise, report, clock, given)
    return canvas, prepared


def blank_canvas(
    model: Any,
    side: int,
    settings: Any,
    sampling: TokenSampling,
    noise: TokenNoise,
    report: Report,
    clock: Clock,
    given: Tensor | None = None,
    phases: tuple[str, str] = TokenCanvas.phases,
) -> TokenCanvas:
    """A canvas of ``side`` x ``side`` cells on which nothing is decided but the ``given`` tokens."""
    return TokenCanvas(
        model,
        settings,
        noise,
        grid=(side, side),
        values=torch.zeros(len(noise), side**2 + 1, dtype=torch.int64, device=model.device),
        report=report,
        again=None if given is None else given[:, :-1] < 0,
        phases=phases,
        sampling=sampling,
        given=given,
        clock=clock,
    )


def given_tokens(edit: Edit, grid: int, images: int) -> Tensor:
    """The tokens that an edit keeps, int64 [B, L + 1] as :class:`TokenCanvas` holds them."""
    codes = edit.start
    again = tokens_again(edit, grid, images, codes.device)
    return F.pad(torch.where(again, -1, codes.flatten(1)), (0, 1), value=-1)


def tokens_again(edit: Edit, grid: int, images: int, device: torch.device) -> Tensor:
    """The tokens to sample again, bool [B, L] on ``device``, of an edit that starts from codes or from their latents.

    Raises:
        UserError: see :meth:`Edit.token_mask`; a start of another grid.
    """
    height, width = edit.start.shape[-2:]
    if (height, width) != (grid, grid):
        raise UserError(
            f"latent_image: it has {height} x {width} tokens, but the model generates {grid} x {grid}; encode an image "
            "of the model's own size with VAE Encode and the vae of the same loader."
        )

    return edit.token_mask(grid, images, device)
