"""Exact parallel decoding: Jacobi iteration on a window of passes, with the draws of serial decoding.

Sources: Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding" (ACL 2023,
arXiv 2305.10427), and Teng et al. 2025, "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding" (ICLR 2025, arXiv 2410.01699). There, a probabilistic test accepts tokens, and the images
are other ones than those of serial decoding. Here the random numbers belong to (seed, image, cell, value), so that a
token is a function of its logits: the fixed point of the iteration is the image of serial decoding itself, and no test
is needed.

In 16 bits a token is the same function of its input only if its pass has the same shape, because the shape decides
the order of the sums. Every call is then padded to one shape (``one_shape`` in ``networks/llama.py``), so that windows
of all widths from 1 to the side of the image draw the same image. Wider ones and serial decoding have other shapes, and
draw other images of the same distribution. ``docs/weights.md`` counts equal images.

A call evaluates the W passes from the first one that is not certain (equal to serial decoding's), in every image.
Images advance independently. The host reads their positions after each call, and waits for the device there only. Here
L is the number of images that are still in the batch, not of cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...model_loaders.networks.llama import is_16_bit
from ...reports.record import ACCEPTED, dtype_of
from ..device import to_device
from ..engine import Sampler
from .cache_slots import table_of
from .canvas import TokenCanvas
from .looks import CachedTransformer, DeviceTable, FedRows, ScheduleLook, chosen_rows
from .sampling import TokenDraw
from .schedule import Schedule

# On a CPU, batches of this size and more gain little or nothing from a window.
_CPU_BATCH = 4
# The rows of an image in a call of 16-bit weights are a multiple of this.
ROWS = 32


def iterate(
    canvas: TokenCanvas,
    look: CachedTransformer,
    draw: TokenDraw,
    schedule: Schedule,
    width: int,
    shrink: bool = True,
) -> Iterator[tuple[int, int]]:
    """The passes after the first one by Jacobi iteration with a window of W = ``width`` passes. Yields, after every
    call, how many passes are certain in all images, and how many cells the call drew.

    Args:
        canvas: holds the cells of the first pass and the known ones, and receives certain tokens and guesses.
        look: with a cache of at least ``table_of(schedule).slots`` image slots.
        draw: of all images.
        schedule: the passes.
        shrink: whether finished images leave the batch and the cache.
    """
    passes = len(schedule.passes)
    host = table_of(schedule)
    table = DeviceTable(host, look.cache.prefix, canvas.device)
    guided = draw.guided_by_pass
    last_guided = max((k for k, is_guided in enumerate(guided) if is_guided), default=-1)
    guided_by_cell = to_device(np.array([*guided, False])[host.cell_pass], canvas.device)

    # Guesses start as copies of the newest token.
    window = Window(table, width, canvas.images)
    tokens = canvas.values
    decided = schedule.passes[0].cells or range(schedule.known)  # a later block of MuLo-SD has an empty first pass
    _guess(tokens, window.cells_from(window.start), tokens[:, decided[-1], None].clone())

    call = 0
    while window.start_on_host.min() < passes:
        call += 1
        drawn = window.drawn_cells()
        cells = drawn.cells

        # 1. Feed the rows of the W passes at once, with the tokens so far: certain ones and guesses. Every row attends
        #    to the slots that it attends to in its own serial pass. Keys and values replace those of the last call.

        # The null rows are left out behind the last guided pass, but not of calls that all have one shape.
        has_one_shape = look.padded_to > 0
        null = any(guided) and (has_one_shape or int(window.start_on_host.min()) <= last_guided)
        with canvas.clock.phase(canvas.phases[0]):
            rows, predicted_by = window.fed_rows(drawn)
            hidden = chosen_rows(look.feed(tokens, rows, null), predicted_by)

        # 2. Draw the cells of the W passes, from the same noise in every call.
        with canvas.clock.phase(canvas.phases[1]):
            new = draw.tokens(hidden, null and (all(guided) or guided_by_cell[drawn.cell_index]), cells, tokens)

        # 3. The passes whose tokens agree with those that were fed are certain.
        before = window.start
        _slide(window, tokens, drawn, new)
        _commit(canvas, window, tokens, before, call)

        # 4. Drop finished images.
        left = np.flatnonzero(window.start_on_host < passes)
        if shrink and not has_one_shape and 0 < len(left) < len(window.images):
            at = to_device(left, canvas.device)
            look.keep(at, len(window.images))
            draw = draw.of(left)
            tokens = tokens[at]
            window.keep(left, at)
        yield int(window.start_on_host.min()), drawn.size


class DrawnCells(NamedTuple):
    """The cells that a call draws, int64 [L, n] of L images; padded."""

    cell_index: Tensor  # their indices in the table's arrays by cell
    cells: Tensor  # their numbers in the grid
    inside: Tensor  # bool [L, n], False on padding
    size: int  # without padding


class Window:
    """For each of the L images still in the batch, the W passes (fewer at the end) from its first pass that is not
    certain.

    Where it starts is needed on the host, for the shapes of a call, and on the device, for its numbers.
    """

    def __init__(self, table: DeviceTable, width: int, images: int):
        self.table = table
        self.width = width

        self.images = np.arange(images)  # int64 [L], their indices in the batch
        # The first pass of each that is not certain, int64 [L], on the host and on the device.
        self.start_on_host = np.ones(images, np.int64)
        self.start = to_device(self.start_on_host, table.cells.device)

        # A window slides by W passes at most. The most cells that W passes anywhere decide: an upper bound of the cells
        # that enter.
        t = table.host
        ends = np.minimum(np.arange(t.passes) + width, t.passes)
        self.most_entering = int((t.cell_start[ends] - t.cell_start[:-1]).max())

    @property
    def stop(self) -> Tensor:
        """The pass behind the last one of each image, int64 [L]."""
        return (self.start + self.width).clamp(max=self.table.host.passes)

    @property
    def stop_on_host(self) -> np.ndarray:
        """The same on the host."""
        return np.minimum(self.start_on_host + self.width, self.table.host.passes)

    def drawn_cells(self) -> DrawnCells:
        """The cells of the W passes."""
        t = self.table.host
        counts = t.cell_start[self.stop_on_host] - t.cell_start[self.start_on_host]

        most = int(counts.max())
        cell_index, inside = ranges(self.table.cell_start, self.start, self.stop, most, len(t.cells) - 1)
        return DrawnCells(cell_index, self.table.cells[cell_index], inside, int(counts.sum()))

    def fed_rows(self, drawn: DrawnCells) -> tuple[FedRows, Tensor]:
        """The rows that are fed, and which of them predicts each of the ``drawn`` cells, int64 [L, n]."""
        t = self.table.host
        stop = self.stop_on_host
        most = int((t.row_start[stop] - t.row_start[self.start_on_host]).max())
        end = 0
        for a, b in zip(self.start_on_host, stop, strict=True):
            end = max(end, int(t.end[a:b].max(initial=0)))

        row_index, _ = ranges(self.table.row_start, self.start, self.stop, most, len(t.fed) - 1)
        # A single image's slots are one-dimensional, which is written faster.
        rows = self.table.fed_rows(row_index[0] if len(row_index) == 1 else row_index, self.table.prefix + end)

        first_row = self.table.row_start[self.start][:, None]
        return rows, (self.table.cell_row[drawn.cell_index] - first_row).clamp(min=0)

    def cells_from(self, first: Tensor) -> Tensor:
        """The cells int64 [L, n] of the W passes from ``first`` on, int64 [L]; padded. Those behind a window are the
        cells that may enter it when it slides, by W passes at most.
        """
        t = self.table.host
        behind = (first + self.width).clamp(max=t.passes)
        cell_index, _ = ranges(self.table.cell_start, first, behind, self.most_entering, len(t.cells) - 1)
        return self.table.cells[cell_index]

    def slide(self, agreeing: Tensor) -> None:
        """Move every image behind the pass of its first cell that changed: that pass was fed certain tokens, so that
        its new ones are certain too.

        The first ``agreeing`` int64 [L] cells did not change. The host waits for the device.
        """
        first_cell = self.table.cell_start[self.start]
        last_in_window = self.table.cell_start[self.stop] - 1
        self.start = self.table.cell_pass[torch.minimum(first_cell + agreeing, last_in_window)] + 1
        self.start_on_host = self.start.cpu().numpy()

    def keep(self, left: np.ndarray, on_device: Tensor) -> None:
        """Only some of the images, by their indices in the window, int64 [L]."""
        self.images = self.images[left]
        self.start_on_host = self.start_on_host[left]
        self.start = self.start[on_device]


def ranges(starts: Tensor, first: Tensor, stop: Tensor, count: int, padding: int) -> tuple[Tensor, Tensor]:
    """Numbers of the rows or cells of the passes ``first`` to ``stop`` - 1 of every image.

    Args:
        starts: int64 [P + 1], first row or cell of each pass.
        first, stop: int64 [L].
        count: the most that an image has, n.
        padding: number in place of those that an image has not.

    Returns int64 [L, n], and bool [L, n], False on padding.
    """
    begin = starts[first][:, None]
    end = starts[stop][:, None]
    index = begin + torch.arange(count, device=starts.device)
    inside = index < end
    return torch.where(inside, index, padding), inside


def _slide(window: Window, tokens: Tensor, drawn: DrawnCells, new: Tensor) -> None:
    """Take over the ``new`` tokens int64 [L, n] of the ``drawn`` cells, and slide the windows to the first passes that
    are not certain. The host waits for the device.
    """
    # 1. Count the agreeing prefix. The first pass is certain, because its input is. If no token of a certain pass
    #    changed, the next pass was fed what serial decoding feeds, and from the same noise drew the same: it is certain
    #    too, and so on. Every pass that is reached in this way equals the serial one.
    unchanged = (new == tokens.gather(1, drawn.cells)) | ~drawn.inside
    agreeing = unchanged.cumprod(1).sum(1)
    tokens.scatter_(1, drawn.cells, new)

    # 2. Slide every image's window behind the pass of its first changed cell, whose input was certain: by one pass at
    #    least, so that no image takes more calls than serially. Tokens that enter start as a copy of the newest one;
    #    they are set first, while window.stop is the old one.
    last = (drawn.inside.sum(1, keepdim=True) - 1).clamp(min=0)
    _guess(tokens, window.cells_from(window.stop), new.gather(1, last))
    window.slide(agreeing)


def _guess(tokens: Tensor, cells: Tensor, newest: Tensor) -> None:
    """Set cells int64 [L, n] to a token int64 [L, 1]."""
    tokens.scatter_(1, cells, newest.expand(-1, cells.shape[1]))


def _commit(canvas: TokenCanvas, window: Window, tokens: Tensor, before: Tensor, call: int) -> None:
    """Write the tokens of the images in a window to the canvas. Cells that became certain in this call are decided.
    Those of pass ``before`` int64 [L], where the window started, needed no guess.
    """
    at = to_device(window.images, canvas.device)
    if tokens is not canvas.values:
        canvas.values.index_copy_(0, at, tokens)

    decided_at = window.table.decided_at
    fixed_at = canvas.fixed_at[at]
    certain = (decided_at < window.start[:, None]) & (fixed_at < 0)
    guessed = certain & (decided_at > before[:, None])
    canvas.fixed_at.index_copy_(0, at, fixed_at.masked_fill(certain, call))
    canvas.outcome.index_copy_(0, at, canvas.outcome[at].masked_fill(guessed, ACCEPTED))


@torch.inference_mode()
def decode_in_windows(canvas: TokenCanvas, look: ScheduleLook, draw: TokenDraw, width: int) -> Sampler:
    """Decode a schedule in windows; yields steps after the prefill and after each call.

    ``done`` of a step counts the certain cells of the image that has the fewest, and ``total`` the cells; guesses count
    as undecided. The report also counts the guesses that a call accepted and those that it drew but did not accept. Map
    "step" is the call that made a cell certain, "outcome" whether that needed a guess (ACCEPTED) or not.
    """
    schedule = look.schedule
    t = table_of(schedule)
    canvas.total = canvas.cells
    if is_16_bit(canvas.model.net):
        look.padded_to = padded_rows(schedule, width)
        draw.how = draw.how._replace(padded_to=look.padded_to)
    _remark(canvas, schedule, width)

    # 1. Prefill, which predicts the cells of the first pass.
    first = to_device(np.array(schedule.passes[0].cells, np.int64), canvas.device)
    with canvas.clock.phase(canvas.phases[0]):
        hidden = look.prefill(any(draw.guided_by_pass), t.slots)
    with canvas.clock.phase(canvas.phases[1]):
        hidden = hidden.expand(-1, len(first), -1)
        canvas.decide(first, draw.tokens(hidden, draw.guided_by_pass[0], first, canvas.values), 0)
    yield from canvas.show(len(first))

    # 2. The other passes, in windows.
    drawn = 0
    for certain, cells in iterate(canvas, look, draw, schedule, width):
        drawn += cells
        yield from canvas.show(int(t.cell_start[certain]))

    # 3. Of all cells that the calls drew, each became certain once; the others were drawn in vain.
    in_vain = drawn - canvas.images * (canvas.cells - len(first))
    accepted = int((canvas.outcome == ACCEPTED).sum().cpu().numpy())
    canvas.report.add(accepted=accepted, rejected=in_vain)
    return canvas.finish()


def _remark(canvas: TokenCanvas, schedule: Schedule, width: int) -> None:
    """Tell in the report what a window costs here, and which settings draw the same image."""
    net = canvas.model.net
    side = schedule.grid

    if canvas.device.type == "cpu" and canvas.images >= _CPU_BATCH:
        canvas.report.remark(
            f"parallel: it computes about 4 times as many rows; on a CPU with {_CPU_BATCH} or more images, compare the "
            "time with 0."
        )

    if is_16_bit(net):
        hint = f"every value from 1 to {side} draws this image, 0 rounds differently"
        if padded_rows(schedule, width) > padded_rows(schedule, side):
            hint = f"{width} rounds differently from 0, and from 1 to {side}, which draw one image"
        canvas.report.remark(f"parallel in {dtype_of(net)}: {hint}; in fp32 all draw one image.")


def padded_rows(schedule: Schedule, width: int) -> int:
    """Fed rows of an image in the calls of a window of 16-bit weights; no call has more rows or cells.

    They are the same for all windows that are not wider than the side of the image.
    """
    t = table_of(schedule)
    stop = np.minimum(np.arange(t.passes) + max(width, schedule.grid), t.passes)
    rows = (t.row_start[stop] - t.row_start[:-1]).max()
    cells = (t.cell_start[stop] - t.cell_start[:-1]).max()
    return ROWS * math.ceil(max(rows, cells) / ROWS)
