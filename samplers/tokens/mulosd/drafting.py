"""MuLo-SD's drafts: a draft model generates the blocks of an image, and an up-sampler enlarges them.

Source: "Multi-Scale Local Speculative Decoding for Image Generation" (CVPR 2026, arXiv 2601.05149), section
"Multi-Scale Drafting". ``__init__.py`` explains the stages of a cycle. ``schedule.py`` explains *cells*, fed tokens and
*stand-ins*. The file has two subjects, which can be read separately:

- the draft model: :class:`Block`, the grid rows of one cycle; and :class:`BlockDrafter`, stage 1, in which the draft
  model M_q generates the rows of a block;
- from one grid to the other: :func:`enlarge_draft`, stage 2; :func:`reduce_result`, stage 6; and :class:`UpSampling`,
  which both call. It has the up-sampler U_r and the down-sampler D_r, in two kinds.

Shapes: B images; G x G cells of the target's grid; r, the ratio of the sides of both grids. U_r and D_r get and return
codes of the first grid rows of images, [B, f, w]: the first f grid rows of w codes each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....errors import UserError, not_finite
from ....networks.autoencoder import VQModel
from ....networks.latent_samplers import LatentSamplersModel
from ....networks.llama import TokenModel
from ...conditioning import AnyCondition
from ...engine import Step, run_passes
from ..cache_slots import serial_slots, window_slots
from ..canvas import TokenCanvas, blank_tokens
from ..jacobi import MayLeave, jacobi_calls
from ..looks import CachedTransformer, ScheduleLook, later_passes_on_device, run_first_pass
from ..prepare import prepare
from ..sampling import TokenDraw
from ..schedule import Schedule, next_token_passes
from ..settings import sampling_of
from ..zipar import row_groups
from .settings import MuLoSDSettings

# ------------------------------------------------------------ the draft model: blocks


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some grid rows of the draft (the *draft rows*) and the cells of the target's grid that these rows cover.

    For example, a draft of 6 x 6 tokens with r = 2 has a target of 12 x 12 cells. If every block has 2 draft rows,
    there are three blocks::

        block   draft_rows   cells       fed_from
        0       0 to 1         0 to  47   0
        1       2 to 3        48 to  95   0
        2       4 to 5        96 to 143   48
    """

    ratio: int  # r

    # For the draft model.
    draft_rows: range
    schedule: Schedule  # the passes; in all blocks but the first one, the first pass is empty

    # For the target.
    cells: range
    # First cell that the verifying pass feeds: the first cell of the previous block; 0 in the first block. The previous
    # block is fed again because its tokens may have changed since they were fed.
    fed_from: int

    @property
    def is_first(self) -> bool:
        return self.cells.start == 0


def blocks_of(settings: MuLoSDSettings, draft_side: int, ratio: int) -> list[Block]:
    """Divide a draft of ``draft_side`` x ``draft_side`` tokens into blocks of draft rows. ``ratio``: r."""
    at_once = settings.rows_at_once(draft_side)
    cells_of_row = ratio * ratio * draft_side  # cells that a draft row covers

    blocks = []
    for start in range(0, draft_side, at_once):
        rows = range(start, min(start + at_once, draft_side))
        previous = max(0, start - at_once)  # first draft row of the previous block; 0 in the first block
        fed_again = start - previous
        block = Block(
            ratio=ratio,
            draft_rows=rows,
            schedule=draft_schedule(draft_side, settings.draft_window, start, len(rows), rows_fed_again=fed_again),
            cells=range(rows.start * cells_of_row, rows.stop * cells_of_row),
            fed_from=previous * cells_of_row,
        )
        blocks.append(block)
    return blocks


