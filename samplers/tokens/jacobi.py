"""Exact parallel decoding: Jacobi iteration on a window of passes, with the noise of serial decoding.

Sources: Santilli et al. 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding" (ACL 2023,
arXiv 2305.10427), and Teng et al. 2025, "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding" (ICLR 2025, arXiv 2410.01699). In the second paper, a probabilistic test accepts tokens,
and the images differ from the images of serial decoding. Here the random numbers belong to (seed, image, cell, value),
so a token is a function of its logits. The fixed point of the iteration is then the image of serial decoding itself,
and no test is needed.

In 16 bits a token is the same function of its input only if its pass has the same shape, because the shape decides
the order of the sums. Every call is then padded to one shape (``one_shape`` in ``networks/llama.py``), so windows of
all widths from 1 to the side of the image generate the same image. Wider windows and serial decoding have different
shapes, and generate different images of the same distribution. ``docs/weights.md`` counts equal images.

A pass of an image is *certain* if its tokens equal those of serial decoding. A call evaluates, in every image, W passes
from the first one that is not certain. Images advance independently (:class:`Window`). The host reads their progress
after each call, and waits for the device only there. A is the number of *active* images, which are still in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...networks.llama import is_16_bit
from ...networks.torch_state import to_device
from ...reports.record import ACCEPTED, PLAIN, dtype_of
from ..engine import Sampler, Verdict
from .cache_slots import Table, window_table
from .canvas import TokenCanvas
from .looks import CachedTransformer, DeviceTable, FedRows, chosen_rows, last_guided
from .sampling import Guidance, TokenDraw
from .schedule import Schedule

# On a CPU, batches of this size and more gain little or nothing from a window.
_CPU_BATCH = 4
# With 16-bit weights, the number of rows that a call feeds for an image is a multiple of this.
ROWS = 32


@torch.inference_mode()
def decode_in_windows(
    canvas: TokenCanvas, transformer: CachedTransformer, draw: TokenDraw, schedule: Schedule, width: int
) -> Sampler:
    """Decode a schedule in windows of ``width`` passes; yields steps after the prefill and after each call.

    ``done`` of a step counts the certain cells of the image that has the fewest, and ``total`` the cells; guesses count
    as undecided. The report also counts the guesses that calls accepted, and the samples that no call accepted. Map
    "step" is the call that made a cell certain, "outcome" whether that needed a guess (ACCEPTED) or not.
    """
    t = window_table(schedule)
    canvas.total = canvas.cells
    _remark(canvas, schedule, width)

    # 1. Prefill, which predicts the cells of the first pass.
    first = to_device(np.array(schedule.passes[0].cells, np.int64), canvas.device)
    with canvas.clock.phase(canvas.phases[0]):
        hidden = transformer.prefill(any(draw.guided_by_pass), t.slots)
    with canvas.clock.phase(canvas.phases[1]):
        canvas.decide(first, draw(0, first, hidden.expand(-1, len(first), -1)), 0)
    yield from canvas.show(len(first))

    # 2. The other passes, in windows.
    sampled = 0
    for certain, count in iterate(canvas, transformer, draw, schedule, width):
        sampled += count
        yield from canvas.show(int(t.cell_start[certain]))

    # 3. Each cell became certain once; all further samples were in vain.
    in_vain = sampled - canvas.images * (canvas.cells - len(first))
    accepted = int((canvas.outcome == ACCEPTED).sum().cpu().numpy())
    canvas.report.add(accepted=accepted, rejected=in_vain)
    return canvas.finish()


def iterate(
    canvas: TokenCanvas,
    transformer: CachedTransformer,
    draw: TokenDraw,
    schedule: Schedule,
    width: int,
    shrink: bool = True,
) -> Iterator[tuple[int, int]]:
    """Decide the passes after the first one by Jacobi iteration with a window of W = ``width`` passes. Yields, after
    every call, how many passes are certain in all images, and how many cells the call sampled.

    Args:
        canvas: holds the tokens of the first pass and of the schedule's known cells, and receives certain tokens.
        transformer: its cache has at least ``window_table(schedule).slots`` image slots.
        draw: the draw for all images.
        schedule: the passes.
        shrink: whether finished images leave the batch and the cache.
    """
    passes = len(schedule.passes)
    table = DeviceTable(window_table(schedule), transformer.cache.prefix, canvas.device)

    # If all calls must have one shape, they keep the null branch and all images to the end.
    has_one_shape = transformer.padded_to > 0
    guiding = WindowGuidance(table.host, draw.guided_by_pass, to_the_end=has_one_shape)
    may_shrink = shrink and not has_one_shape

    window = Window(canvas, schedule, width)
    call = 0
    while window.certain < passes:
        call += 1
        sampled = window.size

        # 1. Guidance, which decides whether the null branch is fed too.
        guidance = guiding.at(window)

        # 2. Feed the rows of the W passes at once, with the tokens so far, both certain tokens and guesses. Every row
        #    attends to the slots that it attends to in its own serial pass. Its keys and values replace those of the
        #    previous call.
        with canvas.clock.phase(canvas.phases[0]):
            rows, predicted_by = window.rows(table)
            hidden = chosen_rows(transformer.feed(window.tokens, rows, guidance.applies), predicted_by)

        # 3. Sample the cells of the W passes, from the same noise in every call.
        with canvas.clock.phase(canvas.phases[1]):
            new = draw.tokens(hidden, guidance, window.cells, window.tokens)

        # 4. The passes up to the first one whose tokens differ from the guesses are certain.
        start = window.first_uncertain(new)
        canvas.decide(*window.verdict(new, start, call))

        # 5. The windows move on. Their new tokens are the guesses of the next call.
        window.move(new, start)

        # 6. Finished images leave the batch.
        left = np.flatnonzero(window.start < passes)
        if may_shrink and 0 < len(left) < len(window.images):
            transformer.keep(to_device(left, canvas.device), len(window.images))
            draw = draw.of(left)
            window.keep(left)
        yield window.certain, sampled


class Window:
    """The tokens of the A active images, and for each image the W passes (fewer at the end) that the next
    call evaluates::

        pass     0  1  2  3  4  5  6  7  8  9        W = 4
        tokens   certain |  guesses  |  none yet
                         start       stop

    - The tokens of the passes before ``start`` are certain.
    - The tokens of the passes from ``start`` to before ``stop`` are guesses: of earlier calls, or copies of the newest
      token. Pass ``start`` reads certain tokens only, so the tokens that the next call samples for it are certain.
    - The tokens of later passes are not read.

    Only :meth:`move` changes tokens and moves windows. The places of the windows are known on the host; the tokens are
    on the device.

    Attributes:
        images: the images' indices in the batch, int64 [A].
        tokens: the tokens of the images, int64 [A, L + 1].
        start: for each image the first pass that is not certain, int64 [A].
        stop: for each image the first pass after its window, int64 [A].
        entries: the entries of the windows' n cells in the arrays of :class:`.Table`, int64 [A, n]. They are in the
            order of the passes; images with fewer cells have padding at the end.
        cells: these cells, int64 [A, n] on the device.
    """

    def __init__(self, canvas: TokenCanvas, schedule: Schedule, width: int):
        self.table = window_table(schedule)
        self.width = width
        self.images = np.arange(canvas.images)
        self.tokens = canvas.values.clone()
        self._set_start(np.ones(canvas.images, np.int64))

        # Guesses start as copies of the newest token. A later block of MuLo-SD has an empty first pass.
        decided = schedule.passes[0].cells or range(schedule.known)
        _guess(self.tokens, self.cells, self.tokens[:, decided[-1], None].clone())

    def _set_start(self, start: np.ndarray) -> None:
        """Let the windows begin with the passes ``start``, int64 [A]. ``stop``, ``entries`` and ``cells`` follow from
        them and from the width of the windows.
        """
        t = self.table
        self.start = start
        self.stop = np.minimum(start + self.width, t.passes)
        self.entries = self._entries(self.start, self.stop)
        self.cells = to_device(t.cells[self.entries], self.tokens.device)

    def _entries(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """The table's entries of the cells of the passes from ``begin`` to before ``end``, int64 [A, n]; ``begin`` and
        ``end``: int64 [A].
        """
        t = self.table
        return ranges(t.cell_start[begin], t.cell_start[end], padding=len(t.cells) - 1)

    @property
    def certain(self) -> int:
        """Passes that are certain in all images."""
        return int(self.start.min())

    @property
    def size(self) -> int:
        """Cells of all images that the next call samples."""
        return int((self.table.cell_start[self.stop] - self.table.cell_start[self.start]).sum())

    def rows(self, device_table: DeviceTable) -> tuple[FedRows, Tensor]:
        """The rows that the W passes feed, and which of them predicts each cell, int64 [A, n]."""
        t = self.table
        index = ranges(t.row_start[self.start], t.row_start[self.stop], padding=len(t.fed) - 1)
        end = max(int(t.end[a:b].max(initial=0)) for a, b in zip(self.start, self.stop, strict=True))

        # A single image's slots are one-dimensional, which is written faster.
        index_on_device = to_device(index[0] if len(index) == 1 else index, self.tokens.device)

        predicted_by = t.cell_row[self.entries] - t.row_start[self.start][:, None]
        predicted_by = predicted_by.clip(min=0)  # padding
        return device_table.rows_at(index_on_device, end), to_device(predicted_by, self.tokens.device)

    def first_uncertain(self, new: Tensor) -> np.ndarray:
        """For each image the first pass that is not certain after a call has sampled the ``new`` tokens of the cells,
        int64 [A, n]; the result is int64 [A]. The host waits for the device.

        The first pass of a window is certain, because its input is. If no token of a certain pass changed, the next
        pass was fed what serial decoding feeds, and sampled the same tokens from the same noise. So it is certain too,
        and so on. Every pass that is reached in this way equals the serial one.

        The pass of the first changed cell had a certain input, so its new tokens are certain too. A window therefore
        moves by one pass at least, and no image takes more calls than in serial decoding.
        """
        t = self.table
        unchanged = new == self.tokens.gather(1, self.cells)
        agreeing = unchanged.cumprod(1).sum(1).cpu().numpy()  # tokens before the first changed one

        first = t.cell_start[self.start]
        last = t.cell_start[self.stop] - 1
        return t.cell_pass[np.minimum(first + agreeing, last)] + 1

    def verdict(self, new: Tensor, start: np.ndarray, call: int) -> Verdict:
        """The cells that become certain in this ``call``, with their ``new`` tokens. The outcome is PLAIN for cells of
        the window's first pass, which needed no guess, and ACCEPTED for all others.

        ``new``: as for :meth:`first_uncertain`, whose result is ``start``.
        """
        t = self.table

        # 1. The m certain cells, int64 [m] each: the index of the image in the window, and of the cell among the n
        #    cells of the image. Padding belongs to a pass after all others.
        image, column = np.nonzero(t.cell_pass[self.entries] < start[:, None])

        # 2. What is known of these cells on the host.
        entry = self.entries[image, column]
        cell = t.cells[entry]
        image_in_batch = self.images[image]
        needed_guess = t.cell_pass[entry] > self.start[image]
        outcome = np.where(needed_guess, ACCEPTED, PLAIN)

        # 3. The new tokens are on the device, where one copy takes all of this.
        host = np.stack([image, column, image_in_batch, cell, outcome])
        d_image, d_column, d_image_in_batch, d_cell, d_outcome = to_device(host, self.tokens.device).unbind()
        values = new[d_image, d_column]
        return Verdict((d_image_in_batch, d_cell), values, call, d_outcome.to(torch.uint8))

    def move(self, new: Tensor, start: np.ndarray) -> None:
        """Take over the ``new`` tokens, and let the windows begin with the passes ``start``; both as for
        :meth:`verdict`. Cells that enter a window start as copies of its newest token.
        """
        t = self.table
        self.tokens.scatter_(1, self.cells, new)
        last = t.cell_start[self.stop] - 1 - t.cell_start[self.start]  # index of a window's last cell, int64 [A]
        newest = new.gather(1, to_device(last.clip(min=0)[:, None], self.tokens.device))

        stop_before = self.stop
        self._set_start(start)
        entering = t.cells[self._entries(stop_before, self.stop)]
        _guess(self.tokens, to_device(entering, self.tokens.device), newest)

    def keep(self, left: np.ndarray) -> None:
        """Keep only some of the images. ``left``: their indices in the window, int64 [A]."""
        self.images = self.images[left]
        self.tokens = self.tokens[to_device(left, self.tokens.device)]
        self._set_start(self.start[left])


class WindowGuidance:
    """Where guidance is applied in a window, whose passes may differ in it.

    Args:
        table: the fed rows and cells of the schedule.
        guided: whether guidance is applied, for each pass.
        to_the_end: whether every call reads the null branch if some pass is guided; otherwise no call reads it once
            all guided passes are certain.
    """

    def __init__(self, table: Table, guided: Sequence[bool], to_the_end: bool):
        self.guided_by_cell = np.array([*guided, False])[table.cell_pass]  # bool [D + 1], see Table
        self.all_guided = all(guided)
        self.last_guided = last_guided(guided)
        self.keeps_null = to_the_end and any(guided)

    def at(self, window: Window) -> Guidance:
        """The guidance of the cells of a window; it applies if the call reads the null branch."""
        reads_null = self.keeps_null or window.certain <= self.last_guided
        if self.all_guided or not reads_null:
            return Guidance(reads_null)
        return Guidance(reads_null, to_device(self.guided_by_cell[window.entries], window.tokens.device))


def ranges(begin: np.ndarray, end: np.ndarray, padding: int) -> np.ndarray:
    """The numbers from ``begin`` to ``end`` - 1 for every image, int64 [A, n]. n is the largest count of an image;
    images with fewer numbers end with ``padding``. ``begin``, ``end``: int64 [A].
    """
    numbers = begin[:, None] + np.arange((end - begin).max())
    return np.where(numbers < end[:, None], numbers, padding)


def _guess(tokens: Tensor, cells: Tensor, newest: Tensor) -> None:
    """Set cells, int64 [A, n], to one token in each image, int64 [A, 1]."""
    tokens.scatter_(1, cells, newest.expand(-1, cells.shape[1]))


def _remark(canvas: TokenCanvas, schedule: Schedule, width: int) -> None:
    """Tell in the report what a window costs here, and which settings draw the same image."""
    net = canvas.model.net
    side = schedule.grid

    if canvas.device.type == "cpu" and canvas.images >= _CPU_BATCH:
        canvas.report.remark(
            f"parallel: this value computes about 4 times as many rows as 0 does; on a CPU with {_CPU_BATCH} or more "
            "images, also measure the time with parallel 0"
        )

    if is_16_bit(net):
        hint = f"the values 1 to {side} all give this image, but 0 rounds differently"
        if padded_rows(schedule, width) > padded_rows(schedule, side):
            hint = f"{width} rounds differently from 0 and from 1 to {side}; the values 1 to {side} all give one image"
        canvas.report.remark(
            f"parallel in {dtype_of(net)}: {hint}; in fp32, all values of parallel give the same image"
        )


def padded_rows(schedule: Schedule, width: int) -> int:
    """Number of rows to which every call is padded, per image, with 16-bit weights. No call has more rows than this. No
    call has more cells either, because each cell is predicted by its own row.

    The number is the same for all windows that are not wider than the side of the image.
    """
    t = window_table(schedule)
    stop = np.minimum(np.arange(t.passes) + max(width, schedule.grid), t.passes)
    rows = (t.row_start[stop] - t.row_start[:-1]).max()
    return ROWS * math.ceil(rows / ROWS)
