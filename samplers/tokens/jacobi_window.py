"""The window of Jacobi decoding: the passes of each image that the next call computes, and their tokens.

``jacobi.py`` explains *calls*, *guesses* and *certain* passes, and runs the calls. Shapes: A active images of L cells
each; W passes in a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...networks.torch_state import to_device
from ...reports.record import ACCEPTED, PLAIN
from ..engine import Verdict
from .canvas import TokenCanvas
from .looks import DeviceTable, FedRows, last_guided_pass
from .sampling import Guidance
from .schedule import Schedule, ScheduleTable, schedule_table


class WindowCells(NamedTuple):
    """The cells that several successive passes decide, in the order of the passes. Each image has its own passes.

    The arrays are on the host. Each row is an image, and each column is one of its cells. n is the largest number of
    cells of an image. In an image with fewer cells, padding follows the cells. A finished image has padding only.

    ``in_pass`` of padding is the number of all passes, which is after every pass. So padding is never certain, is never
    the first change of an image (:meth:`Window.progress`), and is never guided (:class:`WindowGuidance`).
    """

    cell: np.ndarray  # the cell, int64 [A, n]; L for padding
    in_pass: np.ndarray  # the pass that decides the cell, int64 [A, n]; for padding, the number of all passes
    # The index of the fed row that predicts the cell, int64 [A, n], counted from the first fed row of these passes of
    # the image; 0 for padding.
    predicted_by: np.ndarray
    cell_count: np.ndarray  # number of cells of each image, int64 [A]


def cells_of_passes(table: ScheduleTable, begin: np.ndarray, end: np.ndarray) -> WindowCells:
    """The cells that the passes from ``begin`` to ``end`` - 1 decide. ``begin``, ``end``: a pass of each image, int64
    [A].
    """
    # Indices in the table's arrays of cells, int64 [A, n]. The last entry of these arrays is padding.
    padding = len(table.cells) - 1
    index = _ranges(table.cell_start[begin], table.cell_start[end], padding)
    first_row = table.row_start[begin][:, None]
    return WindowCells(
        cell=table.cells[index],
        in_pass=table.pass_of_cell[index],
        predicted_by=np.where(index == padding, 0, table.row_of_cell[index] - first_row),
        cell_count=table.cell_start[end] - table.cell_start[begin],
    )


class Progress(NamedTuple):
    """What a call of the transformer achieved in the windows of A images, see :meth:`Window.progress`."""

    new_start: np.ndarray  # for each image, the first pass that is not certain after the call, int64 [A]
    # Two masks for the cells of the windows, bool [A, n]:
    is_certain: np.ndarray  # the cell became certain in this call; False for padding
    read_guesses: np.ndarray  # the cell's pass read guesses: it is not the first pass of its window
    sample_count: int  # number of samples of the call, one for each cell of the windows; padding does not count

    @property
    def accepted(self) -> int:
        """Number of cells that became certain in a pass that had read guesses."""
        return int((self.is_certain & self.read_guesses).sum())

    @property
    def rejected(self) -> int:
        """Number of samples minus number of cells that became certain."""
        return self.sample_count - int(self.is_certain.sum())


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

    An image is *finished* when all its passes are certain. If it stays in the batch, its window has no passes: both
    ``start`` and ``stop`` are the number of all passes.

    After each call, :meth:`progress` finds out which passes became certain, :meth:`verdict` returns their cells, and
    :meth:`move` stores the new tokens and moves the windows. The numbers ``start`` and ``stop`` are on the host. The
    tokens are on the device.

    Attributes:
        active: for each active image, its index on the canvas, int64 [A].
        tokens: the tokens of the active images, int64 [A, L + 1], arranged as in :class:`.TokenCanvas`.
        start: for each image, the first pass that is not certain, int64 [A].
        stop: for each image, the first pass after its window, int64 [A].
        cells: the cells of the windows, see :class:`WindowCells`.
        cell_on_device: ``cells.cell``, int64 [A, n] on the device.
    """

    def __init__(self, canvas: TokenCanvas, schedule: Schedule, width: int):
        self.table = schedule_table(schedule)
        self.width = width
        self.active = np.arange(canvas.images)
        self.tokens = canvas.values.clone()
        self._set_start(np.ones(canvas.images, np.int64))  # pass 0 has run already, or is empty

        # The first guesses are copies of the newest token. If the first pass decides no cell, as in the later blocks of
        # MuLo-SD, the newest token is the token of the last known cell.
        decided = schedule.passes[0].cells or range(schedule.known)
        newest = self.tokens[:, decided[-1], None].clone()  # scatter_ may not read the tensor that it writes
        _fill_with_newest(self.tokens, self.cell_on_device, newest)

    def _set_start(self, new_start: np.ndarray) -> None:
        """Set ``start`` to ``new_start``, int64 [A], and set ``stop`` and the cells to match."""
        self.start = new_start
        self.stop = np.minimum(new_start + self.width, self.table.passes)
        self.cells = cells_of_passes(self.table, self.start, self.stop)
        self.cell_on_device = to_device(self.cells.cell, self.tokens.device)

    @property
    def certain_passes(self) -> int:
        """Number of passes that are certain in all images."""
        return int(self.start.min())

    def fed_rows(self, device_table: DeviceTable) -> tuple[FedRows, Tensor]:
        """The fed rows of the next call, and for each cell, the index of the row that predicts it, int64 [A, n]."""
        table = self.table
        device = self.tokens.device
        index = _ranges(table.row_start[self.start], table.row_start[self.stop], padding=len(table.fed_cell) - 1)

        # Each pass attends only to slots below its own end. The call's end is the largest of these ends, and a mask
        # hides the other slots from each pass. A finished image has no passes, so its ends are an empty slice.
        ends_of_images = [device_table.slots.end[a:b] for a, b in zip(self.start, self.stop, strict=True)]
        end = int(np.concatenate(ends_of_images).max())

        # For a single image, the index has one dimension, because writing the cache is then faster, see FedRows.
        index_on_device = to_device(index[0] if len(index) == 1 else index, device)
        return device_table.rows_at(index_on_device, end), to_device(self.cells.predicted_by, device)

    def progress(self, new: Tensor) -> Progress:
        """Find out what a call achieved. The host waits for the device.

        ``new``: the tokens that the call sampled for the cells of the windows, int64 [A, n].

        The first pass of a window is certain, because it read certain tokens only. If the new tokens of a certain pass
        are all identical to the guesses, the next pass read the same tokens as in serial decoding. The next pass also
        used the same noise as in serial decoding, so it is certain too. The certain passes end with the first pass in
        which a token changed. The change makes only the passes after that pass uncertain.

        For example, a schedule has the passes 0 to 8, which decide one cell each, and W is 4. In image 0, the new token
        of pass 4 differs from the guess (x), so the passes 5 and 6 read a wrong token. The window of image 1 has only
        the last two passes; padding follows, with the pass 9::

                      in_pass    changed    first_changed  last_certain  new_start
            image 0   3 4 5 6    . x . x    4              4             5
            image 1   7 8 9 9    . . . .    9: none        8             9: finished

        A window moves by at least one pass, so no image needs more calls than serial decoding needs passes.
        """
        in_pass = self.cells.in_pass
        guesses = self.tokens.gather(1, self.cell_on_device)
        changed = (new != guesses).cpu().numpy()

        # If no token changed, first_changed is the number of all passes. This is also the pass of padding.
        first_changed = np.where(changed, in_pass, self.table.passes).min(axis=1)

        last_certain = np.minimum(first_changed, self.stop - 1)  # if no token changed, the last pass of the window
        new_start = last_certain + 1
        return Progress(
            new_start=new_start,
            is_certain=in_pass < new_start[:, None],
            read_guesses=in_pass > self.start[:, None],
            sample_count=int(self.cells.cell_count.sum()),
        )

    def verdict(self, new: Tensor, progress: Progress, call: int) -> Verdict:
        """The cells that became certain in this ``call``, with their ``new`` tokens. The outcome of a cell is ACCEPTED
        if its pass had read guesses, and PLAIN otherwise.

        ``new``, ``progress``: the argument and the result of :meth:`progress`.
        """
        # 1. The m cells that became certain: their images and their columns in the arrays [A, n], int64 [m] each.
        is_certain = progress.is_certain
        certain_images, certain_columns = is_certain.nonzero()

        # 2. What the host knows about these cells, int64 [m] each. One copy moves all arrays to the device.
        on_host = [
            certain_images,
            certain_columns,
            self.active[certain_images],
            self.cells.cell[is_certain],
            np.where(progress.read_guesses, ACCEPTED, PLAIN)[is_certain],
        ]
        image, column, image_on_canvas, cell, outcome = to_device(np.stack(on_host), self.tokens.device).unbind()

        # 3. The new tokens of these cells are on the device already.
        return Verdict((image_on_canvas, cell), new[image, column], call, outcome.to(torch.uint8))

    def move(self, new: Tensor, progress: Progress) -> None:
        """Store the ``new`` tokens, and let each window begin with the first pass that is not certain. For the
        arguments see :meth:`verdict`.

        The first guess for a cell that enters a window is a copy of the newest token. The newest token is the token of
        the last cell that the window had before the move. For example, W is 4, and the ``start`` of an image moves from
        3 to 5. Then its ``stop`` moves from 7 to 9, so the cells of the passes 7 and 8 enter. They get the token of the
        last cell of pass 6.
        """
        table = self.table
        device = self.tokens.device
        old_stop = self.stop

        # 1. Store the new tokens. The last cell of each window has the newest token. The table's cells are in the order
        #    of the passes, so this cell is the last entry before the cells of pass old_stop.
        self.tokens.scatter_(1, self.cell_on_device, new)
        last_cell = table.cells[table.cell_start[old_stop] - 1]
        newest = self.tokens.gather(1, to_device(last_cell[:, None], device))

        # 2. Move the windows. The passes from old_stop to stop - 1 enter them. At the end of the schedule, both are the
        #    number of all passes, so no pass enters, and the cells are padding.
        self._set_start(progress.new_start)
        entering = cells_of_passes(table, old_stop, self.stop).cell

        # 3. Fill in the first guesses.
        _fill_with_newest(self.tokens, to_device(entering, device), newest)

    def keep(self, remaining: np.ndarray) -> None:
        """Keep only some images. ``remaining``: the indices of these images among the images so far, int64 [A]."""
        self.active = self.active[remaining]
        self.tokens = self.tokens[to_device(remaining, self.tokens.device)]
        self._set_start(self.start[remaining])