@lru_cache(maxsize=64)
def draft_schedule(draft_side: int, zipar_window: int, known_rows: int, new_rows: int, rows_fed_again: int) -> Schedule:
    """Passes in which the draft model generates the draft rows of a block.

    A pass is guided if its ``cfg_step`` is at most the setting *cfg_interval*. Its ``cfg_step`` is the number of tokens
    decided before the pass, minus 1, as in serial decoding. So guidance ends after the same number of tokens as in
    serial decoding.

    Args:
        draft_side: side of the draft's grid.
        zipar_window: ZipAR's window, in tokens. With 0, or with ``draft_side`` or more, the order is raster order.
        known_rows: number of draft rows that are decided already.
        new_rows: number of draft rows to generate after the known rows.
        rows_fed_again: number of known draft rows that are fed again: the last of the known rows. Their tokens may
            have changed, because :func:`reduce_result` has replaced them.
    """
    # 1. The tokens of every pass, counted from the first new token. (A token of the draft is a cell of its grid.)
    if 0 < zipar_window < draft_side:
        groups = row_groups(draft_side, zipar_window, new_rows)
    else:
        groups = [[token] for token in range(new_rows * draft_side)]

    # 2. The same groups, counted from the first token of the draft.
    known = known_rows * draft_side
    decided = known
    shifted = []
    cfg_steps = []
    for group in groups:
        shifted.append([known + token for token in group])
        cfg_steps.append(decided - 1)
        decided += len(group)

    passes = next_token_passes(shifted, draft_side, cfg_steps, known, fed_again=rows_fed_again * draft_side)
    return Schedule(draft_side, passes, known=known)


# ------------------------------------------------------------ the draft model: stage 1


class BlockDrafter:
    """The draft model M_q, with its images and the keys and values of all blocks so far.

    The draft model generates a block pass by pass or, with *draft_parallel* above 1, in windows of several passes
    (``jacobi.py``). In windows, the progress and the report count a call of the transformer as one pass.

    Args:
        target_canvas: the target's images. Both models write to its report and its clock.
        model: the draft model.
        condition: the condition of the images.
        blocks: all blocks of an image.

    Attributes:
        canvas: the draft model's images.
    """

    def __init__(
        self, target_canvas: TokenCanvas, model: TokenModel, condition: AnyCondition, blocks: Sequence[Block]
    ) -> None:
        prepared = prepare(model, condition, model.device)
        self.target_canvas = target_canvas
        self.canvas = draft_canvas(target_canvas, model, ratio=blocks[0].ratio)
        self.transformer = CachedTransformer(self.canvas, prepared)
        # A stream of its own: the target alone has the random numbers of LlamaGen, see MuLoSDSettings.exact.
        self.draw = TokenDraw(self.canvas, stream="draft")
        self.window_width = target_canvas.settings.draft_parallel  # number of passes in a window
        self.in_windows = self.window_width > 1
        self.slot_count = self._slot_count_for(blocks)
        # In windows, a finished image may leave the batch, unless a later block needs the image's keys and values. The
        # null branch may leave after the last guided pass of a block, because guidance does not start again later.
        self.may_leave = MayLeave(images=len(blocks) == 1, null_branch=True)
        # With guidance, the prefill and all passes outside windows also feed the null branch, whatever cfg_interval is.
        # So the cache has the null branch for all blocks.
        self.reads_null = self.canvas.sampling.uses_guidance

    def _slot_count_for(self, blocks: Sequence[Block]) -> int:
        """Number of cache slots for the image's tokens. One cache serves all blocks, so it has the largest number of
        slots that any block needs. In windows, stand-ins and padding have slots of their own.
        """
        if self.in_windows:
            return max(window_slots(block.schedule).count for block in blocks)
        return max(serial_slots(block.schedule).count_without_padding for block in blocks)

    def generate(self, block: Block) -> Iterator[Step]:
        """Stage 1: generate the draft rows of a block. Yields a step of the target's images after every pass; in
        windows, after every call, and the host then waits for the device.
        """
        schedule = block.schedule
        yield_step = partial(self._yield_step, block)
        passes_before = 0

        # 1. The first block begins with the prefill. In later blocks, the first pass is empty and does not run.
        if block.is_first:
            run_first_pass(self.canvas, self.transformer, self.draw, schedule, self.slot_count, self.reads_null)
            passes_before = 1
            yield from yield_step(passes_before)

        # 2. The other passes.
        if self.in_windows:
            calls = jacobi_calls(self.canvas, self.transformer, self.draw, schedule, self.window_width, self.may_leave)
            for done, _ in enumerate(calls, passes_before + 1):
                yield from yield_step(done)
        else:
            plan = later_passes_on_device(schedule, self.canvas.device)
            look = ScheduleLook(self.transformer, schedule, [self.reads_null] * len(schedule.passes))
            draw = self.draw.of_schedule(schedule)
            yield from run_passes(self.canvas, plan, look, draw, yield_step, passes_before)

    def _yield_step(self, block: Block, done: int) -> Iterator[Step]:
        """Count a pass of the draft model, and yield the step. ``done``: number of passes so far in the block."""
        self.canvas.report.add(draft_passes=1)
        planned = sum(1 for p in block.schedule.passes if p.cells)  # an empty first pass does not run
        progress = progress_of_draft(block, done, planned)
        yield from self.target_canvas.yield_step(progress, partial(self._view_with_draft, block))

    @torch.inference_mode(False)
    def _view_with_draft(self, block: Block) -> tuple[Tensor, Tensor]:
        """The target's decided tokens, and the draft tokens of the ``block`` that is being generated. Each draft token
        is repeated over the cells that it covers.

        Returns the codes, int64 [B, G, G], and which cells are decided or drafted, bool [B, G, G].
        """
        ratio = block.ratio
        tokens, decided = self.target_canvas.view()
        draft_tokens, drafted = (
            values.repeat_interleave(ratio, 1).repeat_interleave(ratio, 2) for values in self.canvas.view()
        )
        drafted[:, : block.draft_rows.start * ratio] = False  # the target has already decided the earlier blocks
        return torch.where(drafted, draft_tokens, tokens), decided | drafted


