"""Exact parallel decoding: Jacobi iteration on a window of passes, with the noise of serial decoding.

Serial decoding runs the passes of a schedule (``schedule.py``) one at a time. Here, one *call* of the transformer
computes the W passes of a *window* together. The first of these passes reads decided tokens only, but the other passes
also read *guesses*. A call samples new tokens for all W passes. The new tokens are the guesses of the next call.

A pass of an image is *certain* once its tokens are known to be identical to the tokens of serial decoding. The window
of an image begins with the first pass that is not certain, so the images of a batch advance independently
(:class:`.Window`). After each call, the host reads which tokens have changed, and waits for the device only then. An
image is *active* while it is in the batch; A is the number of active images.

Sources: Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding" (ACL 2023,
arXiv 2305.10427), and Teng et al. 2025, "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding" (ICLR 2025, arXiv 2410.01699). In the second paper, a probabilistic test accepts tokens,
and the images differ from the images of serial decoding. Here, each random number belongs to a seed, an image, a cell
and a token value, so a token depends only on its logits. The iteration therefore ends with the image of serial
decoding, and no test is needed.

In 16 bits, every call is padded to one shape, see :func:`padded_row_count`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from ...networks.llama import is_16_bit
from ...networks.torch_state import to_device
from ...reports.record import dtype_of
from ..engine import Sampler
from .cache_slots import window_slots
from .canvas import TokenCanvas
from .jacobi_window import Window, WindowGuidance
from .looks import CachedTransformer, DeviceTable, chosen_rows, run_first_pass
from .sampling import TokenDraw, guided_passes
from .schedule import Schedule, schedule_table

# On a CPU, a window saves little or no time for a batch of at least this many images.
_CPU_BATCH = 4
# With 16-bit weights, the number of fed rows to which every call is padded is a multiple of this number.
ROWS = 32


@torch.inference_mode()
def decode_in_windows(
    canvas: TokenCanvas, transformer: CachedTransformer, draw: TokenDraw, schedule: Schedule, width: int
) -> Sampler:
    """Run the passes of a schedule in windows of ``width`` passes. Yields a step after the prefill and after each call.

    ``done`` of a step is the number of certain cells of the image that has the fewest certain cells. ``total`` is the
    number of cells of an image.

    In the report, "accepted" counts the cells that became certain in a pass that had read guesses. "rejected" is the
    number of samples minus the number of cells that became certain. The report's map "step" holds the call in which a
    cell became certain; 0 is the prefill. The report's map "outcome" holds ACCEPTED for the cells that "accepted"
    counts, and PLAIN for all other cells. For a cell that an edit fixes, the two maps hold -1 and GIVEN instead.
    """
    table = schedule_table(schedule)
    canvas.total = canvas.cells
    _add_remarks(canvas, schedule, width)

    # 1. The prefill. It reads the condition, and predicts the cells of the first pass.
    guided = guided_passes(canvas.sampling, schedule)
    run_first_pass(canvas, transformer, draw, schedule, window_slots(schedule).count, null=any(guided))
    yield from canvas.yield_step(len(schedule.passes[0].cells))

    # 2. The other passes, in windows. If all calls must have one shape, nothing may leave the batch.
    has_one_shape = transformer.padded_to > 0
    may_leave = MayLeave(images=not has_one_shape, null_branch=not has_one_shape)
    accepted = 0
    rejected = 0
    for call in jacobi_calls(canvas, transformer, draw, schedule, width, may_leave):
        accepted += call.accepted
        rejected += call.rejected
        yield from canvas.yield_step(int(table.cell_start[call.certain_passes]))

    canvas.report.add(accepted=accepted, rejected=rejected)
    return canvas.finish()


class MayLeave(NamedTuple):
    """What may leave the batch when no later call needs it. Later calls then have fewer batch rows."""

    images: bool  # an image leaves the batch and the cache when it is finished
    null_branch: bool  # the null branch of guidance is not fed any more when all guided passes are certain


class JacobiCall(NamedTuple):
    """The progress that one call of the transformer made."""

    certain_passes: int  # number of passes that are certain in all images after the call
    # Numbers of cells in all images together, see jacobi_window.Progress:
    accepted: int
    rejected: int


def jacobi_calls(
    canvas: TokenCanvas,
    transformer: CachedTransformer,
    draw: TokenDraw,
    schedule: Schedule,
    width: int,
    may_leave: MayLeave,
) -> Iterator[JacobiCall]:
    """Decide the cells of all passes after the first one, by Jacobi iteration. Yields a :class:`JacobiCall` after every
    call of the transformer.

    Args:
        canvas: holds the tokens of the first pass and of the schedule's known cells, and receives certain tokens.
        transformer: its cache has at least ``window_slots(schedule).count`` image slots.
        draw: samples the tokens of all images.
        schedule: its first pass has already run.
        width: W, the number of passes in a window.
        may_leave: what may leave the batch.
    """
    passes = len(schedule.passes)
    device_table = DeviceTable(schedule, window_slots(schedule), transformer.cache.prefix, canvas.device)
    guiding = WindowGuidance(guided_passes(canvas.sampling, schedule), may_leave.null_branch)
    window = Window(canvas, schedule, width)
    call = 0
    while window.certain_passes < passes:
        call += 1

        # 1. Find out whether the call feeds the null branch, and to which cells guidance is applied.
        reads_null = guiding.reads_null(window)
        guidance = guiding.at(window)

        # 2. Feed the tokens of the W passes together: certain tokens and guesses. Every fed row attends to the same
        #    places (``schedule.py``) as in serial decoding. If the previous call fed the same row, the new keys and
        #    values replace the previous ones.
        with canvas.clock.phase(canvas.phases[0]):
            rows, predicted_by = window.fed_rows(device_table)
            hidden = chosen_rows(transformer.feed(window.tokens, rows, reads_null), predicted_by)

        # 3. Sample the tokens of the W passes. The noise of a cell is the same in every call.
        with canvas.clock.phase(canvas.phases[1]):
            new = draw.tokens(hidden, guidance, window.cell_on_device, window.tokens)

        # 4. Find the first pass whose new tokens differ from the guesses. This pass and all passes before it read only
        #    certain tokens, so all of them are certain.
        progress = window.progress(new)
        canvas.decide(*window.verdict(new, progress, call))

        # 5. Move the windows. New tokens that are not certain are guesses in the next call.
        window.move(new, progress)

        # 6. Remove finished images from the batch. The transformer's cache and the window change in place; ``draw`` is
        #    replaced by a new object. ``guiding`` has no data of single images: it reads the window.
        remaining = np.flatnonzero(window.start < passes)
        if may_leave.images and 0 < len(remaining) < len(window.active):
            transformer.keep(to_device(remaining, canvas.device), len(window.active))
            draw = draw.for_images(remaining)
            window.keep(remaining)
        yield JacobiCall(window.certain_passes, progress.accepted, progress.rejected)


def _add_remarks(canvas: TokenCanvas, schedule: Schedule, width: int) -> None:
    """Add remarks to the report. On a CPU with many images, a remark states what a window costs. In 16 bits, a remark
    states which values of *parallel* generate the identical image.
    """
    net = canvas.model.net
    side = schedule.grid

    if canvas.device.type == "cpu" and canvas.images >= _CPU_BATCH:
        canvas.report.remark(
            f"parallel: with this value, the passes compute about 4 times as many tokens as with 0; on a CPU with "
            f"{_CPU_BATCH} or more images, also measure the time with parallel 0"
        )

    if is_16_bit(net):
        # All widths up to ``side`` give calls of the same shape. A larger width may need more rows.
        has_shape_of_side = padded_row_count(schedule, width) == padded_row_count(schedule, side)
        if has_shape_of_side:
            hint = f"the values 1 to {side} all give this image, but 0 rounds differently"
        else:
            hint = f"the values 1 to {side} all give the same image, but 0 and {width} each round differently"
        canvas.report.remark(
            f"parallel in {dtype_of(net)}: {hint}; in fp32, all values of parallel give the same image"
        )


def padded_row_count(schedule: Schedule, width: int) -> int:
    """Number of fed rows per image to which every call is padded if the weights are in 16 bits. No call feeds more
    rows. No call samples more cells either, because no row predicts two cells.

    In 16 bits, the same input may give different tokens in calls of different shapes, because the shape determines the
    order in which numbers are added. Every call is therefore padded to one shape (``one_shape`` in
    ``networks/llama.py``). This shape is the same for all window widths from 1 to the side of the image in tokens, so
    these widths generate the identical image. Calls of wider windows may have a larger shape, and calls of serial
    decoding have several shapes. Wide windows and serial decoding may therefore generate a different image from the
    same distribution. ``docs/precision.md`` states how often the images are identical.
    """
    table = schedule_table(schedule)
    # The most rows that any window feeds. A narrow window counts as a window whose width is the side of the image.
    start = np.arange(table.passes)
    stop = np.minimum(start + max(width, schedule.grid), table.passes)
    most_rows = (table.row_start[stop] - table.row_start[start]).max()
    return ROWS * math.ceil(most_rows / ROWS)
