"""BitDance's canvas, which holds the tokens so far. The functions check and prepare a run's inputs.

``bitdance.py`` explains the shapes (B, L, C, K, N, R, D), the null branch and the token order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.bitdance import BitDanceClass, BlockModel
from ...reports.record import Clock
from ..conditioning import ClassCondition, ClassOrPrompt, expect_kind, expect_null_prompt
from ..editing import Edit, start_edit
from ..engine import Canvas, start_report
from ..noise import PairedNoise
from .settings import BlockSettings

# FastAR refuses to run a diffusion head with at least this many weights on a CPU. The head of the largest ImageNet
# model has less than half as many.
LARGE_HEAD = 1_000_000_000


class Inputs(NamedTuple):
    """What the transformer reads before the first block is sampled."""

    prefix: Tensor  # embeddings of the condition, [R, n, D]
    lengths: Tensor | None  # number of valid embeddings in each prefix, int64 [R]; None if all n are valid
    first: Tensor  # embeddings after the prefix, [R, K, D]; they stand in for the block before block 0


@dataclass(eq=False)
class BlockCanvas(Canvas):
    """The canvas of BitDance. A token is a vector of -1 and +1, or of zeros while it is undecided. Both branches of
    guidance have identical values at the tokens that an edit fixes.
    """

    model: BlockModel
    noise: PairedNoise
    order: Tensor = field(kw_only=True)  # int64 [L] on the device: the cell of each token, in token order
    # The tokens that the transformer reads, fp32 [R, L, C], in token order; 0 where undecided. ``values`` holds only
    # the images' tokens. In blocks with guidance scale 1, the null branch has its own tokens.
    branch_tokens: Tensor = field(kw_only=True)
    block_size: int = field(init=False)  # K
    guided: bool = field(init=False)
    sampled_blocks: list[int] = field(init=False)  # indices of the blocks to sample, in whole or in part
    sampled_in_all: list[bool] = field(init=False)  # for each block, whether all its tokens are sampled in all images

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block_size = self.model.net.block
        self.guided = len(self.branch_tokens) > self.images

        # In an edit, some blocks have no token to sample, and others have only some. The host copies the mask to the
        # CPU here, once, so later blocks need not wait for the device.
        regenerated = torch.ones(1, len(self.order), dtype=torch.bool)
        if self.regenerated is not None:
            regenerated = self.regenerated[:, self.order].cpu()

        by_block = regenerated.unflatten(1, (-1, self.block_size))  # [B, blocks, K]
        self.sampled_blocks = by_block.any(2).any(0).nonzero().flatten().tolist()
        self.sampled_in_all = by_block.all(2).all(0).tolist()

    @property
    def blocks(self) -> int:
        """Number of blocks in an image."""
        return len(self.order) // self.block_size

    def span(self, block: int) -> slice:
        """The indices of a block's tokens in the token order."""
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def cfg(self, block: int) -> float:
        """Guidance scale of a block. With the linear schedule, the scale rises from 1 at the first block to just below
        cfg at the last block, as in the published code.
        """
        if self.settings.cfg_schedule == "linear":
            return 1 + (self.settings.cfg - 1) * block / self.blocks
        return self.settings.cfg

    def samples_null(self, block: int) -> bool:
        """Whether the null branch samples its own tokens from its own noise.

        It does so where the guidance scale is 1, because guidance does not mix the two branches there. This is block 0
        with the linear schedule, as in the published code. For example, with four blocks and cfg 5, the scales are 1,
        2, 3 and 4. In block 0, each branch has its own tokens. In all other blocks, the tokens of both branches are
        identical.
        """
        return self.guided and self.cfg(block) == 1

    def sampled_rows(self, block: int) -> int:
        """Number N of batch rows to sample in a block: B, or R if the null branch samples its own tokens."""
        return len(self.branch_tokens) if self.samples_null(block) else self.images

    def sampled_mask(self, block: int) -> Tensor | None:
        """Which tokens of a block are sampled, bool [N, K, 1]; None if all are sampled."""
        if self.regenerated is None or self.sampled_in_all[block]:
            return None
        mask = self.regenerated[:, self.order[self.span(block)], None]
        return mask.repeat(self.sampled_rows(block) // self.images, 1, 1)

    def set_tokens(self, block: int, tokens: Tensor) -> Tensor:
        """Store the new tokens of a block, [N, K, C], in :attr:`branch_tokens`. Fixed tokens stay unchanged.

        Returns the block's tokens of the images, [B, K, C], including the fixed tokens.
        """
        at = self.span(block)
        sampled = self.sampled_mask(block)
        if sampled is not None:
            tokens = torch.where(sampled, tokens, self.branch_tokens[: len(tokens), at])

        branches = len(self.branch_tokens) // len(tokens)
        self.branch_tokens[:, at] = tokens.repeat(branches, 1, 1)
        return tokens[: self.images]

    def to_latents(self, values: Tensor) -> Tensor:
        return values.unflatten(1, self.grid).permute(0, 3, 1, 2).contiguous()


def block_canvas(
    model: BlockModel,
    condition: ClassOrPrompt,
    settings: BlockSettings,
    noise: PairedNoise,
    edit: Edit | None,
) -> tuple[BlockCanvas, Inputs]:
    """Check the inputs. Returns the new canvas, and what the transformer reads before the first block.

    Raises:
        UserError: see :func:`.bitdance.bitdance`.
    """
    net = model.net
    device = model.device
    expect_kind(condition, model.condition, model.name)
    report = start_report("bitdance", model, condition, settings, noise)
    expect_device(model, device, settings)

    grid = model.grid(settings.height, settings.width)
    images = len(condition)
    guided = settings.uses_guidance

    clock = Clock(device)
    inputs = _inputs(model, condition, guided, grid)

    order = net.order(grid)
    values = torch.zeros(images, len(order), net.channels, device=device)
    regenerated = None
    if edit is not None:
        start = start_tokens(model, edit, grid, device)
        values, regenerated = start_edit(edit, start, grid, images, report)

    branches = 2 if guided else 1
    branch_tokens = values[:, order].repeat(branches, 1, 1)
    canvas = BlockCanvas(
        model,
        settings,
        noise,
        grid,
        values,
        report,
        regenerated=regenerated,
        order=order,
        branch_tokens=branch_tokens,
        clock=clock,
    )
    return canvas, inputs


def _inputs(model: BlockModel, condition: ClassOrPrompt, guided: bool, grid: tuple[int, int]) -> Inputs:
    """What the transformer reads before the first block, from the condition and, with guidance, the null condition.

    Raises:
        UserError: the model cannot read the condition.
    """
    if isinstance(condition, ClassCondition):
        net = cast(BitDanceClass, model.net)
        classes = net.config.condition_size
        labels = condition.class_ids(classes, model.label_set, net.compute_device)
        if guided:
            labels = torch.cat([labels, torch.full_like(labels, classes)])
        prefix, first = net.class_rows(labels)
        return Inputs(prefix, None, first)

    condition.expect_prompt()
    expect_null_prompt(condition, model.name)
    ids: Sequence[Sequence[int]] = [model.prompt(text) for text in condition.texts]
    if guided:
        ids = [*ids, *[model.null_prompt()] * len(ids)]
    prefix, lengths, first = model.prompt_rows(ids, grid)
    return Inputs(prefix, lengths, first)


def start_tokens(model: BlockModel, edit: Edit, grid: tuple[int, int], device: torch.device) -> Tensor:
    """The tokens of the image that an edit starts from, -1 or 1, fp32 [1 or B, L, C], in raster order.

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