class WindowGuidance:
    """Decides to which cells of a window guidance is applied. Guidance may apply to some passes of a window only.

    Args:
        guided: for each pass, whether guidance is applied to its cells.
        null_may_leave: whether calls stop feeding the null branch when all guided passes are certain. If False, and if
            at least one pass is guided, every call feeds it.
    """

    def __init__(self, guided: Sequence[bool], null_may_leave: bool):
        self.guided_by_pass = np.array([*guided, False])  # the last entry is for padding, see WindowCells
        self.null_may_leave = null_may_leave
        self.last_guided = last_guided_pass(guided)

    def reads_null(self, window: Window) -> bool:
        """Whether the call that computes a window feeds the null branch."""
        if self.null_may_leave:
            return window.certain_passes <= self.last_guided
        return bool(self.guided_by_pass.any())

    def at(self, window: Window) -> Guidance:
        """The cells of a window to which guidance is applied."""
        if not self.reads_null(window):
            return Guidance(applies=False)
        if self.guided_by_pass[:-1].all():
            return Guidance(applies=True)
        guided_cells = self.guided_by_pass[window.cells.in_pass]  # bool [A, n]
        return Guidance(applies=True, per_token=to_device(guided_cells, window.tokens.device))


def _ranges(begin: np.ndarray, end: np.ndarray, padding: int) -> np.ndarray:
    """For each image, the numbers from ``begin`` to ``end`` - 1, int64 [A, n]. ``begin``, ``end``: int64 [A]. n is the
    largest count of any image. For images with fewer numbers, ``padding`` follows.
    """
    numbers = begin[:, None] + np.arange((end - begin).max())
    return np.where(numbers < end[:, None], numbers, padding)


def _fill_with_newest(tokens: Tensor, cells: Tensor, newest: Tensor) -> None:
    """Set all ``cells`` of each image, int64 [A, n], to the image's ``newest`` token, int64 [A, 1]."""
    tokens.scatter_(1, cells, newest.expand(-1, cells.shape[1]))
