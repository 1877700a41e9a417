"""The window of Jacobi decoding: the passes of each image that the next call computes, and their tokens.

``jacobi.py`` explains *calls*, *guesses* and *certain* passes, and runs the calls. Shapes: A active images of L cells
each; W passes in a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...networks.torch_state import to_device
from ...reports.record import ACCEPTED, PLAIN
from ..engine import Verdict
from .canvas import TokenCanvas
from .device_table import DeviceTable, FedRows
from .looks import last_guided_pass
from .sampling import Guidance
from .schedule import Schedule
from .schedule_table import ScheduleTable, schedule_table


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

    Only :meth:`move` moves windows and changes the tokens in them. The numbers ``start`` and ``stop`` are on the host,
    and the tokens are on the device.

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
        return _ranges(table.cell_start[begin], table.cell_start[end], padding=len(table.cells) - 1)

    @property
    def certain(self) -> int:
        """Number of passes that are certain in all images."""
        return int(self.start.min())

    @property
    def size(self) -> int:
        """Number of cells that the next call samples in all images together."""
        return int((self.table.cell_start[self.stop] - self.table.cell_start[self.start]).sum())

    def fed_rows(self, device_table: DeviceTable) -> tuple[FedRows, Tensor]:
        """The fed rows of the next call, and for each cell, the index of the row that predicts it, int64 [A, n]."""
        table = self.table
        index = _ranges(table.row_start[self.start], table.row_start[self.stop], padding=len(table.fed_cell) - 1)
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


def _ranges(begin: np.ndarray, end: np.ndarray, padding: int) -> np.ndarray:
    """For each image, the numbers from ``begin`` to ``end`` - 1, int64 [A, n]. ``begin``, ``end``: int64 [A]. n is the
    largest count of any image. For images with fewer numbers, ``padding`` follows.
    """
    numbers = begin[:, None] + np.arange((end - begin).max())
    return np.where(numbers < end[:, None], numbers, padding)


def _fill_with_newest(tokens: Tensor, cells: Tensor, newest: Tensor) -> None:
    """Set all ``cells`` of each image, int64 [A, n], to the image's ``newest`` token, int64 [A, 1]."""
    tokens.scatter_(1, cells, newest.expand(-1, cells.shape[1]))
