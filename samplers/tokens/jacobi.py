"""Exact parallel decoding: Jacobi iteration on a window of passes, with the noise of serial decoding.

Serial decoding runs the passes of a schedule (``schedule.py``) one at a time. Here, one *call* of the transformer
computes the W passes of a *window* together. The first of these passes reads decided tokens only, but the other passes
also read *guesses*. A call samples new tokens for all W passes. The new tokens are the guesses of the next call.

A pass of an image is *certain* once its tokens are identical to the tokens of serial decoding. The window of an image
begins with the first pass that is not certain, so the images of a batch advance independently (:class:`Window`). After
each call, the host reads how far every image is, and waits for the device only there. *Active* images are still in the
batch; A is the number of active images.

Sources: Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding" (ACL 2023,
arXiv 2305.10427), and Teng et al. 2025, "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding" (ICLR 2025, arXiv 2410.01699). In the second paper, a probabilistic test accepts tokens,
and the images differ from the images of serial decoding. Here, each random number belongs to a seed, an image, a cell
and a token value, so a token depends only on its logits. The iteration therefore ends with the image of serial
decoding, and no test is needed.

In 16 bits, the same input may give different tokens in calls of different shapes, because the shape determines the
order in which numbers are added. Every call is therefore padded to one shape (``one_shape`` in ``networks/llama.py``).
This shape is the same for all window widths from 1 to the side of the image in tokens, so these widths generate the
identical image. Wider windows may have a larger shape, and serial decoding has different shapes. Both may generate a
different image from the same distribution. ``docs/precision.md`` states how often the images are identical.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...networks.llama import is_16_bit
from ...networks.torch_state import to_device
from ...reports.record import ACCEPTED, PLAIN, dtype_of
from ..engine import Sampler, Verdict
from .cache_slots import window_slots
from .canvas import TokenCanvas
from .device_table import DeviceTable, FedRows
from .looks import CachedTransformer, chosen_rows, last_guided_pass
from .sampling import Guidance, TokenDraw
from .schedule import Schedule
from .schedule_table import ScheduleTable, schedule_table

# On a CPU, a window saves little or no time for a batch of at least this many images.
_CPU_BATCH = 4
# With 16-bit weights, the rows that a call feeds for each image are padded to a multiple of this number.
ROWS = 32


@torch.inference_mode()
def decode_in_windows(
    canvas: TokenCanvas, transformer: CachedTransformer, draw: TokenDraw, schedule: Schedule, width: int
) -> Sampler:
    """Run the passes of a schedule in windows of ``width`` passes. Yields a step after the prefill and after each call.

    ``done`` of a step is the number of certain cells of the image that has the fewest certain cells. ``total`` is the
    number of cells of an image.

    In the report, "accepted" counts the cells that became certain in a pass that had read guesses, and "rejected"
    counts the samples that decided no cell. The report's map "step" holds the call in which a cell became certain; 0 is
    the prefill. The report's map "outcome" holds ACCEPTED for the cells that "accepted" counts, and PLAIN for all other
    cells. For a cell that an edit fixes, the two maps hold -1 and GIVEN instead.
    """
    table = schedule_table(schedule)
    canvas.total = canvas.cells
    _add_remarks(canvas, schedule, width)

    # 1. The prefill. It reads the condition, and predicts the cells of the first pass.
    first = to_device(np.array(schedule.passes[0].cells, np.int64), canvas.device)
    with canvas.clock.phase(canvas.phases[0]):
        hidden = transformer.prefill(any(draw.guided_by_pass), window_slots(schedule).count)
    with canvas.clock.phase(canvas.phases[1]):
        canvas.decide(first, draw(0, first, hidden.expand(-1, len(first), -1)), 0)
    yield from canvas.yield_step(len(first))

    # 2. The other passes, in windows.
    sampled = 0
    for call in jacobi_calls(canvas, transformer, draw, schedule, width):
        sampled += call.sampled
        yield from canvas.yield_step(int(table.cell_start[call.certain]))

    # 3. Each cell that the windows decided took its token from exactly one sample. All other samples were rejected.
    cells_in_windows = canvas.images * (canvas.cells - len(first))
    accepted = int((canvas.outcome == ACCEPTED).sum().cpu().numpy())
    canvas.report.add(accepted=accepted, rejected=sampled - cells_in_windows)
    return canvas.finish()


class JacobiCall(NamedTuple):
    """The progress that one call of the transformer made."""

    certain: int  # number of passes that are certain in all images after the call
    sampled: int  # number of cells that the call sampled in all images together


def jacobi_calls(
    canvas: TokenCanvas,
    transformer: CachedTransformer,
    draw: TokenDraw,
    schedule: Schedule,
    width: int,
    images_may_leave: bool = True,
) -> Iterator[JacobiCall]:
    """Decide the cells of all passes after the first one, by Jacobi iteration. Yields a :class:`JacobiCall` after every
    call of the transformer.

    Args:
        canvas: holds the tokens of the first pass and of the schedule's known cells, and receives certain tokens.
        transformer: its cache has at least ``window_slots(schedule).count`` image slots.
        draw: samples the tokens of all images.
        schedule: its first pass has already run.
        width: W, the number of passes in a window.
        images_may_leave: whether finished images leave the batch and the cache. If all calls must have one shape, all
            images stay.
    """
    passes = len(schedule.passes)
    table = DeviceTable(schedule, window_slots(schedule), transformer.cache.prefix, canvas.device)

    # If all calls must have one shape, all images stay to the end. The null branch, in which guidance runs the
    # transformer without the condition, then stays too.
    has_one_shape = transformer.padded_to > 0
    guiding = WindowGuidance(table.table, draw.guided_by_pass, to_the_end=has_one_shape)
    images_may_leave = images_may_leave and not has_one_shape

    window = Window(canvas, schedule, width)
    call = 0
    while window.certain < passes:
        call += 1
        sampled = window.size

        # 1. Find out whether the call feeds the null branch, and to which cells guidance is applied.
        reads_null = guiding.reads_null(window)
        guidance = guiding.at(window)

        # 2. Feed the rows of the W passes together. The rows hold certain tokens and guesses. Every row attends to the
        #    same places (``schedule.py``) as in serial decoding. If the previous call fed the same row, the new keys
        #    and values replace the previous ones.
        with canvas.clock.phase(canvas.phases[0]):
            rows, predicted_by = window.rows(table)
            hidden = chosen_rows(transformer.feed(window.tokens, rows, reads_null), predicted_by)

        # 3. Sample the tokens of the W passes. The noise of a cell is the same in every call.
        with canvas.clock.phase(canvas.phases[1]):
            new = draw.tokens(hidden, guidance, window.cells, window.tokens)

        # 4. The first pass whose new tokens differ from the guesses is certain, and so are all passes before it.
        new_start = window.first_uncertain(new)
        canvas.decide(*window.verdict(new, new_start, call))

        # 5. Move the windows. New tokens that are not certain are guesses in the next call.
        window.move(new, new_start)

        # 6. Remove finished images from the batch.
        remaining = np.flatnonzero(window.start < passes)
        if images_may_leave and 0 < len(remaining) < len(window.active):
            transformer.keep(to_device(remaining, canvas.device), len(window.active))
            draw = draw.for_images(remaining)
            window.keep(remaining)
        yield JacobiCall(window.certain, sampled)


class Window:
    """The tokens of the A active images, and for each image the W passes (fewer at the end) that the next call
    computes::

        pass     0  1  2  3  4  5  6  7  8  9        W = 4
        tokens   certain |  guesses  |  none yet
                         start       stop

    - The tokens of the passes before ``start`` are certain.
    - The tokens of the passes from ``start`` to ``stop`` - 1 are guesses: samples from earlier calls, or copies of the
      newest token. Pass ``start`` reads certain tokens only, so the tokens that the next call samples in this pass are
      certain.
    - The next call does not read the tokens of the passes from ``stop`` on.

    Only :meth:`move` moves windows and changes the tokens in them. The positions of the windows are on the host, and
    the tokens are on the device.

    Attributes:
        active: for each active image, its index on the canvas, int64 [A].
        tokens: the tokens of the active images, int64 [A, L + 1], arranged as in :class:`.TokenCanvas`.
        start: for each image, the first pass that is not certain, int64 [A].
        stop: for each image, the first pass after its window, int64 [A].
        entries: for each cell of a window, its index in the cell arrays of :class:`.ScheduleTable`, int64 [A, n]. The
            cells are in the order of their passes. n is the number of cells in the largest window. For images with
            fewer cells, padding follows.
        cells: the same cells as numbers in raster order, int64 [A, n] on the device.
    """

    def __init__(self, canvas: TokenCanvas, schedule: Schedule, width: int):
        self.table = schedule_table(schedule)
        self.width = width
        self.active = np.arange(canvas.images)
        self.tokens = canvas.values.clone()
        self._set_start(np.ones(canvas.images, np.int64))

        # The first guesses are copies of the newest token. If the first pass decides no cell, as in the later blocks of
        # MuLo-SD, the newest token is the token of the last known cell.
        decided = schedule.passes[0].cells or range(schedule.known)
        _fill_with_newest(self.tokens, self.cells, self.tokens[:, decided[-1], None].clone())

    def _set_start(self, new_start: np.ndarray) -> None:
        """Set ``start`` to ``new_start``, int64 [A], and set ``stop``, ``entries`` and ``cells`` to match."""
        table = self.table
        self.start = new_start
        self.stop = np.minimum(new_start + self.width, table.passes)
        self.entries = self._entries(self.start, self.stop)
        self.cells = to_device(table.cells[self.entries], self.tokens.device)

    def _entries(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """The entries (see :class:`Window`) of all cells that the passes from ``begin`` to ``end`` - 1 decide, int64
        [A, n]. ``begin``, ``end``: int64 [A].
        """
        table = self.table
        return ranges(table.cell_start[begin], table.cell_start[end], padding=len(table.cells) - 1)

    @property
    def certain(self) -> int:
        """Number of passes that are certain in all images."""
        return int(self.start.min())

    @property
    def size(self) -> int:
        """Number of cells that the next call samples in all images together."""
        return int((self.table.cell_start[self.stop] - self.table.cell_start[self.start]).sum())

    def rows(self, device_table: DeviceTable) -> tuple[FedRows, Tensor]:
        """The rows that the next call feeds, and for each cell, the index of the row that predicts it, int64 [A, n]."""
        table = self.table
        index = ranges(table.row_start[self.start], table.row_start[self.stop], padding=len(table.fed_cell) - 1)
        end = max(int(device_table.slots.end[a:b].max(initial=0)) for a, b in zip(self.start, self.stop, strict=True))

        # For a single image, the index has one dimension, because writing the cache is then faster.
        index_on_device = to_device(index[0] if len(index) == 1 else index, self.tokens.device)

        predicted_by = table.cell_row[self.entries] - table.row_start[self.start][:, None]
        predicted_by = predicted_by.clip(min=0)  # padding is negative
        return device_table.rows_at(index_on_device, end), to_device(predicted_by, self.tokens.device)

    def first_uncertain(self, new: Tensor) -> np.ndarray:
        """For each image, the first pass that is not certain after a call, int64 [A]. The next window starts there. The
        host waits for the device.

        ``new``: the tokens that the call sampled for the cells of the windows, int64 [A, n].

        The first pass of a window is certain, because it read certain tokens only. If the new tokens of a certain pass
        are all identical to the guesses, the next pass read the same tokens as in serial decoding. The next pass also
        used the same noise as in serial decoding, so it is certain too. The certain passes end with the first pass in
        which a token changed. The change makes only the passes after that pass uncertain.

        A window therefore moves by at least one pass, so no image needs more calls than serial decoding needs passes.
        """
        table = self.table
        unchanged = new == self.tokens.gather(1, self.cells)
        unchanged_count = unchanged.cumprod(1).sum(1).cpu().numpy()  # number of tokens before the first changed token

        first = table.cell_start[self.start]
        last = table.cell_start[self.stop] - 1
        return table.cell_pass[np.minimum(first + unchanged_count, last)] + 1

    def verdict(self, new: Tensor, new_start: np.ndarray, call: int) -> Verdict:
        """The cells that become certain in this ``call``, with their ``new`` tokens. The first pass of a window read no
        guesses, so the outcome of its cells is PLAIN. The outcome of all other cells is ACCEPTED.

        ``new``: as for :meth:`first_uncertain`. ``new_start``: the result of :meth:`first_uncertain`.
        """
        table = self.table

        # 1. The m cells that become certain: the two indices of each cell in ``entries``, int64 [m]. In the table, the
        #    pass of padding comes after all passes, so padding never becomes certain.
        image, column = np.nonzero(table.cell_pass[self.entries] < new_start[:, None])

        # 2. What the host knows about these cells.
        entry = self.entries[image, column]
        cell = table.cells[entry]
        image_in_batch = self.active[image]
        needed_guess = table.cell_pass[entry] > self.start[image]
        outcome = np.where(needed_guess, ACCEPTED, PLAIN)

        # 3. One copy moves all five arrays to the device, where the new tokens are.
        host = np.stack([image, column, image_in_batch, cell, outcome])
        d_image, d_column, d_image_in_batch, d_cell, d_outcome = to_device(host, self.tokens.device).unbind()
        values = new[d_image, d_column]
        return Verdict((d_image_in_batch, d_cell), values, call, d_outcome.to(torch.uint8))

    def move(self, new: Tensor, new_start: np.ndarray) -> None:
        """Store the ``new`` tokens, and let the windows begin with the passes ``new_start``. For both arguments see
        :meth:`verdict`. The first guess for a cell that enters a window is a copy of the newest token. The newest token
        is the token of the last cell that the window had before the move.
        """
        table = self.table
        self.tokens.scatter_(1, self.cells, new)
        # The index of the window's last cell among the cells of the window; -1 if an image is finished.
        last = table.cell_start[self.stop] - 1 - table.cell_start[self.start]
        newest = new.gather(1, to_device(last.clip(min=0)[:, None], self.tokens.device))

        stop_before = self.stop
        self._set_start(new_start)
        entering = table.cells[self._entries(stop_before, self.stop)]
        _fill_with_newest(self.tokens, to_device(entering, self.tokens.device), newest)

    def keep(self, remaining: np.ndarray) -> None:
        """Keep only some images. ``remaining``: the indices of these images among the images so far, int64 [A]."""
        self.active = self.active[remaining]
        self.tokens = self.tokens[to_device(remaining, self.tokens.device)]
        self._set_start(self.start[remaining])


class WindowGuidance:
    """Decides to which cells of a window guidance is applied. Guidance may apply to some passes of a window only.

    Args:
        table: the fed rows and cells of the schedule.
        guided: for each pass, whether guidance is applied to its cells.
        to_the_end: whether every call feeds the null branch, provided that at least one pass is guided. If False, calls
            feed it only until all guided passes are certain.
    """

    def __init__(self, table: ScheduleTable, guided: Sequence[bool], to_the_end: bool):
        self.guided_by_cell = np.array([*guided, False])[table.cell_pass]  # bool [D + 1], D as in ScheduleTable
        self.all_guided = all(guided)
        self.last_guided = last_guided_pass(guided)
        self.always_reads_null = to_the_end and any(guided)

    def reads_null(self, window: Window) -> bool:
        """Whether the call that computes a window feeds the null branch."""
        return self.always_reads_null or window.certain <= self.last_guided

    def at(self, window: Window) -> Guidance:
        """The cells of a window to which guidance is applied."""
        reads_null = self.reads_null(window)
        if self.all_guided or not reads_null:
            return Guidance(applies=reads_null)
        return Guidance(applies=True, per_token=to_device(self.guided_by_cell[window.entries], window.tokens.device))


def ranges(begin: np.ndarray, end: np.ndarray, padding: int) -> np.ndarray:
    """For each image, the numbers from ``begin`` to ``end`` - 1, int64 [A, n]. ``begin``, ``end``: int64 [A]. n is the
    largest count of any image. For images with fewer numbers, ``padding`` follows.
    """
    numbers = begin[:, None] + np.arange((end - begin).max())
    return np.where(numbers < end[:, None], numbers, padding)


def _fill_with_newest(tokens: Tensor, cells: Tensor, newest: Tensor) -> None:
    """Set all ``cells`` of each image, int64 [A, n], to the image's ``newest`` token, int64 [A, 1]."""
    tokens.scatter_(1, cells, newest.expand(-1, cells.shape[1]))


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
            hint = f"{width} rounds differently from 0 and from the values 1 to {side}, which all give the same image"
        canvas.report.remark(
            f"parallel in {dtype_of(net)}: {hint}; in fp32, all values of parallel give the same image"
        )


def padded_row_count(schedule: Schedule, width: int) -> int:
    """Number of rows per image to which every call is padded if the weights are in 16 bits. No call feeds more rows. No
    call samples more cells either, because no row predicts two cells.

    The number is the same for all values of ``width`` up to the side of the image in tokens.
    """
    table = schedule_table(schedule)
    stop = np.minimum(np.arange(table.passes) + max(width, schedule.grid), table.passes)
    rows = (table.row_start[stop] - table.row_start[:-1]).max()
    return ROWS * math.ceil(rows / ROWS)
