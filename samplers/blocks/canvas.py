"""BitDance's canvas, which holds the tokens so far, and what the transformer reads before the first block.

``bitdance.py`` explains the shapes (B, L, c, K, D, R, N), the null branch and the token order. ``checks.py`` checks a
run's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...networks.bitdance import BitDanceClass, BlockModel
from ...reports.record import Clock
from ..conditioning import ClassCondition, ClassOrPrompt, expect_kind, expect_null_prompt
from ..editing import Edit, start_edit
from ..engine import Canvas, start_report
from ..noise import PairedNoise
from .checks import expect_device, start_tokens
from .settings import BlockSettings


class Inputs(NamedTuple):
    """What the transformer reads before the first block is sampled."""

    prefix: Tensor  # embeddings of the condition, [R, n, D]
    lengths: Tensor | None  # number of valid embeddings in each prefix, int64 [R]; None if all n are valid
    first: Tensor  # embeddings after the prefix, [R, K, D]; the input before block 0, in place of a block


@dataclass(eq=False)
class BlockCanvas(Canvas):
    """The canvas of BitDance. A token is a vector of -1 and +1, or of zeros while it is undecided.

    The canvas has two stores of tokens, and :meth:`decide_block` writes both. ``values`` has the tokens that the images
    show, cell by cell. ``branch_tokens`` has the tokens that the transformer reads, in token order and in each branch
    of guidance. At guidance scale 1, the branches are not mixed, so the null branch samples tokens of its own
    (:meth:`samples_null`).

    For example, an image has the cells 0 to 3, a block has two tokens, and the token order is 0, 2, 1, 3. Block 0 has
    the guidance scale 1, so the null branch has sampled its own tokens, w and x::

        values           a c b d    tokens of the cells 0, 1, 2, 3
        branch_tokens    a b c d    conditional branch: tokens of the cells 0, 2, 1, 3
                         w x c d    null branch

    The null branch's own tokens are in no image, so ``values`` cannot replace ``branch_tokens``. The two branches have
    identical values in all blocks whose guidance scale is not 1, and at the tokens that an edit fixes.
    """

    model: BlockModel
    noise: PairedNoise
    order: Tensor = field(kw_only=True)  # int64 [L] on the device: the cell of each token, in token order
    branch_tokens: Tensor = field(kw_only=True)  # the tokens that the transformer reads, fp32 [R, L, c]
    block_size: int = field(init=False)  # K
    guided: bool = field(init=False)  # whether there is a null branch, so R = 2 B
    sampled_blocks: list[int] = field(init=False)  # indices of the blocks to sample, in whole or in part
    sampled_in_all: list[bool] = field(init=False)  # for each block, whether all its tokens are sampled in all images

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block_size = self.model.net.block
        self.guided = self.settings.uses_guidance

        # In an edit, all tokens of a block may be fixed, or some of them. The host copies the mask to the CPU here,
        # once, so the host need not wait for the device in later blocks.
        sampled = torch.ones(1, len(self.order), dtype=torch.bool)  # without an edit, the same for all images
        if self.regenerated is not None:
            sampled = self.regenerated[:, self.order].cpu()

        by_block = sampled.unflatten(1, (-1, self.block_size))  # [1 or B, blocks, K]
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

        The null branch does so if the guidance scale of the block is 1, because guidance then does not mix the two
        branches. With the linear schedule, the scale of block 0 is 1, as in the published code. For example, with four
        blocks and cfg 5, the scales are 1, 2, 3 and 4. In block 0, each branch has its own tokens. In all other blocks,
        the tokens of both branches are identical.
        """
        return self.guided and self.cfg(block) == 1

    def sampled_rows(self, block: int) -> int:
        """Number N of batch rows to sample in a block: B, or R if the null branch samples its own tokens."""
        return len(self.branch_tokens) // self.branches_in(block)

    def branches_in(self, block: int) -> int:
        """Number P of branches that guidance mixes in a block. R is P N, see the table in ``bitdance.py``."""
        return 2 if self.guided and not self.samples_null(block) else 1

    def sampled_mask(self, block: int) -> Tensor | None:
        """Which tokens of a block are sampled, bool [N, K, 1]; None if all are sampled."""
        if self.regenerated is None or self.sampled_in_all[block]:
            return None
        mask = self.regenerated[:, self.order[self.span(block)], None]
        # If the null branch samples its own tokens, N is 2 B: the edit fixes the same tokens in both branches.
        return mask.repeat(2 if self.samples_null(block) else 1, 1, 1)

    def decide_block(self, block: int, tokens: Tensor) -> None:
        """Decide a block: store its sampled tokens, [N, K, c]. Fixed tokens stay unchanged."""
        at = self.span(block)
        sampled = self.sampled_mask(block)
        if sampled is not None:
            tokens = torch.where(sampled, tokens, self.branch_tokens[: len(tokens), at])

        # R is P N: if guidance mixes P branches, all of them read the same tokens.
        self.branch_tokens[:, at] = tokens.repeat(self.branches_in(block), 1, 1)
        self.decide(self.order[at], tokens[: self.images], block)

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
