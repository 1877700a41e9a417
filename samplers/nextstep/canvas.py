"""NextStep's canvas, which holds the tokens so far, and functions that check and prepare a run's inputs.

A *cell* is a square of the image's grid and holds one token. Cells are numbered in raster order, from 0. A *source* is
an image that a prompt says how to change. For the letters in shapes see ``nextstep.py``.
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
from ..editing import Edit, start_edit
from ..engine import Canvas, start_report
from ..noise import PairedNoise
from .settings import CONSTANT, FALLING, RISING, NextStepSettings

# The conditions that a NextStep reads.
NextStepCondition = PromptCondition | ImagePromptCondition

# FastAR refuses to run a language model with at least this many weights on a CPU. On a CPU, a published NextStep would
# need more than 20 minutes for an image.
LEAST_WEIGHTS_FOR_GPU_ONLY = 4_000_000_000


class Branches(NamedTuple):
    """The branches of guidance, and what each reads. For the order of the branches see :func:`branches_for_texts`."""

    number: int  # P: 1 without guidance; 2 or 3 with guidance
    rows: Rows  # what the language model reads before the first token: R batch rows, branch by branch


@dataclass(eq=False)
class NextStepCanvas(Canvas):
    """The tokens of B images, fp32 [B, L, c]; 0 where undecided. All branches of guidance read the same tokens."""

    model: NextStepModel
    noise: PairedNoise
    branches: Branches = field(kw_only=True)
    scales: Tensor = field(init=False)  # guidance scales of the cells, fp32 [L, 1 or 2]
    sampled_cells: list[int] = field(init=False)  # the cells that are sampled in at least one image
    sampled_in_all: list[bool] = field(init=False)  # whether each cell is sampled in all images

    def __post_init__(self) -> None:
        super().__post_init__()
        scales = [self._scales(cell) for cell in range(self.cells)]
        self.scales = to_device(torch.tensor(scales), self.device)

        # The host reads the mask of an edit from the device only here, once.
        self.sampled_cells = list(range(self.cells))
        self.sampled_in_all = [True] * self.cells
        if self.regenerated is not None:
            regenerated = self.regenerated.cpu()
            self.sampled_cells = regenerated.any(0).nonzero().flatten().tolist()
            self.sampled_in_all = regenerated.all(0).tolist()

    def _scales(self, cell: int) -> list[float]:
        """Guidance scales of a cell: for the whole condition and, if P = 3, also for the image to change."""
        settings = self.settings
        base_scales = [settings.cfg] if self.branches.number < 3 else [settings.cfg, settings.cfg_img]
        return [scale_at(scale, settings.cfg_schedule, cell, self.cells) for scale in base_scales]

    def with_fixed_tokens(self, cell: int, values: Tensor) -> Tensor:
        """The sampled ``values`` of a cell, [B, 1, c]. In images where the edit fixes the cell, the fixed value
        replaces the sampled value.
        """
        if self.regenerated is None or self.sampled_in_all[cell]:
            return values
        return torch.where(self.regenerated[:, cell, None, None], values, self.values[:, cell : cell + 1])

    def to_latents(self, values: Tensor) -> Tensor:
        return to_latents(values, self.grid, self.model.net.config.patch).contiguous()


def scale_at(cfg: float, schedule: str, tokens_before: int, total_tokens: int) -> float:
    """The guidance scale of a token. Of ``total_tokens`` tokens, ``tokens_before`` come before this token."""
    if schedule == CONSTANT:
        return cfg
    if schedule == FALLING:
        return 1 + (cfg - 1) * (total_tokens - tokens_before) / total_tokens

    assert schedule == RISING
    return max(cfg / 2, 1 + (cfg - 1) * tokens_before / total_tokens)


def nextstep_canvas(
    model: NextStepModel,
    condition: NextStepCondition,
    settings: NextStepSettings,
    noise: PairedNoise,
    edit: Edit | None,
) -> NextStepCanvas:
    """Check the inputs, and return the canvas of a run.

    Raises:
        UserError: see :func:`.nextstep.nextstep`. This function does not check the number of diffusion steps.
    """
    device = model.device
    images = len(condition)
    expect_readable(condition, model)
    report = start_report("nextstep", model, condition, settings, noise)
    expect_device(model, device)

    grid = model.grid(settings.height, settings.width)
    clock = Clock(device)
    branches = branches_for_condition(model, condition, settings, grid)
    if settings.cfg_img != 1 and branches.number < 3:
        report.remark("cfg_img had no effect, because it needs an original image and cfg above 1")
    if isinstance(condition, ImagePromptCondition) and model.edits is None:
        report.remark(f"{model.name} is not known to have been trained to edit; the model may ignore the image")

    values = torch.zeros(images, grid[0] * grid[1], model.net.channels, device=device)
    regenerated = None
    if edit is not None:
        start = start_tokens(model, edit, grid, device)
        values, regenerated = start_edit(edit, start, grid, images, report)

    return NextStepCanvas(
        model, settings, noise, grid, values, report, regenerated=regenerated, branches=branches, clock=clock
    )


def expect_readable(condition: NextStepCondition, model: NextStepModel) -> None:
    """Raise a UserError if the model cannot read the condition, or if the condition has no prompt."""
    if isinstance(condition, ImagePromptCondition):
        expect_editor(condition, model)
    else:
        expect_kind(condition, model.condition, model.name)
    condition.expect_prompt()


def branches_for_condition(
    model: NextStepModel, condition: NextStepCondition, settings: NextStepSettings, grid: tuple[int, int]
) -> Branches:
    """The branches of guidance for a condition, see :func:`branches_for_texts`."""
    sources: Sequence[ReadSource | None] = [None] * len(condition)
    if isinstance(condition, ImagePromptCondition):
        assert condition.encoded_images is not None, "nodes and pipeline read the images"
        sources = condition.encoded_images
    return branches_for_texts(model, condition.texts, negative_of(condition), sources, settings, grid)


def negative_of(condition: NextStepCondition) -> str:
    """The negative text. Guidance leads the image away from what this text says."""
    if isinstance(condition, ImagePromptCondition):
        return COPY
    # UNCONDITIONAL stands for a missing negative prompt, for which a NextStep reads the empty text.
    return "" if condition.unconditional == UNCONDITIONAL else condition.unconditional


def branches_for_texts(
    model: NextStepModel,
    texts: Sequence[str],
    negative: str,
    sources: Sequence[ReadSource | None],
    settings: NextStepSettings,
    grid: tuple[int, int],
) -> Branches:
    """The branches of guidance for texts. There is one text for each image to generate.

    A text may have a source, which is the image to change. Up to three branches read, in this order:

    1. the text with its source;
    2. only with guidance, if ``cfg_img`` is not 1 and every text has a source: the negative text with the source;
    3. only with guidance: the negative text alone.

    Args:
        sources: the source of each text, or None for a text without a source.
    """

    def ids_of_row(ids: Sequence[int], source: ReadSource | None) -> list[int]:
        return model.row(ids, grid, None if source is None else source.grid)

    ids_of_rows = [ids_of_row(model.prompt(text), source) for text, source in zip(texts, sources, strict=True)]
    sources_of_rows = list(sources)
    branches = 1
    if settings.uses_guidance:
        negative_ids = model.instruction(negative)
        if settings.cfg_img != 1 and None not in sources:
            ids_of_rows += [ids_of_row(negative_ids, source) for source in sources]
            sources_of_rows += sources
            branches += 1
        ids_of_rows += [ids_of_row(negative_ids, None)] * len(texts)
        sources_of_rows += [None] * len(texts)
        branches += 1
    return Branches(branches, Rows(ids_of_rows, sources_of_rows))


def start_tokens(model: NextStepModel, edit: Edit, grid: tuple[int, int], device: torch.device) -> Tensor:
    """The tokens of the image that an edit starts from, fp32 [1 or B, L, c].

    Raises:
        UserError: the latents do not fit the model or the size of the image to generate.
    """
    start = edit.start
    config = model.net.config
    if start.ndim != 4 or start.shape[1] != config.channels:
        raise UserError(
            f"latent_image: it has the shape {list(start.shape)}, but {model.name} generates latents of "
            f"{config.channels} channels; encode an image with VAE Encode and the vae of the model's loader."
        )

    height, width = grid
    if tuple(start.shape[2:]) != (height * config.patch, width * config.patch):
        pixels = model.stride // config.patch
        own_height, own_width = (side * pixels for side in start.shape[2:])
        raise UserError(
            f"latent_image: this image has {own_width} x {own_height} pixels, but the image to generate has "
            f"{width * model.stride} x {height * model.stride}; set width to {own_width} and height to {own_height}, "
            f"or encode an image of {width * model.stride} x {height * model.stride} with VAE Encode."
        )
    return to_tokens(start.to(device, torch.float32), config.patch)


def expect_edit(model: NextStepModel, edit: Edit, settings: NextStepSettings, images: int) -> None:
    """Raise a UserError if an edit does not fit the model, the settings or the number of images to generate, which is
    ``images``. The check needs no weights.
    """
    grid = model.grid(settings.height, settings.width)
    device = edit.start.device
    start_tokens(model, edit, grid, device)
    edit.token_mask(grid, images, device)


def expect_device(model: NextStepModel, device: torch.device) -> None:
    """Raise a UserError if ``device`` is a CPU and the model has at least LEAST_WEIGHTS_FOR_GPU_ONLY weights."""
    weights = sum(weight.numel() for weight in model.net.layers.parameters())
    if device.type == "cpu" and weights >= LEAST_WEIGHTS_FOR_GPU_ONLY:
        raise UserError(
            f"model: {model.name} has {weights / 1e9:.1f} billion weights, which a CPU reads once for every token, so "
            "an image takes more than 20 minutes; use a GPU. There is no smaller NextStep."
        )
