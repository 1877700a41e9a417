"""The canvas of continuous tokens in raster order, and the checks and rows that come before the first token.

Shapes as in ``nextstep.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.hybrid import UNCONDITIONAL
from ...networks.nextstep import COPY, NextStepModel, ReadSource, Rows, to_latents, to_tokens
from ...networks.torch_state import to_device
from ...reports.record import Clock
from ..conditioning import ImagePromptCondition, PromptCondition, expect_editor, expect_kind
from ..editing import Edit, edit_digests
from ..engine import Canvas, start_report
from ..noise import PairedNoise
from .settings import CONSTANT, FALLING, RISING, NextStepSettings

# What a NextStep reads.
NextStepCondition = PromptCondition | ImagePromptCondition

# FastAR refuses to run a language model with at least this many weights on a CPU: an image of a published model would
# take 20 minutes.
LARGE = 4_000_000_000


class Branches(NamedTuple):
    """The branches of guidance and what each of them reads; for their order see :func:`branches_for`."""

    number: int  # P: 1 without guidance; 2 with guidance, or 3 if the image to change has its own guidance scale
    rows: Rows  # rows of all images, branch by branch


@dataclass(eq=False)
class NextStepCanvas(Canvas):
    """Tokens are vectors of T numbers, fp32; 0 where undecided. All branches of guidance read the same tokens."""

    branches: Branches = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        scales = [self._scales(cell) for cell in range(self.cells)]
        self.scales = to_device(torch.tensor(scales), self.device)  # guidance scales, fp32 [L, 1 or 2]

        # The cells to sample, and whether each cell is sampled in every image. The host reads this once.
        self.sampled_cells = list(range(self.cells))
        self.is_whole = [True] * self.cells
        if self.again is not None:
            again = self.again.cpu()
            self.sampled_cells = again.any(0).nonzero().flatten().tolist()
            self.is_whole = again.all(0).tolist()

    def _scales(self, cell: int) -> list[float]:
        """Guidance scales of a cell: for the whole condition, and, if there are three branches, for the image."""
        s = self.settings
        own = [s.cfg] if self.branches.number < 3 else [s.cfg, s.cfg_img]
        return [scale_of(scale, s.cfg_schedule, cell, self.cells) for scale in own]

    def with_given(self, cell: int, values: Tensor) -> Tensor:
        """Values of a cell, [B, 1, T]: the sampled values, but the fixed values in images in which the edit fixes the
        cell.
        """
        if self.again is None or self.is_whole[cell]:
            return values
        return torch.where(self.again[:, cell, None, None], values, self.values[:, cell : cell + 1])

    def to_latents(self, values: Tensor) -> Tensor:
        return to_latents(values, self.grid, self.model.net.config.patch).contiguous()


def scale_of(cfg: float, schedule: str, done: int, tokens: int) -> float:
    """The guidance scale of a token. ``done``: how many of the image's ``tokens`` come before this token."""
    if schedule == CONSTANT:
        return cfg
    if schedule == FALLING:
        return 1 + (cfg - 1) * (tokens - done) / tokens

    assert schedule == RISING
    return max(cfg / 2, 1 + (cfg - 1) * done / tokens)


def nextstep_canvas(
    model: NextStepModel,
    condition: NextStepCondition,
    settings: NextStepSettings,
    noise: PairedNoise,
    edit: Edit | None,
) -> NextStepCanvas:
    """Check the inputs, and return the canvas of a generation.

    Raises:
        UserError: see :func:`.nextstep.nextstep`.
    """
    device = model.device
    expect_readable(condition, model)
    report = start_report("nextstep", model, condition, settings, noise)
    expect_suited(model, device)

    grid = model.grid(settings.height, settings.width)
    clock = Clock(device)
    branches = branches_of(model, condition, settings, grid)
    if settings.cfg_img != 1 and branches.number < 3:
        report.remark("cfg_img had no effect, because it needs an original image and cfg above 1")
    if isinstance(condition, ImagePromptCondition) and model.edits is None:
        report.remark(f"{model.name} is not known to have been trained to edit; the model may ignore the image")

    values = torch.zeros(len(condition), grid[0] * grid[1], model.net.channels, device=device)
    again = None
    if edit is not None:
        given = given_tokens(model, edit, grid, device)
        again = edit.token_mask(grid, len(condition), device)
        report.edits = edit_digests(given, again)
        values = torch.where(again[..., None], 0.0, given)

    return NextStepCanvas(model, settings, noise, grid, values, report, again=again, branches=branches, clock=clock)


