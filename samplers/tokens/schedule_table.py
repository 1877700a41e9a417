"""A schedule as arrays: the fed rows and the decided cells of all its passes, in the order of the passes.

``schedule.py`` describes a schedule pass by pass. The arrays hold the same facts for the whole schedule. A slice of an
array holds the facts of one pass or of several successive passes. The arrays are on the host and are computed once per
schedule. ``device_table.py`` copies them to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .schedule import FedRow, Schedule


@dataclass(frozen=True, eq=False, kw_only=True)
class ScheduleTable:
    """All fed rows and decided cells of a schedule, as int64 arrays.

    Shapes: together, P passes feed F rows and decide D of the L cells of the grid. The last entry of an array of fed
    rows or of cells is padding: a call uses this entry for images with fewer rows or cells than other images have.
    """

    passes: int  # P

    # For each fed row, [F + 1].
    fed_cell: np.ndarray  # cell whose token is fed; 0 for transition tokens and padding
    transition_token: np.ndarray  # index of the fed PAR transition token (par.py); -1 for cells and padding
    position: np.ndarray  # position at which the token is fed, see FedRow; 0 for padding
    last_visible: np.ndarray  # last place that the row attends to; -1 for padding
    row_pass: np.ndarray  # pass that feeds the row; 0 for padding

    # For each decided cell, [D + 1].
    cells: np.ndarray  # the cell; L for padding
    cell_row: np.ndarray  # index of the fed row that predicts the cell; 0 for padding
    cell_pass: np.ndarray  # pass that decides the cell; P for padding

    # For each pass, and for the end of the schedule, [P + 1]. Pass k feeds the rows row_start[k] to
    # row_start[k + 1] - 1, and decides the cells cell_start[k] to cell_start[k + 1] - 1.
    row_start: np.ndarray
    cell_start: np.ndarray


@lru_cache(maxsize=64)
def schedule_table(schedule: Schedule) -> ScheduleTable:
    """The table of a schedule."""
    passes = schedule.passes
    pass_indices = np.arange(len(passes))

    # 1. Fed rows, pass by pass, then padding.
    rows = [row for p in passes for row in p.fed_rows]
    rows.append(FedRow(position=0, place=0, last_visible=-1))
    rows_of_pass = [len(p.fed_rows) for p in passes]
    row_start = np.append(0, np.cumsum(rows_of_pass))

    # 2. Decided cells, pass by pass, and the index of the row that predicts each cell. predicted_by counts rows from
    #    the first row of the pass, but cell_row counts rows from the first row of the schedule.
    cells = [cell for p in passes for cell in p.cells]
    predicted_by = np.array([row for p in passes for row in p.predicted_by], np.int64)
    cells_of_pass = [len(p.cells) for p in passes]
    cell_start = np.append(0, np.cumsum(cells_of_pass))
    cell_row = predicted_by + np.repeat(row_start[:-1], cells_of_pass)

    return ScheduleTable(
        passes=len(passes),
        fed_cell=np.array([row.cell for row in rows]),
        transition_token=np.array([row.transition_token for row in rows]),
        position=np.array([row.position for row in rows]),
        last_visible=np.array([row.last_visible for row in rows]),
        row_pass=np.append(np.repeat(pass_indices, rows_of_pass), 0),
        cells=np.array([*cells, schedule.grid**2]),
        cell_row=np.append(cell_row, 0),
        cell_pass=np.append(np.repeat(pass_indices, cells_of_pass), len(passes)),
        row_start=row_start,
        cell_start=cell_start,
    )
