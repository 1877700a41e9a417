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
    """

    cell: np.ndarray  # the cell, int64 [A, n]; L for padding
    in_pass: np.ndarray  # the pass that decides the cell, int64 [A, n]; for padding, the number of all passes
    # The index of the fed row that predicts the cell, int64 [A, n], counted from the first fed row of the image's
    # passes; 0 for padding.
    predicted_by: np.ndarray
    cell_count: np.ndarray  # number of cells of each image, int64 [A]


def cells_of_passes(table: ScheduleTable, begin: np.ndarray, end: np.ndarray) -> WindowCells:
    """The cells that the passes from ``begin`` to ``end`` - 1 decide. ``begin``, ``end``: a pass of each image, int64
    [A].
    """
    padding = len(table.cells) - 1
    index = _ranges(table.cell_start[begin], table.cell_start[end], padding)  # in the cell arrays of the table
    first_row = table.row_start[begin][:, None]
    return WindowCells(
        cell=table.cells[index],
        in_pass=table.cell_pass[index],
        predicted_by=np.where(index == padding, 0, table.cell_row[index] - first_row),
        cell_count=table.cell_start[end] - table.cell_start[begin],
    )


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

    Only :meth:`move` moves windows and changes the tokens in them. The numbers ``start`` and ``stop`` are on the host,
    and the tokens are on the device.

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
        self._set_start(np.ones(canvas.images, np.int64))

        # The first guesses are copies of the newest token. If the first pass decides no cell, as in the later blocks of
        # MuLo-SD, the newest token is the token of the last known cell.
        decided = schedule.passes[0].cells or range(schedule.known)
        _fill_with_newest(self.tokens, self.cell_on_device, self.tokens[:, decided[-1], None].clone())

    def _set_start(self, new_start: np.ndarray) -> None:
        """Set ``start`` to ``new_start``, int64 [A], and set ``stop`` and the cells to match."""
        self.start = new_start
        self.stop = np.minimum(new_start + self.width, self.table.passes)
        self.cells = cells_of_passes(self.table, self.start, self.stop)
        self.cell_on_device = to_device(self.cells.cell, self.tokens.device)

    @property
    def certain(self) -> int:
        """Number of passes that are certain in all images."""
        return int(self.start.min())

    def fed_rows(self, device_table: DeviceTable) -> tuple[FedRows, Tensor]:
        """The fed rows of the next call, and for each cell, the index of the row that predicts it, int64 [A, n]."""
        table = self.table
        device = self.tokens.device
        index = _ranges(table.row_start[self.start], table.row_start[self.stop], padding=len(table.fed_cell) - 1)

        # The rows attend to slots below ``end``. A finished image has no passes, so its ends are an empty slice.
        ends_of_images = [device_table.slots.end[a:b] for a, b in zip(self.start, self.stop, strict=True)]
        end = int(np.concatenate(ends_of_images).max())

        # For a single image, the index has one dimension, because writing the cache is then faster.
        index_on_device = to_device(index[0] if len(index) == 1 else index, device)
        return device_table.rows_at(index_on_device, end), to_device(self.cells.predicted_by, device)

    def first_uncertain(self, new: Tensor) -> np.ndarray:
        """For each image, the first pass that is not certain after a call, int64 [A]. The next window starts there. The
        host waits for the device.

        ``new``: the tokens that the call sampled for the cells of the windows, int64 [A, n].

        The first pass of a window is certain, because it read certain tokens only. If the new tokens of a certain pass
        are all identical to the guesses, the next pass read the same tokens as in serial decoding. The next pass also
        used the same noise as in serial decoding, so it is certain too. The certain passes end with the first pass in
        which a token changed. The change makes only the passes after that pass uncertain.

        For example, a schedule has the passes 0 to 8, which decide one cell each, and W is 4. In image 0, the new token
        of pass 4 differs from the guess (x), so the passes 5 and 6 read a wrong token. The window of image 1 has only
        the last two passes; padding follows, with the pass 9::

                      in_pass    changed    first_changed  last_certain  result
            image 0   3 4 5 6    . x . x    4              4             5
            image 1   7 8 9 9    . . . .    9: none        8             9: finished

        A window moves by at least one pass, so no image needs more calls than serial decoding needs passes.
        """
        guesses = self.tokens.gather(1, self.cell_on_device)
        changed = (new != guesses).cpu().numpy()

        # If no token changed, first_changed is the number of all passes. Padding has this number as its pass, so it
        # does not matter whether padding changed.
        first_changed = np.where(changed, self.cells.in_pass, self.table.passes).min(axis=1)

        last_certain = np.minimum(first_changed, self.stop - 1)  # if no pass changed, the last pass of the window
        return last_certain + 1

    def counts(self, new_start: np.ndarray) -> tuple[int, int]:
        """The numbers of accepted and of rejected samples of a call, in all images together.

        A sample is accepted if its cell becomes certain in a pass that had read guesses. It is rejected if its cell
        does not become certain. The samples of a window's first pass are neither. ``new_start``: the result of
        :meth:`first_uncertain`.
        """
        is_certain, read_guesses = self._certain_cells(new_start)
        accepted = int((is_certain & read_guesses).sum())
        rejected = int(self.cells.cell_count.sum() - is_certain.sum())
        return accepted, rejected

    def verdict(self, new: Tensor, new_start: np.ndarray, call: int) -> Verdict:
        """The cells that become certain in this ``call``, with their ``new`` tokens. The first pass of a window read no
        guesses, so the outcome of its cells is PLAIN. The outcome of all other cells is ACCEPTED.

        ``new``: as for :meth:`first_uncertain`. ``new_start``: the result of :meth:`first_uncertain`.
        """
        # 1. The m cells that become certain: their images and their columns in the arrays [A, n], int64 [m] each.
        is_certain, read_guesses = self._certain_cells(new_start)
        certain_images, certain_columns = is_certain.nonzero()

        # 2. What the host knows about these cells, int64 [m] each. One copy moves all arrays to the device.
        on_host = [
            certain_images,
            certain_columns,
            self.active[certain_images],
            self.cells.cell[is_certain],
            np.where(read_guesses, ACCEPTED, PLAIN)[is_certain],
        ]
        image, column, image_on_canvas, cell, outcome = to_device(np.stack(on_host), self.tokens.device).unbind()

        # 3. The new tokens of these cells are on the device already.
        return Verdict((image_on_canvas, cell), new[image, column], call, outcome.to(torch.uint8))

    def _certain_cells(self, new_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which cells of the windows become certain, and which cells are in passes that had read guesses: all passes
        but the first one of a window. Bool [A, n] each.

        ``new_start``: the result of :meth:`first_uncertain`. No new start is after the pass of padding, so padding
        never becomes certain.
        """
        return self.cells.in_pass < new_start[:, None], self.cells.in_pass > self.start[:, None]

    def move(self, new: Tensor, new_start: np.ndarray) -> None:
        """Store the ``new`` tokens, and let the windows begin with the passes ``new_start``. For both arguments see
        :meth:`verdict`. The first guess for a cell that enters a window is a copy of the newest token. The newest token
        is the token of the last cell that the window had before the move.
        """
        table = self.table
        device = self.tokens.device

        # 1. Store the new tokens. The last cell of each window has the newest token.
        self.tokens.scatter_(1, self.cell_on_device, new)
        last_cell = table.cells[table.cell_start[self.stop] - 1]
        newest = self.tokens.gather(1, to_device(last_cell[:, None], device))

        # 2. Move the windows. The passes from stop_before to stop - 1 enter them. At the end of the schedule, both are
        #    the number of all passes, so no pass enters, and the cells are padding.
        stop_before = self.stop
        self._set_start(new_start)
        entering = cells_of_passes(table, stop_before, self.stop).cell

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
        self.guided_by_pass = np.array([*guided, False])  # the last entry is for padding
        self.null_may_leave = null_may_leave
        self.last_guided = last_guided_pass(guided)

    def reads_null(self, window: Window) -> bool:
        """Whether the call that computes a window feeds the null branch."""
        if self.null_may_leave:
            return window.certain <= self.last_guided
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