def expect_readable(condition: NextStepCondition, model: NextStepModel) -> None:
    """Raise a UserError if the model cannot read the condition, or if the condition is empty."""
    if isinstance(condition, ImagePromptCondition):
        expect_editor(condition, model)
    else:
        expect_kind(condition, model.condition, model.name)
    if not condition.texts:
        raise UserError("condition: it holds no prompt; give at least one.")


def branches_of(
    model: NextStepModel, condition: NextStepCondition, settings: NextStepSettings, grid: tuple[int, int]
) -> Branches:
    """The branches of guidance and their rows."""
    sources: Sequence[ReadSource | None] = [None] * len(condition)
    if isinstance(condition, ImagePromptCondition):
        assert condition.read is not None, "nodes and pipeline read the images"
        sources = condition.read
    return branches_for(model, condition.texts, negative_of(condition), sources, settings, grid)


def negative_of(condition: NextStepCondition) -> str:
    """The text that guidance leads away from."""
    if isinstance(condition, ImagePromptCondition):
        return COPY
    return "" if condition.unconditional == UNCONDITIONAL else condition.unconditional


def branches_for(
    model: NextStepModel,
    texts: Sequence[str],
    negative: str,
    sources: Sequence[ReadSource | None],
    settings: NextStepSettings,
    grid: tuple[int, int],
) -> Branches:
    """The branches of guidance for texts, one per image to generate.

    The first branch is the text with its source. With guidance, there are two more branches: the negative text with the
    source, but only if ``cfg_img`` is not 1 and every text has a source; and the negative text alone.

    Args:
        sources: for each text the image to change, or None.
    """

    def row(ids: Sequence[int], source: ReadSource | None) -> list[int]:
        return model.row(ids, grid, None if source is None else source.grid)

    ids = [row(model.prompt(text), source) for text, source in zip(texts, sources, strict=True)]
    images = list(sources)
    count = 1
    if settings.guides and settings.cfg_img != 1 and None not in sources:
        ids += [row(model.instruction(negative), source) for source in sources]
        images += sources
        count += 1
    if settings.guides:
        ids += [row(model.instruction(negative), None)] * len(texts)
        images += [None] * len(texts)
        count += 1
    return Branches(count, Rows(ids, images))


def given_tokens(model: NextStepModel, edit: Edit, grid: tuple[int, int], device: torch.device) -> Tensor:
    """The tokens of the image that an edit starts from, fp32 [1 or B, L, T].

    Raises:
        UserError: latents of a different shape.
    """
    start = edit.start
    c = model.net.config
    if start.ndim != 4 or start.shape[1] != c.channels:
        raise UserError(
            f"latent_image: it has the shape {list(start.shape)}, but {model.name} generates latents of {c.channels} "
            "channels; encode an image with VAE Encode and the vae of the model's loader."
        )

    height, width = grid
    if tuple(start.shape[2:]) != (height * c.patch, width * c.patch):
        pixels = model.stride // c.patch
        own_height, own_width = (side * pixels for side in start.shape[2:])
        raise UserError(
            f"latent_image: this image has {own_width} x {own_height} pixels, but the image to generate has "
            f"{width * model.stride} x {height * model.stride}; set width to {own_width} and height to {own_height}, "
            f"or encode an image of {width * model.stride} x {height * model.stride} with VAE Encode."
        )
    return to_tokens(start.to(device, torch.float32), c.patch)


def expect_edit(model: NextStepModel, edit: Edit, settings: NextStepSettings, images: int) -> None:
    """Check an edit of some images before anything is loaded; raises as :func:`nextstep_canvas`."""
    grid = model.grid(settings.height, settings.width)
    device = edit.start.device
    given_tokens(model, edit, grid, device)
    edit.token_mask(grid, images, device)


def expect_suited(model: NextStepModel, device: torch.device) -> None:
    """Raise a UserError if a model is too large for a CPU."""
    weights = sum(weight.numel() for weight in model.net.layers.parameters())
    if device.type == "cpu" and weights >= LARGE:
        raise UserError(
            f"model: {model.name} has {weights / 1e9:.1f} billion weights, which a CPU reads once for every token, so "
            "an image takes more than 20 minutes; use a GPU. There is no smaller NextStep."
        )