def progress_of_draft(block: Block, done: int, planned: int) -> int:
    """The progress, in cells, when the draft model has made ``done`` of its ``planned`` passes in a block.

    The progress counts each cell twice: when the cell is drafted, and when it is final. It does not count passes,
    because the number of passes that resample a block is not known until the target has verified the block. In windows,
    a call counts as one pass, but ``planned`` is the number without windows. Fewer calls may be enough, so the progress
    may jump at the end of the draft.
    """
    return 2 * block.cells.start + len(block.cells) * done // planned


def progress_of_repair(block: Block, done: int, planned: int) -> int:
    """The progress, in cells, when ``done`` of the ``planned`` passes that resample a block are done. See
    :func:`progress_of_draft`.
    """
    return 2 * block.cells.start + len(block.cells) + len(block.cells) * done // planned


def draft_canvas(target_canvas: TokenCanvas, model: TokenModel, ratio: int) -> TokenCanvas:
    """The blank canvas of the draft ``model``. It shares the target's noise, report and clock. ``ratio``: r."""
    settings: MuLoSDSettings = target_canvas.settings
    # cfg_interval counts tokens, and the target has r^2 times as many tokens as the draft. The division lets guidance
    # end after the same share of both images.
    if settings.cfg_interval is not None:
        settings = replace(settings, cfg_interval=settings.cfg_interval // ratio**2)

    return TokenCanvas(
        model,
        settings,
        target_canvas.noise,
        grid=(model.grid, model.grid),
        values=blank_tokens(target_canvas.images, model.grid, model.device),
        report=target_canvas.report,
        phases=("draft", "draft"),
        sampling=sampling_of(settings, model),
        clock=target_canvas.clock,
    )


# ------------------------------------------------------------ from one grid to the other: stages 2 and 6


def enlarge_draft(block: Block, draft_canvas: TokenCanvas, target_canvas: TokenCanvas, up_sampler: UpSampling) -> None:
    """Stage 2, U_r: enlarge all draft rows so far, and write the cells of this block to the target's canvas."""
    ratio = block.ratio
    rows = block.draft_rows
    cells = block.cells
    with target_canvas.clock.phase("up-sampling"):
        enlarged = up_sampler.up(first_rows(draft_canvas, rows.stop), ratio)
        of_block = enlarged[:, rows.start * ratio : rows.stop * ratio]
        target_canvas.values[:, cells.start : cells.stop] = of_block.flatten(1)


def reduce_result(block: Block, target_canvas: TokenCanvas, draft_canvas: TokenCanvas, up_sampler: UpSampling) -> None:
    """Stage 6, D_r: reduce the target's rows so far, and write the draft rows of this block to the draft's canvas. The
    draft model continues from these rows. It feeds only these rows again; its cache keeps the rows of earlier blocks as
    they are. The last block is not reduced.
    """
    if block.cells.stop == target_canvas.cells:
        return

    ratio = block.ratio
    rows = block.draft_rows
    side = draft_canvas.grid[1]
    with target_canvas.clock.phase("up-sampling"):
        reduced = up_sampler.down(first_rows(target_canvas, rows.stop * ratio), ratio)
        of_block = reduced[:, rows.start : rows.stop]
        draft_canvas.values[:, rows.start * side : rows.stop * side] = of_block.flatten(1)


def first_rows(canvas: TokenCanvas, count: int) -> Tensor:
    """The tokens of the first ``count`` grid rows of a canvas, int64 [B, count, side]."""
    return canvas.values[:, : canvas.cells].unflatten(1, canvas.grid)[:, :count]


# ------------------------------------------------------------ from one grid to the other: up-samplers

# A function that enlarges images [B, 3, H, W] in 0..1, to any size. If this size is not r times the size of the images,
# the up-sampler resizes the result.
Enlarge = Callable[[Tensor], Tensor]
# The most pixels, at the larger size, of images that are computed together. An image with more is computed alone.
_PIXELS_AT_ONCE = 1 << 21
# The most cells, in the larger grid, of images that are computed together. An image with more is computed alone.
_CELLS_AT_ONCE = 1 << 16
# The name in reports if U_r works in pixels without an upscale model.
BICUBIC = "bicubic"


class UpSampling(ABC):
    """U_r and D_r for a pair of models, draft and target. U_r turns codes of the draft's grid into codes of the
    target's grid, whose side is r times as long. D_r does the opposite. There are two kinds:

    - :class:`PixelUpSampling`: the tokenizer decodes the codes, U_r or D_r resizes the decoded image, and the tokenizer
      encodes the resized image. This kind needs no training and is the paper's default.
    - :class:`LatentUpSampling`: two trained networks turn codes into codes, without a decoder.

    Both kinds get only the first grid rows of an image, because the later rows are not generated yet.

    Attributes:
        tokenizer: the tokenizer of both models.
        tokenizer_net: the tokenizer's network.
        name: name of the model or method that enlarges images, for reports and messages.
    """

    def __init__(self, vq: VQModel, name: str):
        self.tokenizer = vq
        self.tokenizer_net = vq.net
        self.name = name

    @abstractmethod
    def up(self, codes: Tensor, factor: int) -> Tensor:
        """U_r: enlarge the first rows of images, int64 [B, f, w], to [B, f * factor, w * factor]. ``factor``: r.

        Raises:
            UserError: pixels that are not finite, or an upscale model that does not turn each image into one RGB
                image.
        """

    @abstractmethod
    def down(self, codes: Tensor, factor: int) -> Tensor:
        """D_r: reduce the first rows of images, int64 [B, f, w], to [B, f / factor, w / factor]. ``factor``: r. f and w
        are multiples of r.

        Raises:
            UserError: pixels that are not finite.
        """


class LatentUpSampling(UpSampling):
    """U_r and D_r as trained networks (``networks/latent_samplers.py``).

    Args:
        vq: the tokenizer.
        samplers: the two networks, trained for this tokenizer's codebook and for the ratio r of the grids. So the
            ``factor`` of ``up`` and ``down`` only limits how many images are computed together.
    """

    def __init__(self, vq: VQModel, samplers: LatentSamplersModel):
        super().__init__(vq, samplers.name)
        self._net = samplers.net

    def up(self, codes: Tensor, factor: int) -> Tensor:
        return self._apply_in_parts(self._net.up, codes, codes[0].numel() * factor**2)

    def down(self, codes: Tensor, factor: int) -> Tensor:
        return self._apply_in_parts(self._net.down, codes, codes[0].numel())

    def _apply_in_parts(self, network: Callable[[Tensor], Tensor], codes: Tensor, cells: int) -> Tensor:
        """Apply a network to some images at a time. ``cells``: number of cells of one image in the larger grid."""
        codes = codes.to(self._net.codebook.embedding.weight.device)
        return torch.cat([network(part) for part in codes.split(max(1, _CELLS_AT_ONCE // cells))])


class PixelUpSampling(UpSampling):
    """U_r and D_r in pixels. U_r resizes by bicubic interpolation or with an upscale model. D_r averages areas of
    pixels.

    Args:
        vq: the tokenizer of draft and target.
        enlarge: a function that enlarges images, such as an upscale model; None for bicubic interpolation.
        name: the name of this function or model.
    """

    def __init__(self, vq: VQModel, enlarge: Enlarge | None = None, name: str = BICUBIC):
        super().__init__(vq, name)
        self._enlarge = enlarge

    def up(self, codes: Tensor, factor: int) -> Tensor:
        side = codes.shape[2] * factor * self.tokenizer_net.config.stride
        large = self._decode_resize_encode(codes, side, lambda images: self._enlarged(images, side))
        return large[:, : codes.shape[1] * factor]  # without the rows that whole_image has added

    def down(self, codes: Tensor, factor: int) -> Tensor:
        side = codes.shape[2] * self.tokenizer_net.config.stride
        small = self._decode_resize_encode(codes, side, lambda images: F.avg_pool2d(images, factor))
        return small[:, : codes.shape[1] // factor]

    def _decode_resize_encode(self, codes: Tensor, side: int, resize: Callable[[Tensor], Tensor]) -> Tensor:
        """Decode codes [B, f, w] to images [B, 3, H, W] in -1..1, call ``resize`` with the images, and encode the
        resized images. Returns codes of whole images, with as many rows as columns; see :func:`whole_image`.

        ``side``: side of an image in pixels, before or after resizing, whichever is larger. This side determines how
        many images are computed at a time. The host waits for the device once, at the end.

        Raises:
            UserError: decoded or resized pixels that are not finite.
        """
        whole = whole_image(codes).to(self.tokenizer_net.quantize.embedding.weight.device)
        new_codes = []
        largest = []  # per part, the largest absolute value of the decoded and of the resized pixels, fp32 [2]
        for part in whole.split(max(1, _PIXELS_AT_ONCE // side**2)):
            decoded = self.tokenizer_net.decode_codes(part).float()
            resized = resize(decoded)
            pixels = resized.clamp(-1, 1).to(self.tokenizer_net.quant_conv.weight.dtype)
            new_codes.append(self.tokenizer_net.encode(pixels)[1])
            largest.append(torch.stack([decoded.abs().amax(), resized.abs().amax()]))

        decoded_well, resized_well = np.isfinite(torch.stack(largest).cpu().numpy()).all(axis=0)
        if not decoded_well:
            raise not_finite("decoder", self.tokenizer.name, "pixels")
        if not resized_well:
            raise not_finite("upscale_model", self.name, "pixels")
        return torch.cat(new_codes)

    def _enlarged(self, small: Tensor, side: int) -> Tensor:
        """Enlarge square images, fp32 [B, 3, H, W] in -1..1, to ``side`` x ``side`` pixels."""
        size = (side, side)
        if self._enlarge is None:
            return F.interpolate(small, size=size, mode="bicubic", antialias=True)

        large = self._enlarge((small / 2 + 0.5).clamp(0, 1)).to(small) * 2 - 1  # from -1..1 to 0..1, and back
        if large.ndim != 4 or large.shape[:2] != small.shape[:2]:
            raise UserError(
                f"upscale_model: this model turned images of the shape {list(small.shape)} into images of the shape "
                f"{list(large.shape)}; choose a model that enlarges RGB images."
            )
        if large.shape[2:] != size:
            large = F.interpolate(large, size=size, mode="bicubic", antialias=True)
        return large


def whole_image(codes: Tensor) -> Tensor:
    """Repeat the last grid row of ``codes``, int64 [B, f, w], until the grid is square: int64 [B, w, w].

    The tokenizer normalises over all cells, attends to all cells, and pads at the borders. If it encoded the
    first rows alone, their codes would therefore differ from the codes of the same rows in a whole image, and the
    target would reject the codes.
    """
    _, height, width = codes.shape
    below = codes[:, -1:].expand(-1, width - height, -1)
    return torch.cat([codes, below], dim=1)
